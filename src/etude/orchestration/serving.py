"""``etude serve``: one inference server in the foreground."""

from __future__ import annotations

from etude.agents.tools import TOOL_ARGUMENTS
from etude.base.config import Config
from etude.inference.engine import EngineConfig
from etude.inference.server import serve
from etude.inference.service import ServerConfig
from etude.orchestration.checkpoints import resolve


class ServeConfig(Config):
    """What to serve, where."""

    init: str = "base"
    """Checkpoint directory, or ``base``."""
    host: str = "127.0.0.1"
    port: int = 8100
    key: str = ""
    """Bearer key that clients must send; empty asks for none."""
    store: str = ""
    """Object store that weight updates are pulled from."""
    engine: EngineConfig = EngineConfig()


def run_serve(config: ServeConfig) -> None:
    """Serve until stopped. Raises UserError when the port is in use."""
    serve(
        ServerConfig(
            checkpoint=str(resolve(config.init)), store=config.store, host=config.host, port=config.port,
            engine=config.engine, tools=TOOL_ARGUMENTS,
        ),
        config.key,
    )  # fmt: skip
