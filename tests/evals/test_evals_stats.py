"""Statistics of an evaluation against brute force, simulation, scipy and examples worked by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from etude.base.records import Category, Effort, Outcome, Rollout
from etude.evals.records import EvalRow, EvalSummary, Verdict
from etude.evals.stats import (
    best_of_k,
    bootstrap_interval,
    clustered_interval,
    paired_difference,
    pass_at_k,
    sign_flip_p_value,
    summarise,
    wilson_interval,
)
from etude.evals.student import t_central_mass, t_two_sided, z_two_sided


def row(task: str, passed: bool | None, **changes: object) -> EvalRow:
    fields: dict[str, object] = {
        "task_id": task,
        "category": Category.DEBUGGING,
        "verdict": Verdict.SCORED,
        "passed": passed,
        "turns": 2,
        "tokens": 100,
        "seconds": 1.0,
    }
    return EvalRow.model_validate(fields | changes)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_pass_at_k_is_the_mean_over_all_subsets(results: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(results)))
    brute = np.mean([any(subset) for subset in itertools.combinations(results, k)])
    assert pass_at_k(len(results), sum(results), k) == pytest.approx(brute, abs=1e-12)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_best_of_k_is_the_mean_maximum_over_all_subsets(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    brute = np.mean([max(subset) for subset in itertools.combinations(scores, k)])
    assert best_of_k(scores, k) == pytest.approx(brute, abs=1e-9)


def test_best_of_k_of_zeros_and_ones_is_pass_at_k() -> None:
    scores = [0, 1, 0, 0, 1, 0, 0, 0, 0, 0]
    assert best_of_k(scores, 3) == pytest.approx(pass_at_k(10, 2, 3))


@pytest.mark.parametrize("k", [0, 5])
def test_k_out_of_range_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="needs at least"):
        pass_at_k(4, 1, k)
    with pytest.raises(ValueError, match="needs at least"):
        best_of_k([0.0] * 4, k)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 30, 399, 1999])
def test_t_distribution_agrees_with_scipy(df: int) -> None:
    assert t_two_sided(df) == pytest.approx(scipy_stats.t.ppf(0.975, df), rel=1e-9)
    assert t_central_mass(1.3, df) == pytest.approx(1 - 2 * scipy_stats.t.sf(1.3, df), abs=1e-12)


def test_many_degrees_of_freedom_become_normal() -> None:
    assert t_two_sided(5000) == z_two_sided() == pytest.approx(1.959964, abs=1e-6)
    assert t_two_sided(5000) == pytest.approx(scipy_stats.t.ppf(0.975, 5000), rel=1e-3)


def test_wilson_agrees_with_scipy() -> None:
    for passed, count in [(0, 10), (3, 10), (10, 10), (41, 97)]:
        expected = scipy_stats.binomtest(passed, count).proportion_ci(method="wilson")
        found = wilson_interval(passed / count, count)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-6)


@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 2.0), (0.3, 0.6), (0.2, 1.8)])
def test_clustered_interval_covers_95_percent(alpha: float, beta: float) -> None:
    """Tasks of unequal difficulty, four attempts each: the interval covers the true mean in 95% +- 2% of trials."""
    rng, trials, tasks, attempts = np.random.default_rng(7), 2000, 60, 4
    truth = alpha / (alpha + beta)
    difficulty = rng.beta(alpha, beta, size=(trials, tasks))
    rates = rng.binomial(attempts, difficulty) / attempts
    intervals = [clustered_interval(trial, tasks * attempts) for trial in rates]
    coverage = np.mean([i.low <= truth <= i.high for i in intervals])
    assert coverage == pytest.approx(0.95, abs=0.02)


def test_treating_attempts_as_independent_would_not_cover() -> None:
    """The same simulation with a plain Wilson interval over attempts falls well short: clustering is needed."""
    rng, trials, tasks, attempts = np.random.default_rng(7), 1000, 60, 8
    rates = rng.binomial(attempts, rng.beta(0.3, 0.6, size=(trials, tasks))) / attempts
    naive = [wilson_interval(float(trial.mean()), tasks * attempts) for trial in rates]
    assert np.mean([i.low <= 1 / 3 <= i.high for i in naive]) < 0.85


def test_clustered_interval_agrees_with_plain_t_and_with_the_bootstrap() -> None:
    rates = np.random.default_rng(3).beta(2, 2, size=200)
    found, boot = clustered_interval(rates), bootstrap_interval(rates)
    half = t_two_sided(199) * rates.std(ddof=1) / math.sqrt(200)
    assert (found.low, found.high) == pytest.approx((rates.mean() - half, rates.mean() + half), abs=2e-3)
    assert (found.low, found.high) == pytest.approx((boot.low, boot.high), abs=6e-3)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_intervals_contain_the_estimate_and_stay_in_range(rates: list[float]) -> None:
    found = clustered_interval(rates, 4 * len(rates))
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_an_interval_of_unanimous_tasks_does_not_collapse() -> None:
    found = clustered_interval([0.0] * 20, 80)
    assert found.low == 0.0
    assert 0.1 < found.high < 0.25


def test_sign_flip_test_is_exact_for_few_tasks() -> None:
    # Three wins, no loss: of eight sign patterns the two extreme ones reach |sum| = 3.
    assert sign_flip_p_value([1, 1, 1]) == pytest.approx(0.25)
    assert sign_flip_p_value([0, 0, 0]) == 1.0
    assert sign_flip_p_value([1, -1]) == 1.0


def test_sign_flip_test_is_uniform_under_no_difference() -> None:
    rng = np.random.default_rng(5)
    p_values = [sign_flip_p_value(rng.normal(size=24), resamples=999, seed=i) for i in range(300)]
    assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.05, abs=0.03)


def test_sampled_and_exact_permutations_agree() -> None:
    rng = np.random.default_rng(11)
    values = rng.normal(0.4, 1.0, size=16)
    padded = np.concatenate([values, [1e-9]])  # 17 differing tasks take the sampled branch
    assert sign_flip_p_value(padded) == pytest.approx(sign_flip_p_value(values), abs=0.015)


def test_paired_difference_uses_shared_tasks_only() -> None:
    a = [row("x", False), row("x", True), row("y", False), row("only-a", True)]
    b = [row("x", True), row("x", True), row("y", True), row("only-b", False)]
    found = paired_difference(a, b)
    assert (found.difference, found.num_tasks, found.only_a, found.only_b) == (0.75, 2, 1, 1)
    assert found.low <= 0.75 <= found.high
    with pytest.raises(ValueError, match="both runs scored"):
        paired_difference(a[:1], b[2:])


def test_pairing_finds_what_separate_intervals_miss() -> None:
    """Every task improves by a little: the intervals of the two runs overlap, the paired one excludes zero."""
    rates = np.linspace(0, 0.9, 40)
    a = [row(f"t{i}", j < round(10 * p)) for i, p in enumerate(rates) for j in range(10)]
    b = [row(f"t{i}", j < round(10 * p) + 1) for i, p in enumerate(rates) for j in range(10)]
    assert summarise(a).high > summarise(b).low
    found = paired_difference(a, b)
    assert found.low > 0
    assert found.p_value < 1e-3


def test_summary_of_a_hand_example() -> None:
    rows = [row("a", i < 2, turns=i + 1, tokens=10 * i, seconds=float(i)) for i in range(8)]
    rows += [row("b", True, category=Category.TESTING) for _ in range(2)]
    rows += [row("b", None, verdict=Verdict.INFRASTRUCTURE), row("c", None, verdict=Verdict.INVALID)]
    found = summarise(rows, stage="rl", step=12)
    assert found.pass_at_1 == pytest.approx((0.25 + 1.0) / 2)
    assert found.best_of_8 == 1.0  # task a has a pass among its 8; b has too few attempts
    assert found.best_of[8].value == 1.0
    assert found.best_of[2].value == pytest.approx((pass_at_k(8, 2, 2) + 1.0) / 2)
    assert (found.best_tasks, found.num_tasks, found.num_samples) == (1, 2, 10)
    assert (found.num_infrastructure, found.num_invalid) == (1, 1)
    assert found.turns == pytest.approx((36 + 2 * 2) / 10)
    assert found.by_category["debugging"].pass_at_1 == 0.25
    assert found.by_category["testing"].num_samples == 2
    assert EvalSummary.model_validate_json(found.model_dump_json()) == found


def test_too_few_attempts_leave_best_of_8_unsaid() -> None:
    found = summarise([row(task, i == 0) for task in "ab" for i in range(4)])
    assert found.best_of_8 is None
    assert sorted(found.best_of) == [2, 4]
    assert found.best_of[4].value == 1.0


def test_faults_are_never_zeros() -> None:
    clean = [row("a", True), row("b", True)]
    faulty = [*clean, row("a", None, verdict=Verdict.INFRASTRUCTURE), row("b", None, verdict=Verdict.INVALID)]
    assert summarise(clean).pass_at_1 == summarise(faulty).pass_at_1 == 1.0
    with pytest.raises(ValueError, match="none of 1 attempts"):
        summarise([row("a", None, verdict=Verdict.INVALID)])


@pytest.mark.parametrize(
    ("outcome", "passed", "verdict", "result"),
    [
        (Outcome.COMPLETED, True, Verdict.SCORED, True),
        (Outcome.COMPLETED, False, Verdict.SCORED, False),
        (Outcome.COMPLETED, None, Verdict.INVALID, None),
        (Outcome.MODEL_FAULT, None, Verdict.SCORED, False),
        (Outcome.ENVIRONMENT_FAULT, None, Verdict.INFRASTRUCTURE, None),
        (Outcome.INFERENCE_FAULT, None, Verdict.INFRASTRUCTURE, None),
        (Outcome.CANCELLED, None, Verdict.INFRASTRUCTURE, None),
        (Outcome.VERIFIER_FAULT, None, Verdict.INVALID, None),
    ],
)
def test_every_outcome_has_one_verdict(
    outcome: Outcome, passed: bool | None, verdict: Verdict, result: bool | None
) -> None:
    rollout = Rollout(
        id="r",
        task_id="t",
        category=Category.DEBUGGING,
        segments=(),
        turns=(),
        effort=Effort(turns=3),
        outcome=outcome,
        passed=passed,
        seconds={"total": 2.5},
    )
    found = EvalRow.from_rollout(rollout)
    assert (found.verdict, found.passed, found.turns, found.seconds) == (verdict, result, 3, 2.5)


def test_a_row_cannot_be_scored_without_a_result() -> None:
    with pytest.raises(ValueError, match="verdict scored"):
        row("a", None)
