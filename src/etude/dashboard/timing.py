"""Where the time went: totals by component, and when each component was busy, from ``spans.jsonl``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from etude.dashboard.charts import Chart, Row, finite

NUM_BUCKETS = 120
"""Columns of the activity chart."""
MAX_COMPONENTS = 16


@dataclass(frozen=True)
class ComponentTime:
    """Seconds of one component, summed over its spans (parallel spans add up)."""

    name: str
    seconds: float
    spans: int
    share: float
    """Of the largest component, in [0, 1]: the length of its bar."""


def component_times(spans: Sequence[Row]) -> list[ComponentTime]:
    """Totals, largest first."""
    totals: dict[str, list[float]] = defaultdict(list)
    for name, _, seconds in _clean(spans):
        totals[name].append(seconds)
    ordered = sorted(totals.items(), key=lambda item: -sum(item[1]))
    largest = max((sum(times) for times in totals.values()), default=0.0) or 1.0
    return [ComponentTime(name, sum(times), len(times), sum(times) / largest) for name, times in ordered]


def activity_chart(spans: Sequence[Row]) -> Chart | None:
    """For each component the mean number of open spans in each of NUM_BUCKETS slices of the run, or None."""
    clean = _clean(spans)
    if not clean:
        return None
    begin = min(start for _, start, _ in clean)
    width = (max(start + seconds for _, start, seconds in clean) - begin) / NUM_BUCKETS or 1e-6
    lanes: dict[str, list[float]] = {c.name: [0.0] * NUM_BUCKETS for c in component_times(spans)[:MAX_COMPONENTS]}
    first = {name: min(start for n, start, _ in clean if n == name) for name in lanes}
    for name, start, seconds in clean:
        if name in lanes:
            _add(lanes[name], (start - begin) / width, (start + seconds - begin) / width)
    ordered = sorted(lanes, key=lambda name: first[name])
    data = {
        "seconds": width * NUM_BUCKETS,
        "lanes": [{"name": name, "busy": [round(value, 4) for value in lanes[name]]} for name in ordered],
    }
    note = "The stronger the colour, the more of that slice was spent there. Lanes coloured at once ran at once."
    return Chart("Activity over the run", note=note, unit="seconds", kind="lanes", data=data)


def _add(busy: list[float], begin: float, end: float) -> None:
    """Add the interval ``begin``..``end`` (in bucket widths) to the buckets it touches."""
    for bucket in range(max(0, int(begin)), min(len(busy), int(end) + 1)):
        busy[bucket] += max(0.0, min(end, bucket + 1) - max(begin, bucket))


def _clean(spans: Sequence[Row]) -> list[tuple[str, float, float]]:
    found = [(str(row.get("component", "?")), finite(row.get("start")), finite(row.get("seconds"))) for row in spans]
    return [
        (name, start, max(0.0, seconds)) for name, start, seconds in found if start is not None and seconds is not None
    ]
