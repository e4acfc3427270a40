"""Supervised training of one stage: continued pretraining, long context, SFT; MTP distilled beside the main loss.

One loop for all of them; what differs is the stream of documents, the row length and how MTP is trained:

* ``off``: MTP depths are left alone;
* ``frozen``: trunk and heads get no gradient from MTP (the mid-run stage of the report);
* ``joint``: MTP and trunk train together (its last two phases).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from etude.algorithms.language import (
    agreement,
    expert_balance,
    mtp_distillation,
    mtp_mask,
    weighted_cross_entropy,
)
from etude.base.config import Config
from etude.data.packing import Document, PackedBatch, Packer
from etude.models.deepseek import DeepseekModel, MTPDepth
from etude.models.moe import MixtureOfExperts
from etude.training.optim import OptimConfig, build_optimizers, step_optimizers


class StageConfig(Config):
    """One supervised stage."""

    steps: int = Field(100, ge=1)
    row_length: int = Field(256, ge=8)
    rows_per_step: int = Field(16, ge=1)
    optim: OptimConfig = OptimConfig()
    mtp: Literal["off", "frozen", "joint"] = "off"
    mtp_weight: float = 0.3
    mtp_from: float = 0.0
    """Share of the steps after which MTP is trained (the report starts from a mid-run checkpoint)."""
    balance_rate: float = 1e-3
    """Step of the router's correction bias towards equal load (auxiliary-loss-free balancing)."""
    max_seconds: float = 0.0
    """Stop early when the stage has run this long; 0 for no bound. The rate then still ends at its floor."""


@dataclass(frozen=True)
class StepReport:
    """What one step did, for metrics."""

    step: int
    train_loss: float
    mtp_loss: float
    mtp_agreement: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    max_load: float
    """Load of the busiest expert over the mean of its layer."""


def train_stage(model: DeepseekModel, config: StageConfig, documents: Iterable[Document]) -> Iterator[StepReport]:
    """Train ``model`` in place; yields after every step, so that the caller can log, evaluate or stop."""
    optimizers = build_optimizers(config.optim, model)
    batches = Packer(config.row_length, config.rows_per_step).batches(documents)
    started = time.monotonic()
    for step, batch in enumerate(itertools.islice(batches, config.steps)):
        clock = time.monotonic()
        progress = max(step / config.steps, (clock - started) / config.max_seconds if config.max_seconds else 0.0)
        if progress >= 1.0:
            return
        with_mtp = config.mtp != "off" and progress >= config.mtp_from
        loss, parts = language_loss(model, batch, config.mtp if with_mtp else "off", config.mtp_weight)
        torch.autograd.backward(loss)
        norm, lr = step_optimizers(config.optim, optimizers, model, int(progress * config.steps), config.steps)
        load = expert_balance(parts.experts, model.config.n_routed_experts)
        update_balance(model, load, config.balance_rate)
        yield StepReport(
            step=step,
            train_loss=float(parts.main),
            mtp_loss=float(parts.mtp),
            mtp_agreement=float(parts.agreement),
            grad_norm=norm,
            lr=lr,
            tokens=batch.num_tokens,
            seconds=time.monotonic() - clock,
            max_load=float(load.max()),
        )


@dataclass(frozen=True)
class LossParts:
    main: Tensor
    mtp: Tensor
    agreement: Tensor
    experts: Tensor


def language_loss(
    model: DeepseekModel, batch: PackedBatch, mtp: Literal["off", "frozen", "joint"], mtp_weight: float
) -> tuple[Tensor, LossParts]:
    """Weighted next-token loss of a packed batch, plus ``mtp_weight`` times the distillation loss of depth 1."""
    reach = batch.reach
    out = model(batch.tokens, positions=batch.positions, reach=reach, max_position=batch.tokens.shape[1])
    weights = batch.weights[:, 1:]
    if mtp == "off":
        kept = weights > 0
        logits = model.logits(out.hidden[:, :-1][kept])
        main = weighted_cross_entropy(logits, batch.tokens[:, 1:][kept], weights[kept])
        zero = torch.zeros(())
        return main, LossParts(main.detach(), zero, zero, out.experts)
    logits = model.logits(out.hidden[:, :-1])
    main = weighted_cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten(), weights.flatten())
    hidden = out.hidden.detach() if mtp == "frozen" else out.hidden
    drafted = model.mtp_hidden(
        0, hidden[:, :-1], batch.tokens[:, 1:], positions=batch.positions[:, :-1], reach=reach[:, :-1],
        max_position=batch.tokens.shape[1],
    )  # fmt: skip
    student = _mtp_logits(model, drafted[:, :-1], frozen=mtp == "frozen").flatten(0, 1)
    teacher, valid = logits[:, 1:].flatten(0, 1), mtp_mask(batch.documents, 0).flatten()
    distillation = mtp_distillation(teacher, student, valid)
    same = agreement(teacher.detach(), student.detach(), valid)
    parts = LossParts(main.detach(), distillation.detach(), same, out.experts)
    return main + mtp_weight * distillation, parts


def _mtp_logits(model: DeepseekModel, hidden: Tensor, *, frozen: bool) -> Tensor:
    """MTP logits; with ``frozen`` the shared head gets no gradient from them."""
    if not frozen:
        return model.mtp_logits(0, hidden)
    module = model.mtp[0]
    assert isinstance(module, MTPDepth)
    return torch.nn.functional.linear(module.norm(hidden), model.head.detach())


@torch.no_grad()
def update_balance(model: DeepseekModel, load: Tensor, rate: float) -> None:
    """Move each correction bias by ``rate`` against its expert's excess load ``[L, E]`` (DeepSeek-V3, 2.1.2)."""
    layers = [block.mlp for block in model.blocks if isinstance(block.mlp, MixtureOfExperts)]
    for layer, row in zip(layers, load, strict=True):
        layer.correction_bias += rate * (1.0 - row).sign()


@torch.no_grad()
def evaluate_loss(model: DeepseekModel, batches: Sequence[PackedBatch]) -> float:
    """Weighted mean next-token loss (nats a token) over fixed batches."""
    total = weight = 0.0
    for batch in batches:
        loss, _ = language_loss(model, batch, "off", 0.0)
        share = float(batch.weights[:, 1:].sum())
        total, weight = total + float(loss) * share, weight + share
    return total / max(weight, 1.0)


def held_out_batches(documents: Iterable[Document], row_length: int, rows: int, count: int) -> list[PackedBatch]:
    """The first ``count`` batches of a stream, kept for evaluation."""
    return list(itertools.islice(Packer(row_length, rows).batches(documents), count))
