"""Promises of the whole RL loss.

1. Its gradient equals finite differences, for every algorithm and KL estimator, with stale samples and a reference.
2. How segments are packed does not matter, nor whether they share prefixes, nor whether activations are recomputed.
3. The chain's advantage reaches every sampled token of every segment of the chain, summaries included, and no other token.
4. Overlong masking is off by default and leaves out what a limit cut short.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rl_groups import group, model
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from etude.algorithms.router_replay import ReplayRouting
from etude.base.records import RolloutGroup, Segment
from etude.models.deepseek import DeepseekModel
from etude.training.rl import RLTrainConfig
from etude.training.rl_batch import RLBatch, pack_groups
from etude.training.rl_loss import RLLossConfig, batch_loss

BETA, CAP, CONSTANT = 0.3, 1.02, 3.0


def packed(groups: list[RolloutGroup], row_length: int = 64, mask_overlong: bool = False) -> list[RLBatch]:
    return pack_groups(
        groups, row_length=row_length, rows_per_batch=2, moe_layers=2, top_k=2, mask_overlong=mask_overlong
    )


def config(**keys: object) -> RLLossConfig:
    base = {"truncation": CAP, "token_normaliser": CONSTANT, "kl_coefficient": BETA, "replay_alpha": 0.0}
    return RLLossConfig.model_validate({**base, **keys})


def whole_loss(
    made: DeepseekModel, reference: DeepseekModel | None, groups: list[RolloutGroup], settings: RLLossConfig
) -> Tensor:
    chains = sum(len(g.rollouts) for g in groups)
    return torch.stack(
        [batch_loss(made, reference, batch, settings, chains).policy.loss for batch in packed(groups)]
    ).sum()


# ------------------------------------------------------------------------------------- a second implementation


def scores(made: DeepseekModel, segment: Segment) -> tuple[Tensor, Tensor]:
    """(logprob of each sampled token, all logprobs at its position) of one segment alone."""
    tokens, experts = (torch.from_numpy(np.asarray(a).astype(np.int64)) for a in (segment.tokens, segment.experts))
    every = made.logits(made(tokens[None], routing=ReplayRouting(experts, 0.0)).hidden[0]).log_softmax(-1)[:-1]
    at = torch.from_numpy(segment.sampled[1:])
    return every.gather(1, tokens[1:, None])[:, 0][at], every[at]


class Surrogate:
    """The loss as a plain sum over segments with all that is detached in it frozen at the weights it was made from."""

    @torch.no_grad()
    def __init__(
        self, made: DeepseekModel, reference: DeepseekModel, groups: list[RolloutGroup], settings: RLLossConfig
    ) -> None:
        self.made, self.estimator = made, settings.kl_estimator
        chains = sum(len(g.rollouts) for g in groups)
        self.terms: list[tuple[Segment, Tensor, Tensor, Tensor, Tensor]] = []
        for g in groups:
            for rollout, advantage in zip(g.rollouts, g.advantages, strict=True):
                divisor = rollout.sampled_tokens if settings.algorithm == "grpo" else CONSTANT
                for segment in rollout.segments:
                    now, _ = scores(made, segment)
                    old = torch.from_numpy(segment.logprobs[segment.sampled])
                    weight = (now - old).exp().clamp(max=CAP) / (divisor * chains)
                    target, distribution = scores(reference, segment)
                    signal = torch.full_like(now, advantage)
                    if self.estimator == "k1":
                        signal = signal - BETA * (now - target)
                    self.terms.append((segment, weight, signal, target, distribution))

    def __call__(self) -> float:
        total = 0.0
        for segment, weight, signal, target, distribution in self.terms:
            now, every = scores(self.made, segment)
            kl = {
                "k1": torch.zeros_like(now),
                "k2": (now - target) ** 2 / 2,
                "k3": (target - now).exp() - 1 - (target - now),
                "rao_blackwell": (every.exp() * (every - distribution)).sum(-1),
            }[self.estimator]
            total += float((weight * (BETA * kl - signal * now)).sum())
        return total


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "rao_blackwell"])
@pytest.mark.parametrize("algorithm", ["dr_grpo", "grpo"])  # rloo and reinforce differ in the advantages alone
def test_gradient_equals_finite_differences(algorithm: str, estimator: str) -> None:
    """Two groups of chains of two segments, sampled by other weights, some importance weights at the cap. Along the gradient
    of a parameter, the central difference of the second implementation is the gradient's norm."""
    sampler, made, reference = model(), model(), model(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    groups = [group(sampler, 1, segments=2, opening=(3, 1, 4, 1, 5)), group(sampler, 2, segments=2)]
    settings = config(algorithm=algorithm, kl_estimator=estimator)
    for batch in packed(groups):
        weights = batch_loss(made, reference, batch, settings, 4).policy.weights
        assert 0.1 < float((weights == CAP).float().mean()) < 0.9
    whole_loss(made, reference, groups, settings).backward()
    surrogate = Surrogate(made, reference, groups, settings)
    for name in ("head", "embedding", "blocks.1.mlp.gate_up", "blocks.2.attention.kv_b", "blocks.1.mlp.router"):
        parameter = dict(made.named_parameters())[name]
        assert parameter.grad is not None
        norm = float(parameter.grad.norm())
        direction, reach = parameter.grad / norm, 0.02
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter += sign * reach * direction
                values.append(surrogate())
                parameter -= sign * reach * direction
        assert (values[0] - values[1]) / (2 * reach) == pytest.approx(norm, rel=0.02), name


def test_neither_packing_nor_sharing_matters() -> None:
    """Row length 1 leaves every segment alone in its row."""
    made = model()
    groups = [group(made, seed, segments=2, opening=(3, 1, 4, 1, 5, 9, 2)) for seed in range(4)]
    gradients, positions, in_segments = [], [], []
    for row_length in (1, 24, 200):
        made.zero_grad(set_to_none=True)
        batches = packed(groups, row_length)
        for batch in batches:
            batch_loss(made, None, batch, config(), 8).policy.loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in made.parameters() if p.grad is not None]))
        positions.append(sum(batch.num_positions for batch in batches))
        in_segments.append(sum(batch.num_segment_tokens for batch in batches))
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6)
    assert torch.allclose(gradients[0], gradients[2], atol=1e-6)
    assert positions[0] == in_segments[0] == in_segments[2] > positions[1] > positions[2]
    assert positions[2] <= in_segments[2] - 4 * 3 * 7, "four segments a group compute their opening once"


