"""The inference service: one engine over HTTP, in a process of its own (``python -m etude.inference.server CONFIG_JSON``).

Routes (bearer key; JSON)::

    POST /v1/tokens/generate      {"tokens", SamplingParams fields, "session", "experts_start"} -> Completion
    POST /v1/sessions/{id}/close  -> {}
    POST /v1/weights/update       {"version"} -> {"version", "content_hash"}   pulled from the object store, swapped in flight
    POST /v1/chat/completions, /v1/completions; GET /v1/models                 OpenAI-compatible, streaming too
    GET  /health                  version, content hash, load

Errors have the form of OpenAI's API: ``{"error": {"type", "message", "param", "code"}}``. A client that goes away cancels what it
asked for; a request that passes its deadline is cancelled and answered with 504.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import orjson
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from etude.base.errors import (
    CheckpointError,
    DeadlineExceeded,
    EtudeError,
    InferenceFault,
    UserError,
    WeightSyncError,
)
from etude.base.records import SamplingParams
from etude.inference.openai import OpenAIServer
from etude.inference.openai_bodies import ChatBody, CompletionBody
from etude.inference.service import InferenceService, ServerConfig

KEY_VARIABLE = "ETUDE_INFERENCE_KEY"
SAMPLING_FIELDS = frozenset(SamplingParams.model_fields)

Body = dict[str, Any]
Handler = Callable[[InferenceService, Request, Body], Awaitable[Response]]


async def _generate(service: InferenceService, request: Request, body: Body) -> Response:
    result = await service.loop.generate(
        body["tokens"],
        SamplingParams.model_validate({name: body[name] for name in body.keys() & SAMPLING_FIELDS}),
        session=str(body["session"]),
        experts_start=int(body.get("experts_start", 0)),
        deadline=service.config.deadline_seconds,
    )
    return Response(result.to_json(), media_type="application/json")


async def _close(service: InferenceService, request: Request, body: Body) -> Response:
    service.loop.close_session(request.path_params["session"])
    return _json({})


async def _update(service: InferenceService, request: Request, body: Body) -> Response:
    return _json(await service.update(int(body["version"])))


async def _chat(service: InferenceService, request: Request, body: Body) -> Response:
    parsed = ChatBody.model_validate(body)
    if parsed.stream:
        return _events(await OpenAIServer(service).stream_chat(parsed))
    return _json(await OpenAIServer(service).chat(parsed))


async def _complete(service: InferenceService, request: Request, body: Body) -> Response:
    parsed = CompletionBody.model_validate(body)
    if parsed.stream:
        return _events(await OpenAIServer(service).stream_completion(parsed))
    return _json(await OpenAIServer(service).complete(parsed))


async def _models(service: InferenceService, request: Request, body: Body) -> Response:
    model = {"id": service.model_name, "object": "model", "created": 0, "owned_by": "etude"}
    return _json({"object": "list", "data": [model]})


async def _health(service: InferenceService, request: Request, body: Body) -> Response:
    return _json(service.health())


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/tokens/generate", _generate),
    ("POST", "/v1/sessions/{session:path}/close", _close),
    ("POST", "/v1/weights/update", _update),
    ("POST", "/v1/chat/completions", _chat),
    ("POST", "/v1/completions", _complete),
    ("GET", "/v1/models", _models),
    ("GET", "/health", _health),
)


def _endpoint(service: InferenceService, key: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Authentication, body limit, disconnects, and the one place where errors become answers."""
    expected = f"Bearer {key}".encode()

    async def serve(request: Request) -> Response:
        if key and not secrets.compare_digest(request.headers.get("authorization", "").encode(), expected):
            return _error(401, "authentication_error", "missing or wrong key")
        try:
            raw = await _read(request, service.config.max_body_bytes)
            if raw is None:
                return _error(413, "too_large", f"the body is above {service.config.max_body_bytes} bytes")
            body = orjson.loads(raw) if raw else {}
            if not isinstance(body, dict):
                return _error(400, "invalid_request_error", "the body must be a JSON object")
            return await _unless_gone(request, handler(service, request, body))
        except Exception as error:
            return _answer(error)

    return serve


