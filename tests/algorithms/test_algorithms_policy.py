"""Promises: the default loss is bitwise its plain formula; exact bandit gradients on-policy, stale and truncated."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from etude.algorithms.kl import KLPenalty
from etude.algorithms.policy import effective_sample_size, importance_weights, policy_loss


@pytest.mark.parametrize("seed", range(5))
def test_the_default_loss_is_bitwise_its_plain_formula(seed: int) -> None:
    """k1 in the advantage, truncated weights, one constant below: value and gradient, bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    new, old, reference, advantages = torch.randn(4, 501, generator=generator) - 2
    plain, ours = new.clone().requires_grad_(True), new.clone().requires_grad_(True)
    weights = (plain.detach() - old).exp().clamp(max=5.0)
    expected = -(weights * (advantages - 0.01 * (plain.detach() - reference)) * plain).sum() / 640.0
    penalty = KLPenalty(ours - reference, in_advantage=True, coefficient=0.01)
    result = policy_loss(ours, old, advantages, penalty=penalty, truncation=5.0, normaliser=640.0)
    assert torch.equal(result.loss, expected)
    assert torch.equal(torch.autograd.grad(result.loss, ours)[0], torch.autograd.grad(expected, plain)[0])
    assert torch.equal(result.kl, new - reference)
    assert not result.kl.requires_grad


def _bandit_gradient(theta: Tensor, behaviour: float, truncation: float) -> float:
    """Expected ascent direction of the loss over both arms (rewards 1, 0) sampled with ``behaviour``; exact, no sampling."""
    mu = torch.tensor([behaviour, 1 - behaviour], dtype=torch.float64)
    logprobs = torch.stack((theta, torch.zeros_like(theta))).log_softmax(0)
    advantages = torch.tensor([1.0, 0.0], dtype=torch.float64)
    result = policy_loss(logprobs, mu.log(), advantages, truncation=truncation, normaliser=1.0, token_weights=mu)
    return float(torch.autograd.grad(-result.loss, theta)[0])


@pytest.mark.parametrize("behaviour", [None, 0.5, 0.2, 0.05])
def test_the_gradient_of_a_two_armed_bandit_is_exact_whoever_sampled(behaviour: float | None) -> None:
    """dJ/dtheta = p (1 - p) for logits (theta, 0), on-policy (None) and with stale samples."""
    theta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    p = float(torch.sigmoid(theta))
    assert _bandit_gradient(theta, behaviour or p, truncation=100.0) == pytest.approx(p * (1 - p), rel=1e-12)


def test_truncation_scales_down_exactly_what_is_above_it() -> None:
    theta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    p = float(torch.sigmoid(theta))
    assert _bandit_gradient(theta, 0.05, truncation=5.0) == pytest.approx(0.05 * 5.0 * (1 - p), rel=1e-12)


def test_stale_samples_of_the_bandit_give_the_gradient_on_average() -> None:
    theta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    p = float(torch.sigmoid(theta))
    for behaviour_p in (p, 0.2):
        count = 300_000
        arm = torch.rand(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64) < behaviour_p
        logprobs = torch.stack((theta, torch.zeros_like(theta))).log_softmax(0)[(~arm).long()]
        behaviour = torch.where(arm, math.log(behaviour_p), math.log(1 - behaviour_p)).double()
        result = policy_loss(logprobs, behaviour, arm.double(), truncation=10.0, normaliser=count)
        (gradient,) = torch.autograd.grad(-result.loss, theta)
        assert float(gradient) == pytest.approx(p * (1 - p), rel=0.02)


def test_weights_are_truncated_and_carry_no_gradient() -> None:
    logprobs = torch.tensor([0.0, 1.0, 3.0], requires_grad=True)
    weights = importance_weights(logprobs, torch.zeros(3), truncation=5.0)
    assert weights.tolist() == pytest.approx([1.0, math.e, 5.0])
    assert not weights.requires_grad


def test_effective_sample_size_ends() -> None:
    assert effective_sample_size(torch.ones(7)) == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert effective_sample_size(torch.zeros(3)) == 0.0


def test_effective_sample_size_of_log_normal_weights() -> None:
    """w = exp(s z): (E w)^2 / E w^2 = exp(-s^2)."""
    z = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert effective_sample_size((0.5 * z).exp()) == pytest.approx(math.exp(-0.25), rel=0.01)
