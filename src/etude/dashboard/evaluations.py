"""Rows of ``evals.jsonl`` as the before/after table, the curves over steps and the category chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etude.dashboard.charts import Chart, Key, Row, Series, finite, series
from etude.dashboard.sections import Section

STAGE_LABELS = {"base": "Base model", "sft": "After SFT", "rl": "After RL"}


@dataclass(frozen=True)
class RateCell:
    """A rate with its 95% interval, in percent; edges are None when they were not measured."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class TableRow:
    """One line of the before/after table."""

    label: str
    step: str
    pass_at_1: RateCell | None
    best_of_8: RateCell | None
    turns: float | None
    tokens: float | None
    seconds: float | None
    size: str
    faults: str


@dataclass(frozen=True)
class BeforeAfter:
    """The table and the sentence under it."""

    rows: tuple[TableRow, ...]
    verdict: str


def before_after(evals: Sequence[Row]) -> BeforeAfter:
    """The last evaluation of each stage, in the order base, sft, rl, then any other."""
    last: dict[str, Row] = {}
    for row in evals:
        last[str(row.get("stage", ""))] = row
    ordered = [stage for stage in STAGE_LABELS if stage in last] + [s for s in last if s not in STAGE_LABELS]
    rows = tuple(_table_row(stage, last[stage]) for stage in ordered)
    return BeforeAfter(rows, _verdict(last.get("sft"), last.get("rl")))


def evaluation_section(evals: Sequence[Row]) -> Section:
    """pass@1 and best-of-8 over policy versions, and pass@1 by category before and after."""
    rl = [row for row in evals if row.get("stage") == "rl"]
    start = [{**row, "step": 0} for row in evals if row.get("stage") == "sft"][-1:]
    begun = any(finite(row.get("step")) == 0 for row in rl)
    curve = sorted(rl if begun else start + rl, key=lambda row: finite(row.get("step")) or 0.0)
    lines = [
        series(curve, Key("pass_at_1", "pass@1", "low", "high"), points=True),
        _best_of(curve),
    ]
    kept = tuple(line for line in lines if line is not None)
    note = "Held-out tasks; bands are 95% intervals clustered by task. Step 0 is the model after SFT."
    charts = [Chart("Held-out success over RL", note=note, unit="percent", x_label="policy version", series=kept)]
    charts = charts if kept else []
    categories = _categories(evals)
    if categories is not None:
        charts.append(categories)
    return Section(
        "evaluation",
        "Held-out evaluation",
        "The report's claim to check: RL raises what the model solves at once and what it can solve in several tries.",
        tuple(charts),
        "No evaluations yet: evals.jsonl is missing or empty.",
    )


def _best_of(curve: Sequence[Row]) -> Series | None:
    """best-of-k for the largest k that every evaluation of the curve could estimate."""
    shared = set.intersection(*(_estimated(row) for row in curve)) if curve else set()
    if not shared or 8 in shared:
        return series(curve, Key("best_of_8", "best of 8", "best_low", "best_high"), points=True)
    k = max(shared)
    rows = [{"step": row.get("step"), **row["best_of"][str(k)]} for row in curve]
    return series(rows, Key("value", f"best of {k}", "low", "high"), points=True)


def _estimated(row: Row) -> set[int]:
    """The k whose best-of-k the row holds."""
    held = row.get("best_of")
    found = (
        {int(k) for k, v in held.items() if k.isdigit() and isinstance(v, dict)} if isinstance(held, dict) else set()
    )
    return found | ({8} if finite(row.get("best_of_8")) is not None else set())


def _categories(evals: Sequence[Row]) -> Chart | None:
    last: dict[str, Row] = {}
    for row in evals:
        if isinstance(row.get("by_category"), dict) and row["by_category"]:
            last[str(row.get("stage", ""))] = row
    stages = [stage for stage in STAGE_LABELS if stage in last]
    if not stages:
        return None
    names = list(dict.fromkeys(name for stage in stages for name in last[stage]["by_category"]))
    lines = [
        {"name": STAGE_LABELS[stage], "values": [_rate(last[stage]["by_category"].get(name)) for name in names]}
        for stage in stages
    ]
    data: dict[str, Any] = {"names": [name.replace("_", " ") for name in names], "stages": lines}
    note = "Last evaluation of each stage; whiskers are 95% intervals."
    return Chart("pass@1 by category", note=note, unit="percent", kind="categories", data=data)


def _rate(score: Any) -> dict[str, float | None] | None:
    """A category's score as value, low and high; a bare number is a score without an interval."""
    if isinstance(score, dict):
        value = finite(score.get("pass_at_1"))
        if value is None:
            return None
        return {"value": value, "low": finite(score.get("low")), "high": finite(score.get("high"))}
    number = finite(score)
    return None if number is None else {"value": number, "low": None, "high": None}


def _table_row(stage: str, row: Row) -> TableRow:
    tasks, samples = finite(row.get("num_tasks")), finite(row.get("num_samples"))
    faults = [finite(row.get(name)) for name in ("num_infrastructure", "num_invalid")]
    step = finite(row.get("step"))
    return TableRow(
        label=STAGE_LABELS.get(stage, stage),
        step=f"version {step:.0f}" if stage == "rl" and step is not None else "",
        pass_at_1=_cell(row, "pass_at_1", "low", "high"),
        best_of_8=_cell(row, "best_of_8", "best_low", "best_high"),
        turns=finite(row.get("turns")),
        tokens=finite(row.get("tokens")),
        seconds=finite(row.get("seconds")),
        size=f"{tasks:,.0f} / {samples:,.0f}" if tasks is not None and samples is not None else "",
        faults="" if None in faults else f"{sum(fault or 0.0 for fault in faults):,.0f}",
    )


def _cell(row: Row, value: str, low: str, high: str) -> RateCell | None:
    rate = finite(row.get(value))
    if rate is None:
        return None
    edges = [finite(row.get(low)), finite(row.get(high))]
    return RateCell(100 * rate, *(None if edge is None else 100 * edge for edge in edges))


def _verdict(sft: Row | None, rl: Row | None) -> str:
    """One sentence that compares the model after RL with the one after SFT; empty when either is missing."""
    if sft is None or rl is None:
        return ""
    before, after = _cell(sft, "pass_at_1", "low", "high"), _cell(rl, "pass_at_1", "low", "high")
    if before is None or after is None:
        return ""
    text = f"RL changed held-out pass@1 by {after.value - before.value:+.1f} points"
    edges = (before.low, before.high, after.low, after.high)
    if None not in edges:
        apart = (after.low or 0) > (before.high or 0) or (before.low or 0) > (after.high or 0)
        text += "; the 95% intervals do not overlap" if apart else "; the 95% intervals overlap"
    best = _cell(sft, "best_of_8", "best_low", "best_high"), _cell(rl, "best_of_8", "best_low", "best_high")
    if best[0] is not None and best[1] is not None:
        text += f". Best of 8 changed by {best[1].value - best[0].value:+.1f} points"
    return text + "."
