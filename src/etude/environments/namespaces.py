"""The namespaces backend: starts and reaps the pods of this machine, one launcher process each.

The launcher (``launcher.c``) builds the root, drops all privileges and serves frames; :mod:`etude.environments.pods` talks
to it. :func:`probe` says whether this machine can do that, and what to change where it cannot.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from etude.base.errors import EnvironmentFault, UserError
from etude.base.records import PodLimits
from etude.environments import cgroups
from etude.environments.build import launcher
from etude.environments.pods import START_SECONDS, NamespacePod, Packed

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
FIRST_UID = 200_000
"""Each pod runs under a user id of its own, so that limits on a user's processes bind one pod."""


class NamespaceBackend:
    """Starts and reaps pods of this machine.

    ``interpreter`` is the prefix of a Python installation to show in the pods beside /usr, read-only and on PATH; by default
    that of this interpreter when the system has no python3, else none. Raises UserError where no launcher can be built.
    """

    def __init__(self, *, interpreter: Path | None = None) -> None:
        if platform.system() != "Linux":
            raise UserError(f"pods: the namespaces backend needs Linux, this is {platform.system()}")
        self._launcher = str(launcher())
        self._cgroups = cgroups.detect()
        self._numbers = itertools.count()
        self._dying: list[NamespacePod] = []
        if interpreter is None and not shutil.which("python3", path=SYSTEM_PATH):
            interpreter = Path(sys.base_prefix)
        self._binds = [str(interpreter.resolve())] if interpreter else []
        self._variables = {"PATH": ":".join([SYSTEM_PATH, *(f"{prefix}/bin" for prefix in self._binds)])}

    async def create(self, packed: Packed, limits: PodLimits) -> NamespacePod:
        """A new pod whose workspace holds the packed files. Raises EnvironmentFault, PathEscape, ValueError for bad limits."""
        pod = await self._start(limits)
        try:
            missed = await pod.ready()
            if missed and self._cgroups:  # groups can be made, but not joined
                self._cgroups = None  # the pod's own go when it does
            await pod.load(packed)
        except BaseException:
            self.destroy(pod)
            raise
        return pod

    async def _start(self, limits: PodLimits) -> NamespacePod:
        numbers = (limits.memory_mb, limits.processes, limits.disk_mb, limits.cpu_seconds, limits.output_bytes)
        if min(numbers) <= 0:
            raise ValueError(f"limits of a pod must be positive: {limits}")
        number = next(self._numbers)
        groups = self._cgroups.create(f"pod-{number}", limits) if self._cgroups else []
        arguments = [
            self._launcher, str(FIRST_UID + number % 60_000), str(limits.memory_mb), str(limits.processes),
            str(limits.disk_mb), str(max(1, round(limits.cpu_seconds))), str(len(groups)), *groups, *self._binds,
        ]  # fmt: skip
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                process = subprocess.Popen(
                    arguments,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.PIPE,
                    env=self._variables,
                )
        except OSError as error:
            ours.close()
            cgroups.remove(groups)
            raise EnvironmentFault(f"cannot start {self._launcher}: {error.strerror}") from None
        return NamespacePod(process, ours, groups, limits)

    def destroy(self, pod: NamespacePod) -> None:
        """Kill a pod; :meth:`reap` collects what is left of it. Idempotent."""
        pod.kill()
        if pod not in self._dying:
            self._dying.append(pod)

    def reap(self) -> int:
        """Collect dead pods; returns how many are still dying."""
        left = []
        for pod in self._dying:
            if pod.process.poll() is None or not cgroups.remove(pod.groups):
                left.append(pod)
            elif pod.process.stderr:
                pod.process.stderr.close()
        self._dying = left
        return len(left)

    def bounds(self) -> dict[str, str]:
        """What bounds memory and processes here, in words: control groups, or per process and best effort."""
        if self._cgroups:
            return {
                "memory": f"control group v{self._cgroups.version}",
                "processes": f"control group v{self._cgroups.version}",
            }
        return {"memory": "per process", "processes": "RLIMIT_NPROC"}

    def close(self) -> None:
        """Remove what the backend made for itself; pods must be gone."""
        if self._cgroups:
            self._cgroups.close()


async def probe(backend: NamespaceBackend) -> None:
    """Really start a pod and run a command. Raises UserError that says what to do where the kernel refuses."""
    try:
        async with asyncio.timeout(2 * START_SECONDS):
            pod = await backend.create([], PodLimits())
            try:
                result = await pod.exec("python3 -I -S -c 'print(6 * 7)'", timeout=START_SECONDS)
            finally:
                backend.destroy(pod)
    except TimeoutError:
        raise UserError(f"pods: the first one did not answer within {2 * START_SECONDS:.0f}s") from None
    except EnvironmentFault as error:
        raise UserError(f"pods cannot start here: {error}. {remedy()}") from None
    if result.output.strip() != "42":
        raise UserError(f"pods start, but python3 does not run in them: {result.output.strip()[:200]}")


_SWITCHES = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
)


def remedy(*, settings: Path = Path("/proc/sys"), as_root: bool | None = None) -> str:
    """What to do where namespaces are refused: the switch that is off, or else a word on containers."""
    if as_root is None:
        as_root = os.geteuid() == 0
    for name, refuses, setting in () if as_root else _SWITCHES:
        if _value(settings / name) == refuses:
            return f"Unprivileged user namespaces are off; run `sudo sysctl -w {setting}` or start Etude as root"
    return "In a container, start it with --privileged or with --security-opt seccomp=unconfined and CAP_SYS_ADMIN"


def _value(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
