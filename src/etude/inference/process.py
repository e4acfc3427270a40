"""An inference server as a child process."""

from __future__ import annotations

import socket
from pathlib import Path

from etude.base.process import ServiceProcess, start_process
from etude.inference.server import KEY_VARIABLE
from etude.inference.service import ServerConfig


async def start_engine(
    config: ServerConfig, *, log: Path, name: str = "inference server", deadline: float = 60.0
) -> ServiceProcess:
    """Start a server on a free port of ``config.host`` (``config.port`` is not used). Raises as
    ``base.process.start_process``, e.g. UserError for a checkpoint that is not there."""
    listening = socket.socket()
    listening.bind((config.host, 0))
    threads = str(config.engine.threads)
    return await start_process(
        "etude.inference.server", config.model_dump_json(), listening, name=name, key_variable=KEY_VARIABLE,
        environment={"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}, log=log, deadline=deadline,
    )  # fmt: skip
