"""Multi-head latent attention (DeepSeek-V2, section 2.1).

Shapes: B batch, S new positions, T all visible positions, H heads, N nope dim, P rope dim, V value dim, R latent rank.
Only the normalised latent ``[B, T, R]`` and the rotated key ``[B, T, P]`` are kept between calls.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etude.models.config import ModelConfig
from etude.models.layers import RMSNorm, rotate
from etude.models.span_attention import span_attention


class KVContext(Protocol):
    """Where latents of earlier positions come from. Training has none; the engine has its cache."""

    def extend(self, layer: int, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store new ``latent [B, S, R]`` and ``k_rope [B, S, P]`` of a layer; return those of all T visible positions
        and the boolean mask ``[B, 1, S, T]`` of which may be attended to."""
        ...


class LatentAttention(nn.Module):
    """MLA with an expanded form (training, prefill) and an absorbed one (decoding, S = 1)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_attention_heads
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rank = config.kv_lora_rank
        self.scale = config.qk_head_dim**-0.5
        dim, heads = config.hidden_size, config.num_attention_heads
        query_in = config.q_lora_rank or dim
        if config.q_lora_rank:
            self.q_a = nn.Parameter(torch.empty(config.q_lora_rank, dim))
            self.q_a_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.has_q_lora = bool(config.q_lora_rank)
        self.q = nn.Parameter(torch.empty(heads * config.qk_head_dim, query_in))
        self.kv_a = nn.Parameter(torch.empty(config.kv_lora_rank + config.qk_rope_head_dim, dim))
        self.kv_a_norm = RMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b = nn.Parameter(torch.empty(heads * (self.nope + self.value), config.kv_lora_rank))
        self.o = nn.Parameter(torch.empty(dim, heads * self.value))

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], reach: Tensor | None, context: KVContext | None
    ) -> Tensor:
        """``x [B, S, D]`` -> ``[B, S, D]``. ``reach [B, S]`` (see ``span_attention``) is for training; without it, and without
        ``context``, attention is causal."""
        batch, length, _ = x.shape
        cos, sin = angles
        query = self.q_a_norm(F.linear(x, self.q_a)) if self.has_q_lora else x
        q = F.linear(query, self.q).view(batch, length, self.num_heads, self.nope + self.rope).transpose(1, 2)
        q_nope = q[..., : self.nope]
        q_rope = rotate(q[..., self.nope :], cos[:, None], sin[:, None])
        latent, k_rope = torch.split(F.linear(x, self.kv_a), [self.rank, self.rope], dim=-1)
        latent, k_rope = self.kv_a_norm(latent), rotate(k_rope, cos, sin)
        if context is not None:
            latent, k_rope, mask = context.extend(self.layer, latent, k_rope)
            if length == 1:
                return self._absorbed(q_nope, q_rope, latent, k_rope, mask)
            q, k, v = self._expand(q_nope, q_rope, latent, k_rope)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        else:
            if reach is None:
                reach = torch.full((batch, length), length, dtype=torch.int32, device=x.device)
            out = span_attention(*self._expand(q_nope, q_rope, latent, k_rope), reach, self.scale)
        return F.linear(out.transpose(1, 2).reshape(batch, length, self.num_heads * self.value), self.o)

    def _expand(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Up-project the latents to full keys and values: q ``[B, H, S, N + P]``, k ``[B, H, T, N + P]``, v ``[B, H, T, V]``."""
        batch, total, _ = latent.shape
        heads = self.num_heads
        kv = F.linear(latent, self.kv_b).view(batch, total, heads, self.nope + self.value).transpose(1, 2)
        k_nope, v = torch.split(kv, [self.nope, self.value], dim=-1)
        k = torch.cat((k_nope, k_rope[:, None].expand(batch, heads, total, self.rope)), dim=-1)
        return torch.cat((q_nope, q_rope), dim=-1), k, v

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        """One new position per row: fold the up-projection into query and output, so that keys stay latent."""
        batch, heads = q_nope.shape[:2]
        kv_b = self.kv_b.view(heads, self.nope + self.value, self.rank)
        q_latent = torch.einsum("bhn,hnr->bhr", q_nope[:, :, 0], kv_b[:, : self.nope])
        scores = torch.bmm(q_latent, latent.transpose(1, 2)) + torch.bmm(q_rope[:, :, 0], k_rope.transpose(1, 2))
        scores = (scores * self.scale).masked_fill(~mask[:, 0], float("-inf"))
        out_latent = torch.bmm(scores.softmax(dim=-1), latent)
        out = torch.einsum("bhr,hvr->bhv", out_latent, kv_b[:, self.nope :])
        return F.linear(out.reshape(batch, 1, heads * self.value), self.o)
