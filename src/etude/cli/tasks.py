"""``etude tasks``: the tasks that a run would use."""

from __future__ import annotations

from typing import Annotated

import typer

from etude.cli.launch import Arguments, Sets, configure, new_app
from etude.orchestration.config import TasksConfig
from etude.orchestration.task_list import describe_tasks

app = new_app()


@app.command(epilog="Example: etude tasks train=100 held_out=20; one in full: etude tasks --show TASK_ID")
def tasks(
    arguments: Arguments = None,
    sets: Sets = None,
    show: Annotated[str, typer.Option("--show", metavar="ID", help="Print one task in full.", show_default=False)] = "",
    check: Annotated[
        int, typer.Option("--check", metavar="N", help="Run N of them: the reference passes, the untouched fails.")
    ] = 0,
) -> None:
    """Count the tasks of a recipe by category and split; show one, or check some in real pods."""
    for line in describe_tasks(configure(TasksConfig, arguments, sets), show=show, check=check):
        print(line)
