"""The append-only ledger of sample life cycles: SQLite in WAL mode, one row a move, legal moves in one table.

An *attempt* (task, 0..G-1) lives ``queued -> running -> verifying -> scored -> grouped``; a fault sends it back to ``queued``. The
*group* of a task (attempt -1) is ``ready`` once all attempts are grouped, then ``trained``, or ``dropped`` with a reason at any time.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass, field
from pathlib import Path

from etude.base.errors import EtudeError, UserError
from etude.base.records import PolicyVersion

GROUP = -1
"""Attempt number of the group itself."""

LEGAL: frozenset[tuple[str, str]] = frozenset(
    {
        ("", "queued"),
        ("queued", "running"),
        ("running", "verifying"),
        ("verifying", "scored"),
        ("scored", "grouped"),
        # faults and resumed runs start an attempt again
        ("running", "queued"),
        ("verifying", "queued"),
        ("scored", "queued"),
        ("grouped", "queued"),
        # the group
        ("", "ready"),
        ("ready", "trained"),
        ("ready", "dropped"),
        ("", "dropped"),
    }
)


class IllegalMove(EtudeError):
    """A move that the table does not allow: a bug, or two owners of one run."""


class Ledger:
    """Writes moves; holds the latest state of every (task, attempt) in memory."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS moves (seq INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, "
            "task_id TEXT NOT NULL, attempt INTEGER NOT NULL, from_state TEXT NOT NULL, to_state TEXT NOT NULL, "
            "reason TEXT NOT NULL, version INTEGER NOT NULL)"
        )
        self.states: dict[tuple[str, int], str] = {
            (task, attempt): state
            for task, attempt, state in self._connection.execute(
                "SELECT task_id, attempt, to_state FROM moves ORDER BY seq"
            )
        }

    def move(self, task_id: str, attempt: int, to: str, *, version: PolicyVersion, reason: str = "") -> None:
        """Append one move. Raises IllegalMove."""
        before = self.states.get((task_id, attempt), "")
        if (before, to) not in LEGAL:
            raise IllegalMove(f"ledger: {task_id} attempt {attempt} cannot go from {before or 'nothing'} to {to}")
        self._connection.execute(
            "INSERT INTO moves (time, task_id, attempt, from_state, to_state, reason, version) VALUES (?,?,?,?,?,?,?)",
            (time.time(), task_id, attempt, before, to, reason, version),
        )
        self.states[task_id, attempt] = to

    def group_state(self, task_id: str) -> str:
        """``ready``, ``trained``, ``dropped``, or "" while attempts are open."""
        return self.states.get((task_id, GROUP), "")

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True)
class LedgerAudit:
    """The accounts of a run: every prompt is trained once, dropped with a reason, or pending."""

    trained: int
    dropped: dict[str, int]
    """Reason -> prompts."""
    ready: int
    open: int
    """Prompts whose attempts are still running or queued."""
    faults: int
    """Attempts that were started again."""
    problems: tuple[str, ...] = field(default_factory=tuple)

    @property
    def consistent(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        total = self.trained + sum(self.dropped.values()) + self.ready + self.open
        lines = [f"{total} prompts: {self.trained} trained once, {self.ready} ready, {self.open} open"]
        lines += [f"  dropped, {reason}: {count}" for reason, count in sorted(self.dropped.items())]
        lines.append(f"{self.faults} attempts were started again")
        lines += [f"PROBLEM: {problem}" for problem in self.problems]
        lines.append("the ledger balances" if self.consistent else "the ledger does NOT balance")
        return "\n".join(lines)


def audit(path: Path) -> LedgerAudit:
    """Replay a ledger and check every move. ``path`` is a run directory or the ledger file. Raises UserError."""
    file = path / "ledger.sqlite" if path.is_dir() else path
    if not file.exists():
        raise UserError(f"ledger {file}: no such file; is this the directory of an RL run?")
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    states: dict[tuple[str, int], str] = {}
    trained: dict[str, int] = {}
    dropped: dict[str, int] = {}
    problems: list[str] = []
    faults = 0
    for task, attempt, before, to, reason in connection.execute(
        "SELECT task_id, attempt, from_state, to_state, reason FROM moves ORDER BY seq"
    ):
        if states.get((task, attempt), "") != before or (before, to) not in LEGAL:
            problems.append(f"{task} attempt {attempt}: illegal move {before or 'nothing'} -> {to}")
        states[task, attempt] = to
        faults += to == "queued" and before != ""
        if to == "trained":
            trained[task] = trained.get(task, 0) + 1
        elif to == "dropped":
            dropped[reason] = dropped.get(reason, 0) + 1
            if not reason:
                problems.append(f"{task}: dropped without a reason")
    connection.close()
    problems += [f"{task}: trained {count} times" for task, count in trained.items() if count > 1]
    groups = {task: state for (task, attempt), state in states.items() if attempt == GROUP}
    tasks = {task for task, _ in states}
    return LedgerAudit(
        trained=len(trained),
        dropped=dropped,
        ready=sum(state == "ready" for state in groups.values()),
        open=len(tasks - groups.keys()),
        faults=faults,
        problems=tuple(problems),
    )
