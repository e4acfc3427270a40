"""Plausible slips in an ``edit`` call: what a hurried engineer gets wrong, with the form of the call intact."""

from __future__ import annotations

import random
from collections.abc import Sequence

from etude.base.edits import join_change, split_change
from etude.base.records import ToolCall
from etude.data.mutate import mutate_line

_MISQUOTE_SHARE = 0.15
"""Of the slips, how many quote a line that is not there."""


def spoil(edit: ToolCall, rng: random.Random) -> ToolCall | None:
    """``edit`` with one slip in a new line, or in a quoted one: an operator, constant, name or word wrong. None if none fits."""
    old, new = split_change(edit.arguments["change"])
    if old and rng.random() < _MISQUOTE_SHARE:
        spoilt = _spoil_one(old, range(len(old)), rng)
        change = spoilt and join_change(spoilt, new)
    else:
        spoilt = _spoil_one(new, [i for i, line in enumerate(new) if line not in old], rng)
        change = spoilt and join_change(old, spoilt)
    return edit.model_copy(update={"arguments": {**edit.arguments, "change": change}}) if change else None


def _spoil_one(lines: Sequence[str], candidates: Sequence[int], rng: random.Random) -> list[str] | None:
    """``lines`` with a slip in one of ``candidates``."""
    order = rng.sample(candidates, len(candidates))
    for make in (mutate_line, _swap_words):
        for index in order:
            broken = make(lines[index], rng)
            if broken is not None and broken != lines[index]:
                return [*lines[:index], broken, *lines[index + 1 :]]
    return None


def _swap_words(line: str, rng: random.Random) -> str | None:
    """Two neighbouring words swapped: for prose and text constants, which the code mutations leave alone."""
    indent = line[: len(line) - len(line.lstrip())]
    words = line.split()
    fitting = [i for i in range(len(words) - 1) if words[i].isalnum() and words[i + 1].isalnum()]
    if not fitting:
        return None
    i = rng.choice(fitting)
    words[i], words[i + 1] = words[i + 1], words[i]
    return indent + " ".join(words)
