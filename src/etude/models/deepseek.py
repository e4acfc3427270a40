"""The DeepSeek-V3 / Kimi-K2 form: MLA, first layers dense, then MoE; MTP depths on top.

B batch, S positions, D hidden, V vocabulary, L MoE layers, k experts a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etude.models.attention import KVContext, LatentAttention
from etude.models.config import ModelConfig
from etude.models.layers import FeedForward, RMSNorm, Rotary
from etude.models.moe import MixtureOfExperts, Routing


class Output(NamedTuple):
    """What a forward pass gives; logits are made from ``hidden`` only where they are needed."""

    hidden: Tensor
    """``[B, S, D]`` after the last block, before the final norm."""
    experts: Tensor
    """int64 ``[B, S, L, k]``."""


class Block(nn.Module):
    """Pre-norm attention, then a dense or MoE feed-forward layer. ``moe_layer`` None means dense."""

    def __init__(self, config: ModelConfig, layer: int, moe_layer: int | None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = LatentAttention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: FeedForward | MixtureOfExperts
        if moe_layer is None:
            self.mlp = FeedForward(config.hidden_size, config.intermediate_size)
        else:
            self.mlp = MixtureOfExperts(config, moe_layer)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        reach: Tensor | None,
        context: KVContext | None,
        routing: Routing | None,
    ) -> tuple[Tensor, Tensor | None]:
        """``x [B, S, D]`` -> (``[B, S, D]``, experts ``[B, S, k]`` or None for a dense layer)."""
        x = x + self.attention(self.attention_norm(x), angles, reach, context)
        normed = self.mlp_norm(x)
        if isinstance(self.mlp, FeedForward):
            return x + self.mlp(normed), None
        batch, length, dim = x.shape
        out, experts = self.mlp(normed.reshape(-1, dim), routing)
        return x + out.view(batch, length, dim), experts.view(batch, length, -1)


class MTPDepth(nn.Module):
    """One multi-token-prediction depth: ``Block(M [norm(Emb(t_{i+k})) ; norm(h_{k-1,i})])`` (DeepSeek-V3, 2.2)."""

    def __init__(self, config: ModelConfig, depth: int) -> None:
        super().__init__()
        self.embedding_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.merge = nn.Parameter(torch.empty(config.hidden_size, 2 * config.hidden_size))
        self.block = Block(config, config.num_hidden_layers + depth, config.num_moe_layers + depth)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DeepseekModel(nn.Module):
    """The whole model. Weights start random; :func:`initialise` sets their scale."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        dense = config.first_k_dense_replace
        self.blocks = nn.ModuleList(
            Block(config, layer, None if layer < dense else layer - dense) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.mtp = nn.ModuleList(MTPDepth(config, depth) for depth in range(config.num_nextn_predict_layers))
        self.rotary = Rotary(config.qk_rope_head_dim, config.rope_theta, config.max_position_embeddings)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        reach: Tensor | None = None,
        context: KVContext | None = None,
        routing: Routing | None = None,
        max_position: int | None = None,
    ) -> Output:
        """Run the trunk on ``tokens`` int64 ``[B, S]``.

        ``positions [B, S]`` default to 0..S-1; ``reach`` int32 ``[B, S]`` restricts attention (see ``span_attention``);
        ``context`` supplies a KV cache; ``routing`` overrides expert choices; ``max_position`` bounds ``positions``
        where the caller knows it (it saves a look at the tensor).
        """
        angles = self._angles(tokens, positions, max_position)
        x = F.embedding(tokens, self.embedding)
        experts: list[Tensor] = []
        for block in self.blocks:
            x, used = block(x, angles, reach, context, routing)
            if used is not None:
                experts.append(used)
        return Output(x, torch.stack(experts, dim=2))

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [..., D]`` -> float32 logits ``[..., V]`` of the main head."""
        return F.linear(self.norm(hidden), self.head)

    def mtp_hidden(
        self,
        depth: int,
        hidden: Tensor,
        next_tokens: Tensor,
        *,
        positions: Tensor | None = None,
        reach: Tensor | None = None,
        context: KVContext | None = None,
        routing: Routing | None = None,
        max_position: int | None = None,
    ) -> Tensor:
        """Depth ``depth`` (0-based): ``hidden [B, S, D]`` of the depth before at position i and ``next_tokens [B, S]`` =
        t_{i+depth+1} -> hidden whose :meth:`mtp_logits` predict t_{i+depth+2}."""
        module = self.mtp[depth]
        assert isinstance(module, MTPDepth)
        embedded = module.embedding_norm(F.embedding(next_tokens, self.embedding))
        merged = F.linear(torch.cat((embedded, module.hidden_norm(hidden)), dim=-1), module.merge)
        angles = self._angles(next_tokens, positions, max_position)
        out, _ = module.block(merged, angles, reach, context, routing)
        return torch.as_tensor(out)

    def mtp_logits(self, depth: int, hidden: Tensor) -> Tensor:
        """Logits ``[..., V]`` of an MTP depth through the shared output head."""
        module = self.mtp[depth]
        assert isinstance(module, MTPDepth)
        return F.linear(module.norm(hidden), self.head)

    def _angles(self, tokens: Tensor, positions: Tensor | None, max_position: int | None) -> tuple[Tensor, Tensor]:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
            max_position = tokens.shape[1] - 1
        elif max_position is None:
            max_position = int(positions.max())
        return self.rotary.angles(positions, max_position)


def initialise(model: DeepseekModel, seed: int) -> None:
    """Draw all weights: N(0, 1/sqrt(fan_in)) for matrices, embeddings N(0, 0.5), zero for what adds to the residual."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            continue
        with torch.no_grad():
            leaf = name.rsplit(".", 1)[-1]
            if leaf in ("o", "down"):
                parameter.zero_()
            elif name == "embedding":
                parameter.normal_(0.0, 0.5, generator=generator)
            elif name == "head":
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                fan_in = parameter.shape[-2] if parameter.dim() == 3 else parameter.shape[-1]
                parameter.normal_(0.0, fan_in**-0.5, generator=generator)
