"""Promises of the group store: what was saved comes back whole; what is torn or damaged is never a group."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from sample_fakes import rollout, task

from etude.base.errors import DiskFullError
from etude.base.records import RolloutGroup
from etude.base.telemetry import full_disk_named
from etude.orchestration.group_store import GroupStore
from etude.orchestration.samples import Slot


def group(number: int, task_id: str | None = None) -> RolloutGroup:
    rollouts = tuple(rollout(Slot(task(number), attempt, 0), (number, number + 1)) for attempt in range(3))
    return RolloutGroup(task_id=task_id or task(number).id, rollouts=rollouts, advantages=(0.25, -0.25, 0.0))


def test_groups_come_back_bit_for_bit_oldest_first(tmp_path: Path) -> None:
    store = GroupStore(tmp_path / "a" / "groups")
    for number in (2, 0, 1):
        store.save(group(number))
    loaded = store.load_all()
    assert [g.task_id for g in loaded] == ["t002", "t000", "t001"]
    for before, after in zip((group(2), group(0), group(1)), loaded, strict=True):
        assert before.model_dump_json() == after.model_dump_json()
        assert np.array_equal(before.rollouts[0].segments[0].logprobs, after.rollouts[0].segments[0].logprobs)
        assert after.oldest_version == before.oldest_version
    store.remove("t000")
    store.remove("t000")
    assert [g.task_id for g in store.load_all()] == ["t002", "t001"]


def test_saving_again_replaces(tmp_path: Path) -> None:
    store = GroupStore(tmp_path)
    store.save(group(1))
    store.save(group(7, "t001"))
    (loaded,) = store.load_all()
    assert loaded.oldest_version == 7


def test_any_damage_is_noticed_and_set_aside(tmp_path: Path) -> None:
    store = GroupStore(tmp_path)
    store.save(group(1))
    path = tmp_path / "t001.zst"
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert store.load_all() == []
        assert not path.exists()
        (tmp_path / "t001.damaged").unlink()
    for position in range(8, len(whole), 11):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(bytes(damaged))
        assert store.load_all() == [], f"byte {position}"
    path.write_bytes(whole)
    assert len(store.load_all()) == 1


def test_half_written_files_are_swept(tmp_path: Path) -> None:
    store = GroupStore(tmp_path)
    (tmp_path / "b.tmp").write_bytes(b"half")
    assert store.load_all() == []
    assert not list(tmp_path.iterdir())


def test_any_task_id_makes_a_file_name(tmp_path: Path) -> None:
    store = GroupStore(tmp_path)
    names = ["../escape", "org/repo#12", "a.b", "a%2Eb", "x" * 500, "x" * 500 + "y", "with space", ".", "ü" * 100]
    for name in names:
        store.save(group(1, name))
    assert sorted(g.task_id for g in store.load_all()) == sorted(names)
    assert {path.parent for path in tmp_path.rglob("*") if path.is_file()} == {tmp_path}
    for name in names:
        store.remove(name)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named() -> None:
    """The store writes under this guard."""
    with pytest.raises(DiskFullError, match="/groups"), full_disk_named(Path("/groups")):
        raise OSError(errno.ENOSPC, "No space left on device")
