"""Builds segments token by token: exactly what was shown and exactly what was sampled, with versions and experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from etude.base.errors import InferenceFault
from etude.base.records import Completion, Segment


class SegmentRecorder:
    """The tokens of one generation context as it grows. Each position keeps the routing it was first given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_sampled = 0
        self.num_experts_known = 0
        """First position whose routing is not known yet; the next request asks for it from here on."""
        self._sampled: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._experts: list[tuple[int, NDArray[Any]]] = []

    def show(self, tokens: Sequence[int]) -> None:
        """Append tokens that the model reads."""
        count = len(tokens)
        self.tokens += tokens
        self._sampled += [False] * count
        self._logprobs += [0.0] * count
        self._versions += [-1] * count

    def sample(self, completion: Completion) -> None:
        """Append tokens that the model sampled, unchanged. Raises InferenceFault when the arrays do not fit together."""
        count = len(completion.tokens)
        if not count == len(completion.logprobs) == len(completion.versions):
            raise InferenceFault(f"completion of {count} tokens with logprobs or versions for another number")
        self.tokens += completion.tokens
        self.num_sampled += count
        self._sampled += [True] * count
        self._logprobs += completion.logprobs
        self._versions += completion.versions
        if completion.experts is not None:
            self._take_experts(completion.experts_start, np.asarray(completion.experts))

    def _take_experts(self, start: int, experts: NDArray[Any]) -> None:
        """Keep what is new; positions known before keep their routing, a gap stays unknown."""
        end = start + len(experts)
        if end > len(self.tokens):
            raise InferenceFault(f"completion has experts for {end} positions of a context of {len(self.tokens)}")
        new = max(start, self.num_experts_known)
        if end > new:
            self._experts.append((new, experts[new - start :]))
            self.num_experts_known = end

    def segment(self, end: Literal["stop", "budget", "summary"]) -> Segment:
        """The finished record."""
        return Segment(
            tokens=np.asarray(self.tokens, np.int32),
            sampled=np.asarray(self._sampled, bool),
            logprobs=np.asarray(self._logprobs, np.float32),
            versions=np.asarray(self._versions, np.int32),
            experts=self._all_experts(),
            end=end,
        )

    def _all_experts(self) -> NDArray[np.int16] | None:
        if not self._experts:
            return None
        known = np.full((len(self.tokens), *self._experts[0][1].shape[1:]), -1, np.int16)
        for start, experts in self._experts:
            known[start : start + len(experts)] = experts
        return known
