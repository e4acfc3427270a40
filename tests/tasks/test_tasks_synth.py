"""Promises of the generated family: distinct, balanced, disjoint, deterministic, and every sampled task is sound."""

from __future__ import annotations

import ast
import asyncio
import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from etude.base.records import AnswerVerifier, Message, Task, ToolCall
from etude.rewards.verifiers import verify
from etude.tasks.check import check_tasks, solve
from etude.tasks.synth import corpus, generate
from etude.tasks.synth.repository import RUNNER_PATH, TEST_COMMAND, runner
from local_pods import LocalPods


@pytest.fixture(scope="module")
def train() -> list[Task]:
    return generate("train", 2000, 0)


@pytest.fixture(scope="module")
def held_out() -> list[Task]:
    return generate("heldout", 400, 0)


def test_two_thousand_distinct_tasks_in_eight_categories(train: list[Task], held_out: list[Task]) -> None:
    assert len({task.id for task in train}) == 2000
    assert len({task.id for task in held_out}) == 400
    counts = Counter(task.category for task in train)
    assert len(counts) == 8
    assert max(counts.values()) == min(counts.values()) == 250


def functions(texts: list[str]) -> set[str]:
    """Every function but tests in Python sources, without comments and docstrings: an oracle through the parser."""
    found = set()
    for node in (node for text in texts for node in ast.parse(text).body):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("test_"):
            if ast.get_docstring(node):
                node.body = node.body[1:]
            found.add(ast.unparse(node))
    return found


def functions_of(tasks: list[Task]) -> set[str]:
    """What tasks show and ask for."""
    workspaces = [files for task in tasks for files in (task.files, solve(task)[0])]
    return functions([t for files in workspaces for p, t in files.items() if not p.startswith((".", "test_"))])


def test_held_out_tasks_share_no_function_with_training_of_any_seed(train: list[Task], held_out: list[Task]) -> None:
    held = functions_of(held_out)
    assert len(held) > 800
    for seed in range(1, 3):
        assert not held & functions_of(generate("train", 400, seed))
    assert not held & functions_of(train)
    assert not {task.template for task in held_out} & {task.template for task in train}
    corpora = functions(corpus("train", 1000, 0))
    assert len(corpora) > 1500
    assert not held & corpora
    assert not corpora & functions(corpus("heldout", 200, 0))


def test_generation_is_a_function_of_its_arguments(train: list[Task]) -> None:
    assert generate("train", 50, 0) == train[:50]
    assert generate("train", 50, 1) != train[:50]
    assert corpus("train", 20, 3) == corpus("train", 20, 3)


def test_sampled_tasks_are_sound(train: list[Task], held_out: list[Task]) -> None:
    pods = LocalPods()
    chosen = random.Random(0).sample(train, 64) + random.Random(1).sample(held_out, 32)
    reports = asyncio.run(check_tasks(chosen, pods, verify))
    assert [report for report in reports if not report.sound] == []
    assert pods.alive == 0


def test_requests_and_workspaces_are_small(train: list[Task]) -> None:
    for task in train:
        assert len(task.instruction) < 160
        visible = {path: text for path, text in task.files.items() if not path.startswith(".")}
        assert sum(len(text) for text in visible.values()) < 1800
        assert all(text.count("\n") <= 40 for text in visible.values())


def test_no_answer_is_in_its_question(train: list[Task]) -> None:
    for task in train:
        if isinstance(task.verifier, AnswerVerifier) and task.verifier.accepted[0].isidentifier():
            assert task.verifier.accepted[0] not in task.instruction.replace("?", "").split()


def test_solutions_follow_their_own_line_numbers(train: list[Task]) -> None:
    for task in train[:200]:
        files, message, _ = solve(task)
        assert message
        assert all(isinstance(text, str) for text in files.values())


def run_tests(folder: Path, files: dict[str, str]) -> tuple[int, str]:
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / RUNNER_PATH).parent.mkdir()
    (folder / RUNNER_PATH).write_text(runner())
    done = subprocess.run(["sh", "-c", TEST_COMMAND], cwd=folder, capture_output=True, text=True, timeout=20)
    return done.returncode, done.stdout


MODULE = "def total(a, b):\n    return a - b\n"


def test_only_a_full_count_passes(tmp_path: Path) -> None:
    test = "from lib import total\n\n\ndef test_total():\n    assert total(3, 2) == 1\n"
    assert run_tests(tmp_path, {"lib.py": MODULE, "test_lib.py": test}) == (0, "1 passed\n")


def test_a_missing_interpreter_is_told_from_a_failure(tmp_path: Path) -> None:
    """126 and 127 come through, so that a verifier can see that its command did not run."""
    (tmp_path / RUNNER_PATH).parent.mkdir()
    (tmp_path / RUNNER_PATH).write_text(runner())
    done = subprocess.run(["/bin/sh", "-c", TEST_COMMAND], cwd=tmp_path, env={"PATH": "/nowhere"}, capture_output=True)
    assert done.returncode == 127


def test_the_runner_says_what_it_got(tmp_path: Path) -> None:
    test = "from lib import total\n\n\ndef test_total():\n    assert total(1, 2) == 3\n"
    test += "\n\ndef test_zero():\n    assert total(0, 0) == 0\n"
    assert run_tests(tmp_path, {"lib.py": MODULE, "test_lib.py": test}) == (
        1,
        "FAIL test_total: total(1, 2) == 3 got -1\n1 failed 1 passed\n",
    )


@pytest.mark.parametrize(
    "trick",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "def total(a, b): import os; os._exit(0)",
        "def total(a, b): raise KeyboardInterrupt",
        "class E:\n    def __eq__(self, other): raise SystemExit(0)\ndef total(a, b): return E()",
    ],
)
def test_exit_tricks_do_not_pass(tmp_path: Path, trick: str) -> None:
    test = "from lib import total\n\n\ndef test_total():\n    assert total(1, 2) == 3\n"
    code, _ = run_tests(tmp_path, {"lib.py": trick + "\n", "test_lib.py": test})
    assert code != 0


def test_errors_say_where(tmp_path: Path) -> None:
    test = "from lib import total\n\n\ndef test_total():\n    assert total(1, 2) == 3\n"
    files = {"lib.py": "def total(a, b):\n    return c\n", "test_lib.py": test}
    said = "FAIL test_total: NameError: name 'c' is not defined (lib.py:2)\n1 failed 0 passed\n"
    assert run_tests(tmp_path, files) == (1, said)


def test_tests_that_vanish_do_not_count_as_run(tmp_path: Path) -> None:
    test = "def test_a(): assert False\n\n\ndef test_b(): pass\n\n\ndel test_a\n"
    assert run_tests(tmp_path, {"test_lib.py": test}) == (
        1,
        "FAIL: 1 tests did not run\n1 failed 1 passed\n",
    )


def test_a_broken_reference_is_reported_not_raised() -> None:
    task = generate("train", 1, 0)[0]
    nowhere = Message(
        role="assistant", calls=(ToolCall(name="edit", arguments={"path": "x.py", "change": "no such line\n====\na"}),)
    )
    reports = asyncio.run(check_tasks([task.model_copy(update={"solution": (nowhere,)})], LocalPods(), verify))
    assert "cannot be replayed" in reports[0].problem


def test_no_tests_is_not_a_pass(tmp_path: Path) -> None:
    assert run_tests(tmp_path, {"lib.py": MODULE})[0] == 5
