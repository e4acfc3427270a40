"""Records of an evaluation: one row per attempt, one summary per evaluated checkpoint, one paired comparison.

A summary is what lands in ``evals.jsonl`` of a run directory and what the report reads. An attempt has one of three
verdicts: it was scored, or it never had a fair run (infrastructure), or it ran and nobody can say what it is worth
(invalid). Only scored attempts enter a rate; the other two are counted apart and never become a zero.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from etude.base.records import Category, Outcome, PolicyVersion, Record, Rollout

BEST_OF = 8
"""K of best-of-K in summaries and reports; the Composer 2 report does not state its own (spec 4.5)."""


class Verdict(StrEnum):
    """What an attempt says about the model."""

    SCORED = "scored"
    """Passed or failed by the model's own doing."""
    INFRASTRUCTURE = "infrastructure"
    """The environments or inference service failed, or the attempt was cancelled: it may be run again."""
    INVALID = "invalid"
    """It ran, but the verifier gave no verdict: the task or its verifier needs a look."""


class EvalRow(Record):
    """One attempt at one task.

    Example: ``EvalRow(task_id="debugging-3f9a", category=Category.DEBUGGING, verdict=Verdict.SCORED, passed=True,
    turns=4, tokens=210, seconds=3.1)``.
    """

    task_id: str
    category: Category
    verdict: Verdict
    passed: bool | None = None
    """True or False exactly when the verdict is ``SCORED``."""
    turns: int = 0
    """Assistant messages."""
    tokens: int = 0
    """Tokens that the model sampled."""
    seconds: float = 0.0
    """Wall time from pod creation to the end of verification."""

    @model_validator(mode="after")
    def _scored_has_a_result(self) -> EvalRow:
        if (self.verdict is Verdict.SCORED) != (self.passed is not None):
            raise ValueError(f"eval row of {self.task_id}: verdict {self.verdict} with passed={self.passed}")
        return self

    @classmethod
    def from_rollout(cls, rollout: Rollout) -> EvalRow:
        """Read one row off a finished rollout. Running out of turns, tokens or time is a scored failure."""
        verdict, passed = _verdict(rollout)
        return cls(
            task_id=rollout.task_id,
            category=rollout.category,
            verdict=verdict,
            passed=passed,
            turns=rollout.effort.turns,
            tokens=rollout.sampled_tokens,
            seconds=rollout.seconds.get("total", 0.0),
        )


def _verdict(rollout: Rollout) -> tuple[Verdict, bool | None]:
    if rollout.outcome is Outcome.MODEL_FAULT:
        return Verdict.SCORED, bool(rollout.passed)
    if rollout.outcome is Outcome.COMPLETED and rollout.passed is not None:
        return Verdict.SCORED, rollout.passed
    if rollout.outcome in (Outcome.COMPLETED, Outcome.VERIFIER_FAULT):
        return Verdict.INVALID, None
    return Verdict.INFRASTRUCTURE, None


class Estimate(Record):
    """A rate with its 95% interval; all three in [0, 1]."""

    value: float
    low: float
    high: float


class CategoryScore(Record):
    """pass@1 of one task category."""

    pass_at_1: float
    low: float
    high: float
    """95% interval, clustered by task."""
    num_tasks: int
    num_samples: int


class EvalSummary(Record):
    """What one evaluation of one checkpoint found; one line of ``evals.jsonl``."""

    stage: str = ""
    """Which checkpoint: "base", "sft" or "rl"."""
    step: PolicyVersion = 0
    """Policy version evaluated."""
    pass_at_1: float
    """Mean over tasks of the share of scored attempts that passed, i.e. accuracy averaged over passes (spec 12)."""
    low: float
    high: float
    """95% interval of ``pass_at_1``, clustered by task."""
    best_of_8: float | None = None
    """Unbiased estimate of the chance that at least one of 8 attempts passes, over the tasks that have 8 scored
    attempts; None when no task has."""
    best_low: float | None = None
    best_high: float | None = None
    best_tasks: int = 0
    """Tasks behind ``best_of_8``."""
    best_of: dict[int, Estimate] = Field(default_factory=dict)
    """k -> unbiased best-of-k over the tasks with at least k scored attempts, for k of 2, 4 and 8 where there are any;
    an evaluation with fewer attempts than 8 still has its smaller k."""
    turns: float
    """Mean over scored attempts."""
    tokens: float
    """Mean sampled tokens over scored attempts."""
    seconds: float
    """Mean wall seconds over scored attempts."""
    by_category: dict[str, CategoryScore] = Field(default_factory=dict)
    num_tasks: int
    """Tasks with at least one scored attempt."""
    num_samples: int
    """Scored attempts."""
    num_infrastructure: int = 0
    num_invalid: int = 0


class PairedDifference(Record):
    """Run ``b`` minus run ``a`` over the tasks that both scored."""

    difference: float
    """Mean over tasks of the difference of their pass rates."""
    low: float
    high: float
    """95% interval (Student t over tasks)."""
    p_value: float
    """Two-sided sign-flip permutation test of "no task differs"."""
    num_tasks: int
    """Tasks in both runs."""
    only_a: int
    only_b: int
    """Tasks scored in one run alone; they are left out."""
