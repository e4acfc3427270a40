"""Promises: packing keeps every token once, in order, with borders that neither attention nor the loss crosses."""

from __future__ import annotations

import random

import numpy as np
import torch

from etude.data.packing import Packer
from etude.models.span_attention import span_mask


def _documents(count: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = random.Random(seed)
    return [
        (np.arange(1, n + 1, dtype=np.int32) + 1000 * i, np.full(n, 0.5, np.float32))
        for i, n in enumerate(rng.randint(2, 40) for _ in range(count))
    ]


def test_every_document_appears_once_and_whole() -> None:
    documents = _documents(60, seed=1)
    found = []
    for batch in Packer(48, 3).batches(documents, keep_last=True):
        for row in range(len(batch.tokens)):
            for number in range(int(batch.documents[row].max()) + 1):
                found.append(tuple(batch.tokens[row][batch.documents[row] == number].tolist()))
    assert sorted(found) == sorted(tuple(tokens.tolist()) for tokens, _ in documents)


def test_positions_restart_and_first_tokens_have_no_weight() -> None:
    for batch in Packer(48, 3).batches(_documents(40, seed=2), keep_last=True):
        starts = (batch.positions == 0) & (batch.documents >= 0)
        assert float(batch.weights[starts].abs().sum()) == 0.0
        inside = (batch.positions > 0) & (batch.documents >= 0)
        assert torch.all(batch.weights[inside] == 0.5)


def test_attention_is_causal_within_a_document() -> None:
    (*_, batch) = Packer(48, 2).batches(_documents(40, seed=3), keep_last=True)
    assert (batch.documents < 0).any()
    mask = span_mask(batch.reach)
    for b in range(len(batch.tokens)):
        for s in range(48):
            for t in range(48):
                same = s == t or batch.documents[b, s] == batch.documents[b, t] >= 0
                assert bool(mask[b, s, t]) == bool(same and t <= s)


def test_rows_are_nearly_full_and_long_documents_are_cut() -> None:
    batches = list(Packer(128, 4).batches(_documents(800, seed=4)))
    assert sum(b.num_tokens for b in batches) / sum(b.tokens.numel() for b in batches) > 0.95
    long = [(np.arange(300, dtype=np.int32), np.ones(300, np.float32))]
    pieces = list(Packer(128, 1).batches(long))
    assert [p.num_tokens for p in pieces] == [128, 128, 44]
