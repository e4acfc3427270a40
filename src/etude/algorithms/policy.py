"""The policy-gradient loss: truncated importance weights, k1 in the advantage, a constant normaliser.

N sampled tokens of all chains of a step, flattened. ``behaviour`` is the engine's own logprob at the time of sampling,
never a re-forward (spec 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    loss: Tensor
    """Scalar to differentiate."""
    weights: Tensor
    """Truncated importance weights ``[N]``, detached."""
    kl: Tensor
    """Per-token k1 estimate log pi - log reference ``[N]``, detached; zeros without a reference."""


def policy_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    reference: Tensor | None,
    kl_coefficient: float,
    truncation: float,
    normaliser: float,
) -> PolicyLoss:
    """-(1 / normaliser) * sum_t w_t * (A_t - beta * k1_t) * log pi_t, with w_t = min(pi_t / mu_t, truncation) detached.

    k1 = log pi - log reference sits *detached in the advantage*: there it has the gradient of the reverse KL, while as a
    differentiated loss its expected gradient is zero (spec 4.2). The normaliser is a constant of the run, so that neither
    long nor short responses are favoured (Dr. GRPO). All ``[N]``, float32.
    """
    weights = importance_weights(logprobs, behaviour, truncation)
    kl = (logprobs.detach() - reference) if reference is not None else torch.zeros_like(behaviour)
    signal = advantages - kl_coefficient * kl
    loss = -(weights * signal * logprobs).sum() / normaliser
    return PolicyLoss(loss=loss, weights=weights, kl=kl)


def importance_weights(logprobs: Tensor, behaviour: Tensor, truncation: float) -> Tensor:
    """min(exp(log pi - log mu), truncation), detached (truncated importance sampling; PipelineRL uses 5)."""
    return (logprobs.detach() - behaviour).exp().clamp(max=truncation)


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (N sum w^2) in (0, 1]: 1 when all samples count alike."""
    total, squares = float(weights.sum()), float((weights**2).sum())
    return total * total / (len(weights) * squares) if squares > 0 else 0.0


def k1(log_ratio: Tensor) -> Tensor:
    """KL(q||p) estimator -log r with ``log_ratio`` = log p - log q under samples of q: unbiased."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(log r)^2 / 2: biased, never negative."""
    return log_ratio**2 / 2


def k3(log_ratio: Tensor) -> Tensor:
    """(r - 1) - log r: unbiased, never negative, variance explodes as the two part."""
    return log_ratio.exp() - 1 - log_ratio
