"""Optimisers: AdamW as the report uses it, and Muon (float32 Newton-Schulz) for training a base from nothing.

``torch.optim.Muon`` orthogonalises in bfloat16, which is several times slower than float32 on CPUs without bf16 units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from etude.base.config import Config


class OptimConfig(Config):
    """Optimiser and schedule of one stage."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-3
    """Peak rate of AdamW (with ``muon``: of the parameters Muon does not take)."""
    muon_lr: float = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    """Bound of the global gradient norm."""
    warmup: float = 0.05
    """Share of the steps with a rising rate."""
    decay: float = 0.4
    """Share of the steps, at the end, with a rate falling to ``final`` of the peak."""
    final: float = 0.05


def schedule(config: OptimConfig, step: int, num_steps: int) -> float:
    """Factor on the peak rate at ``step`` of ``num_steps``: linear warm-up, flat, linear decay."""
    rise = config.warmup * num_steps
    fall = config.decay * num_steps
    factor = min(1.0, (step + 1) / rise) if rise > 0 else 1.0
    left = (num_steps - step) / fall if fall > 0 else 1.0
    return factor * (config.final + (1 - config.final) * min(1.0, max(0.0, left)))


class Muon(torch.optim.Optimizer):
    """Momentum, then the update is replaced by its nearest orthogonal matrix (Jordan et al., 2024).

    Takes matrices ``[..., m, n]``; leading dimensions (stacked experts) are independent matrices.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(momentum, group["momentum"]))
                scale = math.sqrt(max(1.0, parameter.shape[-2] / parameter.shape[-1]))
                parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Quintic Newton-Schulz iteration in float32: singular values of ``[..., m, n]`` are driven to about 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    transposed = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if transposed else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return torch.as_tensor(x.mT if transposed else x)


def build_optimizers(
    config: OptimConfig, model: nn.Module, trainable: Callable[[str], bool] = lambda name: True
) -> list[torch.optim.Optimizer]:
    """One optimiser for AdamW, two for Muon (embeddings, head, router and vectors stay with AdamW)."""
    named = [(name, p) for name, p in model.named_parameters() if trainable(name)]
    matrices = [p for name, p in named if config.name == "muon" and _is_matrix(name, p)]
    taken = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in taken]
    adam = torch.optim.AdamW(rest, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)
    optimizers: list[torch.optim.Optimizer] = [adam]
    if matrices:
        optimizers.append(Muon(matrices, lr=config.muon_lr))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def step_optimizers(
    config: OptimConfig, optimizers: list[torch.optim.Optimizer], model: nn.Module, step: int, num_steps: int
) -> tuple[float, float]:
    """Clip, set the rate, step, clear gradients. Returns (gradient norm before clipping, rate of AdamW)."""
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip))
    factor = schedule(config, step, num_steps)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm, config.lr * factor


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.dim() >= 2 and not name.endswith(("embedding", "head", "router"))
