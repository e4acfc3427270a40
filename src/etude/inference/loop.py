"""The engine's thread: feeds requests in, steps while there is work, swaps weights between two steps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from etude.base.errors import EtudeError, InferenceFault
from etude.base.records import Completion, PolicyVersion, SamplingParams
from etude.inference.engine import Engine, Request
from etude.models.deepseek import DeepseekModel


class EngineLoop:
    """Bridges asyncio callers and the engine. All engine access happens on its one thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.pause_seconds = 0.0
        """Longest time that a weight swap held up the next step."""
        self._commands: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; requests still running are cancelled."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=5.0)

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, *, session: str, experts_start: int, deadline: float
    ) -> Completion:
        """One completion. Raises InferenceFault, also when ``deadline`` seconds pass (the request is then cancelled)."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        requests: list[Request] = []

        def deliver(completion: Completion) -> None:
            loop.call_soon_threadsafe(_resolve, future, completion)

        def submit() -> None:
            try:
                requests.append(
                    self.engine.submit(tokens, params, deliver, session=session, experts_start=experts_start)
                )
            except EtudeError as error:
                loop.call_soon_threadsafe(_refuse, future, error)

        def cancel() -> None:
            for request in requests:
                self.engine.cancel(request)

        self._post(submit)
        try:
            return await asyncio.wait_for(future, deadline)
        except (TimeoutError, asyncio.CancelledError) as error:
            self._post(cancel)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise InferenceFault(
                f"engine gave no completion within {deadline:.0f}s (policy version {self.engine.version}); "
                f"last progress: {self.engine.load}"
            ) from None

    def close_session(self, session: str) -> None:
        self._post(lambda: self.engine.close_session(session))

    async def swap(self, state: Mapping[str, Tensor], version: PolicyVersion, *, deadline: float = 60.0) -> None:
        """Build a model from ``state`` beside the live one, then serve it. Raises CheckpointError; the old one stays."""
        model = await asyncio.to_thread(self.engine.prepare, state)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def apply() -> None:
            clock = time.monotonic()
            self._apply(model, version)
            self.pause_seconds = max(self.pause_seconds, time.monotonic() - clock)
            loop.call_soon_threadsafe(_resolve, done, None)

        self._post(apply)
        await asyncio.wait_for(done, deadline)

    def _apply(self, model: DeepseekModel, version: PolicyVersion) -> None:
        self.engine.swap(model, version)

    def _post(self, command: Callable[[], None]) -> None:
        if self._failure is not None:
            raise InferenceFault(f"the engine stopped: {self._failure}")
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._commands or self._stopping or self.engine.busy):
                        self._wake.wait()
                    if self._stopping:
                        return
                    commands, self._commands = self._commands, []
                for command in commands:
                    command()
                if self.engine.busy:
                    self.engine.step()
        except BaseException as error:
            self._failure = error
            raise


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _refuse(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
