"""OpenAI-compatible chat and completions over the token engine.

Chat is rendered and parsed by the codec of the model's own format; reasoning comes back as ``reasoning_content``, calls as
``tool_calls``. A streamed answer is made of the very tokens as they are sampled; calls are sent when they are complete.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import orjson

from etude.base.errors import EtudeError
from etude.base.records import Message, SamplingParams
from etude.data.chat import ChatCodec
from etude.inference.choice import Choice
from etude.inference.openai_bodies import ChatBody, CompletionBody
from etude.inference.service import InferenceService

Emit = Callable[[int, dict[str, Any]], None]
Payload = dict[str, Any]


class OpenAIServer:
    """Translates bodies to token requests and results to answers."""

    def __init__(self, service: InferenceService) -> None:
        self._service, self._codec = service, service.codec
        self._id, self._created = f"cmpl-{secrets.token_hex(8)}", int(time.time())

    # ------------------------------------------------------------------------------------------------- chat

    async def chat(self, body: ChatBody) -> Payload:
        """Answer of ``/v1/chat/completions``. Raises InferenceFault, DeadlineExceeded."""
        tokens, codec = self._render(body)
        choices = await self._run(tokens, body, codec, is_chat=True, emit=None)
        answers = []
        for choice in choices:
            message = choice.message()
            answer: Payload = {
                "index": choice.index,
                "message": {
                    "role": "assistant",
                    "content": choice.text() or None,
                    **({"reasoning_content": message.thinking} if message.thinking else {}),
                    **({"tool_calls": _calls(message)} if message.calls else {}),
                },
                "finish_reason": choice.finish_reason(),
                "logprobs": {"content": self._entries(choice)} if body.logprobs else None,
            }
            answers.append(answer)
        return self._envelope("chat.completion", answers, usage=_usage(tokens, choices))

    async def stream_chat(self, body: ChatBody) -> AsyncIterator[bytes]:
        """Server-sent events of a chat answer."""
        tokens, codec = self._render(body)
        return self._stream(tokens, body, codec, is_chat=True)

    def _render(self, body: ChatBody) -> tuple[list[int], ChatCodec]:
        arguments = body.tool_arguments()
        codec = self._codec if arguments is None else ChatCodec(self._service.tokenizer, arguments)
        return codec.render([message.record() for message in body.messages], open_assistant=True), codec

    # ------------------------------------------------------------------------------------------- completions

    async def complete(self, body: CompletionBody) -> Payload:
        """Answer of ``/v1/completions``. Raises InferenceFault, DeadlineExceeded."""
        tokens = self._prompt(body)
        choices = await self._run(tokens, body, self._codec, is_chat=False, emit=None)
        answers = [
            {
                "index": choice.index,
                "text": choice.text(),
                "finish_reason": choice.finish_reason(),
                "logprobs": self._completion_logprobs(choice) if body.logprobs is not None else None,
            }
            for choice in choices
        ]
        return self._envelope("text_completion", answers, usage=_usage(tokens, choices))

    async def stream_completion(self, body: CompletionBody) -> AsyncIterator[bytes]:
        """Server-sent events of a completion."""
        return self._stream(self._prompt(body), body, self._codec, is_chat=False)

    def _prompt(self, body: CompletionBody) -> list[int]:
        return self._codec.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt

    # ------------------------------------------------------------------------------------------------ common

    async def _run(
        self,
        tokens: Sequence[int],
        body: ChatBody | CompletionBody,
        codec: ChatCodec,
        *,
        is_chat: bool,
        emit: Emit | None,
    ) -> list[Choice]:
        """All ``n`` choices of a request; they share the prompt's keys."""
        room = self._service.config.engine.max_length - len(tokens)
        limit = min(body.max_completion_tokens or body.max_tokens or room, max(room, 1))
        session = f"openai-{secrets.token_hex(8)}"
        choices = [
            Choice(index, codec, body.stops, is_chat=is_chat, emit=emit, logprobs=bool(body.logprobs))
            for index in range(body.n)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    seed = None if body.seed is None else body.seed + choice.index
                    params = SamplingParams(
                        max_new_tokens=limit,
                        temperature=body.temperature,
                        stop_token_ids=codec.stop_token_ids,
                        seed=seed,
                    )
                    group.create_task(
                        choice.run(
                            self._service.loop, tokens, params, f"{session}/{choice.index}",
                            self._service.config.deadline_seconds,
                        )
                    )  # fmt: skip
        except* EtudeError as errors:
            raise _first(errors) from None
        return choices

    async def _stream(
        self, tokens: Sequence[int], body: ChatBody | CompletionBody, codec: ChatCodec, *, is_chat: bool
    ) -> AsyncIterator[bytes]:
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        queue: asyncio.Queue[Payload | None] = asyncio.Queue()
        task = asyncio.create_task(
            self._run(
                tokens,
                body,
                codec,
                is_chat=is_chat,
                emit=lambda index, part: queue.put_nowait({"index": index, **part}),
            )
        )
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (part := await queue.get()) is not None:
                yield _event(self._envelope(kind, [part]))
            choices = await task
            if body.stream_options.get("include_usage"):
                yield _event(self._envelope(kind, [], usage=_usage(tokens, choices)))
        except EtudeError as error:
            yield _event({"error": {"type": "engine", "message": str(error), "param": None, "code": 503}})
        finally:
            task.cancel()
        yield b"data: [DONE]\n\n"

    def _entries(self, choice: Choice) -> list[Payload]:
        return [choice.entry(i) for i in range(len(choice.tokens))]

    def _completion_logprobs(self, choice: Choice) -> Payload:
        return {
            "tokens": [self._codec.decode([token]) for token in choice.tokens],
            "token_logprobs": choice.token_logprobs,
            "top_logprobs": None,
        }

    def _envelope(self, kind: str, choices: list[Payload], usage: Payload | None = None) -> Payload:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.model_name,
            "system_fingerprint": f"policy-{self._service.loop.engine.version}",
            "choices": choices,
            **({"usage": usage} if usage is not None else {}),
        }


def _usage(tokens: Sequence[int], choices: Sequence[Choice]) -> Payload:
    sampled = sum(len(choice.tokens) for choice in choices)
    return {
        "prompt_tokens": len(tokens),
        "completion_tokens": sampled,
        "total_tokens": len(tokens) + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in choices)},
    }


def _calls(message: Message) -> list[Payload]:
    return [
        {
            "id": f"call_{secrets.token_hex(6)}",
            "type": "function",
            "function": {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()},
        }
        for call in message.calls
    ]


def _first(errors: BaseExceptionGroup[EtudeError]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _event(data: Payload) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
