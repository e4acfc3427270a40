"""Promises: the filter equals a brute force; its ends are pure replay and the trainer's own choice."""

from __future__ import annotations

import torch

from etude.algorithms.router_replay import ReplayRouting, filter_replay


def _case(
    seed: int, tokens: int = 200, experts: int = 8, k: int = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    own = scores.topk(k).indices
    replayed = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)])
    unknown = torch.rand(tokens, generator=generator) < 0.1
    replayed[unknown] = -1
    return replayed, scores, own


def _brute(replayed: list[int], scores: list[float], own: list[int], alpha: float) -> list[int]:
    tau = alpha * min(scores[e] for e in own)
    kept = [e for e in replayed if e >= 0 and scores[e] >= tau]
    return (kept + [e for e in own if e not in kept])[: len(own)]


def test_equals_brute_force() -> None:
    for seed, alpha in enumerate((0.0, 0.3, 0.7, 0.9, 1.0)):
        replayed, scores, own = _case(seed)
        used, _ = filter_replay(replayed, scores, own, alpha)
        expected = [
            _brute(r, s, o, alpha) for r, s, o in zip(replayed.tolist(), scores.tolist(), own.tolist(), strict=True)
        ]
        assert used.tolist() == expected


def test_alpha_zero_is_pure_replay_and_one_is_own_choice() -> None:
    replayed, scores, own = _case(7)
    known = replayed[:, 0] >= 0
    pure, _ = filter_replay(replayed, scores, own, 0.0)
    assert torch.equal(pure[known], replayed[known])
    assert torch.equal(pure[~known], own[~known])
    ours, _ = filter_replay(replayed, scores, own, 1.0)
    assert torch.equal(ours.sort(1).values, own.sort(1).values)


def test_never_a_duplicate_expert() -> None:
    replayed, scores, own = _case(11)
    used, _ = filter_replay(replayed, scores, own, 0.8)
    assert all(len(set(row)) == len(row) for row in used.tolist())


def test_routing_counts_and_leaves_other_layers_alone() -> None:
    replayed, scores, own = _case(13)
    routing = ReplayRouting(replayed[:, None, :], 0.0)
    assert torch.equal(routing.select(1, scores, own), own)
    routing.select(0, scores, own)
    assert routing.kept_share == 1.0
