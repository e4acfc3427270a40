"""Lossless deltas between two states: sparse overwrite of the elements whose stored bits differ.

Bits are compared, never values: NaN payloads and negative zero survive, and a step that rounds away costs nothing. Each tensor takes
the smallest of three forms: ``sparse`` (gap-coded positions and raw new values), ``full``, or left out when nothing changed.
Overwriting, unlike adding or XOR, needs no arithmetic and may be repeated: a delta applied twice gives the same state.

One file::

    b"ETD" version:u8  header_length:u32  zstd(JSON header)  zstd frame of the 1st tensor  of the 2nd  ...

    header = {"tensors": [{name, dtype, shape, form, count, gap, length, sha256}, ...]}
    frame  = byte planes of the gaps (uint16, or uint32 where one gap needs it), then byte planes of the values

``sha256`` is the digest of the whole tensor *after* the delta. Tensors are independent of each other, so that ranks can encode their
own shards. The design follows published practice (spec 11): compare bytes, overwrite, gaps, planes, zstd at a low level.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from etude.base.errors import WeightSyncError

MAGIC = b"ETD"
FORMAT = 1
LEVEL = 1
"""zstd level: 1 to 3 give the same size within 1% here, and 19 saves 3% at a sixth of the speed."""
SURELY_SPARSE = 4
"""A sparse form this many times smaller than the full one is taken without compressing both."""

State = Mapping[str, Tensor]
"""Tensor name -> CPU tensor of any dtype with 1, 2, 4 or 8 bytes an element."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class _Entry(BaseModel):
    """Header line of one changed tensor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: str
    shape: tuple[int, ...]
    form: Literal["sparse", "full"]
    count: int
    """Elements that the frame holds."""
    gap: Literal[0, 2, 4]
    """Bytes of one position gap; 0 for ``full``."""
    length: int
    """Bytes of the compressed frame."""
    sha256: str


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tensors: tuple[_Entry, ...]


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
    unsigned = _UNSIGNED.get(tensor.element_size())
    if unsigned is None:
        raise WeightSyncError(f"weights: tensors of {tensor.dtype} cannot be published")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().view(unsigned)


def digest(tensor: Tensor) -> str:
    """SHA-256 of the stored bits of one tensor (little-endian, row-major)."""
    return hashlib.sha256(bits(tensor).data).hexdigest()


def snapshot(state: State) -> dict[str, Tensor]:
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
    return _assemble(entries, frames, changed / max(total, 1))


def encode_base(state: State) -> Encoded:
    """A delta from nothing: every tensor in full."""
    entries, frames = [], []
    for name, tensor in state.items():
        entry, frame = _full(name, tensor, bits(tensor))
        entries.append(entry)
        frames.append(frame)
    return _assemble(entries, frames, 1.0)


def _smallest(name: str, tensor: Tensor, after: NDArray[Any], positions: NDArray[Any]) -> tuple[_Entry, bytes]:
    gaps = np.diff(positions, prepend=0)
    gap = 2 if int(gaps.max()) < 1 << 16 else 4
    raw_bytes = len(positions) * (after.itemsize + gap)
    if raw_bytes >= after.nbytes:
        return _full(name, tensor, after)
    frame = _compress(_planes(gaps.astype(_UNSIGNED[gap])) + _planes(after[positions]))
    sparse = _entry(name, tensor, "sparse", len(positions), gap, frame), frame
    if raw_bytes * SURELY_SPARSE < after.nbytes:
        return sparse
    full = _full(name, tensor, after)
    return full if len(full[1]) < len(frame) else sparse


def _full(name: str, tensor: Tensor, after: NDArray[Any]) -> tuple[_Entry, bytes]:
    frame = _compress(_planes(after))
    return _entry(name, tensor, "full", len(after), 0, frame), frame


def _entry(
    name: str, tensor: Tensor, form: Literal["sparse", "full"], count: int, gap: Literal[0, 2, 4], frame: bytes
) -> _Entry:
    return _Entry(
        name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape), form=form, count=count, gap=gap,
        length=len(frame), sha256=digest(tensor),
    )  # fmt: skip


def _assemble(entries: list[_Entry], frames: list[bytes], changed_fraction: float) -> Encoded:
    head = _compress(_Header(tensors=tuple(entries)).model_dump_json().encode())
    data = b"".join([MAGIC, bytes([FORMAT]), struct.pack("<I", len(head)), head, *frames])
    return Encoded(data, changed_fraction, {entry.name: entry.sha256 for entry in entries})


# ------------------------------------------------------------------------------------------------------- apply


def apply(state: State, delta: bytes, *, verify: bool = True) -> dict[str, Tensor]:
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

    Raises WeightSyncError as :func:`apply`; when only the digest of a tensor is wrong, ``state`` is no version any more and has to
    be rebuilt from a base.
    """
    parts = list(_decoded(state, delta))
    for entry, _, _ in parts:
        if entry.name not in state or not state[entry.name].is_contiguous() or state[entry.name].device.type != "cpu":
            raise WeightSyncError(
                f"delta: {entry.name} cannot be overwritten in place; it is not a contiguous CPU tensor"
            )
        _fits(entry, state)
    for entry, values, positions in parts:
        target = bits(state[entry.name])
        target[slice(None) if positions is None else positions] = values
    for entry, _, _ in parts if verify else ():
        _check(entry, state[entry.name])


