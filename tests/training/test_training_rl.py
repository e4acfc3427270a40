"""Promises of the RL step.

1. The gradient of the whole loss equals finite differences.
2. How segments are packed does not matter.
3. Every sampled token of every segment of a chain trains with the chain's advantage, and no other token.
4. Replayed routing is used; trainer logprobs under it equal the behaviour logprobs of the same weights.
5. Saved and loaded, a trainer goes on bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from etude.algorithms.policy import policy_loss
from etude.algorithms.router_replay import ReplayRouting
from etude.base.records import Category, Effort, Outcome, Rollout, RolloutGroup, Segment
from etude.models.config import ModelConfig
from etude.models.deepseek import DeepseekModel, initialise
from etude.training.rl import RLTrainConfig, RLTrainer
from etude.training.rl_batch import pack_groups

CONFIG = ModelConfig(
    vocab_size=37, hidden_size=24, num_hidden_layers=3, intermediate_size=32, moe_intermediate_size=16, kv_lora_rank=8,
    qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4, num_nextn_predict_layers=0,
)  # fmt: skip
EXACT = RLTrainConfig(served_dtype="float32", kl_coefficient=0.0, lr=1e-3, warmup_steps=0)


def model(seed: int = 0) -> DeepseekModel:
    made = DeepseekModel(CONFIG)
    initialise(made, seed)
    for name, parameter in made.named_parameters():
        if name.endswith((".o", ".down")):
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(seed + 1))
    return made


@torch.no_grad()
def segment(made: DeepseekModel, rng: np.random.Generator, version: int = 0, end: str = "stop") -> Segment:
    """A random segment with the logprobs and experts that ``made`` gives it."""
    size = int(rng.integers(6, 14))
    tokens = rng.integers(0, 37, size).astype(np.int32)
    sampled = rng.random(size) < 0.5
    sampled[0], sampled[-1] = False, True
    out = made(torch.from_numpy(tokens.astype(np.int64))[None])
    logprobs = made.logits(out.hidden[0]).log_softmax(-1)
    behaviour = np.zeros(size, np.float32)
    behaviour[1:] = logprobs[torch.arange(size - 1), torch.from_numpy(tokens[1:].astype(np.int64))].numpy()
    experts = out.experts[0].numpy().astype(np.int16)
    experts[-1] = -1
    return Segment(
        tokens=tokens, sampled=sampled, logprobs=np.where(sampled, behaviour, 0).astype(np.float32),
        versions=np.where(sampled, version, -1).astype(np.int32), experts=experts, end=end,
    )  # fmt: skip


def group(
    made: DeepseekModel, seed: int, segments: int = 1, advantages: tuple[float, ...] = (0.5, -0.5)
) -> RolloutGroup:
    rng = np.random.default_rng(seed)
    rollouts = tuple(
        Rollout(
            id=f"r{seed}-{i}", task_id=f"t{seed}", category=Category.DEBUGGING, turns=(), effort=Effort(),
            segments=tuple(segment(made, rng) for _ in range(segments)), outcome=Outcome.COMPLETED,
        )
        for i in range(len(advantages))
    )  # fmt: skip
    return RolloutGroup(task_id=f"t{seed}", rollouts=rollouts, advantages=advantages)


def _loss(made: DeepseekModel, groups: list[RolloutGroup], row_length: int) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for batch in pack_groups(groups, row_length=row_length, rows_per_batch=2, moe_layers=2, top_k=2):
        predicted = batch.sampled[:, 1:]
        out = made(
            batch.tokens, positions=batch.positions, mask=batch.mask,
            routing=ReplayRouting(batch.experts.flatten(0, 1), 0.0),
        )  # fmt: skip
        logprobs = made.logits(out.hidden[:, :-1][predicted]).log_softmax(-1)
        chosen = logprobs.gather(1, batch.tokens[:, 1:][predicted][:, None])[:, 0]
        total = total + policy_loss(
            chosen, batch.behaviour[:, 1:][predicted], batch.advantages[:, 1:][predicted], reference=None,
            kl_coefficient=0.0, truncation=5.0, normaliser=3.0,
        ).loss  # fmt: skip
    return total


@pytest.mark.parametrize(
    "name", ["head", "embedding", "blocks.1.mlp.gate_up", "blocks.2.attention.kv_b", "blocks.1.mlp.router"]
)
def test_gradient_equals_finite_differences(name: str) -> None:
    """Along the gradient of one parameter the central difference of -sum A logp (weights are 1 on-policy) is its norm."""
    made = model()
    groups = [group(made, 1), group(made, 2)]
    _loss(made, groups, 64).backward()
    parameter = dict(made.named_parameters())[name]
    assert parameter.grad is not None
    norm = float(parameter.grad.norm())
    direction, reach = parameter.grad / norm, 0.02
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter += sign * reach * direction
            values.append(_objective(made, groups))
            parameter -= sign * reach * direction
    assert (values[0] - values[1]) / (2 * reach) == pytest.approx(norm, rel=0.02)


@torch.no_grad()
def _objective(made: DeepseekModel, groups: list[RolloutGroup]) -> float:
    total = 0.0
    for g in groups:
        for rollout, advantage in zip(g.rollouts, g.advantages, strict=True):
            for s in rollout.segments:
                tokens = torch.from_numpy(s.tokens.astype(np.int64))
                experts = torch.from_numpy(s.experts.astype(np.int64))
                logprobs = made.logits(made(tokens[None], routing=ReplayRouting(experts, 0.0)).hidden[0]).log_softmax(
                    -1
                )
                picked = logprobs[:-1].gather(1, tokens[1:, None])[:, 0][torch.from_numpy(s.sampled[1:])]
                total -= advantage * float(picked.sum()) / 3.0
    return total


def test_packing_does_not_matter() -> None:
    made = model()
    groups = [group(made, seed, segments=2) for seed in range(4)]
    gradients = []
    for row_length in (1, 16, 200):
        made.zero_grad(set_to_none=True)
        _loss(made, groups, row_length).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in made.parameters() if p.grad is not None]))
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6)
    assert torch.allclose(gradients[0], gradients[2], atol=1e-6)


def test_credit_reaches_all_sampled_tokens_of_the_chain_and_no_other() -> None:
    made = model()
    chain = group(made, 5, segments=3, advantages=(0.75, -0.25, 0.0))
    (batch, *rest) = pack_groups([chain], row_length=500, rows_per_batch=8, moe_layers=2, top_k=2)
    assert not rest
    expected = {0.75: 0, -0.25: 0}
    for rollout, advantage in zip(chain.rollouts, chain.advantages, strict=True):
        if advantage:
            expected[advantage] += sum(int(s.sampled.sum()) for s in rollout.segments)
    for advantage, count in expected.items():
        assert int((batch.sampled & (batch.advantages == advantage)).sum()) == count
    assert int(batch.sampled.sum()) == sum(expected.values()), "a chain without advantage trains nothing"


def test_trainer_and_behaviour_agree_on_fresh_samples() -> None:
    trainer = RLTrainer(model(), EXACT)
    groups = [group(trainer.model, seed) for seed in range(3)]
    metrics = trainer.step(groups)
    assert metrics["logprob_gap_mean"] < 1e-6
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-6)
    assert (metrics["staleness_max"], trainer.version) == (0.0, 1)


def test_a_step_raises_the_probability_of_what_was_good() -> None:
    trainer = RLTrainer(model(), EXACT)
    good = group(trainer.model, 8, advantages=(1.0, -1.0))
    before = _objective(trainer.model, [good])
    for _ in range(5):
        trainer.step([good])
    assert _objective(trainer.model, [good]) < before


def test_a_kl_term_on_every_third_batch_weighs_three_times_as_much() -> None:
    """With one batch a step: the same as thrice the coefficient on versions 0, 3, ... and none on the others."""
    groups = [group(model(), seed, segments=2) for seed in range(2)]
    config = EXACT.model_copy(update={"lr": 0.05})
    spread = RLTrainer(model(), config.model_copy(update={"kl_coefficient": 0.3, "reference_every": 3}))
    switched = RLTrainer(model(), config)
    for version in range(5):
        switched.config = config.model_copy(update={"kl_coefficient": 0.9 if version % 3 == 0 else 0.0})
        ours, theirs = spread.step(groups), switched.step(groups)
        assert (ours["kl"] != 0) == (version == 3)  # at version 0 policy and reference are one
        assert ours["grad_norm"] == theirs["grad_norm"]
    assert all(torch.equal(a, b) for a, b in zip(spread.model.parameters(), switched.model.parameters(), strict=True))


def test_a_saved_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    first, second = RLTrainer(model(), RLTrainConfig(lr=1e-3)), RLTrainer(model(9), RLTrainConfig(lr=1e-3))
    groups = [[group(first.model, 10 * step + i) for i in range(2)] for step in range(4)]
    for step in range(2):
        first.step(groups[step])
    first.save(tmp_path / "step.pt", ["t10", "t11"])
    assert second.load(tmp_path / "step.pt") == ["t10", "t11"]
    for step in range(2, 4):
        first.step(groups[step])
        second.step(groups[step])
    assert second.version == first.version == 4
    a, b = first.served_state(), second.served_state()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_served_weights_are_what_the_trainer_computes_with() -> None:
    trainer = RLTrainer(model(), RLTrainConfig(lr=1e-2))
    trainer.step([group(trainer.model, 3)])
    parameters = dict(trainer.model.named_parameters())
    assert torch.equal(parameters["head"], trainer.served_state()["lm_head.weight"].float())
