"""A seeded, endless mixture of documents for continued pretraining.

Each source draws one document at a time from its own share of a corpus; :func:`mixture` picks sources by weight. The same
seed and files give the same stream.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from etude.base.records import Message
from etude.data.chat import ChatCodec
from etude.data.corpus import SourceFile
from etude.data.edit_documents import edit_document, states
from etude.data.packing import Document
from etude.data.tokenizer import EOS, FILE, token_id


class Source(Protocol):
    """Something that documents can be drawn from."""

    def draw(self, rng: random.Random) -> Document: ...


class CodeSource:
    """Windows of source files, cut at line starts; a file is drawn in proportion to its size."""

    def __init__(self, files: Sequence[SourceFile], codec: ChatCodec, window_chars: int) -> None:
        self.files, self.codec, self.window_chars = list(files), codec, window_chars
        self.sizes = np.cumsum([len(file.text) for file in self.files])
        self.file_id, self.end_id = token_id(codec.tokenizer, FILE), token_id(codec.tokenizer, EOS)

    def draw(self, rng: random.Random) -> Document:
        file = self.files[int(np.searchsorted(self.sizes, rng.random() * self.sizes[-1], side="right"))]
        start = rng.randrange(max(1, len(file.text) - self.window_chars // 2))
        start = file.text.rfind("\n", 0, start) + 1
        text = file.text[start : start + self.window_chars]
        ids = [self.file_id, *self.codec.encode(file.path.rsplit("/", 1)[-1] + "\n" + text)]
        return plain_document([*ids, self.end_id] if start + self.window_chars >= len(file.text) else ids)


class TextSource:
    """Whole short texts, e.g. single functions or generated files; ``per_document`` of them make one document."""

    def __init__(self, texts: Sequence[str], codec: ChatCodec, per_document: int = 1) -> None:
        self.texts, self.codec, self.per_document = texts, codec, per_document
        self.file_id, self.end_id = token_id(codec.tokenizer, FILE), token_id(codec.tokenizer, EOS)

    def draw(self, rng: random.Random) -> Document:
        chosen = [self.texts[rng.randrange(len(self.texts))] for _ in range(self.per_document)]
        return plain_document([self.file_id, *self.codec.encode("\n\n".join(chosen)), self.end_id])


class EditSource:
    """Edit documents over functions (see ``edit_documents``); what is shown weighs ``context_weight``.

    ``allowed`` says of a file's text whether it may be trained on: an edit can make a function that is held out.
    """

    def __init__(
        self,
        functions: Sequence[str],
        codec: ChatCodec,
        max_tokens: int,
        context_weight: float = 1.0,
        allowed: Callable[[str], bool] = lambda text: True,
    ) -> None:
        self.functions, self.codec, self.max_tokens = functions, codec, max_tokens
        self.context_weight, self.allowed = context_weight, allowed

    def draw(self, rng: random.Random) -> Document:
        while True:
            chosen = [self.functions[rng.randrange(len(self.functions))] for _ in range(rng.choice((1, 1, 2, 2, 3)))]
            messages = edit_document(chosen, rng)
            if messages is None or not all(map(self.allowed, states(messages))):
                continue
            document = conversation_document(messages, self.codec, self.context_weight)
            if len(document[0]) <= self.max_tokens:
                return document


class ConversationSource:
    """Recorded conversations; assistant tokens weigh 1, the rest ``context_weight``."""

    def __init__(self, conversations: Sequence[Sequence[Message]], codec: ChatCodec, context_weight: float) -> None:
        self.documents = [conversation_document(messages, codec, context_weight) for messages in conversations]

    def draw(self, rng: random.Random) -> Document:
        return self.documents[rng.randrange(len(self.documents))]


def plain_document(ids: Sequence[int]) -> Document:
    """Every token weighs 1."""
    return np.asarray(ids, np.int32), np.ones(len(ids), np.float32)


def conversation_document(messages: Sequence[Message], codec: ChatCodec, context_weight: float) -> Document:
    """Tokens of a conversation; what the assistant would have to sample weighs 1, the rest ``context_weight``."""
    ids: list[int] = []
    weights: list[float] = []
    for message in messages:
        rendered = codec.render_message(message)
        ids += rendered
        if message.role == "assistant":
            weights += [context_weight] + [1.0] * (len(rendered) - 1)
        else:
            weights += [context_weight] * len(rendered)
    return np.asarray(ids, np.int32), np.asarray(weights, np.float32)


def mixture(sources: Sequence[tuple[float, Source]], seed: int) -> Iterator[Document]:
    """An endless stream; each document comes from a source picked by weight."""
    rng = random.Random(seed)
    weights = [weight for weight, _ in sources]
    while True:
        ((_, source),) = rng.choices(sources, weights)
        yield source.draw(rng)
