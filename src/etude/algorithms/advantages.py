"""Advantages of a group of rollouts from their rewards: one row of a table per algorithm.

Statistics are over *chains*: a rollout counts once however many segments its self-summaries made of it (spec 4.6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Advantages = Callable[[Sequence[float]], list[float]]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = R_i - mean(R): no division by the standard deviation, which would blow up small behavioural differences
    when all rollouts are equally correct (Composer 2 report, section 4.1; Liu et al., 2025)."""
    values = np.asarray(rewards, dtype=np.float64)
    if np.ptp(values) == 0:  # the mean may round; equal rewards must carry no signal at all
        return [0.0] * len(values)
    return [float(a) for a in values - values.mean()]


def grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = (R_i - mean) / std, 0 where all rewards are equal (Shao et al., 2024).

    The sample standard deviation (divisor n - 1), as TRL and verl compute it; the paper does not say which.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if np.ptp(values) == 0:
        return [0.0] * len(values)
    return [float(a) for a in (values - values.mean()) / values.std(ddof=1)]


def rloo(rewards: Sequence[float]) -> list[float]:
    """A_i = R_i - mean of the others = n / (n - 1) * (R_i - mean) (Ahmadian et al., 2024)."""
    count = len(rewards)
    return [a * count / (count - 1) for a in dr_grpo(rewards)] if count > 1 else [0.0]


def reinforce(rewards: Sequence[float]) -> list[float]:
    """A_i = R_i: no baseline."""
    return [float(r) for r in rewards]


@dataclass(frozen=True)
class Algorithm:
    """One row of the table: what makes two policy-gradient algorithms differ."""

    advantages: Advantages
    """Rewards of a group, one a chain -> advantages, one a chain."""
    per_response_mean: bool
    """Divide the sum over the tokens of a chain by its number of sampled tokens (GRPO's 1 / |o_i|) instead of by a constant."""


ALGORITHMS: dict[str, Algorithm] = {
    "dr_grpo": Algorithm(dr_grpo, per_response_mean=False),
    "grpo": Algorithm(grpo, per_response_mean=True),
    "rloo": Algorithm(rloo, per_response_mean=False),
    "reinforce": Algorithm(reinforce, per_response_mean=False),
}
"""Selected by ``rl.train.algorithm``."""
