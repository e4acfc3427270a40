"""The append-only ledger of a run: SQLite in WAL mode, one row a move of a sample.

Which moves are legal is in :mod:`etude.orchestration.lifecycle`; :func:`audit` replays a ledger and proves its accounts.
"""

from __future__ import annotations

import fcntl
import sqlite3
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from etude.base.errors import DiskFullError, UserError
from etude.base.records import PolicyVersion
from etude.orchestration.audit import LedgerAudit, audit
from etude.orchestration.lifecycle import GROUP, Accounts, Entry, IllegalMove, Move, read_moves

__all__ = ["GROUP", "IllegalMove", "Ledger", "LedgerAudit", "Move", "audit"]


class Ledger:
    """The one writer of a run's ledger; holds where everything stands in memory.

    Opening locks it: a second owner of the same run directory is refused with a UserError. Raises DiskFullError on a full disk.
    """

    def __init__(self, path: Path) -> None:
        self._lock = path.with_suffix(".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(f"run directory {path.parent}: another process is training there; stop it first") from None
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS moves (seq INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, "
            "task_id TEXT NOT NULL, attempt INTEGER NOT NULL, from_state TEXT NOT NULL, to_state TEXT NOT NULL, "
            "reason TEXT NOT NULL, version INTEGER NOT NULL)"
        )
        self._accounts = Accounts()
        for _, move in read_moves(self._connection):
            self._accounts.apply(move)

    def move(self, task_id: str, attempt: int, to: str, *, version: PolicyVersion, reason: str = "") -> None:
        """Append one move. Raises IllegalMove, DiskFullError."""
        self.move_all([Move(task_id, attempt, to, version, reason)])

    def move_all(self, moves: Iterable[Move], *, durable: bool = False) -> None:
        """Append moves: all or, when the process dies, none. ``durable``: they also survive a power cut. Raises as move."""
        full = f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}"
        try:
            self._connection.execute(full)
            self._connection.execute("BEGIN")
            for move in moves:
                if problem := self._accounts.problem(move):
                    raise IllegalMove(f"ledger: {problem}")
                before = self.state(move.task_id, move.attempt)
                self._connection.execute(
                    "INSERT INTO moves (time, task_id, attempt, from_state, to_state, reason, version) "
                    "VALUES (?,?,?,?,?,?,?)",
                    (time.time(), move.task_id, move.attempt, before, move.to, move.reason, move.version),
                )
                self._accounts.apply(move)
            self._connection.execute("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._reload()
            if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
                raise DiskFullError("no space left on the disk of the ledger; free some and resume the run") from None
            raise

    def state(self, task_id: str, attempt: int) -> str:
        """Where an attempt stands; an empty string when it never moved."""
        return self._accounts.entry(task_id, attempt).state

    def group_state(self, task_id: str) -> str:
        """``queued`` while attempts are open, ``ready``, ``trained``, ``dropped``; an empty string when unknown."""
        return self.state(task_id, GROUP)

    def entry(self, task_id: str, attempt: int) -> Entry:
        return self._accounts.entry(task_id, attempt)

    def task_ids(self) -> list[str]:
        """All tasks that ever moved, in the order they were started."""
        return list(self._accounts.tasks)

    def entries(self, task_id: str) -> Mapping[int, Entry]:
        """Attempt (GROUP for the group itself) -> where it stands."""
        return self._accounts.tasks.get(task_id, {})

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()
        self._lock.close()

    def _reload(self) -> None:
        """Forget the moves of a transaction that was rolled back."""
        self._accounts = Accounts()
        for _, move in read_moves(self._connection):
            self._accounts.apply(move)
