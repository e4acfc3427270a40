"""Promises: estimators have their closed-form moments; the loss has the exact policy gradient, stale samples included."""

from __future__ import annotations

import math

import pytest
import torch

from etude.algorithms.policy import effective_sample_size, importance_weights, k1, k2, k3, policy_loss


@pytest.mark.parametrize("kl", [0.125, 0.5, 1.125])
def test_kl_estimators_on_unit_gaussians(kl: float) -> None:
    """q = N(0, 1), p = N(mu, 1), K = mu^2 / 2: E k1 = E k3 = K, E k2 = K + K^2/2, Var k1 = 2K, Var k2 = 2K^2 + 2K^3."""
    mu = math.sqrt(2 * kl)
    x = torch.randn(4_000_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log_ratio = mu * x - mu * mu / 2
    for estimator, mean, variance in (
        (k1, kl, 2 * kl),
        (k2, kl + kl**2 / 2, 2 * kl**2 + 2 * kl**3),
        (k3, kl, math.exp(2 * kl) - 1 - 2 * kl),
    ):
        values = estimator(log_ratio)
        assert float(values.mean()) == pytest.approx(mean, rel=0.02)
        assert float(values.var()) == pytest.approx(variance, rel=0.15)


def test_the_loss_gives_the_exact_gradient_of_a_bandit_on_and_off_policy() -> None:
    """Two arms with rewards (1, 0): dJ/dtheta for logits (theta, 0) is p (1 - p), whatever policy sampled the arms."""
    theta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    p = torch.sigmoid(theta.detach())
    for behaviour_p in (float(p), 0.5, 0.2):
        count = 1_000_000
        arm = torch.rand(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64) < behaviour_p
        logits = torch.stack((theta, torch.zeros((), dtype=torch.float64)))
        logprobs = logits.log_softmax(0)[(~arm).long()]
        behaviour = torch.where(arm, math.log(behaviour_p), math.log(1 - behaviour_p)).double()
        result = policy_loss(
            logprobs,
            behaviour,
            arm.double(),
            reference=None,
            kl_coefficient=0.0,
            truncation=10.0,
            normaliser=count,
        )
        (gradient,) = torch.autograd.grad(-result.loss, theta)
        assert float(gradient) == pytest.approx(float(p * (1 - p)), rel=0.01)


def test_k1_in_the_advantage_descends_the_reverse_kl() -> None:
    """With zero reward the gradient of the loss is beta * d KL(pi || reference) / d theta."""
    theta = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    exact = torch.autograd.grad((theta.softmax(0) * (theta.log_softmax(0) - reference)).sum(), theta)[0]
    probabilities = theta.detach().softmax(0)
    arms = torch.multinomial(probabilities, 2_000_000, replacement=True, generator=torch.Generator().manual_seed(3))
    logprobs = theta.log_softmax(0)[arms]
    result = policy_loss(
        logprobs, logprobs.detach(), torch.zeros_like(logprobs), reference=reference[arms], kl_coefficient=0.7,
        truncation=5.0, normaliser=len(arms),
    )  # fmt: skip
    gradient = torch.autograd.grad(result.loss, theta)[0]
    assert torch.allclose(gradient, 0.7 * exact, atol=3e-3)


def test_weights_are_truncated_and_carry_no_gradient() -> None:
    logprobs = torch.tensor([0.0, 1.0, 3.0], requires_grad=True)
    weights = importance_weights(logprobs, torch.zeros(3), truncation=5.0)
    assert weights.tolist() == pytest.approx([1.0, math.e, 5.0])
    assert not weights.requires_grad


def test_effective_sample_size_ends() -> None:
    assert effective_sample_size(torch.ones(7)) == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
