"""Complete groups on disk, so that a killed run trains them after its restart instead of sampling them again (spec 9).

Written under a temporary name, forced to the disk, renamed: a file with the final name is whole. JSON under zstd with a checksum.
"""

from __future__ import annotations

import hashlib
import os
import urllib.parse
from pathlib import Path

import zstandard

from etude.base.records import RolloutGroup
from etude.base.telemetry import full_disk_named

MAX_NAME = 200
"""Longest file name (bytes) that is made from a task id; a longer one is hashed."""


class GroupStore:
    """One file a group, named by its task."""

    def __init__(self, folder: Path) -> None:
        with full_disk_named(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def save(self, group: RolloutGroup) -> None:
        """Safe to call from a thread. Raises DiskFullError."""
        data = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(group.model_dump_json().encode())
        target = self._path(group.task_id)
        temporary = target.with_suffix(".tmp")
        with full_disk_named(self.folder):
            with temporary.open("wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
            temporary.rename(target)
            _sync_directory(self.folder)

    def load_all(self) -> list[RolloutGroup]:
        """Every readable group, oldest file first. Leftovers of interrupted writes are removed, damaged files set aside."""
        for leftover in self.folder.glob("*.tmp"):
            leftover.unlink(missing_ok=True)
        groups = []
        for path in sorted(self.folder.glob("*.zst"), key=lambda p: (p.stat().st_mtime_ns, p.name)):
            try:
                raw = zstandard.ZstdDecompressor().decompress(path.read_bytes())
                groups.append(RolloutGroup.model_validate_json(raw))
            except (ValueError, zstandard.ZstdError):
                path.rename(path.with_suffix(".damaged"))
        return groups

    def remove(self, task_id: str) -> None:
        """One that is not there is no error."""
        self._path(task_id).unlink(missing_ok=True)

    def _path(self, task_id: str) -> Path:
        name = urllib.parse.quote(task_id, safe=" ").replace(".", "%2E")
        if len(name) > MAX_NAME:
            name = hashlib.sha256(task_id.encode()).hexdigest()
        return self.folder / f"{name}.zst"


def _sync_directory(folder: Path) -> None:
    """Make a rename survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
