"""What the reconciler holds: slots that it hands out, groups that are open, groups that are ready."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from etude.base.errors import EtudeError
from etude.base.records import PolicyVersion, Rollout, RolloutGroup, Task

Finished = Literal["scored", "requeued", "dropped", "late"]
"""What became of a rollout."""


class Exhausted(EtudeError):
    """All tasks are done and fewer groups are left than a step needs."""


@dataclass(frozen=True)
class Slot:
    """The right to run one attempt."""

    task: Task
    attempt: int
    tries: int
    """Faults of this attempt before."""


@dataclass
class OpenGroup:
    """A group whose attempts are not all in."""

    task: Task
    order: int
    """Rank among the groups of this process, by start."""
    rollouts: dict[int, Rollout] = field(default_factory=dict)

    def complete(self, advantages: Callable[[Sequence[float]], list[float]]) -> RolloutGroup:
        """The group, rollouts by attempt; all of them have a reward."""
        rollouts = tuple(self.rollouts[attempt] for attempt in sorted(self.rollouts))
        rewards = [rollout.reward.total for rollout in rollouts if rollout.reward is not None]
        return RolloutGroup(task_id=self.task.id, rollouts=rollouts, advantages=tuple(advantages(rewards)))


@dataclass(frozen=True)
class ReadyGroup:
    """A complete group and what it is ordered by."""

    group: RolloutGroup
    oldest: PolicyVersion
    order: int


def oldest_version(rollouts: Iterable[Rollout]) -> PolicyVersion | None:
    """Version of the oldest sampled token; None when nothing was sampled at all, which nothing can make stale."""
    return min((rollout.oldest_version for rollout in rollouts if rollout.oldest_version >= 0), default=None)


def has_signal(group: RolloutGroup) -> bool:
    """Whether any advantage differs from zero; without, the group moves nothing but a KL term."""
    return any(group.advantages)


def fault_of(slot: Slot, rollout: Rollout) -> str:
    """Why ``rollout`` cannot count as the answer to ``slot``, or an empty string. A fault is never a reward of zero."""
    if rollout.task_id != slot.task.id:
        return "wrong_task"
    if not rollout.outcome.trainable:
        return rollout.outcome.value
    return "no_reward" if rollout.reward is None else ""
