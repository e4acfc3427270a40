"""Promises of the tools: compact answers, errors the model can act on, nothing outside the workspace, nothing discarded."""

from __future__ import annotations

import asyncio

import pytest
from agent_fakes import FakePod, FakePods, run_for_real, task_of

from etude.agents.tools import (
    MAX_MATCHES,
    MAX_OUTPUT_CHARS,
    MAX_READ_LINES,
    TOOL_ARGUMENTS,
    Workbench,
    call_tool,
)
from etude.base.errors import EnvironmentFault
from etude.base.records import ExecResult, ToolCall

FILES = {"lib.py": "def total(a, b):\n    return a - b\n", "pkg/deep.py": "x = 1\n", ".etude/run.py": "total\n"}


def bench_of(
    files: dict[str, str] | None = None, output: ExecResult | Exception | None = None, **changes: object
) -> Workbench:
    answer = output or ExecResult(exit_code=0, output="2 passed\n", seconds=0.0)
    pods = FakePods(lambda pod, command: answer)
    task = task_of(FILES if files is None else files, **changes)
    return Workbench(task, FakePod(pods, task.files))


def ask(bench: Workbench, name: str, error: str | None = None, **arguments: str) -> str:
    return asyncio.run(call_tool(bench, ToolCall(name=name, arguments=arguments, error=error)))


def test_list_shows_visible_paths_one_a_line() -> None:
    assert ask(bench_of(), "list") == "lib.py\npkg/deep.py"
    assert ask(bench_of({}), "list") == "no files"


def test_read_shows_a_file_as_an_edit_quotes_it() -> None:
    assert ask(bench_of(), "read", path="lib.py") == "def total(a, b):\n    return a - b"
    assert ask(bench_of({"a": ""}), "read", path="a") == "empty"
    assert ask(bench_of(), "read", path="no.py") == "error: no file no.py"


def test_read_caps_a_long_file_and_says_how_much_is_left() -> None:
    shown = ask(bench_of({"a": "x\n" * (MAX_READ_LINES + 7)}), "read", path="a").split("\n")
    assert len(shown) == MAX_READ_LINES + 1
    assert shown[-1] == "... 7 more"


def test_search_gives_path_line_and_content_of_visible_files_only() -> None:
    assert ask(bench_of(), "search", text="total") == "lib.py:1:def total(a, b):"
    assert ask(bench_of(), "search", text="1") == "pkg/deep.py:1:x = 1"  # not the line number 1 of lib.py
    assert ask(bench_of(), "search", text="zzz") == "nothing"
    many = ask(bench_of({"a": "hit\n" * 50}), "search", text="hit").split("\n")
    assert len(many) == MAX_MATCHES + 1
    assert many[-1] == f"... {50 - MAX_MATCHES} more"


@pytest.mark.parametrize(
    ("change", "content"),
    [
        ("    return a - b\n====\n    return a + b", "def total(a, b):\n    return a + b\n"),
        ("    return a - b\n====", "def total(a, b):\n"),
        ("====\ny\nz", "def total(a, b):\n    return a - b\ny\nz\n"),
    ],
)
def test_edit_changes_the_file_and_remembers_what_it_was(change: str, content: str) -> None:
    bench = bench_of()
    assert ask(bench, "edit", path="lib.py", change=change) == "ok"
    assert asyncio.run(bench.pod.read("lib.py")) == content
    assert bench.originals == {"lib.py": FILES["lib.py"]}


def test_a_refused_edit_is_answered_counted_and_changes_nothing() -> None:
    bench = bench_of()
    assert ask(bench, "edit", path="lib.py", change="x = 1\n====\nx = 2") == "error: no such lines"
    assert ask(bench, "edit", path="new.py", change="x = 1\n====\nx = 2") == "error: no such file"
    assert ask(bench, "edit", path="lib.py", change="x = 1") == "error: no line ==== between old and new lines"
    assert bench.events == ["failed_edit"] * 3
    assert not bench.originals
    assert asyncio.run(bench.pod.list()) == sorted(FILES)


def test_reset_puts_all_files_back_and_takes_new_ones_away() -> None:
    bench = bench_of()
    assert ask(bench, "reset") == "nothing to reset"
    for line in ("x = 1", "y = 2"):
        assert ask(bench, "edit", path="lib.py", change=f"====\n{line}") == "ok"
    assert ask(bench, "edit", path="new file.py", change="====\nx = 1") == "ok"
    assert ask(bench, "reset") == "ok"
    assert isinstance(bench.pod, FakePod)
    assert bench.pod.files == FILES
    assert not asyncio.run(bench.changed())
    assert bench.pod.owner.commands == ["rm -f -- './new file.py'"]


def test_run_answers_with_the_output_and_notes_the_verdict() -> None:
    bench = bench_of()
    assert ask(bench, "run") == "2 passed"
    assert bench.events == ["tests_passed"]
    failing = bench_of(output=ExecResult(exit_code=1, output="FAIL test_total\n1 failed", seconds=0.0))
    assert ask(failing, "run") == "FAIL test_total\n1 failed"
    assert failing.events == ["tests_failed"]


def test_run_tells_a_silent_failure_and_a_timeout() -> None:
    silent = bench_of(output=ExecResult(exit_code=3, output="", seconds=0.0))
    assert ask(silent, "run") == "exit 3"
    slow = bench_of(output=ExecResult(exit_code=124, output="a", seconds=20.0, timed_out=True))
    assert ask(slow, "run") == "a\ntimed out"


def test_run_keeps_head_and_tail_of_a_long_output() -> None:
    long = "head" + "x" * 5000 + "tail"
    shown = ask(bench_of(output=ExecResult(exit_code=0, output=long, seconds=0.0)), "run")
    assert shown.startswith("head")
    assert shown.endswith("tail")
    assert len(shown) <= MAX_OUTPUT_CHARS + 5


def test_run_without_any_command_says_so() -> None:
    assert ask(bench_of(test_command=""), "run") == "error: run needs a command"


def test_a_malformed_call_is_answered_with_what_is_wrong_and_counted() -> None:
    bench = bench_of()
    assert ask(bench, "raed", error="no tool 'raed'; tools: read") == "error: no tool 'raed'; tools: read"
    assert ask(bench, "read") == "error: read needs path"
    assert ask(bench, "edit", path="lib.py") == "error: edit needs change"
    assert ask(bench, "search", text="") == "error: search needs text"
    assert ask(bench, "read", path="../../etc/passwd") == "error: path outside the workspace"
    assert ask(bench, "edit", path="/x", change="====\nx") == "error: path outside the workspace"
    assert bench.events == ["malformed_call"] * 6


def test_a_fault_of_the_environment_is_not_swallowed() -> None:
    with pytest.raises(EnvironmentFault):
        ask(bench_of(output=EnvironmentFault("gone")), "run")


def test_a_command_of_the_model_that_changes_files_counts_as_a_change() -> None:
    def sabotage(pod: FakePod, command: str) -> ExecResult:
        if command == "spoil":
            pod.files["lib.py"] = "gone\n"
        return run_for_real(pod, "true")

    task = task_of(FILES)
    for command, changed in (("look", False), ("spoil", True)):
        bench = Workbench(task, FakePod(FakePods(sabotage), task.files))
        ask(bench, "run", command=command)
        assert asyncio.run(bench.changed()) is changed


def test_the_table_of_tools_is_the_one_of_the_wire() -> None:
    assert TOOL_ARGUMENTS == {
        "list": (),
        "read": ("path",),
        "search": ("text",),
        "edit": ("path", "change"),
        "reset": (),
        "run": ("command",),
        "finish": ("message",),
    }
