"""Promises: every version is rebuilt bit for bit; corrupt, missing and torn objects are named; a new writer takes over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.base.errors import WeightSyncError
from etude.weights.codec import apply, bits, encode, encode_base
from etude.weights.content import content_hash
from etude.weights.publisher import WeightPublisher, newest_manifest
from etude.weights.store import Store
from etude.weights.subscriber import WeightSubscriber

State = dict[str, torch.Tensor]


def state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(50, 40, generator=generator).bfloat16(),
        "b": torch.randn(300, generator=generator),
        "c": torch.randint(-5, 5, (7, 3), generator=generator, dtype=torch.int8),
        "d": torch.tensor(float("nan")),
    }


def changed(old: State, seed: int, share: float) -> State:
    """Some bits of some elements flipped: NaN payloads and negative zeros come up by themselves."""
    rng = np.random.default_rng(seed)
    new = {}
    for name, tensor in old.items():
        raw = bits(tensor).copy()
        hit = rng.random(len(raw)) < share
        raw[hit] ^= rng.integers(1, 255, hit.sum()).astype(raw.dtype)
        new[name] = torch.from_numpy(raw.view(np.uint8)).view(tensor.dtype).reshape(tensor.shape)
    return new


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(bits(a[n]), bits(b[n])) for n in a)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]))
def test_a_delta_rebuilds_bit_for_bit_and_may_be_applied_twice(seed: int, share: float) -> None:
    old = state(seed)
    new = changed(old, seed, share)
    delta, fraction = encode(old, new)
    once = apply(old, delta)
    assert same(once, new)
    assert same(apply(once, delta), new)
    assert 0.0 <= fraction <= 1.0
    assert same(old, state(seed)), "the state it is applied to stays as it was"


def test_negative_zero_and_nan_payloads_survive() -> None:
    raw = np.array([0x80000000, 0x7FC00001, 0xFFC12345, 0x00000001], np.uint32)
    new = {"x": torch.from_numpy(raw.view(np.float32).copy())}
    delta, fraction = encode({"x": torch.zeros(4)}, new)
    assert np.array_equal(bits(apply({"x": torch.zeros(4)}, delta)["x"]), raw)
    assert fraction == 1.0
    assert same(apply({}, encode_base(new)), new)


def test_wide_gaps_use_wide_positions() -> None:
    old = {"x": torch.zeros(200_000)}
    new = {"x": old["x"].clone()}
    new["x"][[5, 150_000]] = 1.0
    assert same(apply(old, encode(old, new)[0]), new)


def test_sparse_changes_make_small_deltas() -> None:
    old = {"x": torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).bfloat16()}
    new = changed(old, 1, 0.01)
    delta, fraction = encode(old, new)
    assert fraction == pytest.approx(0.01, rel=0.1)
    assert len(delta) < 0.04 * 2_000_000


def publish(store: Store, count: int, base_every: int = 3) -> list[State]:
    publisher, states = WeightPublisher(store, base_every=base_every), [state(0)]
    publisher.publish(0, states[0])
    for version in range(1, count):
        states.append(changed(states[-1], version, 0.02))
        publisher.publish(version, states[-1])
    publisher.close()
    return states


def test_every_version_is_rebuilt_from_the_store_alone(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    states = publish(store, 8)
    subscriber = WeightSubscriber(store)
    assert subscriber.latest() == 7
    for version, expected in enumerate(states):
        assert same(subscriber.fetch(version), expected)
    assert same(subscriber.fetch(7, held=(6, states[6])), states[7])
    wrong = (6, states[2])
    assert same(subscriber.fetch(7, held=wrong), states[7]), "what is held is checked before it is built on"


def test_corrupt_and_missing_objects_are_named(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    states = publish(store, 3, base_every=10)
    (delta,) = [tmp_path / key for key in store.list("deltas") if "00000001" in key]
    healthy = delta.read_bytes()
    delta.write_bytes(healthy[:-1] + bytes([healthy[-1] ^ 1]))
    with pytest.raises(WeightSyncError, match=r"deltas/00000001.*corrupt"):
        WeightSubscriber(store).fetch(2)
    assert same(WeightSubscriber(store).fetch(2, held=(1, states[1])), states[2])
    delta.unlink()
    with pytest.raises(WeightSyncError, match="cannot read deltas/00000001"):
        WeightSubscriber(store).fetch(2)


def test_a_broken_delta_is_repaired_from_the_next_base(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    states = publish(store, 6, base_every=2)
    for key in store.list("deltas"):
        if key.startswith("deltas/00000003"):
            (tmp_path / key).write_bytes(b"torn")
    assert same(WeightSubscriber(store).fetch(5, held=(2, states[2])), states[5])


def test_a_torn_manifest_does_not_count_and_an_unknown_version_is_named(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    publish(store, 2)
    (tmp_path / "manifests" / "00000002-000000.json").write_text('{"version": 2, "par')
    assert WeightSubscriber(store).latest() == 1
    with pytest.raises(WeightSyncError, match="version 2 is not in"):
        WeightSubscriber(store).fetch(2)


def test_a_new_writer_takes_over_and_the_old_one_stops(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    old = WeightPublisher(store)
    old.publish(0, state(0))
    new = WeightPublisher(store)
    assert new.epoch == 1
    manifest = new.publish(1, state(1))
    assert manifest.parent is None, "a new writer starts from a base"
    with pytest.raises(WeightSyncError, match="took over"):
        old.publish(1, state(2))
    assert same(WeightSubscriber(store).fetch(1), state(1))
    newest = newest_manifest(store)
    assert newest is not None
    assert newest.epoch == 1


def test_background_publishing_raises_its_error_at_the_next_call(tmp_path: Path) -> None:
    publisher = WeightPublisher(Store(str(tmp_path)))
    publisher.publish_async(0, state(0)).result(10)
    publisher.publish_async(1, {"other": torch.zeros(3)})
    with pytest.raises(WeightSyncError, match="same tensors"):
        publisher.publish_async(2, state(0))
    publisher.close()


def test_the_content_hash_sees_name_dtype_shape_and_bytes() -> None:
    base = state(0)
    hashes = {content_hash(base)}
    hashes.add(content_hash({**base, "b": base["b"].reshape(3, 100)}))
    hashes.add(content_hash({("z" if n == "a" else n): t for n, t in base.items()}))
    hashes.add(content_hash({**base, "c": base["c"].to(torch.int16)}))
    hashes.add(content_hash(changed(base, 3, 0.001)))
    assert len(hashes) == 5
    assert content_hash(dict(reversed(base.items()))) == content_hash(base)
