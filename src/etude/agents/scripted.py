"""Scripted agents that speak through the Sampler Protocol, so that demonstrations come out of the very loop used in RL.

A policy sees the last thing it was shown (decoded from the ids) and answers with an assistant Message, which is encoded as a
model would have to sample it. Tool results are real: they come from the pod.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from pydantic import Field

from etude.agents.prompt import SUMMARY_REQUEST
from etude.base.config import Config
from etude.base.records import Completion, Message, SamplingParams, Task, ToolCall
from etude.data.chat import ChatCodec
from etude.data.mutate import mutate_line
from etude.data.tokenizer import TOOL, USER


class Policy(Protocol):
    """Decides the next assistant message from the text of the last message shown (role and content)."""

    def act(self, shown: str) -> Message: ...


class ScriptedSampler:
    """A Sampler whose completions are a policy's messages (logprob 0, version 0, no experts)."""

    def __init__(self, policy: Policy, codec: ChatCodec) -> None:
        self.policy, self.codec = policy, codec

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, *, session: str, experts_start: int = 0
    ) -> Completion:
        text = self.codec.decode(tokens)
        start = max(text.rfind(TOOL), text.rfind(USER))
        ids = self.codec.render_completion(self.policy.act(text[start:]))
        return Completion(
            tokens=tuple(ids), logprobs=(0.0,) * len(ids), versions=(0,) * len(ids), stop_reason="stop"
        )

    async def close_session(self, session: str) -> None:
        return None


def call(name: str, **arguments: str) -> Message:
    """An assistant message of one call."""
    return Message(role="assistant", calls=(ToolCall(name=name, arguments=arguments),))


class OracleAgent:
    """Follows the reference solution to the letter."""

    def __init__(self, task: Task) -> None:
        self._left = list(task.solution)

    def act(self, shown: str) -> Message:
        if SUMMARY_REQUEST in shown:
            return Message(role="assistant", content="go on")
        return self._left.pop(0) if self._left else call("finish", message="done")


class NoopAgent:
    """Finishes at once; whatever it passes was no task."""

    def act(self, shown: str) -> Message:
        return call("finish", message="done")


class DemonstratorConfig(Config):
    """How good the demonstrator is. SFT teaches its habits, good and bad; RL is there to be better than its teacher."""

    mistake_rate: float = Field(0.35, ge=0.0, le=1.0)
    """Probability that the first try of an edit is wrong."""
    careless_rate: float = Field(0.25, ge=0.0, le=1.0)
    """Probability that it finishes without running the tests."""
    give_up_rate: float = Field(0.25, ge=0.0, le=1.0)
    """Probability that it finishes although its run of the tests failed."""
    look_first_rate: float = Field(0.15, ge=0.0, le=1.0)
    """Probability that it starts with the failing tests or the list of files."""


class Demonstrator:
    """A mediocre engineer: knows the way, slips, mostly looks, usually mends.

    It errs in single edits only: an edit is first made with a plausible fault in its last line, and mended in place after the
    failing run showed it.
    """

    def __init__(self, task: Task, rng: random.Random, config: DemonstratorConfig) -> None:
        self._rng, self._config = rng, config
        self._plan = list(task.solution)
        self._repair: list[Message] = []
        self._careless = rng.random() < config.careless_rate
        self._last_read: Message | None = None
        self._spoil_left = rng.random() < config.mistake_rate
        self._done: list[str] = []
        if rng.random() < config.look_first_rate and task.test_command:
            self._plan.insert(0, rng.choice((call("run"), call("list"))))

    def act(self, shown: str) -> Message:
        if SUMMARY_REQUEST in shown:
            return self._summary()
        if shown.startswith(TOOL) and "FAIL" in shown and self._repair and "edit" in self._done:
            mend, self._repair = self._repair, []
            if self._rng.random() >= self._config.give_up_rate:
                self._plan = [*mend, *self._plan]
        message = self._plan.pop(0) if self._plan else call("finish", message="done")
        name = message.calls[0].name
        if name == "run" and self._careless and "edit" in self._done:
            message = self._plan.pop(0) if self._plan else call("finish", message="done")
            name = message.calls[0].name
        if name == "read":
            self._last_read = message
        if name == "edit" and self._spoil_left:
            message = self._spoil(message)
        self._done.append(name)
        return message

    def _summary(self) -> Message:
        """A true, compact summary; what was read is gone, so it is read again."""
        following = self._plan[0].calls[0].name if self._plan else "finish"
        if self._last_read is not None and following == "edit":
            self._plan.insert(0, self._last_read)
            following = "read"
        return Message(role="assistant", content=f"did {' '.join(self._done) or 'nothing'}, next {following}")

    def _spoil(self, message: Message) -> Message:
        """The edit with a plausible fault in its last line, and the plan to mend it."""
        arguments = message.calls[0].arguments
        *before, last = arguments["text"].split("\n")
        broken = mutate_line(last, self._rng)
        if broken is None:
            return message
        self._spoil_left = False
        line = _last_line(arguments["at"], len(before) + 1)
        self._repair = [call("edit", path=arguments["path"], at=str(line), text=last), call("run")]
        return call("edit", path=arguments["path"], at=arguments["at"], text="\n".join([*before, broken]))


def _last_line(at: str, count: int) -> int:
    """Number of the last of ``count`` new lines after an edit at ``at``."""
    if at.endswith("+"):
        return int(at[:-1]) + count
    return int(at.split("-")[0]) + count - 1
