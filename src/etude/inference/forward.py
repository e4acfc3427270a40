"""The engine's forward pass: many sequences as one flat list of new tokens over the latent cache.

Everything but attention works on all new tokens of a step at once (``[N, D]``, no padding). In attention the rows that feed
one token are a batch in the absorbed form (keys stay latent); a row that feeds more is a chunk in the expanded form. Weights
are rearranged once per version (``ServedModel``), beside the live ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from etude.inference.cache import KVCache
from etude.models.deepseek import Block, DeepseekModel
from etude.models.layers import FeedForward, rotate

VISIBLE_STEP = 32
"""Attention of single-token rows looks at a multiple of this many positions."""


@dataclass(frozen=True)
class Chunk:
    """Several new tokens of one row: flat indices ``[first, last)``, positions ``[start, end)`` of ``slot``."""

    slot: int
    first: int
    last: int
    start: int
    end: int


@dataclass(frozen=True)
class Batch:
    """New tokens of one step: first the rows that feed one token, then the chunks. N tokens, n single rows."""

    tokens: Tensor
    """int64 ``[N]``."""
    slots: Tensor
    """int64 ``[N]``."""
    positions: Tensor
    """int64 ``[N]``."""
    num_single: int
    longest: int
    """Most positions that a single row may attend to (0 without single rows)."""
    chunks: tuple[Chunk, ...]


class ServedModel:
    """One version's weights, rearranged for serving. Immutable after construction."""

    def __init__(self, model: DeepseekModel, max_length: int) -> None:
        self.model = model
        self.layers = [_Layer(block) for block in model.blocks if isinstance(block, Block)]
        cos, sin = model.rotary.angles(torch.arange(max_length), max_length)
        self.angles = cos, sin
        """Each ``[max_length, P / 2]``."""

    def forward(self, batch: Batch, cache: KVCache) -> tuple[Tensor, NDArray[np.int16]]:
        """(hidden ``[N, D]`` before the final norm, experts ``[N, moe_layers, k]``); stores the keys."""
        step = _Step(batch, cache, self)
        x = F.embedding(batch.tokens, self.model.embedding)
        experts: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            block = layer.block
            x = x + layer.attend(block.attention_norm(x), step, cache.keys[index])
            normed = block.mlp_norm(x)
            if isinstance(block.mlp, FeedForward):
                x = x + block.mlp(normed)
            else:
                out, used = block.mlp(normed, None)
                x = x + out
                experts.append(used)
        return x, torch.stack(experts, dim=1).to(torch.int16).numpy()

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Logits ``[len(rows), V]`` of ``hidden[rows]``."""
        return self.model.logits(hidden.index_select(0, rows))


class _Step:
    """What all layers of one step share."""

    def __init__(self, batch: Batch, cache: KVCache, served: ServedModel) -> None:
        self.batch, n = batch, batch.num_single
        self.where = batch.slots * cache.max_length + batch.positions
        self.cos, self.sin = (table[batch.positions][:, None] for table in served.angles)
        self.rows = batch.slots[:n]
        self.visible = min(-(-batch.longest // VISIBLE_STEP) * VISIBLE_STEP, cache.max_length)
        self.mask = _mask(batch.positions[:n], self.visible)[:, None]
        self.chunk_masks = [
            _mask(torch.arange(chunk.start, chunk.end), chunk.end) if chunk.start else None for chunk in batch.chunks
        ]


def _mask(positions: Tensor, visible: int) -> Tensor:
    """Float ``[len(positions), visible]``: 0 for what a position may attend to, -inf for its future."""
    future = torch.arange(visible) > positions[:, None]
    return torch.zeros(future.shape).masked_fill_(future, float("-inf"))


class _Layer:
    """A block with its attention weights fused and permuted: one projection gives q_nope | q_rope | k_rope | latent."""

    def __init__(self, block: Block) -> None:
        a = block.attention
        self.block, self.attention = block, a
        heads, nope, rope, value, rank = a.num_heads, a.nope, a.rope, a.value, a.rank
        self.heads, self.nope, self.rope, self.value, self.rank = heads, nope, rope, value, rank
        with torch.no_grad():
            q = a.q.view(heads, nope + rope, -1)
            query = torch.cat((q[:, :nope].flatten(0, 1), q[:, nope:].flatten(0, 1)))
            keys = torch.cat((a.kv_a[rank:], a.kv_a[:rank]))
            self.query = query if a.has_q_lora else None
            self.down = torch.cat((a.q_a if a.has_q_lora else query, keys))
            kv_b = a.kv_b.view(heads, nope + value, rank)
            self.absorb_key = kv_b[:, :nope].contiguous()
            self.absorb_value = kv_b[:, nope:].transpose(1, 2).contiguous()

    def attend(self, x: Tensor, step: _Step, keys: Tensor) -> Tensor:
        """Attention of the new tokens ``x [N, D]`` over ``keys [slots, max_length, R + P]`` of this layer."""
        q_nope, q_rope, new = self._project(x, step)
        keys.view(-1, new.shape[-1]).index_copy_(0, step.where, new)
        n = step.batch.num_single
        parts: list[Tensor] = []
        if n:
            parts.append(self._absorbed(q_nope[:n], q_rope[:n], step, keys))
        for chunk, mask in zip(step.batch.chunks, step.chunk_masks, strict=True):
            span = slice(chunk.first, chunk.last)
            parts.append(self._expanded(q_nope[span], q_rope[span], keys[chunk.slot, : chunk.end], mask))
        return F.linear(parts[0] if len(parts) == 1 else torch.cat(parts), self.attention.o)

    def _project(self, x: Tensor, step: _Step) -> tuple[Tensor, Tensor, Tensor]:
        """(q_nope ``[N, H, n]``, rotated q_rope ``[N, H, P]``, new cache rows ``[N, R + P]``)."""
        count, a = len(x), self.attention
        out = F.linear(x, self.down)
        if self.query is not None:
            out, keys = out[:, : -(self.rank + self.rope)], out[:, -(self.rank + self.rope) :]
            out = torch.cat((F.linear(a.q_a_norm(out), self.query), keys), dim=-1)
        split = self.heads * self.nope
        turned = out[:, split : split + (self.heads + 1) * self.rope].view(count, self.heads + 1, self.rope)
        turned = rotate(turned, step.cos, step.sin)
        latent = a.kv_a_norm(out[:, -self.rank :])
        new = torch.cat((latent, turned[:, -1]), dim=-1)
        return out[:, :split].view(count, self.heads, self.nope), turned[:, :-1], new

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, step: _Step, keys: Tensor) -> Tensor:
        """One new position per row: scores against the latents themselves."""
        held = keys[:, : step.visible].index_select(0, step.rows)
        q_latent = torch.bmm(q_nope.transpose(0, 1), self.absorb_key).transpose(0, 1)
        q = torch.cat((q_latent, q_rope), dim=-1)
        mask = step.mask.expand(-1, self.heads, -1)
        scores = torch.baddbmm(mask, q, held.transpose(1, 2), alpha=self.attention.scale)
        out = torch.bmm(scores.softmax(dim=-1), held[..., : self.rank])
        out = torch.bmm(out.transpose(0, 1), self.absorb_value).transpose(0, 1)
        return out.reshape(step.batch.num_single, self.heads * self.value)

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, held: Tensor, mask: Tensor | None) -> Tensor:
        """A chunk of one row: up-project what it sees (``held [T, R + P]``), then ordinary attention."""
        total = len(held)
        kv = F.linear(held[:, : self.rank], self.attention.kv_b).view(total, self.heads, self.nope + self.value)
        rope = held[:, None, self.rank :].expand(total, self.heads, self.rope)
        k = torch.cat((kv[..., : self.nope], rope), dim=-1).transpose(0, 1)
        q = torch.cat((q_nope, q_rope), dim=-1).transpose(0, 1)
        v = kv[..., self.nope :].transpose(0, 1)
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=self.attention.scale
        )
        return out[0].transpose(0, 1).reshape(q.shape[1], self.heads * self.value)
