"""State of one inference server: the engine on its thread, the codec of its tokenizer, and the weights it holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from etude.base.config import Config
from etude.base.errors import InferenceFault, WeightSyncError, deadline_exceeded
from etude.base.records import PolicyVersion
from etude.data.chat import ChatCodec
from etude.data.tokenizer import load_tokenizer
from etude.inference.engine import Engine, EngineConfig
from etude.inference.loop import EngineLoop
from etude.models.checkpoint import export_state, load_checkpoint
from etude.weights.content import content_hash
from etude.weights.store import Store
from etude.weights.subscriber import WeightSubscriber


class ServerConfig(Config):
    """What one inference server serves."""

    checkpoint: str
    """Hugging Face directory: shape, tokenizer and first weights."""
    version: int = Field(0, ge=0)
    """Policy version of those weights."""
    store: str = ""
    """Object store (folder or URL) that weight updates are pulled from; empty refuses updates."""
    subscriber: str = ""
    """Name under which this server registers the versions it needs, so that garbage collection keeps them; empty registers
    nothing and never writes to the store."""
    host: str = "127.0.0.1"
    port: int = Field(8100, ge=1, le=65535)
    engine: EngineConfig = EngineConfig()
    tools: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Tool name -> argument names in wire order, for chat requests that bring no tools of their own."""
    deadline_seconds: float = Field(120.0, gt=0)
    """Bound of one request."""
    update_seconds: float = Field(120.0, gt=0)
    """Bound of one weight update, download included."""
    max_body_bytes: int = Field(8 << 20, ge=1024)


class InferenceService:
    """Raises CheckpointError when the checkpoint cannot be served."""

    def __init__(self, config: ServerConfig) -> None:
        directory = Path(config.checkpoint)
        torch.set_num_threads(config.engine.threads)
        model = load_checkpoint(directory)
        self.config, self.model_name = config, directory.name
        self.tokenizer = load_tokenizer(directory)
        self.codec = ChatCodec(self.tokenizer, config.tools)
        self.loop = EngineLoop(Engine(model, config.engine, config.version))
        self.subscriber = WeightSubscriber(Store(config.store), config.subscriber or None) if config.store else None
        held = export_state(model)
        self.held: tuple[PolicyVersion, dict[str, Tensor]] = (config.version, held)
        self.content_hash = content_hash(held)
        self._updating = asyncio.Lock()

    async def update(self, version: PolicyVersion) -> dict[str, Any]:
        """Pull, verify and swap in a version, while generation goes on.

        Raises WeightSyncError or CheckpointError (what is served then stays) and DeadlineExceeded. Asking again for the
        version that is served pulls it again, so that a trainer that restarted can repair what an engine holds.
        """
        if self.subscriber is None:
            raise WeightSyncError("this server has no object store; start it with store=...")
        limit = self.config.update_seconds
        try:
            async with asyncio.timeout(limit), self._updating:
                state = await asyncio.to_thread(self.subscriber.fetch, version, self.held)
                staged = await self.loop.update(version, state)
                self.held, self.content_hash = (version, state), staged.content_hash
        except TimeoutError:
            held = self.held[0]
            raise deadline_exceeded("inference", f"weights of version {version}", limit, held, "none") from None
        return {"version": version, "content_hash": self.content_hash}

    def health(self) -> dict[str, Any]:
        """Raises InferenceFault when the engine does not run."""
        if self.loop.failure is not None:
            raise InferenceFault(f"the engine is not running: {self.loop.failure}")
        return {
            "model": self.model_name,
            "version": self.loop.engine.version,
            "content_hash": self.content_hash,
            "kernel": self.loop.engine.kernel,
            "swap_pause_seconds": self.loop.pause_seconds,
            **self.loop.engine.load,
        }
