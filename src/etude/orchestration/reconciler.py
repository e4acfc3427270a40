"""The reconciler: the one owner of the life of a sample.

    tasks ──> next_slot() ──> executors run rollouts ──> finish() ──> ready_groups() ──> trainer ──> mark_trained()
                                                                                     served() <── engines

* executors ask for a slot and wait while the run is far enough ahead of the trainer (backpressure);
* the trainer waits in ``ready_groups``; every wait has a deadline;
* ``mark_trained`` and ``served`` free capacity. Nothing else changes state, and every change is a row of the ledger.

Staleness of a group is the trainer's version when the group's gradient is taken, minus the version that sampled its oldest
token. With B groups a step, bound S, trainer at version v and engines at version e <= v, a group may start while fewer than
(S + 1 - (v - e)) * B groups are started and not trained. Proof: its first token has a version of at least e. With n groups
before it, trained in order, its gradient is taken at version v + floor(n / B) <= v + S - (v - e) = e + S. Only a straggler
that others overtake can come later; it is dropped as ``stale``, and never trained. S = 0 is synchronous RL: a step's groups
start when the engines hold its weights.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from etude.base.errors import deadline_exceeded
from etude.base.records import PolicyVersion, Rollout, RolloutGroup, Task
from etude.orchestration import lifecycle as life
from etude.orchestration.group_store import GroupStore
from etude.orchestration.leases import Leases
from etude.orchestration.ledger import Ledger
from etude.orchestration.lifecycle import GROUP, IllegalMove, Move
from etude.orchestration.reconciler_config import ReconcilerConfig
from etude.orchestration.recovery import recover
from etude.orchestration.samples import (
    Exhausted,
    Finished,
    OpenGroup,
    ReadyGroup,
    Slot,
    fault_of,
    has_signal,
    oldest_version,
)
from etude.orchestration.waiting import Signal

__all__ = ["Exhausted", "Finished", "Reconciler", "ReconcilerConfig", "Slot"]


class Reconciler:
    """Single-threaded: all calls come from one event loop.

    ``tasks`` is read once, in order; a resumed run passes the same tasks again from the start, and those that are trained,
    dropped or ready are passed over. ``advantages`` maps the rewards of a group to its advantages, one a rollout.
    """

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
        self.slots = config.slots
        """May be changed while the run goes on; fewer slots take effect as attempts come back."""
        self.faults = 0
        """Attempts of this process that hit a fault."""
        self.last_progress = "started"
        self._tasks = tasks
        self._served: PolicyVersion | None = None
        self._queue: deque[Slot] = deque()
        self._running = Leases(config.slot_seconds)
        self._open: dict[str, OpenGroup] = {}
        self._ready: dict[str, ReadyGroup] = {}
        self._taken: dict[str, ReadyGroup] = {}
        self._uncovered: dict[str, PolicyVersion] = {}  # trained, but in no step checkpoint yet
        self._started = 0
        self._out_of_tasks = self._stopping = False
        self._signal = Signal()

    async def next_slot(self, *, deadline: float = 3600.0) -> Slot | None:
        """The next attempt to run; waits for capacity. None when there are no more tasks or after :meth:`stop`.

        Raises DeadlineExceeded after ``deadline`` seconds.
        """
        end = asyncio.get_running_loop().time() + deadline
        while not self._stopping:
            self._reclaim_lost()
            if not self.slots or len(self._running) < self.slots:
                if not self._queue and not self._out_of_tasks and self._in_flight < self._capacity:
                    self._start_group()
                if self._queue:
                    return self._hand_out(self._queue.popleft())
            if self._out_of_tasks and not self._open:
                return None
            await self._wait(end, "executor", f"a slot ({self._in_flight} groups in flight)", deadline)
        return None

    def wanted(self, slot: Slot) -> bool:
        """Whether the result of ``slot`` would still be taken; an executor may cancel it when not."""
        return self._running.holds(slot)

    async def finish(self, slot: Slot, rollout: Rollout) -> Finished:
        """Take a rollout back: score it, or start it again, or drop its group. Raises DiskFullError.

        ``late``: its group was dropped, or the attempt was given to somebody else; the rollout does not count.
        """
        if not self._running.holds(slot):
            return "late"
        self._running.end(slot)
        if reason := fault_of(slot, rollout):
            return self._failed(slot, reason, rollout.detail)
        task_id, group = slot.task.id, self._open[slot.task.id]
        # the executor did both; its answer is the first that is heard of them
        self.ledger.move_all([Move(task_id, slot.attempt, to, self.version) for to in (life.VERIFYING, life.SCORED)])
        group.rollouts[slot.attempt] = rollout
        self.last_progress = f"{task_id} attempt {slot.attempt} scored"
        if len(group.rollouts) == self.config.group_size:
            await self._complete(group)
        self._signal.notify()
        return "scored"

    def served(self, version: PolicyVersion) -> None:
        """All engines now sample with ``version`` or a later one. Until the first call they are taken to follow the trainer."""
        self._served = version
        self._signal.notify()

    def stop(self) -> None:
        """Hand out no more slots; what waits in :meth:`next_slot` returns None. Open groups stay pending."""
        self._stopping = True
        self._signal.notify()

    async def ready_groups(self, count: int, *, deadline: float) -> list[RolloutGroup]:
        """The ``count`` oldest complete groups within the staleness bound. Raises DeadlineExceeded, Exhausted."""
        end = asyncio.get_running_loop().time() + deadline
        while True:
            self._reclaim_lost()
            self._drop_stale()
            if len(self._ready) >= count:
                chosen = sorted(self._ready.values(), key=lambda ready: (ready.oldest, ready.order))[:count]
                for ready in chosen:
                    self._taken[ready.group.task_id] = self._ready.pop(ready.group.task_id)
                return [ready.group for ready in chosen]
            if self._out_of_tasks and not self._open:
                raise Exhausted(f"{len(self._ready)} groups are left and no task; a step needs {count}")
            await self._wait(end, "trainer", f"{count} ready groups ({len(self._ready)} there)", deadline)

    def give_back(self, groups: Sequence[RolloutGroup]) -> None:
        """A step failed before it changed the weights: ``groups`` are ready again."""
        for group in groups:
            self._ready[group.task_id] = self._taken.pop(group.task_id)
        self._signal.notify()

    async def mark_trained(
        self, groups: Sequence[RolloutGroup], version: PolicyVersion, *, durable: bool = True
    ) -> None:
        """``groups`` are in the weights of ``version``: note it, forget them, free their capacity.

        ``durable``: the step checkpoint of ``version`` is on disk. If not, their files stay until :meth:`checkpointed`
        covers them, so that a run that falls back to an older checkpoint trains them again. Raises IllegalMove.
        """
        if version <= self.version:
            raise IllegalMove(f"reconciler: version {version} does not come after {self.version}")
        if not all(group.task_id in self._taken for group in groups):
            raise IllegalMove("reconciler: only groups that ready_groups gave out can be trained")
        self.ledger.move_all([Move(group.task_id, GROUP, life.TRAINED, version) for group in groups], durable=True)
        self.version = version
        for group in groups:
            del self._taken[group.task_id]
            self._uncovered[group.task_id] = version
        if durable:
            self.checkpointed(version)
        self.last_progress = f"version {version} trained on {len(groups)} groups"
        self._drop_stale()
        self._signal.notify()

    def checkpointed(self, version: PolicyVersion) -> None:
        """The step checkpoint of ``version`` is on disk: the files of what it holds are not needed any more."""
        for task_id in [task_id for task_id, trained_at in self._uncovered.items() if trained_at <= version]:
            del self._uncovered[task_id]
            self.store.remove(task_id)

    def resume(self, trained: Sequence[str], version: PolicyVersion) -> None:
        """Rebuild after a crash from ledger and group store, before any other call.

        ``version`` is that of the loaded step checkpoint (0: none), ``trained`` the tasks of its last step, where it lists
        them: the weights hold them even where the crash came before the ledger said so. Ready groups are kept unless stale,
        what a lost version had trained is rolled back, the rest is sampled again.
        """
        self.version = version
        for order, group in enumerate(recover(self.ledger, self.store, trained, version)):
            self._add_ready(group, order)
        self._started = len(self._ready)
        self._drop_stale()

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def _capacity(self) -> int:
        """Groups that may be started and not trained; the arithmetic is at the head of the file."""
        lag = 0 if self._served is None else max(0, self.version - self._served)
        return max(0, self.config.max_staleness + 1 - lag) * self.groups_per_step

    @property
    def _in_flight(self) -> int:
        return len(self._open) + len(self._ready) + len(self._taken)

    async def _wait(self, end: float, who: str, what: str, deadline: float) -> None:
        """Until something changes or a lease ends. Raises DeadlineExceeded at ``end`` (loop time)."""
        now = asyncio.get_running_loop().time()
        if now >= end:
            raise deadline_exceeded(who, what, deadline, self.version, self.last_progress)
        await self._signal.wait(self._running.next_end(end) - now)

    def _start_group(self) -> None:
        """Queue all attempts of the next task that is not finished, ready or open."""
        for task in self._tasks:
            if task.id in self._open or self.ledger.group_state(task.id) in (life.READY, life.TRAINED, life.DROPPED):
                continue
            entries = self.ledger.entries(task.id)
            self.ledger.move_all(life.starting(entries, task.id, self.config.group_size, self.version))
            tries = [self.ledger.entry(task.id, attempt).faults for attempt in range(self.config.group_size)]
            self._queue.extend(Slot(task, attempt, faults) for attempt, faults in enumerate(tries))
            self._open[task.id] = OpenGroup(task, self._started)
            self._started += 1
            return
        self._out_of_tasks = True
        self._signal.notify()  # a trainer may be waiting for groups that will never come

    def _hand_out(self, slot: Slot) -> Slot:
        self.ledger.move(slot.task.id, slot.attempt, life.RUNNING, version=self.version)
        self._running.give(slot, asyncio.get_running_loop().time())
        return slot

    def _reclaim_lost(self) -> None:
        for slot in self._running.lost(asyncio.get_running_loop().time()):
            if self._running.holds(slot):  # its group may have been dropped for one before it
                self._running.end(slot)
                self._failed(slot, "executor_lost", f"not back after {self.config.slot_seconds:.0f}s")

    def _failed(self, slot: Slot, reason: str, detail: str) -> Finished:
        """Start an attempt again, before younger ones, or drop its group."""
        self.faults += 1
        self.last_progress = f"{slot.task.id} attempt {slot.attempt}: {reason} ({detail})"
        if again := slot.tries < self.config.max_retries:
            self.ledger.move(slot.task.id, slot.attempt, life.QUEUED, version=self.version, reason=reason)
            self._queue.appendleft(Slot(slot.task, slot.attempt, slot.tries + 1))
        else:
            self._drop_open(slot.task.id, reason)
        self._signal.notify()
        return "requeued" if again else "dropped"

    async def _complete(self, open_group: OpenGroup) -> None:
        """File first, then the ledger: what the ledger calls ready can be loaded."""
        task_id = open_group.task.id
        group = open_group.complete(self.advantages)
        await asyncio.to_thread(self.store.save, group)
        if self._open.get(task_id) is not open_group:  # dropped as stale meanwhile
            self.store.remove(task_id)
            return
        self.ledger.move_all(life.completing(task_id, len(group.rollouts), self.version, has_signal(group)))
        del self._open[task_id]
        self._add_ready(group, open_group.order)
        self.last_progress = f"group {task_id} ready"

    def _add_ready(self, group: RolloutGroup, order: int) -> None:
        oldest = oldest_version(group.rollouts)
        self._ready[group.task_id] = ReadyGroup(group, self.version if oldest is None else oldest, order)

    def _drop_open(self, task_id: str, reason: str) -> None:
        self.ledger.move_all(life.closing(self.ledger.entries(task_id), task_id, self.version, reason))
        self._queue = deque(slot for slot in self._queue if slot.task.id != task_id)
        self._running.end_task(task_id)
        del self._open[task_id]

    def _drop_stale(self) -> None:
        """Drop what can never train within the bound: ready groups, and open ones with a rollout that is too old."""
        bound = self.version - self.config.max_staleness
        for task_id in [task_id for task_id, ready in self._ready.items() if ready.oldest < bound]:
            del self._ready[task_id]
            self.ledger.move(task_id, GROUP, life.DROPPED, version=self.version, reason="stale")
            self.store.remove(task_id)
            self._signal.notify()
        for task_id, group in list(self._open.items()):
            oldest = oldest_version(group.rollouts.values())
            if oldest is not None and oldest < bound:
                self._drop_open(task_id, "stale")
                self._signal.notify()
