"""Limits of the harness."""

from __future__ import annotations

from pydantic import Field, model_validator

from etude.base.config import Config


class HarnessConfig(Config):
    """Limits of the harness; those of the task (``Task.limits``) apply as well. Sizes are in tokens."""

    context_budget: int = Field(320, ge=64)
    """What a context may hold before the model is asked for a summary. Tool results are cut to stay within it; only the
    request for a summary and the summary itself go beyond."""
    max_completion: int = Field(64, ge=1)
    """Sampled tokens of one assistant message."""
    max_summary: int = Field(48, ge=1)
    """Sampled tokens of one summary."""
    max_summaries: int = Field(2, ge=0)
    temperature: float = Field(1.0, ge=0.0)

    @model_validator(mode="after")
    def _fits(self) -> HarnessConfig:
        if self.max_completion + self.max_summary >= self.context_budget:
            raise ValueError("context_budget must hold a completion and a summary (max_completion + max_summary)")
        return self
