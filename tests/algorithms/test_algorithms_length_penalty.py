"""Promises: the penalty's value, slope and limits (spec 4.3)."""

from __future__ import annotations

import itertools
import math

import pytest

from etude.algorithms.length_penalty import concave_penalty


@pytest.mark.parametrize(
    ("q", "values"),
    [(0.5, (8.284, 46.33, 181.0)), (1.0, (6.931, 23.98, 46.15)), (2.0, (5.000, 9.091, 9.901))],
)
def test_values_at_k_one_tenth(q: float, values: tuple[float, ...]) -> None:
    for x, value in zip((10, 100, 1000), values, strict=True):
        assert concave_penalty(x, 0.1, q) == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("q", [0.3, 0.999, 1.0, 1.001, 2.5])
@pytest.mark.parametrize("x", [0.0, 0.7, 12.0, 300.0])
def test_slope_is_its_closed_form(x: float, q: float) -> None:
    k, h = 0.2, 1e-4
    slope = (concave_penalty(x + h, k, q) - concave_penalty(max(x - h, 0), k, q)) / (h + min(x, h))
    assert slope == pytest.approx((1 + k * x) ** -q, rel=1e-3)


def test_limits() -> None:
    assert concave_penalty(37.0, 0.1, 1e-9) == pytest.approx(37.0, rel=1e-6)
    assert concave_penalty(37.0, 0.1, 1 + 1e-9) == pytest.approx(math.log1p(3.7) / 0.1)
    assert concave_penalty(37.0, 0.1, 1 + 2e-6) == pytest.approx(concave_penalty(37.0, 0.1, 1.0), rel=1e-5)
    assert concave_penalty(1e12, 0.1, 2.0) == pytest.approx(1 / 0.1, rel=1e-6)


def test_concave_and_increasing() -> None:
    values = [concave_penalty(x, 0.1, 0.7) for x in range(50)]
    steps = [b - a for a, b in itertools.pairwise(values)]
    assert all(step > 0 for step in steps)
    assert steps == sorted(steps, reverse=True)
