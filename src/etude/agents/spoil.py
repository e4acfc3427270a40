"""Plausible slips in an ``edit`` call: what a hurried engineer gets wrong, with the form of the call intact."""

from __future__ import annotations

import random

from etude.base.records import ToolCall
from etude.data.mutate import mutate_line

_WRONG_LINE_SHARE = 0.2
"""Of the slips, how many are a good line in the wrong place."""


def spoil(edit: ToolCall, rng: random.Random) -> ToolCall | None:
    """``edit`` with one slip: an operator, constant, name or word wrong in one line, or the next line hit. None if none fits."""
    if rng.random() < _WRONG_LINE_SHARE:
        return _wrong_line(edit, rng)
    lines = edit.arguments.get("text", "").split("\n")
    order = list(range(len(lines)))
    rng.shuffle(order)
    for make in (mutate_line, _swap_words):
        for index in order:
            broken = make(lines[index], rng)
            if broken is not None and broken != lines[index]:
                return _with(edit, text="\n".join([*lines[:index], broken, *lines[index + 1 :]]))
    return _wrong_line(edit, rng)


def _with(edit: ToolCall, **arguments: str) -> ToolCall:
    return edit.model_copy(update={"arguments": {**edit.arguments, **arguments}})


def _wrong_line(edit: ToolCall, rng: random.Random) -> ToolCall | None:
    at = edit.arguments["at"]
    number, plus = at.rstrip("+"), at.endswith("+")
    if not number.isdigit() or number == "0":
        return None
    moved = int(number) + rng.choice((-1, 1))
    return _with(edit, at=f"{max(moved, 0 if plus else 1)}{'+' if plus else ''}")


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
