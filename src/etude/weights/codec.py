"""Lossless deltas between two states: the elements whose stored bits differ, by position, as new values or as XOR.

Bits are compared, never values: NaN payloads and negative zero survive, and a step that rounds away costs nothing. Each tensor
takes the smallest form (:mod:`etude.weights.forms`) or is left out when nothing changed. A delta applied twice gives the same
state as applied once, whatever the form.

Tensors are independent of each other, so that ranks can encode their own shards. The design follows published practice
(Fireworks; TRL and slime delta sync; NeMo-DCR): compare bytes, gaps, planes, zstd at a low level, checksums of what results.
The file format is in :mod:`etude.weights.delta_file`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.base.errors import WeightSyncError
from etude.weights.delta_file import UNSIGNED, Entry, assemble, parts
from etude.weights.forms import ITEM_SIZES, Change, change_of, changed_positions, digest_of, encode_change, encode_full

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
    """XXH3-128 of every tensor in the file, as the new state has it."""


def bits(tensor: Tensor) -> NDArray[Any]:
    """The stored bits of a tensor as a flat unsigned array ``[numel]``; shares memory with a contiguous CPU tensor.

    Raises WeightSyncError for a dtype that cannot be published (complex128).
    """
    size = ITEM_SIZES.get(dtype_name(tensor))
    if size is None:
        raise WeightSyncError(f"weights: tensors of {tensor.dtype} cannot be published")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().view(UNSIGNED[size])


def digest(tensor: Tensor) -> str:
    """XXH3-128 of the stored bits of one tensor (little-endian, row-major)."""
    return digest_of(bits(tensor))


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
        before, after = bits(old[name]), bits(tensor)
        positions = changed_positions(before, after)
        changed, total = changed + len(positions), total + len(after)
        if len(positions):
            entry, frame = encode_change(*_described(name, tensor), before, after, positions, digest_of(after))
            entries.append(entry)
            frames.append(frame)
    return _encoded(entries, frames, changed / max(total, 1))


def encode_base(state: State) -> Encoded:
    """A delta from nothing: every tensor in full."""
    entries, frames = [], []
    for name, tensor in state.items():
        values = bits(tensor)
        entry, frame = encode_full(*_described(name, tensor), values, digest_of(values))
        entries.append(entry)
        frames.append(frame)
    return _encoded(entries, frames, 1.0)


def _described(name: str, tensor: Tensor) -> tuple[str, str, tuple[int, ...]]:
    return name, dtype_name(tensor), tuple(tensor.shape)


def _encoded(entries: list[Entry], frames: list[bytes], changed_fraction: float) -> Encoded:
    return Encoded(assemble(entries, frames), changed_fraction, {entry.name: entry.digest for entry in entries})


# ------------------------------------------------------------------------------------------------------- apply


def apply(state: State, delta: bytes, *, verify: bool = True) -> StateDict:
    """A new state; ``state`` stays as it is, unchanged tensors are shared with it.

    ``verify`` checks the digest of every changed tensor; a caller that checks the content hash of the result can save that.
    Raises WeightSyncError when the delta is torn, of another format or does not fit, naming the tensor.
    """
    result = dict(state)
    for change in _changes(state, delta):
        entry = change.entry
        target = change.values if change.positions is None else bits(state[entry.name]).copy()
        if change.positions is not None:
            change.write(target)
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
    for entry, _ in parts(delta):
        held = state.get(entry.name)
        if held is None or not held.is_contiguous() or held.device.type != "cpu" or not _fits(entry, held):
            raise WeightSyncError(
                f"delta: {entry.name} cannot be overwritten in place; it is not a contiguous CPU tensor that fits"
            )
    changes = list(_changes(state, delta))
    for change in changes:
        change.write(bits(state[change.entry.name]))
    for change in changes if verify else ():
        _check(change.entry, state[change.entry.name])


def _changes(state: State, delta: bytes) -> Iterator[Change]:
    for entry, frame in parts(delta):
        held = state.get(entry.name)
        if (entry.sparse or entry.needs_parent) and not _fits(entry, held):
            raise WeightSyncError(f"delta: {entry.name} does not fit the state it is applied to")
        yield change_of(entry, frame, bits(held) if held is not None and _fits(entry, held) else None)


def _fits(entry: Entry, held: Tensor | None) -> bool:
    return held is not None and tuple(held.shape) == entry.shape and dtype_name(held) == entry.dtype


def _check(entry: Entry, tensor: Tensor) -> None:
    if digest(tensor) != entry.digest:
        raise WeightSyncError(f"delta: {entry.name} does not hash to its digest; the state was not the delta's parent")
