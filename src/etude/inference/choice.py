"""One choice of an OpenAI-style answer: watches its tokens, finds stop strings, and hands out text as it becomes certain."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from etude.base.records import Message, SamplingParams
from etude.data.chat import ChatCodec
from etude.inference.loop import EngineLoop

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""How an unfinished UTF-8 sequence decodes; text that ends in it may still change."""


class Choice:
    """``emit(index, part)`` gets the parts of a streamed answer; without it nothing is emitted."""

    def __init__(
        self,
        index: int,
        codec: ChatCodec,
        stops: Sequence[str],
        *,
        is_chat: bool,
        emit: Callable[[int, dict[str, Any]], None] | None,
        logprobs: bool,
    ) -> None:
        self.index, self.cached_tokens = index, 0
        self.tokens: list[int] = []
        self.token_logprobs: list[float] = []
        self._codec, self._stops, self._is_chat, self._emit, self._logprobs = codec, stops, is_chat, emit, logprobs
        self._reason = "length"
        self._stopped = False
        self._sent = self._sent_thinking = self._sent_logprobs = 0
        self._task: asyncio.Task[Any] | None = None

    async def run(
        self, loop: EngineLoop, prompt: Sequence[int], params: SamplingParams, session: str, deadline: float
    ) -> None:
        """Sample it. Raises InferenceFault, DeadlineExceeded."""
        watched = self._emit is not None or bool(self._stops)
        if self._emit is not None and self._is_chat:
            self._send({"role": "assistant", "content": ""})
        self._task = asyncio.create_task(
            loop.generate(
                prompt, params, session=session, experts_start=len(prompt), deadline=deadline,
                progress=self._see if watched else None,
            )
        )  # fmt: skip
        try:
            result = await self._task
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        else:
            self.cached_tokens = result.cached_tokens
            if not self._stopped:
                self.tokens, self.token_logprobs = result.tokens.tolist(), result.logprobs.tolist()
                self._reason = result.stop_reason
        finally:
            self._task.cancel()
            loop.close_session(session)
        if self._emit is not None:
            self._finish()

    def message(self) -> Message:
        """What the codec reads in the tokens."""
        return self._codec.parse(self.tokens)

    def text(self) -> str:
        """Visible text, cut before a stop string."""
        text = self._visible()
        return text[: _find(text, self._stops)]

    def finish_reason(self) -> str:
        return "tool_calls" if self._is_chat and not self._stopped and self.message().calls else self._reason

    def entry(self, position: int) -> dict[str, Any]:
        """Logprob of one token in the form of the chat API."""
        text = self._codec.decode([self.tokens[position]])
        return {"token": text, "logprob": self.token_logprobs[position], "bytes": None, "top_logprobs": []}

    # ---------------------------------------------------------------------------------------------- watching

    def _see(self, token: int, logprob: float) -> None:
        if self._stopped:
            return
        self.tokens.append(token)
        self.token_logprobs.append(logprob)
        text = self._visible()
        cut = _find(text, self._stops)
        if cut < len(text):
            self._stopped, self._reason = True, "stop"
            if self._task is not None:
                self._task.cancel()
        elif self._emit is not None:
            self._send_text(text[: _certain(text, self._stops)])

    def _visible(self) -> str:
        if self._is_chat:
            return self.message().content
        stopped = self.tokens and self.tokens[-1] in self._codec.stop_token_ids
        return self._codec.decode(self.tokens[:-1] if stopped else self.tokens)

    def _send_text(self, text: str) -> None:
        thinking = self.message().thinking if self._is_chat else ""
        if len(thinking) > self._sent_thinking and not thinking.endswith(INCOMPLETE):
            self._send({"reasoning_content": thinking[self._sent_thinking :]})
            self._sent_thinking = len(thinking)
        if len(text) > self._sent:
            self._send({"content": text[self._sent :]})
            self._sent = len(text)

    def _finish(self) -> None:
        self._send_text(self.text())
        calls = self.message().calls if self._is_chat and not self._stopped else ()
        for index, call in enumerate(calls):
            function = {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()}
            self._send(
                {
                    "tool_calls": [
                        {"index": index, "id": f"call_{secrets.token_hex(6)}", "type": "function", "function": function}
                    ]
                }
            )
        self._send({}, self.finish_reason())

    def _send(self, delta: dict[str, Any], finish_reason: str | None = None) -> None:
        part: dict[str, Any] = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        part["finish_reason"] = finish_reason
        if self._logprobs:
            new = range(self._sent_logprobs, len(self.tokens))
            entries = [self.entry(i) for i in new]
            self._sent_logprobs = len(self.tokens)
            part["logprobs"] = (
                {"content": entries}
                if self._is_chat
                else {"tokens": [e["token"] for e in entries], "token_logprobs": [e["logprob"] for e in entries]}
            )
        if self._emit is not None:
            self._emit(self.index, part)


def _find(text: str, stops: Sequence[str]) -> int:
    """Where the first stop string begins, or the length of ``text``."""
    return min((at for at in (text.find(stop) for stop in stops) if at >= 0), default=len(text))


def _certain(text: str, stops: Sequence[str]) -> int:
    """How much of ``text`` can be sent: not a started stop string, not an unfinished character."""
    end = len(text.rstrip(INCOMPLETE))
    for stop in stops:
        for length in range(min(len(stop) - 1, end), 0, -1):
            if text.endswith(stop[:length], 0, end):
                end -= length
                break
    return end
