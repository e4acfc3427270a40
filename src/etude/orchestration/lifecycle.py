"""The life of a sample: its states, and the one table of legal moves between them.

Two levels. Each *attempt* at a task (0 .. G-1) lives ``queued -> running -> verifying -> scored -> grouped``; a fault or a
restart of the run sends it back to ``queued``. The *group* of the task (attempt -1) is ``queued`` while its attempts live,
``ready`` once all are grouped, then ``trained``. Either ends in ``dropped`` instead, with a reason; a group takes its open
attempts along. A closed group's attempts do not move. Moves backwards and drops carry a reason.

A run that resumes from an older step checkpoint has lost what was trained since: those groups go back to ``ready``
(``queued`` where the file is gone) with the reason ``rolled back``, and may be trained again, since no surviving weights
hold them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from etude.base.errors import EtudeError
from etude.base.records import PolicyVersion

GROUP = -1
"""Attempt number of the group itself."""
NEW, QUEUED, RUNNING, VERIFYING, SCORED, GROUPED = "", "queued", "running", "verifying", "scored", "grouped"
READY, TRAINED, DROPPED = "ready", "trained", "dropped"
RESUME = "resume"
"""Reason of moves that a restart makes; not a fault."""
NO_SIGNAL = "no_signal"
"""Reason of the ``ready`` move of a group whose advantages are all alike."""

LEGAL: frozenset[tuple[str, str, str]] = frozenset(
    {
        ("attempt", NEW, QUEUED),
        ("attempt", QUEUED, RUNNING),
        ("attempt", RUNNING, VERIFYING),
        ("attempt", VERIFYING, SCORED),
        ("attempt", SCORED, GROUPED),
        *(("attempt", before, QUEUED) for before in (RUNNING, VERIFYING, SCORED, GROUPED, DROPPED)),
        *(("attempt", before, DROPPED) for before in (QUEUED, RUNNING, VERIFYING, SCORED)),
        ("group", NEW, QUEUED),
        ("group", QUEUED, READY),
        ("group", READY, TRAINED),
        ("group", QUEUED, DROPPED),
        ("group", READY, DROPPED),
        ("group", READY, QUEUED),  # its file is gone
        ("group", TRAINED, READY),  # rolled back
        ("group", TRAINED, QUEUED),  # rolled back, and its file is gone
    }
)


class IllegalMove(EtudeError):
    """A move that the table does not allow: a bug, or two owners of one run."""


@dataclass(frozen=True)
class Move:
    """One row."""

    task_id: str
    attempt: int
    """0 .. G-1, or GROUP."""
    to: str
    version: PolicyVersion
    """Trainer's version at the time; of ``trained``, the version whose weights hold the group."""
    reason: str = ""


@dataclass(frozen=True)
class Entry:
    """Where an attempt or a group stands."""

    state: str = NEW
    version: PolicyVersion = 0
    faults: int = 0
    """How often it was started again for another reason than a restart of the run."""


class Accounts:
    """Replays moves and says what is wrong with one; the ledger refuses it, the audit reports it."""

    def __init__(self) -> None:
        self.tasks: dict[str, dict[int, Entry]] = {}

    def entry(self, task_id: str, attempt: int) -> Entry:
        return self.tasks.get(task_id, {}).get(attempt, Entry())

    def problem(self, move: Move) -> str:
        """Why ``move`` is illegal now, or an empty string."""
        entries = self.tasks.get(move.task_id, {})
        before = entries.get(move.attempt, Entry()).state
        level = "group" if move.attempt == GROUP else "attempt"
        who = f"{move.task_id} {'group' if move.attempt == GROUP else f'attempt {move.attempt}'}"
        if (level, before, move.to) not in LEGAL:
            return f"{who} cannot go from {before or 'nothing'} to {move.to}"
        backwards = move.to == QUEUED and before != NEW
        if not move.reason and (move.to == DROPPED or backwards or before == TRAINED):
            return f"{who} goes from {before} to {move.to} without a reason"
        if level == "attempt":
            group = entries.get(GROUP, Entry()).state
            return "" if group == QUEUED else f"{who} cannot move, its group is {group or 'not started'}"
        open_attempts = [a for a, e in entries.items() if a != GROUP and e.state not in (GROUPED, DROPPED)]
        if move.to in (READY, DROPPED) and open_attempts:
            return f"{who} cannot be {move.to} while attempts {open_attempts} are open"
        return ""

    def apply(self, move: Move) -> None:
        before = self.entry(move.task_id, move.attempt)
        fault = move.to == QUEUED and before.state != NEW and move.reason != RESUME
        self.tasks.setdefault(move.task_id, {})[move.attempt] = Entry(move.to, move.version, before.faults + fault)


def starting(entries: Mapping[int, Entry], task_id: str, group_size: int, version: PolicyVersion) -> list[Move]:
    """Moves that queue all attempts of a task, new or left open by a run that was killed; ``entries`` is where they stand."""
    moves = [] if GROUP in entries else [Move(task_id, GROUP, QUEUED, version)]
    for attempt in range(group_size):
        state = entries.get(attempt, Entry()).state
        if state != QUEUED:
            moves.append(Move(task_id, attempt, QUEUED, version, RESUME if state else ""))
    more = [a for a, entry in entries.items() if a >= group_size and entry.state not in (GROUPED, DROPPED)]
    return moves + [Move(task_id, attempt, DROPPED, version, "group size changed") for attempt in more]


def completing(task_id: str, group_size: int, version: PolicyVersion, has_signal: bool) -> list[Move]:
    """Moves of a group whose attempts are all scored."""
    grouped = [Move(task_id, attempt, GROUPED, version) for attempt in range(group_size)]
    return [*grouped, Move(task_id, GROUP, READY, version, "" if has_signal else NO_SIGNAL)]


def closing(entries: Mapping[int, Entry], task_id: str, version: PolicyVersion, reason: str) -> list[Move]:
    """Moves that drop a group and the attempts that are open."""
    left = [a for a, entry in entries.items() if a != GROUP and entry.state not in (GROUPED, DROPPED)]
    return [Move(task_id, attempt, DROPPED, version, reason) for attempt in (*left, GROUP)]


def read_moves(connection: sqlite3.Connection) -> Iterator[tuple[str, Move]]:
    """(state it came from, move) of every row, in order."""
    for before, *row in connection.execute(
        "SELECT from_state, task_id, attempt, to_state, version, reason FROM moves ORDER BY seq"
    ):
        yield before, Move(*row)
