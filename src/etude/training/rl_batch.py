"""Rollout groups -> packed rows: every token of every segment, with what the policy loss needs beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from etude.base.records import Rollout, RolloutGroup, Segment


@dataclass(frozen=True)
class RLBatch:
    """B rows of S positions; entries at position s describe ``tokens[b, s]`` itself."""

    tokens: Tensor
    """int64 ``[B, S]``."""
    documents: Tensor
    """int64 ``[B, S]``: number of the segment in its row, -1 where empty."""
    positions: Tensor
    """int64 ``[B, S]``."""
    sampled: Tensor
    """bool ``[B, S]``: trained tokens."""
    behaviour: Tensor
    """float32 ``[B, S]``: behaviour logprob of sampled tokens."""
    advantages: Tensor
    """float32 ``[B, S]``: advantage of the chain that a sampled token belongs to."""
    chain_tokens: Tensor
    """float32 ``[B, S]``: sampled tokens of that whole chain, all its segments; 1 where empty."""
    versions: Tensor
    """int64 ``[B, S]``: policy version of sampled tokens, -1 elsewhere."""
    experts: Tensor
    """int64 ``[B, S, L, k]``: experts to replay, -1 where unknown."""

    @property
    def mask(self) -> Tensor:
        """bool ``[B, 1, S, S]``: causal, within one segment."""
        length = self.tokens.shape[1]
        same = self.documents[:, None, :, None] == self.documents[:, None, None, :]
        return same & torch.ones(length, length, dtype=torch.bool).tril()


@dataclass(frozen=True)
class _Item:
    """A segment with what it has from its chain."""

    segment: Segment
    advantage: float
    chain_tokens: int


def pack_groups(
    groups: Sequence[RolloutGroup],
    *,
    row_length: int,
    rows_per_batch: int,
    moe_layers: int,
    top_k: int,
    mask_overlong: bool = False,
) -> list[RLBatch]:
    """First-fit-decreasing packing of all segments of trainable rollouts; rows grow to the longest segment if need be.

    Every sampled token of every segment of a chain carries the chain's advantage; chains with advantage 0 are left out,
    since they add nothing to the policy gradient (their share of the KL term is left out with them). ``mask_overlong`` leaves
    out chains that a limit cut short, too: DAPO's overlong masking. They still count in the statistics of their group.
    """
    items = [
        _Item(segment, advantage, rollout.sampled_tokens)
        for group in groups
        for rollout, advantage in zip(group.rollouts, group.advantages, strict=True)
        if advantage != 0.0 and rollout.outcome.trainable and not (mask_overlong and _overlong(rollout))
        for segment in rollout.segments
        if segment.sampled.any()
    ]
    items.sort(key=lambda item: -len(item.segment.tokens))
    rows: list[list[_Item]] = []
    room: list[int] = []
    for item in items:
        size = len(item.segment.tokens)
        fitting = next((i for i, free in enumerate(room) if free >= size), None)
        if fitting is None:
            rows.append([item])
            room.append(max(row_length, size) - size)
        else:
            rows[fitting].append(item)
            room[fitting] -= size
    return [
        _assemble(rows[start : start + rows_per_batch], moe_layers, top_k)
        for start in range(0, len(rows), rows_per_batch)
    ]


def _overlong(rollout: Rollout) -> bool:
    """Whether its last context ended at a limit, not because the agent was done."""
    return rollout.segments[-1].end == "budget"


def _assemble(rows: Sequence[Sequence[_Item]], moe_layers: int, top_k: int) -> RLBatch:
    length = max(sum(len(item.segment.tokens) for item in row) for row in rows)
    shape = (len(rows), length)
    tokens, documents = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    positions, versions = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    sampled = np.zeros(shape, bool)
    behaviour, advantages = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    chain_tokens = np.ones(shape, np.float32)
    experts = np.full((*shape, moe_layers, top_k), -1, np.int64)
    for r, row in enumerate(rows):
        at = 0
        for number, item in enumerate(row):
            segment = item.segment
            size = len(segment.tokens)
            span = slice(at, at + size)
            tokens[r, span], documents[r, span], positions[r, span] = segment.tokens, number, np.arange(size)
            sampled[r, span], behaviour[r, span] = segment.sampled, segment.logprobs
            versions[r, span] = segment.versions
            advantages[r, span], chain_tokens[r, span] = item.advantage, item.chain_tokens
            if segment.experts is not None:
                experts[r, span] = segment.experts
            at += size
    arrays = (tokens, documents, positions, sampled, behaviour, advantages, chain_tokens, versions, experts)
    return RLBatch(*(torch.from_numpy(array) for array in arrays))
