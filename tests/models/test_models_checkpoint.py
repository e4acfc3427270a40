"""Promises: transformers loads an Etude checkpoint as DeepseekV3 and gives the same logits; a round trip is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from etude.base.errors import CheckpointError
from etude.models.checkpoint import export_state, import_state, load_checkpoint, save_checkpoint
from etude.models.config import ModelConfig, from_hugging_face, to_hugging_face
from etude.models.deepseek import DeepseekModel, initialise


def tiny(**changes: object) -> DeepseekModel:
    config = ModelConfig.model_validate(
        {
            "vocab_size": 97,
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
    )
    model = DeepseekModel(config)
    initialise(model, seed=3)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():  # the zeros of initialise would hide faults
        if name.endswith((".o", ".down")):
            parameter.data.normal_(0.0, 0.2, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_(0.0, 0.1, generator=generator)
    return model


@pytest.mark.parametrize("q_lora_rank", [None, 12])
@pytest.mark.parametrize("scaling", [1.0, 2.5])
def test_transformers_gives_the_same_logits(tmp_path: Path, q_lora_rank: int | None, scaling: float) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny(q_lora_rank=q_lora_rank, routed_scaling_factor=scaling, rope_theta=5000.0)
    save_checkpoint(model, tmp_path, eos_token_id=1, pad_token_id=0)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(reference).__name__ == "DeepseekV3ForCausalLM"
    tokens = torch.randint(0, 97, (3, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = reference(tokens).logits
        actual = model.logits(model(tokens).hidden)
    assert (expected - actual).abs().max() < 2e-5


def test_save_and_load_is_exact(tmp_path: Path) -> None:
    model = tiny()
    save_checkpoint(model, tmp_path, eos_token_id=1, pad_token_id=0)
    loaded = load_checkpoint(tmp_path)
    before, after = export_state(model), export_state(loaded)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_import_names_what_is_missing() -> None:
    model = tiny()
    state = export_state(model)
    state.pop("lm_head.weight")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        import_state(model, state)


def test_load_can_change_the_context(tmp_path: Path) -> None:
    save_checkpoint(tiny(), tmp_path, eos_token_id=1, pad_token_id=0)
    longer = load_checkpoint(tmp_path, max_position_embeddings=1024, rope_theta=40000.0)
    assert (longer.config.max_position_embeddings, longer.rotary.theta) == (1024, 40000.0)


def test_a_missing_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", {"type": "yarn", "factor": 64}),
        ("rope_parameters", {"rope_type": "yarn", "factor": 64, "rope_theta": 1e4}),
        ("hidden_act", "gelu"),
        ("rope_interleave", False),
        ("moe_layer_freq", 2),
        ("topk_method", "greedy"),
        ("topk_group", 4),
    ],
)
def test_what_another_forward_pass_would_need_is_refused_by_name(key: str, value: object) -> None:
    data = to_hugging_face(ModelConfig(), eos_token_id=1, pad_token_id=0)
    assert from_hugging_face({**data, "rope_scaling": None, "torch_dtype": "bfloat16"}) == ModelConfig()
    named = "rope_type 'yarn'" if key.startswith("rope_") and isinstance(value, dict) else key
    with pytest.raises(ValueError, match=named):
        from_hugging_face({**data, **({"rope_parameters": None} if key == "rope_scaling" else {}), key: value})
