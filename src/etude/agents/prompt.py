"""What the harness says to the model. Short on purpose: every word is paid for in each rollout."""

from __future__ import annotations

from collections.abc import Sequence

from etude.base.records import Message, Task

SYSTEM_PROMPT = "coding agent. tools: list, read path, search text, edit path old ==== new, reset, run, finish message"
SUMMARY_REQUEST = "sum up: seen, done, next"
MAX_PATHS = 4
"""Edited files named in the carried state."""


def opening(task: Task) -> list[Message]:
    """The first messages of a rollout."""
    return [Message(role="system", content=SYSTEM_PROMPT), Message(role="user", content=task.instruction)]


def reopening(task: Task, summary: str, *, summaries: int, turns: int, edited: Sequence[str]) -> list[Message]:
    """The first messages after self-summary number ``summaries``: prompt, task, summary and carried state (spec 4.6)."""
    state = f"summary {summaries}, turn {turns}: {summary}"
    if edited:
        state += f"\nedited: {' '.join(edited[:MAX_PATHS])}"
    return [*opening(task), Message(role="user", content=state)]
