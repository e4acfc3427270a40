"""Promises: a delta rebuilds bit for bit, may be repeated, is small where little changed, and refuses what does not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_states import State, changed, same, state

from etude.base.errors import WeightSyncError
from etude.weights.codec import apply, apply_in_place, bits, encode, encode_base, snapshot
from etude.weights.content import content_hash, tensor_digests
from etude.weights.delta_file import parts


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.sampled_from([0.0, 0.001, 0.05, 0.3, 0.7, 1.0]), min_size=1, max_size=5))
def test_a_chain_of_deltas_rebuilds_bit_for_bit_and_each_may_be_applied_twice(seed: int, shares: list[float]) -> None:
    first = state(seed)
    new, rebuilt, in_place = first, apply({}, encode_base(first).data), snapshot(first)
    for step, share in enumerate(shares):
        old, new = new, changed(new, seed + step, share)
        made = encode(old, new)
        before = snapshot(rebuilt)
        once = apply(rebuilt, made.data)
        assert same(rebuilt, before), "the state it is applied to stays as it was"
        apply_in_place(in_place, made.data)
        apply_in_place(in_place, made.data)
        assert same(once, new)
        assert same(apply(once, made.data), new)
        assert same(in_place, new)
        differing = sum(int((bits(old[n]) != bits(new[n])).sum()) for n in old)
        assert made.changed_fraction == pytest.approx(differing / sum(t.numel() for t in old.values()))
        rebuilt = once
    assert content_hash(rebuilt) == content_hash(new)


@pytest.mark.parametrize("count", [1, 50])
def test_negative_zero_and_nan_payloads_survive(count: int) -> None:
    """In the full form (every element changed) and in the sparse one (4 of 200)."""
    raw = np.array([0x80000000, 0x7FC00001, 0xFFC12345, 0x00000001], np.uint32)
    old = {"x": torch.zeros(4 * count)}
    new = {"x": torch.zeros(4 * count)}
    bits(new["x"])[::count] = raw
    made = encode(old, new)
    assert np.array_equal(bits(apply(old, made.data)["x"])[::count], raw)
    assert made.changed_fraction == pytest.approx(1 / count)
    assert same(apply({}, encode_base(new).data), new)


def test_a_value_that_only_changes_its_sign_bit_counts_as_changed() -> None:
    made = encode({"x": torch.zeros(3)}, {"x": torch.tensor([0.0, -0.0, 0.0])})
    assert made.changed_fraction == pytest.approx(1 / 3)


@pytest.mark.parametrize("gap", [1, 65_535, 65_536, 65_537, 150_000])
def test_wide_gaps_use_wide_positions(gap: int) -> None:
    old = {"x": torch.zeros(200_000)}
    new = {"x": old["x"].clone()}
    new["x"][[5, 5 + gap]] = 1.0
    assert same(apply(old, encode(old, new).data), new)


def test_each_tensor_takes_its_smallest_form() -> None:
    generator = torch.Generator().manual_seed(0)
    old = {name: torch.randn(20_000, generator=generator) for name in ("none", "few", "all")}
    new = {"none": old["none"], "few": old["few"].clone(), "all": torch.randn(20_000, generator=generator)}
    new["few"][::100] += 1.0
    made = encode(old, new)
    assert set(made.digests) == {"few", "all"}, "an unchanged tensor is left out"
    only_all = encode({"all": old["all"]}, {"all": new["all"]})
    assert len(made.data) - len(only_all.data) < 200 * (4 + 2) + 200
    assert len(only_all.data) <= len(encode_base({"all": new["all"]}).data) + 16, "never above the full form"


def stepped(share: float, ulps: bool, count: int = 40_000) -> tuple[State, State]:
    """A bfloat16 tensor of which ``share`` moves by one unit in the last place, or to values of their own."""
    rng = np.random.default_rng(3)
    old = {"x": torch.randn(count, generator=torch.Generator().manual_seed(0)).bfloat16()}
    new = {"x": old["x"].clone()}
    hit = rng.random(count) < share
    bits(new["x"])[hit] = bits(old["x"])[hit] ^ 1 if ulps else rng.integers(0, 4, hit.sum()).astype(np.uint16)
    return old, new


FORMS = {"xor": (0.01, True), "overwrite": (0.01, False), "full_xor": (0.9, True), "full": (0.95, False)}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_used_where_it_is_the_smallest_and_is_lossless(form: str) -> None:
    old, new = stepped(*FORMS[form])
    data = encode(old, new).data
    ((entry, _),) = parts(data)
    assert entry.form == form
    once = apply(old, data)
    assert same(once, new)
    assert same(apply(once, data), new), "applied twice"
    target = snapshot(old)
    apply_in_place(target, data)
    apply_in_place(target, data)
    assert same(target, new)


@pytest.mark.parametrize("form", ["xor", "full_xor"])
def test_an_xor_form_refuses_another_parent_before_it_writes(form: str) -> None:
    old, new = stepped(*FORMS[form])
    data = encode(old, new).data
    wrong = {"x": old["x"] + 1}
    before = snapshot(wrong)
    for call in (apply, apply_in_place):
        with pytest.raises(WeightSyncError, match="x was made from other values"):
            call(wrong, data, verify=False)
    assert same(wrong, before)


def test_sparse_changes_make_small_deltas() -> None:
    """1% of bfloat16 elements: at most 1% of the full size (published deltas are about 2% at that density)."""
    old = {"x": torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).bfloat16()}
    new = {"x": old["x"].clone()}
    hit = np.random.default_rng(1).random(1_000_000) < 0.01
    bits(new["x"])[hit] += 1
    made = encode(old, new)
    assert made.changed_fraction == pytest.approx(0.01, rel=0.1)
    assert len(made.data) < 0.01 * 2_000_000


def test_a_delta_is_refused_where_it_does_not_fit() -> None:
    old = state(0)
    data = encode(old, changed(old, 1, 0.1)).data
    with pytest.raises(WeightSyncError, match="a does not fit"):
        apply({**old, "a": torch.zeros(3)}, data)
    with pytest.raises(WeightSyncError, match=r"a (was made from other values|does not hash to its digest)"):
        apply({**old, "a": old["a"] + 1}, data)
    with pytest.raises(WeightSyncError, match="same tensors"):
        encode(old, {"a": old["a"]})
    with pytest.raises(WeightSyncError, match="a changed its shape or dtype"):
        encode(old, {**old, "a": old["a"].float()})
    with pytest.raises(WeightSyncError, match="cannot be published"):
        encode_base({"x": torch.zeros(2, dtype=torch.complex128)})


def test_every_truncation_and_any_flipped_byte_is_noticed() -> None:
    old = {"a": torch.randn(60, generator=torch.Generator().manual_seed(0)), "b": torch.zeros(20, dtype=torch.bfloat16)}
    new = changed(old, 1, 0.2)
    data = encode(old, new).data
    for length in range(len(data)):
        with pytest.raises(WeightSyncError):
            apply(old, data[:length])
    for position in range(len(data)):
        torn = bytearray(data)
        torn[position] ^= 0x40
        try:
            result = apply(old, bytes(torn))
        except WeightSyncError:
            continue
        assert same(result, new), f"byte {position}: a wrong state came out without an error"


def test_overwriting_in_place_writes_nothing_when_the_delta_cannot_be_read() -> None:
    old = state(0)
    data = encode(old, changed(old, 1, 0.3)).data
    target = snapshot(old)
    with pytest.raises(WeightSyncError):
        apply_in_place(target, data[:-1])
    assert same(target, old)
    target["a"] = torch.zeros(40, 50, dtype=torch.bfloat16).t()
    with pytest.raises(WeightSyncError, match="a cannot be overwritten in place"):
        apply_in_place(target, data)


def test_the_content_hash_sees_name_dtype_shape_and_bytes_but_not_the_order() -> None:
    base = state(0)
    hashes = {content_hash(base)}
    hashes.add(content_hash({**base, "b": base["b"].reshape(3, 100)}))
    hashes.add(content_hash({("z" if n == "a" else n): t for n, t in base.items()}))
    hashes.add(content_hash({**base, "e": base["e"].view(torch.float64)}))
    hashes.add(content_hash({n: t for n, t in base.items() if n != "f"}))
    hashes.add(content_hash(changed(base, 3, 0.001)))
    hashes.add(content_hash({**base, "b": -base["b"]}))
    assert len(hashes) == 7
    assert content_hash(dict(reversed(base.items()))) == content_hash(base)
    assert content_hash(base, tensor_digests(base)) == content_hash(base)


def test_a_snapshot_does_not_follow_its_source() -> None:
    source = state(0)
    copy = snapshot(source)
    source["b"].add_(1.0)
    assert same(copy, state(0))
