"""Reward terms: a table of small named functions over a finished rollout; the total is their sum.

The outcome dominates. Behaviour terms answer faults that were seen (spec 4.4): calls broken on purpose, claims of success
that no run backs. The concave length penalty takes the six quantities of ``Effort``.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field

from etude.base.config import Config
from etude.base.records import Effort, Outcome, RewardBreakdown, Rollout

LengthPenalty = Callable[[float, float, float], float]
"""(x, k, q) -> C_{k,q}(x); ``algorithms.length_penalty.concave_penalty``, handed in by the composition root."""


class LengthConfig(Config):
    """C_{k,q}(x) = ((1 + kx)^(1-q) - 1) / (k (1-q)) on a weighted sum x of the six efforts (spec 4.3)."""

    scale: float = Field(0.02, ge=0.0)
    """Reward taken per unit of penalty."""
    k: float = Field(0.2, gt=0.0)
    q: float = Field(1.0, gt=0.0)
    thinking_tokens: float = 0.02
    call_tokens: float = 0.02
    output_tokens: float = 0.005
    message_tokens: float = 0.02
    calls: float = 0.1
    turns: float = 0.4


class RewardConfig(Config):
    """Weights of the terms; 0 leaves a term out."""

    outcome: float = 1.0
    malformed_call: float = 0.02
    """Taken for each call that could not be parsed or lacked an argument."""
    failed_edit: float = 0.01
    """Taken for each edit that named lines the file does not have."""
    unbacked_finish: float = 0.05
    """Taken when files were edited and no test run followed the last edit."""
    false_claim: float = 0.0
    """Taken when the agent finished its edits although its last run of the tests failed. Off by default: in a group in which all
    fail it pays for not trying."""
    length: LengthConfig = LengthConfig()


def weighted_effort(effort: Effort, config: LengthConfig) -> float:
    """The scalar x of the length penalty."""
    return float(sum(getattr(config, name) * getattr(effort, name) for name in Effort.model_fields))


def score(rollout: Rollout, config: RewardConfig, penalty: LengthPenalty) -> RewardBreakdown:
    """All terms of a rollout whose ``passed`` is set."""
    length = config.length
    terms = {name: weight * -term(rollout) for name, (term, weight) in _behaviours(config).items()}
    return RewardBreakdown(
        terms={
            "outcome": config.outcome * float(bool(rollout.passed)),
            **{name: value for name, value in terms.items() if value},
            "length": -length.scale * penalty(weighted_effort(rollout.effort, length), length.k, length.q),
        }
    )


def _behaviours(config: RewardConfig) -> dict[str, tuple[Callable[[Rollout], float], float]]:
    return {
        "malformed_call": (lambda rollout: _count(rollout, "malformed_call"), config.malformed_call),
        "failed_edit": (lambda rollout: _count(rollout, "failed_edit"), config.failed_edit),
        "unbacked_finish": (_unbacked_finish, config.unbacked_finish),
        "false_claim": (_false_claim, config.false_claim),
    }


def _count(rollout: Rollout, event: str) -> float:
    return float(rollout.events.count(event))


def _unbacked_finish(rollout: Rollout) -> float:
    """1 when something was edited and no run of any command came after the last edit."""
    after = _after_last_edit(rollout)
    return float(bool(after) and "run" not in after)


def _false_claim(rollout: Rollout) -> float:
    """1 when the agent edited, ran, and finished by itself although the last of its runs failed."""
    runs = [event for event in rollout.events if event in ("tests_passed", "tests_failed", "own_command")]
    claimed = rollout.outcome is Outcome.COMPLETED and "run" in _after_last_edit(rollout)
    return float(claimed and runs[-1:] == ["tests_failed"])


def _after_last_edit(rollout: Rollout) -> list[str]:
    """Names of the well-formed calls from the last change of files on; empty without an edit."""
    names = [call.name for turn in rollout.turns for call in turn.message.calls if call.error is None]
    changes = [i for i, name in enumerate(names) if name in ("edit", "reset")]
    return names[changes[-1] :] if "edit" in names else []
