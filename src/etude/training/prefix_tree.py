"""Shared prefixes: sequences of one group start alike, so a row holds each common prefix once.

Sorted, the sequences of a trie stand so that each shares its longest prefix with a neighbour: the length in common with the one
before is all it takes to merge them, and to know how many new nodes a sequence costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]


@dataclass
class PrefixTree:
    """Merged sequences, added in sorted order: nodes are numbered depth first, so that a subtree is a range of numbers."""

    size: int = 0
    """Number of nodes."""
    paths: list[tuple[int, Array]] = field(default_factory=list)
    """(index of the sequence, node of each of its positions)."""

    def add(self, sequence: int, length: int, shared: int) -> None:
        """Add a sequence of ``length`` positions whose first ``shared`` are those of the one added last."""
        prefix = self.paths[-1][1][:shared] if self.paths else np.empty(0, np.int64)
        new = np.arange(self.size, self.size + length - shared)
        self.paths.append((sequence, np.concatenate([prefix, new])))
        self.size += length - shared

    def reach(self) -> NDArray[np.int32]:
        """int32 ``[size]``: end of each node's subtree, which is what sees the node; ``models.span_attention`` takes it."""
        ends = np.empty(self.size, np.int32)
        for _, path in self.paths:
            ends[path] = path[-1] + 1
        return ends


def merge_prefixes(keys: Sequence[Array], limit: int) -> list[PrefixTree]:
    """Trees of at most ``limit`` nodes over all of ``keys``, each ``[T_i, W]`` with T_i >= 1; equal rows are equal positions.

    A sequence joins the tree of the one before it in sorted order where they have a prefix in common and the tree has room;
    one that is longer than ``limit`` is alone.
    """
    order = sorted(range(len(keys)), key=lambda i: keys[i].astype(">i8").tobytes())
    trees: list[PrefixTree] = []
    for before, index in zip([None, *order], order, strict=False):
        shared = _common(keys[before], keys[index]) if before is not None else 0
        length = len(keys[index])
        if not shared or trees[-1].size + length - shared > limit:
            trees.append(PrefixTree())
            shared = 0
        trees[-1].add(index, length, shared)
    return trees


def _common(a: Array, b: Array) -> int:
    """Rows that ``a`` and ``b`` have in common from the start."""
    shorter = min(len(a), len(b))
    different = (a[:shorter] != b[:shorter]).any(axis=1)
    return int(different.argmax()) if different.any() else shorter
