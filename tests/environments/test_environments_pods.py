"""Promises of a pod: it runs commands, keeps files, and what runs in it cannot get out or hurt the machine."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from etude.base.errors import EnvironmentFault, PathEscape
from etude.base.records import ExecResult, PodLimits
from etude.environments.namespaces import NamespaceBackend, probe
from etude.environments.pods import NamespacePod, pack_files

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
            await gone(backend)

    asyncio.run(main())


async def gone(backend: NamespaceBackend) -> None:
    """Wait until all destroyed pods are collected."""
    deadline = time.monotonic() + 5.0
    while backend.reap() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert backend.reap() == 0, "a pod is still dying"
    backend.close()


async def pod_is_busy(pod: NamespacePod) -> None:
    """Wait until the agent of a pod has a child: its command runs."""
    path = f"/proc/{pod.process.pid}/task/{pod.process.pid}/children"
    agent = Path(path).read_text().split()[0]
    deadline = time.monotonic() + 5.0
    while not Path(f"/proc/{agent}/task/{agent}/children").read_text() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


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
        await gone(backend)

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


def test_a_fork_has_scripts_links_folders_large_and_unreadable_files() -> None:
    async def body(backend: NamespaceBackend, pod: NamespacePod) -> None:
        await pod.exec(
            "mkdir -p empty/inner locked; echo 'echo ran' > run.sh; chmod 755 run.sh; ln -s run.sh link; ln -s /nowhere/x dead;"
            "head -c 3000000 /dev/urandom > large; : > nothing; echo s > locked/secret; chmod 0 locked/secret locked"
        )
        digest = "cat large nothing | sha256sum; ./link; readlink dead; ls -d empty/inner; cat locked/secret"
        fork = await backend.create(await pod.dump(), pod.limits)
        copied = await fork.exec(digest)
        assert copied.exit_code == 0, copied.output
        assert (await pod.exec("chmod 700 locked; chmod 600 locked/secret; " + digest)).output == copied.output
        assert copied.output.splitlines()[1:] == ["ran", "/nowhere/x", "empty/inner", "s"]
        backend.destroy(fork)

    in_pod(body)


def test_a_workspace_that_says_it_is_larger_than_its_disk_is_a_fault() -> None:
    async def body(backend: NamespaceBackend, pod: NamespacePod) -> None:
        await pod.exec("for i in $(seq 12); do truncate -s 8M sparse$i; done")
        with pytest.raises(EnvironmentFault, match="more than its 8 MB"):
            await pod.dump()

    in_pod(body, PodLimits(disk_mb=8))


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
    "namespace by clone": (
        'python3 -I -S -c "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))"', r"^-1$",
    ),
    "limits of the agent": (
        'python3 -I -S -c "import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3))"', "PermissionError",
    ),
    "own mode of the workspace": ("chmod 0 /work && echo done", "done"),
    "kill the agent": ("kill -9 1; kill -STOP 1; echo tried", "tried"),
    "ptrace": (
        "python3 -I -S -c \"import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))\"", r"^-1$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_refused_and_the_pod_goes_on(name: str) -> None:
    command, expected = ATTACKS[name]

    async def body(backend: NamespaceBackend, pod: NamespacePod) -> None:
        result = await pod.exec(command, timeout=10.0)
        assert re.search(expected, result.output, re.MULTILINE), result.output
        await pod.write({"after": "alive"})
        assert (await pod.exec("cat after")).output == "alive"

    in_pod(body)


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


def test_memory_and_disk_are_bounded_and_the_pod_lives() -> None:
    async def body(backend: NamespaceBackend, pod: NamespacePod) -> None:
        result = await pod.exec("python3 -I -S -c 'x = bytearray(900 << 20)' || echo refused")
        assert "refused" in result.output
        # each is within its own limit; together they are not (control groups, so as root only)
        hog = "python3 -I -S -c 'x = bytearray(60 << 20); import time; time.sleep(1); print(len(x))'"
        result = await pod.exec(f"for i in 1 2 3 4; do {hog} & done; wait", timeout=10.0)
        if backend.bounds()["memory"].startswith("control group"):
            assert len(result.output.splitlines()) < 4, result.output
        result = await pod.exec(
            "head -c 100M /dev/zero > big || echo full; head -c 100M /dev/zero > /tmp/big || echo full"
        )
        assert result.output.count("full\n") == 2, result.output
        with pytest.raises(PathEscape, match=r"[Ss]pace"):
            await pod.write({"more": "x" * 100_000})
        result = await pod.exec("rm big; i=0; while true > f$i; do i=$((i+1)); done; echo $i", timeout=20.0)
        assert int(result.output.split()[-1]) < 2000, "inodes"
        assert (await pod.exec("echo alive")).output == "alive\n"

    in_pod(body, PodLimits(memory_mb=128, disk_mb=8))


def test_limits_must_be_positive() -> None:
    async def main() -> None:
        backend = NamespaceBackend()
        for limits in (PodLimits(disk_mb=0), PodLimits(memory_mb=-1), PodLimits(processes=0)):
            with pytest.raises(ValueError, match="positive"):
                await backend.create([], limits)
        backend.close()

    asyncio.run(main())


def test_every_process_of_a_pod_is_in_its_groups_from_the_start() -> None:
    """The launcher joins before it forks; a service that moved it afterwards would lose the race at times."""

    async def main() -> None:
        backend = NamespaceBackend()
        pods = [await backend.create([], PodLimits()) for _ in range(10)]
        for pod in pods:
            children = Path(f"/proc/{pod.process.pid}/task/{pod.process.pid}/children").read_text().split()
            assert len(children) == 1
            groups = Path(f"/proc/{children[0]}/cgroup").read_text()
            assert all(Path(group).name in groups for group in pod.groups), groups
            assert bool(pod.groups) == backend.bounds()["memory"].startswith("control group")
            backend.destroy(pod)
        await gone(backend)

    asyncio.run(main())


def test_endless_output_is_cut_and_endless_time_ends() -> None:
    result = output_of("yes", PodLimits(output_bytes=1000), timeout=1.0)
    assert result.truncated
    assert len(result.output) == 1000
    assert (result.timed_out, result.exit_code) == (True, 124)


def test_what_a_command_leaves_running_is_killed() -> None:
    async def body(backend: NamespaceBackend, pod: NamespacePod) -> None:
        clock = time.monotonic()
        result = await pod.exec("setsid sleep 60 & (sleep 50 &) ; yes & echo started")
        assert "started\n" in result.output
        assert time.monotonic() - clock < 5.0
        left = await pod.exec("for f in /proc/[0-9]*/comm; do cat $f; done")
        assert not {"sleep", "yes"} & set(left.output.split()), left.output

    in_pod(body)


def test_ended_orphans_do_not_use_up_the_limit_on_processes() -> None:
    result = output_of("for i in $(seq 100); do (setsid true &); done; wait; echo done", PodLimits(processes=32))
    assert result.output == "done\n"


def test_signals_and_odd_commands() -> None:
    async def body(backend: NamespaceBackend, pod: NamespacePod) -> None:
        assert (await pod.exec("yes | head -1")).output == "y\n", "SIGPIPE is not ignored"
        assert (await pod.exec("grep SigIgn /proc/self/status")).output.split()[1].strip("0") == ""
        assert (await pod.exec("kill -9 $$")).exit_code == 137
        assert (await pod.exec("echo a\0b")).exit_code == 126
        assert "too long" in (await pod.exec(": " + "x" * 200_000)).output
        assert (await pod.exec("echo '\ud800'")).output == "?\n"
        assert (await pod.exec("exec >&- 2>&-; sleep 0.1; exit 5")).exit_code == 5
        assert (await pod.exec("mkfifo pipe && echo ok")).output == "ok\n"
        assert await pod.read("pipe") is None

    in_pod(body)


def test_a_cancelled_request_ends_the_pod_and_answers_nobody_else() -> None:
    async def body(backend: NamespaceBackend, pod: NamespacePod) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await pod.exec("sleep 0.4; echo late")
        with pytest.raises(EnvironmentFault, match="destroyed"):
            await pod.exec("echo next")

    in_pod(body)


def test_destroying_a_busy_pod_ends_its_request_at_once() -> None:
    async def body(backend: NamespaceBackend, pod: NamespacePod) -> None:
        busy = asyncio.create_task(pod.exec("sleep 60", timeout=60.0))
        await pod_is_busy(pod)
        backend.destroy(pod)
        clock = time.monotonic()
        with pytest.raises(EnvironmentFault, match="destroyed"):
            await busy
        assert time.monotonic() - clock < 2.0

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
        await gone(backend)

    asyncio.run(main())


PR_SET_CHILD_SUBREAPER = 36


def test_a_machine_whose_init_never_reaps_collects_no_zombies() -> None:
    """This process stands in for such an init: orphans of a service below it become its children."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        before = {child.pid for child in psutil.Process().children()}
        subprocess.run([sys.executable, "-c", LIVES], check=True, timeout=60)
        left = [child for child in psutil.Process().children() if child.pid not in before]
        assert not left, left
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


LIVES = """
import asyncio
from etude.base.records import PodLimits
from etude.environments.namespaces import NamespaceBackend

async def main():
    backend = NamespaceBackend()
    for _ in range(20):
        pod = await backend.create([], PodLimits())
        await pod.exec("true")
        backend.destroy(pod)
    while backend.reap():
        await asyncio.sleep(0.01)
    backend.close()

asyncio.run(main())
"""
