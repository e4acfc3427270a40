"""``etude pretrain``: continued pretraining, or extension of the context."""

from __future__ import annotations

from etude.cli.launch import Arguments, Run, Sets, begin, finish, new_app
from etude.orchestration.config import PretrainRunConfig
from etude.orchestration.stages import run_pretrain

app = new_app()


@app.command(epilog="Example: etude pretrain recipes/base.toml stage.steps=200 --run runs/base")
def pretrain(arguments: Arguments = None, sets: Sets = None, run: Run = None) -> None:
    """Train a base model on code, from a checkpoint or from nothing.

    A new context and rope_theta make it the long-context phase.
    """
    config, directory = begin(PretrainRunConfig, "pretrain", arguments, sets, run)
    run_pretrain(config, directory)
    finish(directory.path)
