"""Promises of the ledger: only legal moves, nothing lost by a crash, one owner, and an audit that finds every broken account."""

from __future__ import annotations

import itertools
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.base.errors import UserError
from etude.orchestration.ledger import GROUP, IllegalMove, Ledger, Move, audit
from etude.orchestration.lifecycle import LEGAL, Accounts, closing, completing, read_moves, starting

STATES = ("queued", "running", "verifying", "scored", "grouped", "ready", "trained", "dropped")


def start(ledger: Ledger, task_id: str, size: int = 2) -> None:
    ledger.move_all(starting({}, task_id, size, 0))


def make_ready(ledger: Ledger, task_id: str, size: int = 2, *, has_signal: bool = True) -> None:
    start(ledger, task_id, size)
    for attempt in range(size):
        for state in ("running", "verifying", "scored"):
            ledger.move(task_id, attempt, state, version=0)
    ledger.move_all(completing(task_id, size, 0, has_signal))


def insert(path: Path, *row: object) -> None:
    """A row that no Ledger would write."""
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(
            "INSERT INTO moves (time, task_id, attempt, from_state, to_state, reason, version) VALUES (0,?,?,?,?,?,?)",
            row,
        )
    connection.close()


def test_the_accounts_of_a_small_run(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    make_ready(ledger, "trained")
    ledger.move("trained", GROUP, "trained", version=1)
    make_ready(ledger, "ready", has_signal=False)
    start(ledger, "open")
    ledger.move("open", 0, "running", version=1)
    ledger.move("open", 0, "queued", version=1, reason="environment_fault")
    start(ledger, "failed")
    ledger.move_all(closing(ledger.entries("failed"), "failed", 1, "verifier_fault"))
    make_ready(ledger, "old")
    ledger.move("old", GROUP, "dropped", version=3, reason="stale")
    live = audit(tmp_path)
    ledger.close()
    for accounts in (live, audit(tmp_path / "ledger.sqlite")):
        assert accounts.consistent, str(accounts)
        assert (accounts.trained, accounts.ready, accounts.open, accounts.faults) == (1, 1, 1, 1)
        assert accounts.dropped == {"verifier_fault": 1, "stale": 1}
        assert (accounts.no_signal, accounts.rolled_back, accounts.pending, accounts.total) == (1, 0, 2, 5)
        assert "the ledger balances" in str(accounts)
        assert "dropped, stale: 1" in str(accounts)


def test_every_pair_of_states_outside_the_table_is_refused(tmp_path: Path) -> None:
    """Brute force over both levels; a refused move leaves no row."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for attempt, to in itertools.product((0, GROUP), STATES):
        if (("group" if attempt == GROUP else "attempt"), "", to) not in LEGAL:
            with pytest.raises(IllegalMove, match="cannot go from nothing"):
                ledger.move("t", attempt, to, version=0, reason="r")
    start(ledger, "t", 1)
    for state in ("queued", "running", "verifying", "scored"):
        assert ledger.state("t", 0) == state
        for to in STATES:
            if ("attempt", state, to) not in LEGAL:
                with pytest.raises(IllegalMove, match=f"attempt 0 cannot go from {state} to {to}"):
                    ledger.move("t", 0, to, version=0, reason="r")
        following = {"queued": "running", "running": "verifying", "verifying": "scored", "scored": "grouped"}[state]
        ledger.move("t", 0, following, version=0)
    ledger.close()
    connection = sqlite3.connect(tmp_path / "ledger.sqlite")
    assert len(list(read_moves(connection))) == 2 + 4
    connection.close()


def test_nothing_is_trained_twice_and_closed_groups_stay_closed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    make_ready(ledger, "t")
    ledger.move("t", GROUP, "trained", version=1)
    with pytest.raises(IllegalMove, match="t group cannot go from trained to trained"):
        ledger.move("t", GROUP, "trained", version=2)
    with pytest.raises(IllegalMove, match="its group is trained"):
        ledger.move("t", 0, "queued", version=2, reason="resume")
    start(ledger, "u")
    with pytest.raises(IllegalMove, match=r"cannot be dropped while attempts \[0, 1\] are open"):
        ledger.move("u", GROUP, "dropped", version=1, reason="r")
    with pytest.raises(IllegalMove, match=r"cannot be ready while attempts"):
        ledger.move("u", GROUP, "ready", version=1)


def test_drops_and_moves_backwards_need_a_reason(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    make_ready(ledger, "t")
    for to in ("dropped", "queued"):
        with pytest.raises(IllegalMove, match="without a reason"):
            ledger.move("t", GROUP, to, version=0)
    start(ledger, "u")
    ledger.move("u", 0, "running", version=0)
    with pytest.raises(IllegalMove, match="without a reason"):
        ledger.move("u", 0, "queued", version=0)


def test_a_batch_with_one_illegal_move_writes_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    start(ledger, "t")
    with pytest.raises(IllegalMove):
        ledger.move_all([Move("t", 0, "running", 0), Move("t", 1, "scored", 0)])
    assert ledger.state("t", 0) == "queued"
    ledger.close()
    assert Ledger(tmp_path / "ledger.sqlite").state("t", 0) == "queued"


def test_a_reopened_ledger_knows_states_versions_and_faults(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    start(ledger, "t")
    for reason in ("inference_fault", "resume", "executor_lost"):
        ledger.move("t", 1, "running", version=4)
        ledger.move("t", 1, "queued", version=5, reason=reason)
    entry = ledger.entry("t", 1)
    assert (entry.state, entry.version, entry.faults) == ("queued", 5, 2), "a restart of the run is no fault"
    ledger.close()
    again = Ledger(tmp_path / "ledger.sqlite")
    assert again.entry("t", 1) == entry
    assert again.task_ids() == ["t"]


def test_a_second_owner_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with pytest.raises(UserError, match="another process is training there"):
        Ledger(tmp_path / "ledger.sqlite")
    ledger.close()
    ledger.close()
    Ledger(tmp_path / "ledger.sqlite").close()


def test_the_audit_finds_forged_rows(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    make_ready(ledger, "t")
    ledger.move("t", GROUP, "trained", version=1)
    ledger.close()
    assert audit(path).consistent
    insert(path, "t", GROUP, "trained", "trained", "", 2)
    assert any("t: trained 2 times" in problem for problem in audit(path).problems)
    insert(path, "u", GROUP, "ready", "trained", "", 2)
    insert(path, "v", GROUP, "", "queued", "", 2)
    insert(path, "v", 0, "", "queued", "", 2)
    insert(path, "v", GROUP, "queued", "dropped", "", 2)
    found = audit(path)
    assert any("leaves ready, but it was nothing" in problem for problem in found.problems)
    assert any("v group goes from queued to dropped without a reason" in problem for problem in found.problems)
    assert any("v: dropped, but attempts [0] are open" in problem for problem in found.problems)
    assert "PROBLEM" in str(found)
    assert "does NOT balance" in str(found)


def test_a_rolled_back_group_counts_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    make_ready(ledger, "t")
    for version in (3, 4):
        ledger.move("t", GROUP, "trained", version=version)
        if version == 3:
            ledger.move("t", GROUP, "ready", version=2, reason="rolled back to version 2")
    accounts = audit(tmp_path)
    assert accounts.consistent
    assert (accounts.trained, accounts.rolled_back) == (1, 1)


def test_a_file_that_is_no_ledger_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        audit(tmp_path)
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database at all, but long enough to be looked at" * 100)
    with pytest.raises(UserError, match="cannot be read"):
        audit(tmp_path)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 2), st.sampled_from(STATES), st.booleans()), max_size=60))
def test_whatever_is_tried_a_task_is_trained_at_most_once_at_a_time(tries: list[tuple[int, str, bool]]) -> None:
    """Random moves against the checker alone: training only follows ``ready``, and that only grouped attempts."""
    accounts, net_trained = Accounts(), 0
    for attempt, to, reason in tries:
        move = Move("t", attempt, to, 0, "r" if reason else "")
        before = accounts.entry("t", attempt).state
        if accounts.problem(move):
            continue
        accounts.apply(move)
        if attempt == GROUP:
            net_trained += (to == "trained") - (before == "trained")
            assert net_trained in (0, 1)
            if to in ("ready", "trained"):
                others = [entry.state for a, entry in accounts.tasks["t"].items() if a != GROUP]
                assert set(others) <= {"grouped", "dropped"}
