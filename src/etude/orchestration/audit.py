"""The audit of a ledger: each prompt was trained once, dropped for a named reason, or is pending."""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from etude.base.errors import UserError
from etude.orchestration.lifecycle import (
    DROPPED,
    GROUP,
    GROUPED,
    NEW,
    NO_SIGNAL,
    QUEUED,
    READY,
    RESUME,
    TRAINED,
    Accounts,
    read_moves,
)


@dataclass(frozen=True)
class LedgerAudit:
    """The accounts of a run, in prompts unless said otherwise."""

    trained: int
    dropped: dict[str, int]
    """Reason -> prompts."""
    ready: int
    open: int
    """Attempts are still queued, running, being verified or waiting for the others of their group."""
    faults: int
    """Attempts that were started again after a fault."""
    no_signal: int
    """Groups that became ready with all advantages alike; they train, but move nothing."""
    rolled_back: int
    """Groups whose training was undone because the run resumed from an older checkpoint."""
    problems: tuple[str, ...]

    @property
    def pending(self) -> int:
        return self.ready + self.open

    @property
    def total(self) -> int:
        return self.trained + sum(self.dropped.values()) + self.pending

    @property
    def consistent(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [f"{self.total} prompts: {self.trained} trained once, {self.ready} ready, {self.open} open"]
        lines += [f"  dropped, {reason}: {count}" for reason, count in sorted(self.dropped.items())]
        lines.append(f"{self.faults} attempts were started again, {self.no_signal} groups had no signal")
        if self.rolled_back:
            lines.append(f"{self.rolled_back} groups were rolled back with their weights")
        lines += [f"PROBLEM: {problem}" for problem in self.problems]
        lines.append("the ledger balances" if self.consistent else "the ledger does NOT balance")
        return "\n".join(lines)


def audit(path: Path) -> LedgerAudit:
    """Replay a ledger and check every move. ``path`` is a run directory or the ledger file. Raises UserError."""
    file = path / "ledger.sqlite" if path.is_dir() else path
    if not file.exists():
        raise UserError(f"ledger {file}: no such file; is this the directory of an RL run?")
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    try:
        return _replay(connection)
    except sqlite3.DatabaseError as error:
        raise UserError(f"ledger {file}: cannot be read: {error}") from None
    finally:
        connection.close()


def _replay(connection: sqlite3.Connection) -> LedgerAudit:
    accounts, problems, count, reasons = Accounts(), list[str](), Counter[str](), dict[str, str]()
    trained = Counter[str]()
    for before, move in read_moves(connection):
        known = accounts.entry(move.task_id, move.attempt).state
        if known != before:
            who = f"{move.task_id} attempt {move.attempt}"
            problems.append(f"{who}: a row leaves {before or 'nothing'}, but it was {known or 'nothing'}")
        if problem := accounts.problem(move):
            problems.append(problem)
        accounts.apply(move)
        if move.attempt != GROUP:
            count["faults"] += move.to == QUEUED and before != NEW and move.reason != RESUME
            continue
        count["no signal"] += move.to == READY and move.reason == NO_SIGNAL
        if before == TRAINED and move.to in (READY, QUEUED):
            trained[move.task_id] -= 1
            count["rolled back"] += 1
        if move.to == TRAINED:
            trained[move.task_id] += 1
            if trained[move.task_id] > 1:
                problems.append(f"{move.task_id}: trained {trained[move.task_id]} times")
        if move.to == DROPPED:
            reasons[move.task_id] = move.reason
    states = {task_id: entries[GROUP].state if GROUP in entries else NEW for task_id, entries in accounts.tasks.items()}
    problems += _open_in_closed(accounts, states)
    in_state = Counter(states.values())
    return LedgerAudit(
        trained=in_state[TRAINED],
        dropped=dict(Counter(reasons[task_id] for task_id, state in states.items() if state == DROPPED)),
        ready=in_state[READY],
        open=in_state[QUEUED] + in_state[NEW],
        faults=count["faults"],
        no_signal=count["no signal"],
        rolled_back=count["rolled back"],
        problems=tuple(problems),
    )


def _open_in_closed(accounts: Accounts, states: dict[str, str]) -> list[str]:
    """Problems: groups that are past their attempts while some of those are open."""
    found = []
    for task_id, state in states.items():
        attempts = {attempt: entry.state for attempt, entry in accounts.tasks[task_id].items() if attempt != GROUP}
        left = [attempt for attempt, at in attempts.items() if at not in (GROUPED, DROPPED)]
        if state in (READY, TRAINED, DROPPED) and left:
            found.append(f"{task_id}: {state}, but attempts {left} are open")
    return found
