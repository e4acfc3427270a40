"""Is a task sound? Its reference solution passes its own verifier and the untouched workspace fails it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from etude.base.edits import apply_edit
from etude.base.protocols import PodFactory, Verify
from etude.base.records import Message, Record, Task

CONCURRENCY = 16


class CheckReport(Record):
    """What the check of one task found."""

    task_id: str
    problem: str = ""
    """Empty when the task is sound."""

    @property
    def sound(self) -> bool:
        return not self.problem


async def check_task(task: Task, pods: PodFactory, verify: Verify) -> CheckReport:
    """Verify the untouched workspace and the reference solution in a pod each. Raises the faults of the services."""
    untouched = await pods.create(task.files)
    try:
        if (await verify(task, untouched, "", False)).passed:
            return CheckReport(task_id=task.id, problem="the untouched workspace passes")
    finally:
        await untouched.destroy()
    try:
        files, message, edited = solve(task)
    except ValueError as error:
        return CheckReport(task_id=task.id, problem=f"the reference cannot be replayed: {error}")
    solved = await pods.create(files)
    try:
        verdict = await verify(task, solved, message, edited)
    finally:
        await solved.destroy()
    problem = "" if verdict.passed else f"the reference fails: {verdict.output.strip()[:200]}"
    return CheckReport(task_id=task.id, problem=problem)


async def check_tasks(tasks: Sequence[Task], pods: PodFactory, verify: Verify) -> list[CheckReport]:
    """Check many tasks, some at once."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(task: Task) -> CheckReport:
        async with gate:
            return await check_task(task, pods, verify)

    return list(await asyncio.gather(*(one(task) for task in tasks)))


def solve(task: Task) -> tuple[dict[str, str], str, bool]:
    """(files after the reference solution, its final message, whether it edited). Raises ValueError for a misfit edit."""
    return replay(task.files, task.solution)


def replay(files: Mapping[str, str], messages: Sequence[Message]) -> tuple[dict[str, str], str, bool]:
    """:func:`solve` for a bare workspace and solution."""
    after, final, edited = dict(files), "", False
    for call in (call for turn in messages for call in turn.calls):
        if call.name == "edit":
            path = call.arguments.get("path", "")
            after[path] = apply_edit(after.get(path), call.arguments.get("change", ""))
            edited = True
        elif call.name == "finish":
            final = call.arguments.get("message", "")
    return after, final, edited
