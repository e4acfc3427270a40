"""What a killed run left behind: ledger and group files brought back into agreement with the step checkpoint that was loaded.

Facts that can disagree after ``kill -9``, each written before the next: the group's file, the ledger's ``ready``, and then,
in either order, the ledger's ``trained`` and the step checkpoint. The checkpoint decides what is trained, since the weights
are in it.
"""

from __future__ import annotations

from collections.abc import Collection

from etude.base.records import PolicyVersion, RolloutGroup
from etude.orchestration.group_store import GroupStore
from etude.orchestration.ledger import Ledger
from etude.orchestration.lifecycle import (
    GROUP,
    GROUPED,
    QUEUED,
    READY,
    RESUME,
    RUNNING,
    SCORED,
    TRAINED,
    VERIFYING,
    Move,
)

_LIFE = (QUEUED, RUNNING, VERIFYING, SCORED, GROUPED)


def recover(ledger: Ledger, store: GroupStore, trained: Collection[str], version: PolicyVersion) -> list[RolloutGroup]:
    """The groups that are ready, oldest first; groups left ``queued`` are to be sampled again.

    ``version`` is that of the loaded checkpoint, ``trained`` the tasks that it says its last step held.
    """
    groups = {group.task_id: group for group in store.load_all()}
    for task_id in ledger.task_ids():
        _settle(ledger, task_id, groups.get(task_id), task_id in trained, version)
    ready = []
    for task_id, group in groups.items():
        if ledger.group_state(task_id) == READY:
            ready.append(group)
        else:
            store.remove(task_id)
    return ready


def _settle(ledger: Ledger, task_id: str, group: RolloutGroup | None, in_weights: bool, version: PolicyVersion) -> None:
    """Move one group to where file and checkpoint say it is."""
    entry = ledger.entry(task_id, GROUP)
    state = entry.state
    if state == QUEUED and group is not None:  # killed after the file, before the row
        _bring_up(ledger, group, version)
        state = READY
    if state == READY and in_weights:  # killed after the checkpoint, before the row
        ledger.move(task_id, GROUP, TRAINED, version=version, reason=RESUME)
    elif state == TRAINED and entry.version > version and not in_weights:  # killed after the row, before the checkpoint
        to = READY if group is not None else QUEUED
        ledger.move(task_id, GROUP, to, version=version, reason=f"rolled back to version {version}")
    elif state == READY and group is None:
        ledger.move(task_id, GROUP, QUEUED, version=version, reason="group file lost")


def _bring_up(ledger: Ledger, group: RolloutGroup, version: PolicyVersion) -> None:
    """All attempts to ``grouped``, then the group to ``ready``, in one transaction."""
    moves = []
    for attempt in range(len(group.rollouts)):
        at = ledger.state(group.task_id, attempt)
        done = _LIFE.index(at) + 1 if at in _LIFE else 0
        moves += [Move(group.task_id, attempt, state, version, RESUME) for state in _LIFE[done:]]
    ledger.move_all([*moves, Move(group.task_id, GROUP, READY, version, RESUME)])
