"""The chain of one rollout as it grows: the live context, the closed segments, the turns and what they cost.

Token in, token out: the context is a list of ids. What the sampler returns is appended unchanged, what the model reads is
rendered once and appended; nothing is ever encoded a second time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from etude.agents.config import HarnessConfig
from etude.agents.recorder import SegmentRecorder
from etude.base.errors import InferenceFault
from etude.base.protocols import Sampler
from etude.base.records import Effort, Message, SamplingParams, Segment, Turn
from etude.data.chat import ChatCodec

CUT_NOTE = "... cut, context full"


@dataclass(frozen=True)
class Sampled:
    """One assistant message: parsed, and as it was sampled."""

    message: Message
    tokens: tuple[int, ...]
    cut: bool
    """It hit its token limit before a stop token."""


class Chain:
    """State of one rollout between prompt and outcome."""

    def __init__(
        self, sampler: Sampler, codec: ChatCodec, config: HarnessConfig, *, rollout_id: str, seed: int
    ) -> None:
        self.sampler, self.codec, self.config = sampler, codec, config
        self.rollout_id, self.seed = rollout_id, seed
        self.recorder = SegmentRecorder()
        self.segments: list[Segment] = []
        self.turns: list[Turn] = []
        self.costs: Counter[str] = Counter()
        """Field of ``Effort`` -> count."""
        self.num_sampled = 0
        self.final_message = ""
        self.seconds = {"inference": 0.0, "tools": 0.0, "verify": 0.0}

    @property
    def session(self) -> str:
        """Name of the KV cache of the live context."""
        return f"{self.rollout_id}/{len(self.segments)}"

    @property
    def num_summaries(self) -> int:
        return sum(turn.is_summary for turn in self.turns)

    @property
    def effort(self) -> Effort:
        return Effort(**self.costs)

    @property
    def fits_completion(self) -> bool:
        """Whether the next assistant message is sure to fit the context budget (role and end tokens included)."""
        return len(self.recorder.tokens) + 2 + self.config.max_completion <= self.config.context_budget

    @contextmanager
    def timed(self, component: str) -> Iterator[None]:
        """Add the seconds of the body to ``component``, also when it is cut short."""
        clock = time.monotonic()
        try:
            yield
        finally:
            self.seconds[component] += time.monotonic() - clock

    def show(self, messages: Sequence[Message]) -> None:
        self.recorder.show(self.codec.render(messages))

    def show_results(self, results: Sequence[Message]) -> list[Message]:
        """Append tool results, cut to what the context budget leaves; returns what the model really reads."""
        shown: list[Message] = []
        for result in results:
            room = self.config.context_budget - len(self.recorder.tokens)
            fitting = cut_to_fit(self.codec, result, room)
            if fitting is None:
                break
            ids = self.codec.render_message(fitting)
            self.costs["output_tokens"] += len(ids)
            self.recorder.show(ids)
            shown.append(fitting)
        return shown

    async def sample(self, limit: int) -> Sampled:
        """Sample one assistant message of at most ``limit`` tokens in the live context. Raises InferenceFault."""
        self.recorder.show([self.codec.assistant_id])
        params = SamplingParams(
            max_new_tokens=limit,
            temperature=self.config.temperature,
            stop_token_ids=self.codec.stop_token_ids,
            seed=self.seed * 1_000_003 + self.num_sampled,
        )
        with self.timed("inference"):
            completion = await self.sampler.generate(
                self.recorder.tokens,
                params,
                session=self.session,
                experts_start=self.recorder.num_experts_known,
            )
        self.recorder.sample(completion)
        self.num_sampled += len(completion.tokens)
        if completion.stop_reason == "cancelled":
            raise InferenceFault(f"the engine cancelled session {self.session}")
        cut = not completion.tokens or completion.tokens[-1] not in self.codec.stop_token_ids
        if cut:
            self.recorder.show([self.codec.end_id])  # closes the message; not sampled, so not trained
        return Sampled(self.codec.parse(completion.tokens), completion.tokens, cut)

    async def next_segment(self, messages: Sequence[Message]) -> None:
        """Close the live context after a summary and open the next one with ``messages``."""
        await self.sampler.close_session(self.session)
        self.close("summary")
        self.recorder = SegmentRecorder()
        self.show(messages)

    def close(self, end: Literal["stop", "budget", "summary"]) -> None:
        """File the live context as a segment, unless nothing was sampled in it."""
        if self.recorder.num_sampled:
            self.segments.append(self.recorder.segment(end))


def cut_to_fit(codec: ChatCodec, result: Message, room: int) -> Message | None:
    """``result`` if it renders to at most ``room`` tokens, else its first lines and a note, else None."""
    if len(codec.render_message(result)) <= room:
        return result
    lines = result.content.split("\n")
    low, high = -1, len(lines) - 1  # ``low`` lines are known to fit
    while low < high:
        middle = (low + high + 1) // 2
        shorter = Message(role="tool", content="\n".join([*lines[:middle], CUT_NOTE]))
        low, high = (middle, high) if len(codec.render_message(shorter)) <= room else (low, middle - 1)
    return Message(role="tool", content="\n".join([*lines[:low], CUT_NOTE])) if low >= 0 else None
