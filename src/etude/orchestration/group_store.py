"""Complete groups on disk, so that a killed run trains them after its restart instead of sampling them again."""

from __future__ import annotations

import os
from pathlib import Path

import zstandard

from etude.base.records import RolloutGroup
from etude.base.telemetry import full_disk_named


class GroupStore:
    """One file a group, written to a temporary name and renamed; a torn file never has the final name."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def save(self, group: RolloutGroup) -> None:
        """Raises DiskFullError."""
        data = zstandard.ZstdCompressor(level=1).compress(group.model_dump_json().encode())
        target = self._path(group.task_id)
        with full_disk_named(self.folder):
            with target.with_suffix(".tmp").open("wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
            target.with_suffix(".tmp").rename(target)

    def load_all(self) -> list[RolloutGroup]:
        """Every readable group; leftovers of interrupted writes are removed."""
        for leftover in self.folder.glob("*.tmp"):
            leftover.unlink()
        groups = []
        for path in sorted(self.folder.glob("*.zst"), key=lambda p: p.stat().st_mtime_ns):
            try:
                groups.append(RolloutGroup.model_validate_json(zstandard.ZstdDecompressor().decompress(path.read_bytes())))
            except (ValueError, zstandard.ZstdError):
                path.unlink()
        return groups

    def remove(self, task_id: str) -> None:
        self._path(task_id).unlink(missing_ok=True)

    def _path(self, task_id: str) -> Path:
        return self.folder / f"{task_id}.zst"
