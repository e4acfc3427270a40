"""The before/after table as text, for terminals and documents."""

from __future__ import annotations

from pathlib import Path

from etude.base.telemetry import read_jsonl
from etude.dashboard.evaluations import RateCell, TableRow, before_after

HEAD = ("model", "pass@1 (95%)", "best of 8 (95%)", "turns", "tokens", "seconds", "tasks / attempts")


def text_table(run: Path) -> str:
    """Aligned Markdown table of the last evaluation of each stage and a closing sentence; "" without evaluations."""
    found = before_after([row for row in read_jsonl(run / "evals.jsonl") if isinstance(row, dict)])
    if not found.rows:
        return ""
    cells = [HEAD, *(_cells(row) for row in found.rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEAD))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([*lines, *(["", found.verdict] if found.verdict else [])])


def _cells(row: TableRow) -> tuple[str, ...]:
    figures = [f"{value:.1f}" if value is not None else "-" for value in (row.turns, row.tokens, row.seconds)]
    return (row.label, _rate(row.pass_at_1), _rate(row.best_of_8), *figures, row.size or "-")


def _rate(cell: RateCell | None) -> str:
    if cell is None:
        return "-"
    if cell.low is None or cell.high is None:
        return f"{cell.value:.1f}%"
    return f"{cell.value:.1f}% ({cell.low:.1f} to {cell.high:.1f})"
