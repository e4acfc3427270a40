"""The engine's thread: feeds requests in, steps while there is work, swaps weights between two steps.

Callers live on an asyncio loop and post commands; only this thread touches the engine. It blocks on a condition when there
is nothing to do. When it dies, every request that is waiting fails at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from etude.base.errors import EtudeError, InferenceFault, deadline_exceeded
from etude.base.records import PolicyVersion, SamplingParams
from etude.inference.engine import Engine
from etude.inference.request import Request, Result
from etude.inference.staging import Staged

SWAP_SECONDS = 60.0
"""Longest wait for the engine to come between two steps."""


class EngineLoop:
    """Bridges asyncio callers and the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.pause_seconds = 0.0
        """Longest time that a weight swap held up the next step."""
        self._commands: list[Callable[[], None]] = []
        self._pending: dict[asyncio.Future[Any], asyncio.AbstractEventLoop] = {}
        self._wake = threading.Condition()
        self._stopping = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; requests still waiting fail with InferenceFault."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=5.0)

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session: str,
        experts_start: int,
        deadline: float,
        progress: Callable[[int, float], None] | None = None,
    ) -> Result:
        """One completion. Raises InferenceFault when it is refused or the engine died, DeadlineExceeded after
        ``deadline`` seconds; the request is then cancelled, as it is when the caller is. ``progress`` runs on the
        caller's loop."""
        loop = asyncio.get_running_loop()
        submitted: list[Request] = []
        call = loop.call_soon_threadsafe
        watch = None if progress is None else lambda token, logprob: _discard(call(progress, token, logprob))

        def submit(future: asyncio.Future[Result]) -> None:
            def done(result: Result) -> None:
                self._resolve(future, result)

            submitted.append(
                self.engine.submit(tokens, params, done, session=session, experts_start=experts_start, progress=watch)
            )

        def cancel() -> None:
            for request in submitted:
                self.engine.cancel(request)

        try:
            result: Result = await self._ask(submit, deadline, "a completion")
            return result
        except (asyncio.CancelledError, EtudeError):
            if self._failure is None and not self._stopping:
                self._post(cancel)
            raise

    @property
    def failure(self) -> str | None:
        """Why the engine is not running, or None while it is."""
        return self._failure

    def close_session(self, session: str) -> None:
        self._post(lambda: self.engine.close_session(session))

    async def update(self, version: PolicyVersion, state: Mapping[str, Tensor]) -> Staged:
        """Build ``version`` on another thread, then swap it in. Raises CheckpointError; the old one then stays."""
        staged = await asyncio.to_thread(self.engine.stage, version, state)

        def swap(future: asyncio.Future[Staged]) -> None:
            clock = time.monotonic()
            self.engine.swap(staged)
            self.pause_seconds = max(self.pause_seconds, time.monotonic() - clock)
            self._resolve(future, staged)

        swapped: Staged = await self._ask(swap, SWAP_SECONDS, f"the swap to version {version}")
        return swapped

    async def _ask(self, command: Callable[[asyncio.Future[Any]], None], deadline: float, what: str) -> Any:
        """Run ``command(future)`` on the engine's thread and wait for the future."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._pending[future] = loop

        def run() -> None:
            try:
                command(future)
            except EtudeError as error:
                self._fail(future, loop, error)

        try:
            self._post(run)
            async with asyncio.timeout(deadline):
                return await future
        except TimeoutError:
            raise deadline_exceeded("engine", what, deadline, self.engine.version, str(self.engine.load)) from None
        finally:
            self._pending.pop(future, None)

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._failure is not None or self._stopping:
                raise InferenceFault(f"the engine is not running: {self._failure or 'it was stopped'}")
            self._commands.append(command)
            self._wake.notify()

    def _resolve(self, future: asyncio.Future[Any], value: Any) -> None:
        future.get_loop().call_soon_threadsafe(_set, future, value)

    def _fail(self, future: asyncio.Future[Any], loop: asyncio.AbstractEventLoop, error: Exception) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(_set_error, future, error)

    def _run(self) -> None:
        reason = "it was stopped"
        try:
            while self._turn():
                pass
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            with self._wake:
                self._failure = reason
            for future, loop in list(self._pending.items()):
                self._fail(future, loop, InferenceFault(f"the engine is not running: {reason}"))

    def _turn(self) -> bool:
        """Commands that came in, then one step. False when it is time to stop."""
        with self._wake:
            while not (self._commands or self._stopping or self.engine.busy):
                self._wake.wait()
            if self._stopping:
                return False
            commands, self._commands = self._commands, []
        for command in commands:
            command()
        if self.engine.busy:
            self.engine.step()
        return True


def _set(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _set_error(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _discard(value: object) -> None:
    return None
