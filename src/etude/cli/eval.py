"""``etude eval``: a checkpoint against held-out tasks."""

from __future__ import annotations

from etude.cli.launch import Arguments, Run, Sets, begin, finish, new_app
from etude.orchestration.config import EvalRunConfig
from etude.orchestration.evaluation import run_eval

app = new_app()


@app.command(epilog="Example: etude eval init=runs/first/stages/rl evals.samples=8 --run runs/eval")
def evaluate(arguments: Arguments = None, sets: Sets = None, run: Run = None) -> None:
    """Held-out pass@1 and best-of-k of a checkpoint, with 95% intervals clustered by task."""
    config, directory = begin(EvalRunConfig, "eval", arguments, sets, run)
    run_eval(config, directory)
    finish(directory.path)
