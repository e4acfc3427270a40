"""Python client of an inference server; implements ``Sampler``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import orjson
from pydantic import ValidationError

from etude.base.errors import InferenceFault, WeightSyncError
from etude.base.http import Transport
from etude.base.records import Completion, PolicyVersion, SamplingParams


class InferenceClient:
    """One pooled connection to a server. ``timeout`` (seconds) bounds every call."""

    def __init__(self, base_url: str, key: str, *, timeout: float = 120.0) -> None:
        self.base_url, self.timeout = base_url, timeout
        self.last_version: PolicyVersion | None = None
        """Policy version of the last token that this client received."""
        self._http = Transport(base_url, {"authorization": f"Bearer {key}", "content-type": "application/json"})

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, *, session: str, experts_start: int = 0
    ) -> Completion:
        """See ``Sampler``. Raises InferenceFault, also when the server's deadline or this client's passes."""
        body = {
            "tokens": list(tokens),
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "stop_token_ids": params.stop_token_ids,
            "seed": params.seed,
            "session": session,
            "experts_start": experts_start,
        }
        answer = _loads(await self._call("POST", "/v1/tokens/generate", body))
        try:
            completion = Completion.model_validate(answer)
        except ValidationError as error:  # a logprob that is not a number, for one
            raise InferenceFault(f"inference: the answer is not a completion: {error.errors()[0]}") from None
        if completion.versions:
            self.last_version = completion.versions[-1]
        return completion

    async def close_session(self, session: str) -> None:
        try:
            await self._call("POST", f"/v1/sessions/{quote(session, safe='')}/close", {})
        except InferenceFault:
            return  # its slot is reused in any case

    async def update_weights(self, version: PolicyVersion) -> str:
        """Make the server pull and serve ``version``; returns the content hash of what it then holds.

        Raises WeightSyncError when it refused (it keeps what it had), InferenceFault when it could not be asked.
        """
        answer: dict[str, Any] = _loads(await self._call("POST", "/v1/weights/update", {"version": version}))
        return str(answer["content_hash"])

    async def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = _loads(await self._call("GET", "/health"))
        return answer

    async def close(self) -> None:
        self._http.close()

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        try:
            async with asyncio.timeout(self.timeout):
                answer = await self._http.request(method, path, b"" if body is None else orjson.dumps(body))
        except TimeoutError:
            raise InferenceFault(
                f"inference at {self.base_url} gave no answer to {path} within the deadline of {self.timeout:.0f}s "
                f"(policy version {self.last_version})"
            ) from None
        except OSError as error:
            raise InferenceFault(f"inference at {self.base_url}: {type(error).__name__}: {error}") from None
        if answer.status == 200:
            return answer.body
        kind, message = "inference", f"status {answer.status}: {answer.body[:200].decode(errors='replace')}"
        with contextlib.suppress(ValueError, KeyError, TypeError):
            problem = orjson.loads(answer.body)["error"]
            kind, message = str(problem["type"]), str(problem["message"])
        raise (WeightSyncError if kind == "weights" else InferenceFault)(f"inference: {message}")


def _loads(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except ValueError:
        raise InferenceFault(f"inference: the answer is not JSON: {content[:100]!r}") from None
