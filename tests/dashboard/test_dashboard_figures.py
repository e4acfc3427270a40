"""The figures of the report are the figures of the files."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from synthetic_run import synthetic_rollout

from etude.base.telemetry import RunDirectory
from etude.dashboard.charts import MAX_POINTS, Key, series
from etude.dashboard.evaluations import before_after, evaluation_section
from etude.dashboard.rollouts import sample_rollouts, shortened
from etude.dashboard.sections import loss_section, rl_sections
from etude.dashboard.timing import NUM_BUCKETS, activity_chart, component_times


def test_a_series_skips_rows_without_the_metric() -> None:
    rows = [
        {"step": 1, "a": 1.0},
        {"step": 2},
        {"step": 3, "a": float("nan")},
        {"step": 4, "a": True},
        {"step": 5, "a": 3},
    ]
    found = series(rows, Key("a", "A"))
    assert found is not None
    assert (found.x, found.y) == ([1.0, 5.0], [1.0, 3.0])
    assert series(rows, Key("b", "B")) is None


def test_a_metric_that_is_always_zero_is_off() -> None:
    assert series([{"step": i, "mtp_loss": 0.0} for i in range(5)], Key("mtp_loss", "MTP")) is None


def test_a_long_series_keeps_its_mean() -> None:
    rows = [{"step": i, "a": float(i % 7)} for i in range(10 * MAX_POINTS)]
    found = series(rows, Key("a", "A"))
    assert found is not None
    assert len(found.y) <= MAX_POINTS
    assert sum(found.y) / len(found.y) == pytest.approx(
        sum(i % 7 for i in range(10 * MAX_POINTS)) / (10 * MAX_POINTS), rel=1e-3
    )


def test_a_band_falls_back_to_the_line_where_it_was_not_recorded() -> None:
    found = series([{"step": 1, "m": 2.0, "hi": 3.0}, {"step": 2, "m": 2.5}], Key("m", "M", low="lo", high="hi"))
    assert found is not None
    assert (found.low, found.high) == ([2.0, 2.5], [3.0, 2.5])


def test_each_held_out_set_has_its_line() -> None:
    rows = [
        {
            "stage": "extend",
            "step": i,
            "train_loss": 2.0,
            "heldout_loss": 2.1,
            "heldout_code_loss": 2.1,
            "heldout_edits_loss": 1.0,
        }
        for i in (1, 2)
    ]
    chart = loss_section(rows).charts[0]
    assert [line.name for line in chart.series] == ["train", "held out: code", "held out: edits"]


def test_metrics_win_over_means_of_recorded_rollouts() -> None:
    sections = {
        s.id: s
        for s in rl_sections([{"stage": "rl", "step": 1, "turns": 9.0}], [{"step": 1, "turns": 3.0, "calls": 2.0}])
    }
    chart = next(c for c in sections["effort"].charts if c.title == "Turns and calls")
    assert [(line.name, line.y) for line in chart.series] == [("turns", [9.0]), ("tool calls", [2.0])]


def test_the_table_takes_the_last_evaluation_of_each_stage_in_order() -> None:
    rows = [
        {"stage": "rl", "step": 5, "pass_at_1": 0.4},
        {"stage": "base", "pass_at_1": 0.1},
        {"stage": "rl", "step": 9, "pass_at_1": 0.6},
    ]
    found = before_after(rows)
    assert [(row.label, row.step, row.pass_at_1.value if row.pass_at_1 else None) for row in found.rows] == [
        ("Base model", "", 10.0),
        ("After RL", "version 9", 60.0),
    ]
    assert found.verdict == ""


@pytest.mark.parametrize(("low", "says"), [(0.45, "overlap"), (0.55, "do not overlap")])
def test_the_verdict_says_whether_intervals_overlap(low: float, says: str) -> None:
    rows = [
        {"stage": "sft", "pass_at_1": 0.4, "low": 0.3, "high": 0.5, "best_of_8": 0.8},
        {"stage": "rl", "pass_at_1": 0.6, "low": low, "high": 0.7, "best_of_8": 0.7},
    ]
    verdict = before_after(rows).verdict
    assert (
        verdict
        == f"RL changed held-out pass@1 by +20.0 points; the 95% intervals {says}. Best of 8 changed by -10.0 points."
    )


def test_the_curve_starts_from_the_model_after_sft_and_uses_the_shared_k() -> None:
    four = {"4": {"value": 0.6, "low": 0.5, "high": 0.7}}
    rows = [
        {"stage": "sft", "step": 0, "pass_at_1": 0.3, "best_of_8": 0.8, "best_of": four | {"8": {"value": 0.8}}},
        {"stage": "rl", "step": 10, "pass_at_1": 0.4, "best_of_8": None, "best_of": four},
    ]
    curve = evaluation_section(rows).charts[0]
    assert [(line.name, line.x, line.y) for line in curve.series] == [
        ("pass@1", [0.0, 10.0], [0.3, 0.4]),
        ("best of 4", [0.0, 10.0], [0.6, 0.6]),
    ]


def test_component_times_are_sums_and_activity_keeps_them() -> None:
    spans = [
        {"component": "a", "start": 100.0, "seconds": 4.0},
        {"component": "a", "start": 102.0, "seconds": 4.0},
        {"component": "b", "start": 109.0, "seconds": 1.0},
        {"component": "c", "start": None, "seconds": 1.0},
    ]
    assert [(c.name, c.seconds, c.spans, c.share) for c in component_times(spans)] == [
        ("a", 8.0, 2, 1.0),
        ("b", 1.0, 1, 0.125),
    ]
    chart = activity_chart(spans)
    assert chart is not None
    assert chart.data is not None
    width = 10.0 / NUM_BUCKETS
    totals = {lane["name"]: sum(lane["busy"]) * width for lane in chart.data["lanes"]}
    assert totals == pytest.approx({"a": 8.0, "b": 1.0}, abs=0.02)
    assert activity_chart([]) is None


@pytest.mark.parametrize(("total", "limit"), [(0, 10), (1, 10), (10, 10), (11, 10), (1000, 7), (5, 1)])
def test_sampling_is_even_and_holds_both_ends(total: int, limit: int, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(
        "".join(json.dumps({"phase": "rl", "step": i, "rollout": {"id": str(i)}}) + "\n" for i in range(total))
    )
    found = sample_rollouts(path, limit)
    steps = [row["step"] for row in found.shown]
    assert found.total == total
    assert len(steps) == min(total, limit)
    if len(steps) > 1:
        assert (steps[0], steps[-1]) == (0, total - 1)
        gaps = [b - a for a, b in itertools.pairwise(steps)]
        assert max(gaps) - min(gaps) <= 1


def test_effort_by_step_is_the_mean_over_training_rollouts(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    rng = random.Random(0)
    rollouts = [synthetic_rollout(rng, i, 0.5) for i in range(4)]
    for i, rollout in enumerate(rollouts):
        run.rollout("rl", i // 2, rollout, "fix it")
    run.rollout("eval-sft", 0, synthetic_rollout(rng, 9, 0.5), "fix it")
    run.close()
    found = sample_rollouts(run.file("rollouts.jsonl"))
    assert found.total == 5
    assert [row["step"] for row in found.effort_by_step] == [0, 1]
    assert (
        found.effort_by_step[1]["call_tokens"] == (rollouts[2].effort.call_tokens + rollouts[3].effort.call_tokens) / 2
    )


def test_long_texts_are_cut_and_the_cut_is_stated() -> None:
    found = shortened({"a": ["x" * 25, 3], "b": {"c": "y" * 10}}, 10)
    assert found == {"a": ["x" * 10 + "\n[15 more characters]", 3], "b": {"c": "y" * 10}}
