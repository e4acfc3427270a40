"""The small repository around a function: modules, tests, the hidden runner, and the words of solutions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.base.edits import change_lines, split_lines
from etude.base.records import Message, ToolCall
from etude.tasks.synth.functions import Example, Function, call_text, draw_function, examples
from etude.tasks.synth.library import MODULES, Template
from etude.tasks.synth.split import Split

RUNNER_PATH = ".etude/run_tests.py"
TEST_COMMAND = f"python3 -I -S {RUNNER_PATH} && exit 1; c=$?; exit $((c == 42 ? 0 : c))"
"""The runner ends with 42 when all tests have passed, so that code under test which exits early with 0 has not."""


def runner() -> str:
    """Source of the minimal pytest-style runner that each workspace carries."""
    return (Path(__file__).parent / "assets" / "run_tests.py").read_text()


@dataclass(frozen=True)
class Repository:
    """One module of one to three functions; ``subject`` is the one the task is about."""

    module: str
    functions: list[Function]
    subject: int
    split: Split

    @property
    def function(self) -> Function:
        return self.functions[self.subject]

    @property
    def others(self) -> list[Function]:
        return [f for i, f in enumerate(self.functions) if i != self.subject]

    @property
    def path(self) -> str:
        return f"{self.module}.py"

    @property
    def test_path(self) -> str:
        return f"test_{self.module}.py"

    def sources(self, rng: random.Random) -> list[list[str]]:
        """Source of each function; the others may carry a comment that says what they do."""
        comments = rng.random() < 0.5
        return [f.source(comment=comments and i != self.subject) for i, f in enumerate(self.functions)]


def draw_repository(rng: random.Random, template: Template, split: Split) -> Repository:
    used: set[str] = set()
    count = rng.choice((1, 2, 2, 3))
    subject = rng.randrange(count)
    functions = [draw_function(rng, used, split, template if i == subject else None) for i in range(count)]
    return Repository(rng.choice(MODULES), functions, subject, split)


def caller_of(function: Function, user: str) -> list[str]:
    """Source of a function ``user`` that only calls ``function``."""
    arguments = ", ".join(function.parameters)
    return [f"def {user}({arguments}):", f"    return {function.name}({arguments})"]


def module_text(sources: Sequence[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(lines) for lines in sources) + "\n"


def line_number(text: str, line: str, start: int = 1) -> int:
    """Number (from 1) of the first line equal to ``line`` at or after ``start``."""
    return text.split("\n").index(line, start - 1) + 1


def equals(function: Function, example: Example) -> str:
    return f"{call_text(function.name, example[0])} == {example[1]!r}"


def tests_text(module: str, cases: Sequence[tuple[str, str]]) -> str:
    """A test module from (function name, asserted expression) pairs."""
    names = list(dict.fromkeys(name for name, _ in cases))
    lines = [f"from {module} import {', '.join(names)}"]
    for name in names:
        lines += ["", "", f"def test_{name}():", *(f"    assert {text}" for n, text in cases if n == name)]
    return "\n".join(lines) + "\n"


def cases(function: Function, found: Sequence[Example]) -> list[tuple[str, str]]:
    return [(function.name, equals(function, example)) for example in found]


def other_cases(repository: Repository, rng: random.Random) -> list[tuple[str, str]]:
    """One case of one of the other functions, which must keep working."""
    for function in repository.others[:1]:
        return cases(function, examples(function, function.source(), rng, 1) or [])
    return []


def edit(path: str, text: str, first: int, last: int, new: Sequence[str]) -> Message:
    """Edit that puts ``new`` in place of lines ``first`` to ``last`` (from 1) of ``text``; ``last = first - 1`` inserts."""
    return call("edit", path=path, change=change_lines(split_lines(text), first - 1, last, new))


def call(name: str, **arguments: str) -> Message:
    """An assistant message of one tool call."""
    return Message(role="assistant", calls=(ToolCall(name=name, arguments=arguments),))
