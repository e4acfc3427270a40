"""Promises: ranks publish their own tensors alone, and the result is the version that one process would have published."""

from __future__ import annotations

import pickle

import pytest
from weight_states import ScriptedStore, State, changed, same, state

from etude.base.errors import DiskFullError, WeightSyncError
from etude.weights.content import content_hash
from etude.weights.manifests import Kind
from etude.weights.shards import ShardWriter, commit
from etude.weights.subscriber import WeightSubscriber

RANKS = 3


def part(whole: State, rank: int) -> State:
    return {name: tensor for number, (name, tensor) in enumerate(sorted(whole.items())) if number % RANKS == rank}


def publish(store: ScriptedStore, writers: list[ShardWriter], version: int, whole: State, kind: Kind) -> None:
    """As ranks would: each writes, the small records travel, one commits."""
    shards = [writer.write(version, part(whole, rank), kind) for rank, writer in enumerate(writers)]
    commit(store, pickle.loads(pickle.dumps(shards)), epoch=0)
    for writer in writers:
        writer.committed()


def test_three_ranks_publish_what_one_process_would() -> None:
    store, writers = ScriptedStore(), []
    writers = [ShardWriter(store) for _ in range(RANKS)]
    states = [state(0)]
    publish(store, writers, 0, states[0], "base")
    for version in (1, 2):
        states.append(changed(states[-1], version, 0.05))
        publish(store, writers, version, states[-1], "delta")
    subscriber = WeightSubscriber(store)
    for version, expected in enumerate(states):
        assert same(subscriber.fetch(version), expected)
        (key,) = [key for key in store.list("manifests") if f"/{version:08d}" in key]
        assert content_hash(expected) in store.get(key).decode()
    assert same(subscriber.fetch(2, held=(1, states[1])), states[2])
    assert subscriber.report is not None
    assert subscriber.report.num_files == RANKS


def test_a_rank_that_fails_leaves_no_version_and_all_go_on_from_the_last_whole_one() -> None:
    store = ScriptedStore()
    writers = [ShardWriter(store) for _ in range(RANKS)]
    publish(store, writers, 0, state(0), "base")
    lost = changed(state(0), 1, 0.2)
    writers[0].write(1, part(lost, 0), "delta")
    store.full = True
    with pytest.raises(DiskFullError):
        writers[1].write(1, part(lost, 1), "delta")
    store.full = False
    assert WeightSubscriber(store).latest() == 0
    newest = changed(lost, 2, 0.2)
    publish(store, writers, 2, newest, "delta")
    assert same(WeightSubscriber(store).fetch(2, held=(0, state(0))), newest)


def test_shards_that_do_not_belong_together_are_refused() -> None:
    store = ScriptedStore()
    writers = [ShardWriter(store) for _ in range(RANKS)]
    with pytest.raises(WeightSyncError, match="version 1 cannot be a delta"):
        writers[0].write(1, part(state(0), 0), "delta")
    base = [writer.write(0, part(state(0), rank), "base") for rank, writer in enumerate(writers)]
    with pytest.raises(WeightSyncError, match="do not belong together"):
        commit(store, [base[0], writers[1].write(1, part(state(0), 1), "base")], epoch=0)
    with pytest.raises(WeightSyncError, match="do not belong together"):
        commit(store, [base[0], base[0]], epoch=0)
    assert WeightSubscriber(store).latest() is None
