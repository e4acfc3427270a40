"""The engine: continuous batching over a model, one forward pass a step.

Every active row has tokens that are known and tokens that were fed. A step feeds each row one token, or a chunk of its prompt
while the step's prefill budget lasts, and samples the next token of all rows that are then fully fed. Between two steps
new weights may be swapped in: running rows go on with the keys they have (stale keys are kept inside a session, as in
PipelineRL), later tokens carry the new version. Not thread-safe, except :meth:`Engine.stage`; ``loop`` gives it a thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from etude.base.config import Config
from etude.base.errors import InferenceFault
from etude.base.records import PolicyVersion, SamplingParams
from etude.inference.cache import Ints, KVCache
from etude.inference.forward import Batch, Chunk
from etude.inference.request import Request, Result, StopReason
from etude.inference.rows import Rows
from etude.inference.sampler import draw
from etude.inference.sessions import Sessions
from etude.inference.staging import Staged, arranger, build
from etude.models.deepseek import DeepseekModel

WORTH_WAITING = 16
"""A row waits for another one's prefill when that saves it more than this many positions."""


class EngineConfig(Config):
    """Size of one engine."""

    slots: int = Field(64, ge=1)
    """Sessions whose keys are kept at once."""
    max_length: int = Field(512, ge=16)
    """Positions a context may have."""
    prefill_tokens: int = Field(256, ge=16)
    """Prompt tokens fed by one step; the rest waits for the next one."""
    threads: int = Field(1, ge=1)
    """Of PyTorch; the native kernel uses one."""
    kernel: Literal["auto", "native", "torch"] = "auto"
    """How a step is computed; auto is native where it can be compiled."""


@dataclass
class Counters:
    """Since the start."""

    steps: int = 0
    tokens_sampled: int = 0
    tokens_prefilled: int = 0
    tokens_cached: int = 0
    prefix_hits: int = 0
    """Requests that got a prefix from another slot."""


