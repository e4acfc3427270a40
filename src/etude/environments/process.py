"""The environments service as a child process."""

from __future__ import annotations

from pathlib import Path

from etude.base.process import ServiceProcess, start_process
from etude.environments.config import EnvironmentsConfig
from etude.environments.service import KEY_VARIABLE, listen


async def start_service(config: EnvironmentsConfig, *, log: Path, deadline: float = 30.0) -> ServiceProcess:
    """Start a service on ``config.port`` (0: a free one); its pods end with it. Raises as ``base.process.start_process``,
    and UserError where the port is in use or pods cannot start."""
    return await start_process(
        "etude.environments.service", config.model_dump_json(), listen(config), name="environments service",
        key_variable=KEY_VARIABLE, environment={}, log=log, deadline=deadline,
    )  # fmt: skip
