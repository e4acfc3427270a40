"""The policy-gradient loss: truncated importance weights, a KL penalty, a constant normaliser.

N sampled tokens of all chains of a step, flattened. ``behaviour`` is the engine's own logprob at the time of sampling,
never a re-forward (Composer 2 report, section 4.1; PipelineRL).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from etude.algorithms.kl import KLPenalty


@dataclass(frozen=True)
class PolicyLoss:
    loss: Tensor
    """Scalar to differentiate."""
    weights: Tensor
    """Truncated importance weights ``[N]``, detached."""
    kl: Tensor
    """Per-token estimate of KL(policy || reference) ``[N]``, detached; zeros without a reference."""


def policy_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    penalty: KLPenalty | None = None,
    truncation: float,
    normaliser: float,
    token_weights: Tensor | None = None,
) -> PolicyLoss:
    """-(1 / normaliser) * sum_t c_t * w_t * (A_t * log pi_t - beta * KL_t), all ``[N]`` float32; c_t is 1 by default.

    w_t = min(pi_t / mu_t, truncation), detached. A penalty that sits in the advantage (k1) instead gives
    w_t * (A_t - beta * k1_t) * log pi_t with k1 detached. The normaliser is a constant of the run, so that neither long nor
    short responses are favoured (Dr. GRPO); ``token_weights`` c_t bring another choice in (GRPO's 1 / |o_i|).
    """
    weights = importance_weights(logprobs, behaviour, truncation)
    kl = torch.zeros_like(behaviour) if penalty is None else penalty.per_token.detach()
    signal = advantages - penalty.coefficient * kl if penalty is not None and penalty.in_advantage else advantages
    gain = weights * signal * logprobs
    if penalty is not None and not penalty.in_advantage:
        gain = gain - weights * penalty.coefficient * penalty.per_token
    if token_weights is not None:
        gain = gain * token_weights
    return PolicyLoss(loss=-gain.sum() / normaliser, weights=weights, kl=kl)


def importance_weights(logprobs: Tensor, behaviour: Tensor, truncation: float) -> Tensor:
    """min(exp(log pi - log mu), truncation), detached (truncated importance sampling; PipelineRL uses 5)."""
    return (logprobs.detach() - behaviour).exp().clamp(max=truncation)


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (N sum w^2) in (0, 1]: 1 when all samples count alike (PipelineRL's health metric)."""
    total, squares = float(weights.sum()), float((weights**2).sum())
    return total * total / (len(weights) * squares) if squares > 0 else 0.0
