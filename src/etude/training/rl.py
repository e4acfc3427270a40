"""The RL trainer: one step from complete groups to the next policy version.

Stages of :meth:`RLTrainer.step`: pack -> loss (:mod:`etude.training.rl_loss`: forward with replayed routing, KL against the
reference, policy loss) -> backward -> Adam on float32 masters -> round to the served dtype -> move the reference. The weights
the model computes with are always exactly those that are published, so that trainer and engine agree.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from etude.algorithms.policy import effective_sample_size
from etude.base.errors import CheckpointError
from etude.base.records import RolloutGroup
from etude.base.telemetry import full_disk_named
from etude.models.checkpoint import export_state
from etude.models.deepseek import DeepseekModel
from etude.training.rl_batch import RLBatch, SampledTokens, pack_groups
from etude.training.rl_loss import RLLossConfig, batch_loss


class RLTrainConfig(RLLossConfig):
    """What one RL step does. The report states none of these values; docs/algorithm.md gives our reasons."""

    reference: Literal["frozen", "none", "moving_average"] = "frozen"
    """What the KL is taken against: the policy RL starts from, nothing, or a moving average of the policy."""
    reference_decay: float = Field(0.99, ge=0.0, le=1.0)
    """Share of the old reference that a step keeps, where it is a moving average."""
    reference_every: int = Field(1, ge=1)
    """Every so many packed batches carry the KL term, weighted that much more: the same expectation for less computation."""
    mask_overlong: bool = False
    """Leave chains that a limit cut short out of the gradient."""
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 3
    clip: float = 1.0
    row_length: int = 512
    rows_per_batch: int = 8
    served_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    threads: int = 1

    @model_validator(mode="after")
    def _reference_for_kl(self) -> RLTrainConfig:
        if self.reference == "none" and self.kl_coefficient > 0:
            raise ValueError(f"reference is none, but kl_coefficient is {self.kl_coefficient}; set kl_coefficient=0")
        return self


class RLTrainer:
    """Owner of the policy being trained, its optimiser and the reference."""

    def __init__(self, model: DeepseekModel, config: RLTrainConfig) -> None:
        torch.set_num_threads(config.threads)
        self.config, self.model, self.version = config, model, 0
        self._dtype = getattr(torch, config.served_dtype)
        self._masters = [p.detach().clone() for p in model.parameters()]
        for master in self._masters:
            master.requires_grad_(True)
        self._round()
        self.reference = None if config.reference == "none" else copy.deepcopy(model).requires_grad_(False)
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=config.lr, betas=config.betas, weight_decay=0.0, fused=True
        )

    # ------------------------------------------------------------------------------------------------ the step

    def step(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Train once on ``groups``, raise the policy version by one and return the metrics of the step."""
        clock = time.monotonic()
        config, shape = self.config, self.model.config
        batches = pack_groups(
            groups, row_length=config.row_length, rows_per_batch=config.rows_per_batch,
            moe_layers=shape.num_moe_layers, top_k=shape.num_experts_per_tok, mask_overlong=config.mask_overlong,
        )  # fmt: skip
        num_chains = sum(len(group.rollouts) for group in groups)
        collected = [
            self._forward_backward(batch, num_chains, with_kl=(index + self.version) % config.reference_every == 0)
            for index, batch in enumerate(batches)
        ]
        grad_norm = self._update() if batches else 0.0
        self._move_reference()
        self.version += 1
        metrics = _merge(collected, self.version - 1, config.truncation)
        metrics.update(
            grad_norm=grad_norm,
            train_seconds=time.monotonic() - clock,
            train_tokens=float(sum(batch.num_positions for batch in batches)),
            segment_tokens=float(sum(batch.num_segment_tokens for batch in batches)),
        )
        return metrics

    def _forward_backward(self, batch: RLBatch, num_chains: int, *, with_kl: bool) -> dict[str, Tensor]:
        """Gradient of one packed batch; returns per-token values of its N sampled tokens."""
        reference = self.reference if with_kl else None
        made = batch_loss(self.model, reference, batch, self.config, num_chains, kl_scale=self.config.reference_every)
        torch.autograd.backward(made.policy.loss)
        return {
            "gap": (made.logprobs - batch.sampled.behaviour).abs(),
            "fresh": _fresh(batch.sampled, self.version),
            "weights": made.policy.weights,
            "kl": made.policy.kl if with_kl else made.policy.kl[:0],
            "entropy": made.entropy,
            "versions": batch.sampled.versions,
            "kept": torch.tensor([made.routing.num_kept, made.routing.num_known]),
        }

    def _update(self) -> float:
        for master, parameter in zip(self._masters, self.model.parameters(), strict=True):
            master.grad = parameter.grad
            parameter.grad = None
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self.config.clip))
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.lr * min(1.0, (self.version + 1) / max(self.config.warmup_steps, 1))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._round()
        return norm

    @torch.no_grad()
    def _round(self) -> None:
        """Make the model's weights exactly what is served: the masters rounded to the served dtype."""
        for master, parameter in zip(self._masters, self.model.parameters(), strict=True):
            parameter.copy_(master.to(self._dtype))

    @torch.no_grad()
    def _move_reference(self) -> None:
        if self.config.reference != "moving_average" or self.reference is None:
            return
        for master, followed in zip(self._masters, self.reference.parameters(), strict=True):
            followed.lerp_(master, 1.0 - self.config.reference_decay)

    # ------------------------------------------------------------------------------------- state in and out

    def served_state(self) -> dict[str, Tensor]:
        """Published name -> tensor of the current version, in the served dtype (a copy)."""
        return {name: tensor.clone() for name, tensor in export_state(self.model, self._dtype).items()}

    def save(self, path: Path, trained: Sequence[str]) -> None:
        """Write a step checkpoint atomically: masters, optimiser, reference, version, tasks of the last step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "version": self.version,
            "trained": list(trained),
            "masters": self._masters,
            "optimizer": self._optimizer.state_dict(),
            "buffers": dict(self.model.named_buffers()),
            "reference": self.reference.state_dict() if self.reference is not None else None,
        }
        temporary = path.with_suffix(".tmp")
        with full_disk_named(path):
            torch.save(state, temporary)
            temporary.rename(path)

    def load(self, path: Path) -> list[str]:
        """Go on from a step checkpoint; returns the ids of the tasks its last step trained on."""
        try:
            state: dict[str, Any] = torch.load(path, weights_only=True)
        except (OSError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"step checkpoint {path}: cannot be read: {error}") from None
        with torch.no_grad():
            for master, saved in zip(self._masters, state["masters"], strict=True):
                master.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        if self.reference is not None:
            if state["reference"] is None:
                raise CheckpointError(f"step checkpoint {path} has no reference; go on with train.reference=none")
            self.reference.load_state_dict(state["reference"])
        self.version = int(state["version"])
        self._round()
        return list(state["trained"])


def _fresh(sampled: SampledTokens, version: int) -> Tensor:
    """bool ``[N]``: tokens of segments that ``version`` alone sampled, where trainer and engine must agree."""
    stale = sampled.segments[sampled.versions != version]
    return ~torch.isin(sampled.segments, stale)


def _merge(collected: Sequence[dict[str, Tensor]], version: int, truncation: float) -> dict[str, float]:
    """Metrics of a step from the per-token values of its batches."""
    if not collected:
        return {"trained_tokens": 0.0}
    joined = {name: torch.cat([part[name] for part in collected]) for name in collected[0] if name != "kept"}
    kept = torch.stack([part["kept"] for part in collected]).sum(0)
    lag = (version - joined["versions"]).float()
    metrics = {
        "trained_tokens": float(len(lag)),
        "truncated_share": float((joined["weights"] >= truncation).float().mean()),
        "ess": effective_sample_size(joined["weights"]),
        "kl": float(joined["kl"].mean()) if len(joined["kl"]) else 0.0,
        "entropy": float(joined["entropy"].mean()),
        "staleness_mean": float(lag.mean()),
        "staleness_max": float(lag.max()),
        "offpolicy_gap_mean": float(joined["gap"].mean()),
        "replay_kept": float(kept[0]) / max(float(kept[1]), 1.0),
    }
    fresh = joined["gap"][joined["fresh"]]
    if len(fresh):
        metrics["logprob_gap_mean"] = float(fresh.mean())
        metrics["logprob_gap_p99"] = float(fresh.quantile(0.99))
    return metrics
