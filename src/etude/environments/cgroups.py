"""Memory and process limits of a whole pod by control groups, v1 or v2, where they are writable.

Without them (an ordinary user) the limits are per process: address space, and no bound on their number.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from etude.base.records import PodLimits

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class CgroupLayout:
    """Where the groups of pods live: controller -> parent folder."""

    folders: dict[str, Path]
    version: int

    def create(self, name: str, pid: int, limits: PodLimits) -> list[Path]:
        """Make the groups of one pod and move ``pid`` (and what it forks) into them. Best effort per controller."""
        made = []
        for controller, parent in self.folders.items():
            folder = parent / name
            try:
                folder.mkdir()
                for file, value in _settings(controller, self.version, limits):
                    (folder / file).write_text(value)
                (folder / "cgroup.procs").write_text(str(pid))
            except OSError:
                continue
            made.append(folder)
        return made


def detect() -> CgroupLayout | None:
    """The layout this process may use, or None."""
    name = f"etude-{os.getpid()}"
    if (ROOT / "memory" / "cgroup.procs").exists():
        folders = {c: ROOT / c / name for c in ("memory", "pids") if os.access(ROOT / c, os.W_OK)}
        version = 1
    elif (ROOT / "cgroup.controllers").exists() and os.access(ROOT, os.W_OK):
        folders, version = {"unified": ROOT / name}, 2
    else:
        return None
    try:
        for folder in folders.values():
            folder.mkdir(exist_ok=True)
        if version == 2:
            (folders["unified"] / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError:
        return None
    return CgroupLayout(folders, version) if folders else None


def remove(folders: list[Path]) -> bool:
    """Remove groups whose processes are gone; False when one is still busy."""
    try:
        for folder in folders:
            if folder.exists():
                folder.rmdir()
    except OSError:
        return False
    return True


def _settings(controller: str, version: int, limits: PodLimits) -> list[tuple[str, str]]:
    memory, pids = str(limits.memory_mb << 20), str(limits.processes)
    if version == 2:
        return [("memory.max", memory), ("pids.max", pids)]
    return [("memory.limit_in_bytes", memory)] if controller == "memory" else [("pids.max", pids)]
