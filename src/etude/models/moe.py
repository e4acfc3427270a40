"""Mixture of experts: sigmoid router with correction bias, routed experts by grouped GEMM, a shared expert.

Selection uses score + bias, combination the score alone (DeepSeek-V3, section 2.1.2). T tokens, E experts, k per token.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etude.models.config import ModelConfig
from etude.models.layers import FeedForward


class Routing(Protocol):
    """Overrides the router's choice, e.g. with the experts that the inference engine used (router replay)."""

    def select(self, moe_layer: int, scores: Tensor, own: Tensor) -> Tensor:
        """Experts to use, int64 ``[T, k]``, given gating ``scores [T, E]`` and the router's ``own [T, k]`` choice."""
        ...


class MixtureOfExperts(nn.Module):
    """One MoE layer. ``moe_layer`` counts MoE layers from 0."""

    correction_bias: Tensor

    def __init__(self, config: ModelConfig, moe_layer: int) -> None:
        super().__init__()
        self.moe_layer = moe_layer
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.n_routed_experts
        self.normalise = config.norm_topk_prob
        self.scaling = config.routed_scaling_factor
        dim, inner = config.hidden_size, config.moe_intermediate_size
        self.router = nn.Parameter(torch.empty(self.num_experts, dim))
        self.register_buffer("correction_bias", torch.zeros(self.num_experts))
        # [E, in, out], the layout grouped GEMM reads without a copy
        self.gate_up = nn.Parameter(torch.empty(self.num_experts, dim, 2 * inner))
        self.down = nn.Parameter(torch.empty(self.num_experts, inner, dim))
        self.shared = FeedForward(dim, inner * config.n_shared_experts)

    def forward(self, x: Tensor, routing: Routing | None) -> tuple[Tensor, Tensor]:
        """``x [T, D]`` -> (output ``[T, D]``, experts used int64 ``[T, k]``)."""
        scores = F.linear(x, self.router).sigmoid()
        experts = (scores.detach() + self.correction_bias).topk(self.top_k, dim=-1).indices
        if routing is not None:
            experts = routing.select(self.moe_layer, scores.detach(), experts)
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return self._experts(x, experts, weights * self.scaling) + self.shared(x), experts

    def _experts(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Sum over k of ``weights * expert(x)``, each expert one group of a grouped GEMM over sorted tokens."""
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        source = order // self.top_k
        ends = F.one_hot(flat, self.num_experts).sum(0).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(x[source], self.gate_up, offs=ends).chunk(2, dim=-1)
        hidden = F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        # back to [T, k, D] by the inverse permutation: the sum over k then has one fixed order, whatever the batch
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return (hidden[inverse].view(len(x), self.top_k, -1) * weights[..., None]).sum(dim=1)