class Engine:
    """Serves one model at one policy version at a time."""

    def __init__(self, model: DeepseekModel, config: EngineConfig, version: PolicyVersion = 0) -> None:
        self.config, self.model_config, self.version = config, model.config, version
        self.cache = KVCache(model.config, config.slots, config.max_length)
        self.rows = Rows(config.slots, config.max_length, model.config.vocab_size)
        self.sessions = Sessions(self.cache)
        self.counters = Counters()
        self._arrange = arranger(config.kernel, config.slots, config.max_length)
        self.kernel = self._arrange.kernel
        self._served = self._arrange(model.eval())
        self._epochs = itertools.count(1)
        self._epoch = next(self._epochs)
        self._waiting: list[Request] = []
        self._active: dict[int, Request] = {}
        self._order: Ints = np.zeros(0, np.int64)

    # ---------------------------------------------------------------------------------------------- requests

    def submit(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        done: Callable[[Result], None],
        *,
        session: str,
        experts_start: int = 0,
        progress: Callable[[int, float], None] | None = None,
    ) -> Request:
        """Queue a request; ``done`` is called from :meth:`step`. Raises InferenceFault when it can never run."""
        known = _checked(tokens, params, self.config.max_length, self.model_config.vocab_size)
        request = Request(known, params, session, max(0, experts_start), done, progress)
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Finish a request with what it has; one that has finished is left alone."""
        if request in self._waiting:
            self._waiting.remove(request)
            none = np.zeros(0)
            request.done(
                Result(none.astype(np.int32), none.astype(np.float32), none.astype(np.int32), None,
                       request.experts_start, "cancelled", 0)
            )  # fmt: skip
        elif self._active.get(request.slot) is request:
            self._finish(request.slot, "cancelled")

    def close_session(self, session: str) -> None:
        """Let a session's slot be reused first; its keys may still serve as a prefix."""
        self.sessions.close(session)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._active)

    @property
    def load(self) -> dict[str, int]:
        """Counts for health and metrics."""
        return {
            "waiting": len(self._waiting),
            "running": len(self._active),
            "slots": self.config.slots,
            "sessions": self.sessions.count,
            **vars(self.counters),
        }

    # ------------------------------------------------------------------------------------------------- steps

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, feed every row, sample where a row is fully fed. Returns at once when nothing runs."""
        self._admit()
        batch, slots, counts = self._plan()
        if not len(slots):
            return
        hidden, experts = self._served.forward(batch, self.cache)
        self.cache.experts[batch.slots.numpy(), batch.positions.numpy()] = experts
        self.cache.mark_fed(slots, counts, self._epoch)
        self.counters.steps += 1
        ready = self.cache.length[slots] == self.cache.total[slots]
        if ready.any():
            last = (np.cumsum(counts) - 1)[ready]
            self._sample(slots[ready], self._served.logits(hidden, torch.from_numpy(last)))

    def _admit(self) -> None:
        """Give waiting requests a slot, in order; one whose session is busy does not hold up the others."""
        if not self._waiting:
            return
        still: list[Request] = []
        for index, request in enumerate(self._waiting):
            if self.sessions.running(request.session, self._active):
                still.append(request)
                continue
            slot = self.sessions.place(request.session, self._active, self._epoch)
            if slot is None:
                still += self._waiting[index:]
                break
            known = int(self.cache.common_prefix(request.tokens[:-1])[slot])
            mine = self.sessions.kept(request.session) or self.cache.epoch[slot] == self._epoch
            keep = min(known, int(self.cache.length[slot])) if mine else 0
            self.sessions.own(slot, request.session)
            self.cache.assign(slot, request.tokens, keep)
            request.slot, request.cached = slot, keep
            self.rows.start(slot, request)
            self._active[slot] = request
        self._waiting = still
        self._order = np.fromiter(self._active, np.int64, len(self._active))

    def _plan(self) -> tuple[Batch, Ints, Ints]:
        """(batch, slots that are fed, how many tokens each): single rows first, then chunks."""
        cache, slots = self.cache, self._order
        pending = cache.total[slots] - cache.length[slots]
        if (pending <= 1).all():
            return self._batch(slots, [], [])
        singles = slots[pending == 1].tolist()
        chunks: list[int] = []
        counts: list[int] = []
        budget = self.config.prefill_tokens
        earlier: list[int] = []
        for slot in slots[pending > 1].tolist():
            if self._active[slot].fresh and not self._share(slot, earlier):
                earlier.append(slot)
                continue
            earlier.append(slot)
            count = min(int(cache.total[slot] - cache.length[slot]), budget)
            budget -= count
            self.counters.tokens_prefilled += count
            if count == 1:
                singles.append(slot)
            else:
                chunks.append(slot)
                counts.append(count)
            if budget == 0:
                break
        return self._batch(np.asarray(singles, np.int64), chunks, counts)

    def _share(self, slot: int, earlier: list[int]) -> bool:
        """Match a new row's prompt against the other slots. False: an earlier row is just computing its beginning."""
        cache, request = self.cache, self._active[slot]
        common = cache.common_prefix(request.tokens[:-1])
        common[slot] = 0
        current = cache.epoch == self._epoch
        held = np.where(current, np.minimum(common, cache.length), 0)
        source = int(held.argmax())
        best = max(int(held[source]), int(cache.length[slot]))
        promised = [int(common[e]) for e in earlier if current[e] or cache.length[e] == 0]
        if max(promised, default=0) > best + WORTH_WAITING:
            return False
        request.fresh = False
        if held[source] > cache.length[slot]:
            cache.copy_prefix(source, slot, int(held[source]))
            request.cached = int(held[source])
            self.counters.prefix_hits += 1
        self.counters.tokens_cached += request.cached
        return True

    def _batch(self, singles: Ints, chunks: list[int], counts: list[int]) -> tuple[Batch, Ints, Ints]:
        cache, n = self.cache, len(singles)
        positions = cache.length[singles]
        longest = int(positions.max()) + 1 if n else 0
        if not chunks:
            tokens = cache.tokens[singles, positions]
            batch = Batch(
                torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(singles), torch.from_numpy(positions),
                n, longest, (),
            )  # fmt: skip
            return batch, singles, np.ones(n, np.int64)
        described: list[Chunk] = []
        all_slots, all_positions, at = [singles], [positions], n
        for slot, count in zip(chunks, counts, strict=True):
            start = int(cache.length[slot])
            described.append(Chunk(slot, at, at + count, start, start + count))
            all_slots.append(np.full(count, slot, np.int64))
            all_positions.append(np.arange(start, start + count))
            at += count
        flat_slots, flat_positions = np.concatenate(all_slots), np.concatenate(all_positions)
        tokens = cache.tokens[flat_slots, flat_positions].astype(np.int64)
        batch = Batch(
            torch.from_numpy(tokens), torch.from_numpy(flat_slots), torch.from_numpy(flat_positions),
            n, longest, tuple(described),
        )  # fmt: skip
        fed = np.concatenate((singles, np.asarray(chunks, np.int64)))
        return batch, fed, np.concatenate((np.ones(n, np.int64), np.asarray(counts, np.int64)))

    def _sample(self, slots: Ints, logits: Tensor) -> None:
        rows, cache = self.rows, self.cache
        tokens, logprobs = draw(logits, rows.temperature[slots], rows.uniforms(slots, cache.total))
        ended = rows.record(slots, cache, tokens, logprobs, self.version)
        self.counters.tokens_sampled += len(slots)
        if rows.num_watched:
            for slot, token, logprob in zip(slots.tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
                progress = self._active[slot].progress
                if progress is not None:
                    progress(token, logprob)
        if ended.any():
            for slot in slots[ended].tolist():
                self._finish(slot, rows.reason(slot, cache))

    def _finish(self, slot: int, reason: StopReason) -> None:
        request = self._active.pop(slot)
        self._order = np.fromiter(self._active, np.int64, len(self._active))
        result = self.rows.result(slot, self.cache, request, reason)
        self.cache.release(slot)
        self.rows.stop(slot, request)
        self.sessions.touch(slot)
        request.done(result)

    # ----------------------------------------------------------------------------------------------- weights

    def stage(self, version: PolicyVersion, state: Mapping[str, Tensor]) -> Staged:
        """Build ``version`` beside the live weights (any thread). Raises CheckpointError; nothing changes then."""
        return build(self.model_config, version, state, self._arrange)

    def swap(self, staged: Staged) -> None:
        """Serve ``staged`` from the next step on. Running rows keep their keys."""
        self._served, self.version, self._epoch = staged.served, staged.version, next(self._epochs)


def _checked(tokens: Sequence[int], params: SamplingParams, max_length: int, vocab: int) -> np.ndarray:
    """``tokens`` as int32. Raises InferenceFault when the request can never run."""
    known = np.asarray(tokens)
    if known.size == 0:
        raise InferenceFault("generate: tokens is empty")
    if known.ndim != 1 or known.dtype.kind not in "iu":
        raise InferenceFault("generate: tokens must be a list of integers")
    if len(tokens) >= max_length:
        raise InferenceFault(f"generate: {len(tokens)} tokens leave no room; a context holds {max_length}")
    if params.max_new_tokens < 1:
        raise InferenceFault(f"generate: max_new_tokens is {params.max_new_tokens}; at least 1")
    if not 0.0 <= params.temperature < float("inf"):
        raise InferenceFault(f"generate: temperature is {params.temperature}; 0 or more")
    if known.min() < 0 or known.max() >= vocab or any(not 0 <= i < vocab for i in params.stop_token_ids):
        raise InferenceFault(f"generate: a token id is outside 0..{vocab - 1}")
    return known.astype(np.int32)
