"""Tiny models and random rollout groups for the tests of the RL step."""

from __future__ import annotations

import numpy as np
import torch

from etude.base.records import Category, Effort, Outcome, Rollout, RolloutGroup, Segment
from etude.models.config import ModelConfig
from etude.models.deepseek import DeepseekModel, initialise

CONFIG = ModelConfig(
    vocab_size=37, hidden_size=24, num_hidden_layers=3, intermediate_size=32, moe_intermediate_size=16, kv_lora_rank=8,
    qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4, num_nextn_predict_layers=0,
)  # fmt: skip


def model(seed: int = 0, config: ModelConfig = CONFIG) -> DeepseekModel:
    """Random weights everywhere, also where training starts from zero."""
    made = DeepseekModel(config)
    initialise(made, seed)
    for name, parameter in made.named_parameters():
        if name.endswith((".o", ".down")):
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(seed + 1))
    return made


@torch.no_grad()
def segment(
    made: DeepseekModel,
    rng: np.random.Generator,
    version: int = 0,
    end: str = "stop",
    opening: tuple[int, ...] = (),
) -> Segment:
    """A random segment with the logprobs and experts that ``made`` gives it: ``opening``, then 6 to 13 tokens."""
    size = len(opening) + int(rng.integers(6, 14))
    tokens = rng.integers(0, 37, size).astype(np.int32)
    tokens[: len(opening)] = opening
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
    made: DeepseekModel,
    seed: int,
    segments: int = 1,
    advantages: tuple[float, ...] = (0.5, -0.5),
    ends: tuple[str, ...] = (),
    opening: tuple[int, ...] = (),
) -> RolloutGroup:
    """Chains of random segments; all but the last end in a summary, the last as ``ends`` says (default stop)."""
    rng = np.random.default_rng(seed)
    rollouts = tuple(
        Rollout(
            id=f"r{seed}-{i}", task_id=f"t{seed}", category=Category.DEBUGGING, turns=(), effort=Effort(),
            segments=tuple(
                segment(
                    made, rng, end="summary" if number < segments - 1 else ends[i] if ends else "stop", opening=opening
                )
                for number in range(segments)
            ),
            outcome=Outcome.COMPLETED,
        )
        for i in range(len(advantages))
    )  # fmt: skip
    return RolloutGroup(task_id=f"t{seed}", rollouts=rollouts, advantages=advantages)
