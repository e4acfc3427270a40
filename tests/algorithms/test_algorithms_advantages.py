"""Promises: hand-worked advantages; Dr. GRPO scales with small differences where GRPO does not (spec 4.1)."""

from __future__ import annotations

import pytest

from etude.algorithms.advantages import ADVANTAGES, dr_grpo, grpo, rloo


def test_hand_worked_values() -> None:
    assert dr_grpo([1, 1, 1, 0]) == pytest.approx([0.25, 0.25, 0.25, -0.75])
    assert grpo([1, 1, 1, 0]) == pytest.approx([0.5, 0.5, 0.5, -1.5])
    assert rloo([1, 1, 1, 0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])


@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "rloo"])
def test_equal_rewards_give_zero(name: str) -> None:
    assert ADVANTAGES[name]([0.7, 0.7, 0.7]) == pytest.approx([0, 0, 0])


def test_small_behavioural_differences_stay_small_without_std() -> None:
    for e in (0.1, 0.01, 0.001):
        assert dr_grpo([1 + e, 1, 1, 1 - e]) == pytest.approx([e, 0, 0, -e])
        assert grpo([1 + e, 1, 1, 1 - e])[0] == pytest.approx(grpo([2, 1, 1, 0])[0])


def test_rloo_is_reward_minus_mean_of_the_others() -> None:
    rewards = [0.3, 1.2, -0.5, 2.0, 0.1]
    expected = [r - (sum(rewards) - r) / 4 for r in rewards]
    assert rloo(rewards) == pytest.approx(expected)
