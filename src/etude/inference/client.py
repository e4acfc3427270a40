"""Python client of an inference server; implements ``Sampler``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import orjson

from etude.base.errors import InferenceFault, WeightSyncError
from etude.base.records import Completion, PolicyVersion, SamplingParams


class InferenceClient:
    """One pooled connection to a server. ``timeout`` bounds every call."""

    def __init__(self, base_url: str, key: str, *, timeout: float = 120.0) -> None:
        self.base_url, self.timeout = base_url, timeout
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(
            base_url=base_url, headers={"authorization": f"Bearer {key}"}, limits=limits, timeout=timeout
        )

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, *, session: str, experts_start: int = 0
    ) -> Completion:
        """See ``Sampler``. Raises InferenceFault."""
        body = {
            "tokens": list(tokens),
            "params": params.model_dump(),
            "session": session,
            "experts_start": experts_start,
        }
        return Completion.model_validate_json(await self._call("POST", "/v1/tokens/generate", body))

    async def close_session(self, session: str) -> None:
        try:
            await self._call("POST", "/v1/sessions/close", {"session": session})
        except InferenceFault:
            return  # its slot is reused in any case

    async def update_weights(self, version: PolicyVersion) -> str:
        """Make the server pull and serve ``version``; returns the content hash of what it then holds.

        Raises WeightSyncError when it refused (it keeps what it had), InferenceFault when it could not be asked.
        """
        answer: dict[str, Any] = orjson.loads(await self._call("POST", "/v1/weights/update", {"version": version}))
        return str(answer["content_hash"])

    async def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = orjson.loads(await self._call("GET", "/health"))
        return answer

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        try:
            response = await self._http.request(method, path, content=orjson.dumps(body) if body is not None else None)
        except httpx.TimeoutException:
            raise InferenceFault(
                f"inference at {self.base_url} gave no answer to {method} {path} in {self.timeout:.0f}s"
            ) from None
        except httpx.HTTPError as error:
            raise InferenceFault(f"inference at {self.base_url}: {type(error).__name__}: {error}") from None
        if response.status_code == 200:
            return response.content
        try:
            problem = orjson.loads(response.content)["error"]
        except (ValueError, KeyError):
            problem = {"type": "inference", "message": response.text[:200]}
        kind = WeightSyncError if problem["type"] == "weights" else InferenceFault
        raise kind(f"inference: {problem['message']}")
