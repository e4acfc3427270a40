"""``etude serve``: a checkpoint behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from etude.cli.launch import Arguments, Sets, configure, new_app
from etude.orchestration.serving import ServeConfig, run_serve

app = new_app()


@app.command(epilog="Example: etude serve init=base port=8000")
def serve(arguments: Arguments = None, sets: Sets = None) -> None:
    """Serve a checkpoint until Ctrl-C: chat completions, and token-level sampling with logprobs."""
    run_serve(configure(ServeConfig, arguments, sets))
