"""``ServedModel`` in C: packs one version's weights for ``step.c`` and calls it. The call releases the interpreter lock."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.inference.cache import KVCache
from etude.inference.forward import Batch
from etude.models.deepseek import Block, DeepseekModel
from etude.models.layers import FeedForward

SOURCE = Path(__file__).parent / "step.c"
PANEL = 16
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_LAYER_POINTERS = (
    *("attention_norm", "down", "q_norm", "query", "latent_norm", "absorb_key", "absorb_value", "out"),
    *("mlp_norm", "gate_up", "mlp_down", "router", "bias", "expert_gate_up", "expert_down"),
)
_SIZES = (
    *("layers", "dim", "heads", "nope", "rope", "value", "rank", "q_rank", "vocab"),
    *("experts", "top_k", "expert_inner", "normalise", "max_length", "slots"),
)


class _Layer(ctypes.Structure):
    _fields_ = [*((name, _POINTER) for name in _LAYER_POINTERS), ("inner", _INT)]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in _SIZES),
        *((name, _FLOAT) for name in ("eps", "scale", "scaling")),
        *((name, _POINTER) for name in ("embedding", "cosines", "sines", "norm", "head", "layer")),
    ]


def pack(weight: Tensor) -> Tensor:
    """``[..., out, in]`` -> ``[..., ceil(out / 16), in, 16]``, zeros where ``out`` is not a multiple of 16."""
    *lead, out, inner = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -out % PANEL))
    return padded.view(*lead, -1, PANEL, inner).transpose(-1, -2).contiguous()


class NativeModel:
    """One version's weights, packed. Immutable after construction."""

    def __init__(self, model: DeepseekModel, num_slots: int, max_length: int, library: ctypes.CDLL) -> None:
        self._library = library
        self._keep: list[Any] = []
        config = model.config
        self.dim, self.vocab, self.top_k = config.hidden_size, config.vocab_size, config.num_experts_per_tok
        self.moe_layers = config.num_moe_layers
        with torch.inference_mode():
            layers = [self._layer(block) for block in model.blocks if isinstance(block, Block)]
            cos, sin = model.rotary.angles(torch.arange(max_length), max_length)
            array = (_Layer * len(layers))(*layers)
            self._keep.append(array)
            self._model = _Model(
                len(layers), self.dim, config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim,
                config.v_head_dim, config.kv_lora_rank, config.q_lora_rank or 0, self.vocab, config.n_routed_experts,
                self.top_k, config.moe_intermediate_size, int(config.norm_topk_prob), max_length, num_slots,
                config.rms_norm_eps, config.qk_head_dim**-0.5, config.routed_scaling_factor,
                self._own(model.embedding), self._own(cos), self._own(sin), self._own(model.norm.weight),
                self._own(pack(model.head)), ctypes.cast(array, _POINTER),
            )  # fmt: skip

    def forward(self, batch: Batch, cache: KVCache) -> tuple[Tensor, NDArray[np.int16]]:
        """(hidden ``[N, D]`` before the final norm, experts ``[N, moe_layers, k]``); stores the keys."""
        count = len(batch.tokens)
        hidden = torch.empty(count, self.dim)
        experts = np.empty((count, self.moe_layers, self.top_k), np.int16)
        failed = self._library.etude_forward(
            ctypes.byref(self._model), _INT(count), _POINTER(batch.tokens.data_ptr()),
            _POINTER(batch.slots.data_ptr()), _POINTER(batch.positions.data_ptr()), _POINTER(hidden.data_ptr()),
            _POINTER(experts.ctypes.data), _INT(self.moe_layers), _POINTER(cache.keys.data_ptr()),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for a step of {count} tokens")
        return hidden, experts

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Logits ``[len(rows), V]`` of ``hidden[rows]``."""
        logits = torch.empty(len(rows), self.vocab + -self.vocab % PANEL)
        failed = self._library.etude_logits(
            ctypes.byref(self._model), _INT(len(rows)), _POINTER(hidden.data_ptr()), _POINTER(rows.data_ptr()),
            _POINTER(logits.data_ptr()),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for {len(rows)} rows of logits")
        return logits[:, : self.vocab]

    def _own(self, tensor: Tensor) -> int:
        """Address of a contiguous float32 copy (or the tensor itself) that lives as long as this object."""
        kept = tensor.detach().float().contiguous()
        self._keep.append(kept)
        return kept.data_ptr()

    def _layer(self, block: Block) -> _Layer:
        a = block.attention
        heads, nope, rope, rank = a.num_heads, a.nope, a.rope, a.rank
        q = a.q.view(heads, nope + rope, -1)
        query = torch.cat((q[:, :nope].flatten(0, 1), q[:, nope:].flatten(0, 1)))
        keys = torch.cat((a.kv_a[rank:], a.kv_a[:rank]))
        kv_b = a.kv_b.view(heads, nope + a.value, rank)
        layer = _Layer(
            attention_norm=self._own(block.attention_norm.weight),
            down=self._own(pack(torch.cat((a.q_a if a.has_q_lora else query, keys)))),
            latent_norm=self._own(a.kv_a_norm.weight),
            absorb_key=self._own(pack(kv_b[:, :nope].transpose(1, 2))),
            absorb_value=self._own(pack(kv_b[:, nope:])),
            out=self._own(pack(a.o)),
            mlp_norm=self._own(block.mlp_norm.weight),
        )
        if a.has_q_lora:
            layer.q_norm, layer.query = self._own(a.q_a_norm.weight), self._own(pack(query))
        mlp = block.mlp
        shared = mlp if isinstance(mlp, FeedForward) else mlp.shared
        layer.gate_up, layer.mlp_down = self._own(pack(shared.gate_up)), self._own(pack(shared.down))
        layer.inner = shared.down.shape[1]
        if not isinstance(mlp, FeedForward):
            layer.router, layer.bias = self._own(pack(mlp.router)), self._own(mlp.correction_bias)
            layer.expert_gate_up = self._own(pack(mlp.gate_up.transpose(1, 2)))
            layer.expert_down = self._own(pack(mlp.down.transpose(1, 2)))
        return layer
