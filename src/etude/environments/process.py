"""The environments service as a child process: started with a deadline, tied to its parent's life, stopped within seconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from etude.base.errors import EnvironmentFault, UserError, deadline_exceeded
from etude.environments.client import EnvironmentsClient
from etude.environments.config import EnvironmentsConfig
from etude.environments.service import KEY_VARIABLE, listen

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ServiceProcess:
    """A running service. ``EnvironmentsClient(process.base_url, process.key)`` talks to it."""

    base_url: str
    key: str
    process: subprocess.Popen[bytes]

    def stop(self, grace: float = 3.0) -> None:
        """SIGTERM, then SIGKILL after ``grace`` seconds; its pods end in both cases. Idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


async def start_service(config: EnvironmentsConfig, *, log: Path, deadline: float = 30.0) -> ServiceProcess:
    """Start a service on ``config.port`` (0: a free one) and wait until it answers.

    It gets SIGTERM when the thread that calls this ends, so call it from one that lives as long as the service should. Raises
    UserError with the service's own line where the port is in use or pods cannot start, DeadlineExceeded after ``deadline``
    seconds.
    """
    key = secrets.token_urlsafe(24)
    log.parent.mkdir(parents=True, exist_ok=True)
    # the child inherits a bound socket: no other process can take the port in between
    with listen(config) as listening, log.open("ab") as sink:
        port = int(listening.getsockname()[1])
        process = subprocess.Popen(
            [sys.executable, "-m", "etude.environments.service", config.model_dump_json(), str(listening.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            pass_fds=(listening.fileno(),),
            env={**os.environ, KEY_VARIABLE: key},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    host = f"[{config.host}]" if ":" in config.host else config.host
    service = ServiceProcess(f"http://{host}:{port}", key, process)
    try:
        await _wait(service, log, deadline)
    except BaseException:
        service.stop(grace=0.5)
        raise
    return service


async def _wait(service: ServiceProcess, log: Path, deadline: float) -> None:
    """Until /health answers."""
    end = time.monotonic() + deadline
    client = EnvironmentsClient(service.base_url, service.key, timeout=5.0)
    try:
        while time.monotonic() < end:
            if service.process.poll() is not None:
                last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it wrote nothing"]
                reason = last[0].removeprefix("error: ")
                raise UserError(f"environments service ended with code {service.process.returncode}: {reason}")
            try:
                await client.health()
                return
            except EnvironmentFault:
                await asyncio.sleep(0.05)
    finally:
        await client.close()
    raise deadline_exceeded("environments service", "its first /health", deadline, 0, f"see {log}")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
