"""Promises of edits: quoted lines in one place give way to new ones; ``change_lines`` writes a change that does just that."""

from __future__ import annotations

import random

import pytest

from etude.base.edits import apply_edit, change_lines, join_change, split_change, split_lines


@pytest.mark.parametrize(
    ("content", "change", "expected"),
    [
        ("a\nb\nc\n", "b\n====\nB", "a\nB\nc\n"),
        ("a\nb\nc\n", "a\nb\n====\nx\ny\nz", "x\ny\nz\nc\n"),
        ("a\nb\nc\n", "====\nd", "a\nb\nc\nd\n"),
        ("a\nb\nc", "====\nd", "a\nb\nc\nd\n"),
        ("a\nb\nc\n", "b\n====", "a\nc\n"),
        ("a\n\nb\n\nb\n", "a\n\nb\n====\na\n\nc", "a\n\nc\n\nb\n"),
        ("a\n", "a\n====", ""),
        (None, "====\nnew", "new\n"),
        ("", "====\nnew", "new\n"),
        ("x\n", "x\n====\ny\n====\nz", "y\n====\nz\n"),
    ],
)
def test_quoted_lines_give_way(content: str | None, change: str, expected: str) -> None:
    assert apply_edit(content, change) == expected


@pytest.mark.parametrize(
    ("content", "change", "message"),
    [
        ("a\nb\n", "c\n====\nd", "no such lines"),
        ("a\nb\n", "b\na\n====\nd", "no such lines"),
        ("ab\n", "a\n====\nb", "no such lines"),
        ("a\nb\na\n", "a\n====\nd", "2 such places, quote more lines"),
        ("a\na\na\n", "a\na\n====\nd", "2 such places"),
        ("a\n", "a\nb", "no line ==== between"),
        (None, "a\n====\nb", "no such file"),
    ],
)
def test_a_change_that_does_not_fit_is_refused_with_the_reason(content: str | None, change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_edit(content, change)


def test_a_written_change_does_what_a_splice_does_and_quotes_no_line_too_many() -> None:
    """Against list splicing, on files full of repeated lines; one quoted line less at the top would not be unique."""
    rng = random.Random(0)
    for _ in range(3000):
        lines = [rng.choice(("", "x", "y", "    z")) for _ in range(rng.randint(1, 9))]
        first = rng.randint(0, len(lines))
        last = rng.randint(first, len(lines))
        new = [rng.choice(("new", "x", "")) for _ in range(rng.randint(0, 3))]
        change = change_lines(lines, first, last, new)
        wanted = [*lines[:first], *new, *lines[last:]]
        content = "".join(line + "\n" for line in lines)
        assert split_lines(apply_edit(content, change)) == split_lines("".join(line + "\n" for line in wanted))
        old, put = split_change(change)
        if len(old) > max(1, last - first) and old[0] == put[:1]:
            with pytest.raises(ValueError, match="places"):
                apply_edit(content, join_change(old[1:], put[1:]))
