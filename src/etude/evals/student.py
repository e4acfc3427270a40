"""Quantiles of Student's t and the normal distribution, so that intervals need numpy alone.

The t distribution function of an integer number of degrees of freedom is a finite trigonometric sum (Abramowitz and
Stegun, 26.7.3 and 26.7.4); its inverse is found by bisection.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

_NORMAL_FROM = 2000
"""From this many degrees of freedom on the normal quantile is used (relative error below 1e-3)."""


def t_central_mass(t: float, df: int) -> float:
    """P(-t < T < t) for Student's t with ``df`` degrees of freedom, ``t >= 0`` (A&S 26.7.3, 26.7.4)."""
    theta = math.atan2(t, math.sqrt(df))
    cosine_squared = math.cos(theta) ** 2
    odd = df % 2 == 1
    if df == 1:
        return 2.0 * theta / math.pi
    term = math.cos(theta) if odd else 1.0
    total = term
    for j in range(3 if odd else 2, df - 1, 2):
        term *= cosine_squared * (j - 1) / j
        total += term
    if odd:
        return 2.0 / math.pi * (theta + math.sin(theta) * total)
    return math.sin(theta) * total


@lru_cache(maxsize=256)
def t_two_sided(df: int, confidence: float = 0.95) -> float:
    """The ``q`` with P(-q < T < q) = ``confidence``. Raises ValueError for ``df < 1``."""
    if df < 1:
        raise ValueError(f"Student t needs at least one degree of freedom, got {df}")
    if df >= _NORMAL_FROM:
        return z_two_sided(confidence)
    low, high = 0.0, 1.0
    while t_central_mass(high, df) < confidence:
        high *= 2.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if t_central_mass(middle, df) < confidence else (low, middle)
    return 0.5 * (low + high)


def z_two_sided(confidence: float = 0.95) -> float:
    """The ``q`` with P(-q < Z < q) = ``confidence`` for a standard normal Z."""
    return NormalDist().inv_cdf(0.5 + 0.5 * confidence)
