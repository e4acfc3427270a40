"""Estimators of KL(policy || reference) from sampled tokens, and where each of them belongs in the loss.

The report's convention (Composer 2 report, section 4.2): q samples, p is the reference, r = p / q, KL(q || p) = E_q[-log r].
An estimator's *value* may be right while its *gradient* is not (Tang & Munos, 2025): k1 as a differentiated loss has zero
expected gradient, so it sits detached in the advantage; k2 as a loss gives the same gradient as that, sample by sample; k3
as a loss gives the gradient of the *forward* KL(p || q). The Rao-Blackwell estimator (Amini et al., 2025) is the exact
next-token KL at every visited prefix: the mean of k1 there, in value and in gradient, without its variance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenScores:
    """What a model says of N sampled tokens."""

    logprobs: Tensor
    """Logprob of the sampled token ``[N]``."""
    distribution: Tensor
    """Logprobs of all V tokens at the same position ``[N, V]``."""


@dataclass(frozen=True)
class KLPenalty:
    """The KL term of a step."""

    per_token: Tensor
    """Estimates ``[N]``; they carry gradient unless ``in_advantage``."""
    in_advantage: bool
    """Subtract it, detached, from the advantage; else add it to the loss."""
    coefficient: float
    """beta, nats of reward per nat of KL."""


@dataclass(frozen=True)
class KLEstimator:
    """One row of the table."""

    per_token: Callable[[TokenScores, TokenScores], Tensor]
    """(policy, reference) -> estimate per token ``[N]``."""
    in_advantage: bool


def k1(log_ratio: Tensor) -> Tensor:
    """-log r with ``log_ratio`` = log p - log q under samples of q: unbiased, variance 2K for unit Gaussians K apart."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(log r)^2 / 2: biased (K + K^2 / 2 for unit Gaussians), never negative."""
    return log_ratio**2 / 2


def k3(log_ratio: Tensor) -> Tensor:
    """(r - 1) - log r: unbiased, never negative, variance e^(2K) - 1 - 2K for unit Gaussians: explodes as the two part."""
    return log_ratio.exp() - 1 - log_ratio


def rao_blackwell(policy: Tensor, reference: Tensor) -> Tensor:
    """sum_v q(v) (log q(v) - log p(v)) ``[N]`` from the logprobs ``[N, V]`` of both: the exact KL at each position."""
    return (policy.exp() * (policy - reference)).sum(dim=-1)


def _of_ratio(estimator: Callable[[Tensor], Tensor]) -> Callable[[TokenScores, TokenScores], Tensor]:
    return lambda policy, reference: estimator(reference.logprobs - policy.logprobs)


KL_ESTIMATORS: dict[str, KLEstimator] = {
    "k1": KLEstimator(_of_ratio(k1), in_advantage=True),
    "k2": KLEstimator(_of_ratio(k2), in_advantage=False),
    "k3": KLEstimator(_of_ratio(k3), in_advantage=False),
    "rao_blackwell": KLEstimator(lambda q, p: rao_blackwell(q.distribution, p.distribution), in_advantage=False),
}
"""Selected by ``rl.train.kl_estimator``."""
