"""Messages <-> tokens, incrementally and exactly.

The wire format of one message is ``<|role|> text <|end|>``; an assistant message is::

    <|assistant|> [<|think|> reasoning <|/think|>] words [<|call|> name \\n argument \\n argument]* <|end|>

Arguments are positional, one line each; the last one takes the rest of the call, newlines included. What the model
samples is everything after ``<|assistant|>`` up to and including ``<|end|>``. Rollouts keep the sampled ids themselves:
:meth:`ChatCodec.parse` reads them, nothing ever re-encodes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from etude.base.records import Message, ToolCall
from etude.data import tokenizer as vocabulary


@dataclass(frozen=True)
class SampledCounts:
    """How many sampled tokens of one assistant message went where; their sum is all of them."""

    thinking: int
    call: int
    message: int


class ChatCodec:
    """Renders and parses the chat format of one tokenizer for one tool set.

    ``tools`` maps a tool name to its argument names in wire order, e.g. ``{"read": ("path",)}``.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Mapping[str, tuple[str, ...]]) -> None:
        self.tokenizer = tokenizer
        self.tools = dict(tools)
        self._ids = {name: vocabulary.token_id(tokenizer, name) for name in vocabulary.SPECIAL_TOKENS}
        self.end_id = self._ids[vocabulary.END]
        self.assistant_id = self._ids[vocabulary.ASSISTANT]
        self.stop_token_ids = (self.end_id, self._ids[vocabulary.EOS])

    # ------------------------------------------------------------------------------------------- rendering

    def encode(self, text: str) -> list[int]:
        """Plain text to ids; text that spells a special token stays text (tool output is hostile)."""
        return [
            i for piece in _split_specials(text) for i in self.tokenizer.encode(piece, add_special_tokens=False).ids
        ]

    def render(self, messages: Iterable[Message], *, open_assistant: bool = False) -> list[int]:
        """Ids of a conversation; with ``open_assistant`` it ends in ``<|assistant|>``, ready to sample."""
        ids = [i for message in messages for i in self.render_message(message)]
        return [*ids, self.assistant_id] if open_assistant else ids

    def render_message(self, message: Message) -> list[int]:
        """Ids of one whole message, its role token and ``<|end|>`` included."""
        if message.role == "assistant":
            return [self.assistant_id, *self.render_completion(message)]
        return [self._ids[f"<|{message.role}|>"], *self.encode(message.content), self.end_id]

    def render_completion(self, message: Message) -> list[int]:
        """What a model would have to sample for this assistant message, ``<|end|>`` included."""
        ids: list[int] = []
        if message.thinking:
            ids += [
                self._ids[vocabulary.THINK],
                *self.encode(message.thinking),
                self._ids[vocabulary.END_THINK],
            ]
        ids += self.encode(message.content)
        for call in message.calls:
            values = [call.arguments.get(name, "") for name in self.tools.get(call.name, tuple(call.arguments))]
            while values and not values[-1]:
                values.pop()
            ids += [self._ids[vocabulary.CALL], *self.encode("\n".join([call.name, *values]))]
        return [*ids, self.end_id]

    # --------------------------------------------------------------------------------------------- parsing

    def parse(self, sampled: Sequence[int]) -> Message:
        """The assistant message in sampled ids (with or without the final stop token)."""
        thinking, rest = self._cut_thinking(self._strip_stop(sampled))
        head, *bodies = _split_on(rest, self._ids[vocabulary.CALL])
        return Message(
            role="assistant",
            content=self.decode(head),
            thinking=self.decode(thinking),
            calls=tuple(self._parse_call(self.decode(body)) for body in bodies),
        )

    def counts(self, sampled: Sequence[int]) -> SampledCounts:
        """Where the sampled tokens of one assistant message went (stop token counts with the last part)."""
        thinking, rest = self._cut_thinking(sampled)
        num_thinking = len(sampled) - len(rest) if len(rest) != len(sampled) else len(thinking)
        call_id = self._ids[vocabulary.CALL]
        num_message = rest.index(call_id) if call_id in rest else len(rest)
        return SampledCounts(thinking=num_thinking, call=len(rest) - num_message, message=num_message)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens are spelled out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _strip_stop(self, sampled: Sequence[int]) -> list[int]:
        ids = list(sampled)
        return ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids

    def _cut_thinking(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """(reasoning ids, the rest); unclosed reasoning swallows everything."""
        ids = list(ids)
        if not ids or ids[0] != self._ids[vocabulary.THINK]:
            return [], ids
        close = self._ids[vocabulary.END_THINK]
        if close not in ids:
            return ids[1:], []
        at = ids.index(close)
        return ids[1:at], ids[at + 1 :]

    def _parse_call(self, body: str) -> ToolCall:
        name, separator, rest = body.partition("\n")
        names = self.tools.get(name)
        if names is None:
            return ToolCall(name=name, error=f"no tool {name!r}; tools: {' '.join(self.tools)}")
        if separator and not names:
            return ToolCall(name=name, error=f"{name} takes no argument")
        values = rest.split("\n", len(names) - 1) if separator else []
        return ToolCall(name=name, arguments=dict(zip(names, values, strict=False)))


def _split_on(ids: Sequence[int], separator: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for i in ids:
        if i == separator:
            parts.append([])
        else:
            parts[-1].append(i)
    return parts


def _split_specials(text: str) -> list[str]:
    """Cut ``text`` inside anything that spells a special token, so that the tokenizer cannot see one."""
    if "<|" not in text:
        return [text] if text else []
    pieces = text.split("<|")
    return [p for p in [pieces[0] + "<", *("|" + p + "<" for p in pieces[1:-1]), "|" + pieces[-1]] if p]
