"""The engine: continuous batching over a model, one forward pass at a time.

:meth:`Engine.step` admits waiting requests, prefills what is new of them (several at once), then decodes one token for every
running row. Between two steps new weights may be swapped in: running sequences go on with the keys they have (stale keys are
kept, as in PipelineRL) and later tokens carry the new version. Not thread-safe; ``server`` gives it a thread of its own.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from etude.base.config import Config
from etude.base.errors import InferenceFault
from etude.base.records import Completion, PolicyVersion, SamplingParams
from etude.inference.cache import KVCache, StepContext
from etude.models.checkpoint import import_state
from etude.models.deepseek import DeepseekModel

VISIBLE_STEP = 64
"""Attention looks at a multiple of this many positions, so that shapes repeat."""


class EngineConfig(Config):
    """Size of one engine."""

    slots: int = Field(64, ge=1)
    """Sessions whose keys are kept at once."""
    max_length: int = Field(512, ge=16)
    """Positions a context may have."""
    prefill_tokens: int = Field(1024, ge=16)
    """New prompt tokens (padding included) of one step."""
    threads: int = Field(1, ge=1)


@dataclass(eq=False)
class Request:
    """One request on its way through the engine."""

    tokens: list[int]
    params: SamplingParams
    session: str
    experts_start: int
    done: Callable[[Completion], None]
    uniform: random.Random
    slot: int = -1
    cached: int = 0
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class Engine:
    """Serves one model at one policy version at a time."""

    def __init__(self, model: DeepseekModel, config: EngineConfig, version: PolicyVersion = 0) -> None:
        torch.set_num_threads(config.threads)
        self.config, self.model, self.version = config, model.eval(), version
        self.cache = KVCache(model.config, config.slots, config.max_length)
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        self._running: list[Request] = []
        self._sessions: dict[str, int] = {}
        self._owner: list[str | None] = [None] * config.slots
        self._busy: set[int] = set()
        self._used: list[int] = [0] * config.slots
        self._clock = itertools.count(1)
        self.tokens_sampled = self.tokens_prefilled = self.tokens_cached = 0

    # ---------------------------------------------------------------------------------------------- requests

    def submit(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        done: Callable[[Completion], None],
        *,
        session: str,
        experts_start: int = 0,
    ) -> Request:
        """Queue a request; ``done`` is called from :meth:`step`. Raises InferenceFault when it can never run."""
        if not tokens:
            raise InferenceFault("generate: tokens is empty")
        if len(tokens) >= self.config.max_length:
            raise InferenceFault(f"generate: {len(tokens)} tokens, but the engine holds {self.config.max_length}")
        if min(tokens) < 0 or max(tokens) >= self.model.config.vocab_size:
            raise InferenceFault(f"generate: a token id is outside 0..{self.model.config.vocab_size - 1}")
        seed = params.seed if params.seed is not None else random.getrandbits(63)
        request = Request(list(tokens), params, session, experts_start, done, random.Random(seed))
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Finish a request with what it has; unknown ones are left alone."""
        for queue in (self._waiting, self._prefilling, self._running):
            if request in queue:
                queue.remove(request)
                self._finish(request, "cancelled")

    def close_session(self, session: str) -> None:
        """Let a session's slot be reused first; its keys may still serve as a prefix."""
        slot = self._sessions.pop(session, None)
        if slot is not None:
            self._owner[slot] = None

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._running)

    @property
    def load(self) -> dict[str, int]:
        """Counts for health and metrics."""
        return {
            "waiting": len(self._waiting),
            "running": len(self._running) + len(self._prefilling),
            "sessions": len(self._sessions),
            "tokens_sampled": self.tokens_sampled,
            "tokens_prefilled": self.tokens_prefilled,
            "tokens_cached": self.tokens_cached,
        }

    # ------------------------------------------------------------------------------------------------- steps

    @torch.inference_mode()
    def step(self) -> None:
        """One prefill pass (when something waits) and one decode pass (when something runs)."""
        self._admit()
        if self._prefilling:
            self._prefill()
        if self._running:
            self._decode()

    def _admit(self) -> None:
        while self._waiting:
            slot = self._place(self._waiting[0])
            if slot is None:
                return
            request = self._waiting.popleft()
            request.slot = slot
            request.cached = int(self.cache.length[slot])
            self.tokens_cached += request.cached
            self._busy.add(slot)
            self._prefilling.append(request)

    def _place(self, request: Request) -> int | None:
        """A slot for the request, cut to the prefix it shares with what is stored; None when all are busy."""
        lengths = self.cache.common_prefix(request.tokens[:-1])
        slot = self._sessions.get(request.session)
        if slot is not None:
            if slot in self._busy:
                return None
            self.cache.truncate(slot, int(lengths[slot]))
            return slot
        free = [s for s in range(self.config.slots) if s not in self._busy]
        if not free:
            return None
        # closed sessions first, then the session that was used longest ago
        slot = min(free, key=lambda s: (self._owner[s] is not None, self._used[s]))
        if self._owner[slot] is not None:
            self._sessions.pop(str(self._owner[slot]), None)
        self._owner[slot], self._sessions[request.session] = request.session, slot
        shared = np.where(self.cache.version == self.version, lengths, 0)
        source = int(shared.argmax())
        self.cache.copy_prefix(source, slot, int(shared[source]))
        return slot

    def _prefill(self) -> None:
        """Feed the next chunk of several requests, padded to one length."""
        chosen: list[Request] = []
        longest = 0
        for request in self._prefilling:
            left = len(request.tokens) - int(self.cache.length[request.slot])
            length = max(longest, min(left, self.config.prefill_tokens))
            if chosen and length * (len(chosen) + 1) > self.config.prefill_tokens:
                break
            chosen.append(request)
            longest = length
        starts = np.asarray([self.cache.length[request.slot] for request in chosen])
        chunks = [r.tokens[start : start + longest] for r, start in zip(chosen, starts, strict=True)]
        tokens = np.zeros((len(chosen), longest), np.int64)
        positions = np.full((len(chosen), longest), self.cache.max_length, np.int64)
        for row, (chunk, start) in enumerate(zip(chunks, starts, strict=True)):
            tokens[row, : len(chunk)] = chunk
            positions[row, : len(chunk)] = np.arange(start, start + len(chunk))
        hidden = self._forward(chosen, torch.from_numpy(tokens), positions, chunks)
        self.tokens_prefilled += sum(map(len, chunks))
        ready = [row for row, r in enumerate(chosen) if self.cache.length[r.slot] == len(r.tokens)]
        if ready:
            last = torch.tensor([len(chunks[row]) - 1 for row in ready])
            finished = [chosen[row] for row in ready]
            self._prefilling = [request for request in self._prefilling if request not in finished]
            self._sample(finished, hidden[torch.tensor(ready), last])
            self._running += [request for request in finished if request.slot in self._busy]

    def _decode(self) -> None:
        """Feed each running row the token it sampled last and sample the next one."""
        rows = self._running
        tokens = torch.tensor([[request.sampled[-1]] for request in rows])
        positions = np.asarray([[self.cache.length[request.slot]] for request in rows])
        hidden = self._forward(rows, tokens, positions, [[request.sampled[-1]] for request in rows])
        self._sample(rows, hidden[:, 0])
        self._running = [request for request in rows if request.slot in self._busy]

    def _forward(
        self, rows: Sequence[Request], tokens: Tensor, positions: np.ndarray, chunks: Sequence[Sequence[int]]
    ) -> Tensor:
        """Hidden states ``[B, S, D]`` of new tokens; commits them to the cache."""
        real = positions[positions < self.cache.max_length]
        visible = min(-(-(int(real.max()) + 1) // VISIBLE_STEP) * VISIBLE_STEP, self.cache.max_length)
        where = torch.from_numpy(positions)
        slots = torch.tensor([request.slot for request in rows])
        context = StepContext(self.cache, slots, where, visible)
        out = self.model(tokens, positions=where, context=context, max_position=self.cache.max_length)
        experts = out.experts.numpy().astype(np.int16)
        for row, (request, chunk) in enumerate(zip(rows, chunks, strict=True)):
            self.cache.commit(request.slot, chunk, experts[row, : len(chunk)], self.version)
        return torch.as_tensor(out.hidden)

    def _sample(self, rows: Sequence[Request], hidden: Tensor) -> None:
        """Draw one token a row by inverse transform with the row's own uniform, so that no neighbour matters."""
        logprobs = self.model.logits(hidden).log_softmax(dim=-1)
        temperatures = torch.tensor([max(request.params.temperature, 1e-6) for request in rows])
        cumulative = (logprobs / temperatures[:, None]).softmax(dim=-1).double().cumsum(dim=-1)
        uniform = torch.tensor([[request.uniform.random()] for request in rows], dtype=torch.float64)
        drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).squeeze(1)
        drawn = drawn.clamp_max(logprobs.shape[1] - 1)
        greedy = torch.tensor([request.params.temperature == 0.0 for request in rows])
        tokens = torch.where(greedy, logprobs.argmax(dim=-1), drawn)
        chosen = logprobs.gather(1, tokens[:, None]).squeeze(1).tolist()
        for request, token, logprob in zip(rows, tokens.tolist(), chosen, strict=True):
            request.sampled.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            self.tokens_sampled += 1
            if token in request.params.stop_token_ids:
                self._finish(request, "stop")
            elif (
                len(request.sampled) >= request.params.max_new_tokens
                or len(request.tokens) + len(request.sampled) >= self.config.max_length
            ):
                self._finish(request, "length")

    def _finish(self, request: Request, reason: Literal["stop", "length", "cancelled"]) -> None:
        experts = None
        if request.slot >= 0:
            self._busy.discard(request.slot)
            self._used[request.slot] = next(self._clock)
            fed = int(self.cache.length[request.slot])
            experts = self.cache.experts[request.slot, request.experts_start : fed].copy()
        request.done(
            Completion(
                tokens=tuple(request.sampled),
                logprobs=tuple(request.logprobs),
                versions=tuple(request.versions),
                experts=experts,
                experts_start=request.experts_start,
                stop_reason=reason,
                cached_tokens=request.cached,
            )
        )

    # ----------------------------------------------------------------------------------------------- weights

    def prepare(self, state: Mapping[str, Tensor]) -> DeepseekModel:
        """A second model holding ``state``, built beside the live one (any thread). Raises CheckpointError."""
        model = DeepseekModel(self.model.config).eval()
        import_state(model, state)
        return model

    def swap(self, model: DeepseekModel, version: PolicyVersion) -> None:
        """Serve ``model`` as ``version`` from the next step on."""
        self.model, self.version = model, version
