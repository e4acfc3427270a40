"""Concrete functions made from templates: names and constants filled in, values computed by running them."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etude.tasks.synth.library import (
    ACCUMULATORS,
    ENDINGS,
    FUNCTIONS,
    LIBRARY,
    LISTS,
    LOOP,
    PARAMETERS,
    WORDS,
    Template,
)
from etude.tasks.synth.split import Split, split_of

Example = tuple[list[Any], Any]
"""(arguments, value)."""


class _Failed:
    """Value of a call that raised."""


FAILED = _Failed()


@dataclass(frozen=True)
class Function:
    """A template with all slots filled."""

    template: Template
    name: str
    slots: dict[str, Any]

    def fill(self, text: str) -> str:
        return text.format(f=self.name, **self.slots)

    @property
    def parameters(self) -> list[str]:
        return [str(self.slots[slot]) for slot in "ab"[: len(self.template.kinds)]]

    @property
    def signature(self) -> str:
        return f"{self.name}({', '.join(self.parameters)})"

    @property
    def head(self) -> str:
        return f"def {self.signature}:"

    @property
    def body(self) -> list[str]:
        return ["    " + self.fill(line) for line in self.template.body]

    @property
    def intention(self) -> str:
        return self.fill(self.template.intention)

    def source(self, *, comment: bool = False) -> list[str]:
        return [self.head, *([f"    # {self.intention}"] if comment else []), *self.body]

    @property
    def instance(self) -> str:
        """What makes this function this function: the template, the name, and the slots that its code shows."""
        shown = "\n".join(
            ["{f}", *("{" + slot + "}" for slot in "ab"[: len(self.template.kinds)]), *self.template.body]
        )
        slots = sorted((slot, value) for slot, value in self.slots.items() if "{" + slot + "}" in shown)
        return f"{self.template.key}:{self.name}:{','.join(f'{slot}={value}' for slot, value in slots)}"

    def with_line(self, line: int, text: str) -> list[str]:
        """Source with one body line (0-based) replaced; ``text`` still has slots."""
        body = self.body
        body[line] = "    " + self.fill(text)
        return [self.head, *body]

    def arguments(self, rng: random.Random) -> list[Any]:
        return [_argument(kind, rng) for kind in self.template.kinds]


def draw_function(rng: random.Random, used: set[str], split: Split, template: Template | None = None) -> Function:
    """A function of ``split`` whose name is not in ``used`` (it is added)."""
    while True:
        function = _draw(rng, used, template or rng.choice(LIBRARY))
        if split_of(function.source()) == split:
            used.add(function.name)
            return function


def _draw(rng: random.Random, used: set[str], template: Template) -> Function:
    name = rng.choice([name for name in FUNCTIONS if name not in used])
    a, b = rng.sample([p for p in (LISTS if "l" in template.kinds else PARAMETERS) if p != name], 2)
    x = rng.choice([word for word in LOOP if word not in (a, b, name)])
    r = rng.choice([word for word in ACCUMULATORS if word not in (a, b, name, x)])
    k: int | str = rng.randint(2, 9)
    m = rng.choice([number for number in range(2, 10) if number != k])
    if template.key == "tail":
        k = rng.choice(ENDINGS)
    return Function(template, name, {"a": a, "b": b, "x": x, "r": r, "k": k, "m": m})


def evaluate(source: Sequence[str], name: str, arguments: list[Any]) -> Any:
    """Value of a call of generated (trusted) code, or FAILED when it raises."""
    scope: dict[str, Any] = {}
    exec("\n".join(source), scope)
    try:
        return scope[name](*copy.deepcopy(arguments))
    except Exception:
        return FAILED


def examples(
    function: Function, source: Sequence[str], rng: random.Random, count: int, wrong: Sequence[Sequence[str]] = ()
) -> list[Example] | None:
    """``count`` distinct examples of ``source`` that together tell it from every source in ``wrong``; None if not found."""
    found: list[Example] = []
    for _ in range(60):
        arguments = function.arguments(rng)
        value = evaluate(source, function.name, arguments)
        if value is FAILED or any(arguments == known for known, _ in found):
            continue
        if not found and wrong and all(evaluate(other, function.name, arguments) == value for other in wrong):
            continue
        found.append((arguments, value))
        if len(found) == count:
            break
    told = all(any(evaluate(other, function.name, a) != v for a, v in found) for other in wrong)
    return found if len(found) == count and told else None


def call_text(name: str, arguments: Sequence[Any]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"


def _argument(kind: str, rng: random.Random) -> Any:
    if kind == "i":
        return rng.choice((rng.randint(1, 9), rng.randint(1, 9), rng.randint(-3, 12)))
    if kind == "l":
        return [rng.randint(1, 9) for _ in range(rng.randint(3, 4))]
    return rng.choice(WORDS)
