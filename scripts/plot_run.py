"""Plots for the docs: `python scripts/plot_run.py base RUN [RUN ...] OUT.svg` or `... rl RUN OUT.svg`.

``base`` draws training and held-out losses of pretraining runs, one after another; ``rl`` draws reward, pass rate and held-out
pass@1 and best-of-k over the steps of an RL run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

Points = list[tuple[float, float]]
Series = tuple[str, str, list[Points]]
"""(label, colour, separate polylines)."""

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 320, 50, 34, 14


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def smooth(points: Points, keep: float) -> Points:
    out: Points = []
    mean = None
    for x, y in points:
        mean = y if mean is None else keep * mean + (1 - keep) * y
        out.append((x, mean))
    return out


def draw(series: list[Series], xlabel: str, top: float, ticks: list[float]) -> str:
    right = max(x for _, _, lines in series for line in lines for x, _ in line)

    def px(x: float) -> float:
        return LEFT + (WIDTH - LEFT - 12) * x / right

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * min(y, top) / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in ticks:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{py(tick):.1f}" y2="{py(tick):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{py(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{xlabel}</text>')
    for index, (label, colour, lines) in enumerate(series):
        for line in lines:
            path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in line)
            parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{path}"/>')
            if len(line) < 12:
                parts += [f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3" fill="{colour}"/>' for x, y in line]
        parts.append(f'<text x="{WIDTH - 20}" y="{26 + 16 * index}" text-anchor="end" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>"])


def base_plot(runs: list[Path]) -> str:
    names = {
        "train_loss": ("training mixture", "#888"),
        "heldout_code_loss": ("held-out code", "#2563eb"),
        "heldout_edits_loss": ("held-out edit documents", "#dc2626"),
        "heldout_texts_loss": ("held-out generated repositories", "#16a34a"),
    }
    collected: dict[str, list[Points]] = {name: [] for name in names}
    offset = 0
    for run in runs:
        metrics = [row for row in rows(run / "metrics.jsonl") if row["stage"] == "pretrain"]
        for name in names:
            points = [(offset + row["step"], row[name]) for row in metrics if name in row]
            if points:
                collected[name].append(smooth(points, 0.97)[::10] if name == "train_loss" else points)
        offset += max(row["step"] for row in metrics)
    series: list[Series] = [(*names[name], lines) for name, lines in collected.items() if lines]
    return draw(series, f"step (about 5,700 tokens each; {offset} in all)", 5.0, [0, 1, 2, 3, 4, 5])


def rl_plot(run: Path) -> str:
    metrics = [row for row in rows(run / "metrics.jsonl") if row["stage"] == "rl"]
    evals = [row for row in rows(run / "evals.jsonl") if row["stage"] in ("sft", "rl")]
    last = max(row["step"] for row in metrics)
    ends = [row for row in evals if row["stage"] == "sft" or row["step"] == last]
    series: list[Series] = [
        ("pass rate of training rollouts", "#888", [smooth([(r["step"], r["pass_rate"]) for r in metrics], 0.7)]),
        ("held-out pass@1", "#2563eb", [[(r["step"], r["pass_at_1"]) for r in evals]]),
        ("held-out best of 8", "#dc2626", [[(r["step"], r["best_of_8"]) for r in ends if r["best_of_8"] is not None]]),
    ]
    return draw(series, "RL step", 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0])


def main() -> int:
    kind, *paths = sys.argv[1:]
    out = Path(paths.pop())
    runs = [Path(path) for path in paths]
    out.write_text(base_plot(runs) if kind == "base" else rl_plot(runs[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
