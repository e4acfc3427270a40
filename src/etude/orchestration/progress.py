"""Progress for people: one bar a stage with its latest figures; plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_SECONDS = 15.0
"""How often a plain line is printed per stage."""


class StageProgress:
    """Shows stages by name. Safe to call from one thread (the driver's event loop)."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._bars = Progress(
            TextColumn("[bold]{task.description:<22}"),
            BarColumn(bar_width=26),
            TextColumn("{task.completed:>5.0f}/{task.total:<5.0f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            refresh_per_second=4,
        )
        self._ids: dict[str, TaskID] = {}
        self._printed: dict[str, float] = {}

    def __enter__(self) -> StageProgress:
        if self.console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self._bars.stop()

    def begin(self, name: str, total: float) -> None:
        """Open (or reset) the bar of a stage."""
        if name in self._ids:
            self._bars.reset(self._ids[name], total=total, note="")
        else:
            self._ids[name] = self._bars.add_task(name, total=total, note="")
        self._printed[name] = 0.0

    def update(self, name: str, done: float, note: str = "") -> None:
        """Set how much of a stage is done and its one-line note."""
        bar = self._ids[name]
        self._bars.update(bar, completed=done, note=note)
        if self.console.is_terminal:
            return
        total = self._bars.tasks[self._bars.task_ids.index(bar)].total or 0.0
        now = time.monotonic()
        if done >= total or now - self._printed[name] > PLAIN_SECONDS:
            self._printed[name] = now
            self.console.print(f"{name}: {done:.0f}/{total:.0f} {note}", highlight=False, markup=False)

    def say(self, text: str) -> None:
        """One line above the bars."""
        self.console.print(text, highlight=False)


def figures(values: Mapping[str, float | None], names: Mapping[str, str]) -> str:
    """Note text ``label value`` for the values that are there: ``figures(row, {"train_loss": "loss"})``."""
    return "  ".join(f"{label} {values[key]:.3g}" for key, label in names.items() if values.get(key) is not None)
