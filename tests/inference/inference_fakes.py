"""Tiny models and slow oracles for the inference tests: full forward passes without any cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from etude.base.records import Completion, SamplingParams
from etude.inference.engine import Engine, EngineConfig
from etude.models.config import ModelConfig
from etude.models.deepseek import DeepseekModel, initialise

VOCAB = 97


def tiny(seed: int = 3, **changes: object) -> DeepseekModel:
    """A model of three layers with nothing zero in it."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "kv_lora_rank": 16,
        "moe_intermediate_size": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        **changes,
    }
    model = DeepseekModel(ModelConfig.model_validate(shape))
    initialise(model, seed=seed)
    generator = torch.Generator().manual_seed(seed + 2)
    for name, parameter in model.named_parameters():
        if name.endswith((".o", ".down")):
            parameter.data.normal_(0.0, 0.2, generator=generator)
        elif name == "head":
            parameter.data.normal_(0.0, 0.3, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_(0.0, 0.1, generator=generator)
    return model


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def run(
    engine: Engine, tokens: Sequence[int], params: SamplingParams, session: str = "s", experts_start: int = 0
) -> Completion:
    """One request alone."""
    return run_all(engine, [(tokens, params, session)], experts_start)[0]


def run_all(
    engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams, str]], experts_start: int = 0
) -> list[Completion]:
    """All requests at once, in their order."""
    found: dict[int, Completion] = {}

    def keep(index: int) -> object:
        return lambda result: found.__setitem__(index, result.completion())

    for index, (tokens, params, session) in enumerate(requests):
        engine.submit(tokens, params, keep(index), session=session, experts_start=experts_start)  # type: ignore[arg-type]
    drain(engine)
    return [found[index] for index in range(len(requests))]


def drain(engine: Engine, limit: int = 10_000) -> None:
    for _ in range(limit):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError(f"still busy: {engine.load}")


def engine(model: DeepseekModel | None = None, **changes: object) -> Engine:
    config = {"slots": 8, "max_length": 96, **changes}
    return Engine(model or tiny(), EngineConfig.model_validate(config), version=7)


@torch.no_grad()
def teacher(model: DeepseekModel, tokens: Sequence[int]) -> tuple[Tensor, np.ndarray]:
    """(float32 logprobs ``[T, V]`` of the next token at every position, experts ``[T, L, k]``), by one full pass."""
    out = model(torch.tensor([list(tokens)]))
    return model.logits(out.hidden)[0].log_softmax(-1), out.experts[0].numpy()


def gaps(model: DeepseekModel, context: Sequence[int], completion: Completion) -> np.ndarray:
    """|engine - teacher| of each sampled token's logprob."""
    logprobs, _ = teacher(model, [*context, *completion.tokens])
    at = torch.arange(len(completion.tokens)) + len(context) - 1
    expected = logprobs[at, torch.tensor(completion.tokens)]
    return np.abs(expected.numpy() - np.asarray(completion.logprobs))


def assert_exact(model: DeepseekModel, context: Sequence[int], completion: Completion) -> None:
    """Logprobs and experts of a completion are the model's own."""
    gap = gaps(model, context, completion)
    assert gap.max() < 1e-5
    assert gap.mean() < 4e-6
    _, experts = teacher(model, [*context, *completion.tokens])
    assert completion.experts is not None
    assert np.array_equal(np.sort(completion.experts, -1), np.sort(experts[completion.experts_start : -1], -1))


def params(max_new_tokens: int = 12, **changes: object) -> SamplingParams:
    return SamplingParams.model_validate({"max_new_tokens": max_new_tokens, "seed": 5, **changes})
