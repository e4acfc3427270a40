"""Statistics of an evaluation: pass@k, best-of-k, intervals that respect tasks, paired comparison. numpy only.

Attempts at one task are not independent, so every interval treats the task as the unit: the error of a mean over
tasks comes from the spread of the tasks' own rates. All functions are pure; rates are in [0, 1].
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etude.evals.records import BEST_OF, CategoryScore, Estimate, EvalRow, EvalSummary, PairedDifference, Verdict
from etude.evals.student import t_two_sided, z_two_sided

Floats = NDArray[np.float64]

SMALLER_BESTS = (2, 4)
"""Other k of best-of-k in a summary, for evaluations that cannot afford 8 attempts."""

_EXACT_UP_TO = 16
"""Up to this many differing tasks the permutation test enumerates all sign flips (65,536 of them)."""


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased chance that at least one of ``k`` attempts passes, from ``num_samples >= k`` attempts.

    1 - C(n - c, k) / C(n, k), Chen et al. 2021 (arXiv 2107.03374, eq. 1). Raises ValueError for k out of range.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, got {num_samples}")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def best_of_k(scores: ArrayLike, k: int) -> float:
    """Unbiased expectation of the best of ``k`` of the given ``scores`` (float ``[n]``, ``n >= k``).

    The i-th smallest score is the best of C(i - 1, k - 1) of the C(n, k) subsets. With scores of 0 and 1 this is
    :func:`pass_at_k`. Raises ValueError for k out of range.
    """
    ordered = np.sort(np.asarray(scores, dtype=np.float64))
    count = len(ordered)
    if not 1 <= k <= count:
        raise ValueError(f"best-of-{k} needs at least {k} scores, got {count}")
    whole = math.comb(count, k)
    return float(sum(x * (math.comb(i, k - 1) / whole) for i, x in enumerate(ordered)))


def wilson_interval(rate: float, count: float, quantile: float | None = None) -> Estimate:
    """Wilson score interval of a ``rate`` seen in ``count`` independent trials (a real number: an effective size).

    ``quantile`` defaults to the normal 97.5% point. Raises ValueError when ``count`` is not positive.
    """
    if count <= 0:
        raise ValueError("an interval needs at least one trial")
    q2 = (z_two_sided() if quantile is None else quantile) ** 2
    centre = (rate + q2 / (2 * count)) / (1 + q2 / count)
    half = math.sqrt(q2 * (rate * (1 - rate) / count + q2 / (4 * count * count))) / (1 + q2 / count)
    return Estimate(value=rate, low=max(0.0, min(rate, centre - half)), high=min(1.0, max(rate, centre + half)))


def clustered_interval(task_rates: ArrayLike, num_samples: int | None = None) -> Estimate:
    """Mean of per-task rates (float ``[tasks]``) with a 95% interval clustered by task.

    The clustered standard error s = std(rates) / sqrt(tasks) is turned into an effective number of independent
    trials, mean (1 - mean) / s^2, and that into a Wilson interval with Student's t of tasks - 1 degrees of freedom
    (Korn and Graubard 1998, with Wilson's form): it agrees with mean +- t s in the middle, stays within [0, 1] and
    does not collapse when all tasks agree. ``num_samples`` (attempts in all) bounds the effective size. Raises
    ValueError without tasks.
    """
    rates = np.asarray(task_rates, dtype=np.float64)
    tasks = len(rates)
    if tasks == 0:
        raise ValueError("an interval needs at least one task")
    mean = float(np.clip(rates.mean(), 0.0, 1.0))
    if tasks == 1:
        return wilson_interval(mean, 1.0)
    error = float(rates.std(ddof=1)) / math.sqrt(tasks)
    effective = float(tasks) if error < 1e-12 else mean * (1 - mean) / error**2
    effective = min(effective, float(num_samples if num_samples is not None else math.inf))
    return wilson_interval(mean, max(effective, 1e-9), t_two_sided(tasks - 1))


def bootstrap_interval(task_rates: ArrayLike, *, resamples: int = 2000, seed: int = 0) -> Estimate:
    """Percentile bootstrap over whole tasks: a second opinion on :func:`clustered_interval`."""
    rates = np.asarray(task_rates, dtype=np.float64)
    if len(rates) == 0:
        raise ValueError("an interval needs at least one task")
    rng = np.random.default_rng(seed)
    means = rates[rng.integers(0, len(rates), size=(resamples, len(rates)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(value=float(rates.mean()), low=float(low), high=float(high))


def sign_flip_p_value(differences: ArrayLike, *, resamples: int = 20_000, seed: int = 0) -> float:
    """Two-sided p of "each task's difference is as likely of the other sign" for ``differences`` float ``[tasks]``.

    Exact over all sign flips for up to 16 differing tasks, else by ``resamples`` random flips, counted so that p is
    never 0: (hits + 1) / (resamples + 1).
    """
    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]
    if len(values) == 0:
        return 1.0
    observed = abs(values.sum()) - 1e-12
    if len(values) <= _EXACT_UP_TO:
        bits = np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1
        return float((np.abs((1 - 2 * bits) @ values) >= observed).mean())
    rng = np.random.default_rng(seed)
    hits = 0
    for start in range(0, resamples, 1000):
        signs = rng.choice(np.array([-1.0, 1.0]), size=(min(1000, resamples - start), len(values)))
        hits += int((np.abs(signs @ values) >= observed).sum())
    return (hits + 1) / (resamples + 1)


def paired_difference(a: Iterable[EvalRow], b: Iterable[EvalRow], *, seed: int = 0) -> PairedDifference:
    """How much better run ``b`` is than run ``a``, task by task. Raises ValueError when they share no scored task."""
    rates_a, rates_b = task_rates(a), task_rates(b)
    shared = sorted(rates_a.keys() & rates_b.keys())
    if not shared:
        raise ValueError("a paired comparison needs tasks that both runs scored")
    differences = np.array([rates_b[task] - rates_a[task] for task in shared])
    mean = float(differences.mean())
    half = 1.0
    if len(shared) > 1:
        half = t_two_sided(len(shared) - 1) * float(differences.std(ddof=1)) / math.sqrt(len(shared))
    return PairedDifference(
        difference=mean,
        low=max(-1.0, mean - half),
        high=min(1.0, mean + half),
        p_value=sign_flip_p_value(differences, seed=seed),
        num_tasks=len(shared),
        only_a=len(rates_a.keys() - rates_b.keys()),
        only_b=len(rates_b.keys() - rates_a.keys()),
    )


def task_rates(rows: Iterable[EvalRow]) -> dict[str, float]:
    """Share of each task's scored attempts that passed; tasks without a scored attempt are absent."""
    return {task: sum(results) / len(results) for task, results in _results(rows).items()}


def summarise(rows: Sequence[EvalRow], *, stage: str = "", step: int = 0) -> EvalSummary:
    """Reduce the attempts of one evaluation to its summary. Raises ValueError when nothing was scored."""
    scored = [row for row in rows if row.verdict is Verdict.SCORED]
    if not scored:
        raise ValueError(f"evaluation {stage} of step {step}: none of {len(rows)} attempts was scored")
    results = _results(scored)
    first = clustered_interval([sum(r) / len(r) for r in results.values()], len(scored))
    best_of = {k: found for k in (*SMALLER_BESTS, BEST_OF) if (found := _best(results, k)) is not None}
    best = best_of.get(BEST_OF)
    categories = sorted({str(row.category) for row in scored})
    return EvalSummary(
        stage=stage,
        step=step,
        pass_at_1=first.value,
        low=first.low,
        high=first.high,
        best_of_8=best.value if best else None,
        best_low=best.low if best else None,
        best_high=best.high if best else None,
        best_tasks=sum(len(r) >= BEST_OF for r in results.values()),
        best_of=best_of,
        turns=float(np.mean([row.turns for row in scored])),
        tokens=float(np.mean([row.tokens for row in scored])),
        seconds=float(np.mean([row.seconds for row in scored])),
        by_category={name: _category([row for row in scored if row.category == name]) for name in categories},
        num_tasks=len(results),
        num_samples=len(scored),
        num_infrastructure=sum(row.verdict is Verdict.INFRASTRUCTURE for row in rows),
        num_invalid=sum(row.verdict is Verdict.INVALID for row in rows),
    )


def _results(rows: Iterable[EvalRow]) -> dict[str, list[bool]]:
    """Scored results by task, in the order of the rows."""
    results: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        if row.passed is not None:
            results[row.task_id].append(row.passed)
    return results


def _best(results: Mapping[str, Sequence[bool]], k: int) -> Estimate | None:
    values = [pass_at_k(len(r), sum(r), k) for r in results.values() if len(r) >= k]
    return clustered_interval(values, sum(len(r) for r in results.values())) if values else None


def _category(rows: Sequence[EvalRow]) -> CategoryScore:
    results = _results(rows)
    score = clustered_interval([sum(r) / len(r) for r in results.values()], len(rows))
    return CategoryScore(
        pass_at_1=score.value, low=score.low, high=score.high, num_tasks=len(results), num_samples=len(rows)
    )
