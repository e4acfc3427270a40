"""``etude report``: the standalone HTML report of a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.launch import new_app
from etude.dashboard.report import write_report
from etude.dashboard.text import text_table

app = new_app()


@app.command(epilog="Example: etude report runs/first")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, finished or still running.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to write; default RUN/report.html.", show_default=False),
    ] = None,
) -> None:
    """Write one HTML file with the results, curves and rollouts of a run, and print its path.

    Reads the plain files of the run directory only; the page needs no network.
    """
    path = write_report(run, out)
    table = text_table(run)
    if table:
        print(table)
    print(f"report: {path}")
