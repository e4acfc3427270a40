"""Fakes that implement the Protocols: pods in memory, and samplers that return prepared completions."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.base.errors import EnvironmentFault, PathEscape
from etude.base.records import (
    Completion,
    ExecResult,
    Message,
    PodLimits,
    RewardBreakdown,
    Rollout,
    SamplingParams,
    Task,
    TestsVerifier,
    ToolCall,
)
from etude.data.chat import ChatCodec

Exec = Callable[["FakePod", str], "ExecResult | Exception"]


LINK_OUT = "-> /"
"""Content of a file that stands for a link that leads out of the workspace."""


class FakePod:
    """A workspace in a dict; commands are answered by a function."""

    def __init__(self, owner: FakePods, files: Mapping[str, str]) -> None:
        self.owner, self.files = owner, dict(files)
        self.destroyed = False

    async def exec(self, command: str, *, timeout: float = 20.0) -> ExecResult:
        await asyncio.sleep(0)
        self.owner.commands.append(command)
        if command.startswith("rm -f -- "):
            for path in shlex.split(command)[3:]:
                self.files.pop(path.removeprefix("./"), None)
            return ExecResult(exit_code=0, output="", seconds=0.0)
        answer = self.owner.execute(self, command)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def read(self, path: str) -> str | None:
        content = self.files.get(_inside(path))
        if content == LINK_OUT:
            raise PathEscape(path)
        return content

    async def write(self, files: Mapping[str, str]) -> None:
        self.files.update({_inside(path): content for path, content in files.items()})

    async def list(self) -> list[str]:
        return sorted(self.files)

    async def fork(self) -> FakePod:
        return await self.owner.create(self.files)

    async def destroy(self) -> None:
        self.destroyed = True


def _inside(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/"):
        raise PathEscape(path)
    return path


def nothing(pod: FakePod, command: str) -> ExecResult:
    return ExecResult(exit_code=0, output="1 passed", seconds=0.0)


class FakePods:
    """A PodFactory that remembers its pods."""

    def __init__(self, execute: Exec = nothing, *, broken: bool = False) -> None:
        self.execute, self.broken = execute, broken
        self.pods: list[FakePod] = []
        self.commands: list[str] = []

    async def create(self, files: Mapping[str, str], limits: PodLimits | None = None) -> FakePod:
        if self.broken:
            raise EnvironmentFault("environments gave no answer")
        self.pods.append(FakePod(self, {_inside(path): content for path, content in files.items()}))
        return self.pods[-1]


def run_for_real(pod: FakePod, command: str) -> ExecResult:
    """Run a command on the files of a pod, in a directory of its own (the tasks of tests are trusted)."""
    import subprocess

    with tempfile.TemporaryDirectory() as name:
        for path, content in pod.files.items():
            target = Path(name) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
        try:
            done = subprocess.run(command, shell=True, cwd=name, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            return ExecResult(exit_code=124, output="", seconds=60.0, timed_out=True)
    return ExecResult(exit_code=done.returncode, output=done.stdout + done.stderr, seconds=0.0)


@dataclass
class Request:
    """One call of a sampler."""

    tokens: list[int]
    params: SamplingParams
    session: str
    experts_start: int


class TokenSampler:
    """A Sampler that returns prepared ids one completion a call, with distinct logprobs, versions and experts.

    Experts of position p at first feeding are ``[p, version]`` for one MoE layer, so that a test can tell them apart.
    """

    def __init__(self, completions: Sequence[Sequence[int] | Exception], *, experts: bool = True) -> None:
        self._left = list(completions)
        self._experts = experts
        self.requests: list[Request] = []
        self.closed: list[str] = []

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, *, session: str, experts_start: int = 0
    ) -> Completion:
        self.requests.append(Request(list(tokens), params, session, experts_start))
        await asyncio.sleep(0)
        answer = self._left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        number = len(self.requests)
        kept = tuple(answer)[: params.max_new_tokens]
        fed = len(tokens) + len(kept) - 1
        experts: Any = np.array([[[p, number]] for p in range(experts_start, fed)], np.int16) if self._experts else None
        return Completion(
            tokens=kept,
            logprobs=tuple(-number - i / 100 for i in range(len(kept))),
            versions=(number,) * len(kept),
            experts=experts,
            experts_start=experts_start,
            stop_reason="stop" if len(kept) == len(answer) else "length",
        )

    async def close_session(self, session: str) -> None:
        self.closed.append(session)


def messages_sampler(codec: ChatCodec, messages: Sequence[Message | Exception], **options: Any) -> TokenSampler:
    """A TokenSampler that says ``messages``."""
    ids = [m if isinstance(m, Exception) else codec.render_completion(m) for m in messages]
    return TokenSampler(ids, **options)


def says(*calls: tuple[str, dict[str, str]], content: str = "", thinking: str = "") -> Message:
    """An assistant message of some calls."""
    made = tuple(ToolCall(name=name, arguments=arguments) for name, arguments in calls)
    return Message(role="assistant", content=content, thinking=thinking, calls=made)


@dataclass
class FakeVerdict:
    passed: bool
    output: str = ""


async def always_passes(task: Task, pod: Any, message: str, edited: bool) -> FakeVerdict:
    return FakeVerdict(True, "fine")


def outcome_only(rollout: Rollout) -> RewardBreakdown:
    return RewardBreakdown(terms={"outcome": float(bool(rollout.passed))})


TOTAL = "def total(a, b):\n    return a - b\n"


def task_of(files: Mapping[str, str] | None = None, **changes: Any) -> Task:
    """A small task; ``changes`` are fields of Task."""
    fields: dict[str, Any] = {
        "id": "debugging-1",
        "category": "debugging",
        "instruction": "fix total in lib.py",
        "files": {"lib.py": TOTAL} if files is None else dict(files),
        "verifier": TestsVerifier(command="true"),
        "test_command": "python3 test_lib.py",
        **changes,
    }
    return Task.model_validate(fields)
