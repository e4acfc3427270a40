"""Packing of documents into rows of a fixed length, with no attention across documents.

A document is a pair (token ids, weights): ``weights[i]`` is the loss weight of *predicting* token i. First-fit over a
window of open rows keeps rows nearly full; a document longer than a row is cut into row-sized pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Document = tuple[NDArray[np.int32], NDArray[np.float32]]


@dataclass(frozen=True)
class PackedBatch:
    """B rows of S positions."""

    tokens: Tensor
    """int64 ``[B, S]``; 0 where empty."""
    documents: Tensor
    """int64 ``[B, S]``: number of the document in its row, -1 where empty."""
    positions: Tensor
    """int64 ``[B, S]``: position within the document."""
    weights: Tensor
    """float32 ``[B, S]``: loss weight of predicting ``tokens[b, s]`` from what comes before; 0 at document starts."""

    @property
    def reach(self) -> Tensor:
        """int32 ``[B, S]``: end of the position's document; no attention across documents (see ``models.span_attention``)."""
        length = self.tokens.shape[1]
        starts = self.positions == 0  # each empty position is one, too: it sees itself
        at = torch.where(starts, torch.arange(length), length)
        following = at.flip(1).cummin(dim=1).values.flip(1)[:, 1:]  # first start from the next position on
        return torch.nn.functional.pad(following, (0, 1), value=length).to(torch.int32)

    @property
    def num_tokens(self) -> int:
        return int((self.documents >= 0).sum())


class Packer:
    """Turns a stream of documents into batches. ``open_rows`` bounds how long a half-full row waits."""

    def __init__(self, row_length: int, rows_per_batch: int, open_rows: int = 32) -> None:
        self.row_length, self.rows_per_batch, self.open_rows = row_length, rows_per_batch, open_rows

    def batches(self, documents: Iterable[Document], *, keep_last: bool = False) -> Iterator[PackedBatch]:
        """Batches of exactly ``rows_per_batch`` rows; with ``keep_last`` also the smaller last one."""
        full: list[list[Document]] = []
        for row in self._rows(documents):
            full.append(row)
            if len(full) == self.rows_per_batch:
                yield self._assemble(full)
                full = []
        if keep_last and full:
            yield self._assemble(full)

    def _rows(self, documents: Iterable[Document]) -> Iterator[list[Document]]:
        rows: list[list[Document]] = []
        room: list[int] = []
        for tokens, weights in documents:
            for start in range(0, len(tokens), self.row_length):
                piece = (tokens[start : start + self.row_length], weights[start : start + self.row_length])
                size = len(piece[0])
                if size < 2:
                    continue
                fitting = [i for i, free in enumerate(room) if free >= size]
                if fitting:
                    best = min(fitting, key=lambda i: room[i])
                    rows[best].append(piece)
                    room[best] -= size
                else:
                    rows.append([piece])
                    room.append(self.row_length - size)
                while room and (min(room) < 4 or len(rows) > self.open_rows):
                    fullest = min(range(len(room)), key=lambda i: room[i])
                    room.pop(fullest)
                    yield rows.pop(fullest)
        yield from rows

    def _assemble(self, rows: list[list[Document]]) -> PackedBatch:
        shape = (len(rows), self.row_length)
        tokens, documents, positions = (
            np.zeros(shape, np.int64),
            np.full(shape, -1, np.int64),
            np.zeros(shape, np.int64),
        )
        weights = np.zeros(shape, np.float32)
        for r, row in enumerate(rows):
            at = 0
            for number, (ids, weight) in enumerate(row):
                span = slice(at, at + len(ids))
                tokens[r, span], documents[r, span], positions[r, span] = ids, number, np.arange(len(ids))
                weights[r, span] = weight
                weights[r, at] = 0.0
                at += len(ids)
        return PackedBatch(*(torch.from_numpy(a) for a in (tokens, documents, positions, weights)))
