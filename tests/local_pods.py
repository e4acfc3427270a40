"""A scripted pod for trusted generated code: a temporary folder and plain subprocesses."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from etude.base.errors import PathEscape
from etude.base.records import ExecResult, PodLimits


class LocalPod:
    """Implements ``Pod``; keeps count of the pods alive in its factory."""

    def __init__(self, factory: LocalPods, files: Mapping[str, str]) -> None:
        self.factory = factory
        self.root = Path(tempfile.mkdtemp())
        factory.alive += 1
        self._write(files)

    async def exec(self, command: str, *, timeout: float = 20.0) -> ExecResult:
        clock = time.monotonic()
        try:
            done = await asyncio.to_thread(
                subprocess.run, ["sh", "-c", command], cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                timeout=timeout, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return ExecResult(exit_code=124, output="", seconds=time.monotonic() - clock, timed_out=True)
        return ExecResult(exit_code=done.returncode, output=done.stdout, seconds=time.monotonic() - clock)

    async def read(self, path: str) -> str | None:
        file = self._inside(path)
        return file.read_text() if file.is_file() else None

    async def write(self, files: Mapping[str, str]) -> None:
        self._write(files)

    async def list(self) -> list[str]:
        return sorted(p.relative_to(self.root).as_posix() for p in self.root.rglob("*") if p.is_file())

    async def fork(self) -> LocalPod:
        return LocalPod(self.factory, {path: (self.root / path).read_text() for path in await self.list()})

    async def destroy(self) -> None:
        if self.root.exists():
            self.factory.alive -= 1
            shutil.rmtree(self.root)

    def _write(self, files: Mapping[str, str]) -> None:
        for path, text in files.items():
            file = self._inside(path)
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            except OSError as error:  # a file where a folder belongs, or the reverse: as the service answers it
                raise PathEscape(f"cannot write: {error.strerror}") from None

    def _inside(self, path: str) -> Path:
        if path.startswith("/") or ".." in path.split("/"):
            raise PathEscape(path)
        return self.root / path


class LocalPods:
    """Implements ``PodFactory``."""

    def __init__(self) -> None:
        self.alive = 0

    async def create(self, files: Mapping[str, str], limits: PodLimits | None = None) -> LocalPod:
        return LocalPod(self, files)
