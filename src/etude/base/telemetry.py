"""The run directory and what is written into it: metrics, events, rollouts.

Layout of a run directory (plain files, readable while the run goes on)::

    recipe.json            resolved configuration
    metrics.jsonl          {"time", "stage", "step", name: value, ...} one line a step
    rollouts.jsonl         {"step", "phase", "rollout": Rollout without arrays} for people and the report
    spans.jsonl            {"component", "start", "seconds"} where the time went
    ledger.sqlite          every move of every sample (orchestration.ledger)
    store/                 object store of weight versions (weights)
    checkpoints/           step checkpoints; stages/NAME: Hugging Face directories
    report.html            the standalone report
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from etude.base.errors import DiskFullError, UserError
from etude.base.records import Rollout


class RunDirectory:
    """Owner of one run's files. Thread-safe; appends are flushed line by line so that a reader sees whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._open: dict[str, TextIO] = {}

    @classmethod
    def create(cls, path: Path, *, resume: bool = False) -> RunDirectory:
        """Make a new run directory, or reopen one with ``resume``. Raises UserError when it is (not) in use."""
        marker = path / "recipe.json"
        if resume and not marker.exists():
            raise UserError(f"run directory {path}: nothing to resume there (no recipe.json)")
        if not resume and path.exists() and any(path.iterdir()):
            raise UserError(f"run directory {path}: already in use; choose another with --run, or --resume it")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run directory {path}: cannot be made: {error.strerror}") from None
        return cls(path)

    def file(self, name: str) -> Path:
        return self.path / name

    def write_recipe(self, recipe: dict[str, Any]) -> None:
        with full_disk_named(self.path):
            self.file("recipe.json").write_text(json.dumps(recipe, indent=2, sort_keys=True))

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Append one JSON line to ``name``. Raises DiskFullError."""
        with self._lock, full_disk_named(self.path):
            handle = self._open.get(name)
            if handle is None:
                handle = self._open[name] = self.file(name).open("a", encoding="utf-8")
            handle.write(json.dumps(row, separators=(",", ":")) + "\n")
            handle.flush()

    def metrics(self, stage: str, step: int, **values: float | int | str | None) -> None:
        self.append("metrics.jsonl", {"time": time.time(), "stage": stage, "step": step, **values})

    def rollout(self, phase: str, step: int, rollout: Rollout, instruction: str) -> None:
        """Keep the readable part of a rollout (messages, terms, effort), without token arrays."""
        body = rollout.model_dump(mode="json", exclude={"segments"})
        body["sampled_tokens"] = rollout.sampled_tokens
        body["num_segments"] = len(rollout.segments)
        body["total_reward"] = rollout.reward.total if rollout.reward else None
        row = {"phase": phase, "step": step, "instruction": instruction, "rollout": body}
        self.append("rollouts.jsonl", row)

    @contextmanager
    def span(self, component: str, **extra: Any) -> Iterator[None]:
        """Record how long the body took under ``component``."""
        start, clock = time.time(), time.monotonic()
        try:
            yield
        finally:
            self.append(
                "spans.jsonl",
                {"component": component, "start": start, "seconds": time.monotonic() - clock, **extra},
            )

    def close(self) -> None:
        with self._lock:
            for handle in self._open.values():
                handle.close()
            self._open.clear()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a JSONL file; a torn last line (the writer was killed) is left out, a missing file is empty."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Turn ENOSPC in the body into a DiskFullError that names ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"no space left on the disk of {path}; free some and resume the run") from None
        raise
