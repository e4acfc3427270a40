"""What goes into the engine and what comes out of it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from etude.base.records import Completion, SamplingParams

StopReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Result:
    """A finished request, as arrays (n tokens sampled); see ``Completion`` for what each means."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    experts: NDArray[np.int16] | None
    """``[positions, moe_layers, k]`` from ``experts_start`` on; None when the request never ran."""
    experts_start: int
    stop_reason: StopReason
    cached_tokens: int

    def completion(self) -> Completion:
        """The wire record."""
        return Completion(
            tokens=tuple(self.tokens.tolist()),
            logprobs=tuple(self.logprobs.tolist()),
            versions=tuple(self.versions.tolist()),
            experts=self.experts,
            experts_start=self.experts_start,
            stop_reason=self.stop_reason,
            cached_tokens=self.cached_tokens,
        )

    def to_json(self) -> bytes:
        """JSON of :meth:`completion`, without building it (the hot endpoint)."""
        body = {
            "tokens": self.tokens,
            "logprobs": self.logprobs.astype(np.float64),
            "versions": self.versions,
            "experts": None if self.experts is None else _wire(self.experts),
            "experts_start": self.experts_start,
            "stop_reason": self.stop_reason,
            "cached_tokens": self.cached_tokens,
        }
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _wire(array: NDArray[np.int16]) -> dict[str, object]:
    """The form of ``WireArray``."""
    data = base64.b64encode(np.ascontiguousarray(array).data).decode("ascii")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


@dataclass(eq=False)
class Request:
    """One request on its way through the engine. ``progress(token, logprob)`` is called for each sampled token."""

    tokens: NDArray[np.int32]
    params: SamplingParams
    session: str
    experts_start: int
    done: Callable[[Result], None]
    progress: Callable[[int, float], None] | None = None
    slot: int = -1
    fresh: bool = True
    """Its prompt was not yet matched against the prefixes of other slots."""
    cached: int = 0
