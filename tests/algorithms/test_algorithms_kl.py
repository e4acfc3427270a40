"""Promises of the KL estimators: moments on Gaussians; value, variance and gradient over all sequences of a tiny policy."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from etude.algorithms.kl import KL_ESTIMATORS, KLPenalty, TokenScores, k1, k2, k3
from etude.algorithms.policy import policy_loss


@pytest.mark.parametrize("kl", [0.125, 0.5, 1.125])
def test_moments_on_unit_gaussians(kl: float) -> None:
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


class Enumerated:
    """A policy over two tokens of a vocabulary of three, the second conditioned on the first, and all nine sequences."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.first = torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_(True)
        self.second = torch.randn(3, 3, generator=generator, dtype=torch.float64).requires_grad_(True)
        reference = torch.randn(4, 3, generator=generator, dtype=torch.float64).log_softmax(-1)
        self.reference_first, self.reference_second = reference[0], reference[1:]
        self.sequences = list(itertools.product(range(3), repeat=2))

    def scores(self, first: Tensor, second: Tensor) -> TokenScores:
        """Of the 18 tokens of all sequences, in order."""
        rows, chosen = [], []
        for a, b in self.sequences:
            rows += [first, second[a]]
            chosen += [first[a], second[a, b]]
        return TokenScores(torch.stack(chosen), torch.stack(rows))

    def policy(self) -> TokenScores:
        return self.scores(self.first.log_softmax(-1), self.second.log_softmax(-1))

    def reference(self) -> TokenScores:
        return self.scores(self.reference_first, self.reference_second)

    def probabilities(self) -> Tensor:
        """Of the nine sequences."""
        return self.policy().logprobs.detach().reshape(9, 2).sum(1).exp()

    def kl(self) -> tuple[Tensor, Tensor]:
        """KL of the first token; of the second given the first ``[3]``."""
        p, q = self.first.log_softmax(-1), self.second.log_softmax(-1)
        return (
            (p.exp() * (p - self.reference_first)).sum(),
            (q.exp() * (q - self.reference_second)).sum(-1),
        )


def test_rao_blackwell_has_the_exact_mean_and_less_variance_than_k1() -> None:
    world = Enumerated()
    weights = world.probabilities()
    first, second = (value.detach() for value in world.kl())
    exact = float(first + (world.first.detach().softmax(-1) * second).sum())
    moments = {}
    for name in ("k1", "rao_blackwell", "k3"):
        values = KL_ESTIMATORS[name].per_token(world.policy(), world.reference()).detach().reshape(9, 2).sum(1)
        mean = float((weights * values).sum())
        moments[name] = mean, float((weights * (values - mean) ** 2).sum())
    assert all(mean == pytest.approx(exact) for mean, _ in moments.values())
    assert moments["rao_blackwell"][1] < 0.5 * moments["k1"][1]


def _gradient(world: Enumerated, estimator: str) -> Tensor:
    """Expected gradient of the loss with zero reward, on-policy, exact by enumeration."""
    row = KL_ESTIMATORS[estimator]
    policy = world.policy()
    penalty = KLPenalty(row.per_token(policy, world.reference()), row.in_advantage, coefficient=0.7)
    result = policy_loss(
        policy.logprobs, policy.logprobs.detach(), torch.zeros_like(policy.logprobs), penalty=penalty, truncation=5.0,
        normaliser=1.0, token_weights=world.probabilities().repeat_interleave(2),
    )  # fmt: skip
    return torch.cat([g.flatten() for g in torch.autograd.grad(result.loss, (world.first, world.second))])


@pytest.mark.parametrize("estimator", ["k1", "k2", "rao_blackwell"])
def test_the_penalty_descends_the_next_token_kl_at_the_visited_prefixes(estimator: str) -> None:
    """k1 in the advantage, k2 and Rao-Blackwell as losses: beta * gradient of sum_prefix P(prefix) KL(prefix)."""
    world = Enumerated()
    first, second = world.kl()
    total = first + (world.first.detach().softmax(-1) * second).sum()
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(total, (world.first, world.second))])
    assert torch.allclose(_gradient(world, estimator), 0.7 * exact, atol=1e-12)


def test_k3_as_a_loss_descends_the_forward_kl() -> None:
    """Gradient of -sum_v p(v) log q(v) at every visited prefix, with p the reference."""
    world = Enumerated()
    p, q = world.first.log_softmax(-1), world.second.log_softmax(-1)
    crossed = -(world.reference_second.exp() * q).sum(-1)
    total = -(world.reference_first.exp() * p).sum() + (world.first.detach().softmax(-1) * crossed).sum()
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(total, (world.first, world.second))])
    assert torch.allclose(_gradient(world, "k3"), 0.7 * exact, atol=1e-12)


def test_k1_as_a_differentiated_loss_would_have_no_gradient_at_all() -> None:
    """Why it sits in the advantage."""
    world = Enumerated()
    policy = world.policy()
    values = k1(world.reference().logprobs - policy.logprobs)
    loss = (world.probabilities().repeat_interleave(2) * values).sum()
    for gradient in torch.autograd.grad(loss, (world.first, world.second)):
        assert torch.allclose(gradient, torch.zeros_like(gradient), atol=1e-12)


def test_off_policy_the_weights_correct_the_penalty_too() -> None:
    """One token sampled by mu != pi: expectation under mu of the weighted gradient is that of KL(pi || reference)."""
    theta = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    mu = torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64)
    exact = torch.autograd.grad((theta.softmax(0) * (theta.log_softmax(0) - reference)).sum(), theta)[0]
    for name in ("k1", "k2"):
        row = KL_ESTIMATORS[name]
        logprobs = theta.log_softmax(0)
        penalty = KLPenalty(
            row.per_token(TokenScores(logprobs, logprobs[None]), TokenScores(reference, reference[None])),
            row.in_advantage, coefficient=1.0,
        )  # fmt: skip
        result = policy_loss(
            logprobs, mu.log(), torch.zeros(3, dtype=torch.float64), penalty=penalty, truncation=100.0, normaliser=1.0,
            token_weights=mu,
        )  # fmt: skip
        assert torch.allclose(torch.autograd.grad(result.loss, theta)[0], exact, atol=1e-12)
