"""Promises: new weights reach running rows between two tokens, with stale keys kept; a wrong update changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from inference_fakes import assert_exact, drain, engine, params, prompt, run, tiny
from torch import Tensor

from etude.base.errors import CheckpointError
from etude.base.records import Completion
from etude.models.checkpoint import export_state
from etude.models.deepseek import DeepseekModel
from etude.weights.content import content_hash


class GrowingKeys:
    """A plain KV context over lists, the oracle's memory."""

    def __init__(self, layers: int) -> None:
        self.latent: list[list[Tensor]] = [[] for _ in range(layers)]
        self.rope: list[list[Tensor]] = [[] for _ in range(layers)]

    def extend(self, layer: int, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.latent[layer].append(latent)
        self.rope[layer].append(k_rope)
        held = torch.cat(self.latent[layer], 1)
        return held, torch.cat(self.rope[layer], 1), torch.ones(1, 1, 1, held.shape[1], dtype=torch.bool)


@torch.no_grad()
def mixed_policy(tokens: Sequence[int], models: Sequence[DeepseekModel]) -> Tensor:
    """Next-token logprobs ``[T, V]`` when position i is fed to ``models[i]``, keys staying those of who computed them."""
    keys = GrowingKeys(models[0].config.num_hidden_layers)
    rows = []
    for position, (token, model) in enumerate(zip(tokens, models, strict=True)):
        out = model(torch.tensor([[token]]), positions=torch.tensor([[position]]), context=keys)
        rows.append(model.logits(out.hidden)[0, 0].log_softmax(-1))
    return torch.stack(rows)


def test_running_rows_go_on_under_the_new_weights_with_stale_keys() -> None:
    old, new = tiny(3), tiny(4)
    served = engine(old)
    results: list[Completion] = []
    contexts = [prompt(0, 9), prompt(1, 14)]
    for index, context in enumerate(contexts):
        served.submit(context, params(16, seed=index), lambda r: results.append(r.completion()), session=str(index))
    for _ in range(6):
        served.step()
    served.swap(served.stage(8, export_state(new)))
    drain(served)
    for completion in results:
        context = contexts[[len(c) for c in contexts].index(completion.experts.shape[0] - 15)]  # type: ignore[union-attr]
        assert completion.versions == (7,) * 6 + (8,) * 10
        fed = [*context, *completion.tokens[:-1]]
        split = len(context) + 5  # the sixth token was sampled, not fed, under the old weights
        logprobs = mixed_policy(fed, [old] * split + [new] * (len(fed) - split))
        expected = logprobs[range(len(context) - 1, len(fed)), list(completion.tokens)]
        assert np.abs(expected.numpy() - completion.logprobs).max() < 1e-5


def test_a_session_keeps_its_stale_keys_but_lends_them_to_nobody() -> None:
    old, new = tiny(3), tiny(4)
    served = engine(old)
    context = prompt(2, 30)
    first = run(served, context, params(5), "a")
    served.swap(served.stage(8, export_state(new)))
    fresh = run(served, context, params(5), "b")
    assert fresh.cached_tokens == 0
    assert_exact(new, context, fresh)
    longer = [*context, *first.tokens, 3, 1]
    second = run(served, longer, params(5), "a")
    assert second.cached_tokens == len(context) + 4
    assert set(second.versions) == {8}
    logprobs = mixed_policy(
        [*longer, *second.tokens[:-1]], [old] * (len(context) + 4) + [new] * (3 + len(second.tokens) - 1)
    )
    expected = logprobs[range(len(longer) - 1, len(longer) + 4), list(second.tokens)]
    assert np.abs(expected.numpy() - second.logprobs).max() < 1e-5


def test_an_update_amid_a_prefill_makes_the_slot_unfit_to_lend() -> None:
    served = engine(tiny(3), prefill_tokens=16)
    results: list[Completion] = []
    served.submit(prompt(3, 40), params(3), lambda r: results.append(r.completion()), session="a")
    served.step()
    served.swap(served.stage(8, export_state(tiny(4))))
    drain(served)
    again = run(served, prompt(3, 40), params(3), "b")
    assert again.cached_tokens == 0
    assert_exact(tiny(4), prompt(3, 40), again)


def test_the_staged_hash_is_that_of_what_is_held() -> None:
    served = engine(tiny(3))
    state = export_state(tiny(4))
    assert served.stage(8, state).content_hash == content_hash(state)
    half = {name: t if "correction_bias" in name else t.bfloat16() for name, t in state.items()}
    assert served.stage(9, half).content_hash == content_hash(half)


@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape", "nan", "integer"])
def test_a_wrong_update_is_refused_and_the_old_weights_stay(fault: str) -> None:
    model = tiny(3)
    served = engine(model)
    state: dict[str, Tensor] = dict(export_state(tiny(4)))
    if fault == "missing":
        del state["lm_head.weight"]
    elif fault == "unexpected":
        state["extra"] = torch.zeros(1)
    elif fault == "shape":
        state["lm_head.weight"] = state["lm_head.weight"][1:]
    elif fault == "nan":
        state["lm_head.weight"] = state["lm_head.weight"].clone()
        state["lm_head.weight"][3, 3] = float("nan")
    else:
        state["lm_head.weight"] = state["lm_head.weight"].int()
    with pytest.raises(CheckpointError, match=r"lm_head\.weight|extra"):
        served.stage(8, state)
    completion = run(served, prompt(4, 12), params(6))
    assert set(completion.versions) == {7}
    assert_exact(model, prompt(4, 12), completion)
