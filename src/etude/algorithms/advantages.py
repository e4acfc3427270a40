"""Advantages of a group of rollouts from their rewards: one row of a table per algorithm.

Statistics are over *chains*: a rollout counts once however many segments its self-summaries made of it (spec 4.6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = R_i - mean(R): no division by the standard deviation, which would blow up small behavioural differences
    when all rollouts are equally correct (Composer 2 report, section 4.1; Liu et al., 2025)."""
    values = np.asarray(rewards, dtype=np.float64)
    if np.ptp(values) == 0:  # the mean may round; equal rewards must carry no signal at all
        return [0.0] * len(values)
    return [float(a) for a in values - values.mean()]


def grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = (R_i - mean) / std, sample standard deviation, 0 where all rewards are equal (Shao et al., 2024)."""
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


ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "dr_grpo": dr_grpo,
    "grpo": grpo,
    "rloo": rloo,
    "reinforce": reinforce,
}
