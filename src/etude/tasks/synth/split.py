"""The train/held-out split: every function text belongs to one side, whatever the seed, category or template.

The side is a hash of the code of a definition (name, parameters, constants and body as a reader sees them; comments and
docstrings aside). A task belongs to a split when all definitions of its modules do, before and after the reference solution.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

Split = Literal["train", "heldout"]
HELD_OUT_SHARE = 5
"""One function in this many is held out."""


def split_of(source: Sequence[str]) -> Split:
    """Side of one definition, given as its lines."""
    digest = hashlib.sha256("\n".join(_code(source)).encode()).digest()
    return "heldout" if digest[0] % HELD_OUT_SHARE == 0 else "train"


def in_split(split: Split, sources: Iterable[Sequence[str]]) -> bool:
    return all(split_of(source) == split for source in sources)


def in_training(text: str) -> bool:
    """Whether all functions of a module lie in the training split."""
    return in_split("train", definitions({"": text}))


def definitions(files: Mapping[str, str]) -> list[list[str]]:
    """Lines of every function of the generated modules in ``files``; tests and hidden files are left out."""
    modules = [text for path, text in files.items() if not path.startswith((".", "test_"))]
    blocks = [block.strip("\n").split("\n") for text in modules for block in text.split("\n\n")]
    return [lines for lines in blocks if lines[0].startswith("def ")]


def _code(source: Sequence[str]) -> list[str]:
    return [line for line in source if not line.lstrip().startswith(("#", '"""'))]
