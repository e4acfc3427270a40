"""Bodies of the OpenAI-compatible endpoints. What would change sampling and is not supported is refused, never ignored."""

from __future__ import annotations

from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from etude.base.records import Message, ToolCall

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "top_logprobs": (None, 0),
    "tool_choice": (None, "auto", "none"),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")
    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=100.0)
    seed: int | None = None
    n: int = Field(1, ge=1, le=128)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, neutral in _NEUTRAL.items():
                if data.get(name) not in neutral:
                    raise ValueError(f"{name}={data[name]!r} is not supported")
            return {name: value for name, value in data.items() if value is not None}
        return data

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)


class _FunctionCall(BaseModel):
    name: str
    arguments: str = "{}"


class _ToolCall(BaseModel):
    function: _FunctionCall


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None

    def record(self) -> Message:
        """The message as Etude's record."""
        content = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content or [])
        return Message(
            role="system" if self.role == "developer" else self.role,
            content=content,
            thinking=self.reasoning_content or "",
            calls=tuple(
                ToolCall(name=call.function.name, arguments=_arguments(call.function.arguments))
                for call in self.tool_calls or []
            ),
        )


class _Function(BaseModel):
    model_config = ConfigDict(extra="ignore")
    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class _Tool(BaseModel):
    type: Literal["function"] = "function"
    function: _Function


class ChatBody(_Body):
    """Body of ``/v1/chat/completions``."""

    messages: list[_ChatMessage] = Field(min_length=1)
    tools: list[_Tool] | None = None
    logprobs: bool = False

    def tool_arguments(self) -> dict[str, tuple[str, ...]] | None:
        """Tool name -> argument names in the order of its schema; None when the request brings no tools."""
        if self.tools is None:
            return None
        return {tool.function.name: tuple(tool.function.parameters.get("properties", {})) for tool in self.tools}


class CompletionBody(_Body):
    """Body of ``/v1/completions``."""

    prompt: str | list[int]
    logprobs: int | None = Field(None, ge=0, le=1)


def _arguments(text: str) -> dict[str, str]:
    """Arguments of a call as strings. Raises ValueError when they are not a JSON object."""
    parsed = orjson.loads(text or "{}")
    if not isinstance(parsed, dict):
        raise ValueError("tool call arguments must be a JSON object")
    return {key: value if isinstance(value, str) else orjson.dumps(value).decode() for key, value in parsed.items()}
