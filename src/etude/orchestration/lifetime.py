"""Runs a command's coroutine: Ctrl-C and SIGTERM cancel it, its ``finally`` blocks stop what it started."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


def run_until_done(main: Coroutine[Any, Any, None]) -> None:
    """Run to the end. Raises KeyboardInterrupt after a clean stop by signal, and whatever ``main`` raises."""
    stopped = False

    async def guarded() -> None:
        nonlocal stopped
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def stop() -> None:
            nonlocal stopped
            if not stopped:  # a second signal must not break the clean-up
                stopped = True
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        await main

    try:
        asyncio.run(guarded())
    except asyncio.CancelledError:
        if not stopped:
            raise
        raise KeyboardInterrupt from None
