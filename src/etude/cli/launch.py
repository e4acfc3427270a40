"""What the commands share: their arguments, how a recipe and a run directory come out of them, and the closing lines."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from etude.base.config import ConfigT, apply_override, load, resolve
from etude.base.errors import ConfigError, UserError
from etude.base.telemetry import RunDirectory
from etude.dashboard.report import write_report
from etude.dashboard.text import text_table

_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [KEY=VALUE]...", help="A TOML recipe, and keys of it to change.", show_default=False
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe; may be repeated.", show_default=False),
]
Run = Annotated[
    Path | None,
    typer.Option("--run", metavar="DIR", help="New run directory; default runs/COMMAND-TIME.", show_default=False),
]


def new_app() -> typer.Typer:
    """An app for one command: plain help, errors left to the frame."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def split_arguments(arguments: Sequence[str] | None, sets: Sequence[str] | None) -> tuple[Path | None, list[str]]:
    """``[RECIPE] [KEY=VALUE]...`` and ``--set`` values as a recipe and overrides, in order. Raises ConfigError."""
    given = list(arguments or ())
    overrides = [argument for argument in given if _OVERRIDE.match(argument)]
    recipes = [argument for argument in given if not _OVERRIDE.match(argument)]
    if len(recipes) > 1:
        raise ConfigError(f"more than one recipe: {', '.join(recipes)}; changes are written KEY=VALUE")
    return Path(recipes[0]) if recipes else None, overrides + list(sets or ())


def configure(cls: type[ConfigT], arguments: Sequence[str] | None, sets: Sequence[str] | None) -> ConfigT:
    """The configuration that the arguments ask for. Raises ConfigError."""
    recipe, overrides = split_arguments(arguments, sets)
    return load(cls, recipe, overrides)


def begin(
    cls: type[ConfigT], command: str, arguments: Sequence[str] | None, sets: Sequence[str] | None, run: Path | None
) -> tuple[ConfigT, RunDirectory]:
    """Configuration and new run directory, with the resolved recipe written into it. Raises ConfigError, UserError."""
    config = configure(cls, arguments, sets)
    directory = RunDirectory.create(run or Path("runs") / f"{command}-{time.strftime('%Y%m%d-%H%M%S')}")
    directory.write_recipe(config.model_dump(mode="json"))
    return config, directory


def reopen(
    cls: type[ConfigT], arguments: Sequence[str] | None, sets: Sequence[str] | None, run: Path
) -> tuple[ConfigT, RunDirectory]:
    """Configuration and directory of a stopped run, with overrides applied to its own recipe. Raises as begin."""
    recipe, overrides = split_arguments(arguments, sets)
    if recipe is not None:
        raise ConfigError(f"recipe {recipe}: a resumed run keeps its own recipe.json; change keys with KEY=VALUE")
    directory = RunDirectory.create(run, resume=True)
    source = directory.file("recipe.json")
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"recipe {source}: cannot be read: {error}") from None
    for override in overrides:
        apply_override(data, override)
    config = resolve(cls, data, source=str(source))
    directory.write_recipe(config.model_dump(mode="json"))
    return config, directory


def finish(run: Path) -> None:
    """Print the before/after table where there is one, write the report and print its path."""
    table = text_table(run)
    if table:
        print(table)
    print(f"report: {write_report(run)}")
