"""States for the tests of the weight chain: every kind of dtype, and changes that flip arbitrary bits."""

from __future__ import annotations

import numpy as np
import torch

from etude.base.errors import DiskFullError, WeightSyncError
from etude.weights.codec import bits

State = dict[str, torch.Tensor]


def state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(50, 40, generator=generator).bfloat16(),
        "b": torch.randn(300, generator=generator),
        "c": torch.randint(-5, 5, (7, 3), generator=generator, dtype=torch.int8),
        "d": torch.tensor(float("nan")),
        "e": torch.randint(-5, 5, (40,), generator=generator, dtype=torch.int64),
        "f": torch.zeros(0, 3),
        "g": torch.randn(9, generator=generator).to(torch.float8_e4m3fn),
    }


def changed(old: State, seed: int, share: float) -> State:
    """Some bits of some elements flipped: NaN payloads and negative zeros come up by themselves."""
    rng = np.random.default_rng(seed)
    new = {}
    for name, tensor in old.items():
        raw = bits(tensor).copy()
        hit = rng.random(len(raw)) < share
        raw[hit] ^= rng.integers(1, 255, hit.sum()).astype(raw.dtype) << (8 * (raw.itemsize - 1))
        new[name] = torch.from_numpy(raw.view(np.uint8)).view(tensor.dtype).reshape(tensor.shape)
    return new


def same(a: State, b: State) -> bool:
    """Bit for bit, names, dtypes and shapes included."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and np.array_equal(bits(a[n]), bits(b[n])) for n in a
    )


class ScriptedStore:
    """An object store in memory whose ``put`` can be told to run out of space, or to stall."""

    location = "scripted"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.full = False
        self.puts: list[str] = []

    def put(self, key: str, data: bytes) -> None:
        if self.full:
            raise DiskFullError("object store scripted: no space left")
        self.puts.append(key)
        self.objects[key] = data

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise WeightSyncError(f"object store scripted: cannot read {key}")
        return self.objects[key]

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix + "/"))

    def exists(self, key: str) -> bool:
        return key in self.objects

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)
