"""Write the standalone report of a run: one HTML file that reads nothing from anywhere.

Everything in a run directory is untrusted text (a model wrote much of it). It reaches the page in two ways only:
through the template, which escapes, and as JSON in which ``<``, ``>`` and ``&`` are written as escapes, which the page's
script shows as text, never as markup. A content security policy forbids the page to load anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from etude.base.errors import UserError
from etude.base.telemetry import full_disk_named, read_jsonl
from etude.dashboard.charts import Row, finite
from etude.dashboard.evaluations import before_after, evaluation_section
from etude.dashboard.rollouts import sample_rollouts
from etude.dashboard.sections import Section, loss_section, rl_sections
from etude.dashboard.timing import activity_chart, component_times

SOURCES = ("recipe.json", "metrics.jsonl", "rollouts.jsonl", "spans.jsonl", "evals.jsonl")
"""The files of a run directory that a report is made of; each may be missing."""


@dataclass(frozen=True)
class Fact:
    """A figure in the head of the page."""

    label: str
    value: str


def write_report(run: Path, out: Path | None = None) -> Path:
    """Make ``report.html`` of the run directory ``run`` (or ``out``) and return its path.

    Sections without data say so. The file appears whole or not at all, so a run in progress can be reported again
    and again. Raises UserError when ``run`` holds none of SOURCES, DiskFullError.
    """
    if not any((run / name).is_file() for name in SOURCES):
        raise UserError(f"run directory {run}: holds none of {', '.join(SOURCES)}; give the DIR of --run")
    target = out or run / "report.html"
    page = render(run)
    temporary = target.with_name(target.name + ".tmp")
    with full_disk_named(target):
        try:
            temporary.write_text(page, encoding="utf-8")
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise UserError(f"report {target}: cannot be written: {error.strerror}") from None
        temporary.replace(target)
    return target


def render(run: Path) -> str:
    """The page as text. It is a pure function of the files, but for the date in its foot."""
    metrics, evals = _rows(run / "metrics.jsonl"), _rows(run / "evals.jsonl")
    spans = _rows(run / "spans.jsonl")
    rollouts = sample_rollouts(run / "rollouts.jsonl")
    sections = [evaluation_section(evals), loss_section(metrics), *rl_sections(metrics, rollouts.effort_by_step)]
    activity = activity_chart(spans)
    timing = Section("time", "Time by component", "", (activity,) if activity else (), "")
    environment = Environment(
        loader=PackageLoader("etude.dashboard"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = _number
    return environment.get_template("report.html.j2").render(
        name=run.resolve().name,
        facts=_facts(metrics, rollouts.total),
        table=before_after(evals),
        sections=sections,
        timing=timing,
        components=component_times(spans),
        rollouts=rollouts,
        recipe=_recipe(run / "recipe.json"),
        charts_json=embed([chart.to_json() for s in (*sections, timing) for chart in s.charts]),
        rollouts_json=embed(rollouts.shown),
        style=_asset(environment, "report.css"),
        scripts=[_asset(environment, name) for name in ("charts.js", "figures.js", "rollouts.js")],
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def embed(data: Any) -> Markup:
    """JSON that can stand inside a script element whatever the texts in it are; NaN and infinities become null."""
    text = json.dumps(_only_finite(data), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _only_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _only_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_only_finite(item) for item in value]
    return value


def _rows(path: Path) -> list[Row]:
    return [row for row in read_jsonl(path) if isinstance(row, dict)]


def _asset(environment: Environment, name: str) -> Markup:
    """One of our own style or script files, verbatim."""
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])


def _recipe(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _facts(metrics: Sequence[Row], num_rollouts: int) -> list[Fact]:
    steps = [finite(row.get("step")) or 0.0 for row in metrics if row.get("stage") == "rl"]
    times = [time for row in metrics if (time := finite(row.get("time"))) is not None]
    stages = dict.fromkeys(str(row.get("stage", "?")) for row in metrics)
    facts = [Fact("Stages", " → ".join(stages))] if stages else []
    if times and max(times) > min(times):
        facts.append(Fact("Wall time", _duration(max(times) - min(times))))
    if steps:
        facts.append(Fact("RL steps", f"{max(steps):,.0f}"))
    if num_rollouts:
        facts.append(Fact("Rollouts recorded", f"{num_rollouts:,}"))
    return facts


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _number(value: float | None, digits: int = 1) -> str:
    """A figure for a table cell; a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"
