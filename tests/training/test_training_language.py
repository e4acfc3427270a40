"""Promises: packed documents train like separate ones; frozen MTP leaves the trunk alone; MTP and SFT losses fall."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rl_groups import model as random_model

from etude.data.packing import Document, Packer
from etude.models.config import ModelConfig
from etude.models.deepseek import DeepseekModel
from etude.training.language import StageConfig, evaluate_loss, language_loss, train_stage, update_balance
from etude.training.optim import OptimConfig

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, intermediate_size=48, moe_intermediate_size=16, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
)  # fmt: skip


def model(seed: int = 0) -> DeepseekModel:
    return random_model(seed, CONFIG)


def documents(count: int, seed: int, *, pattern: bool = False) -> list[Document]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        size = int(rng.integers(5, 20))
        start = int(rng.integers(0, 61))
        ids = (start + 3 * np.arange(size)) % 61 if pattern else rng.integers(0, 61, size)
        made.append((ids.astype(np.int32), np.ones(size, np.float32)))
    return made


def test_packed_equals_separate() -> None:
    made, docs = model(), documents(9, seed=1)
    (batch,) = Packer(64, 8).batches(docs, keep_last=True)
    packed, _ = language_loss(made, batch, "off", 0.0)
    total = tokens = 0.0
    for ids, _ in docs:
        row = torch.from_numpy(ids.astype(np.int64))[None]
        logits = made.logits(made(row).hidden[0, :-1])
        total += float(torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum"))
        tokens += len(ids) - 1
    assert float(packed) == pytest.approx(total / tokens, rel=1e-5)


def test_frozen_mtp_gives_the_trunk_and_heads_no_gradient() -> None:
    made = model()
    (batch,) = Packer(64, 8).batches(documents(9, seed=2), keep_last=True)
    only_main = _gradients(made, batch, "off")
    frozen = _gradients(made, batch, "frozen")
    joint = _gradients(made, batch, "joint")
    trunk = [name for name in only_main if not name.startswith("mtp") and name != "embedding"]
    assert all(torch.allclose(only_main[name], frozen[name], atol=1e-7) for name in trunk)
    assert any(not torch.allclose(only_main[name], joint[name], atol=1e-6) for name in trunk)
    assert frozen["mtp.0.merge"].abs().sum() > 0


def _gradients(made: DeepseekModel, batch, mode) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    made.zero_grad(set_to_none=True)
    loss, _ = language_loss(made, batch, mode, 0.3)
    loss.backward()
    return {n: (p.grad.clone() if p.grad is not None else torch.zeros_like(p)) for n, p in made.named_parameters()}


def test_a_stage_learns_a_pattern_and_mtp_follows_the_main_head() -> None:
    made = model()
    held = list(Packer(64, 4).batches(documents(24, seed=5, pattern=True)))
    before = evaluate_loss(made, held)
    config = StageConfig(
        steps=60, row_length=64, rows_per_step=8, mtp="joint", mtp_from=0.5, optim=OptimConfig(lr=1e-2)
    )
    reports = list(train_stage(made, config, documents(4000, seed=6, pattern=True)))
    assert len(reports) == 60
    assert evaluate_loss(made, held) < before - 2.0
    with_mtp = [r for r in reports if r.mtp_loss > 0]
    assert len(with_mtp) == 30
    assert with_mtp[-1].mtp_loss < with_mtp[0].mtp_loss


def test_the_same_seed_gives_the_same_run() -> None:
    config = StageConfig(steps=5, row_length=64, rows_per_step=4)
    runs = [[r.train_loss for r in train_stage(model(), config, documents(200, seed=7))] for _ in range(2)]
    assert runs[0] == runs[1]


def test_balance_moves_against_the_load() -> None:
    made = model()
    load = torch.tensor([[2.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5]])
    update_balance(made, load, 0.1)
    bias = made.blocks[1].mlp.correction_bias
    assert bias.tolist() == pytest.approx([-0.1, 0.1, 0, 0, 0, 0, 0, 0.1])