def _answer(error: Exception) -> Response:
    """The answer to an error. Anything unexpected is raised again (the server logs it and answers 500)."""
    if isinstance(error, WeightSyncError | CheckpointError):
        return _error(409, "weights", str(error))
    if isinstance(error, DeadlineExceeded):
        return _error(504, "deadline", str(error))
    if isinstance(error, InferenceFault):
        alive = "not running" not in str(error)
        return _error(400, "invalid_request_error", str(error)) if alive else _error(503, "engine", str(error))
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        param = ".".join(map(str, problem["loc"]))
        return _error(400, "invalid_request_error", f"{param or 'body'}: {problem['msg']}", param)
    if isinstance(error, KeyError):
        return _error(400, "invalid_request_error", f"{error.args[0]}: missing", str(error.args[0]))
    if isinstance(error, ValueError | TypeError):
        return _error(400, "invalid_request_error", f"{type(error).__name__}: {error}"[:300])
    raise error


async def _read(request: Request, limit: int) -> bytes | None:
    """The body, or None when it is longer than ``limit`` (whatever its header says)."""
    if int(request.headers.get("content-length") or 0) > limit:
        return None
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
    return b"".join(parts)


async def _unless_gone(request: Request, work: Awaitable[Response]) -> Response:
    """The result of ``work``, which is cancelled when the client goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    except ClientDisconnect:
        return Response(status_code=499)
    finally:
        gone.cancel()
        task.cancel()


def _json(value: Body) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _events(chunks: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(chunks, media_type="text/event-stream", headers={"cache-control": "no-cache"})


def _error(status: int, kind: str, message: str, param: str | None = None) -> Response:
    error = {"type": kind, "message": message, "param": param, "code": status}
    return Response(orjson.dumps({"error": error}), status, media_type="application/json")


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "no such route" if status == 404 else "method not allowed"
    return _error(status, "invalid_request_error", f"{request.method} {request.url.path}: {what}")


def create_app(config: ServerConfig, key: str) -> Starlette:
    """The application; without a key everybody may ask. Raises CheckpointError."""
    service = InferenceService(config)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.loop.start()
        yield
        await asyncio.to_thread(service.loop.stop)

    routes = [Route(path, _endpoint(service, key, handler), methods=[method]) for method, path, handler in ROUTES]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: _no_route, 405: _no_route})


def serve(config: ServerConfig, key: str = "", *, listening: socket.socket | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then answer what runs (for at most two seconds) and return.

    ``listening`` is a bound socket to serve on instead of host and port. Raises UserError when the port is in use,
    CheckpointError for the checkpoint.
    """
    bound = listening or _bind(config.host, config.port)
    try:
        app = create_app(config, key)
    except BaseException:
        bound.close()
        raise
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, loop="uvloop", http="httptools",
        timeout_keep_alive=75, backlog=2048,
    )  # fmt: skip
    gc.freeze()  # the model and all modules live as long as the process: no use in searching them again and again
    with _signals_end_it():
        uvicorn.Server(settings).run(sockets=[bound])


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise UserError(
            f"port {port} on {host} cannot be used ({error.strerror}); choose another with port=..."
        ) from None
    return bound


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """uvicorn stops on the signals and then raises them again; here stopping is all they should do."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: list[str]) -> int:
    """Serve the ServerConfig given as JSON, on the descriptor of a listening socket when one is given too."""
    listening = socket.socket(fileno=int(arguments[1])) if len(arguments) > 1 else None
    try:
        serve(ServerConfig.model_validate_json(arguments[0]), os.environ.pop(KEY_VARIABLE, ""), listening=listening)
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except ValidationError as error:
        problem = error.errors()[0]
        print(f"error: {'.'.join(map(str, problem['loc']))}: {problem['msg']}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
