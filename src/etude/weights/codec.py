"""Lossless deltas between two states: sparse overwrite of the elements whose stored bits differ.

Bits are compared, never values: NaN payloads and negative zero survive. Positions are stored as gaps (uint16, or uint32 where
a gap needs it), values as byte planes, all of it under zstd. A tensor with few changes is ``sparse``, one with many ``full``,
an untouched one is left out. Applying a delta twice gives the same state.

File: ``ETD1``, u32 header length, JSON header ``[{name, dtype, shape, form, count, gap}]``, zstd of the concatenated parts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from etude.base.errors import WeightSyncError

MAGIC = b"ETD1"
LEVEL = 1
State = Mapping[str, Tensor]

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(tensor: Tensor) -> NDArray[Any]:
    """The stored bits of a tensor as a flat unsigned array (no copy when it is contiguous)."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.uint8).numpy().view(_UNSIGNED[tensor.element_size()])


def encode(old: State, new: State) -> tuple[bytes, float]:
    """(delta that turns ``old`` into ``new``, share of elements that differ). Both need the same names and shapes."""
    if old.keys() != new.keys():
        raise WeightSyncError("delta: the two versions do not have the same tensors")
    header: list[dict[str, Any]] = []
    parts: list[bytes] = []
    changed = total = 0
    for name, tensor in new.items():
        if tensor.shape != old[name].shape or tensor.dtype != old[name].dtype:
            raise WeightSyncError(f"delta: {name} changed its shape or dtype")
        after = bits(tensor)
        positions = np.flatnonzero(bits(old[name]) != after)
        changed, total = changed + len(positions), total + len(after)
        if len(positions) == 0:
            continue
        gaps = np.diff(positions, prepend=0)
        gap_type = np.uint16 if gaps.max() < 65536 else np.uint32
        gap = np.dtype(gap_type).itemsize
        if len(positions) * (after.itemsize + gap) < after.nbytes:
            parts += [gaps.astype(gap_type).tobytes(), _planes(after[positions])]
            header.append(_entry(name, tensor, "sparse", len(positions), gap))
        else:
            parts.append(_planes(after))
            header.append(_entry(name, tensor, "full", len(after), 0))
    return _assemble(header, parts), changed / max(total, 1)


def encode_base(state: State) -> bytes:
    """A delta from nothing: every tensor in full."""
    header = [_entry(name, tensor, "full", tensor.numel(), 0) for name, tensor in state.items()]
    return _assemble(header, [_planes(bits(tensor)) for tensor in state.values()])


def apply(state: State, delta: bytes) -> dict[str, Tensor]:
    """A new state; ``state`` stays as it is. Raises WeightSyncError when the delta is torn or does not fit."""
    result = dict(state)
    header, body = _parse(delta)
    at = 0
    for entry in header:
        name, count = entry["name"], entry["count"]
        dtype = getattr(torch, entry["dtype"])
        unsigned = _UNSIGNED[torch.empty(0, dtype=dtype).element_size()]
        size = np.dtype(unsigned).itemsize
        if entry["form"] == "full":
            target = _from_planes(body[at : at + count * size], count, unsigned).copy()
            at += count * size
        else:
            if name not in state or list(state[name].shape) != entry["shape"]:
                raise WeightSyncError(f"delta: {name} does not fit the state it is applied to")
            gap_type = np.uint16 if entry["gap"] == 2 else np.uint32
            positions = np.frombuffer(body, gap_type, count, at).astype(np.int64).cumsum()
            at += count * entry["gap"]
            target = bits(state[name]).copy()
            if positions[-1] >= len(target):
                raise WeightSyncError(f"delta: {name} has positions past its end")
            target[positions] = _from_planes(body[at : at + count * size], count, unsigned)
            at += count * size
        result[name] = torch.from_numpy(target.view(np.uint8)).view(dtype).reshape(entry["shape"])
    return result


def _entry(name: str, tensor: Tensor, form: str, count: int, gap: int) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "shape": list(tensor.shape), "form": form, "count": count, "gap": gap}


def _assemble(header: list[dict[str, Any]], parts: list[bytes]) -> bytes:
    head = json.dumps(header).encode()
    return MAGIC + struct.pack("<I", len(head)) + head + zstandard.ZstdCompressor(level=LEVEL).compress(b"".join(parts))


def _parse(delta: bytes) -> tuple[list[dict[str, Any]], bytes]:
    try:
        if delta[:4] != MAGIC:
            raise ValueError("wrong magic")
        (size,) = struct.unpack_from("<I", delta, 4)
        return json.loads(delta[8 : 8 + size]), zstandard.ZstdDecompressor().decompress(delta[8 + size :])
    except (ValueError, struct.error, zstandard.ZstdError) as error:
        raise WeightSyncError(f"delta: cannot be read: {error}") from None


def _planes(values: NDArray[Any]) -> bytes:
    """All first bytes, then all second bytes, ...: exponents compress apart from mantissas."""
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _from_planes(raw: bytes, count: int, unsigned: type) -> NDArray[Any]:
    size = np.dtype(unsigned).itemsize
    if len(raw) != count * size:
        raise WeightSyncError("delta: shorter than its header says")
    return np.ascontiguousarray(np.frombuffer(raw, np.uint8).reshape(size, count).T).view(unsigned).reshape(-1)
