"""The environments service: pods over HTTP, in a process of its own.

Routes (JSON, bearer key)::

    POST   /pods                    {"files", "limits", "key"}  -> {"id"}       idempotent by "key"
    POST   /pods/{id}/exec          {"command", "timeout"}      -> ExecResult
    POST   /pods/{id}/read          {"path"}                    -> {"content"}
    POST   /pods/{id}/write         {"files"}                   -> {}
    GET    /pods/{id}/files                                     -> {"paths"}
    POST   /pods/{id}/fork                                      -> {"id"}
    POST   /pods/{id}/snapshot                                  -> {"id"}
    POST   /snapshots/{id}/pods                                 -> {"id"}
    DELETE /snapshots/{id}                                      -> {}
    DELETE /pods/{id}                                           -> {}           returns at once
    GET    /health                                              -> counts, bounds

A pod lives on a lease (:mod:`etude.environments.leases`). Launchers die with this process, however it dies.

Start it with :func:`etude.environments.process.start_service`, or by hand: ``python -m etude.environments.service CONFIG [FD]``
where CONFIG is a port or an EnvironmentsConfig as JSON, and FD a listening socket that was inherited. The key comes from the
variable ETUDE_ENVIRONMENTS_KEY. Exit code 2 and one line where it cannot start.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import orjson
import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.routing import Route

from etude.base.config import resolve
from etude.base.errors import EnvironmentFault, PathEscape, UserError
from etude.base.records import PodLimits
from etude.environments.config import EnvironmentsConfig
from etude.environments.leases import PodService
from etude.environments.namespaces import NamespaceBackend, probe
from etude.environments.pods import pack_files

KEY_VARIABLE = "ETUDE_ENVIRONMENTS_KEY"
MAX_EXEC_SECONDS = 3600.0

Handler = Callable[[PodService, str, dict[str, Any]], Awaitable[dict[str, Any] | bytes]]
"""Takes the service, the name in the path ("" where there is none) and the body."""


async def _create(service: PodService, name: str, body: dict[str, Any]) -> dict[str, Any]:
    files = {str(path): str(text).encode() for path, text in body.get("files", {}).items()}
    limits = PodLimits.model_validate(body.get("limits") or {})
    return {"id": await service.create(pack_files(files), limits, body.get("key"))}


async def _exec(service: PodService, name: str, body: dict[str, Any]) -> bytes:
    timeout = float(body.get("timeout", 20.0))
    if not 0 < timeout <= MAX_EXEC_SECONDS:
        raise ValueError(f"timeout {timeout}: expected seconds in (0, {MAX_EXEC_SECONDS:.0f}]")
    with service.use(name) as pod:
        result = await pod.exec(str(body["command"]), timeout=timeout)
    return orjson.dumps(result.model_dump())


async def _read(service: PodService, name: str, body: dict[str, Any]) -> dict[str, Any]:
    with service.use(name) as pod:
        return {"content": await pod.read(str(body["path"]))}


async def _write(service: PodService, name: str, body: dict[str, Any]) -> dict[str, Any]:
    with service.use(name) as pod:
        await pod.write({str(p): str(t) for p, t in body["files"].items()})
    return {}


async def _list(service: PodService, name: str, body: dict[str, Any]) -> dict[str, Any]:
    with service.use(name) as pod:
        return {"paths": await pod.list()}


async def _fork(service: PodService, name: str, body: dict[str, Any]) -> dict[str, Any]:
    with service.use(name) as pod:
        return {"id": await service.create(await pod.dump(), pod.limits, body.get("key"))}


async def _snapshot(service: PodService, name: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"id": await service.snapshot(name)}


async def _restore(service: PodService, name: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"id": await service.restore(name)}


async def _forget(service: PodService, name: str, body: dict[str, Any]) -> dict[str, Any]:
    service.forget(name)
    return {}


async def _destroy(service: PodService, name: str, body: dict[str, Any]) -> dict[str, Any]:
    service.destroy(name)
    return {}


async def _health(service: PodService, name: str, body: dict[str, Any]) -> dict[str, Any]:
    return service.health()


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/pods", _create),
    ("POST", "/pods/{name}/exec", _exec),
    ("POST", "/pods/{name}/read", _read),
    ("POST", "/pods/{name}/write", _write),
    ("GET", "/pods/{name}/files", _list),
    ("POST", "/pods/{name}/fork", _fork),
    ("POST", "/pods/{name}/snapshot", _snapshot),
    ("POST", "/snapshots/{name}/pods", _restore),
    ("DELETE", "/snapshots/{name}", _forget),
    ("DELETE", "/pods/{name}", _destroy),
    ("GET", "/health", _health),
)


def _endpoint(service: PodService, key: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Authentication, body limit and the one place where errors become answers."""
    expected = f"Bearer {key}".encode()
    most = service.config.max_body_mb << 20

    async def serve(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if not secrets.compare_digest(given, expected):
            return _error(401, "unauthorized", "missing or wrong key")
        try:
            raw = await _body(request, most)
            if raw is None:
                return _error(413, "too_large", f"body above {most} bytes")
            body = orjson.loads(raw) if raw else {}
            answer = await handler(service, request.path_params.get("name", ""), body)
        except PathEscape as error:
            return _error(422, "path", str(error))
        except EnvironmentFault as error:
            return _error(503, "fault", str(error))
        except (KeyError, ValueError, TypeError, AttributeError, ValidationError) as error:
            return _error(400, "bad_request", f"{type(error).__name__}: {error}"[:300])
        return Response(answer if isinstance(answer, bytes) else orjson.dumps(answer), media_type="application/json")

    return serve


async def _body(request: Request, most: int) -> bytes | None:
    """The body, or None when it is larger than ``most``, also when no length was announced."""
    if int(request.headers.get("content-length") or 0) > most:
        return None
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            return None
        parts.append(part)
    return b"".join(parts)


def _error(status: int, kind: str, message: str) -> Response:
    return Response(orjson.dumps({"error": {"kind": kind, "message": message}}), status, media_type="application/json")


def create_app(service: PodService, key: str) -> FastAPI:
    """The application; the service's pods live as long as its lifespan."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(service.sweep())
        yield
        sweeper.cancel()
        await service.close()

    app = FastAPI(title="Etude environments", lifespan=lifespan)
    for method, path, handler in ROUTES:
        app.router.routes.append(Route(path, _endpoint(service, key, handler), methods=[method]))
    return app


async def serve(config: EnvironmentsConfig, key: str, listening: socket.socket) -> None:
    """Probe, then serve on a bound socket until SIGTERM or SIGINT. Raises UserError where pods cannot start."""
    backend = NamespaceBackend()
    try:
        await probe(backend)
    except UserError:
        backend.close()
        raise
    app = create_app(PodService(backend, config), key)
    gc.freeze()  # modules live as long as the process: no use in searching them again and again
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, http="httptools", lifespan="on"
    )
    await uvicorn.Server(settings).serve(sockets=[listening])


def listen(config: EnvironmentsConfig) -> socket.socket:
    """A bound socket. Raises UserError when the port is in use."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((config.host, config.port))
    except OSError as error:
        listening.close()
        raise UserError(
            f"environments service: cannot listen on {config.host} port {config.port}: {error.strerror}; choose another port"
        ) from None
    return listening


def main(arguments: Sequence[str]) -> int:
    """See the head of this file."""
    try:
        if not 1 <= len(arguments) <= 2:
            raise UserError("usage: python -m etude.environments.service CONFIG [FD]")
        data = {"port": int(arguments[0])} if arguments[0].isdigit() else orjson.loads(arguments[0])
        config = resolve(EnvironmentsConfig, data, source="environments service")
        key = os.environ.pop(KEY_VARIABLE, "")
        if not key:
            raise UserError(f"environments service: set {KEY_VARIABLE}")
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with socket.socket(fileno=int(arguments[1])) if len(arguments) == 2 else listen(config) as listening:
            uvloop.run(serve(config, key, listening))
    except orjson.JSONDecodeError as error:
        print(f"error: environments service: CONFIG is neither a port nor JSON: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
