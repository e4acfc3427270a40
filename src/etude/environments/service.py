"""The environments service: pods over HTTP, in a process of its own (``python -m etude.environments.service``).

Routes (JSON, bearer key)::

    POST   /pods                    {"files", "limits", "key"}  -> {"id"}       idempotent by "key"
    POST   /pods/{id}/exec          {"command", "timeout"}      -> ExecResult
    POST   /pods/{id}/read          {"path"}                    -> {"content"}
    POST   /pods/{id}/write         {"files"}                   -> {}
    GET    /pods/{id}/files                                     -> {"paths"}
    POST   /pods/{id}/fork                                      -> {"id"}
    POST   /pods/{id}/snapshot                                  -> {"id"}
    POST   /snapshots/{id}/pods                                 -> {"id"}
    DELETE /pods/{id}                                           -> {}           returns at once
    GET    /health                                              -> counts

A pod lives on a lease: untouched for ``lease_seconds`` it is destroyed. Launchers die with this process, however it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.routing import Route

from etude.base.errors import EnvironmentFault, PathEscape, UserError
from etude.base.records import PodLimits
from etude.environments.namespaces import NamespaceBackend, NamespacePod, pack_files, probe

MAX_BODY = 64 << 20
KEY_VARIABLE = "ETUDE_ENVIRONMENTS_KEY"


@dataclass
class Lease:
    """One pod and when it was last used."""

    pod: NamespacePod
    touched: float = field(default_factory=time.monotonic)


class PodService:
    """State of the service: leases, snapshots, and the backend."""

    def __init__(self, backend: NamespaceBackend, *, lease_seconds: float, max_pods: int) -> None:
        self.backend, self.lease_seconds, self.max_pods = backend, lease_seconds, max_pods
        self.leases: dict[str, Lease] = {}
        self.snapshots: dict[str, tuple[bytes, PodLimits]] = {}
        self.by_key: dict[str, asyncio.Future[str]] = {}
        self.created = 0

    async def create(self, packed: bytes, limits: PodLimits, key: str | None = None) -> str:
        """Id of a new pod; the same ``key`` gives the same pod again."""
        if key is not None and key in self.by_key:
            return await asyncio.shield(self.by_key[key])
        if len(self.leases) >= self.max_pods:
            raise EnvironmentFault(
                f"{self.max_pods} pods are alive, which is the limit; destroy some or raise max_pods"
            )
        promise: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if key is not None:
            self.by_key[key] = promise
        try:
            pod = await self.backend.create(packed, limits)
        except BaseException as error:
            self.by_key.pop(key or "", None)
            promise.set_exception(error)
            promise.exception()  # it is raised here; nobody else may be waiting
            raise
        name = secrets.token_hex(8)
        self.leases[name] = Lease(pod)
        self.created += 1
        promise.set_result(name)
        return name

    def pod(self, name: str) -> NamespacePod:
        lease = self.leases.get(name)
        if lease is None:
            raise EnvironmentFault(f"no pod {name}: destroyed, or its lease of {self.lease_seconds:.0f}s ended")
        lease.touched = time.monotonic()
        return lease.pod

    def destroy(self, name: str) -> None:
        lease = self.leases.pop(name, None)
        if lease is not None:
            self.backend.destroy(lease.pod)
            for key in [key for key, promise in self.by_key.items() if promise.done() and promise.result() == name]:
                del self.by_key[key]

    async def sweep(self) -> None:
        """Forever: reap dead pods and end leases."""
        while True:
            self.backend.reap()
            now = time.monotonic()
            for name in [n for n, lease in self.leases.items() if now - lease.touched > self.lease_seconds]:
                self.destroy(name)
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Destroy everything; returns within about two seconds."""
        for name in list(self.leases):
            self.destroy(name)
        deadline = time.monotonic() + 2.0
        while self.backend.reap() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self.backend.close()


Handler = Callable[[PodService, Request, dict[str, Any]], Awaitable[dict[str, Any] | bytes]]


async def _create(service: PodService, request: Request, body: dict[str, Any]) -> dict[str, Any]:
    files = {str(path): str(text).encode() for path, text in body.get("files", {}).items()}
    limits = PodLimits.model_validate(body.get("limits") or {})
    return {"id": await service.create(pack_files(files), limits, body.get("key"))}


async def _exec(service: PodService, request: Request, body: dict[str, Any]) -> bytes:
    pod = service.pod(request.path_params["name"])
    result = await pod.exec(str(body["command"]), timeout=min(float(body.get("timeout", 20.0)), 3600.0))
    return orjson.dumps(result.model_dump())


