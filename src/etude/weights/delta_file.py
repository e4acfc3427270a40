"""The file format of a delta: a header that says what each frame holds, and one zstd frame a changed tensor. Torch-free.

Layout::

    b"ETD" version:u8  header_length:u32  zstd(JSON header)  frame of the 1st tensor  of the 2nd  ...

    header = {"tensors": [{name, dtype, shape, form, count, gap, position_length, length, before, digest}, ...]}
    frame  = zstd(byte planes of the gaps: uint16, or uint32 where one gap needs it), then zstd(byte planes of the values)

The forms of a tensor::

    overwrite    positions and the new values there         full        all new values
    xor          positions and old XOR new there            full_xor    old XOR new of all elements
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import zstandard
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from etude.base.errors import WeightSyncError

MAGIC = b"ETD"
FORMAT = 2
LEVEL = 1
"""zstd level: 1 to 3 give the same size within 1% here, and 19 saves 3% at a sixth of the speed."""
PARAMETERS = zstandard.ZstdCompressionParameters.from_level(LEVEL, min_match=7, hash_log=8)
"""What is left to find is entropy and runs: looking for short matches as well made files 4% larger and encoding slower."""
MAX_HEADER_BYTES = 1 << 28

UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Bytes an element -> the unsigned dtype its bits are compared in."""

Form = Literal["overwrite", "xor", "full", "full_xor"]
Gap = Literal[0, 2, 4]


class Entry(BaseModel):
    """Header line of one changed tensor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: str
    """Torch's name without the prefix: ``bfloat16``."""
    shape: tuple[int, ...]
    form: Form
    count: int
    """Elements that the frame holds."""
    gap: Gap
    """Bytes of one position gap; 0 where all elements are held."""
    position_length: int
    """Bytes of the compressed positions, which come first in the frame."""
    length: int
    """Bytes of the whole frame."""
    before: str = ""
    """XOR forms: XXH3-128 of the old values at the positions, by which a wrong parent is noticed before anything is written."""
    digest: str
    """XXH3-128 of the whole tensor after the delta."""

    @property
    def sparse(self) -> bool:
        return self.form in ("overwrite", "xor")

    @property
    def needs_parent(self) -> bool:
        """Whether the new values can only be had from the old ones."""
        return self.form in ("xor", "full_xor")


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tensors: tuple[Entry, ...]


def assemble(entries: Sequence[Entry], frames: Sequence[bytes]) -> bytes:
    """The file of ``entries`` and their compressed frames, in the same order."""
    head = compress(_Header(tensors=tuple(entries)).model_dump_json().encode())
    return b"".join([MAGIC, bytes([FORMAT]), struct.pack("<I", len(head)), head, *frames])


def parts(delta: bytes) -> Iterator[tuple[Entry, bytes]]:
    """(entry, compressed frame) in order. Raises WeightSyncError when the file is torn or of another format."""
    header, at = _header(delta)
    for entry in header.tensors:
        yield entry, delta[at : at + entry.length]
        at += entry.length
    if at != len(delta):
        raise WeightSyncError(f"delta: it has {len(delta)} bytes where its header says {at}")


def _header(delta: bytes) -> tuple[_Header, int]:
    """The header and the offset of the first frame."""
    if delta[:3] != MAGIC or len(delta) < 8:
        raise WeightSyncError("delta: not a delta file, or torn")
    if delta[3] != FORMAT:
        raise WeightSyncError(f"delta: format {delta[3]} is not known; this Etude reads format {FORMAT}")
    (length,) = struct.unpack_from("<I", delta, 4)
    head = delta[8 : 8 + length]
    try:
        if not 0 < zstandard.frame_content_size(head) < MAX_HEADER_BYTES:
            raise ValueError("of an impossible size")
        return _Header.model_validate_json(zstandard.ZstdDecompressor().decompress(head)), 8 + length
    except (zstandard.ZstdError, ValidationError, ValueError) as error:
        raise WeightSyncError(f"delta: its header cannot be read: {str(error).splitlines()[0]}") from None


def compress(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(compression_params=PARAMETERS).compress(raw)


def decompress(entry: Entry, frame: bytes, size: int) -> bytes:
    """The ``size`` bytes of a frame. Raises WeightSyncError that names its tensor; never allocates more."""
    try:
        if zstandard.frame_content_size(frame) != size:
            raise WeightSyncError(f"delta: {entry.name} is not of the size that its header says")
        return zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise WeightSyncError(f"delta: {entry.name} cannot be read: {error}") from None


def planes(values: NDArray[Any]) -> bytes:
    """All first bytes, then all second bytes, ...: exponents compress apart from mantissas, high bytes of gaps to nothing."""
    raw = values.view(np.uint8)
    return b"".join(raw[byte :: values.itemsize].tobytes() for byte in range(values.itemsize))


def from_planes(raw: bytes, unsigned: Any) -> NDArray[Any]:
    """Inverse of :func:`planes`: a writable array of dtype ``unsigned``."""
    size = np.dtype(unsigned).itemsize
    count = len(raw) // size
    values = np.empty(count, unsigned)
    target, source = values.view(np.uint8), np.frombuffer(raw, np.uint8)
    for byte in range(size):
        target[byte::size] = source[byte * count : (byte + 1) * count]
    return values
