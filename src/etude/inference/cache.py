"""The KV cache: one slot a session; latents and rotated keys in one tensor, routed experts as their sibling.

A slot remembers which tokens it was fed, so that a later request of its session, or another one with the same beginning,
only computes what is new. ``epoch`` tells which weights computed a slot: a prefix may be handed to another session only when
all of it comes from the weights that serve now.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.models.config import ModelConfig

MIXED = -1
"""Epoch of a slot whose keys come from more than one set of weights (or that holds none)."""

Ints = NDArray[np.int64]


class KVCache:
    """``num_slots`` rows of ``max_length`` positions. All arrays are preallocated; nothing grows."""

    def __init__(self, config: ModelConfig, num_slots: int, max_length: int) -> None:
        self.num_slots, self.max_length, self.rank = num_slots, max_length, config.kv_lora_rank
        self.width = config.kv_lora_rank + config.qk_rope_head_dim
        layers = config.num_hidden_layers
        self.keys = _huge_zeros(layers, num_slots, max_length, self.width)
        """Normalised latent (first ``rank``) and rotated key of every position, float32."""
        shape = (num_slots, max_length, config.num_moe_layers, config.num_experts_per_tok)
        self.experts = np.full(shape, -1, np.int16)
        self.tokens = np.zeros((num_slots, max_length), np.int32)
        """Known tokens: those fed, then (while a request runs) those still to be fed."""
        self.length: Ints = np.zeros(num_slots, np.int64)
        """Positions fed, i.e. whose keys are stored."""
        self.total: Ints = np.zeros(num_slots, np.int64)
        """Tokens known."""
        self.epoch: Ints = np.full(num_slots, MIXED, np.int64)

    def common_prefix(self, tokens: Sequence[int] | NDArray[np.int32]) -> Ints:
        """How many leading ``tokens`` each slot knows (fed or still to be fed): int64 ``[num_slots]``."""
        wanted = np.asarray(tokens, np.int32)[: self.max_length]
        differ = self.tokens[:, : len(wanted)] != wanted
        first = np.where(differ.any(1), differ.argmax(1), len(wanted)) if len(wanted) else np.zeros(self.num_slots)
        return np.asarray(np.minimum(first, self.total), np.int64)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give ``target`` the keys, experts and epoch of the first ``length`` positions of ``source``."""
        self.keys[:, target, :length] = self.keys[:, source, :length]
        self.experts[target, :length] = self.experts[source, :length]
        self.length[target] = length
        self.epoch[target] = self.epoch[source]

    def assign(self, slot: int, tokens: NDArray[np.int32], keep: int) -> None:
        """Make ``tokens`` what ``slot`` knows; the first ``keep`` of them are already fed."""
        self.tokens[slot, : len(tokens)] = tokens
        self.length[slot], self.total[slot] = keep, len(tokens)
        if keep == 0:
            self.epoch[slot] = MIXED

    def release(self, slot: int) -> None:
        """Forget what was known but not fed."""
        self.total[slot] = self.length[slot]

    def mark_fed(self, slots: Ints, counts: Ints | int, epoch: int) -> None:
        """``counts`` more positions of each of ``slots`` were fed under ``epoch``."""
        started = self.length[slots] == 0
        self.epoch[slots] = np.where(started | (self.epoch[slots] == epoch), epoch, MIXED)
        self.length[slots] += counts


def _huge_zeros(*shape: int) -> Tensor:
    """float32 zeros on huge pages where the system has them: a step touches all rows, and small pages cost it dearly."""
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(4 * count, mmap.PAGESIZE))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32, count=count).view(shape)
