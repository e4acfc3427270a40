"""``rollouts.jsonl`` for the browser of the report: an even sample of rollouts, and mean effort by step.

The file can be large, so it is read twice, line by line: once to count, once to keep the chosen lines.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.dashboard.charts import Row, finite

MAX_ROLLOUTS = 300
"""Rollouts embedded in a report."""
MAX_TEXT = 12_000
"""Characters kept of one text (a tool output, a file written); the rest is cut and the cut is stated."""
TRAINING_PHASE = "rl"
"""Phase of the rollouts that train; mean effort is taken over these."""

_EFFORT = ("thinking_tokens", "call_tokens", "output_tokens", "message_tokens", "calls", "turns")


@dataclass(frozen=True)
class RolloutSample:
    """What the report shows of the rollouts."""

    shown: list[Row]
    """``{"phase", "step", "rollout"}`` of at most MAX_ROLLOUTS rollouts, evenly over the file."""
    total: int
    """Rollouts in the file."""
    effort_by_step: list[Row]
    """Mean of the six effort counts over the training rollouts of each step; also ``length_tokens``."""


def sample_rollouts(path: Path, limit: int = MAX_ROLLOUTS) -> RolloutSample:
    """Read ``path`` (missing: nothing). The first and the last rollout are always among those shown."""
    total = sum(1 for _ in _lines(path))
    chosen = {round(i * (total - 1) / max(1, min(limit, total) - 1)) for i in range(min(limit, total))}
    shown: list[Row] = []
    sums: dict[float, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for index, row in enumerate(_lines(path)):
        if row.get("phase") == TRAINING_PHASE:
            _add_effort(sums, row)
        if index in chosen:
            shown.append(shortened(row, MAX_TEXT))
    effort = [
        {"step": step, **{name: sum(values) / len(values) for name, values in sums[step].items()}}
        for step in sorted(sums)
    ]
    return RolloutSample(shown, total, effort)


def _add_effort(sums: dict[float, dict[str, list[float]]], row: Row) -> None:
    step, rollout = finite(row.get("step")), row["rollout"]
    if step is None:
        return
    effort = rollout.get("effort")
    values: Row = {name: effort.get(name) for name in _EFFORT} if isinstance(effort, dict) else {}
    values["length_tokens"] = rollout.get("sampled_tokens")
    for name, value in values.items():
        number = finite(value)
        if number is not None:
            sums[step][name].append(number)


def _lines(path: Path) -> Iterator[Row]:
    """Whole rows that hold a rollout; torn or foreign lines are passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and isinstance(row.get("rollout"), dict):
                yield row


def shortened(value: Any, limit: int) -> Any:
    """``value`` with every text longer than ``limit`` cut in the middle of nowhere and the cut stated."""
    if isinstance(value, str):
        return value if len(value) <= limit else f"{value[:limit]}\n[{len(value) - limit:,} more characters]"
    if isinstance(value, dict):
        return {key: shortened(item, limit) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item, limit) for item in value]
    return value
