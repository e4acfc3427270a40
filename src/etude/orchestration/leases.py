"""Slots that are out with executors, each for a bounded time."""

from __future__ import annotations

from etude.orchestration.samples import Slot


class Leases:
    """Who runs what until when. Times are seconds of one clock, the caller's."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._held: dict[tuple[str, int], tuple[Slot, float]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def give(self, slot: Slot, now: float) -> None:
        self._held[slot.task.id, slot.attempt] = slot, now + self.seconds

    def holds(self, slot: Slot) -> bool:
        """Whether this very slot is out: not an earlier try of the same attempt."""
        held = self._held.get((slot.task.id, slot.attempt))
        return held is not None and held[0].tries == slot.tries

    def end(self, slot: Slot) -> None:
        del self._held[slot.task.id, slot.attempt]

    def end_task(self, task_id: str) -> None:
        for key in [key for key in self._held if key[0] == task_id]:
            del self._held[key]

    def lost(self, now: float) -> list[Slot]:
        """Slots whose time is over; they stay until :meth:`end`."""
        return [slot for slot, until in self._held.values() if until <= now]

    def next_end(self, otherwise: float) -> float:
        """When the first lease ends, at the latest ``otherwise``."""
        return min([otherwise, *(until for _, until in self._held.values())])
