"""What a maker of a category decides about a task."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from etude.base.records import Message, Verifier
from etude.tasks.synth.repository import Repository


@dataclass(frozen=True)
class Draft:
    """What a maker decides about a task."""

    instruction: str
    files: dict[str, str]
    solution: list[Message]
    verifier: Verifier
    instance: str


Maker = Callable[[random.Random, Repository], "Draft | None"]
"""Returns None when the drawn repository does not lend itself to a checkable task."""
