"""The line edit of the ``edit`` tool; tasks write their reference solutions with the same function."""

from __future__ import annotations

import re

_AT = re.compile(r"(\d+)(?:-(\d+)|(\+))?")


def apply_edit(content: str | None, at: str, text: str) -> str:
    """New content of a file after one edit.

    ``at`` counts lines from 1: ``"7"`` replaces line 7, ``"3-5"`` lines 3 to 5, ``"7+"`` inserts after line 7, ``"0+"`` at the
    top. ``content`` None is a file that does not exist: only ``"0+"`` fits, and creates it. Empty ``text`` deletes replaced
    lines. Raises ValueError with a short message that a model can act on.
    """
    match = _AT.fullmatch(at.strip())
    if match is None:
        raise ValueError(f"bad line {at!r}; use 7, 3-5 or 7+")
    if content is None and at.strip() != "0+":
        raise ValueError("no such file; use 0+ to create it")
    lines = (content or "").split("\n")
    if lines[-1] == "":
        lines.pop()
    new = text.split("\n") if text else []
    first, last = int(match[1]), int(match[2] or match[1])
    if match[3]:
        if first > len(lines):
            raise ValueError(f"the file has {len(lines)} lines")
        lines[first:first] = new
    else:
        if not 1 <= first <= last or last > len(lines):
            raise ValueError(f"the file has {len(lines)} lines")
        lines[first - 1 : last] = new
    return "\n".join(lines) + "\n" if lines else ""
