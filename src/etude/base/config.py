"""Typed configuration: one TOML recipe a run, every key overridable on the command line.

Each component owns a :class:`Config` beside it and receives that and nothing else. Unknown keys and bad combinations
are refused when the recipe resolves, with the key named. No torch, no Ray: ``etude --help`` and validation stay fast.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from etude.base.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound="Config")


class Config(BaseModel):
    """Base of all configurations: frozen, unknown keys refused, defaults validated."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def load(cls: type[ConfigT], path: Path | None, overrides: Sequence[str] = ()) -> ConfigT:
    """Resolve a recipe: TOML file (or defaults only), then ``key.sub=value`` overrides. Raises ConfigError."""
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"recipe {path}: no such file; `ls recipes/` shows those that ship with Etude") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe {path}: cannot be read: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"recipe {path}: not valid TOML: {error}") from None
    for override in overrides:
        apply_override(data, override)
    return resolve(cls, data, source=str(path) if path else "command line")


def resolve(cls: type[ConfigT], data: dict[str, Any], *, source: str) -> ConfigT:
    """Validate ``data`` as ``cls``; the first problem becomes one ConfigError line that names its key."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"]) or "recipe"
        if problem["type"] == "extra_forbidden":
            known = ", ".join(_known_keys(cls, problem["loc"][:-1]))
            raise ConfigError(f"{source}: unknown key {key}; known here: {known}") from None
        message = problem["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{source}: {key}: {message}") from None


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set ``a.b=value`` in nested ``data``; the value is read as TOML and, failing that, as a string."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r}: expected key.sub=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    node = data
    *parents, leaf = key.strip().split(".")
    for part in parents:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {part} is a value, not a table")
        node = child
    node[leaf] = value


def _known_keys(cls: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """Field names at ``path`` below ``cls``, for the message about an unknown key."""
    for part in path:
        field = cls.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return sorted(cls.model_fields)
        cls = annotation
    return sorted(cls.model_fields)
