"""The KV cache: one slot a session, latents and rotated keys only, with the routed experts as siblings.

A slot remembers which tokens it was fed, so that a later request of its session, or another one with the same beginning,
only computes what is new.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from etude.models.config import ModelConfig

MIXED = -1
"""Version of a slot whose keys come from more than one policy version."""


class KVCache:
    """``num_slots`` rows of ``max_length`` positions (and one scratch position that padding is written to)."""

    def __init__(self, config: ModelConfig, num_slots: int, max_length: int) -> None:
        self.num_slots, self.max_length = num_slots, max_length
        layers, room = config.num_hidden_layers, max_length + 1
        self.latent = torch.zeros(layers, num_slots, room, config.kv_lora_rank)
        self.k_rope = torch.zeros(layers, num_slots, room, config.qk_rope_head_dim)
        self.experts = np.full((num_slots, room, config.num_moe_layers, config.num_experts_per_tok), -1, np.int16)
        self.fed = np.full((num_slots, max_length), -1, np.int32)
        """Tokens whose keys are stored, from position 0."""
        self.length = np.zeros(num_slots, np.int64)
        self.version = np.full(num_slots, MIXED, np.int64)
        """Policy version of all keys of a slot, or MIXED."""

    def common_prefix(self, tokens: Sequence[int]) -> np.ndarray:
        """How many leading ``tokens`` each slot holds: int64 ``[num_slots]``."""
        wanted = np.asarray(tokens, np.int32)
        same = self.fed[:, : len(wanted)] == wanted[: self.max_length]
        return np.asarray(np.minimum(np.where(same.all(1), same.shape[1], same.argmin(1)), self.length))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give ``target`` the first ``length`` positions of ``source``."""
        if source != target:
            self.latent[:, target, :length] = self.latent[:, source, :length]
            self.k_rope[:, target, :length] = self.k_rope[:, source, :length]
            self.experts[target, :length] = self.experts[source, :length]
            self.fed[target, :length] = self.fed[source, :length]
            self.version[target] = self.version[source]
        self.truncate(target, length)

    def truncate(self, slot: int, length: int) -> None:
        self.fed[slot, length:] = -1
        self.length[slot] = length

    def commit(self, slot: int, tokens: Sequence[int], experts: np.ndarray, version: int) -> None:
        """Note that ``tokens`` were fed to ``slot`` after what it holds, with their ``experts [n, L, k]``."""
        start = int(self.length[slot])
        end = start + len(tokens)
        self.fed[slot, start:end] = tokens
        self.experts[slot, start:end] = experts
        self.length[slot] = end
        if start == 0:
            self.version[slot] = version
        elif self.version[slot] != version:
            self.version[slot] = MIXED


class StepContext:
    """The cache as one forward pass sees it: ``rows [B]`` slots, new ``positions [B, S]``, ``visible`` positions T."""

    def __init__(self, cache: KVCache, rows: Tensor, positions: Tensor, visible: int) -> None:
        self.cache, self.rows, self.visible = cache, rows, visible
        self._index = (rows[:, None], positions)
        self.mask = (torch.arange(visible)[None, None, :] <= positions[:, :, None])[:, None]

    def extend(self, layer: int, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        all_latent, all_rope = self.cache.latent[layer], self.cache.k_rope[layer]
        all_latent[self._index] = latent
        all_rope[self._index] = k_rope
        seen = slice(0, self.visible)
        return all_latent[:, seen].index_select(0, self.rows), all_rope[:, seen].index_select(0, self.rows), self.mask
