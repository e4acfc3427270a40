"""Python client of the environments service; implements ``PodFactory`` and ``Pod``."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

import orjson

from etude.base.errors import EnvironmentFault, PathEscape
from etude.base.http import Transport
from etude.base.records import ExecResult, PodLimits


class EnvironmentsClient:
    """Pooled connections to a service. ``timeout`` bounds every call (exec: on top of the command's own)."""

    def __init__(self, base_url: str, key: str, *, timeout: float = 60.0) -> None:
        self.base_url, self.timeout = base_url, timeout
        self._http = Transport(base_url, {"authorization": f"Bearer {key}", "content-type": "application/json"})

    async def create(self, files: Mapping[str, str], limits: PodLimits | None = None) -> RemotePod:
        """A new pod. Raises EnvironmentFault, PathEscape."""
        body = {"files": dict(files), "limits": limits.model_dump() if limits else None, "key": secrets.token_hex(8)}
        return RemotePod(self, (await self.call("POST", "/pods", body))["id"])

    async def restore(self, snapshot: str) -> RemotePod:
        """A new pod with the files of a snapshot."""
        return RemotePod(self, (await self.call("POST", f"/snapshots/{snapshot}/pods", {}))["id"])

    async def forget(self, snapshot: str) -> None:
        """Delete a snapshot. No error when it is gone."""
        await self.call("DELETE", f"/snapshots/{snapshot}")

    async def health(self) -> dict[str, Any]:
        return await self.call("GET", "/health")

    async def close(self) -> None:
        self._http.close()

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, extra_seconds: float = 0.0
    ) -> dict[str, Any]:
        """One request; every failure of the service becomes EnvironmentFault."""
        seconds = self.timeout + extra_seconds
        try:
            async with asyncio.timeout(seconds):
                answer = await self._http.request(method, path, _encode(body))
        except TimeoutError:
            raise EnvironmentFault(
                f"environments at {self.base_url} gave no answer to {method} {path} in {seconds:.0f}s"
            ) from None
        except OSError as error:
            raise EnvironmentFault(f"environments at {self.base_url}: {type(error).__name__}: {error}") from None
        if answer.status == 200:
            result: dict[str, Any] = orjson.loads(answer.body)
            return result
        try:
            problem = orjson.loads(answer.body)["error"]
        except (ValueError, KeyError):
            problem = {"kind": "fault", "message": answer.body[:200].decode(errors="replace")}
        if problem["kind"] == "path":
            raise PathEscape(problem["message"])
        raise EnvironmentFault(f"environments: {problem['message']}")


class RemotePod:
    """A pod of the service."""

    def __init__(self, client: EnvironmentsClient, name: str) -> None:
        self.client, self.name = client, name
        self._destroyed = False

    async def exec(self, command: str, *, timeout: float = 20.0) -> ExecResult:
        body = {"command": command, "timeout": timeout}
        answer = await self.client.call("POST", f"/pods/{self.name}/exec", body, extra_seconds=timeout)
        return ExecResult.model_validate(answer)

    async def read(self, path: str) -> str | None:
        content: str | None = (await self.client.call("POST", f"/pods/{self.name}/read", {"path": path}))["content"]
        return content

    async def write(self, files: Mapping[str, str]) -> None:
        await self.client.call("POST", f"/pods/{self.name}/write", {"files": dict(files)})

    async def list(self) -> list[str]:
        paths: list[str] = (await self.client.call("GET", f"/pods/{self.name}/files"))["paths"]
        return paths

    async def fork(self) -> RemotePod:
        body = {"key": secrets.token_hex(8)}
        return RemotePod(self.client, (await self.client.call("POST", f"/pods/{self.name}/fork", body))["id"])

    async def snapshot(self) -> str:
        """Id of a snapshot of the workspace, kept by the service."""
        name: str = (await self.client.call("POST", f"/pods/{self.name}/snapshot", {}))["id"]
        return name

    async def destroy(self) -> None:
        if self._destroyed:
            return
        self._destroyed = True
        try:
            await self.client.call("DELETE", f"/pods/{self.name}")
        except EnvironmentFault:
            return  # the service ends its lease, or is gone together with the pod


def _encode(body: Mapping[str, Any] | None) -> bytes:
    """JSON. Half characters (lone surrogates, which a model can write as an escape) become question marks."""
    if body is None:
        return b""
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:
        return orjson.dumps(_whole(body))


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {_whole(key): _whole(item) for key, item in value.items()}
    return value
