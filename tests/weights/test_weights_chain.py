"""Promises: every version is rebuilt bit for bit; damage is named, and repaired where it can be; one writer at a time."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch
from weight_states import ScriptedStore, State, changed, same, state

from etude.base.errors import DeadlineExceeded, DiskFullError, WeightSyncError
from etude.weights.garbage import collect
from etude.weights.manifests import live_links, manifest_key
from etude.weights.publisher import WeightPublisher
from etude.weights.store import ObjectStore, Store
from etude.weights.subscriber import WeightSubscriber


def publish(store: ObjectStore, count: int, base_every: int = 3) -> list[State]:
    publisher, states = WeightPublisher(store, base_every=base_every), [state(0)]
    publisher.publish(0, states[0])
    for version in range(1, count):
        states.append(changed(states[-1], version, 0.02))
        publisher.publish(version, states[-1])
    publisher.close()
    return states


def key_of(store: ObjectStore, kind: str, version: int) -> str:
    (key,) = [key for key in store.list(kind) if f"/{version:08d}-" in key]
    return key


def test_every_version_is_rebuilt_from_the_store_alone_and_from_any_held_one(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    states = publish(store, 8)
    subscriber = WeightSubscriber(store)
    assert subscriber.latest() == 7
    for version, expected in enumerate(states):
        assert same(subscriber.fetch(version), expected)
        for held in range(8):
            assert same(subscriber.fetch(version, held=(held, states[held])), expected)


def test_files_come_first_and_the_manifest_last() -> None:
    store = ScriptedStore()
    publish(store, 4, base_every=2)
    for index, key in enumerate(store.puts):
        if key.startswith("manifests/"):
            kind, version = key.rsplit("-", 1)[1].removesuffix(".json"), key.split("/")[1][:8]
            assert store.puts[index - 1].startswith(f"{kind}s/{version}-")


def test_an_engine_that_is_up_to_date_downloads_no_base_and_a_late_one_one(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    states = publish(store, 8, base_every=3)  # bases at 0, 3, 6
    subscriber = WeightSubscriber(store)
    subscriber.fetch(6, held=(5, states[5]))
    assert subscriber.report is not None
    assert (subscriber.report.from_held, subscriber.report.num_files) == (True, 1)
    subscriber.fetch(7)
    assert subscriber.report is not None
    assert (subscriber.report.from_held, subscriber.report.num_files) == (False, 2)
    subscriber.fetch(7, held=(7, states[7]))
    assert subscriber.report is not None
    assert (subscriber.report.num_files, subscriber.report.repaired) == (0, ())


def test_what_is_held_is_checked(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    states = publish(store, 8)
    subscriber = WeightSubscriber(store)
    for held in ((7, states[2]), (6, states[2]), (6, {"other": torch.zeros(2)})):
        before = {name: tensor.clone() for name, tensor in held[1].items()}
        assert same(subscriber.fetch(7, held=held), states[7])
        assert same(dict(held[1]), before)
    assert subscriber.report is not None
    assert not subscriber.report.from_held
    assert subscriber.report.repaired


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_delta_is_named_and_repaired_where_another_way_exists(tmp_path: Path, damage: str) -> None:
    store = Store(str(tmp_path))
    states = publish(store, 7, base_every=4)  # bases at 0, 4
    path = tmp_path / key_of(store, "deltas", 2)
    healthy = path.read_bytes()
    if damage == "flip":
        path.write_bytes(healthy[:-1] + bytes([healthy[-1] ^ 1]))
    elif damage == "truncate":
        path.write_bytes(healthy[:10])
    else:
        path.unlink()
    subscriber = WeightSubscriber(store)
    for version in (2, 3):
        with pytest.raises(WeightSyncError, match=rf"version {version} cannot be rebuilt: .*deltas/00000002"):
            subscriber.fetch(version)
    assert same(subscriber.fetch(3, held=(2, states[2])), states[3])
    assert same(subscriber.fetch(5, held=(1, states[1])), states[5]), "the next base goes round the damage"
    assert subscriber.report is not None
    assert not subscriber.report.from_held


def test_a_damaged_base_is_repaired_from_the_one_before(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    states = publish(store, 7, base_every=3)
    (tmp_path / key_of(store, "bases", 6)).write_bytes(b"torn")
    (tmp_path / key_of(store, "bases", 3)).unlink()
    subscriber = WeightSubscriber(store)
    assert same(subscriber.fetch(6), states[6])
    assert subscriber.report is not None
    assert any("bases/00000006" in problem for problem in subscriber.report.repaired)
    assert any("bases/00000003" in problem for problem in subscriber.report.repaired)
    (tmp_path / key_of(store, "bases", 0)).unlink()
    with pytest.raises(WeightSyncError, match="bases/00000000"):
        subscriber.fetch(6)


def test_a_whole_delta_of_another_version_under_the_right_name_is_corrupt(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    publish(store, 3, base_every=9)
    (tmp_path / key_of(store, "deltas", 2)).write_bytes((tmp_path / key_of(store, "deltas", 1)).read_bytes())
    with pytest.raises(WeightSyncError, match=r"deltas/00000002.*corrupt"):
        WeightSubscriber(store).fetch(2)


def test_a_lying_manifest_yields_no_state(tmp_path: Path) -> None:
    """Every object hashes as its manifest says, but the content hash is another state's."""
    store = Store(str(tmp_path))
    publish(store, 2, base_every=9)
    path = tmp_path / manifest_key(1, 0, "delta")
    text = path.read_text()
    start = text.index('"content_hash":"') + len('"content_hash":"')
    path.write_text(text[:start] + "0" * 64 + text[start + 64 :])
    with pytest.raises(WeightSyncError, match="does not hash to its manifest"):
        WeightSubscriber(store).fetch(1)


