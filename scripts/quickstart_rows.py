"""Rows for docs/quickstart.md: `python scripts/quickstart_rows.py RUN [RUN ...]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def share(summary: dict, value: str, low: str, high: str) -> str:
    return f"{100 * summary[value]:.1f}% ({100 * summary[low]:.1f} to {100 * summary[high]:.1f})"


def row(run: Path) -> str:
    metrics, evals = rows(run / "metrics.jsonl"), rows(run / "evals.jsonl")
    seed = json.loads((run / "recipe.json").read_text())["seed"]
    sft = next(e for e in evals if e["stage"] == "sft")
    rl = [e for e in evals if e["stage"] == "rl"][-1]
    gap = max(m["logprob_gap_mean"] for m in metrics if "logprob_gap_mean" in m)
    peak = max(m["peak_mib"] for m in metrics if "peak_mib" in m) / 1024
    seconds = round(metrics[-1]["time"] - metrics[0]["time"])
    cells = [str(seed)]
    for summary in (sft, rl):
        cells += [share(summary, "pass_at_1", "low", "high"), share(summary, "best_of_8", "best_low", "best_high")]
    cells += [f"+{100 * (rl['pass_at_1'] - sft['pass_at_1']):.1f}", f"{seconds // 60} min {seconds % 60} s"]
    return "| " + " | ".join([*cells, f"{peak:.1f} GiB", f"{gap:.1e}"]) + " |"


if __name__ == "__main__":
    print(
        "| seed | after SFT: pass@1 | best of 8 | after RL: pass@1 | best of 8 | gain | time | peak memory | logprob gap |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in sys.argv[1:]:
        print(row(Path(name)))
