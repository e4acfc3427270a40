"""Hugging Face directories in and out: safetensors + config.json, in the published DeepSeek-V3 layout.

In memory gate and up projections are one matrix and experts are stacked; on disk (and in the weight chain) every
published name stands alone, so that ``transformers`` and vLLM read it. MTP depth d is the extra layer
``model.layers.{num_hidden_layers + d}``, as DeepSeek publishes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from etude.base.errors import CheckpointError
from etude.base.telemetry import full_disk_named
from etude.models.attention import LatentAttention
from etude.models.config import ModelConfig, from_hugging_face, to_hugging_face
from etude.models.deepseek import Block, DeepseekModel, MTPDepth, initialise
from etude.models.layers import FeedForward
from etude.models.stored import StoredTensors, store_tensors


def export_state(model: DeepseekModel, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Published name -> tensor (detached; views of the model's memory unless ``dtype`` casts them)."""
    return {
        name: view.detach() if dtype is None or "correction_bias" in name else view.detach().to(dtype)
        for name, view in _views(model)
    }


def import_state(model: DeepseekModel, state: Mapping[str, Tensor], *, allow_missing: str = "") -> None:
    """Copy a published state into the model in place. Raises CheckpointError naming what is missing or unexpected.

    Names that start with ``allow_missing`` (when not empty) may be absent and keep their present values.
    """
    views = dict(_views(model))
    if allow_missing:
        views = {name: view for name, view in views.items() if name in state or not name.startswith(allow_missing)}
    missing, unexpected = sorted(views.keys() - state.keys()), sorted(state.keys() - views.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"weights do not fit the model: {len(missing)} missing (first {missing[:1]}), "
            f"{len(unexpected)} unexpected (first {unexpected[:1]})"
        )
    with torch.no_grad():
        for name, view in views.items():
            tensor = state[name]
            if view.shape != tensor.shape:
                raise CheckpointError(f"weights: {name} has shape {tuple(tensor.shape)}, not {tuple(view.shape)}")
            view.copy_(tensor)


def save_checkpoint(
    model: DeepseekModel,
    directory: Path,
    *,
    eos_token_id: int,
    pad_token_id: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write config.json and the tensors (tokenizer files are data.tokenizer's). Raises DiskFullError."""
    store_tensors(directory, _views(model), dtype)
    config = to_hugging_face(model.config, eos_token_id=eos_token_id, pad_token_id=pad_token_id)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    with full_disk_named(directory):
        (directory / "config.json").write_text(json.dumps(config, indent=2))


def load_config(directory: Path) -> ModelConfig:
    """Shape of the checkpoint in ``directory``. Raises CheckpointError."""
    path = directory / "config.json"
    try:
        return from_hugging_face(json.loads(path.read_text()))
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {directory}: no config.json there") from None
    except ValueError as error:
        raise CheckpointError(f"checkpoint {directory}: {error}") from None


def load_checkpoint(directory: Path, **changes: object) -> DeepseekModel:
    """Load a checkpoint in float32; ``changes`` replace config keys (e.g. a longer context, another rotary base).

    A checkpoint without MTP weights gets freshly drawn MTP depths when the config asks for them.
    """
    stored = load_config(directory)
    model = DeepseekModel(ModelConfig.model_validate({**stored.model_dump(), **changes}))
    fresh_mtp = stored.num_nextn_predict_layers == 0 and model.config.num_nextn_predict_layers > 0
    if fresh_mtp:
        initialise(model, seed=0)
    import_state(
        model,
        StoredTensors(directory),
        allow_missing=f"model.layers.{stored.num_hidden_layers}." if fresh_mtp else "",
    )
    return model


def _views(model: DeepseekModel) -> Iterator[tuple[str, Tensor]]:
    """(published name, view of the model's memory) of every stored tensor, in a fixed order."""
    yield "model.embed_tokens.weight", model.embedding
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        yield from _block_views(f"model.layers.{index}", block)
    for depth, mtp in enumerate(model.mtp):
        assert isinstance(mtp, MTPDepth)
        prefix = f"model.layers.{len(model.blocks) + depth}"
        yield f"{prefix}.enorm.weight", mtp.embedding_norm.weight
        yield f"{prefix}.hnorm.weight", mtp.hidden_norm.weight
        yield f"{prefix}.eh_proj.weight", mtp.merge
        yield f"{prefix}.shared_head.norm.weight", mtp.norm.weight
        yield from _block_views(prefix, mtp.block)
    yield "model.norm.weight", model.norm.weight
    yield "lm_head.weight", model.head


def _block_views(prefix: str, block: Block) -> Iterator[tuple[str, Tensor]]:
    yield f"{prefix}.input_layernorm.weight", block.attention_norm.weight
    yield f"{prefix}.post_attention_layernorm.weight", block.mlp_norm.weight
    yield from _attention_views(f"{prefix}.self_attn", block.attention)
    mlp = block.mlp
    if isinstance(mlp, FeedForward):
        yield from _feed_forward_views(f"{prefix}.mlp", mlp)
        return
    yield f"{prefix}.mlp.gate.weight", mlp.router
    yield f"{prefix}.mlp.gate.e_score_correction_bias", mlp.correction_bias
    yield from _feed_forward_views(f"{prefix}.mlp.shared_experts", mlp.shared)
    inner = mlp.down.shape[1]
    for expert in range(mlp.num_experts):
        gate_up = mlp.gate_up[expert].T
        yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", gate_up[:inner]
        yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", gate_up[inner:]
        yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", mlp.down[expert].T


def _attention_views(prefix: str, attention: LatentAttention) -> Iterator[tuple[str, Tensor]]:
    if attention.has_q_lora:
        yield f"{prefix}.q_a_proj.weight", attention.q_a
        yield f"{prefix}.q_a_layernorm.weight", attention.q_a_norm.weight
        yield f"{prefix}.q_b_proj.weight", attention.q
    else:
        yield f"{prefix}.q_proj.weight", attention.q
    yield f"{prefix}.kv_a_proj_with_mqa.weight", attention.kv_a
    yield f"{prefix}.kv_a_layernorm.weight", attention.kv_a_norm.weight
    yield f"{prefix}.kv_b_proj.weight", attention.kv_b
    yield f"{prefix}.o_proj.weight", attention.o


def _feed_forward_views(prefix: str, mlp: FeedForward) -> Iterator[tuple[str, Tensor]]:
    inner = mlp.down.shape[1]
    yield f"{prefix}.gate_proj.weight", mlp.gate_up[:inner]
    yield f"{prefix}.up_proj.weight", mlp.gate_up[inner:]
    yield f"{prefix}.down_proj.weight", mlp.down
