"""Promises: distillation is zero only at equality and masks at document borders; cross-entropy is the weighted mean."""

from __future__ import annotations

import pytest
import torch

from etude.algorithms.language import expert_balance, mtp_distillation, mtp_mask, weighted_cross_entropy


def test_weighted_cross_entropy_is_the_weighted_mean() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    targets, weights = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0])
    each = [-logits[i].log_softmax(0)[t] for i, t in enumerate(targets)]
    expected = sum(float(w) * float(e) for w, e in zip(weights, each, strict=True)) / float(weights.sum())
    assert float(weighted_cross_entropy(logits, targets, weights)) == pytest.approx(expected)


def test_distillation_is_kl_and_sends_no_gradient_to_the_teacher() -> None:
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(6, 9, generator=generator, requires_grad=True)
    student = torch.randn(6, 9, generator=generator, requires_grad=True)
    mask = torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.bool)
    loss = mtp_distillation(teacher, student, mask)
    p, q = teacher.softmax(-1), student.softmax(-1)
    expected = ((p * (p / q).log()).sum(-1))[mask].mean()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    loss.backward()
    assert teacher.grad is None
    assert float(mtp_distillation(teacher, teacher, mask)) == pytest.approx(0.0, abs=1e-6)


def test_mask_stops_at_document_borders() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1]])
    # position i is kept when i and i + 2 lie in the same document
    assert mtp_mask(documents, 0).tolist() == [[True, False, False, True, True, False]]


def test_balance_is_one_when_even() -> None:
    experts = torch.tensor([[[0, 1]], [[2, 3]]])  # [T, L = 1, k]
    assert expert_balance(experts, 4).tolist() == [[1.0, 1.0, 1.0, 1.0]]
