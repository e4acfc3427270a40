"""Lossless deltas between two states: sparse overwrite of the elements whose stored bits differ.

Bits are compared, never values: NaN payloads and negative zero survive, and a step that rounds away costs nothing. Each tensor
takes the smallest form: ``sparse`` (gap-coded positions and raw new values), ``full``, or left out when nothing changed.
Overwriting, unlike adding or XOR, needs no arithmetic and may be repeated: a delta applied twice gives the same state.

Tensors are independent of each other, so that ranks can encode their own shards. The design follows published practice (spec 11):
compare bytes, overwrite, gaps, planes, zstd at a low level. The file format is in :mod:`etude.weights.delta_file`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.base.errors import WeightSyncError
from etude.weights.delta_file import (
    UNSIGNED,
    Entry,
    Form,
    Gap,
    assemble,
    compress,
    decompress,
    from_planes,
    parts,
    planes,
)

SURELY_SPARSE = 4
"""A sparse form this many times smaller than the full one is taken without compressing both."""

State = Mapping[str, Tensor]
"""Tensor name -> CPU tensor of any dtype with 1, 2, 4 or 8 bytes an element."""
StateDict = dict[str, Tensor]


@dataclass(frozen=True)
class Encoded:
    """What an encoder made."""

    data: bytes
    changed_fraction: float
    """Share of elements whose bits differ; 1.0 for a base."""
    digests: dict[str, str]
    """SHA-256 of every tensor in the file, as the new state has it."""


def bits(tensor: Tensor) -> NDArray[Any]:
    """The stored bits of a tensor as a flat unsigned array ``[numel]``; shares memory with a contiguous CPU tensor.

    Raises WeightSyncError for elements of a size that no unsigned integer has (complex128).
    """
    unsigned = UNSIGNED.get(tensor.element_size())
    if unsigned is None:
        raise WeightSyncError(f"weights: tensors of {tensor.dtype} cannot be published")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().view(unsigned)


def digest(tensor: Tensor) -> str:
    """SHA-256 of the stored bits of one tensor (little-endian, row-major)."""
    return hashlib.sha256(bits(tensor).data).hexdigest()


def snapshot(state: State) -> StateDict:
    """A private CPU copy, contiguous: what happens to ``state`` afterwards does not reach it."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}


def dtype_name(tensor: Tensor) -> str:
    """``bfloat16``, ``float32``, ..."""
    return str(tensor.dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------------ encode


def encode(old: State, new: State) -> Encoded:
    """The delta that turns ``old`` into ``new``. Raises WeightSyncError unless names, shapes and dtypes are the same."""
    if old.keys() != new.keys():
        raise WeightSyncError("delta: the two versions do not have the same tensors")
    entries, frames = [], []
    changed = total = 0
    for name, tensor in new.items():
        if tensor.shape != old[name].shape or tensor.dtype != old[name].dtype:
            raise WeightSyncError(f"delta: {name} changed its shape or dtype")
        after = bits(tensor)
        positions = np.flatnonzero(bits(old[name]) != after)
        changed, total = changed + len(positions), total + len(after)
        if len(positions):
            entry, frame = _smallest(name, tensor, after, positions)
            entries.append(entry)
            frames.append(frame)
    return _encoded(entries, frames, changed / max(total, 1))


def encode_base(state: State) -> Encoded:
    """A delta from nothing: every tensor in full."""
    entries, frames = [], []
    for name, tensor in state.items():
        entry, frame = _full(name, tensor, bits(tensor))
        entries.append(entry)
        frames.append(frame)
    return _encoded(entries, frames, 1.0)


def _smallest(name: str, tensor: Tensor, after: NDArray[Any], positions: NDArray[Any]) -> tuple[Entry, bytes]:
    gaps = np.diff(positions, prepend=0)
    gap: Gap = 2 if int(gaps.max()) < 1 << 16 else 4
    raw_bytes = len(positions) * (after.itemsize + gap)
    if raw_bytes >= after.nbytes:
        return _full(name, tensor, after)
    frame = compress(planes(gaps.astype(UNSIGNED[gap])) + planes(after[positions]))
    sparse = _entry(name, tensor, "sparse", len(positions), gap, frame), frame
    if raw_bytes * SURELY_SPARSE < after.nbytes:
        return sparse
    full = _full(name, tensor, after)
    return full if len(full[1]) < len(frame) else sparse


def _full(name: str, tensor: Tensor, after: NDArray[Any]) -> tuple[Entry, bytes]:
    frame = compress(planes(after))
    return _entry(name, tensor, "full", len(after), 0, frame), frame


def _entry(name: str, tensor: Tensor, form: Form, count: int, gap: Gap, frame: bytes) -> Entry:
    return Entry(
        name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape), form=form, count=count, gap=gap,
        length=len(frame), sha256=digest(tensor),
    )  # fmt: skip


