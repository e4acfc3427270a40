"""Promises: hand-worked advantages; Dr. GRPO scales with small differences where GRPO does not; each row's expected gradient."""

from __future__ import annotations

import itertools
import math

import pytest

from etude.algorithms.advantages import ALGORITHMS, dr_grpo, grpo, reinforce, rloo


def test_hand_worked_values() -> None:
    assert dr_grpo([1, 1, 1, 0]) == pytest.approx([0.25, 0.25, 0.25, -0.75])
    assert grpo([1, 1, 1, 0]) == pytest.approx([0.5, 0.5, 0.5, -1.5])
    assert rloo([1, 1, 1, 0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
    assert reinforce([1, 1, 1, 0]) == [1.0, 1.0, 1.0, 0.0]
    assert rloo([0.7]) == [0.0], "nothing to compare with"


def test_the_table_says_which_rows_divide_by_the_response() -> None:
    assert [name for name, row in ALGORITHMS.items() if row.per_response_mean] == ["grpo"]


@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "rloo"])
def test_equal_rewards_give_exactly_zero(name: str) -> None:
    assert ALGORITHMS[name].advantages([0.7, 0.7, 0.7]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "rloo"])
def test_a_constant_added_to_all_rewards_changes_nothing(name: str) -> None:
    rewards = [0.3, 1.2, -0.5, 2.0, 0.1]
    shifted = ALGORITHMS[name].advantages([r + 17.0 for r in rewards])
    assert shifted == pytest.approx(ALGORITHMS[name].advantages(rewards))
    assert sum(shifted) == pytest.approx(0.0, abs=1e-12)


def test_small_behavioural_differences_stay_small_without_std() -> None:
    for e in (0.1, 0.01, 0.001):
        assert dr_grpo([1 + e, 1, 1, 1 - e]) == pytest.approx([e, 0, 0, -e])
        assert grpo([1 + e, 1, 1, 1 - e])[0] == pytest.approx(grpo([2, 1, 1, 0])[0])


def test_rloo_is_reward_minus_mean_of_the_others() -> None:
    rewards = [0.3, 1.2, -0.5, 2.0, 0.1]
    expected = [r - (sum(rewards) - r) / 4 for r in rewards]
    assert rloo(rewards) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "factor"), [("dr_grpo", 3 / 4), ("rloo", 1.0), ("reinforce", 1.0)])
def test_expected_gradient_over_all_groups_of_four(name: str, factor: float) -> None:
    """A bandit whose arm 1 pays 1: all 16 groups weighted by their probability give p (1 - p), times (n - 1) / n for
    Dr. GRPO, whose mean contains the sample itself."""
    p = 0.3
    expected = 0.0
    for group in itertools.product((0, 1), repeat=4):
        probability = math.prod(p if arm else 1 - p for arm in group)
        scores = [(1 - p) if arm else -p for arm in group]  # d log pi / d theta
        advantages = ALGORITHMS[name].advantages([float(arm) for arm in group])
        expected += probability * sum(a * s for a, s in zip(advantages, scores, strict=True)) / 4
    assert expected == pytest.approx(factor * p * (1 - p))
