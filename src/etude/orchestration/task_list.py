"""``etude tasks``: what a recipe's tasks are, and whether they are sound."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from etude.base.errors import UserError
from etude.base.records import Task
from etude.environments.client import EnvironmentsClient
from etude.orchestration.config import TasksConfig
from etude.orchestration.services import Services
from etude.orchestration.stages import demonstration_tasks
from etude.rewards.verifiers import verify
from etude.tasks.check import CheckReport, check_tasks
from etude.tasks.synth import generate


def describe_tasks(config: TasksConfig, *, show: str = "", check: int = 0) -> Iterator[str]:
    """Lines for people. Raises UserError when ``show`` names no task, or when a checked task is unsound."""
    splits = {
        "demonstrations": list(demonstration_tasks(config, 0)),
        "train": generate("train", config.train, 1),
        "held out": generate("heldout", config.held_out, 0),
    }
    if show:
        yield from _one(splits, show)
        return
    for name, tasks in splits.items():
        counts = Counter(task.category.value for task in tasks)
        yield f"{name}: {len(tasks)} tasks: " + ", ".join(f"{key} {n}" for key, n in sorted(counts.items()))
    if check:
        chosen = [task for tasks in splits.values() for task in tasks][
            :: max(1, sum(map(len, splits.values())) // check)
        ]
        reports = asyncio.run(_check(chosen[:check]))
        unsound = [report for report in reports if not report.sound]
        yield f"checked {len(reports)} in pods: {len(reports) - len(unsound)} sound"
        if unsound:
            raise UserError(f"task {unsound[0].task_id} is unsound: {unsound[0].problem}")


def _one(splits: dict[str, list[Task]], name: str) -> Iterator[str]:
    task = next((task for tasks in splits.values() for task in tasks if task.id == name), None)
    if task is None:
        raise UserError(f"no task {name} in this recipe; `etude tasks` lists what there is")
    yield f"{task.id}\n\n{task.instruction}\n"
    for path, text in task.files.items():
        if not path.startswith("."):
            yield f"--- {path}\n{text}"
    for message in task.solution:
        for call in message.calls:
            yield f">>> {call.name} {' | '.join(call.arguments.values())}"


async def _check(tasks: Sequence[Task]) -> list[CheckReport]:
    with tempfile.TemporaryDirectory() as logs:
        services = Services(Path(logs))
        try:
            address = await services.environments()
            client = EnvironmentsClient(address.url, address.key)
            try:
                return await check_tasks(tasks, client, verify)
            finally:
                await client.close()
        finally:
            services.stop()
