"""``etude ledger``: what became of every sample of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.launch import new_app
from etude.orchestration.ledger import audit

app = new_app()


@app.command(epilog="Example: etude ledger runs/first")
def ledger(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, finished or still running.")],
) -> None:
    """Audit the ledger: each prompt was trained once, dropped for a named reason, or is pending.

    Exits 1 when a row contradicts that.
    """
    found = audit(run)
    print(found)
    if not found.consistent:
        raise typer.Exit(1)
