"""Promises of the reconciler.

1. The ledger balances: each prompt is trained once, dropped with a reason, or pending.
2. No group trains beyond the staleness bound; with bound 0 the run is synchronous, and its batches are the same every time.
3. Every wait ends, and its error names the component, the version and the last progress.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from sample_fakes import GROUP_SIZE, NUM_TASKS, PER_STEP, Checkpoints, Run, reconciler, rollout

from etude.base.errors import DeadlineExceeded
from etude.base.records import Outcome
from etude.orchestration.ledger import IllegalMove, audit
from etude.orchestration.reconciler import Exhausted, Reconciler, Slot


async def take(made: Reconciler, count: int) -> list[Slot]:
    slots = [await made.next_slot(deadline=5.0) for _ in range(count)]
    return [slot for slot in slots if slot is not None]


async def settle() -> None:
    """Let everything that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(9))
def test_random_schedules_balance(tmp_path: Path, seed: int) -> None:
    made = reconciler(tmp_path, staleness=seed % 3, slot_seconds=0.1, slots=(0, 5, 20)[seed // 3])
    run = Run(
        made, Checkpoints(tmp_path / "c.json"), random.Random(seed), fault_rate=0.15, stall_rate=0.02 * (seed % 2)
    )
    asyncio.run(run.live())
    made.ledger.close()
    accounts = audit(tmp_path)
    assert accounts.consistent, str(accounts)
    assert accounts.trained == len(run.weights) == len(set(run.weights))
    assert accounts.open == 0
    assert accounts.total == NUM_TASKS
    assert accounts.ready < PER_STEP
    assert accounts.faults > 0
    assert len(made.store.load_all()) == accounts.ready, "files of finished groups are gone"


@pytest.mark.parametrize("seed", range(3))
def test_bound_zero_gives_the_same_batches_at_every_speed_and_drops_nothing(tmp_path: Path, seed: int) -> None:
    made = reconciler(tmp_path, staleness=0)
    run = Run(made, Checkpoints(tmp_path / "c.json"), random.Random(seed))
    asyncio.run(run.live())
    names = [f"t{i:03d}" for i in range(NUM_TASKS)]
    assert run.batches == [names[i : i + PER_STEP] for i in range(0, NUM_TASKS, PER_STEP)]
    assert audit(tmp_path).dropped == {}


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_at_most_bound_plus_one_steps_of_groups_are_in_flight(tmp_path: Path, staleness: int) -> None:
    made = reconciler(tmp_path, staleness=staleness)

    async def run() -> None:
        slots = await take(made, (staleness + 1) * PER_STEP * GROUP_SIZE)
        waiting = asyncio.create_task(made.next_slot())
        await settle()
        assert not waiting.done()
        for slot in slots:
            assert await made.finish(slot, rollout(slot, (0,))) == "scored"
        await settle()
        assert not waiting.done(), "ready groups count too"
        groups = await made.ready_groups(PER_STEP, deadline=5.0)
        await settle()
        assert not waiting.done(), "so does the batch that is being trained"
        await made.mark_trained(groups, 1)
        assert (await waiting) is not None

    asyncio.run(asyncio.wait_for(run(), 20))


def test_engines_that_lag_behind_the_trainer_get_fewer_groups(tmp_path: Path) -> None:
    """Bound 1, engines one version behind: what starts now may have one step of groups before it, not two."""
    made = reconciler(tmp_path, staleness=1)

    async def run() -> None:
        made.served(0)
        slots = await take(made, PER_STEP * GROUP_SIZE)
        for slot in slots:
            await made.finish(slot, rollout(slot, (0,)))
        await made.mark_trained(await made.ready_groups(PER_STEP, deadline=5.0), 1)
        await take(made, PER_STEP * GROUP_SIZE)
        waiting = asyncio.create_task(made.next_slot())
        await settle()
        assert not waiting.done()
        made.served(1)
        assert (await waiting) is not None

    asyncio.run(asyncio.wait_for(run(), 20))


def test_the_number_of_slots_is_a_bound_and_may_change(tmp_path: Path) -> None:
    made = reconciler(tmp_path, slots=2)

    async def run() -> None:
        first, _ = await take(made, 2)
        waiting = asyncio.create_task(made.next_slot())
        await settle()
        assert not waiting.done()
        assert made.num_running == 2
        await made.finish(first, rollout(first, (0,)))
        assert (await waiting) is not None
        made.slots = 4
        assert len(await take(made, 2)) == 2

    asyncio.run(asyncio.wait_for(run(), 20))


def test_an_attempt_is_tried_again_a_bounded_number_of_times_then_its_group_is_dropped(tmp_path: Path) -> None:
    made, tries = reconciler(tmp_path, tasks=1), []

    async def run() -> None:
        while (slot := await made.next_slot()) is not None:
            bad = slot.attempt == 1
            if bad:
                tries.append(slot.tries)
            await made.finish(slot, rollout(slot, (0,), Outcome.ENVIRONMENT_FAULT if bad else Outcome.COMPLETED))

    asyncio.run(asyncio.wait_for(run(), 20))
    assert tries == [0, 1, 2]
    assert audit(tmp_path).dropped == {"environment_fault": 1}
    assert audit(tmp_path).consistent


def test_a_fault_is_never_a_reward(tmp_path: Path) -> None:
    made = reconciler(tmp_path)

    async def run() -> None:
        (slot,) = await take(made, 1)
        other = Slot(slot.task.model_copy(update={"id": "other"}), 0, 0)
        assert await made.finish(slot, rollout(other, (0,))) == "requeued"
        (slot,) = await take(made, 1)
        assert slot.tries == 1, "the old attempt comes before younger ones"
        assert await made.finish(slot, rollout(slot, (0,), reward=None)) == "requeued"

    asyncio.run(asyncio.wait_for(run(), 20))
    assert made.faults == 2
    assert "no_reward" in made.last_progress


def test_an_executor_that_never_answers_loses_its_slot(tmp_path: Path) -> None:
    made = reconciler(tmp_path, tasks=1, slot_seconds=0.05)

    async def run() -> None:
        slots = await take(made, GROUP_SIZE)
        for slot in slots[1:]:
            await made.finish(slot, rollout(slot, (0,)))
        again = await made.next_slot(deadline=5.0)
        assert again is not None
        assert (again.attempt, again.tries) == (slots[0].attempt, 1)
        assert not made.wanted(slots[0])
        assert await made.finish(slots[0], rollout(slots[0], (0,))) == "late"
        assert await made.finish(again, rollout(again, (0,))) == "scored"
        assert await made.finish(again, rollout(again, (0,))) == "late", "an answer counts once"
        assert len(await made.ready_groups(1, deadline=5.0)) == 1

    asyncio.run(asyncio.wait_for(run(), 20))
    assert audit(tmp_path).consistent


def test_a_trainer_that_waits_alone_still_reclaims_lost_slots(tmp_path: Path) -> None:
    made = reconciler(tmp_path, tasks=1, slot_seconds=0.01)

    async def run() -> None:
        while True:
            try:
                await made.ready_groups(1, deadline=0.1)
            except DeadlineExceeded:
                await made.next_slot(deadline=5.0)
            except Exhausted:
                return

    asyncio.run(asyncio.wait_for(run(), 20))
    assert audit(tmp_path).dropped == {"executor_lost": 1}


def test_stale_groups_are_dropped_not_trained(tmp_path: Path) -> None:
    made = reconciler(tmp_path, staleness=1, tasks=4)

    async def run() -> None:
        for slot in await take(made, 4 * GROUP_SIZE):
            if slot.task.id != "t003" or slot.attempt == 0:
                await made.finish(slot, rollout(slot, (0, 5)))
            else:
                last = slot
        for version in (1, 2):
            await made.mark_trained([], version)
        assert not made.wanted(last), "an open group with a rollout that is too old is given up at once"
        assert await made.next_slot() is None
        with pytest.raises(Exhausted):
            await made.ready_groups(PER_STEP, deadline=0.01)

    asyncio.run(asyncio.wait_for(run(), 20))
    assert audit(tmp_path).dropped == {"stale": 4}
    assert made.store.load_all() == []


def test_the_oldest_groups_train_first(tmp_path: Path) -> None:
    made = reconciler(tmp_path, staleness=2)

    async def run() -> None:
        slots = await take(made, 3 * GROUP_SIZE)
        for versions, name in (((1,), "t000"), ((0,), "t002"), ((1,), "t001")):
            for slot in slots:
                if slot.task.id == name:
                    await made.finish(slot, rollout(slot, versions))
        await made.mark_trained([], 1)
        groups = await made.ready_groups(3, deadline=5.0)
        assert [group.task_id for group in groups] == ["t002", "t000", "t001"]

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_rollout_without_a_sampled_token_makes_no_group_stale(tmp_path: Path) -> None:
    made = reconciler(tmp_path, staleness=0, version=7)

    async def run() -> None:
        for slot in await take(made, GROUP_SIZE):
            await made.finish(slot, rollout(slot, (), Outcome.MODEL_FAULT, 0.0))
        (group,) = await made.ready_groups(1, deadline=5.0)
        assert group.advantages == (0.0,) * GROUP_SIZE

    asyncio.run(asyncio.wait_for(run(), 20))
    assert audit(tmp_path).no_signal == 1


def test_every_wait_has_a_deadline_that_explains_itself(tmp_path: Path) -> None:
    made = reconciler(tmp_path, version=7, staleness=0)

    async def run() -> None:
        slots = await take(made, PER_STEP * GROUP_SIZE)
        await made.finish(slots[0], rollout(slots[0], (7,)))
        with pytest.raises(
            DeadlineExceeded, match=r"trainer waited .*ready groups.*policy version 7.*attempt 0 scored"
        ):
            await made.ready_groups(PER_STEP, deadline=0.02)
        with pytest.raises(
            DeadlineExceeded, match=r"executor waited .*a slot \(2 groups in flight\).*policy version 7"
        ):
            await made.next_slot(deadline=0.02)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_waiters_are_told_when_the_tasks_run_out_or_the_run_stops(tmp_path: Path) -> None:
    made = reconciler(tmp_path, tasks=1)

    async def run() -> None:
        trainer = asyncio.create_task(made.ready_groups(PER_STEP, deadline=30.0))
        slots = await take(made, GROUP_SIZE)
        idle = asyncio.create_task(made.next_slot(deadline=30.0))
        await settle()
        assert not trainer.done()
        assert not idle.done(), "one of the open attempts may have to be tried again"
        for slot in slots:
            await made.finish(slot, rollout(slot, (0,)))
        assert await idle is None
        with pytest.raises(Exhausted, match="1 groups are left"):
            await trainer

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_stopped_run_hands_out_nothing_and_leaves_groups_pending(tmp_path: Path) -> None:
    made = reconciler(tmp_path, staleness=0)

    async def run() -> None:
        slots = await take(made, PER_STEP * GROUP_SIZE)
        waiting = asyncio.create_task(made.next_slot())
        await settle()
        made.stop()
        assert await waiting is None
        assert await made.next_slot() is None
        assert await made.finish(slots[0], rollout(slots[0], (0,))) == "scored", "what runs may still come back"

    asyncio.run(asyncio.wait_for(run(), 20))
    assert audit(tmp_path).open == PER_STEP


def test_a_failed_step_gives_its_groups_back(tmp_path: Path) -> None:
    made = reconciler(tmp_path)

    async def run() -> None:
        for slot in await take(made, PER_STEP * GROUP_SIZE):
            await made.finish(slot, rollout(slot, (0,)))
        groups = await made.ready_groups(PER_STEP, deadline=5.0)
        made.give_back(groups)
        again = await made.ready_groups(PER_STEP, deadline=5.0)
        assert again == groups
        await made.mark_trained(again, 1)
        with pytest.raises(IllegalMove, match="only groups that ready_groups gave out"):
            await made.mark_trained(again, 2)
        with pytest.raises(IllegalMove, match="version 1 does not come after 1"):
            await made.mark_trained([], 1)

    asyncio.run(asyncio.wait_for(run(), 20))
    assert audit(tmp_path).trained == PER_STEP
