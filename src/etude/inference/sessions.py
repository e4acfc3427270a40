"""Which session owns which slot, and which slot is given up when all are taken."""

from __future__ import annotations

import itertools
from collections.abc import Container

from etude.inference.cache import KVCache


class Sessions:
    """A session keeps its slot between requests until it is closed or, least recently used first, evicted."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._slots: dict[str, int] = {}
        self._owner: list[str | None] = [None] * cache.num_slots
        self._used = [0] * cache.num_slots
        self._clock = itertools.count(1)

    @property
    def count(self) -> int:
        return len(self._slots)

    def running(self, session: str, active: Container[int]) -> bool:
        """A request of this session is being served."""
        return self._slots.get(session, -1) in active

    def kept(self, session: str) -> bool:
        """The session has a slot."""
        return session in self._slots

    def place(self, session: str, active: Container[int], epoch: int) -> int | None:
        """The session's slot, or the idle one that is missed least; None when every slot is active."""
        slot = self._slots.get(session)
        if slot is not None:
            return slot
        idle = [slot for slot in range(self._cache.num_slots) if slot not in active]
        if not idle:
            return None
        current = self._cache.epoch == epoch
        # nobody's before somebody's; among those, keys of older weights first (nobody else can use them); then by age
        return min(idle, key=lambda s: (self._owner[s] is not None, bool(current[s]), self._used[s]))

    def own(self, slot: int, session: str) -> None:
        """``session`` owns ``slot``; whoever did is evicted and will prefill again."""
        before = self._owner[slot]
        if before is not None and before != session:
            del self._slots[before]
        self._owner[slot], self._slots[session] = session, slot
        self.touch(slot)

    def close(self, session: str) -> None:
        slot = self._slots.pop(session, None)
        if slot is not None:
            self._owner[slot] = None

    def touch(self, slot: int) -> None:
        self._used[slot] = next(self._clock)
