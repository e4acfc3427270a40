"""One pod as this process sees it: frames over a socket pair to its agent (``launcher.c``), with a deadline each.

Many pods share one event loop and no threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence

from etude.base.errors import EnvironmentFault, PathEscape
from etude.base.records import ExecResult, PodLimits

START_SECONDS = 10.0
FILE_SECONDS = 30.0
MAX_FRAME = 64 << 20

Packed = Sequence[bytes]
"""Files on their way into a workspace or out of it: bodies of at most MAX_FRAME bytes, as the agent writes and reads them."""


class NamespacePod:
    """One running pod. Requests are served one at a time, in order."""

    def __init__(
        self, process: subprocess.Popen[bytes], stream: socket.socket, groups: Sequence[str], limits: PodLimits
    ) -> None:
        self.process, self.groups, self.limits = process, groups, limits
        self._stream = stream
        self._lock = asyncio.Lock()
        self._dead = False

    async def ready(self) -> int:
        """Wait for the agent's first frame: how many control groups could not be joined.

        Raises EnvironmentFault with the launcher's last words when it died.
        """
        async with self._lock, _Exchange(self, START_SECONDS):
            return (await self._receive())[0]

    async def exec(self, command: str, *, timeout: float = 20.0) -> ExecResult:
        """Run ``/bin/sh -c command`` in the workspace, and end whatever it leaves running."""
        text = command.encode(errors="replace")
        if b"\0" in text:  # the model's doing, so it is a result and not an error
            return ExecResult(exit_code=126, output="sh: the command holds a NUL byte\n", seconds=0.0)
        body = b"E" + struct.pack("<dI", timeout, self.limits.output_bytes) + text
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
        """UTF-8 content (undecodable bytes replaced), or None when there is no such file. Raises PathEscape."""
        status, answer = await self._ask(b"R" + _path(path), FILE_SECONDS)
        _check(status, path)
        return answer.decode(errors="replace") if status == 0 else None

    async def write(self, files: Mapping[str, str]) -> None:
        """Create or overwrite files, parents included. Raises PathEscape, also when the workspace is full."""
        if files:
            await self.load(pack_files({path: text.encode(errors="replace") for path, text in files.items()}))

    async def load(self, packed: Packed) -> None:
        """Write packed files. Raises PathEscape as :meth:`write` does."""
        for part in packed:
            status, _ = await self._ask(b"W" + part, FILE_SECONDS)
            _check(status, "a path")

    async def list(self) -> list[str]:
        """Sorted paths of all regular files in the workspace."""
        _, answer = await self._ask(b"L", FILE_SECONDS)
        return sorted(path.decode(errors="replace") for path in answer.split(b"\0") if path)

    async def dump(self) -> Packed:
        """The workspace: files with their executable bit, folders and symbolic links. Other modes and times are not kept.

        Raises EnvironmentFault when it unpacks to more than its disk may hold (sparse files can say so).
        """
        parts: list[bytes] = []
        room = (self.limits.disk_mb << 20) + MAX_FRAME
        async with self._lock, _Exchange(self, FILE_SECONDS):
            await self._send(b"D")
            while (part := (await self._receive())[1]) and room >= 0:
                parts.append(part)
                room -= len(part)
            if room < 0:
                raise EnvironmentFault(
                    f"the workspace has more than its {self.limits.disk_mb} MB; the pod was destroyed"
                )
        return parts

    def kill(self) -> None:
        """End the pod at once; every process in it dies with its init. Idempotent.

        SIGTERM to the launcher's outer process, which kills the init and reaps it; SIGKILL would leave that to the machine.
        """
        if self._dead:
            return
        if self.process.poll() is None:
            self.process.terminate()
        self._dead = True
        # a request in flight must see the end of the stream; closing here would leave it waiting on a number that is reused
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        if not self._lock.locked():
            self._stream.close()

    async def _ask(self, body: bytes, seconds: float) -> tuple[int, bytes]:
        if len(body) > MAX_FRAME:
            raise PathEscape(f"request larger than {MAX_FRAME >> 20} MiB")
        async with self._lock, _Exchange(self, seconds):
            await self._send(body)
            return await self._receive()

    async def _send(self, body: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._stream, struct.pack("<I", len(body)) + body)

    async def _receive(self) -> tuple[int, bytes]:
        (size,) = struct.unpack("<I", await self._exactly(4))
        frame = await self._exactly(size)
        (status,) = struct.unpack_from("<i", frame)
        return status, bytes(frame[4:])

    async def _exactly(self, count: int) -> bytearray:
        loop = asyncio.get_running_loop()
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            received = await loop.sock_recv_into(self._stream, view[got:])
            if received == 0:
                raise EnvironmentFault(f"pod ended: {self._last_words()}")
            got += received
        return data

    def _last_words(self) -> str:
        """Why the agent's stream ended, without waiting: the launcher speaks before it goes."""
        if self._dead:
            return "it was destroyed"
        said = b""
        if self.process.stderr is not None:
            os.set_blocking(self.process.stderr.fileno(), False)
            said = self.process.stderr.read() or b""
        return said.decode(errors="replace").strip() or f"exit code {self.process.poll()}"


class _Exchange:
    """One request and its answer: a deadline, and a pod that leaves it in any but the good way is dead.

    After a timeout or a cancellation the answer may still come; the next request would take it for its own.
    """

    def __init__(self, pod: NamespacePod, seconds: float) -> None:
        self._pod, self._seconds = pod, seconds
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        if self._pod._dead:
            raise EnvironmentFault("pod is gone: it was destroyed")
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._pod.kill()
        if self._pod._dead:
            self._pod._stream.close()
        try:
            await self._timeout.__aexit__(kind, error, None)
        except TimeoutError:
            raise EnvironmentFault(f"pod gave no answer within {self._seconds:.0f}s and was destroyed") from None
        if isinstance(error, OSError | struct.error):
            raise EnvironmentFault(f"pod is gone: {error}") from None


def pack_files(files: Mapping[str, bytes]) -> Packed:
    """Plain files for :meth:`NamespacePod.load`. Raises PathEscape for a path that no workspace can hold."""
    parts: list[bytes] = []
    body: list[bytes] = []
    size = 0
    for path, content in files.items():
        name = _path(path)
        if size and size + len(content) > MAX_FRAME // 2:
            parts.append(b"".join(body))
            body, size = [], 0
        body += [b"f", struct.pack("<I", len(name)), name, struct.pack("<I", len(content)), content]
        size += len(content) + len(name) + 9
    if body:
        parts.append(b"".join(body))
    return parts


def _path(path: str) -> bytes:
    name = path.encode(errors="replace")
    if not name or b"\0" in name or len(name) > 1024:
        raise PathEscape(f"bad path {path[:80]!r}")
    return name


def _check(status: int, path: str) -> None:
    if status == -2:
        raise PathEscape(f"{path} leaves the workspace")
    if status <= -100:
        raise PathEscape(f"{path}: {os.strerror(-status - 100)}")
