"""A service as a child process: started with a deadline, tied to its parent's life, stopped within seconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.base.errors import UserError, deadline_exceeded
from etude.base.http import Transport

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ServiceProcess:
    """A running service; its client is built from ``base_url`` and ``key``."""

    base_url: str
    key: str
    process: subprocess.Popen[bytes]

    def stop(self, grace: float = 3.0) -> None:
        """SIGTERM, then SIGKILL after ``grace`` seconds. Idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


async def start_process(
    module: str,
    config: str,
    listening: socket.socket,
    *,
    name: str,
    key_variable: str,
    environment: Mapping[str, str],
    log: Path,
    deadline: float,
) -> ServiceProcess:
    """Run ``python -m module CONFIG FD`` and wait until its ``/health`` answers.

    The child inherits the bound socket ``listening`` (closed here), so that no other process can take the port in between, and
    reads its bearer key from ``key_variable``. It gets SIGTERM when the thread that calls this ends, so call it from one that
    lives as long as the service should. Raises UserError with the service's own last line when it ends, DeadlineExceeded
    after ``deadline`` seconds.
    """
    key = secrets.token_urlsafe(24)
    host, port = listening.getsockname()[:2]
    log.parent.mkdir(parents=True, exist_ok=True)
    with listening, log.open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", module, config, str(listening.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            pass_fds=(listening.fileno(),),
            env={**os.environ, **environment, key_variable: key},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    service = ServiceProcess(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", key, process)
    try:
        await _wait(service, name, log, deadline)
    except BaseException:
        service.stop(grace=0.5)
        raise
    return service


async def _wait(service: ServiceProcess, name: str, log: Path, deadline: float) -> None:
    """Until ``/health`` answers."""
    end = time.monotonic() + deadline
    http = Transport(service.base_url, {"authorization": f"Bearer {service.key}"})
    try:
        while time.monotonic() < end:
            if service.process.poll() is not None:
                last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it wrote nothing"]
                code, reason = service.process.returncode, last[0].removeprefix("error: ")
                raise UserError(f"{name} ended with code {code}: {reason}")
            try:
                async with asyncio.timeout(5.0):
                    if (await http.request("GET", "/health")).status == 200:
                        return
            except OSError:  # TimeoutError included: not up yet
                pass
            await asyncio.sleep(0.05)
    finally:
        http.close()
    raise deadline_exceeded(name, "its first /health", deadline, 0, f"process {service.process.pid} runs; see {log}")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