def test_a_prefix_with_other_experts_is_not_shared() -> None:
    made = model()
    same = group(made, 1, opening=(3, 1, 4, 1, 5))
    first, second = same.rollouts
    other = np.array(second.segments[0].experts)
    other[2] = (other[2] + 1) % 4
    moved = second.model_copy(update={"segments": (second.segments[0].model_copy(update={"experts": other}),)})
    (shared,), (split,) = packed([same], 200), packed([same.model_copy(update={"rollouts": (first, moved)})], 200)
    assert split.num_positions == shared.num_positions + 3, "positions 2, 3 and 4 are computed twice"


class _Recomputed:
    """A model whose activations are thrown away and computed again in the backward pass, routing included."""

    def __init__(self, made: DeepseekModel) -> None:
        self.made, self.calls = made, 0

    def __call__(self, tokens: Tensor, **keywords: object) -> SimpleNamespace:
        def forward(given: Tensor) -> Tensor:
            self.calls += 1
            hidden: Tensor = self.made(given, **keywords).hidden
            return hidden

        return SimpleNamespace(hidden=checkpoint(forward, tokens, use_reentrant=False))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.made.logits(hidden)


@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.0])
def test_replayed_routing_is_the_same_when_activations_are_recomputed(alpha: float) -> None:
    """With experts of other weights, so that the filter has something to put back; summary segments included."""
    sampler, made = model(), model(7)
    gradients, kept = [], []
    for wrapped in (made, _Recomputed(made)):
        made.zero_grad(set_to_none=True)
        for batch in packed([group(sampler, 1, segments=3)]):
            loss = batch_loss(wrapped, None, batch, config(replay_alpha=alpha), 2)  # type: ignore[arg-type]
            loss.policy.loss.backward()
            kept.append(loss.routing.kept_share)
        gradients.append(torch.cat([p.grad.flatten() for p in made.parameters() if p.grad is not None]))
    assert torch.equal(gradients[0], gradients[1])
    assert kept[0] == kept[-1]
    assert (kept[0] == 1.0) == (alpha == 0.0)