def _encoded(entries: list[Entry], frames: list[bytes], changed_fraction: float) -> Encoded:
    return Encoded(assemble(entries, frames), changed_fraction, {entry.name: entry.sha256 for entry in entries})


# ------------------------------------------------------------------------------------------------------- apply


def apply(state: State, delta: bytes, *, verify: bool = True) -> StateDict:
    """A new state; ``state`` stays as it is, unchanged tensors are shared with it.

    ``verify`` checks the SHA-256 of every changed tensor; a caller that checks the content hash of the result can save that.
    Raises WeightSyncError when the delta is torn, of another format or does not fit, naming the tensor.
    """
    result = dict(state)
    for entry, values, positions in _decoded(state, delta):
        target = values if positions is None else bits(state[entry.name]).copy()
        if positions is not None:
            target[positions] = values
        tensor = torch.from_numpy(target.view(np.uint8)).view(getattr(torch, entry.dtype)).reshape(entry.shape)
        if verify:
            _check(entry, tensor)
        result[entry.name] = tensor
    return result


def apply_in_place(state: State, delta: bytes, *, verify: bool = True) -> None:
    """Overwrite the tensors of ``state`` (contiguous, on the CPU); nothing is written unless the whole delta can be read.

    Raises WeightSyncError as :func:`apply`; when only the digest of a tensor is wrong, ``state`` is no version any more and has
    to be rebuilt from a base.
    """
    changes = list(_decoded(state, delta))
    for entry, _, _ in changes:
        if entry.name not in state or not state[entry.name].is_contiguous() or state[entry.name].device.type != "cpu":
            raise WeightSyncError(
                f"delta: {entry.name} cannot be overwritten in place; it is not a contiguous CPU tensor"
            )
        _fits(entry, state)
    for entry, values, positions in changes:
        target = bits(state[entry.name])
        target[slice(None) if positions is None else positions] = values
    for entry, _, _ in changes if verify else ():
        _check(entry, state[entry.name])


def _decoded(state: State, delta: bytes) -> Iterator[tuple[Entry, NDArray[Any], NDArray[Any] | None]]:
    """(entry, new values ``[count]``, their positions or None for all) of every changed tensor."""
    for entry, frame in parts(delta):
        size = _element_size(entry)
        raw = decompress(entry, frame, entry.count * (entry.gap + size))
        values = from_planes(raw[entry.count * entry.gap :], UNSIGNED[size])
        if entry.form == "full":
            if entry.gap or entry.count != int(np.prod(entry.shape, dtype=np.int64)):
                raise WeightSyncError(f"delta: {entry.name} has {entry.count} elements for shape {entry.shape}")
            yield entry, values, None
            continue
        numel = _fits(entry, state)
        if not entry.gap or not entry.count:
            raise WeightSyncError(f"delta: {entry.name} has no positions")
        positions = from_planes(raw[: entry.count * entry.gap], UNSIGNED[entry.gap]).astype(np.int64).cumsum()
        if positions[-1] >= numel:
            raise WeightSyncError(f"delta: {entry.name} has positions past its end")
        yield entry, values, positions


def _fits(entry: Entry, state: State) -> int:
    """Elements of the tensor that ``entry`` changes, which has to be in ``state`` with the same shape and dtype."""
    held = state.get(entry.name)
    if held is None or tuple(held.shape) != entry.shape or dtype_name(held) != entry.dtype:
        raise WeightSyncError(f"delta: {entry.name} does not fit the state it is applied to")
    return held.numel()


def _element_size(entry: Entry) -> int:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize not in UNSIGNED:
        raise WeightSyncError(f"delta: {entry.name} has the unknown dtype {entry.dtype}")
    return dtype.itemsize


def _check(entry: Entry, tensor: Tensor) -> None:
    if digest(tensor) != entry.sha256:
        raise WeightSyncError(f"delta: {entry.name} does not hash to its digest; the state was not the delta's parent")
