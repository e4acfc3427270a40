"""Names of checkpoints: a directory, or ``base`` for the model that ships with Etude; and step checkpoints of a run."""

from __future__ import annotations

from pathlib import Path

import etude
from etude.base.errors import CheckpointError

ASSETS = Path(etude.__file__).parent / "assets"
BASE = ASSETS / "base"


def resolve(name: str) -> Path:
    """Directory of a checkpoint. Raises CheckpointError."""
    directory = BASE if name == "base" else Path(name)
    if not (directory / "config.json").exists():
        raise CheckpointError(f"checkpoint {name}: no config.json there; give a Hugging Face directory, or `base`")
    return directory


class StepCheckpoints:
    """``checkpoints/step-N.pt`` of a run; the newest ``keep`` stay."""

    def __init__(self, run: Path, keep: int = 2) -> None:
        self.folder, self.keep = run / "checkpoints", keep

    def path(self, version: int) -> Path:
        return self.folder / f"step-{version:06d}.pt"

    def newest(self) -> Path | None:
        """The newest complete step checkpoint (they are renamed into place)."""
        return max(self.folder.glob("step-*.pt"), default=None)

    def prune(self) -> None:
        for old in sorted(self.folder.glob("step-*.pt"))[: -self.keep]:
            old.unlink(missing_ok=True)
