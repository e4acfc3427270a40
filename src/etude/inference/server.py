"""The inference service: one engine over HTTP, in a process of its own (``python -m etude.inference.server``).

Routes (bearer key; JSON)::

    POST /v1/tokens/generate      {"tokens", "params", "session", "experts_start"} -> Completion
    POST /v1/sessions/close       {"session"}
    POST /v1/weights/update       {"version"} -> {"version", "content_hash"}   pulled from the object store, swapped in flight
    POST /v1/chat/completions, /v1/completions; GET /v1/models                 OpenAI-compatible
    GET  /health                  version, content hash, load
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field, ValidationError
from starlette.routing import Route
from torch import Tensor

from etude.base.config import Config
from etude.base.errors import CheckpointError, EtudeError, InferenceFault, UserError, WeightSyncError
from etude.base.records import SamplingParams
from etude.data.chat import ChatCodec
from etude.data.tokenizer import load_tokenizer
from etude.inference.engine import Engine, EngineConfig
from etude.inference.loop import EngineLoop
from etude.inference.openai import ChatBody, CompletionBody, OpenAIServer
from etude.models.checkpoint import export_state, load_checkpoint
from etude.weights.content import content_hash
from etude.weights.store import Store
from etude.weights.subscriber import WeightSubscriber

KEY_VARIABLE = "ETUDE_INFERENCE_KEY"


class ServerConfig(Config):
    """What one inference server serves."""

    checkpoint: str
    """Hugging Face directory: shape, tokenizer and first weights."""
    store: str = ""
    """Object store (folder or URL) that weight updates are pulled from; empty refuses updates."""
    host: str = "127.0.0.1"
    port: int = Field(8100, ge=1, le=65535)
    engine: EngineConfig = EngineConfig()
    tools: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Tool name -> argument names, for the chat endpoint's tool calls."""
    deadline_seconds: float = Field(120.0, gt=0)
    """Bound of one request."""
    max_body_bytes: int = 8 << 20


class InferenceService:
    """State of the service."""

    def __init__(self, config: ServerConfig) -> None:
        directory = Path(config.checkpoint)
        self.config = config
        model = load_checkpoint(directory)
        self.codec = ChatCodec(load_tokenizer(directory), config.tools)
        self.loop = EngineLoop(Engine(model, config.engine))
        self.openai = OpenAIServer(self.loop, self.codec, directory.name)
        self.subscriber = WeightSubscriber(Store(config.store)) if config.store else None
        self._held: tuple[int, dict[str, Tensor]] | None = None
        self.content_hash = content_hash(export_state(model))
        self._updating = asyncio.Lock()

    async def update(self, version: int) -> dict[str, Any]:
        """Pull, verify and swap in a version; the one that is served stays when anything is wrong."""
        if self.subscriber is None:
            raise WeightSyncError("this server has no object store; start it with store=...")
        async with self._updating:
            state = await asyncio.to_thread(self.subscriber.fetch, version, self._held)
            await self.loop.swap(state, version)
            self._held = (version, state)
            self.content_hash = await asyncio.to_thread(content_hash, state)
        return {"version": version, "content_hash": self.content_hash}

    def health(self) -> dict[str, Any]:
        return {
            "version": self.loop.engine.version,
            "content_hash": self.content_hash,
            "swap_pause_seconds": self.loop.pause_seconds,
            **self.loop.engine.load,
        }


Handler = Callable[[InferenceService, dict[str, Any]], Awaitable[Response]]


async def _generate(service: InferenceService, body: dict[str, Any]) -> Response:
    completion = await service.loop.generate(
        body["tokens"],
        SamplingParams.model_validate(body["params"]),
        session=str(body["session"]),
        experts_start=int(body.get("experts_start", 0)),
        deadline=service.config.deadline_seconds,
    )
    return Response(completion.model_dump_json(), media_type="application/json")


async def _close(service: InferenceService, body: dict[str, Any]) -> Response:
    service.loop.close_session(str(body["session"]))
    return _json({})


