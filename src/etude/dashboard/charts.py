"""What a chart is, and how metric rows become one.

A :class:`Chart` is a plain description that the page's script draws; the numbers in it are finite or None. Charts of a
kind are declared as rows of a table (:class:`ChartSpec`) beside the section that shows them: adding a metric to the
report is adding a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Row = dict[str, Any]
Unit = Literal["", "percent", "seconds", "tokens", "nats", "count"]

MAX_POINTS = 1200
"""Points a series is drawn with; a longer one is reduced by buckets."""


@dataclass(frozen=True)
class Series:
    """One line: ``y`` over ``x``, with an optional band ``low``..``high``. All lists have one length."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    smooth: bool = False
    """Draw each point thinly and a running mean boldly."""
    points: bool = False
    """Mark each point (for sparse series such as evaluations)."""


@dataclass(frozen=True)
class Chart:
    """A drawn figure. ``kind`` chooses how the script draws it; ``series`` or ``data`` holds what it draws."""

    title: str
    note: str = ""
    unit: Unit = ""
    x_label: str = "step"
    log: bool = False
    zero: bool = True
    """The axis of a linear chart starts at zero."""
    series: tuple[Series, ...] = ()
    kind: Literal["lines", "categories", "lanes"] = "lines"
    data: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Key:
    """A metric to draw: its name in the row, its name in the legend, and the names of its band."""

    metric: str
    label: str
    low: str = ""
    high: str = ""


@dataclass(frozen=True)
class ChartSpec:
    """One row of a table of charts."""

    title: str
    keys: tuple[Key, ...]
    note: str = ""
    unit: Unit = ""
    log: bool = False
    zero: bool = True
    smooth: bool = True


def finite(value: Any) -> float | None:
    """``value`` as a float when it is a finite number, else None (booleans, text and NaN are no numbers)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def series(
    rows: Sequence[Row], key: Key, *, x: str = "step", smooth: bool = False, points: bool = False
) -> Series | None:
    """The values of ``key`` over ``x``; None when no row has one, or when all are zero (a metric that is off)."""
    found = [(row, finite(row.get(x)), finite(row.get(key.metric))) for row in rows]
    kept = [(row, at, value) for row, at, value in found if at is not None and value is not None]
    if not kept or all(value == 0 for _, _, value in kept):
        return None
    low, high = _band(kept, key.low), _band(kept, key.high)
    banded = bool(key.low or key.high)
    return Series(
        name=key.label,
        x=_reduced([at for _, at, _ in kept]),
        y=_reduced([value for _, _, value in kept]),
        low=_reduced(low) if banded else None,
        high=_reduced(high) if banded else None,
        smooth=smooth and len(kept) >= 12,
        points=points or len(kept) < 12,
    )


def line_charts(rows: Sequence[Row], specs: Sequence[ChartSpec]) -> list[Chart]:
    """Draw each spec whose metrics occur in ``rows``; specs without data are left out."""
    charts = []
    for spec in specs:
        found = [series(rows, key, smooth=spec.smooth) for key in spec.keys]
        lines = tuple(line for line in found if line is not None)
        if lines:
            charts.append(Chart(spec.title, note=spec.note, unit=spec.unit, log=spec.log, zero=spec.zero, series=lines))
    return charts


def _band(kept: Sequence[tuple[Row, float, float]], name: str) -> list[float]:
    """The band's edge at each point; where the row lacks it, the value itself."""
    edges = [finite(row.get(name)) if name else None for row, _, _ in kept]
    return [value if edge is None else edge for edge, (_, _, value) in zip(edges, kept, strict=True)]


def _reduced(values: Sequence[float]) -> list[float]:
    """At most MAX_POINTS bucket means, rounded to what a screen can show."""
    size = math.ceil(len(values) / MAX_POINTS) or 1
    buckets = [values[start : start + size] for start in range(0, len(values), size)]
    return [float(f"{sum(bucket) / len(bucket):.6g}") for bucket in buckets]
