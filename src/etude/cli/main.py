"""Entry of the ``etude`` command: finds the command in the table, loads its file, runs it, tells errors in one line."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from etude.base.errors import UserError
from etude.cli.commands import COMMANDS, overview
from etude.cli.failures import guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``etude ARGUMENTS`` (default: those of the process) and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(lambda: dispatch(given))


def dispatch(arguments: Sequence[str]) -> None:
    """Run one command. Raises UserError for an unknown one, SystemExit with the command's own exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return
    name, *rest = arguments
    if name == "--version":
        print(f"etude {importlib.metadata.version('etude')}")
        return
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {name}; {hint}")
    importlib.import_module(command.module).app(args=rest, prog_name=f"etude {name}")


if __name__ == "__main__":
    sys.exit(main())
