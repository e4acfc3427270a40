"""Promises: the C and the PyTorch pass agree on every shape, and the C one gives the same bits in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from inference_fakes import assert_exact, engine, params, prompt, run, run_all, tiny

from etude.base.records import Completion
from etude.inference.native.model import pack

SHAPES: list[dict[str, object]] = [
    {},
    {"q_lora_rank": 12},
    {"hidden_size": 44, "vocab_size": 101, "moe_intermediate_size": 20, "intermediate_size": 36},
    {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "v_head_dim": 20, "num_attention_heads": 3},
    {"kv_lora_rank": 75, "qk_rope_head_dim": 6, "qk_nope_head_dim": 5, "q_lora_rank": 70},
    {"n_routed_experts": 17, "num_experts_per_tok": 3, "norm_topk_prob": False, "routed_scaling_factor": 2.5},
    {"num_hidden_layers": 2, "first_k_dense_replace": 0, "n_shared_experts": 2, "num_nextn_predict_layers": 0},
    {"n_routed_experts": 4, "num_experts_per_tok": 4},
]


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_kernels_are_the_model(kernel: str, shape: dict[str, object]) -> None:
    model = tiny(**shape)
    requests = [(prompt(seed, 2 + 7 * seed), params(6, seed=seed), f"s{seed}") for seed in range(9)]
    served = engine(model, kernel=kernel, prefill_tokens=40)
    assert served.kernel == kernel
    for (context, _, _), completion in zip(requests, run_all(served, requests), strict=True):
        assert_exact(model, context, completion)


def test_the_native_pass_gives_the_same_bits_however_it_is_batched() -> None:
    model, context = tiny(), prompt(0, 45)

    def same(completion: Completion) -> bool:
        return completion.tokens == alone.tokens and completion.logprobs == alone.logprobs

    ask = params(20, seed=9)
    alone = run(engine(model, kernel="native"), context, ask)
    company = [(prompt(seed, 3 + 4 * seed), params(25, seed=seed), f"c{seed}") for seed in range(7)]
    assert same(run_all(engine(model, kernel="native", prefill_tokens=16), [*company, (context, ask, "s")])[-1])
    served = engine(model, kernel="native")
    run(served, context[:30], params(3), "lender")
    lent = run(served, context, ask, "borrower")
    assert lent.cached_tokens == 30
    assert same(lent)
    crowded = engine(model, kernel="native", slots=1)
    run(crowded, context, ask, "s")
    run(crowded, prompt(5, 9), params(3), "other")
    assert same(run(crowded, context, ask, "s"))


def test_packing_keeps_every_weight() -> None:
    weight = torch.randn(3, 21, 5)
    packed = pack(weight)
    assert packed.shape == (3, 2, 5, 16)
    assert torch.equal(packed.transpose(-1, -2).reshape(3, 32, 5)[:, :21], weight)
    assert not packed.transpose(-1, -2).reshape(3, 32, 5)[:, 21:].any()


def test_long_contexts_and_wide_batches_stay_exact() -> None:
    model = tiny(max_position_embeddings=2048)
    served = engine(model, slots=40, max_length=700, kernel="native")
    requests = [(prompt(seed, 600 - 15 * seed), params(3, seed=seed), f"s{seed}") for seed in range(40)]
    done = run_all(served, requests)
    for index in (0, 17, 39):
        assert_exact(model, requests[index][0], done[index])
    assert np.isfinite([logprob for completion in done for logprob in completion.logprobs]).all()
