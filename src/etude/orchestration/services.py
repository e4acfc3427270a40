"""The services of one run on this machine: the environments service and engines, each a process of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from etude.agents.tools import TOOL_ARGUMENTS
from etude.base.process import ServiceProcess
from etude.environments.config import EnvironmentsConfig
from etude.environments.process import start_service
from etude.inference.client import InferenceClient
from etude.inference.engine import EngineConfig
from etude.inference.process import start_engine
from etude.inference.service import ServerConfig

START_SECONDS = 90.0


@dataclass(frozen=True)
class Address:
    """Where a service answers."""

    url: str
    key: str


class Services:
    """Starts and stops the processes of a run."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._running: list[ServiceProcess] = []

    async def environments(self) -> Address:
        """Start the environments service and wait until it answers. Raises UserError where pods cannot start."""
        service = await start_service(EnvironmentsConfig(), log=self.logs / "environments.log", deadline=START_SECONDS)
        self._running.append(service)
        return Address(service.base_url, service.key)

    async def engine(self, checkpoint: Path, store: str, config: EngineConfig, *, name: str) -> Engine:
        """Start an inference server for ``checkpoint`` and wait until it answers."""
        server = ServerConfig(
            checkpoint=str(checkpoint), store=store, subscriber=name, engine=config, tools=TOOL_ARGUMENTS
        )
        service = await start_engine(
            server, log=self.logs / f"{name}.log", name=f"inference server {name}", deadline=START_SECONDS
        )
        self._running.append(service)
        return Engine(self, service, InferenceClient(service.base_url, service.key))

    def stop(self, service: ServiceProcess | None = None) -> None:
        """Stop one service, or all of them, within about three seconds."""
        chosen = [service] if service is not None else list(self._running)
        for one in chosen:  # all at once, then wait for each
            if one.process.poll() is None:
                one.process.terminate()
        for one in chosen:
            one.stop(grace=2.0)
        self._running = [one for one in self._running if one not in chosen]


@dataclass(frozen=True)
class Engine:
    """A running inference server: the lease of one deployment. Give it back with :meth:`release`."""

    services: Services
    service: ServiceProcess
    client: InferenceClient

    @property
    def address(self) -> Address:
        return Address(self.service.base_url, self.service.key)

    async def release(self) -> None:
        await self.client.close()
        await asyncio.to_thread(self.services.stop, self.service)
