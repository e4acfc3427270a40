"""An inference server as a child process: started with a deadline, tied to its parent's life, stopped within seconds."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from etude.base.errors import InferenceFault, deadline_exceeded
from etude.inference.service import ServerConfig

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class EngineProcess:
    """A running server. ``InferenceClient(process.base_url, process.key)`` talks to it."""

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


def start_engine(config: ServerConfig, *, log: Path, deadline: float = 60.0) -> EngineProcess:
    """Start a server on a free port of ``config.host`` (``config.port`` is not used) and wait until it answers.

    It dies with the thread that calls this (PR_SET_PDEATHSIG), so call it from one that lives as long as the server should.
    Raises InferenceFault with the end of its log when it does not come up, DeadlineExceeded after ``deadline`` seconds.
    """
    key = secrets.token_urlsafe(24)
    log.parent.mkdir(parents=True, exist_ok=True)
    # the child inherits a bound socket: no other process can take the port in between
    with socket.socket() as listening, log.open("ab") as sink:
        listening.bind((config.host, 0))
        port = int(listening.getsockname()[1])
        threads = str(config.engine.threads)
        process = subprocess.Popen(
            [sys.executable, "-m", "etude.inference.server", config.model_dump_json(), str(listening.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            pass_fds=(listening.fileno(),),
            env={**os.environ, "ETUDE_INFERENCE_KEY": key, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    engine = EngineProcess(f"http://{config.host}:{port}", key, process)
    try:
        _wait(engine, log, deadline)
    except BaseException:
        engine.stop(grace=0.5)
        raise
    return engine


def _wait(engine: EngineProcess, log: Path, deadline: float) -> None:
    """Until /health answers."""
    end = time.monotonic() + deadline
    with httpx.Client(base_url=engine.base_url, headers={"authorization": f"Bearer {engine.key}"}) as http:
        while time.monotonic() < end:
            if engine.process.poll() is not None:
                last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it wrote nothing"]
                raise InferenceFault(f"inference server ended with code {engine.process.returncode}: {last[0]}")
            try:
                if http.get("/health", timeout=1.0).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.05)
    raise deadline_exceeded("inference server", "its first /health", deadline, 0, f"see {log}")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
