"""Configuration of the environments service."""

from __future__ import annotations

from pydantic import Field

from etude.base.config import Config


class EnvironmentsConfig(Config):
    """Knobs of one service process."""

    host: str = "127.0.0.1"
    """Address to listen on. Whoever reaches it and has the key can run commands in pods."""
    port: int = Field(0, ge=0, le=65535)
    """0 takes a free one, which only :func:`etude.environments.process.start_service` can tell its caller."""
    lease_seconds: float = Field(300.0, gt=0)
    """A pod without a request for this long is destroyed; one with a request in progress is not."""
    max_pods: int = Field(512, ge=1)
    """Pods alive at once."""
    max_snapshot_mb: int = Field(1024, ge=1)
    """Memory for all snapshots together; beyond it a new one is refused until others are deleted."""
    max_body_mb: int = Field(64, ge=1, le=64)
    """Largest request body."""
