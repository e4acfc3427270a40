"""OpenAI-compatible chat and completions over the token engine."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from etude.base.records import Completion, Message, SamplingParams, ToolCall
from etude.data.chat import ChatCodec
from etude.inference.loop import EngineLoop


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")
    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0.0)
    seed: int | None = None
    n: int = Field(1, ge=1, le=64)
    stream: bool = False


class _FunctionCall(BaseModel):
    name: str
    arguments: str = "{}"


class _ToolCall(BaseModel):
    function: _FunctionCall


class _ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str | None = None
    tool_calls: list[_ToolCall] = Field(default_factory=list)


class ChatBody(_Body):
    """Body of ``/v1/chat/completions``."""

    messages: list[_ChatMessage] = Field(min_length=1)
    logprobs: bool = False


class CompletionBody(_Body):
    """Body of ``/v1/completions``."""

    prompt: str | list[int]
    logprobs: int | None = None


class OpenAIServer:
    """Translates bodies to token requests and completions to answers."""

    def __init__(self, loop: EngineLoop, codec: ChatCodec, model_name: str) -> None:
        self.loop, self.codec, self.model_name = loop, codec, model_name

    async def chat(self, body: ChatBody, deadline: float) -> dict[str, Any]:
        tokens = self.codec.render([_message(message) for message in body.messages], open_assistant=True)
        completions = await self._run(tokens, body, deadline)
        choices = []
        for index, completion in enumerate(completions):
            message = self.codec.parse(completion.tokens)
            choice: dict[str, Any] = {
                "index": index,
                "message": {"role": "assistant", "content": message.content or None, **_tool_calls(message)},
                "finish_reason": "tool_calls" if message.calls else completion.stop_reason,
            }
            if body.logprobs:
                choice["logprobs"] = {"content": self._logprobs(completion)}
            choices.append(choice)
        return self._envelope("chat.completion", choices, len(tokens), completions)

    async def complete(self, body: CompletionBody, deadline: float) -> dict[str, Any]:
        tokens = self.codec.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        completions = await self._run(tokens, body, deadline)
        choices = [
            {
                "index": index,
                "text": self.codec.decode(self._visible(completion)),
                "finish_reason": completion.stop_reason,
                "logprobs": {
                    "tokens": [self.codec.decode([t]) for t in completion.tokens],
                    "token_logprobs": list(completion.logprobs),
                }
                if body.logprobs is not None
                else None,
            }
            for index, completion in enumerate(completions)
        ]
        return self._envelope("text_completion", choices, len(tokens), completions)

    async def stream(self, body: ChatBody, deadline: float) -> AsyncIterator[bytes]:
        """Server-sent events; the completion is computed whole, then sent token by token."""
        answer = await self.chat(body, deadline)
        head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        for choice in answer["choices"]:
            message = choice["message"]
            deltas: list[dict[str, Any]] = [{"role": "assistant"}]
            if message["content"]:
                deltas.append({"content": message["content"]})
            if message.get("tool_calls"):
                deltas.append({"tool_calls": [{"index": i, **c} for i, c in enumerate(message["tool_calls"])]})
            for delta in deltas:
                yield _event({**head, "choices": [{"index": choice["index"], "delta": delta, "finish_reason": None}]})
            final = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
            yield _event({**head, "choices": [final]})
        yield b"data: [DONE]\n\n"

    async def _run(self, tokens: list[int], body: _Body, deadline: float) -> list[Completion]:
        room = self.loop.engine.config.max_length - len(tokens)
        limit = body.max_completion_tokens or body.max_tokens or max(1, room)
        session = secrets.token_hex(8)
        try:
            return await asyncio.gather(
                *(
                    self.loop.generate(
                        tokens,
                        SamplingParams(
                            max_new_tokens=limit,
                            temperature=body.temperature,
                            stop_token_ids=self.codec.stop_token_ids,
                            seed=None if body.seed is None else body.seed + index,
                        ),
                        session=f"{session}/{index}",
                        experts_start=len(tokens),
                        deadline=deadline,
                    )
                    for index in range(body.n)
                )
            )
        finally:
            for index in range(body.n):
                self.loop.close_session(f"{session}/{index}")

    def _visible(self, completion: Completion) -> tuple[int, ...]:
        stopped = completion.tokens and completion.tokens[-1] in self.codec.stop_token_ids
        return completion.tokens[:-1] if stopped else completion.tokens

    def _logprobs(self, completion: Completion) -> list[dict[str, Any]]:
        return [
            {"token": self.codec.decode([token]), "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(completion.tokens, completion.logprobs, strict=True)
        ]

    def _envelope(
        self, kind: str, choices: list[dict[str, Any]], prompt_tokens: int, completions: list[Completion]
    ) -> dict[str, Any]:
        sampled = sum(len(completion.tokens) for completion in completions)
        return {
            "id": f"cmpl-{secrets.token_hex(8)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model_name,
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": sampled,
                "total_tokens": prompt_tokens + sampled,
                "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in completions)},
            },
        }


def _message(message: _ChatMessage) -> Message:
    role = "system" if message.role == "developer" else message.role
    calls = tuple(
        ToolCall(name=call.function.name, arguments=_arguments(call.function.arguments)) for call in message.tool_calls
    )
    return Message(role=role, content=message.content or "", calls=calls)


def _arguments(text: str) -> dict[str, str]:
    parsed = orjson.loads(text or "{}")
    return {str(key): str(value) for key, value in parsed.items()} if isinstance(parsed, Mapping) else {}


def _tool_calls(message: Message) -> dict[str, Any]:
    if not message.calls:
        return {}
    return {
        "tool_calls": [
            {
                "id": f"call_{secrets.token_hex(6)}",
                "type": "function",
                "function": {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()},
            }
            for call in message.calls
        ]
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
