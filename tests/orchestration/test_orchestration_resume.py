"""Promises of a resume: a run killed anywhere goes on; no prompt is trained twice in the surviving weights, none is lost."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from sample_fakes import (
    GROUP_SIZE,
    NUM_TASKS,
    PER_STEP,
    Checkpoints,
    Crash,
    CrashingStore,
    Run,
    reconciler,
    rollout,
)

from etude.orchestration.group_store import GroupStore
from etude.orchestration.ledger import GROUP, audit
from etude.orchestration.reconciler import Reconciler


def check(folder: Path, disk: Checkpoints) -> None:
    """The accounts at the end: what the ledger says is what the weights hold, and every prompt is accounted for."""
    accounts = audit(folder)
    assert accounts.consistent, str(accounts)
    assert len(disk.weights) == len(set(disk.weights)), "trained twice"
    assert accounts.trained == len(disk.weights)
    assert accounts.open == 0
    assert accounts.total == NUM_TASKS, "a prompt was lost"


@pytest.mark.parametrize("seed", range(16))
def test_crashed_and_resumed_at_random_points(tmp_path: Path, seed: int) -> None:
    """Both orders of checkpoint and ledger, checkpoints every one to three steps, crashes inside the group store too."""
    rng, disk = random.Random(seed), Checkpoints(tmp_path / "c.json")
    for life in range(12):
        where = rng.choice(("before", "torn", "after"))
        store = CrashingStore(tmp_path / "groups", rng.randint(3, 9), where) if life % 3 == 2 and life < 9 else None
        made = reconciler(tmp_path, version=disk.version, store=store)
        made.resume(disk.last, disk.version)
        run = Run(
            made,
            disk,
            rng,
            fault_rate=0.05,
            crash_rate=0.03 if life < 9 else 0.0,
            save_every=1 + seed % 3,
            save_first=rng.random() < 0.5,
        )
        try:
            asyncio.run(run.live())
        except Crash:
            made.ledger.close()
            continue
        disk.save(made.version, run.weights, [])
        made.checkpointed(made.version)
        made.ledger.close()
        break
    check(tmp_path, disk)
    left = {path.stem for path in (tmp_path / "groups").glob("*")}
    assert left == {group.task_id for group in GroupStore(tmp_path / "groups").load_all()}


@pytest.mark.parametrize("seed", [1, 2])
def test_kill_9_at_random_moments(tmp_path: Path, seed: int) -> None:
    """A real process, killed after a random number of events, four times; the fifth life runs to the end."""
    rng = random.Random(seed)
    script = Path(__file__).with_name("killed_run.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    kills = 0
    for life in range(5):
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(seed + life)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stdout is not None
        stop_after = rng.randint(5, 40) if life < 4 else None
        last = ""
        for number, line in enumerate(process.stdout):
            last = line
            if number == stop_after:
                process.kill()
                kills += 1
        process.wait(30)
        process.stdout.close()
    assert kills >= 3
    assert last == "done\n"
    check(tmp_path, Checkpoints.load(tmp_path / "checkpoint.json"))


def ready_run(folder: Path, **settings: int) -> list[str]:
    """A run that dies with one step of ready groups; their names."""
    made = reconciler(folder, **settings)

    async def live() -> None:
        for _ in range(PER_STEP * GROUP_SIZE):
            slot = await made.next_slot()
            assert slot is not None
            await made.finish(slot, rollout(slot, (0,)))

    asyncio.run(live())
    made.ledger.close()
    return [f"t{i:03d}" for i in range(PER_STEP)]


def test_ready_groups_are_trained_after_the_restart_without_sampling(tmp_path: Path) -> None:
    names = ready_run(tmp_path)
    made = reconciler(tmp_path)
    made.resume([], 0)
    groups = asyncio.run(made.ready_groups(PER_STEP, deadline=0.1))
    assert [group.task_id for group in groups] == names


def test_a_crash_between_group_file_and_ledger_keeps_the_group(tmp_path: Path) -> None:
    made = reconciler(tmp_path, tasks=1, store=CrashingStore(tmp_path / "groups", 1, "after"))

    async def live() -> None:
        for _ in range(GROUP_SIZE):
            slot = await made.next_slot()
            assert slot is not None
            await made.finish(slot, rollout(slot, (0,)))

    with pytest.raises(Crash):
        asyncio.run(live())
    assert made.ledger.group_state("t000") == "queued"
    made.ledger.close()
    again = reconciler(tmp_path, tasks=1)
    again.resume([], 0)
    assert again.num_ready == 1
    assert asyncio.run(again.next_slot()) is None, "nothing is sampled again"
    assert audit(tmp_path).consistent


def test_stale_groups_on_disk_are_dropped_not_loaded(tmp_path: Path) -> None:
    ready_run(tmp_path)
    made = reconciler(tmp_path, staleness=1)
    made.resume([], 2)
    assert made.num_ready == 0
    assert audit(tmp_path).dropped == {"stale": PER_STEP}
    assert list((tmp_path / "groups").iterdir()) == []


def test_a_crash_between_checkpoint_and_ledger_does_not_train_again(tmp_path: Path) -> None:
    names = ready_run(tmp_path)
    made = reconciler(tmp_path)
    made.resume(names, 1)
    assert made.num_ready == 0
    assert audit(tmp_path).trained == PER_STEP


def test_a_crash_between_ledger_and_checkpoint_rolls_back(tmp_path: Path) -> None:
    names = ready_run(tmp_path)
    made = reconciler(tmp_path)
    made.resume([], 0)

    async def train() -> None:
        await made.mark_trained(await made.ready_groups(PER_STEP, deadline=1.0), 1, durable=False)

    asyncio.run(train())
    made.ledger.close()
    made = reconciler(tmp_path)
    made.resume([], 0)
    assert made.num_ready == PER_STEP
    accounts = audit(tmp_path)
    assert (accounts.trained, accounts.ready, accounts.rolled_back) == (0, PER_STEP, PER_STEP)
    assert all(made.ledger.group_state(name) == "ready" for name in names)


def test_a_ready_group_whose_file_is_damaged_is_sampled_again(tmp_path: Path) -> None:
    names = ready_run(tmp_path)
    (tmp_path / "groups" / f"{names[0]}.zst").write_bytes(b"damaged")
    made = reconciler(tmp_path)
    made.resume([], 0)
    assert made.num_ready == PER_STEP - 1

    async def first() -> str:
        slot = await made.next_slot()
        assert slot is not None
        return slot.task.id

    assert asyncio.run(first()) == names[0]
    assert audit(tmp_path).consistent


def test_faults_before_a_crash_count_after_it(tmp_path: Path) -> None:
    """Otherwise a task that kills the run would be tried for ever."""

    async def fail(made: Reconciler) -> None:
        slot = await made.next_slot()
        assert slot is not None
        await made.finish(slot, rollout(slot, (0,), reward=None))

    for _ in range(2):
        made = reconciler(tmp_path, tasks=1)
        made.resume([], 0)
        asyncio.run(fail(made))
        made.ledger.close()
    made = reconciler(tmp_path, tasks=1)
    made.resume([], 0)

    async def tries() -> int:
        slot = await made.next_slot()
        assert slot is not None
        return slot.tries

    assert asyncio.run(tries()) == 2
    assert made.ledger.entry("t000", GROUP).state == "queued"


def test_a_smaller_group_size_after_the_restart_closes_the_extra_attempts(tmp_path: Path) -> None:
    made = reconciler(tmp_path, tasks=1)

    async def begin() -> None:
        for _ in range(GROUP_SIZE):
            await made.next_slot()

    asyncio.run(begin())
    made.ledger.close()
    made = reconciler(tmp_path, tasks=1)
    made.config = made.config.model_copy(update={"group_size": GROUP_SIZE - 1})
    made.resume([], 0)

    async def finish() -> int:
        for _ in range(GROUP_SIZE - 1):
            slot = await made.next_slot()
            assert slot is not None
            await made.finish(slot, rollout(slot, (0,)))
        return len((await made.ready_groups(1, deadline=1.0))[0].rollouts)

    assert asyncio.run(finish()) == GROUP_SIZE - 1
    assert audit(tmp_path).consistent
