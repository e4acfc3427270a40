"""Promises of the RL step.

1. Replayed routing is used; trainer logprobs under it equal the behaviour logprobs of the same weights.
2. Every algorithm and every KL estimator raises the probability of what was good.
3. The reference is frozen, absent or a moving average, as configured.
4. Saved and loaded, a trainer goes on bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rl_groups import group, model

from etude.algorithms.router_replay import ReplayRouting
from etude.base.config import resolve
from etude.base.errors import CheckpointError, ConfigError
from etude.base.records import RolloutGroup
from etude.models.deepseek import DeepseekModel
from etude.training.rl import RLTrainConfig, RLTrainer

EXACT = RLTrainConfig(served_dtype="float32", kl_coefficient=0.0, lr=1e-3, warmup_steps=0)


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


def test_trainer_and_behaviour_agree_on_fresh_samples() -> None:
    trainer = RLTrainer(model(), EXACT)
    groups = [group(trainer.model, seed) for seed in range(3)]
    metrics = trainer.step(groups)
    assert metrics["logprob_gap_mean"] < 1e-6
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-6)
    assert (metrics["staleness_max"], trainer.version) == (0.0, 1)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "rao_blackwell"])
@pytest.mark.parametrize("algorithm", ["dr_grpo", "grpo"])  # rloo and reinforce differ in the advantages alone
def test_a_step_raises_the_probability_of_what_was_good(algorithm: str, estimator: str) -> None:
    row = {"algorithm": algorithm, "kl_estimator": estimator, "kl_coefficient": 0.01}
    trainer = RLTrainer(model(), EXACT.model_copy(update=row))
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


def _distance(a: DeepseekModel, b: DeepseekModel) -> float:
    return sum(float((p - q).abs().sum()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("decay", [0.0, 0.75, 1.0])
def test_a_moving_reference_follows_the_policy_by_its_decay(decay: float) -> None:
    """After two steps it is d^2 start + d (1 - d) first + (1 - d) second."""
    trainer = RLTrainer(model(), EXACT.model_copy(update={"reference": "moving_average", "reference_decay": decay}))
    versions = [[p.detach().clone() for p in trainer.model.parameters()]]
    for step in range(2):
        trainer.step([group(trainer.model, step)])
        versions.append([p.detach().clone() for p in trainer.model.parameters()])
    assert trainer.reference is not None
    shares = (decay**2, decay * (1 - decay), 1 - decay)
    for number, held in enumerate(trainer.reference.parameters()):
        expected = sum(share * version[number] for share, version in zip(shares, versions, strict=True))
        assert torch.allclose(held, torch.as_tensor(expected), atol=1e-6)


def test_the_default_reference_stays_where_it_was_and_none_is_none() -> None:
    trainer = RLTrainer(model(), RLTrainConfig(served_dtype="float32"))
    trainer.step([group(trainer.model, 1)])
    assert trainer.reference is not None
    assert _distance(trainer.reference, model()) == 0.0
    assert _distance(trainer.model, model()) > 0.0
    without = RLTrainer(model(), EXACT.model_copy(update={"reference": "none"}))
    assert without.step([group(without.model, 1)])["kl"] == 0.0
    with pytest.raises(ConfigError, match=r"reference is none, but kl_coefficient is 0.01"):
        resolve(RLTrainConfig, {"reference": "none"}, source="recipe")


def test_a_checkpoint_without_reference_does_not_pass_for_one_with(tmp_path: Path) -> None:
    first = RLTrainer(model(), EXACT.model_copy(update={"reference": "none"}))
    first.save(tmp_path / "step.pt", [])
    with pytest.raises(CheckpointError, match=r"has no reference; go on with train.reference=none"):
        RLTrainer(model(), EXACT).load(tmp_path / "step.pt")


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