def test_a_torn_manifest_does_not_count_and_an_unknown_version_is_named(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert WeightSubscriber(store).latest() is None
    with pytest.raises(WeightSyncError, match="newest is None"):
        WeightSubscriber(store).fetch(0)
    states = publish(store, 2)
    (tmp_path / manifest_key(2, 0, "delta")).write_text('{"version": 2, "par')
    assert WeightSubscriber(store).latest() == 1
    with pytest.raises(WeightSyncError, match=r"version 2 .*00000002-000000-delta.json is torn"):
        WeightSubscriber(store).fetch(2)
    with pytest.raises(WeightSyncError, match=r"version 9 .*newest is 2"):
        WeightSubscriber(store).fetch(9)
    (tmp_path / manifest_key(1, 0, "delta")).unlink()
    assert WeightSubscriber(store).latest() == 0
    assert same(WeightSubscriber(store).fetch(0, held=(1, states[1])), states[0])


def test_a_missing_manifest_in_the_middle_is_named(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    states = publish(store, 4, base_every=9)
    (tmp_path / manifest_key(1, 0, "delta")).unlink()
    with pytest.raises(WeightSyncError, match="version 2 builds on 1, whose manifest is missing"):
        WeightSubscriber(store).fetch(3)
    assert same(WeightSubscriber(store).fetch(3, held=(1, states[1])), states[3]), "version 1 itself is held"


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_a_listing_does_not_matter(seed: int) -> None:
    class Shuffled(ScriptedStore):
        def list(self, prefix: str) -> list[str]:
            found = super().list(prefix)
            random.Random(seed).shuffle(found)
            return found

    store = Shuffled()
    states = publish(store, 8)
    subscriber = WeightSubscriber(store)
    assert subscriber.latest() == 7
    assert same(subscriber.fetch(7), states[7])
    assert same(subscriber.fetch(7, held=(4, states[4])), states[7])
    assert subscriber.report is not None
    assert subscriber.report.from_held
    assert WeightPublisher(store).epoch == 1
    assert collect(store, keep_bases=1).horizon == 6


def test_a_listing_that_lags_shows_an_older_version_and_never_a_wrong_one() -> None:
    """A store that lists the last manifests late: what is seen is a version that is whole."""

    class Lagging(ScriptedStore):
        behind = 0

        def list(self, prefix: str) -> list[str]:
            found = super().list(prefix)
            return found[: len(found) - self.behind] if prefix == "manifests" else found

    store = Lagging()
    states = publish(store, 5, base_every=9)
    subscriber = WeightSubscriber(store)
    for store.behind in range(4):
        latest = subscriber.latest()
        assert latest == 4 - store.behind
        assert same(subscriber.fetch(latest), states[latest])
    store.behind = 1
    with pytest.raises(WeightSyncError, match=r"version 4 cannot be had .* the newest is 3"):
        subscriber.fetch(4)
    store.behind = 0
    assert same(subscriber.fetch(4), states[4])


# ------------------------------------------------------------------------------------------------- writers


def test_a_new_writer_takes_over_and_the_old_one_stops(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    old = WeightPublisher(store)
    old.publish(0, state(0))
    new = WeightPublisher(store)
    assert new.epoch == old.epoch + 1
    with pytest.raises(WeightSyncError, match=r"another trainer \(epoch 1\) took over"):
        old.publish(1, state(2))
    assert new.publish(1, state(1)).parent is None, "a new writer starts from a base"
    assert same(WeightSubscriber(store).fetch(1), state(1))


def test_a_stale_epoch_is_refused(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert WeightPublisher(store, epoch=5).epoch == 5
    for epoch in (5, 3):
        with pytest.raises(WeightSyncError, match=f"epoch {epoch} is stale"):
            WeightPublisher(store, epoch=epoch)
    assert WeightPublisher(store).epoch == 6


def test_manifests_fence_too_where_the_claims_were_cleaned_up() -> None:
    store = ScriptedStore()
    WeightPublisher(store, epoch=4).publish(0, state(0))
    for key in store.list("writers"):
        store.delete(key)
    assert WeightPublisher(store).epoch == 5


def test_two_writers_that_open_at_once_never_share_an_epoch() -> None:
    """A rival's claim of the same epoch appears between our look and our claim."""

    class Racing(ScriptedStore):
        rival = ""

        def put(self, key: str, data: bytes) -> None:
            if key.startswith("writers/") and self.rival:
                super().put(f"writers/000000-{self.rival}", b"")
            super().put(key, data)

    for rival, expected in (("0" * 12, 1), ("g" * 12, 0)):
        store = Racing()
        store.rival = rival
        assert WeightPublisher(store).epoch == expected


def test_a_run_resumed_from_an_earlier_version_voids_what_came_after(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    first = publish(store, 6)
    publisher = WeightPublisher(store)
    again = [changed(first[3], 100, 0.1), changed(first[3], 101, 0.1)]
    publisher.publish(3, again[0])
    subscriber = WeightSubscriber(store)
    assert subscriber.latest() == 3
    publisher.publish(4, again[1])
    assert same(subscriber.fetch(2), first[2])
    assert same(subscriber.fetch(3), again[0])
    assert same(subscriber.fetch(4, held=(3, first[3])), again[1]), (
        "held from the abandoned line: found out and rebuilt"
    )
    with pytest.raises(WeightSyncError, match="version 5 cannot be had"):
        subscriber.fetch(5)


def test_a_late_manifest_of_a_replaced_writer_is_not_believed() -> None:
    store = ScriptedStore()
    publish(store, 3)
    late = manifest_key(7, 0, "base")
    body = store.get(manifest_key(0, 0, "base")).replace(b'"version":0', b'"version":7')
    WeightPublisher(store).publish(3, state(3))
    store.put(late, body)
    assert WeightSubscriber(store).latest() == 3
    assert late not in [link.key for link in live_links(store)]


def test_versions_rise(tmp_path: Path) -> None:
    publisher = WeightPublisher(Store(str(tmp_path)))
    publisher.publish(4, state(0))
    with pytest.raises(WeightSyncError, match="version 4 does not come after 4"):
        publisher.publish(4, state(0))


# ---------------------------------------------------------------------------------------------- background


def test_background_publishing_copies_first_and_writes_later(tmp_path: Path) -> None:
    publisher = WeightPublisher(Store(str(tmp_path)))
    moving = state(0)
    publisher.publish_async(0, moving)
    moving["b"].add_(1.0)
    publisher.publish_async(1, moving)
    kept = {name: tensor.clone() for name, tensor in moving.items()}
    moving["b"].add_(1.0)
    publisher.close()
    subscriber = WeightSubscriber(Store(str(tmp_path)))
    assert same(subscriber.fetch(0), state(0))
    assert same(subscriber.fetch(1), kept)
    assert publisher.blocked_seconds >= 0.0


def test_an_error_in_the_background_surfaces_at_the_next_call_which_may_be_repeated() -> None:
    store = ScriptedStore()
    publisher = WeightPublisher(store)
    publisher.publish_async(0, state(0)).result(10)
    store.full = True
    publisher.publish_async(1, state(1))
    with pytest.raises(DiskFullError):
        publisher.publish_async(2, state(2))
    store.full = False
    assert publisher.publish_async(2, state(2)).result(10).parent == 0
    publisher.close()
    assert same(WeightSubscriber(store).fetch(2), state(2))


def test_a_disk_that_fills_between_object_and_manifest_leaves_the_version_before() -> None:
    class Filling(ScriptedStore):
        def put(self, key: str, data: bytes) -> None:
            if key.startswith("manifests/00000001"):
                raise DiskFullError("object store scripted: no space left")
            super().put(key, data)

    store = Filling()
    publisher = WeightPublisher(store)
    publisher.publish(0, state(0))
    with pytest.raises(DiskFullError):
        publisher.publish(1, state(1))
    assert WeightSubscriber(store).latest() == 0
    assert publisher.publish(2, state(2)).parent == 0
    assert same(WeightSubscriber(store).fetch(2, held=(0, state(0))), state(2))


def test_waiting_for_a_stalled_store_ends_and_names_version_and_progress() -> None:
    release = threading.Event()

    class Stalling(ScriptedStore):
        def put(self, key: str, data: bytes) -> None:
            if key.startswith("deltas/"):
                release.wait(10)
            super().put(key, data)

    publisher = WeightPublisher(Stalling())
    publisher.publish_async(3, state(0))
    publisher.publish_async(4, state(1))
    with pytest.raises(DeadlineExceeded, match=r"weight publisher waited .* version 4 .*version 3 was written"):
        publisher.flush(deadline=0.05)
    release.set()
    publisher.close()
