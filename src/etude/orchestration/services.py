"""The services of one run on this machine: the environments service and engines, each a process of its own."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from etude.agents.tools import TOOL_ARGUMENTS
from etude.base.errors import EnvironmentFault, InferenceFault, UserError, deadline_exceeded
from etude.environments.client import EnvironmentsClient
from etude.environments.service import KEY_VARIABLE as ENVIRONMENTS_KEY
from etude.inference.client import InferenceClient
from etude.inference.engine import EngineConfig
from etude.inference.server import KEY_VARIABLE as INFERENCE_KEY
from etude.inference.service import ServerConfig
from etude.orchestration.process import free_port, spawn, stop

START_SECONDS = 90.0


@dataclass(frozen=True)
class Address:
    """Where a service answers."""

    url: str
    key: str


class Services:
    """Starts and stops the processes of a run; a context manager that leaves nothing behind."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._processes: list[subprocess.Popen[bytes]] = []

    async def environments(self) -> Address:
        """Start the environments service and wait until it answers. Raises UserError where pods cannot start."""
        port, key = free_port(), secrets.token_hex(16)
        log = self.logs / "environments.log"
        process = spawn(["etude.environments.service", str(port)], log=log, environment={ENVIRONMENTS_KEY: key})
        self._processes.append(process)
        address = Address(f"http://127.0.0.1:{port}", key)
        client = EnvironmentsClient(address.url, key, timeout=5.0)
        try:
            await _wait(client, process, "environments service", log)
        finally:
            await client.close()
        return address

    async def engine(self, checkpoint: Path, store: str, config: EngineConfig, *, name: str) -> Engine:
        """Start an inference server for ``checkpoint`` and wait until it answers."""
        port, key = free_port(), secrets.token_hex(16)
        server = ServerConfig(checkpoint=str(checkpoint), store=store, port=port, engine=config, tools=TOOL_ARGUMENTS)
        log = self.logs / f"{name}.log"
        process = spawn(
            ["etude.inference.server", server.model_dump_json()],
            log=log,
            environment={INFERENCE_KEY: key, "OMP_NUM_THREADS": str(config.threads)},
        )
        self._processes.append(process)
        address = Address(f"http://127.0.0.1:{port}", key)
        client = InferenceClient(address.url, key)
        await _wait(client, process, f"inference server {name}", log)
        return Engine(self, process, address, client)

    def stop(self, process: subprocess.Popen[bytes] | None = None) -> None:
        """Stop one process, or all of them, within about three seconds."""
        chosen = [process] if process is not None else self._processes
        stop(chosen)
        self._processes = [p for p in self._processes if p not in chosen]


@dataclass(frozen=True)
class Engine:
    """A running inference server: the lease of one deployment. Give it back with :meth:`release`."""

    services: Services
    process: subprocess.Popen[bytes]
    address: Address
    client: InferenceClient

    async def release(self) -> None:
        await self.client.close()
        await asyncio.to_thread(self.services.stop, self.process)


async def _wait(
    client: EnvironmentsClient | InferenceClient, process: subprocess.Popen[bytes], name: str, log: Path
) -> None:
    """Until the service answers its health check. Raises UserError with its last words when it died."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = log.read_text(errors="replace").strip().splitlines()
            reason = next((line.removeprefix("error: ") for line in reversed(said) if line.startswith("error: ")), None)
            raise UserError(reason or f"{name} ended with exit code {process.returncode}; see {log}")
        try:
            await client.health()
            return
        except (EnvironmentFault, InferenceFault):
            await asyncio.sleep(0.1)
    raise deadline_exceeded(name, "its first answer", START_SECONDS, 0, f"process {process.pid} runs; see {log}")
