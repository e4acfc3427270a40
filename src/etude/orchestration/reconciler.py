"""The reconciler: the one owner of the life of a sample.

    tasks ──> next_slot() ──> executors run rollouts ──> finish() ──> ready_groups() ──> trainer ──> mark_trained()

* executors ask for a slot and wait while the run is far enough ahead of the trainer (backpressure);
* the trainer waits in ``ready_groups`` with a deadline;
* ``mark_trained`` frees capacity. Nothing else changes state, and every change is a row of the ledger.

Staleness. With B groups a step and the bound S, at most (S + 1) * B groups are started and not yet trained. A group that starts
at version v has at most (S + 1) * B - 1 others before it, so that it trains at version v + S at the latest; a straggler that others overtook is
dropped as ``stale`` when its oldest token would exceed the bound. S = 0 is synchronous RL.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from etude.base.config import Config
from etude.base.errors import EtudeError, deadline_exceeded
from etude.base.records import PolicyVersion, Rollout, RolloutGroup, Task
from etude.orchestration.group_store import GroupStore
from etude.orchestration.ledger import GROUP, Ledger


class ReconcilerConfig(Config):
    """The policy knobs of the sample life cycle."""

    group_size: int = Field(8, ge=2)
    """Rollouts of one task that train together."""
    max_staleness: int = Field(2, ge=0)
    """Versions that the oldest token of a group may be behind the trainer; 0 is synchronous."""
    max_retries: int = Field(2, ge=0)
    """How often an attempt that hit a fault is started again before its group is dropped."""


@dataclass(frozen=True)
class Slot:
    """The right to run one attempt."""

    task: Task
    attempt: int
    tries: int


class Exhausted(EtudeError):
    """All tasks are done and fewer groups are left than a step needs."""


@dataclass
class _Open:
    """A group whose attempts are not all in."""

    task: Task
    rollouts: dict[int, Rollout] = field(default_factory=dict)


class Reconciler:
    """Single-threaded (one event loop). ``advantages`` maps a group's rewards to its advantages."""

    def __init__(
        self,
        config: ReconcilerConfig,
        ledger: Ledger,
        store: GroupStore,
        tasks: Iterator[Task],
        *,
        groups_per_step: int,
        advantages: Callable[[Sequence[float]], list[float]],
        version: PolicyVersion = 0,
    ) -> None:
        self.config, self.ledger, self.store, self.version = config, ledger, store, version
        self.groups_per_step, self.advantages = groups_per_step, advantages
        self._tasks = tasks
        self._queue: deque[Slot] = deque()
        self._open: dict[str, _Open] = {}
        self._ready: deque[RolloutGroup] = deque()
        self._taken: set[str] = set()
        self._changed = asyncio.Condition()
        self._out_of_tasks = False
        self.faults = 0
        self.last_progress = "started"

    # ---------------------------------------------------------------------------------------------- executors

    async def next_slot(self) -> Slot | None:
        """The next attempt to run; waits for capacity; None when there are no more tasks."""
        async with self._changed:
            while True:
                if self._queue:
                    slot = self._queue.popleft()
                    self.ledger.move(slot.task.id, slot.attempt, "running", version=self.version)
                    return slot
                if self._out_of_tasks and not self._open:
                    return None
                if not self._out_of_tasks and self._untrained < self._capacity:
                    self._start_group()
                    continue
                await self._changed.wait()

    async def finish(self, slot: Slot, rollout: Rollout) -> None:
        """Take a rollout back: score it, or start it again, or drop its group."""
        async with self._changed:
            self._finish(slot, rollout)
            self._changed.notify_all()

    def _finish(self, slot: Slot, rollout: Rollout) -> None:
        task_id = slot.task.id
        group = self._open.get(task_id)
        if group is None:  # its group was dropped meanwhile
            return
        if not rollout.outcome.trainable or rollout.reward is None:
            self.faults += 1
            self.last_progress = f"{task_id} attempt {slot.attempt}: {rollout.outcome} ({rollout.detail})"
            if slot.tries < self.config.max_retries:
                self.ledger.move(task_id, slot.attempt, "queued", version=self.version, reason=rollout.outcome.value)
                self._queue.append(Slot(slot.task, slot.attempt, slot.tries + 1))
            else:
                self._drop_open(task_id, rollout.outcome.value)
            return
        for state in ("verifying", "scored"):  # the executor did both; its answer is the first we hear of them
            self.ledger.move(task_id, slot.attempt, state, version=self.version)
        group.rollouts[slot.attempt] = rollout
        self.last_progress = f"{task_id} attempt {slot.attempt} scored"
        if len(group.rollouts) == self.config.group_size:
            self._complete(group)

    def _complete(self, group: _Open) -> None:
        rollouts = tuple(group.rollouts[attempt] for attempt in range(self.config.group_size))
        rewards = [rollout.reward.total for rollout in rollouts if rollout.reward is not None]
        complete = RolloutGroup(
            task_id=group.task.id, rollouts=rollouts, advantages=tuple(self.advantages(rewards))
        )
        self.store.save(complete)
        for attempt in range(self.config.group_size):
            self.ledger.move(group.task.id, attempt, "grouped", version=self.version)
        self.ledger.move(group.task.id, GROUP, "ready", version=self.version)
        del self._open[group.task.id]
        self._ready.append(complete)
        self.last_progress = f"group {group.task.id} ready"

    # ------------------------------------------------------------------------------------------------ trainer

    async def ready_groups(self, count: int, *, deadline: float) -> list[RolloutGroup]:
        """The ``count`` oldest complete groups within the staleness bound. Raises DeadlineExceeded, Exhausted."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline
        async with self._changed:
            while True:
                if self._drop_stale():
                    self._changed.notify_all()  # capacity came free
                if len(self._ready) >= count:
                    order = sorted(self._ready, key=lambda group: group.oldest_version)
                    chosen = order[:count]
                    for group in chosen:
                        self._ready.remove(group)
                        self._taken.add(group.task_id)
                    return chosen
                if self._out_of_tasks and not self._open:
                    raise Exhausted(f"{len(self._ready)} groups are left and no task; a step needs {count}")
                try:
                    await asyncio.wait_for(self._changed.wait(), end - loop.time())
                except TimeoutError:
                    waiting = f"{count} ready groups ({len(self._ready)} there)"
                    raise deadline_exceeded("trainer", waiting, deadline, self.version, self.last_progress) from None

    async def mark_trained(self, groups: Sequence[RolloutGroup], version: PolicyVersion) -> None:
        """``groups`` are in the weights of ``version``: note it, forget them, free their capacity."""
        async with self._changed:
            self.version = version
            for group in groups:
                self.ledger.move(group.task_id, GROUP, "trained", version=version)
                self.store.remove(group.task_id)
                self._taken.discard(group.task_id)
            self.last_progress = f"version {version} trained on {len(groups)} groups"
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------- resume

    def resume(self, trained: Sequence[str], version: PolicyVersion) -> None:
        """Rebuild after a crash from ledger and group store, before any other call.

        ``trained`` are the tasks of the step checkpoint that is loaded: the weights hold them even where the crash came before
        the ledger said so.
        """
        self.version = version
        for group in self.store.load_all():
            state = self.ledger.group_state(group.task_id)
            if state == "" and self._grouped(group):  # crashed between file and ledger
                self.ledger.move(group.task_id, GROUP, "ready", version=version, reason="resume")
                state = "ready"
            if state == "ready" and group.task_id in trained:
                self.ledger.move(group.task_id, GROUP, "trained", version=version, reason="resume")
                state = "trained"
            if state == "ready":
                self._ready.append(group)
            else:
                self.store.remove(group.task_id)
        on_disk = {group.task_id for group in self._ready}
        for (task_id, attempt), state in list(self.ledger.states.items()):
            if attempt == GROUP and state == "ready" and task_id not in on_disk:
                self.ledger.move(task_id, GROUP, "dropped", version=version, reason="group file lost")
        self._drop_stale()

    def _grouped(self, group: RolloutGroup) -> bool:
        """Bring the attempts of a group whose file is complete up to ``grouped``."""
        order = ("queued", "running", "verifying", "scored", "grouped")
        for attempt in range(len(group.rollouts)):
            at = order.index(self.ledger.states.get((group.task_id, attempt), "queued"))
            for state in order[at + 1 :]:
                self.ledger.move(group.task_id, attempt, state, version=self.version, reason="resume")
        return True

    # ---------------------------------------------------------------------------------------------- internals

    @property
    def _capacity(self) -> int:
        return (self.config.max_staleness + 1) * self.groups_per_step

    @property
    def _untrained(self) -> int:
        return len(self._open) + len(self._ready) + len(self._taken)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def _start_group(self) -> None:
        """Queue all attempts of the next task that the ledger does not know as finished."""
        for task in self._tasks:
            if self.ledger.group_state(task.id):
                continue  # trained, dropped or ready: before the restart
            self._open[task.id] = _Open(task)
            for attempt in range(self.config.group_size):
                if self.ledger.states.get((task.id, attempt)) != "queued":
                    known = self.ledger.states.get((task.id, attempt), "")
                    self.ledger.move(
                        task.id, attempt, "queued", version=self.version, reason="resume" if known else ""
                    )
                self._queue.append(Slot(task, attempt, 0))
            return
        self._out_of_tasks = True
        self._changed.notify_all()  # a trainer may be waiting for groups that will never come

    def _drop_open(self, task_id: str, reason: str) -> None:
        self.ledger.move(task_id, GROUP, "dropped", version=self.version, reason=reason)
        self._queue = deque(slot for slot in self._queue if slot.task.id != task_id)
        del self._open[task_id]

    def _drop_stale(self) -> bool:
        """Drop ready groups beyond the bound; whether there were any."""
        before = len(self._ready)
        for group in list(self._ready):
            if self.version - group.oldest_version > self.config.max_staleness:
                self._ready.remove(group)
                self.store.remove(group.task_id)
                self.ledger.move(group.task_id, GROUP, "dropped", version=self.version, reason="stale")
        return len(self._ready) < before
