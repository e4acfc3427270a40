"""``etude rl``: asynchronous RL, new or resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.base.errors import ConfigError
from etude.cli.launch import Arguments, Run, Sets, begin, finish, new_app, reopen
from etude.orchestration.config import RLConfig
from etude.orchestration.rl import run_rl

app = new_app()


@app.command(epilog="Example: etude rl init=runs/sft steps=40 --run runs/rl; after a stop: etude rl --resume runs/rl")
def rl(
    arguments: Arguments = None,
    sets: Sets = None,
    run: Run = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Go on with this stopped run.", show_default=False)
    ] = None,
) -> None:
    """Train on tasks with trainer and rollouts at once.

    No prompt is trained twice, across stops and resumes too; `etude ledger RUN` proves it.
    """
    if resume is not None and run is not None:
        raise ConfigError("--run starts a new run and --resume goes on with an old one; give one of them")
    if resume is not None:
        config, directory = reopen(RLConfig, arguments, sets, resume)
    else:
        config, directory = begin(RLConfig, "rl", arguments, sets, run)
    run_rl(config, directory, resume=resume is not None)
    finish(directory.path)