# -------------------------------------------------------------------------------------------------------- credit


def test_credit_reaches_all_sampled_tokens_of_the_chain_and_no_other() -> None:
    made = model()
    chain = group(made, 5, segments=3, advantages=(0.75, -0.25, 0.0), opening=(3, 1, 4))
    assert [s.end for s in chain.rollouts[0].segments] == ["summary", "summary", "stop"]
    (batch,) = packed([chain], 500)
    sampled, found = batch.sampled, []
    for number in sampled.segments.unique():
        of = sampled.segments == number
        credit, tokens = sampled.advantages[of].unique(), sampled.chain_tokens[of].unique()
        found.append((sampled.tokens[of].tolist(), float(credit), int(tokens)))
    expected = [
        (s.tokens[s.sampled].tolist(), advantage, rollout.sampled_tokens)
        for rollout, advantage in zip(chain.rollouts[:2], chain.advantages, strict=False)
        for s in rollout.segments
    ]
    assert sorted(found) == sorted(expected), "a chain without advantage trains nothing"


def test_the_gradient_of_a_token_is_its_chains_advantage_and_of_an_unsampled_one_nothing() -> None:
    """d loss / d logits = -A / (constant * chains) * (onehot - softmax), summed over what a position predicts."""
    made = model()
    chain = group(made, 6, segments=3, advantages=(1.0, -0.5), opening=(3, 1, 4))
    reached = 0
    for batch in packed([chain], 500):
        out = made(
            batch.tokens, positions=batch.positions, reach=batch.reach,
            routing=ReplayRouting(batch.experts.flatten(0, 1), 0.0),
        )  # fmt: skip
        logits = made.logits(out.hidden).detach().requires_grad_(True)
        batch_loss(_Fixed(made, logits), None, batch, config(truncation=100.0), 2).policy.loss.backward()  # type: ignore[arg-type]
        assert logits.grad is not None
        expected = torch.zeros_like(logits.grad).flatten(0, 1)
        probabilities = logits.detach().flatten(0, 1).softmax(-1)
        for source, token, advantage in zip(
            batch.sampled.source, batch.sampled.tokens, batch.sampled.advantages, strict=True
        ):
            pull = -probabilities[source]
            pull[token] += 1
            expected[source] -= advantage * pull / (CONSTANT * 2)
            reached += 1
        assert torch.allclose(logits.grad.flatten(0, 1), expected, atol=1e-5)
    assert reached == sum(r.sampled_tokens for r in chain.rollouts)


class _Fixed:
    """Stands for a model whose logits are a leaf tensor ``[B, S, V]``."""

    def __init__(self, made: DeepseekModel, logits: Tensor) -> None:
        self.config, self._logits = made.config, logits

    def __call__(self, *_: object, **__: object) -> _Fixed:
        return self

    @property
    def hidden(self) -> Tensor:
        return self._logits

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def test_overlong_masking_is_off_by_default_and_leaves_out_whole_chains() -> None:
    made = model()
    cut = group(made, 7, segments=2, ends=("budget", "stop"))
    everything = sum(len(batch.sampled.tokens) for batch in packed([cut]))
    assert everything == sum(r.sampled_tokens for r in cut.rollouts)
    masked = sum(len(batch.sampled.tokens) for batch in packed([cut], mask_overlong=True))
    assert masked == cut.rollouts[1].sampled_tokens


def test_the_defaults_are_those_that_the_page_justifies() -> None:
    """docs/algorithm.md; a change here is a change of every recipe that leaves them out."""
    defaults = RLTrainConfig()
    assert (defaults.algorithm, defaults.kl_estimator, defaults.reference) == ("dr_grpo", "k1", "frozen")
    assert (defaults.kl_coefficient, defaults.truncation, defaults.token_normaliser) == (0.01, 5.0, 64.0)
    assert (defaults.replay_alpha, defaults.mask_overlong) == (0.5, False)
