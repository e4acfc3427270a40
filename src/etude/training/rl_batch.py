"""Rollout groups -> packed rows of prefix trees, and the sampled tokens with what the policy loss needs of each.

The rollouts of a group open alike (instructions, the task, often the first calls and results). Positions that have the same
tokens and the same replayed experts before and at them have the same hidden states, so a row computes them once; every
rollout's sampled token keeps its own advantage and behaviour logprob. The loss is the same as without sharing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.base.records import Rollout, RolloutGroup, Segment
from etude.training.prefix_tree import PrefixTree, merge_prefixes


@dataclass(frozen=True)
class SampledTokens:
    """N sampled tokens of the segments in a batch, segment by segment."""

    source: Tensor
    """int64 ``[N]``: position that predicts the token, in the batch flattened to ``B * S``."""
    tokens: Tensor
    """int64 ``[N]``."""
    behaviour: Tensor
    """float32 ``[N]``: behaviour logprob."""
    advantages: Tensor
    """float32 ``[N]``: advantage of the chain."""
    chain_tokens: Tensor
    """float32 ``[N]``: sampled tokens of that whole chain, all its segments."""
    versions: Tensor
    """int64 ``[N]``: policy version that sampled it."""
    segments: Tensor
    """int64 ``[N]``: number of the segment in its batch."""


@dataclass(frozen=True)
class RLBatch:
    """B rows of S positions."""

    tokens: Tensor
    """int64 ``[B, S]``."""
    positions: Tensor
    """int64 ``[B, S]``: depth in the tree."""
    reach: Tensor
    """int32 ``[B, S]``: a position attends to itself and its ancestors; see ``models.span_attention``."""
    experts: Tensor
    """int64 ``[B, S, L, k]``: experts to replay, -1 where unknown."""
    num_positions: int
    """Positions that are not padding."""
    num_segment_tokens: int
    """What they would be if every segment were computed alone."""
    sampled: SampledTokens


@dataclass(frozen=True)
class _Item:
    """A segment with what it has from its chain. Its last sampled token predicts nothing and is not fed."""

    segment: Segment
    advantage: float
    chain_tokens: int
    experts: NDArray[np.int64]
    """``[T, L, k]``."""

    @property
    def length(self) -> int:
        return int(np.flatnonzero(self.segment.sampled)[-1])


def pack_groups(
    groups: Sequence[RolloutGroup],
    *,
    row_length: int,
    rows_per_batch: int,
    moe_layers: int,
    top_k: int,
    mask_overlong: bool = False,
) -> list[RLBatch]:
    """First-fit-decreasing packing of the prefix trees of each group; rows grow to the longest segment if need be.

    Every sampled token of every segment of a chain carries the chain's advantage; chains with advantage 0 are left out,
    since they add nothing to the policy gradient (their share of the KL term is left out with them). ``mask_overlong`` leaves
    out chains that a limit cut short, too: DAPO's overlong masking. They still count in the statistics of their group.
    """
    packed: list[tuple[PrefixTree, list[_Item]]] = []
    for group in groups:
        items = _items(group, moe_layers, top_k, mask_overlong)
        packed += [(tree, items) for tree in merge_prefixes([_key(item) for item in items], row_length)]
    packed.sort(key=lambda entry: -entry[0].size)
    rows: list[list[tuple[PrefixTree, list[_Item]]]] = []
    room: list[int] = []
    for entry in packed:
        size = entry[0].size
        fitting = next((i for i, free in enumerate(room) if free >= size), None)
        if fitting is None:
            rows.append([entry])
            room.append(max(row_length, size) - size)
        else:
            rows[fitting].append(entry)
            room[fitting] -= size
    return [
        _assemble(rows[start : start + rows_per_batch], moe_layers, top_k)
        for start in range(0, len(rows), rows_per_batch)
    ]


def _items(group: RolloutGroup, moe_layers: int, top_k: int, mask_overlong: bool) -> list[_Item]:
    return [
        _Item(segment, advantage, rollout.sampled_tokens, _experts(segment, moe_layers, top_k))
        for rollout, advantage in zip(group.rollouts, group.advantages, strict=True)
        if advantage != 0.0 and rollout.outcome.trainable and not (mask_overlong and _overlong(rollout))
        for segment in rollout.segments
        if segment.sampled[1:].any()
    ]


def _experts(segment: Segment, moe_layers: int, top_k: int) -> NDArray[np.int64]:
    if segment.experts is None:
        return np.full((len(segment.tokens), moe_layers, top_k), -1, np.int64)
    return segment.experts.astype(np.int64)


def _key(item: _Item) -> NDArray[np.int64]:
    """Positions are the same where tokens and experts are."""
    tokens = item.segment.tokens[: item.length, None].astype(np.int64)
    return np.concatenate([tokens, item.experts[: item.length].reshape(item.length, -1)], axis=1)


def _overlong(rollout: Rollout) -> bool:
    """Whether its last context ended at a limit, not because the agent was done."""
    return rollout.segments[-1].end == "budget"


def _assemble(rows: Sequence[Sequence[tuple[PrefixTree, list[_Item]]]], moe_layers: int, top_k: int) -> RLBatch:
    length = max(sum(tree.size for tree, _ in row) for row in rows)
    shape = (len(rows), length)
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    reach = np.tile(np.arange(1, length + 1, dtype=np.int32), (len(rows), 1))
    experts = np.full((*shape, moe_layers, top_k), -1, np.int64)
    sampled: list[tuple[NDArray[np.generic], ...]] = []
    total = 0
    for r, row in enumerate(rows):
        start = 0
        for tree, items in row:
            reach[r, start : start + tree.size] = start + tree.reach()
            for index, path in tree.paths:
                item, at = items[index], start + path
                tokens[r, at], positions[r, at] = item.segment.tokens[: len(path)], np.arange(len(path))
                experts[r, at] = item.experts[: len(path)]
                sampled.append(_sampled(item, r * length + at, len(sampled)))
                total += len(path)
            start += tree.size
    columns = [torch.from_numpy(np.concatenate(column)) for column in zip(*sampled, strict=True)]
    return RLBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        reach=torch.from_numpy(reach),
        experts=torch.from_numpy(experts),
        num_positions=sum(tree.size for row in rows for tree, _ in row),
        num_segment_tokens=total,
        sampled=SampledTokens(*columns),
    )


def _sampled(item: _Item, nodes: NDArray[np.int64], number: int) -> tuple[NDArray[np.generic], ...]:
    """The columns of ``SampledTokens`` for one segment."""
    segment = item.segment
    at = np.flatnonzero(segment.sampled[1:]) + 1
    return (
        nodes[at - 1],
        segment.tokens[at].astype(np.int64),
        segment.logprobs[at].astype(np.float32),
        np.full(len(at), item.advantage, np.float32),
        np.full(len(at), item.chain_tokens, np.float32),
        segment.versions[at].astype(np.int64),
        np.full(len(at), number),
    )
