"""``etude sft``: supervised fine-tuning on demonstrations."""

from __future__ import annotations

from etude.cli.launch import Arguments, Run, Sets, begin, finish, new_app
from etude.orchestration.config import SFTRunConfig
from etude.orchestration.stages import run_sft

app = new_app()


@app.command(epilog="Example: etude sft init=runs/base/checkpoints/stages/extend --run runs/sft")
def sft(arguments: Arguments = None, sets: Sets = None, run: Run = None) -> None:
    """Make demonstrations with the agent harness (real tool results), then fine-tune on them."""
    config, directory = begin(SFTRunConfig, "sft", arguments, sets, run)
    run_sft(config, directory)
    finish(directory.path)
