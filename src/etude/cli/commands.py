"""The table of commands. Adding one: write its file with a Typer ``app``, add its row here.

Only the module of the command that was called is imported, so that ``etude --help`` is instant.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """Where a command lives and what it does in one line."""

    module: str
    help: str


COMMANDS = {
    "quickstart": Command("etude.cli.quickstart", "The whole life of a small model: pretrain, extend, SFT, RL, report"),
    "pretrain": Command("etude.cli.pretrain", "Continue pretraining, or extend the context"),
    "sft": Command("etude.cli.sft", "Fine-tune on demonstrations that the harness produced"),
    "rl": Command("etude.cli.rl", "Asynchronous RL on tasks; --resume goes on after a stop"),
    "eval": Command("etude.cli.eval", "Held-out pass@1 and best-of-k with intervals"),
    "serve": Command("etude.cli.serve", "Serve a checkpoint at an OpenAI-compatible endpoint"),
    "report": Command("etude.cli.report", "Write the standalone HTML report of a run"),
    "ledger": Command("etude.cli.ledger", "Prove what became of every sample of a run"),
    "tasks": Command("etude.cli.tasks", "List, show and check tasks"),
}


def overview() -> str:
    """What ``etude --help`` prints."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "Usage: etude COMMAND [RECIPE] [KEY=VALUE ...] [OPTIONS]",
            "",
            "Train coding agents: continued pretraining and asynchronous RL, on a laptop or a cluster.",
            "",
            "Commands:",
            *lines,
            "",
            "Options:",
            "  --help     This text; `etude COMMAND --help` for a command",
            "  --version  The installed version",
            "",
            "Example: etude quickstart --run runs/first",
        ]
    )
