"""Promises of the object store: atomic immutable objects, missing ones named, a full disk typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.base.errors import DiskFullError, WeightSyncError
from etude.weights.store import Store, typed


@pytest.mark.parametrize("scheme", ["folder", "file", "memory"])
def test_objects_come_back_as_they_were_put(tmp_path: Path, scheme: str) -> None:
    location = {"folder": str(tmp_path / "new"), "file": tmp_path.as_uri(), "memory": "memory:///"}[scheme]
    store = Store(location)
    assert store.list("a") == []
    assert not store.exists("a/x")
    store.put("a/y", b"2")
    store.put("a/x", b"")
    store.put("ab/z", b"3")
    assert store.list("a") == ["a/x", "a/y"]
    assert store.get("a/y") == b"2"
    assert store.get("a/x") == b""
    assert store.exists("a/x")
    store.delete("a/x")
    store.delete("a/x")
    assert store.list("a") == ["a/y"]
    assert store.location == location


def test_a_missing_object_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"cannot read deltas/7") as caught:
        Store(str(tmp_path)).get("deltas/7")
    assert "\n" not in str(caught.value)


def test_a_location_that_cannot_be_opened_is_typed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightSyncError, match="cannot be opened"):
        Store("nonsense://x")
    with pytest.raises(WeightSyncError):
        Store(str(tmp_path / "file" / "below")).put("a", b"1")


def test_no_space_left_is_a_full_disk() -> None:
    """The client's own message for ENOSPC, as a full tmpfs gave it."""
    first = "Generic LocalFileSystem error: Unable to copy data to file: No space left on device (os error 28)"
    message = first + "\n\nDebug source:\nGeneric {"
    error = typed(OSError(message), "/full", "cannot write bases/1")
    assert isinstance(error, DiskFullError)
    assert "/full" in str(error)
    assert "\n" not in str(error)
    assert isinstance(typed(OSError("refused\nmore"), "/x", "cannot write y"), WeightSyncError)
