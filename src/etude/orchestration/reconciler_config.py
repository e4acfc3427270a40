"""Configuration of the reconciler."""

from __future__ import annotations

from pydantic import Field

from etude.base.config import Config


class ReconcilerConfig(Config):
    """The policy knobs of the sample life cycle."""

    group_size: int = Field(8, ge=2)
    """Rollouts of one task that train together."""
    max_staleness: int = Field(2, ge=0)
    """Versions that the oldest token of a group may be behind the trainer; 0 is synchronous."""
    max_retries: int = Field(2, ge=0)
    """How often an attempt that hit a fault is started again before its group is dropped."""
    slots: int = Field(0, ge=0)
    """Attempts that run at once; 0 means as many as executors ask for."""
    slot_seconds: float = Field(900.0, gt=0)
    """An attempt that is not back after so long counts as lost with its executor, and is started again."""
