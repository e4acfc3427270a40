"""Promises: Newton-Schulz orthogonalises; the schedule has its three parts; Muon takes matrices and nothing else."""

from __future__ import annotations

import pytest
import torch

from etude.models.config import ModelConfig
from etude.models.deepseek import DeepseekModel, initialise
from etude.training.optim import Muon, OptimConfig, build_optimizers, orthogonalise, schedule


def test_singular_values_are_driven_to_one() -> None:
    for shape in ((12, 30), (30, 12), (4, 16, 8)):
        matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalise(matrix))
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_schedule_rises_stays_and_falls() -> None:
    config = OptimConfig(warmup=0.1, decay=0.5, final=0.1)
    factors = [schedule(config, step, 100) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[20:50] == [1.0] * 30
    assert factors == sorted(factors[:10]) + factors[10:50] + sorted(factors[50:], reverse=True)
    assert factors[-1] == pytest.approx(0.1 + 0.9 * 1 / 50)


def test_muon_takes_the_matrices_and_every_parameter_has_one_owner() -> None:
    model = DeepseekModel(ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2))
    initialise(model, 0)
    optimizers = build_optimizers(OptimConfig(name="muon"), model)
    owned = [id(p) for o in optimizers for g in o.param_groups for p in g["params"]]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())
    (muon,) = [o for o in optimizers if isinstance(o, Muon)]
    taken = {id(p) for p in muon.param_groups[0]["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in taken}
    assert "blocks.1.mlp.gate_up" in names
    assert not names & {"embedding", "head", "blocks.1.mlp.router"}
