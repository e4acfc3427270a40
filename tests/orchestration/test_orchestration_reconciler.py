"""Promises of the sample life cycle, under random schedules with faults and crashes.

1. The ledger balances: each prompt is trained once, dropped with a reason, or pending.
2. No group trains beyond the staleness bound; with bound 0 the run is synchronous.
3. Every wait ends, and its error names the component, the version and the last progress.
4. A run killed anywhere and resumed trains nothing twice and loses no complete group.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from etude.algorithms.advantages import dr_grpo
from etude.base.errors import DeadlineExceeded
from etude.base.records import (
    AnswerVerifier,
    Category,
    Effort,
    Outcome,
    RewardBreakdown,
    Rollout,
    Segment,
    Task,
)
from etude.orchestration.group_store import GroupStore
from etude.orchestration.ledger import IllegalMove, Ledger, audit
from etude.orchestration.reconciler import Exhausted, Reconciler, ReconcilerConfig, Slot

GROUP_SIZE, PER_STEP = 3, 2


def task(number: int) -> Task:
    return Task(
        id=f"t{number:03d}", category=Category.UNDERSTAND, instruction="?", files={}, verifier=AnswerVerifier(accepted=("x",))
    )


def rollout(slot: Slot, version: int, outcome: Outcome = Outcome.COMPLETED, reward: float = 1.0) -> Rollout:
    segment = Segment(
        tokens=np.array([1, 2], np.int32), sampled=np.array([False, True]), logprobs=np.zeros(2, np.float32),
        versions=np.array([-1, version], np.int32), end="stop",
    )  # fmt: skip
    return Rollout(
        id=f"{slot.task.id}-{slot.attempt}", task_id=slot.task.id, category=slot.task.category, segments=(segment,), turns=(),
        effort=Effort(), outcome=outcome, passed=True, reward=RewardBreakdown(terms={"outcome": reward}) if outcome.trainable else None,
    )  # fmt: skip


def reconciler(folder: Path, *, tasks: int = 20, staleness: int = 1, version: int = 0) -> Reconciler:
    return Reconciler(
        ReconcilerConfig(group_size=GROUP_SIZE, max_staleness=staleness), Ledger(folder / "ledger.sqlite"),
        GroupStore(folder / "groups"), iter([task(i) for i in range(tasks)]), groups_per_step=PER_STEP,
        advantages=dr_grpo, version=version,
    )  # fmt: skip


class Crash(Exception):
    pass


async def drive(made: Reconciler, rng: random.Random, *, fault_rate: float, crash_at: int | None, trained: list[str]) -> int:
    """Executors of random speed and a trainer; returns the version reached. ``trained`` plays the weights on disk."""
    moves = 0

    async def executor() -> None:
        nonlocal moves
        while (slot := await made.next_slot()) is not None:
            version = made.version
            for _ in range(rng.randint(0, 6)):
                await asyncio.sleep(0)
            moves += 1
            if crash_at is not None and moves >= crash_at:
                raise Crash
            fault = rng.random() < fault_rate
            outcome = rng.choice((Outcome.ENVIRONMENT_FAULT, Outcome.INFERENCE_FAULT)) if fault else Outcome.COMPLETED
            await made.finish(slot, rollout(slot, version, outcome, rng.random()))

    async def trainer() -> None:
        while True:
            try:
                groups = await made.ready_groups(PER_STEP, deadline=20.0)
            except Exhausted:
                return
            for group in groups:
                assert made.version - group.oldest_version <= made.config.max_staleness
                assert group.task_id not in trained, "no prompt is trained twice"
                assert sum(group.advantages) == pytest.approx(0.0)
            for _ in range(rng.randint(0, 10)):
                await asyncio.sleep(0)
            trained.extend(group.task_id for group in groups)  # the step checkpoint
            if crash_at is not None and rng.random() < 0.1:
                raise Crash
            await made.mark_trained(groups, made.version + 1)

    jobs = [asyncio.create_task(job) for job in (trainer(), *(executor() for _ in range(4)))]
    try:
        await asyncio.wait_for(asyncio.gather(*jobs), 60.0)
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
    return made.version


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_balance(tmp_path: Path, seed: int) -> None:
    made, trained = reconciler(tmp_path, staleness=seed % 3), []
    asyncio.run(drive(made, random.Random(seed), fault_rate=0.15, crash_at=None, trained=trained))
    made.ledger.close()
    accounts = audit(tmp_path)
    assert accounts.consistent, str(accounts)
    assert accounts.trained == len(trained) == len(set(trained))
    assert accounts.open == 0
    assert accounts.trained + sum(accounts.dropped.values()) + accounts.ready == 20


@pytest.mark.parametrize("seed", range(8))
def test_killed_and_resumed_trains_nothing_twice(tmp_path: Path, seed: int) -> None:
    rng, trained, version = random.Random(seed), [], 0
    for round_number in range(6):
        made = reconciler(tmp_path, version=version)
        if round_number:
            made.resume(trained[-PER_STEP:], len(trained) // PER_STEP)
        try:
            crash_at = rng.randint(2, 25) if round_number < 5 else None
            asyncio.run(drive(made, rng, fault_rate=0.1, crash_at=crash_at, trained=trained))
        except Crash:
            made.ledger.close()
            continue
        break
    made.ledger.close()
    accounts = audit(tmp_path)
    assert accounts.consistent, str(accounts)
    assert len(trained) == len(set(trained))
    assert accounts.trained == len(trained)
    assert accounts.trained + sum(accounts.dropped.values()) + accounts.ready + accounts.open == 20
    assert accounts.open == 0


def test_bound_zero_is_synchronous(tmp_path: Path) -> None:
    made = reconciler(tmp_path, staleness=0)

    async def run() -> None:
        slots = [await made.next_slot() for _ in range(PER_STEP * GROUP_SIZE)]
        waiting = asyncio.create_task(made.next_slot())
        await asyncio.sleep(0.01)
        assert not waiting.done(), "nothing starts before the step is trained"
        for slot in slots:
            assert slot is not None
            await made.finish(slot, rollout(slot, 0))
        groups = await made.ready_groups(PER_STEP, deadline=5.0)
        await made.mark_trained(groups, 1)
        assert (await waiting) is not None

    asyncio.run(run())


def test_a_group_that_keeps_failing_is_dropped_with_its_reason(tmp_path: Path) -> None:
    made = reconciler(tmp_path, tasks=1)

    async def run() -> None:
        while (slot := await made.next_slot()) is not None:
            bad = slot.attempt == 1
            await made.finish(slot, rollout(slot, 0, Outcome.ENVIRONMENT_FAULT if bad else Outcome.COMPLETED))

    asyncio.run(asyncio.wait_for(run(), 10))
    assert audit(tmp_path).dropped == {"environment_fault": 1}


def test_waiting_for_groups_has_a_deadline_that_explains_itself(tmp_path: Path) -> None:
    made = reconciler(tmp_path, version=7)

    async def run() -> None:
        slot = await made.next_slot()
        assert slot is not None
        await made.finish(slot, rollout(slot, 7))
        await made.ready_groups(PER_STEP, deadline=0.05)

    with pytest.raises(DeadlineExceeded, match=r"trainer waited .*ready groups.*policy version 7.*attempt 0 scored"):
        asyncio.run(run())


def test_stale_groups_are_dropped_not_trained(tmp_path: Path) -> None:
    made = reconciler(tmp_path, staleness=1, tasks=4)

    async def run() -> None:
        slots = [slot for _ in range(4 * GROUP_SIZE) if (slot := await made.next_slot()) is not None]
        for slot in slots:
            await made.finish(slot, rollout(slot, 0))
        for version in (1, 2):
            await made.mark_trained([], version)
        with pytest.raises(DeadlineExceeded):
            await made.ready_groups(PER_STEP, deadline=0.01)

    asyncio.run(run())
    assert audit(tmp_path).dropped == {"stale": 4}


def test_illegal_moves_are_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.move("t", 0, "queued", version=0)
    with pytest.raises(IllegalMove, match="cannot go from queued to scored"):
        ledger.move("t", 0, "scored", version=0)


def test_torn_group_files_are_ignored(tmp_path: Path) -> None:
    store = GroupStore(tmp_path / "groups")
    (tmp_path / "groups" / "a.zst").write_bytes(b"torn")
    (tmp_path / "groups" / "b.tmp").write_bytes(b"half")
    assert store.load_all() == []
    assert not list((tmp_path / "groups").iterdir())
