"""Plausible one-line faults: what a hurried engineer gets wrong, as a text edit of one line of Python."""

from __future__ import annotations

import random
import re

_SWAPS: dict[str, tuple[str, ...]] = {
    " + ": (" - ", " * "),
    " - ": (" + ",),
    " * ": (" + ", " - "),
    " / ": (" * ", " // "),
    " // ": (" / ", " % "),
    " == ": (" != ",),
    " != ": (" == ",),
    " < ": (" > ", " <= "),
    " > ": (" < ", " >= "),
    " <= ": (" < ", " >= "),
    " >= ": (" > ", " <= "),
    " and ": (" or ",),
    " or ": (" and ",),
    "min(": ("max(",),
    "max(": ("min(",),
    "True": ("False",),
    "False": ("True",),
    " not in ": (" in ",),
    " in ": (" not in ",),
    " is not ": (" is ",),
    " is ": (" is not ",),
    "+=": ("-=",),
    "-=": ("+=",),
    "not ": ("",),
    ".lower(": (".upper(",),
    ".upper(": (".lower(",),
    "[0]": ("[1]", "[-1]"),
    "[-1]": ("[0]",),
    ".append(": (".remove(",),
    "any(": ("all(",),
    "all(": ("any(",),
    "sum(": ("len(",),
    "len(": ("sum(",),
}
_NAME = re.compile(r"\b[a-z_][a-z_0-9]*\b")
KEYWORDS = {
    "def",
    "return",
    "if",
    "else",
    "elif",
    "for",
    "in",
    "not",
    "is",
    "and",
    "or",
    "while",
    "lambda",
    "import",
}


def mutate_line(line: str, rng: random.Random) -> str | None:
    """``line`` with one fault, or None when no mutation fits."""
    makers = [_swap_operator, _swap_operator, _shift_number, _swap_names]
    rng.shuffle(makers)
    for make in makers:
        broken = make(line, rng)
        if broken is not None and broken != line:
            return broken
    return None


def _swap_operator(line: str, rng: random.Random) -> str | None:
    code = line.split("#")[0]
    skip = " in " if code.lstrip().startswith("for ") else ""
    fitting = [old for old in _SWAPS if old in code and old != skip and "'" not in code and '"' not in code]
    if not fitting:
        return None
    old = rng.choice(fitting)
    return line.replace(old, rng.choice(_SWAPS[old]), 1)


def _shift_number(line: str, rng: random.Random) -> str | None:
    found = list(re.finditer(r"(?<![\w.])\d{1,3}(?![\w.])", line))
    if not found:
        return None
    match = rng.choice(found)
    value = max(0, int(match.group()) + rng.choice((-1, 1, 1, 2)))
    return line[: match.start()] + str(value) + line[match.end() :]


def _swap_names(line: str, rng: random.Random) -> str | None:
    names = [m for m in _NAME.finditer(line) if m.group() not in KEYWORDS and line[m.end() : m.end() + 1] != "("]
    distinct = sorted({m.group() for m in names})
    if len(distinct) < 2 or '"' in line or "'" in line:
        return None
    match = rng.choice(names)
    other = rng.choice([name for name in distinct if name != match.group()])
    return line[: match.start()] + other + line[match.end() :]
