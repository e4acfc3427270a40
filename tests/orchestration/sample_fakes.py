"""Scripted tasks, rollouts, executors, engine and trainer for the tests of the sample life cycle.

The trainer's weights are the list of the tasks that trained them, so that "trained twice" and "lost" can be read off.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from etude.algorithms.advantages import dr_grpo
from etude.base.records import (
    AnswerVerifier,
    Category,
    Effort,
    Outcome,
    RewardBreakdown,
    Rollout,
    RolloutGroup,
    Segment,
    Task,
)
from etude.orchestration.group_store import GroupStore
from etude.orchestration.ledger import Ledger
from etude.orchestration.reconciler import Exhausted, Reconciler, ReconcilerConfig, Slot

GROUP_SIZE, PER_STEP, NUM_TASKS = 3, 2, 20
FAULTS = (Outcome.ENVIRONMENT_FAULT, Outcome.INFERENCE_FAULT, Outcome.VERIFIER_FAULT, Outcome.CANCELLED)


def task(number: int) -> Task:
    return Task(
        id=f"t{number:03d}",
        category=Category.UNDERSTAND,
        instruction="?",
        files={},
        verifier=AnswerVerifier(accepted=("x",)),
    )


def rollout(
    slot: Slot, versions: tuple[int, ...], outcome: Outcome = Outcome.COMPLETED, reward: float | None = 1.0
) -> Rollout:
    """One prompt token, then one sampled token for each of ``versions``."""
    count = len(versions)
    segment = Segment(
        tokens=np.arange(count + 1, dtype=np.int32),
        sampled=np.array([False] + [True] * count),
        logprobs=np.zeros(count + 1, np.float32),
        versions=np.array([-1, *versions], np.int32),
        end="stop",
    )
    terms = RewardBreakdown(terms={"outcome": reward}) if outcome.trainable and reward is not None else None
    return Rollout(
        id=f"{slot.task.id}-{slot.attempt}",
        task_id=slot.task.id,
        category=slot.task.category,
        segments=(segment,),
        turns=(),
        effort=Effort(),
        outcome=outcome,
        passed=True,
        reward=terms,
    )


def reconciler(
    folder: Path,
    *,
    tasks: int = NUM_TASKS,
    staleness: int = 1,
    version: int = 0,
    slot_seconds: float = 60.0,
    slots: int = 0,
    store: GroupStore | None = None,
) -> Reconciler:
    return Reconciler(
        ReconcilerConfig(group_size=GROUP_SIZE, max_staleness=staleness, slot_seconds=slot_seconds, slots=slots),
        Ledger(folder / "ledger.sqlite"),
        store or GroupStore(folder / "groups"),
        iter([task(i) for i in range(tasks)]),
        groups_per_step=PER_STEP,
        advantages=dr_grpo,
        version=version,
    )


class Crash(Exception):
    """The process is gone."""


class CrashingStore(GroupStore):
    """Dies in its n-th save: before the file is there, in the middle, or after."""

    def __init__(self, folder: Path, nth: int, where: str) -> None:
        super().__init__(folder)
        self.left, self.where = nth, where

    def save(self, group: RolloutGroup) -> None:
        self.left -= 1
        if self.left == 0 and self.where == "torn":
            (self.folder / f"{group.task_id}.tmp").write_bytes(b"half a gro")
        if self.left != 0 or self.where == "after":
            super().save(group)
        if self.left == 0:
            raise Crash


@dataclass
class Checkpoints:
    """What the trainer has on disk: one step checkpoint, replaced whole."""

    path: Path
    version: int = 0
    weights: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)
    """Tasks of the last step."""

    @classmethod
    def load(cls, path: Path) -> Checkpoints:
        return cls(path, **json.loads(path.read_text())) if path.exists() else cls(path)

    def save(self, version: int, weights: list[str], last: list[str]) -> None:
        self.version, self.weights, self.last = version, list(weights), last
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"version": version, "weights": weights, "last": last}))
        temporary.rename(self.path)


@dataclass
class Run:
    """One life of a run: executors of random speed, an engine that lags, a trainer that saves every so often."""

    made: Reconciler
    disk: Checkpoints
    rng: random.Random
    fault_rate: float = 0.0
    stall_rate: float = 0.0
    crash_rate: float = 0.0
    """Probability at each point where a crash may hit."""
    save_every: int = 1
    save_first: bool = True
    """Checkpoint, then ledger; or the other way round."""
    say: bool = False
    """Print a line at every point where a crash may hit."""
    batches: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weights = list(self.disk.weights)
        self.engine_version = self.made.version
        self.made.served(self.engine_version)

    async def live(self, executors: int = 6) -> None:
        """To the end of the tasks, or a Crash."""
        jobs = [asyncio.create_task(job) for job in (self._trainer(), *(self._executor() for _ in range(executors)))]
        try:
            await asyncio.wait_for(asyncio.gather(*jobs), 60.0)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _pause(self, steps: int) -> None:
        for _ in range(self.rng.randint(0, steps)):
            await asyncio.sleep(0)

    def _point(self) -> None:
        if self.say:
            print(".", flush=True)  # noqa: T201
        if self.rng.random() < self.crash_rate:
            raise Crash

    async def _executor(self) -> None:
        while (slot := await self.made.next_slot(deadline=30.0)) is not None:
            if self.rng.random() < self.stall_rate:
                while self.made.wanted(slot):  # the executor hangs until its lease is over
                    await asyncio.sleep(0.002)
                assert await self.made.finish(slot, rollout(slot, (self.engine_version,))) == "late"
                continue
            first = self.engine_version
            await self._pause(8)
            self._point()
            fault = self.rng.random() < self.fault_rate
            outcome = self.rng.choice(FAULTS) if fault else Outcome.COMPLETED
            result = rollout(slot, (first, self.engine_version), outcome, float(self.rng.randint(0, 1)))
            await self.made.finish(slot, result)
            self._point()

    async def _trainer(self) -> None:
        made = self.made
        while True:
            try:
                groups = await made.ready_groups(PER_STEP, deadline=20.0)
            except Exhausted:
                return
            names = [group.task_id for group in groups]
            for group in groups:
                assert made.version - group.oldest_version <= made.config.max_staleness, "bound exceeded"
                assert group.task_id not in self.weights, "trained twice"
                assert len(group.rollouts) == GROUP_SIZE
                assert all(r.outcome.trainable for r in group.rollouts)
            await self._pause(12)
            self._point()
            version = made.version + 1
            self.weights += names
            self.batches.append(names)
            saves = version % self.save_every == 0
            if saves and self.save_first:
                self.disk.save(version, self.weights, names)
                self._point()
                await made.mark_trained(groups, version)
            else:
                await made.mark_trained(groups, version, durable=False)
                self._point()
                if saves:
                    self.disk.save(version, self.weights, names)
                    self._point()
                    made.checkpointed(version)
            self._point()
            await self._pause(12)
            self.engine_version = version
            made.served(version)
