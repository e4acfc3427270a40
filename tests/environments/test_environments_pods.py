"""Promises of a pod: it runs commands, keeps files, and what runs in it cannot get out or hurt the machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from etude.base.errors import PathEscape, UserError
from etude.base.records import ExecResult, PodLimits
from etude.environments import build
from etude.environments.namespaces import NamespaceBackend, NamespacePod, pack_files, probe

Body = Callable[[NamespaceBackend, NamespacePod], Awaitable[None]]


def in_pod(body: Body, limits: PodLimits | None = None, files: dict[str, str] | None = None) -> None:
    """Run ``body`` with a fresh pod and check that nothing of it is left."""

    async def main() -> None:
        backend = NamespaceBackend()
        packed = pack_files({path: text.encode() for path, text in (files or {}).items()})
        pod = await backend.create(packed, limits or PodLimits())
        try:
            await body(backend, pod)
        finally:
            backend.destroy(pod)
            deadline = time.monotonic() + 5.0
            while backend.reap() and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            assert backend.reap() == 0, "the pod is still dying"
            backend.close()

    asyncio.run(main())


def output_of(command: str, limits: PodLimits | None = None, timeout: float = 10.0) -> ExecResult:
    results: list[ExecResult] = []

    async def body(backend: NamespaceBackend, pod: NamespacePod) -> None:
        results.append(await pod.exec(command, timeout=timeout))

    in_pod(body, limits)
    return results[0]


def test_the_probe_passes_here() -> None:
    async def main() -> None:
        backend = NamespaceBackend()
        await probe(backend)
        backend.close()

    asyncio.run(main())


def test_commands_and_files() -> None:
    async def body(backend: NamespaceBackend, pod: NamespacePod) -> None:
        await pod.write({"a/b/c.txt": "deep", "run.py": "print(open('a/b/c.txt').read())\n"})
        result = await pod.exec("python3 -I -S run.py; exit 3")
        assert (result.exit_code, result.output) == (3, "deep\n")
        assert await pod.list() == ["a/b/c.txt", "run.py"]
        assert await pod.read("a/b/c.txt") == "deep"
        assert await pod.read("nowhere") is None
        await pod.write({"run.py": "x"})
        assert await pod.read("run.py") == "x"

    in_pod(body)


def test_a_fork_is_private() -> None:
    async def body(backend: NamespaceBackend, pod: NamespacePod) -> None:
        fork = await backend.create(await pod.dump(), pod.limits)
        await fork.write({"kept.txt": "changed", "new.txt": "1"})
        assert await pod.read("kept.txt") == "same"
        assert await pod.list() == ["kept.txt", "sub/bin"]
        assert await fork.list() == ["kept.txt", "new.txt", "sub/bin"]
        backend.destroy(fork)

    in_pod(body, files={"kept.txt": "same", "sub/bin": "\x00\x01"})


@pytest.mark.parametrize("path", ["../up", "/etc/passwd", "a/../../up", "link/secret", "", "x\0y"])
def test_paths_cannot_leave_the_workspace(path: str) -> None:
    async def body(backend: NamespaceBackend, pod: NamespacePod) -> None:
        await pod.exec("ln -s /etc link; ln -s / root")
        with pytest.raises(PathEscape):
            await pod.write({path: "evil"})
        if "\0" not in path and path:
            with contextlib.suppress(PathEscape):
                assert await pod.read(path) is None

    in_pod(body)


ATTACKS = {
    "network": ("python3 -I -S -c \"import socket; socket.create_connection(('1.1.1.1', 80), 2)\"", "Error"),
    "raw socket": ('python3 -I -S -c "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"', "PermissionError"),
    "write system": ("touch /usr/evil /etc/evil /evil", "Read-only|ermission"),
    "mount": ("mount -t tmpfs x /tmp || echo refused", "refused"),
    "unshare": ("unshare -Ur true || echo refused", "refused"),
    "device": ("mknod /tmp/d b 8 0 || echo refused", "refused"),
    "host files": ("ls /root /home /var 2>&1 || true", "No such file|cannot access"),
    "setuid": ("su root -c true || echo refused", "refused"),
    "agent memory": ("cat /proc/1/environ /proc/1/mem || echo refused", "refused"),
    "ptrace": (
        "python3 -I -S -c \"import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))\"", r"^-1$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_refused(name: str) -> None:
    import re

    command, expected = ATTACKS[name]
    result = output_of(command)
    assert re.search(expected, result.output, re.MULTILINE), result.output


def test_no_privileges_are_left() -> None:
    status = output_of("cat /proc/self/status").output
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[name], 16) == 0, name
    assert (fields["NoNewPrivs"].strip(), fields["Seccomp"].strip()) == ("1", "2")
    if os.geteuid() == 0:
        assert fields["Uid"].split()[0] != "0"


def test_the_host_is_not_visible() -> None:
    result = output_of("ps -e 2>/dev/null | wc -l; hostname; env | sort; id -u")
    assert "ETUDE" not in result.output
    assert "PATH=/usr/local/bin:/usr/bin:/bin" in result.output
    assert result.output.splitlines()[1] == "pod"


def test_a_fork_bomb_is_bounded_and_the_pod_lives() -> None:
    async def body(backend: NamespaceBackend, pod: NamespacePod) -> None:
        result = await pod.exec("bomb() { bomb | bomb & }; bomb; sleep 5", timeout=2.0)
        assert result.exit_code != 0
        assert (await pod.exec("echo alive", timeout=10.0)).output == "alive\n"

    in_pod(body, PodLimits(processes=32))


def test_memory_and_disk_are_bounded() -> None:
    result = output_of("python3 -I -S -c 'x = bytearray(900 << 20)' || echo refused", PodLimits(memory_mb=128))
    assert "refused" in result.output
    result = output_of("head -c 100M /dev/zero > big || echo full; ls | wc -l", PodLimits(disk_mb=8))
    assert "full" in result.output


def test_endless_output_is_cut_and_endless_time_ends() -> None:
    result = output_of("yes", PodLimits(output_bytes=1000), timeout=1.0)
    assert result.truncated
    assert len(result.output) == 1000
    assert (result.timed_out, result.exit_code) == (True, 124)


def test_what_a_command_leaves_running_is_killed() -> None:
    async def body(backend: NamespaceBackend, pod: NamespacePod) -> None:
        clock = time.monotonic()
        result = await pod.exec("setsid sleep 60 & (sleep 50 &) ; echo started")
        assert result.output == "started\n"
        assert time.monotonic() - clock < 5.0
        assert "sleep" not in (await pod.exec("ps -eo comm 2>/dev/null || true")).output

    in_pod(body)


def test_many_pods_at_once() -> None:
    async def main() -> None:
        backend = NamespaceBackend()

        async def life(number: int) -> str:
            pod = await backend.create(pack_files({"n": str(number).encode()}), PodLimits())
            try:
                return (await pod.exec("cat n")).output
            finally:
                backend.destroy(pod)

        assert await asyncio.gather(*(life(n) for n in range(40))) == [str(n) for n in range(40)]
        deadline = time.monotonic() + 5.0
        while backend.reap() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert backend.reap() == 0
        backend.close()

    asyncio.run(main())


def test_a_missing_compiler_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no C compiler found; install one"):
        build.compile_launcher(tmp_path, search_path=str(tmp_path))
