"""The tensors of a Hugging Face directory: one safetensors file, or shards and their index.

Reading is lazy, a tensor at a time, so that a model can be filled with no more memory than itself and the tensor at hand.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from etude.base.errors import CheckpointError
from etude.base.telemetry import full_disk_named

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000


class StoredTensors(Mapping[str, Tensor]):
    """Name -> tensor, read from the disk when it is asked for.

    Raises CheckpointError, naming the file, when a file is missing, damaged or lacks a tensor that the index says it has.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = self._index() if (directory / INDEX).exists() else dict.fromkeys(self._names(SINGLE), SINGLE)

    def __getitem__(self, name: str) -> Tensor:
        file = self._files[name]
        with self._open(file) as opened:
            try:
                tensor: Tensor = opened.get_tensor(name)
            except SafetensorError as error:
                raise CheckpointError(f"checkpoint {self._directory / file}: no tensor {name}: {error}") from None
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def _index(self) -> dict[str, str]:
        path = self._directory / INDEX
        try:
            files = json.loads(path.read_text())["weight_map"]
            named = {str(name): str(file) for name, file in files.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"checkpoint {path}: no readable weight_map: {error}") from None
        for file in sorted(set(named.values())):
            if Path(file).name != file:
                raise CheckpointError(f"checkpoint {path}: {file!r} is not a file beside it")
            if not (self._directory / file).exists():
                raise CheckpointError(f"checkpoint {self._directory}: shard {file} is missing")
        return named

    def _names(self, file: str) -> list[str]:
        with self._open(file) as opened:
            return list(opened.keys())

    def _open(self, file: str) -> safe_open:
        try:
            return safe_open(str(self._directory / file), framework="pt")
        except FileNotFoundError:
            raise CheckpointError(f"checkpoint {self._directory}: no {file} there") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"checkpoint {self._directory / file}: cannot be read: {error}") from None


def store_tensors(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, *, max_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write tensors in ``dtype`` (an integer or a float32 correction bias as it is), in shards of at most ``max_bytes``.

    Holds one shard in memory. The index, or the only file, is renamed into its place last. Raises DiskFullError.
    """
    written: list[tuple[Path, list[str]]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0
    with full_disk_named(directory):
        directory.mkdir(parents=True, exist_ok=True)

        def flush() -> None:
            path = directory / f".shard-{len(written)}.tmp"
            _save(shard, path)
            written.append((path, list(shard)))

        for name, tensor in tensors:
            kept = tensor.detach().to(dtype if not name.endswith("correction_bias") else tensor.dtype)
            kept = kept.contiguous().clone()
            if shard and size + kept.nbytes > max_bytes:
                flush()
                shard, size = {}, 0
            shard[name] = kept
            size, total = size + kept.nbytes, total + kept.nbytes
        flush()
        _name(directory, written, total)


def _name(directory: Path, written: Sequence[tuple[Path, list[str]]], total: int) -> None:
    """Give the shards their names, then the index, then remove what the last save left."""
    before = {*directory.glob("model-*-of-*.safetensors"), directory / SINGLE, directory / INDEX}
    names = [SINGLE] if len(written) == 1 else [_shard(number, len(written)) for number in range(1, len(written) + 1)]
    for (path, _), name in zip(written, names, strict=True):
        os.replace(path, directory / name)
    if len(written) > 1:
        weight_map = {tensor: name for (_, held), name in zip(written, names, strict=True) for tensor in held}
        index = directory / f"{INDEX}.tmp"
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
        os.replace(index, directory / INDEX)
        names.append(INDEX)
    for path in before - {directory / name for name in names}:
        path.unlink(missing_ok=True)


def _shard(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file(dict(tensors), str(path), metadata={"format": "pt"})
    except SafetensorError as error:  # the library wraps what the system says
        path.unlink(missing_ok=True)
        if "StorageFull" in str(error) or "No space left" in str(error) or "code: 28" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
        raise OSError(errno.EIO, str(error), str(path)) from None