def _decoded(state: State, delta: bytes) -> Iterator[tuple[_Entry, NDArray[Any], NDArray[Any] | None]]:
    """(entry, new values ``[count]``, their positions or None for all) of every changed tensor."""
    header, at = _header(delta)
    for entry in header.tensors:
        values_size = _element_size(entry)
        raw = _decompress(entry, delta[at : at + entry.length], entry.count * (entry.gap + values_size))
        at += entry.length
        values = _from_planes(raw[entry.count * entry.gap :], _UNSIGNED[values_size])
        if entry.form == "full":
            if entry.count != int(np.prod(entry.shape, dtype=np.int64)):
                raise WeightSyncError(f"delta: {entry.name} has {entry.count} elements for shape {entry.shape}")
            yield entry, values, None
            continue
        numel = _fits(entry, state)
        gaps = _from_planes(raw[: entry.count * entry.gap], _UNSIGNED[entry.gap])
        positions = gaps.astype(np.int64).cumsum()
        if not entry.count or positions[-1] >= numel:
            raise WeightSyncError(f"delta: {entry.name} has positions past its end")
        yield entry, values, positions
    if at != len(delta):
        raise WeightSyncError(f"delta: {len(delta) - at} bytes follow its last tensor")


def _header(delta: bytes) -> tuple[_Header, int]:
    """The header and the offset of the first frame."""
    if delta[:3] != MAGIC or len(delta) < 8:
        raise WeightSyncError("delta: not a delta file, or torn")
    if delta[3] != FORMAT:
        raise WeightSyncError(f"delta: format {delta[3]} is not known; this Etude reads format {FORMAT}")
    (length,) = struct.unpack_from("<I", delta, 4)
    try:
        body = zstandard.ZstdDecompressor().decompress(delta[8 : 8 + length])
        return _Header.model_validate(json.loads(body)), 8 + length
    except (zstandard.ZstdError, ValidationError, ValueError) as error:
        raise WeightSyncError(f"delta: its header cannot be read: {str(error).splitlines()[0]}") from None


def _fits(entry: _Entry, state: State) -> int:
    """Elements of the tensor that ``entry`` changes, which has to be in ``state`` with the same shape and dtype."""
    held = state.get(entry.name)
    if held is None or tuple(held.shape) != entry.shape or dtype_name(held) != entry.dtype:
        raise WeightSyncError(f"delta: {entry.name} does not fit the state it is applied to")
    return held.numel()


def _element_size(entry: _Entry) -> int:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize not in _UNSIGNED:
        raise WeightSyncError(f"delta: {entry.name} has the unknown dtype {entry.dtype}")
    return dtype.itemsize


def _check(entry: _Entry, tensor: Tensor) -> None:
    if digest(tensor) != entry.sha256:
        raise WeightSyncError(f"delta: {entry.name} does not hash to its digest; the state was not the delta's parent")


# ------------------------------------------------------------------------------------------------------- bytes


def _compress(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(raw)


def _decompress(entry: _Entry, frame: bytes, size: int) -> bytes:
    try:
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
    except zstandard.ZstdError as error:
        raise WeightSyncError(f"delta: {entry.name} cannot be read: {error}") from None
    if len(raw) != size:
        raise WeightSyncError(f"delta: {entry.name} has {len(raw)} bytes where its header says {size}")
    return raw


def _planes(values: NDArray[Any]) -> bytes:
    """All first bytes, then all second bytes, ...: exponents compress apart from mantissas, high bytes of gaps to nothing."""
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _from_planes(raw: bytes, unsigned: Any) -> NDArray[Any]:
    """Inverse of :func:`_planes`: a writable array."""
    planes = np.frombuffer(raw, np.uint8).reshape(np.dtype(unsigned).itemsize, -1)
    values: NDArray[Any] = planes.T.copy(order="C").view(unsigned).reshape(-1)
    return values
