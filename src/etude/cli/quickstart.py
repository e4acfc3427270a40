"""``etude quickstart``: the whole life of a small model on one machine."""

from __future__ import annotations

from etude.cli.launch import Arguments, Run, Sets, begin, finish, new_app
from etude.orchestration.config import QuickstartConfig
from etude.orchestration.quickstart import RECIPE, run_quickstart

app = new_app()


@app.command(epilog="Example: etude quickstart --run runs/first")
def quickstart(arguments: Arguments = None, sets: Sets = None, run: Run = None) -> None:
    """Continued pretraining, long-context extension, SFT, asynchronous RL and evaluation of a small model.

    Ends with a before/after table and the path of an HTML report. Needs no GPU and no network.
    """
    given = arguments or []
    if not any(argument.endswith(".toml") for argument in given):
        given = [str(RECIPE), *given]
    config, directory = begin(QuickstartConfig, "quickstart", given, sets, run)
    run_quickstart(config, directory)
    finish(directory.path)
