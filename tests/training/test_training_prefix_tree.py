"""Promises of prefix trees, against brute force: each sequence is a path, no prefix is there twice, attention sees ancestors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.models.span_attention import span_mask
from etude.training.prefix_tree import PrefixTree, merge_prefixes


def sequences(seed: int) -> list[np.ndarray]:
    """Of two columns with few values, so that prefixes are often shared; repeats and prefixes of others among them."""
    rng = np.random.default_rng(seed)
    made = [rng.integers(-1, 2, (int(rng.integers(1, 9)), 2)) for _ in range(12)]
    return [*made, made[0].copy(), made[1][:1].copy()]


def prefixes(keys: list[np.ndarray]) -> set[bytes]:
    return {key[: end + 1].tobytes() for key in keys for end in range(len(key))}


def check(tree: PrefixTree, keys: list[np.ndarray]) -> None:
    """Node -> prefix is a function, and ancestors are the proper prefixes and the node itself."""
    prefix_of: dict[int, bytes] = {}
    for index, path in tree.paths:
        assert len(path) == len(keys[index])
        for depth, node in enumerate(path):
            prefix = keys[index][: depth + 1].tobytes()
            assert prefix_of.setdefault(int(node), prefix) == prefix
    assert sorted(prefix_of) == list(range(tree.size))
    expected = [
        [prefix_of[row].startswith(prefix_of[column]) for column in range(tree.size)] for row in range(tree.size)
    ]
    assert span_mask(torch.from_numpy(tree.reach())[None])[0].tolist() == expected


@pytest.mark.parametrize("seed", range(5))
def test_one_tree_a_root_when_there_is_room(seed: int) -> None:
    keys = sequences(seed)
    trees = merge_prefixes(keys, 10_000)
    assert sorted(index for tree in trees for index, _ in tree.paths) == list(range(len(keys)))
    assert sum(tree.size for tree in trees) == len(prefixes(keys)), "each distinct prefix is one node"
    for tree in trees:
        check(tree, keys)


@pytest.mark.parametrize("limit", [1, 5, 8, 12])
def test_trees_keep_to_the_limit(limit: int) -> None:
    keys = sequences(0)
    for tree in merge_prefixes(keys, limit):
        check(tree, keys)
        assert tree.size <= limit or len(prefixes([keys[index] for index, _ in tree.paths])) == max(
            len(keys[index]) for index, _ in tree.paths
        )


def test_nothing_makes_no_tree() -> None:
    assert merge_prefixes([], 5) == []
