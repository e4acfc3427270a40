"""Promises: a kernel is compiled once; what is missing is named with its remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.base.errors import UserError
from etude.base.native.build import load


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "add.c"
    path.write_text('#include "vector.h"\nint add(int a, int b) { return a + b; }\n')
    return path


def test_a_kernel_is_compiled_once_and_again_when_its_source_changes(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert load(source, cache).add(2, 3) == 5
    (built,) = cache.iterdir()
    stamp = built.stat().st_mtime_ns
    load(source, cache)
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [stamp]
    source.write_text("int add(int a, int b) { return a - b; }\n")
    assert load(source, cache).add(2, 3) == -1


def test_no_compiler_is_one_line_that_names_the_remedy(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no C compiler found; install one"):
        load(source, tmp_path, search_path=str(tmp_path))


def test_code_that_does_not_compile_names_the_file_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    source.write_text("int add(int a {\n")
    cache = tmp_path / "cache"
    with pytest.raises(UserError, match=r"cannot build add\.c: .*error"):
        load(source, cache)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_line_that_names_the_remedy(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot build add\.c in .*; set XDG_CACHE_HOME"):
        load(source, tmp_path / "file" / "cache")