async def _read(service: PodService, request: Request, body: dict[str, Any]) -> dict[str, Any]:
    return {"content": await service.pod(request.path_params["name"]).read(str(body["path"]))}


async def _write(service: PodService, request: Request, body: dict[str, Any]) -> dict[str, Any]:
    await service.pod(request.path_params["name"]).write({str(p): str(t) for p, t in body["files"].items()})
    return {}


async def _list(service: PodService, request: Request, body: dict[str, Any]) -> dict[str, Any]:
    return {"paths": await service.pod(request.path_params["name"]).list()}


async def _fork(service: PodService, request: Request, body: dict[str, Any]) -> dict[str, Any]:
    pod = service.pod(request.path_params["name"])
    return {"id": await service.create(await pod.dump(), pod.limits)}


async def _snapshot(service: PodService, request: Request, body: dict[str, Any]) -> dict[str, Any]:
    pod = service.pod(request.path_params["name"])
    name = secrets.token_hex(8)
    service.snapshots[name] = (await pod.dump(), pod.limits)
    return {"id": name}


async def _restore(service: PodService, request: Request, body: dict[str, Any]) -> dict[str, Any]:
    snapshot = service.snapshots.get(request.path_params["name"])
    if snapshot is None:
        raise EnvironmentFault(f"no snapshot {request.path_params['name']}")
    return {"id": await service.create(*snapshot)}


async def _destroy(service: PodService, request: Request, body: dict[str, Any]) -> dict[str, Any]:
    service.destroy(request.path_params["name"])
    return {}


async def _health(service: PodService, request: Request, body: dict[str, Any]) -> dict[str, Any]:
    return {"pods": len(service.leases), "created": service.created, "snapshots": len(service.snapshots)}


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/pods", _create),
    ("POST", "/pods/{name}/exec", _exec),
    ("POST", "/pods/{name}/read", _read),
    ("POST", "/pods/{name}/write", _write),
    ("GET", "/pods/{name}/files", _list),
    ("POST", "/pods/{name}/fork", _fork),
    ("POST", "/pods/{name}/snapshot", _snapshot),
    ("POST", "/snapshots/{name}/pods", _restore),
    ("DELETE", "/pods/{name}", _destroy),
    ("GET", "/health", _health),
)


def _endpoint(service: PodService, key: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Authentication, body limit and the one place where errors become answers."""
    expected = f"Bearer {key}".encode()

    async def serve(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if not secrets.compare_digest(given, expected):
            return _error(401, "unauthorized", "missing or wrong key")
        if int(request.headers.get("content-length") or 0) > MAX_BODY:
            return _error(413, "too_large", f"body above {MAX_BODY} bytes")
        try:
            raw = await request.body()
            body = orjson.loads(raw) if raw else {}
            answer = await handler(service, request, body)
        except PathEscape as error:
            return _error(422, "path", str(error))
        except EnvironmentFault as error:
            return _error(503, "fault", str(error))
        except (KeyError, ValueError, TypeError, AttributeError, ValidationError) as error:
            return _error(400, "bad_request", f"{type(error).__name__}: {error}"[:300])
        return Response(answer if isinstance(answer, bytes) else orjson.dumps(answer), media_type="application/json")

    return serve


def _error(status: int, kind: str, message: str) -> Response:
    return Response(orjson.dumps({"error": {"kind": kind, "message": message}}), status, media_type="application/json")


def create_app(key: str, *, lease_seconds: float = 300.0, max_pods: int = 512) -> FastAPI:
    """The application; its pods live as long as its lifespan. Raises UserError where pods cannot start."""
    service = PodService(NamespaceBackend(), lease_seconds=lease_seconds, max_pods=max_pods)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await probe(service.backend)
        sweeper = asyncio.create_task(service.sweep())
        yield
        sweeper.cancel()
        await service.close()

    app = FastAPI(title="Etude environments", lifespan=lifespan)
    for method, path, handler in ROUTES:
        app.router.routes.append(Route(path, _endpoint(service, key, handler), methods=[method]))
    return app


def main() -> int:
    """Serve on the port given as the only argument; the key comes from the environment."""
    port, key = int(sys.argv[1]), os.environ.pop(KEY_VARIABLE, "")
    if not key:
        print(f"error: set {KEY_VARIABLE}", file=sys.stderr)  # noqa: T201
        return 2
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        app = create_app(key)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    uvicorn.run(
        app, host="127.0.0.1", port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=1,
        loop="uvloop", http="httptools",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
