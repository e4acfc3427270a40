"""Sampling state of the slots that run, as arrays, so that a step does no Python work per row."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from etude.base.records import PolicyVersion
from etude.inference.cache import Ints, KVCache
from etude.inference.request import Request, Result, StopReason
from etude.inference.sampler import uniforms

SEED_MASK = (1 << 64) - 1


class Rows:
    """Indexed by slot; logprobs and versions by slot and position of the sampled token."""

    def __init__(self, num_slots: int, max_length: int, vocab_size: int) -> None:
        self.max_length = max_length
        self.temperature = np.ones(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.uint64)
        self.prompt: Ints = np.zeros(num_slots, np.int64)
        """Prompt length."""
        self.limit: Ints = np.zeros(num_slots, np.int64)
        """Known tokens at which a row ends."""
        self.stops = np.zeros((num_slots, vocab_size), np.bool_)
        self.logprobs = np.zeros((num_slots, max_length), np.float32)
        self.versions = np.zeros((num_slots, max_length), np.int32)
        self.num_watched = 0
        """Running requests that want to see each token."""

    def start(self, slot: int, request: Request) -> None:
        params = request.params
        self.temperature[slot] = params.temperature
        self.seed[slot] = (params.seed if params.seed is not None else secrets.randbits(64)) & SEED_MASK
        self.prompt[slot] = len(request.tokens)
        self.limit[slot] = min(len(request.tokens) + params.max_new_tokens, self.max_length)
        self.stops[slot, list(params.stop_token_ids)] = True
        self.num_watched += request.progress is not None

    def stop(self, slot: int, request: Request) -> None:
        self.stops[slot, list(request.params.stop_token_ids)] = False
        self.num_watched -= request.progress is not None

    def uniforms(self, slots: Ints, total: Ints) -> NDArray[np.float64]:
        """The next uniform of each of ``slots``."""
        return uniforms(self.seed[slots], total[slots] - self.prompt[slots])

    def record(
        self,
        slots: Ints,
        cache: KVCache,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        version: PolicyVersion,
    ) -> NDArray[np.bool_]:
        """Append one sampled token a slot; which of them have ended."""
        at = cache.total[slots]
        cache.tokens[slots, at] = tokens
        self.logprobs[slots, at] = logprobs
        self.versions[slots, at] = version
        cache.total[slots] = at + 1
        return np.asarray(self.stops[slots, tokens] | (at + 1 >= self.limit[slots]))

    def reason(self, slot: int, cache: KVCache) -> StopReason:
        """Why a row that has ended did."""
        return "stop" if self.stops[slot, cache.tokens[slot, cache.total[slot] - 1]] else "length"

    def result(self, slot: int, cache: KVCache, request: Request, reason: StopReason) -> Result:
        """What ``slot`` sampled, copied out."""
        sampled = slice(int(self.prompt[slot]), int(cache.total[slot]))
        return Result(
            tokens=cache.tokens[slot, sampled].copy(),
            logprobs=self.logprobs[slot, sampled].copy(),
            versions=self.versions[slot, sampled].copy(),
            experts=cache.experts[slot, request.experts_start : int(cache.length[slot])].copy(),
            experts_start=request.experts_start,
            stop_reason=reason,
            cached_tokens=request.cached,
        )
