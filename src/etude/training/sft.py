"""Supervised fine-tuning on demonstrations that the harness itself produced, MTP trained jointly.

The documents are the recorded segments: the very tokens the harness would show in RL, never text rendered again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import Field

from etude.base.config import Config
from etude.base.errors import UserError
from etude.base.records import Segment
from etude.base.telemetry import RunDirectory
from etude.data.packing import Document
from etude.data.tokenizer import load_tokenizer
from etude.models.checkpoint import load_checkpoint
from etude.models.deepseek import DeepseekModel
from etude.training.language import StageConfig, evaluate_loss, held_out_batches, train_stage
from etude.training.optim import OptimConfig
from etude.training.pretrain import save


class SFTConfig(Config):
    """A supervised fine-tuning stage."""

    seed: int = 0
    context_weight: float = Field(0.1, ge=0.0, le=1.0)
    """Loss weight of tokens that the model did not write: instruction, tool results."""
    held_out_share: float = Field(0.05, gt=0.0, lt=0.5)
    """Share of the demonstrations kept for the held-out loss."""
    stage: StageConfig = StageConfig(row_length=512, rows_per_step=8, mtp="joint", optim=OptimConfig(lr=2e-3))
    eval_every: int = Field(25, ge=1)
    threads: int = Field(1, ge=1)


def sft(config: SFTConfig, run: RunDirectory, out: Path, *, init: Path, segments: Sequence[Segment]) -> DeepseekModel:
    """Train the checkpoint at ``init`` on demonstrations, log under stage ``sft`` and save at ``out``."""
    if len(segments) < 20:
        raise UserError(f"sft: only {len(segments)} demonstrations; give it at least 20")
    torch.set_num_threads(config.threads)
    tokenizer = load_tokenizer(init)
    model = load_checkpoint(init)
    documents = [segment_document(segment, config.context_weight) for segment in segments]
    random.Random(config.seed).shuffle(documents)
    num_held = max(4, int(len(documents) * config.held_out_share))
    held, training = documents[:num_held], documents[num_held:]
    longest = max(len(tokens) for tokens, _ in documents)
    stage = config.stage.model_copy(update={"row_length": max(config.stage.row_length, longest)})
    batches = held_out_batches(held, stage.row_length, 4, 1000) or held_out_batches(held, stage.row_length, 1, 1000)
    run.metrics("sft", 0, heldout_loss=evaluate_loss(model, batches))
    for report in train_stage(model, stage, _epochs(training, config.seed)):
        losses = {}
        if (report.step + 1) % config.eval_every == 0 or report.step + 1 == stage.steps:
            losses["heldout_loss"] = evaluate_loss(model, batches)
        run.metrics(
            "sft", report.step + 1, train_loss=report.train_loss, mtp_loss=report.mtp_loss,
            mtp_agreement=report.mtp_agreement, grad_norm=report.grad_norm, lr=report.lr, tokens=report.tokens,
            seconds=report.seconds, max_load=report.max_load, **losses,
        )  # fmt: skip
    save(model, tokenizer, out, "float32")
    return model


def segment_document(segment: Segment, context_weight: float) -> Document:
    """Tokens of a segment; sampled ones weigh 1, the others ``context_weight``."""
    weights = np.where(segment.sampled, 1.0, context_weight).astype(np.float32)
    return np.asarray(segment.tokens, np.int32), weights


def _epochs(documents: Sequence[Document], seed: int) -> Iterator[Document]:
    """Endless passes over ``documents``, shuffled anew each time."""
    rng = random.Random(seed + 1)
    while True:
        yield from rng.sample(list(documents), len(documents))
