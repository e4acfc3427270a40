"""Language-model losses: weighted cross-entropy and MTP self-distillation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def weighted_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Sum of ``weights [N] * -log softmax(logits [N, V])[targets [N]]`` over the sum of weights; a scalar."""
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp_min(1.0)


def mtp_distillation(teacher_logits: Tensor, student_logits: Tensor, mask: Tensor) -> Tensor:
    """Mean over ``mask [N]`` (bool) of KL(softmax(teacher) || softmax(student)), the teacher detached.

    Row n of both is a prediction of the *same* token: for MTP depth k at position i the teacher is the main head at
    position i + k (spec 3.1). ``[N, V]`` each.
    """
    teacher = teacher_logits.detach().log_softmax(dim=-1)
    student = student_logits.log_softmax(dim=-1)
    divergence = (teacher.exp() * (teacher - student)).sum(dim=-1)
    return (divergence * mask).sum() / mask.sum().clamp_min(1)


def mtp_mask(documents: Tensor, depth: int) -> Tensor:
    """Where MTP ``depth`` (0-based) may be trained: bool ``[B, S - depth - 2]`` for positions i whose target
    t_{i + depth + 2} lies in the same document. ``documents [B, S]`` holds -1 for empty positions."""
    last = documents.shape[1] - depth - 2
    return (documents[:, :last] == documents[:, depth + 2 :]) & (documents[:, :last] >= 0)


def agreement(teacher_logits: Tensor, student_logits: Tensor, mask: Tensor) -> Tensor:
    """Share of masked rows in which both pick the same token: the greedy acceptance rate of speculation."""
    same = teacher_logits.argmax(-1) == student_logits.argmax(-1)
    return (same & mask).sum() / mask.sum().clamp_min(1)


def expert_balance(experts: Tensor, num_experts: int) -> Tensor:
    """Load of each expert relative to the mean: float ``[L, E]`` from ``experts [..., L, k]``; 1.0 is balanced."""
    layers = experts.shape[-2]
    counts = torch.stack(
        [F.one_hot(experts[..., layer, :].reshape(-1), num_experts).sum(0) for layer in range(layers)]
    ).float()
    return counts / counts.mean(dim=1, keepdim=True).clamp_min(1e-9)
