"""One changed tensor as bytes and back, on flat arrays of stored bits: four forms, of which the smallest is kept. Torch-free.

XOR values are small where overwritten ones are not: a step moves most bfloat16 weights by one unit in the last place. What
they cost is the idempotency of overwriting, and that is bought back: an XOR form carries a digest of the old values it was
made from, and a tensor that already is what the delta leads to stays as it is (:func:`change_of`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from etude.base.errors import WeightSyncError
from etude.weights.delta_file import UNSIGNED, Entry, Form, Gap, compress, decompress, from_planes, planes

Bits = NDArray[Any]
"""Flat unsigned array: the stored bits of a tensor, one item an element."""

SURELY_SPARSE = 4
"""Sparse forms this many times smaller than the full ones, before compression, are taken without trying those."""

PROBE = 1024
"""Values by which XOR and overwriting are compared: compressing all values in both forms was a tenth of the encoding."""


@dataclass(frozen=True)
class Change:
    """What a delta does to one tensor."""

    entry: Entry
    values: Bits
    """New values ``[count]``, of any form."""
    positions: NDArray[np.int64] | None
    """Where they go, rising; None for all elements."""

    def write(self, target: Bits) -> None:
        """Overwrite ``target [numel]``; doing so twice is the same as once."""
        target[slice(None) if self.positions is None else self.positions] = self.values


def digest_of(bits: Bits) -> str:
    """XXH3-128 of a contiguous array, hexadecimal: ten times as fast on a core as SHA-256 in hardware (docs/weights.md).

    It finds wrong parents and wrong bytes. Whoever may write to the store needs no collision to replace a version.
    """
    return xxhash.xxh3_128_hexdigest(bits.view(np.uint8).data)


def changed_positions(old: Bits, new: Bits) -> NDArray[np.int64]:
    """Where two arrays differ, rising."""
    return np.flatnonzero(old != new)


def encode_full(name: str, dtype: str, shape: tuple[int, ...], new: Bits, digest: str) -> tuple[Entry, bytes]:
    """All values: what a base is made of."""
    frame = compress(planes(new))
    return _entry(name, dtype, shape, "full", len(new), 0, 0, frame, "", digest), frame


def encode_change(
    name: str, dtype: str, shape: tuple[int, ...], old: Bits, new: Bits, positions: NDArray[np.int64], digest: str
) -> tuple[Entry, bytes]:
    """The smallest form of the change at ``positions`` (at least one)."""
    made: list[tuple[Entry, bytes]] = []
    gaps = np.empty_like(positions)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gap: Gap = 2 if int(gaps.max()) < 1 << 16 else 4
    raw_bytes = len(positions) * (new.itemsize + gap)
    if raw_bytes < new.nbytes:
        where = compress(planes(gaps.astype(UNSIGNED[gap])))
        before, after = old[positions], new[positions]
        xored = before ^ after
        count, at = len(positions), len(where)
        if _smaller(xored, after):
            frame = where + compress(planes(xored))
            made.append((_entry(name, dtype, shape, "xor", count, gap, at, frame, digest_of(before), digest), frame))
        else:
            frame = where + compress(planes(after))
            made.append((_entry(name, dtype, shape, "overwrite", count, gap, at, frame, "", digest), frame))
    if raw_bytes * SURELY_SPARSE >= new.nbytes:
        made.append(encode_full(name, dtype, shape, new, digest))
        frame = compress(planes(old ^ new))
        made.append((_entry(name, dtype, shape, "full_xor", len(new), 0, 0, frame, digest_of(old), digest), frame))
    return min(made, key=lambda candidate: len(candidate[1]))


def _smaller(some: Bits, others: Bits) -> bool:
    """Whether ``some`` compress better than ``others [same length]``; of many values, the first are asked."""
    return len(compress(planes(some[:PROBE]))) < len(compress(planes(others[:PROBE])))


def change_of(entry: Entry, frame: bytes, held: Bits | None) -> Change:
    """What ``entry`` does to the tensor whose bits are ``held`` (None where there is none).

    Raises WeightSyncError, naming the tensor, when the frame is torn or ``held`` is not what the delta was made from.
    """
    size = _item_size(entry)
    unsigned = UNSIGNED[size]
    positions = None
    if entry.sparse:
        positions = _positions(entry, frame[: entry.position_length], 0 if held is None else len(held))
    elif entry.gap or entry.position_length or entry.count != int(np.prod(entry.shape, dtype=np.int64)):
        raise WeightSyncError(f"delta: {entry.name} has {entry.count} elements for shape {entry.shape}")
    values = from_planes(decompress(entry, frame[entry.position_length :], entry.count * size), unsigned)
    if not entry.needs_parent:
        return Change(entry, values, positions)
    if held is None or (positions is None and len(held) != len(values)):
        raise WeightSyncError(f"delta: {entry.name} does not fit the state it is applied to")
    before = held if positions is None else held[positions]
    if digest_of(before) == entry.before:
        return Change(entry, values ^ before, positions)
    if digest_of(held) == entry.digest:  # applied before: nothing is left to do
        return Change(entry, before.copy(), positions)
    raise WeightSyncError(f"delta: {entry.name} was made from other values; the state is not the delta's parent")


def _positions(entry: Entry, frame: bytes, numel: int) -> NDArray[np.int64]:
    if not entry.gap or not entry.count:
        raise WeightSyncError(f"delta: {entry.name} has no positions")
    gaps = from_planes(decompress(entry, frame, entry.count * entry.gap), UNSIGNED[entry.gap])
    positions: NDArray[np.int64] = gaps.cumsum(dtype=np.int64)
    if positions[-1] >= numel:
        raise WeightSyncError(f"delta: {entry.name} has positions past its end")
    return positions


def _item_size(entry: Entry) -> int:
    size = ITEM_SIZES.get(entry.dtype)
    if size is None:
        raise WeightSyncError(f"delta: {entry.name} has the unknown dtype {entry.dtype}")
    return size


ITEM_SIZES: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float4_e2m1fn_x2",), 1),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
}
"""Torch's dtype name -> bytes an element, of all that can be published."""


def _entry(
    name: str, dtype: str, shape: tuple[int, ...], form: Form, count: int, gap: Gap, at: int, frame: bytes, before: str,
    digest: str,
) -> Entry:  # fmt: skip
    return Entry(
        name=name, dtype=dtype, shape=shape, form=form, count=count, gap=gap, position_length=at, length=len(frame),
        before=before, digest=digest,
    )  # fmt: skip
