"""A mediocre engineer at work: knows the reference solution, slips, mostly looks, usually mends.

It keeps a picture of the workspace (the task's files with its own edits applied) and of where the solution leads, so that
it knows when it has to start over, and can say in a summary what is true.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from pydantic import Field

from etude.agents.chain import CUT_NOTE
from etude.agents.scripted import asks_for_summary, say
from etude.agents.spoil import spoil
from etude.base.config import Config
from etude.base.edits import apply_edit, split_change
from etude.base.records import Message, Task, ToolCall

_FAILED = re.compile(r"FAIL|Error\b|\bexit [1-9]")
_PARALLEL_CHARS = 60
"""Longest text of the calls that are sent in one message; a message has a token limit."""


class DemonstratorConfig(Config):
    """How good the demonstrator is. SFT teaches its habits, good and bad; RL is there to be better than its teacher."""

    mistake_rate: float = Field(0.35, ge=0.0, le=1.0)
    """Probability that the first try of the first edit is wrong."""
    again_rate: float = Field(0.3, ge=0.0, le=1.0)
    """Probability that it slips again after it started over."""
    careless_rate: float = Field(0.25, ge=0.0, le=1.0)
    """Probability that it finishes without running the tests."""
    give_up_rate: float = Field(0.25, ge=0.0, le=1.0)
    """Probability that it finishes although its run of the tests failed."""
    look_first_rate: float = Field(0.15, ge=0.0, le=1.0)
    """Probability that it starts with the failing tests, the list of files or a search. It always does so when the request
    does not name the file it has to read."""
    reread_rate: float = Field(0.5, ge=0.0, le=1.0)
    """Probability that it reads the file again before an edit that its summary prepared."""
    parallel_rate: float = Field(0.15, ge=0.0, le=1.0)
    """Probability that it sends neighbouring edits, and the run after them, in one message."""


class Demonstrator:
    """Policy for one rollout of one task."""

    def __init__(self, task: Task, rng: random.Random, config: DemonstratorConfig) -> None:
        self._task, self._rng, self._config = task, rng, config
        self._files: dict[str, str] = dict(task.files)
        self._goal = dict(task.files)
        self._plan = [call for message in task.solution for call in message.calls]
        for call in self._plan:
            self._apply(self._goal, call)
        self._edits = [call for call in self._plan if call.name == "edit"]
        self._careless = rng.random() < config.careless_rate
        self._parallel = rng.random() < config.parallel_rate
        self._slips = rng.random() < config.mistake_rate
        self._slipped: list[ToolCall] = []
        self._done: list[str] = []
        self._prepared = ""
        """After a summary: "edit" when it holds what the next edit needs, else "read"."""
        if self._careless:
            edited = [i for i, call in enumerate(self._plan) if call.name == "edit"]
            self._plan = [c for i, c in enumerate(self._plan) if c.name != "run" or not edited or i < edited[0]]
        self._plan[:0] = self._look_first()

    def act(self, conversation: Sequence[Message]) -> Message:
        if asks_for_summary(conversation):
            self._react(conversation[:-1])
            return self._summary()
        self._react(conversation)
        if self._prepared:
            self._resume()
        calls = [self._next()]
        while calls[-1].name == "reset" or (self._parallel and calls[-1].name == "edit"):
            if not self._joins(calls):
                break
            calls.append(self._next())
        return Message(role="assistant", calls=tuple(calls))

    # ------------------------------------------------------------------------------------------------- acting

    def _next(self) -> ToolCall:
        """The next call of the plan as it will really be made: slips happen here, and the picture follows."""
        call = self._plan.pop(0) if self._plan else _call("finish", message="done")
        if call.name == "edit" and self._slips:
            self._slips = False
            call = self._slip(call)
        self._apply(self._files, call)
        self._done.append(f"edit {call.arguments['path']}" if call.name == "edit" else call.name)
        return call

    def _slip(self, call: ToolCall) -> ToolCall:
        """A wrong form of ``call`` that was not tried before, else ``call`` itself."""
        for _ in range(4):
            slip = spoil(call, self._rng)
            if slip is not None and slip not in self._slipped:
                self._slipped.append(slip)
                return slip
        return call

    def _joins(self, calls: Sequence[ToolCall]) -> bool:
        """Whether the next call may go in the same message."""
        if not self._plan or self._plan[0].name not in ("edit", "run"):
            return False
        text = "".join(value for call in (*calls, self._plan[0]) for value in call.arguments.values())
        return len(text) <= _PARALLEL_CHARS

    def _look_first(self) -> list[ToolCall]:
        first = next((call for call in self._plan if call.name in ("read", "edit")), None)
        path = first.arguments["path"] if first else ""
        lost = path in self._task.files and path not in self._task.instruction
        if not lost and self._rng.random() >= self._config.look_first_rate:
            return []
        ways = [_call("list")]
        if (word := self._definition(path)) is not None:
            ways.append(_call("search", text=word))
        if self._task.test_command and not lost:
            ways.append(_call("run"))
        return [self._rng.choice(ways)]

    def _definition(self, path: str) -> str | None:
        """``def name`` of a function in ``path`` that the request names."""
        names = re.findall(r"^def (\w+)", self._task.files.get(path, ""), re.MULTILINE)
        named = [name for name in names if re.search(rf"\b(test_)?{name}\b", self._task.instruction)]
        return f"def {named[0]}" if named else None

    # --------------------------------------------------------------------------------------- reacting, mending

    def _react(self, conversation: Sequence[Message]) -> None:
        """After a run that failed, or an edit that was refused: plan to mend, or give up."""
        results: list[str] = []
        for message in reversed(conversation):
            if message.role != "tool":
                break
            results.insert(0, message.content)
        last = self._done[-1].split()[0] if self._done else ""
        if last == "run" and (not results or results[-1].endswith(CUT_NOTE)):
            if conversation[-1].role != "user":
                self._plan.insert(0, _call("run"))  # the context had no room for what it said
            return
        failed = last == "run" and results != [] and _FAILED.search(results[-1]) is not None
        if failed:
            self._done[-1] = "run FAIL"
        if (failed and any(name.startswith("edit") for name in self._done)) or (
            last == "edit" and results[-1:] != [] and results[-1].startswith("error")
        ):
            self._plan_to_mend(failed)

    def _plan_to_mend(self, failed: bool) -> None:
        """Take everything back and do it again; perhaps with another slip."""
        if any(call.name == "edit" for call in self._plan) or self._files == self._goal:
            return  # the work is not finished anyway, or nothing is wrong with it
        if failed and self._rng.random() < self._config.give_up_rate:
            return
        back = [_call("reset")] if self._files != self._task.files else []
        check = [] if self._careless else [_call("run")]
        rest = [call for call in self._plan if call.name == "finish"]
        self._plan = [*back, *self._edits, *check, *rest]
        self._slips = self._rng.random() < self._config.again_rate

    def _apply(self, files: dict[str, str], call: ToolCall) -> None:
        """What a call does to the picture; a refused edit does nothing."""
        if call.name == "reset":
            files.clear()
            files.update(self._task.files)
        if call.name != "edit":
            return
        path = call.arguments["path"]
        try:
            files[path] = apply_edit(files.get(path), call.arguments["change"])
        except ValueError:
            return

    # -------------------------------------------------------------------------------------------------- summary

    def _summary(self) -> Message:
        """What was seen (the line that the next edit quotes), done, and is next; all of it true."""
        following = self._plan[0] if self._plan else _call("finish", message="done")
        since = self._done[len(self._done) - self._done[::-1].index("reset") :] if "reset" in self._done else self._done
        deeds = [name for name in since if name.startswith("edit")][-3:]
        deeds += [name for name in self._done[-1:] if name.startswith("run")]
        parts = [f"done {', '.join(deeds or self._done[-1:]) or 'nothing'}"]
        self._prepared = "read"
        if following.name == "edit":
            path, (quoted, _) = following.arguments["path"], split_change(following.arguments["change"])
            if len(quoted) == 1:
                parts.insert(0, f"seen {path}\n{quoted[0]}")
            if len(quoted) <= 1:
                self._prepared = "edit"
            parts.append(f"next edit {path}")
        else:
            parts.append(" ".join(("next", following.name, *following.arguments.values())))
        return Message(role="assistant", content="\n".join(parts))

    def _resume(self) -> None:
        """First message after a summary: read again unless the summary holds all that the next edit needs."""
        names = [call.name for call in self._plan]
        blind = self._prepared == "read" or self._rng.random() < self._config.reread_rate
        first, files = (1, self._task.files) if names[:1] == ["reset"] else (0, self._files)
        if names[first : first + 1] == ["edit"] and (blind or first):
            path = self._plan[first].arguments["path"]
            if path in files:
                self._plan.insert(first, _call("read", path=path))
        self._prepared = ""


def _call(name: str, **arguments: str) -> ToolCall:
    return say(name, **arguments).calls[0]
