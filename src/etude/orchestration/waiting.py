"""Waiting for a change of state on one event loop, always with a deadline."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes everybody who waits. State is changed first, then told; waiters look at the state again."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Return at the next :meth:`notify`, or after ``seconds``."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait({waiter}, timeout=max(seconds, 0.0))
        finally:
            self._waiters.discard(waiter)
