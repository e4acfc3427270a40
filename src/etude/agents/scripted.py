"""Scripted agents that speak through the Sampler Protocol, so that demonstrations come out of the very loop used in RL.

A policy sees the conversation as it stands in the context (parsed from the ids it is given) and answers with an assistant
message, which is encoded as a model would have to sample it. Tool results are real: they come from the pod.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from etude.agents.prompt import SUMMARY_REQUEST
from etude.base.records import Completion, Message, SamplingParams, Task, ToolCall
from etude.data.chat import ChatCodec
from etude.data.tokenizer import ASSISTANT, END, EOS, SYSTEM, TOOL, USER, token_id

Role = Literal["system", "user", "assistant", "tool"]
_ROLES: dict[str, Role] = {SYSTEM: "system", USER: "user", ASSISTANT: "assistant", TOOL: "tool"}


class Policy(Protocol):
    """Decides the next assistant message from the conversation in the live context."""

    def act(self, conversation: Sequence[Message]) -> Message: ...


class ScriptedSampler:
    """A Sampler whose completions are a policy's messages (logprob 0, version 0, no experts); it serves one rollout."""

    def __init__(self, policy: Policy, codec: ChatCodec) -> None:
        self.policy, self.codec = policy, codec

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, *, session: str, experts_start: int = 0
    ) -> Completion:
        ids = self.codec.render_completion(self.policy.act(parse_conversation(self.codec, tokens)))
        kept = tuple(ids[: params.max_new_tokens])
        return Completion(
            tokens=kept,
            logprobs=(0.0,) * len(kept),
            versions=(0,) * len(kept),
            stop_reason="stop" if len(kept) == len(ids) else "length",
        )

    async def close_session(self, session: str) -> None:
        return None


def parse_conversation(codec: ChatCodec, tokens: Sequence[int]) -> list[Message]:
    """The messages in the ids of a context; the assistant message that is open at its end is left out."""
    roles = {token_id(codec.tokenizer, name): role for name, role in _ROLES.items()}
    ends = {token_id(codec.tokenizer, END), token_id(codec.tokenizer, EOS)}
    messages: list[Message] = []
    role: Role | None = None
    start = 0
    for at, token in enumerate(tokens):
        if role is None and token in roles:
            role, start = roles[token], at + 1
        elif role is not None and token in ends:
            body = tokens[start:at]
            plain = role != "assistant"
            messages.append(Message(role=role, content=codec.decode(body)) if plain else codec.parse(body))
            role = None
    return messages


def asks_for_summary(conversation: Sequence[Message]) -> bool:
    """Whether the harness wants a summary now."""
    last = conversation[-1]
    return last.role == "user" and last.content == SUMMARY_REQUEST


def say(name: str, **arguments: str) -> Message:
    """An assistant message of one call."""
    return Message(role="assistant", calls=(ToolCall(name=name, arguments=arguments),))


class OracleAgent:
    """Follows the reference solution to the letter; what it fails is a fault of the task or of the harness."""

    def __init__(self, task: Task) -> None:
        self._left = list(task.solution)

    def act(self, conversation: Sequence[Message]) -> Message:
        if asks_for_summary(conversation):
            following = self._left[0].calls[0].name if self._left and self._left[0].calls else "finish"
            return Message(role="assistant", content=f"next {following}")
        return self._left.pop(0) if self._left else say("finish", message="done")


class NoopAgent:
    """Finishes at once; what it passes was no task."""

    def act(self, conversation: Sequence[Message]) -> Message:
        return say("finish", message="done")
