"""The edit of the ``edit`` tool: quoted lines give way to new ones. Tasks write their reference solutions in the same form.

A *change* is one text: the lines to replace as they stand in the file, a line ``====``, and the lines that take their place.
"""

from __future__ import annotations

from collections.abc import Sequence

SEPARATOR = "===="


def apply_edit(content: str | None, change: str) -> str:
    """New content of a file after one change.

    The quoted lines must stand together in exactly one place. Without quoted lines the new ones go to the end of the file,
    which is created if ``content`` is None (no such file). Without new lines the quoted ones are deleted. Raises ValueError
    with a short message that a model can act on.
    """
    old, new = split_change(change)
    if content is None and old:
        raise ValueError("no such file")
    lines = split_lines(content or "")
    if not old:
        return _joined([*lines, *new])
    places = _places(lines, old)
    if not places:
        raise ValueError("no such lines")
    if len(places) > 1:
        raise ValueError(f"{len(places)} such places, quote more lines")
    lines[places[0] : places[0] + len(old)] = new
    return _joined(lines)


def split_change(change: str) -> tuple[list[str], list[str]]:
    """(quoted lines, new lines). Raises ValueError without a separator."""
    lines = change.split("\n")
    if SEPARATOR not in lines:
        raise ValueError(f"no line {SEPARATOR} between old and new lines")
    middle = lines.index(SEPARATOR)
    return lines[:middle], lines[middle + 1 :]


def join_change(old: Sequence[str], new: Sequence[str]) -> str:
    """The change that puts ``new`` in place of ``old``."""
    return "\n".join([*old, SEPARATOR, *new])


def change_lines(lines: Sequence[str], first: int, last: int, new: Sequence[str]) -> str:
    """The change that puts ``new`` in place of ``lines[first:last]``, quoting as many lines more as make the place unique.

    ``first == last`` inserts; at the end of the file nothing is quoted.
    """
    if first == last == len(lines):
        return join_change([], new)
    start, end = first, last
    while start == end or len(_places(lines, lines[start:end])) > 1:
        start, end = (start - 1, end) if start > 0 else (start, end + 1)
    return join_change(lines[start:end], [*lines[start:first], *new, *lines[last:end]])


def split_lines(content: str) -> list[str]:
    """Lines of a file; a newline at its end begins no line."""
    lines = content.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _places(lines: Sequence[str], old: Sequence[str]) -> list[int]:
    return [i for i in range(len(lines) - len(old) + 1) if list(lines[i : i + len(old)]) == list(old)]


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n" if lines else ""
