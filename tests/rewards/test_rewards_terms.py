"""Promises: outcome dominates; each behaviour term answers what it names; the length term is the closed form."""

from __future__ import annotations

import pytest

from etude.algorithms.length_penalty import concave_penalty
from etude.base.records import Category, Effort, Message, Outcome, Rollout, ToolCall, Turn
from etude.rewards.terms import LengthConfig, RewardConfig, score, weighted_effort


def rollout(*names: str, passed: bool = True, events: tuple[str, ...] = (), effort: Effort | None = None) -> Rollout:
    turns = tuple(Turn(message=Message(role="assistant", calls=(ToolCall(name=name),))) for name in names)
    return Rollout(
        id="r", task_id="t", category=Category.DEBUGGING, segments=(), turns=turns, effort=effort or Effort(),
        outcome=Outcome.COMPLETED, passed=passed, events=events,
    )  # fmt: skip


def terms(*names: str, **changes: object) -> dict[str, float]:
    return score(rollout(*names, **changes), RewardConfig(), concave_penalty).terms  # type: ignore[arg-type]


def test_outcome() -> None:
    assert terms("read", "finish") == {"outcome": 1.0, "length": 0.0}
    assert terms("finish", passed=False)["outcome"] == 0.0


def test_an_edit_that_no_run_follows_is_unbacked() -> None:
    assert "unbacked_finish" not in terms("edit", "run", "finish")
    assert terms("run", "edit", "finish")["unbacked_finish"] == -0.05
    assert terms("edit", "run", "edit", "finish")["unbacked_finish"] == -0.05
    assert "unbacked_finish" not in terms("read", "finish")


def test_finishing_on_failed_tests_is_a_false_claim() -> None:
    config = RewardConfig(false_claim=0.1)

    def taken(*names: str, events: tuple[str, ...]) -> float:
        found = score(rollout(*names, events=events, passed=False), config, concave_penalty).terms
        return found.get("false_claim", 0.0)

    assert taken("edit", "run", "finish", events=("tests_failed",)) == -0.1
    assert taken("edit", "run", "run", "finish", events=("tests_passed", "tests_failed")) == -0.1
    assert taken("edit", "run", "edit", "run", "finish", events=("tests_failed", "tests_passed")) == 0.0
    assert taken("edit", "run", "edit", "finish", events=("tests_failed",)) == 0.0, "no run of the last edit: unbacked"
    assert taken("run", "finish", events=("tests_failed",)) == 0.0, "nothing was edited"
    gave_up = rollout("edit", "run", events=("tests_failed",), passed=False).model_copy(
        update={"outcome": Outcome.MODEL_FAULT}
    )
    assert "false_claim" not in score(gave_up, config, concave_penalty).terms


def test_broken_calls_and_failed_edits_are_counted_each() -> None:
    found = terms("finish", events=("malformed_call", "malformed_call", "failed_edit", "tests_passed"))
    assert found["malformed_call"] == pytest.approx(-0.04)
    assert found["failed_edit"] == pytest.approx(-0.01)


def test_length_is_the_concave_penalty_of_the_weighted_effort() -> None:
    effort = Effort(thinking_tokens=10, call_tokens=40, output_tokens=100, message_tokens=5, calls=4, turns=4)
    config = LengthConfig()
    x = 10 * 0.02 + 40 * 0.02 + 100 * 0.005 + 5 * 0.02 + 4 * 0.1 + 4 * 0.4
    assert weighted_effort(effort, config) == pytest.approx(x)
    expected = -config.scale * concave_penalty(x, config.k, config.q)
    assert terms("finish", effort=effort)["length"] == pytest.approx(expected)


def test_no_amount_of_effort_outweighs_the_outcome() -> None:
    worst = Effort(thinking_tokens=400, call_tokens=400, output_tokens=2000, message_tokens=400, calls=40, turns=10)
    solved = score(rollout("edit", "finish", effort=worst), RewardConfig(), concave_penalty).total
    failed = score(rollout("finish", passed=False), RewardConfig(), concave_penalty).total
    assert solved > failed + 0.3
