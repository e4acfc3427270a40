"""Router replay with the plausibility filter (Composer 2 report, section 6.2).

The engine's choice of experts overrides the trainer's; the gating scores are still the trainer's, so gradient reaches the
router. A replayed expert that the trainer finds implausible is put back: with tau = alpha * (k-th largest score), keep
replayed e iff s_e >= tau and refill from the trainer's own top-k. alpha = 0 is pure replay, alpha = 1 the trainer's own
choice (ties aside). The report does not state its threshold; this rule is ours (spec 6).
"""

from __future__ import annotations

import torch
from torch import Tensor


def filter_replay(replayed: Tensor, scores: Tensor, own: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Experts to use ``[T, k]`` and which of the replayed ones were kept, bool ``[T, k]``.

    ``replayed`` int64 ``[T, k]`` (-1 = unknown, refilled), ``scores [T, E]`` the trainer's gating scores, ``own [T, k]`` its
    choice, best first. A refill never duplicates a kept expert.
    """
    kth = scores.gather(1, own).amin(dim=1, keepdim=True)
    known = replayed >= 0
    kept = known & (scores.gather(1, replayed.clamp_min(0)) >= alpha * kth)
    if bool(kept.all()):
        return replayed, kept
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(1, replayed.clamp_min(0), kept)
    # rank the candidates: kept experts first (as they stand), then own choices not yet taken, in their order
    candidates = torch.cat((replayed.clamp_min(0), own), dim=1)
    usable = torch.cat((kept, ~taken.gather(1, own)), dim=1)
    order = torch.argsort((~usable).to(torch.int8), dim=1, stable=True)[:, : own.shape[1]]
    return candidates.gather(1, order), kept


class ReplayRouting:
    """Feeds recorded experts to a model's MoE layers (``models.moe.Routing``) and counts what the filter kept."""

    def __init__(self, experts: Tensor, alpha: float) -> None:
        """``experts`` int64 ``[T, L, k]`` in the order in which the model flattens its tokens."""
        self.experts, self.alpha = experts, alpha
        self.num_kept = self.num_known = 0

    def select(self, moe_layer: int, scores: Tensor, own: Tensor) -> Tensor:
        if moe_layer >= self.experts.shape[1]:
            return own  # MTP depths are not part of the policy
        replayed = self.experts[:, moe_layer]
        used, kept = filter_replay(replayed, scores, own, self.alpha)
        self.num_kept += int(kept.sum())
        self.num_known += int((replayed >= 0).sum())
        return used

    @property
    def kept_share(self) -> float:
        """Share of known replayed experts that passed the filter."""
        return self.num_kept / max(self.num_known, 1)
