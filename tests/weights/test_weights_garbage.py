"""Promises: garbage is collected, and never what a registered subscriber needs, however the two interleave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_server import store as s3
from weight_states import ScriptedStore, State, changed, same, state

from etude.base.errors import WeightSyncError
from etude.weights.garbage import collect, register, withdraw
from etude.weights.manifests import live_links, manifest_key
from etude.weights.publisher import WeightPublisher
from etude.weights.store import ObjectStore, Store
from etude.weights.subscriber import WeightSubscriber


def published(store: ObjectStore, count: int, base_every: int = 3) -> list[State]:
    """Bases at 0, 3, 6, ... by default."""
    publisher, states = WeightPublisher(store, base_every=base_every), [state(0)]
    publisher.publish(0, states[0])
    for version in range(1, count):
        states.append(changed(states[-1], version, 0.05))
        publisher.publish(version, states[-1])
    return states


def versions(store: ObjectStore) -> set[int]:
    return {link.version for link in live_links(store)}


def test_without_subscribers_the_newest_bases_and_what_follows_stay(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    states = published(store, 11)  # bases at 0, 3, 6, 9
    made = collect(store)
    assert (made.horizon, made.kept_for) == (6, ())
    assert versions(store) == {6, 7, 8, 9, 10}
    objects = [key for folder in ("bases", "deltas") for key in store.list(folder)]
    assert {int(key.split("/")[1][:8]) for key in objects} == {6, 7, 8, 9, 10}
    late = WeightSubscriber(store)
    assert same(late.fetch(10), states[10])
    assert late.report is not None
    assert late.report.num_files == 2, "a late subscriber starts at the newest base"
    assert same(late.fetch(8), states[8])
    assert collect(store).deleted == (), "nothing is left to do"
    assert versions(store) == {6, 7, 8, 9, 10}
    assert collect(store, keep_bases=1).horizon == 9


def test_a_damaged_base_can_still_be_gone_round_after_a_collection(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    states = published(store, 11)
    collect(store)
    (base,) = [key for key in store.list("bases") if "/00000009" in key]
    (tmp_path / base).write_bytes(b"torn")
    assert same(WeightSubscriber(store).fetch(10), states[10])


def test_a_base_that_is_gone_does_not_count_as_one(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    states = published(store, 11)
    store.delete(next(key for key in store.list("bases") if "/00000009" in key))
    assert collect(store, keep_bases=1).horizon == 6
    assert same(WeightSubscriber(store).fetch(10), states[10])


def test_a_registered_subscriber_holds_the_horizon_back_until_it_moves_on_or_its_lease_ends() -> None:
    store, now = ScriptedStore(), 1000.0
    states = published(store, 11)
    register(store, "slow engine", 4, lease_seconds=60.0, clock=lambda: now)
    register(store, "engine", 10, lease_seconds=1e9, clock=lambda: now)
    made = collect(store, clock=lambda: now)
    assert (made.horizon, made.kept_for) == (3, ("slow engine",))
    assert same(WeightSubscriber(store).fetch(10, held=(4, states[4])), states[10])
    register(store, "slow engine", 7, lease_seconds=60.0, clock=lambda: now)
    assert collect(store, clock=lambda: now).horizon == 6
    register(store, "slow engine", 6, lease_seconds=60.0, clock=lambda: now)
    assert collect(store, keep_bases=1, clock=lambda: now + 59).horizon == 6
    assert collect(store, keep_bases=1, clock=lambda: now + 61).horizon == 9
    with pytest.raises(WeightSyncError, match="version 7 was collected"):
        register(store, "slow engine", 7)
    withdraw(store, "slow engine")
    withdraw(store, "slow engine")
    assert store.list("subscribers") == ["subscribers/engine"]


def test_a_claim_that_cannot_be_read_keeps_everything() -> None:
    store = ScriptedStore()
    published(store, 11)
    store.put("subscribers/engine", b'{"vers')
    assert collect(store).horizon == 0
    assert versions(store) == set(range(11))


def test_a_subscriber_with_a_name_registers_what_it_needs_before_it_reads(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    states = published(store, 11)
    subscriber = WeightSubscriber(store, "engine")
    subscriber.fetch(7, held=(2, states[2]))
    assert collect(store, keep_bases=1).horizon == 6
    assert same(subscriber.fetch(10, held=(7, states[7])), states[10])
    assert collect(store, keep_bases=1).horizon == 9
    assert same(subscriber.fetch(10, held=(2, states[2])), states[10]), "what it held was collected: from the base"


class Interrupted(ScriptedStore):
    """Runs ``call`` once, just before its n-th operation."""

    def __init__(self) -> None:
        super().__init__()
        self.countdown, self.call = -1, lambda: None

    def armed(self, countdown: int, call: Callable[[], None]) -> None:
        self.countdown, self.call = countdown, call

    def _tick(self) -> None:
        self.countdown -= 1
        if self.countdown == 0:
            self.call()

    def put(self, key: str, data: bytes) -> None:
        self._tick()
        super().put(key, data)

    def get(self, key: str) -> bytes:
        self._tick()
        return super().get(key)

    def list(self, prefix: str) -> list[str]:
        self._tick()
        return super().list(prefix)

    def exists(self, key: str) -> bool:
        self._tick()
        return super().exists(key)

    def delete(self, key: str) -> None:
        self._tick()
        super().delete(key)


def test_a_registration_at_any_moment_of_a_collection_is_kept_or_refused() -> None:
    """Every moment, by brute force; both must come up."""
    outcomes: set[str] = set()
    moment, over = 0, False
    while not over:
        moment += 1
        store = Interrupted()
        states = published(store, 8)
        said: list[str] = []

        def subscribe(store: Interrupted = store, said: list[str] = said) -> None:
            try:
                register(store, "engine", 1)
                said.append("kept")
            except WeightSyncError:
                said.append("refused")

        store.armed(moment, subscribe)
        collect(store, keep_bases=1)
        over = not said
        store.armed(-1, lambda: None)
        outcomes.update(said)
        if said == ["kept"]:
            assert same(WeightSubscriber(store).fetch(1), states[1])
            assert same(WeightSubscriber(store).fetch(7, held=(1, states[1])), states[7])
    assert moment > 20
    assert outcomes == {"kept", "refused"}


def test_a_collection_at_any_moment_of_a_registration_respects_it_or_refuses_it() -> None:
    outcomes = set()
    for moment in range(1, 4):
        store = Interrupted()
        states = published(store, 8)
        store.armed(moment, lambda store=store: collect(store, keep_bases=1) and None)  # type: ignore[misc]
        try:
            register(store, "engine", 1)
        except WeightSyncError:
            outcomes.add("refused")
            assert store.list("subscribers") == []
        else:
            outcomes.add("kept")
            assert same(WeightSubscriber(store).fetch(7, held=(1, states[1])), states[7])
    assert outcomes == {"kept", "refused"}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["publish", "fetch", "collect", "leave"]), st.integers(0, 2)), max_size=25))
def test_whatever_happens_every_registered_subscriber_reaches_the_newest_version(events: list[tuple[str, int]]) -> None:
    store = ScriptedStore()
    publisher, states = WeightPublisher(store, base_every=2), [state(0)]
    publisher.publish(0, states[0])
    held: dict[int, int] = {}
    for event, who in events:
        if event == "publish":
            states.append(changed(states[-1], len(states), 0.05))
            publisher.publish(len(states) - 1, states[-1])
        elif event == "collect":
            collect(store, keep_bases=1)
        elif event == "leave":
            withdraw(store, str(who))
            held.pop(who, None)
        else:
            newest = len(states) - 1
            start = (held[who], states[held[who]]) if who in held else None
            assert same(WeightSubscriber(store, str(who)).fetch(newest, held=start), states[newest])
            held[who] = newest
        for version in held.values():
            reader = WeightSubscriber(store)
            assert same(reader.fetch(len(states) - 1, held=(version, states[version])), states[-1])
            assert same(reader.fetch(version), states[version]), "from the store alone, too"
        assert same(WeightSubscriber(store).fetch(len(states) - 1), states[-1]), "a late subscriber"


def test_what_an_interrupted_upload_left_behind_goes_once_no_manifest_can_name_it_any_more(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    states = published(store, 4)  # bases at 0, 3
    store.put("deltas/00000002-" + "a" * 64, b"orphan, older than the newest base")
    store.put("bases/00000003-" + "b" * 64, b"perhaps being written")
    store.put("deltas/00000004-" + "c" * 64, b"perhaps being written")
    made = collect(store)
    assert made.deleted == ("deltas/00000002-" + "a" * 64,)
    (tmp_path / manifest_key(2, 0, "delta")).write_text("torn")
    store.put("deltas/00000002-" + "a" * 64, b"now the torn manifest might name it")
    assert collect(store).deleted == ()
    assert same(WeightSubscriber(store).fetch(3), states[3])


def test_what_a_replaced_writer_left_is_collected_with_the_rest() -> None:
    store = ScriptedStore()
    published(store, 6)
    publisher = WeightPublisher(store, base_every=1)
    kept = {}
    for version in range(3, 9):
        kept[version] = state(version)
        publisher.publish(version, kept[version])
    collect(store)
    assert {key.split("/")[1][:8] for key in store.list("manifests")} == {"00000007", "00000008"}
    assert same(WeightSubscriber(store).fetch(8), kept[8])


def test_a_run_resumed_below_the_horizon_can_be_subscribed_to() -> None:
    store = ScriptedStore()
    published(store, 11)
    assert collect(store).horizon == 6
    publisher = WeightPublisher(store)
    publisher.publish(4, state(40))
    assert same(WeightSubscriber(store, "engine").fetch(4), state(40))
    with pytest.raises(WeightSyncError, match="version 3 was collected"):
        register(store, "other", 3)
    with pytest.raises(WeightSyncError, match="cannot be called 'a/b'"):
        register(store, "a/b", 4)


def test_a_publisher_that_is_told_to_keeps_the_store_small(s3_port: int) -> None:
    """Over S3; a collector that fails is the publisher's error like any other, and harms nothing."""
    store = s3(s3_port, "collected")
    publisher = WeightPublisher(store, base_every=2, keep_bases=2)
    for version in range(9):
        publisher.publish(version, state(version))
    assert versions(store) == {6, 7, 8}
    assert same(WeightSubscriber(store).fetch(8), state(8))
