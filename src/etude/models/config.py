"""Shape of a DeepSeek-V3 / Kimi-K2 form transformer, with the keys of Hugging Face's ``config.json``."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from etude.base.config import Config


class ModelConfig(Config):
    """MLA attention, leading dense layers, then MoE layers with a sigmoid router and a shared expert.

    Field names are those of ``transformers.DeepseekV3Config``; the defaults are the tiny model of the quickstart.
    """

    vocab_size: int = 1536
    hidden_size: int = 192
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    q_lora_rank: int | None = None
    """Rank of the query compression; None projects queries directly."""
    kv_lora_rank: int = 64
    """Width of the KV latent, the only thing (with the rotary key) that the cache keeps."""
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    intermediate_size: int = 512
    """Hidden width of the dense layers."""
    moe_intermediate_size: int = 96
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 256
    num_nextn_predict_layers: int = 1
    """MTP depths; 0 for none (Kimi K2 ships none, so Etude makes them from random weights)."""

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")
        if not 0 < self.num_experts_per_tok <= self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, n_routed_experts is {self.n_routed_experts}"
            )
        if not 0 <= self.first_k_dense_replace < self.num_hidden_layers:
            raise ValueError("first_k_dense_replace must leave at least one MoE layer")
        return self


_FIXED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

_IRRELEVANT = ("architectures", "attention_dropout", "torch_dtype")
"""What a published config may say otherwise without another forward pass."""


def to_hugging_face(config: ModelConfig, *, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """Content of ``config.json`` for a model of this shape."""
    return {
        **_FIXED,
        **config.model_dump(exclude={"rope_theta"}),
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.qk_rope_head_dim,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "bos_token_id": eos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }


def from_hugging_face(data: dict[str, Any]) -> ModelConfig:
    """Read ``config.json``. Raises ValueError when the model is not of this form, naming the key."""
    for key, value in _FIXED.items():
        if key not in _IRRELEVANT and key in data and data[key] != value:
            raise ValueError(f"config.json: {key} is {data[key]!r}; this family needs {value!r}")
    known = {key: data[key] for key in ModelConfig.model_fields if key in data}
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}  # the newer and the older name
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ValueError(f"config.json: rope_type {kind!r} is not supported")
    if "rope_theta" in rope:
        known["rope_theta"] = rope["rope_theta"]
    return ModelConfig.model_validate(known)
