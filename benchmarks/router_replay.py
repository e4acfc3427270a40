"""Sweep of router replay's plausibility threshold: how far trainer and engine are apart, by alpha.

The engine samples from the shipped base; the trainer then computes the logprobs of the same tokens with the engine's experts
replayed through the filter (alpha 0 is pure replay, 1 the trainer's own routing). Three kinds of difference between the two:

    same weights          float32 kernels alone
    engine in 8 bits      the engine's weights rounded to float8 e4m3 with a scale a tensor, as a quantised engine has them
    three versions old    the trainer has taken three RL steps (random advantages, lr 1e-4) since

One line a row: mean and 99th percentile of |log pi - log mu| in nats, and the share of replayed experts that passed. Run::

    python benchmarks/router_replay.py [--quick]
"""

from __future__ import annotations

import argparse
import copy
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import etude
from etude.algorithms.router_replay import ReplayRouting
from etude.base.records import Category, Completion, Effort, Outcome, Rollout, RolloutGroup, SamplingParams, Segment
from etude.data.tokenizer import load_tokenizer
from etude.inference.engine import Engine, EngineConfig
from etude.models.checkpoint import load_checkpoint
from etude.models.deepseek import DeepseekModel
from etude.training.rl import RLTrainConfig, RLTrainer
from etude.training.rl_batch import RLBatch, pack_groups
from etude.training.rl_loss import sampled_scores

ALPHAS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
PROMPT, SAMPLED, GROUP = 48, 80, 4


def prompts(count: int) -> list[list[int]]:
    """Windows of the standard library."""
    tokenizer = load_tokenizer(base())
    text = "".join(
        path.read_text(errors="ignore")[:4000] for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    )
    ids = tokenizer.encode(text).ids
    return [ids[i * 500 : i * 500 + PROMPT] for i in range(count)]


def base() -> Path:
    return Path(etude.__file__).parent / "assets" / "base"


def sample(model: DeepseekModel, contexts: Sequence[list[int]]) -> list[Completion]:
    """GROUP completions of each context."""
    engine = Engine(model, EngineConfig(slots=64, max_length=PROMPT + SAMPLED + 16))
    found: dict[int, Completion] = {}
    for index in range(GROUP * len(contexts)):
        engine.submit(
            contexts[index // GROUP],
            SamplingParams(max_new_tokens=SAMPLED, seed=index),
            lambda result, index=index: found.__setitem__(index, result.completion()),
            session=str(index),
        )
    while engine.busy:
        engine.step()
    return [found[index] for index in range(len(found))]


def segment(context: list[int], completion: Completion) -> Segment:
    assert completion.experts is not None
    size, count = len(context), len(completion.tokens)
    unknown = np.full((1, *completion.experts.shape[1:]), -1, np.int16)  # the last token is never fed
    return Segment(
        tokens=np.array([*context, *completion.tokens], np.int32), sampled=np.arange(size + count) >= size,
        logprobs=np.array([0.0] * size + list(completion.logprobs), np.float32),
        versions=np.array([-1] * size + list(completion.versions), np.int32),
        experts=np.concatenate([completion.experts, unknown]), end="stop",
    )  # fmt: skip


def groups(contexts: Sequence[list[int]], completions: Sequence[Completion]) -> list[RolloutGroup]:
    """With random advantages that sum to zero in a group."""
    rng = np.random.default_rng(0)
    made = []
    for number, context in enumerate(contexts):
        rollouts = tuple(
            Rollout(
                id=f"r{number}-{i}", task_id=f"t{number}", category=Category.UNDERSTAND, turns=(), effort=Effort(),
                segments=(segment(context, completion),), outcome=Outcome.COMPLETED,
            )
            for i, completion in enumerate(completions[number * GROUP : (number + 1) * GROUP])
        )  # fmt: skip
        advantages = rng.normal(size=GROUP)
        made.append(
            RolloutGroup(task_id=f"t{number}", rollouts=rollouts, advantages=tuple(advantages - advantages.mean()))
        )
    return made


@torch.no_grad()
def in_eight_bits(model: DeepseekModel) -> DeepseekModel:
    """Every matrix rounded to float8 e4m3, its largest magnitude scaled to the format's."""
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        if parameter.dim() > 1:
            scale = parameter.abs().max() / 448.0
            parameter.copy_((parameter / scale).to(torch.float8_e4m3fn).float() * scale)
    return rounded


@torch.no_grad()
def sweep(name: str, model: DeepseekModel, batches: Sequence[RLBatch]) -> None:
    for alpha in ALPHAS:
        gaps: list[Tensor] = []
        kept = known = 0
        for batch in batches:
            routing = ReplayRouting(batch.experts.flatten(0, 1), alpha)
            scores = sampled_scores(model, batch, routing)
            gaps.append((scores.logprobs - batch.sampled.behaviour).abs())
            kept, known = kept + routing.num_kept, known + routing.num_known
        gap = torch.cat(gaps).double()
        row = {"mean": float(gap.mean()), "p99": float(gap.quantile(0.99)), "kept": kept / known, "tokens": len(gap)}
        print(
            json.dumps(
                {"difference": name, "alpha": alpha, **{key: float(f"{value:.4g}") for key, value in row.items()}}
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a quarter of the prompts")
    torch.set_num_threads(1)
    contexts = prompts(8 if parser.parse_args().quick else 32)
    model = load_checkpoint(base())
    shape = model.config

    def packed(made: Sequence[RolloutGroup]) -> list[RLBatch]:
        return pack_groups(
            made, row_length=PROMPT + SAMPLED, rows_per_batch=16, moe_layers=shape.num_moe_layers,
            top_k=shape.num_experts_per_tok,
        )  # fmt: skip

    fresh = groups(contexts, sample(model, contexts))
    sweep("same weights", model, packed(fresh))
    sweep("engine in 8 bits", model, packed(groups(contexts, sample(in_eight_bits(model), contexts))))
    trainer = RLTrainer(
        copy.deepcopy(model), RLTrainConfig(warmup_steps=0, kl_coefficient=0.0, row_length=PROMPT + SAMPLED)
    )
    for _ in range(3):
        trainer.step(fresh)
    sweep("three versions old", trainer.model, packed(fresh))


if __name__ == "__main__":
    main()
