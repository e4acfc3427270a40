"""Pods in Linux namespaces: one launcher process each, spoken to over a socket pair.

The launcher (``launcher.c``) builds the root, drops all privileges and serves frames; this side only frames requests, keeps
deadlines and reaps. Many pods share one event loop and no threads.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from etude.base.errors import EnvironmentFault, PathEscape, UserError
from etude.base.records import ExecResult, PodLimits
from etude.environments import cgroups
from etude.environments.build import launcher

START_SECONDS = 10.0
FILE_SECONDS = 30.0
MAX_FRAME = 64 << 20
_NO_VARIABLES: dict[str, str] = {}
FIRST_UID = 200_000
"""Each pod runs under a user id of its own, so that limits on a user's processes bind one pod."""


class NamespacePod:
    """One running pod. Requests are served one at a time, in order."""

    def __init__(
        self, process: subprocess.Popen[bytes], stream: socket.socket, groups: list[Path], limits: PodLimits
    ) -> None:
        self.process, self.groups, self.limits = process, groups, limits
        self._stream = stream
        self._lock = asyncio.Lock()

    async def ready(self) -> None:
        """Wait for the launcher's first frame. Raises EnvironmentFault with what it said when it died."""
        await self._receive(START_SECONDS)

    async def exec(self, command: str, *, timeout: float = 20.0) -> ExecResult:
        body = b"E" + struct.pack("<dI", timeout, self.limits.output_bytes) + command.encode()
        status, answer = await self._ask(body, timeout + FILE_SECONDS)
        truncated, timed_out, seconds = struct.unpack_from("<BBd", answer)
        return ExecResult(
            exit_code=status,
            output=answer[10:].decode(errors="replace"),
            seconds=seconds,
            truncated=bool(truncated),
            timed_out=bool(timed_out),
        )

    async def read(self, path: str) -> str | None:
        status, answer = await self._ask(b"R" + _path(path), FILE_SECONDS)
        if status == -2:
            raise PathEscape(path)
        return answer.decode(errors="replace") if status == 0 else None

    async def write(self, files: Mapping[str, str]) -> None:
        """Create or overwrite files, parents included. Raises PathEscape, also when the workspace is full."""
        if files:
            await self.load(pack_files({path: text.encode() for path, text in files.items()}))

    async def load(self, packed: bytes) -> None:
        """Write files in packed form (see :func:`pack_files`)."""
        status, _ = await self._ask(b"W" + packed, FILE_SECONDS)
        if status == -2:
            raise PathEscape("a path leaves the workspace")
        if status <= -100:
            raise PathEscape(f"cannot write: {os.strerror(-status - 100)}")

    async def list(self) -> list[str]:
        _, answer = await self._ask(b"L", FILE_SECONDS)
        return sorted(path.decode(errors="replace") for path in answer.split(b"\0") if path)

    async def dump(self) -> bytes:
        """All regular files of the workspace in packed form."""
        _, answer = await self._ask(b"D", FILE_SECONDS)
        return answer

    def kill(self) -> None:
        """End the pod at once; every process in it dies with its init."""
        self._stream.close()
        if self.process.poll() is None:
            self.process.kill()

    async def _ask(self, body: bytes, seconds: float) -> tuple[int, bytes]:
        if len(body) > MAX_FRAME:
            raise PathEscape("request larger than 64 MiB")
        async with self._lock:
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(seconds):
                    await loop.sock_sendall(self._stream, struct.pack("<I", len(body)) + body)
                    return await self._receive(seconds)
            except TimeoutError:
                self.kill()
                raise EnvironmentFault(f"pod gave no answer within {seconds:.0f}s and was destroyed") from None
            except OSError as error:
                raise EnvironmentFault(f"pod is gone ({error.strerror}); exit {self.process.poll()}") from None

    async def _receive(self, seconds: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(seconds):
                (size,) = struct.unpack("<I", await self._exactly(4))
                frame = await self._exactly(size)
        except TimeoutError:
            self.kill()
            raise EnvironmentFault(f"pod gave no answer within {seconds:.0f}s and was destroyed") from None
        (status,) = struct.unpack_from("<i", frame)
        return status, bytes(frame[4:])

    async def _exactly(self, count: int) -> bytearray:
        loop = asyncio.get_running_loop()
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            received = await loop.sock_recv_into(self._stream, view[got:])
            if received == 0:
                raise EnvironmentFault(f"pod ended; {self._last_words()}")
            got += received
        return data

    def _last_words(self) -> str:
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
        said = self.process.stderr.read() if self.process.stderr else b""
        return (said or b"").decode(errors="replace").strip() or f"exit {self.process.returncode}"


class NamespaceBackend:
    """Starts and reaps pods of this machine."""

    def __init__(self) -> None:
        if platform.system() != "Linux":
            raise UserError(f"pods: the namespaces backend needs Linux, this is {platform.system()}")
        self._launcher = launcher()
        self._cgroups = cgroups.detect() if os.geteuid() == 0 else None
        self._numbers = itertools.count()
        self._dying: list[tuple[subprocess.Popen[bytes], list[Path]]] = []
        self._binds = _interpreter_binds()

    async def create(self, packed: bytes, limits: PodLimits) -> NamespacePod:
        """A new pod whose workspace holds the packed files. Raises EnvironmentFault, PathEscape."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        number = next(self._numbers)
        uid = FIRST_UID + number % 60_000
        arguments = [
            str(self._launcher), str(uid), str(limits.memory_mb), str(limits.processes), str(limits.disk_mb),
            str(max(1, round(limits.cpu_seconds))), *self._binds,
        ]  # fmt: skip
        with theirs:
            process = subprocess.Popen(
                arguments, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.PIPE, env=_NO_VARIABLES
            )
        groups = self._cgroups.create(f"pod-{number}", process.pid, limits) if self._cgroups else []
        pod = NamespacePod(process, ours, groups, limits)
        try:
            await pod.ready()
            if packed:
                await pod.load(packed)
        except BaseException:
            self.destroy(pod)
            raise
        return pod

    def destroy(self, pod: NamespacePod) -> None:
        """Kill a pod; :meth:`reap` collects what is left of it."""
        pod.kill()
        self._dying.append((pod.process, pod.groups))

    def reap(self) -> int:
        """Collect dead pods; returns how many are still dying."""
        left = []
        for process, groups in self._dying:
            if process.poll() is None or not cgroups.remove(groups):
                left.append((process, groups))
            elif process.stderr:
                process.stderr.close()
        self._dying = left
        return len(left)

    def close(self) -> None:
        """Remove what the backend made for itself; pods must be gone."""
        if self._cgroups:
            cgroups.remove(list(self._cgroups.folders.values()))


async def probe(backend: NamespaceBackend) -> None:
    """Really start a pod and run a command. Raises UserError that says what to do where the kernel refuses."""
    try:
        pod = await backend.create(b"", PodLimits())
        try:
            result = await pod.exec("python3 -I -S -c 'print(6 * 7)'", timeout=10.0)
        finally:
            backend.destroy(pod)
    except EnvironmentFault as error:
        raise UserError(f"pods cannot start here: {error}. {_remedy()}") from None
    if result.output.strip() != "42":
        raise UserError(f"pods start, but python3 does not run in them: {result.output.strip()[:200]}")


def _remedy() -> str:
    switches = {
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", "kernel.unprivileged_userns_clone=1"),
        "/proc/sys/user/max_user_namespaces": ("0", "user.max_user_namespaces=10000"),
    }
    for path, (refuses, setting) in switches.items():
        file = Path(path)
        if os.geteuid() != 0 and file.exists() and file.read_text().strip() == refuses:
            return f"Unprivileged user namespaces are off; run `sudo sysctl -w {setting}` or start Etude as root"
    return "In a container, start it with --privileged or with --security-opt seccomp=unconfined and CAP_SYS_ADMIN"


def _interpreter_binds() -> list[str]:
    """Folders to show read-only beside /usr so that ``python3`` is there."""
    if shutil.which("python3", path="/usr/bin:/bin"):
        return []
    return [str(Path(sys.base_prefix).resolve())]


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """``(u32 length, path, u32 length, content)*``, the form in which launchers move files."""
    parts = []
    for path, content in files.items():
        name = _path(path)
        parts += [struct.pack("<I", len(name)), name, struct.pack("<I", len(content)), content]
    return b"".join(parts)


def _path(path: str) -> bytes:
    name = path.encode()
    if not name or b"\0" in name or len(name) > 1024:
        raise PathEscape(f"bad path {path[:80]!r}")
    return name
