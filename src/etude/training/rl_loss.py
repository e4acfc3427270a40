"""The whole RL loss of one packed batch, as a function of the weights: forward with replayed routing, KL, policy loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from etude.algorithms.advantages import ALGORITHMS
from etude.algorithms.kl import KL_ESTIMATORS, KLPenalty, TokenScores
from etude.algorithms.policy import PolicyLoss, policy_loss
from etude.algorithms.router_replay import ReplayRouting
from etude.base.config import Config
from etude.models.deepseek import DeepseekModel
from etude.training.rl_batch import RLBatch


class RLLossConfig(Config):
    """The algorithm. The report states none of the values; docs/algorithm.md gives our reasons."""

    algorithm: Literal["dr_grpo", "grpo", "rloo", "reinforce"] = "dr_grpo"
    """Row of ``algorithms.advantages.ALGORITHMS``: advantages and length term."""
    kl_estimator: Literal["k1", "k2", "k3", "rao_blackwell"] = "k1"
    """Row of ``algorithms.kl.KL_ESTIMATORS``: k1 sits detached in the advantage, the others are added to the loss."""
    kl_coefficient: float = Field(0.01, ge=0.0)
    """beta of the KL against the reference, in nats per token."""
    truncation: float = Field(5.0, gt=0.0)
    """Upper bound of the importance weight."""
    token_normaliser: float = Field(64.0, gt=0.0)
    """Constant that the loss of a rollout is divided by, near a usual number of sampled tokens."""
    replay_alpha: float = Field(0.5, ge=0.0, le=1.0)
    """Plausibility threshold of router replay: 0 pure replay, 1 the trainer's own routing."""


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch with what its metrics need; N sampled tokens."""

    policy: PolicyLoss
    logprobs: Tensor
    """Of the sampled tokens under the current weights ``[N]``, detached."""
    entropy: Tensor
    """Of the policy at their positions ``[N]``, nats, detached."""
    routing: ReplayRouting
    """Counts what the plausibility filter kept."""


def batch_loss(
    model: DeepseekModel,
    reference: DeepseekModel | None,
    batch: RLBatch,
    config: RLLossConfig,
    num_chains: int,
    kl_scale: float = 1.0,
) -> BatchLoss:
    """Loss of one batch of a step of ``num_chains`` chains; the losses of a step's batches add up.

    ``num_chains`` is known before packing, so that neither packing nor which chains carry signal changes the scale. Without
    ``reference`` or with ``kl_coefficient`` 0 there is no KL term, and no second forward pass; ``kl_scale`` multiplies the term,
    for batches that carry it for others.
    """
    sampled = batch.sampled
    routing = ReplayRouting(batch.experts.flatten(0, 1), config.replay_alpha)
    scores = sampled_scores(model, batch, routing)
    penalty = _penalty(scores, reference, batch, config, kl_scale)
    token_weights = None
    if ALGORITHMS[config.algorithm].per_response_mean:  # 1 / |o_i| in place of the constant
        token_weights = config.token_normaliser / sampled.chain_tokens
    result = policy_loss(
        scores.logprobs, sampled.behaviour, sampled.advantages, penalty=penalty, truncation=config.truncation,
        normaliser=config.token_normaliser * num_chains, token_weights=token_weights,
    )  # fmt: skip
    distribution = scores.distribution.detach()
    entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return BatchLoss(result, scores.logprobs.detach(), entropy, routing)


def sampled_scores(model: DeepseekModel, batch: RLBatch, routing: ReplayRouting) -> TokenScores:
    """What ``model`` says of each sampled token given what precedes it in its segment."""
    out = model(
        batch.tokens,
        positions=batch.positions,
        reach=batch.reach,
        routing=routing,
        max_position=batch.tokens.shape[1],
    )
    hidden = out.hidden.flatten(0, 1).index_select(0, batch.sampled.source)
    distribution = model.logits(hidden).log_softmax(dim=-1)
    chosen = distribution.gather(1, batch.sampled.tokens[:, None]).squeeze(1)
    return TokenScores(chosen, distribution)


def _penalty(
    scores: TokenScores, reference: DeepseekModel | None, batch: RLBatch, config: RLLossConfig, scale: float
) -> KLPenalty | None:
    if reference is None or config.kl_coefficient == 0:
        return None
    with torch.no_grad():
        replay = ReplayRouting(batch.experts.flatten(0, 1), config.replay_alpha)
        against = sampled_scores(reference, batch, replay)
    estimator = KL_ESTIMATORS[config.kl_estimator]
    return KLPenalty(estimator.per_token(scores, against), estimator.in_advantage, scale * config.kl_coefficient)