async def _update(service: InferenceService, body: dict[str, Any]) -> Response:
    return _json(await service.update(int(body["version"])))


async def _chat(service: InferenceService, body: dict[str, Any]) -> Response:
    parsed = ChatBody.model_validate(body)
    deadline = service.config.deadline_seconds
    if parsed.stream:
        return StreamingResponse(service.openai.stream(parsed, deadline), media_type="text/event-stream")
    return _json(await service.openai.chat(parsed, deadline))


async def _complete(service: InferenceService, body: dict[str, Any]) -> Response:
    return _json(await service.openai.complete(CompletionBody.model_validate(body), service.config.deadline_seconds))


async def _models(service: InferenceService, body: dict[str, Any]) -> Response:
    model = {"id": service.openai.model_name, "object": "model", "created": 0, "owned_by": "etude"}
    return _json({"object": "list", "data": [model]})


async def _health(service: InferenceService, body: dict[str, Any]) -> Response:
    return _json(service.health())


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/tokens/generate", _generate),
    ("POST", "/v1/sessions/close", _close),
    ("POST", "/v1/weights/update", _update),
    ("POST", "/v1/chat/completions", _chat),
    ("POST", "/v1/completions", _complete),
    ("GET", "/v1/models", _models),
    ("GET", "/health", _health),
)


def _endpoint(service: InferenceService, key: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Authentication, body limit and the one place where errors become answers."""
    expected = f"Bearer {key}".encode()

    async def serve(request: Request) -> Response:
        if key and not secrets.compare_digest(request.headers.get("authorization", "").encode(), expected):
            return _error(401, "unauthorized", "missing or wrong key")
        if int(request.headers.get("content-length") or 0) > service.config.max_body_bytes:
            return _error(413, "too_large", f"body above {service.config.max_body_bytes} bytes")
        try:
            raw = await request.body()
            body = orjson.loads(raw) if raw else {}
            if not isinstance(body, dict):
                return _error(400, "invalid_request_error", "the body must be a JSON object")
            return await handler(service, body)
        except (WeightSyncError, CheckpointError) as error:
            return _error(409, "weights", str(error))
        except InferenceFault as error:
            return _error(503 if "no completion" in str(error) else 400, "inference", str(error))
        except ValidationError as error:
            problem = error.errors()[0]
            return _error(400, "invalid_request_error", f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}")
        except (KeyError, ValueError, TypeError) as error:
            return _error(400, "invalid_request_error", f"{type(error).__name__}: {error}"[:300])

    return serve


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _error(status: int, kind: str, message: str) -> Response:
    return Response(
        orjson.dumps({"error": {"type": kind, "message": message, "code": status}}), status, media_type="application/json"
    )


def create_app(config: ServerConfig, key: str) -> FastAPI:
    """The application. Raises CheckpointError."""
    service = InferenceService(config)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.loop.start()
        yield
        service.loop.stop()

    app = FastAPI(title="Etude inference", lifespan=lifespan)
    for method, path, handler in ROUTES:
        app.router.routes.append(Route(path, _endpoint(service, key, handler), methods=[method]))
    return app


def serve(config: ServerConfig, key: str = "") -> None:
    """Serve until stopped. Raises UserError when the port is in use, CheckpointError for the checkpoint."""
    app = create_app(config, key)
    server = uvicorn.Server(
        uvicorn.Config(
            app, host=config.host, port=config.port, log_level="warning", access_log=False, timeout_graceful_shutdown=1,
            loop="uvloop", http="httptools",
        )
    )  # fmt: skip
    try:
        server.run()
    except SystemExit:
        raise UserError(f"port {config.port} on {config.host} is in use; choose another with port=...") from None


def main() -> int:
    """Serve the ServerConfig given as JSON in the only argument; the key comes from the environment."""
    try:
        serve(ServerConfig.model_validate_json(sys.argv[1]), os.environ.pop(KEY_VARIABLE, ""))
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
