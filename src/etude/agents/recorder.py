"""Builds segments token by token: exactly what was shown and exactly what was sampled, with versions and experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from etude.base.records import Completion, Segment


class SegmentRecorder:
    """The tokens of one generation context as it grows. Each position keeps the routing it was first given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._sampled: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._experts: list[NDArray[Any]] = []
        self.num_experts_known = 0

    def show(self, tokens: Sequence[int]) -> None:
        """Append tokens that the model reads."""
        count = len(tokens)
        self.tokens += tokens
        self._sampled += [False] * count
        self._logprobs += [0.0] * count
        self._versions += [-1] * count

    def sample(self, completion: Completion) -> None:
        """Append tokens that the model sampled, unchanged."""
        count = len(completion.tokens)
        self.tokens += completion.tokens
        self._sampled += [True] * count
        self._logprobs += completion.logprobs
        self._versions += completion.versions
        if completion.experts is not None and len(completion.experts):
            new = completion.experts[self.num_experts_known - completion.experts_start :]
            self._experts.append(np.asarray(new))
            self.num_experts_known += len(new)

    def segment(self, end: Literal["stop", "budget", "summary"]) -> Segment:
        """The finished record."""
        return Segment(
            tokens=np.asarray(self.tokens, np.int32),
            sampled=np.asarray(self._sampled, bool),
            logprobs=np.asarray(self._logprobs, np.float32),
            versions=np.asarray(self._versions, np.int32),
            experts=self._padded_experts(),
            end=end,
        )

    def _padded_experts(self) -> NDArray[np.int16] | None:
        if not self._experts:
            return None
        known = np.concatenate(self._experts)[: len(self.tokens)]
        padded = np.full((len(self.tokens), *known.shape[1:]), -1, np.int16)
        padded[: len(known)] = known
        return padded
