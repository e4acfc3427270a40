"""The parts every family shares: normalisation, rotary embedding, the gated feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x * weight / rms(x) over the last dimension."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Rotary(nn.Module):
    """Rotary position embedding on interleaved pairs (x0, x1), (x2, x3), ... of the last dimension.

    The angles of all positions are computed once for ``max_positions`` and grow on demand; they are not part of the
    checkpoint.
    """

    def __init__(self, dim: int, theta: float, max_positions: int) -> None:
        super().__init__()
        self.dim, self.theta = dim, theta
        self._tables = self._build(max_positions)

    def _build(self, num_positions: int) -> tuple[Tensor, Tensor]:
        frequencies = self.theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
        return angles.cos().float(), angles.sin().float()

    def angles(self, positions: Tensor, max_position: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each ``[*positions.shape, dim / 2]``; ``max_position`` bounds ``positions``."""
        if max_position >= len(self._tables[0]):
            self._tables = self._build(2 * max_position)
        cos, sin = self._tables
        return cos[positions], sin[positions]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of ``x [..., dim]`` by angles ``[..., dim / 2]`` (broadcast over leading dimensions)."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``; gate and up are one matrix ``[2 * inner, dim]``."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * inner, dim))
        self.down = nn.Parameter(torch.empty(dim, inner))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)
