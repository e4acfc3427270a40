"""Memory and process limits of a whole pod by control groups, v1 or v2, where they are writable.

Without them (an ordinary user) memory is bounded per process only, and processes by RLIMIT_NPROC.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.base.records import PodLimits

ROOT = Path("/sys/fs/cgroup")
PREFIX = "etude-"


@dataclass(frozen=True)
class CgroupLayout:
    """Where the groups of this process's pods live: controller -> parent folder."""

    folders: dict[str, Path]
    version: int

    def create(self, name: str, limits: PodLimits) -> list[str]:
        """Make the groups of one pod; its launcher joins them. Best effort per controller."""
        made = []
        for controller, parent in self.folders.items():
            folder = parent / name
            try:
                folder.mkdir(parents=True)
                for file, value in _settings(controller, self.version, limits):
                    (folder / file).write_text(value)
            except OSError:
                remove([str(folder)])
                continue
            made.append(str(folder))
        return made

    def close(self) -> None:
        """Remove the parents; the pods must be gone."""
        remove([str(folder) for folder in self.folders.values()])


def detect(root: Path = ROOT) -> CgroupLayout | None:
    """The layout this process may use, or None. Groups that dead services left behind are removed."""
    name = f"{PREFIX}{os.getpid()}"
    if (root / "memory" / "cgroup.procs").exists():
        folders, version = {c: root / c / name for c in ("memory", "pids") if os.access(root / c, os.W_OK)}, 1
    elif (root / "cgroup.controllers").exists() and os.access(root, os.W_OK):
        folders, version = {"unified": root / name}, 2
    else:
        return None
    for folder in folders.values():
        _remove_leftovers(folder.parent)
    try:
        for folder in folders.values():
            folder.mkdir(exist_ok=True)
        if version == 2:
            with contextlib.suppress(OSError):  # mostly on already; if it is off and stays off, the next line fails
                (root / "cgroup.subtree_control").write_text("+memory +pids")
            (folders["unified"] / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError:
        remove([str(folder) for folder in folders.values()])
        return None
    return CgroupLayout(folders, version) if folders else None


def remove(groups: Sequence[str]) -> bool:
    """Remove groups whose processes are gone; False when one is still busy."""
    for group in groups:
        try:
            os.rmdir(group)
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True


def _remove_leftovers(parent: Path) -> None:
    """A service that was killed could not remove its groups. One in use cannot be removed, so a mistake does no harm."""
    for folder in parent.glob(f"{PREFIX}*"):
        if not Path("/proc", folder.name.removeprefix(PREFIX)).exists():
            remove([*map(str, folder.glob("pod-*")), str(folder)])


def _settings(controller: str, version: int, limits: PodLimits) -> list[tuple[str, str]]:
    memory, pids = str(limits.memory_mb << 20), str(limits.processes)
    if version == 2:
        return [("memory.max", memory), ("pids.max", pids)]
    return [("memory.limit_in_bytes", memory)] if controller == "memory" else [("pids.max", pids)]
