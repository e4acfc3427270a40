"""What a room asks of another, without knowing which service answers.

Agents take a :class:`Sampler` and a :class:`Pod`; verifiers take a :class:`Pod`. Tests implement them with
scripted fakes; the services implement them with HTTP clients.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from etude.base.records import Completion, ExecResult, PodLimits, SamplingParams, Task


class Sampler(Protocol):
    """Token in, token out."""

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, *, session: str, experts_start: int = 0
    ) -> Completion:
        """Sample a continuation of ``tokens``.

        ``session`` names a conversation whose KV cache is kept between calls; a call whose tokens extend those of
        the last call of the session continues from it. ``experts_start`` is the first position whose routed
        experts are wanted. Raises InferenceFault.
        """
        ...

    async def close_session(self, session: str) -> None:
        """Forget a session's cache. Never raises for an unknown one."""
        ...


class Pod(Protocol):
    """A sandbox with a workspace. Paths are relative to the workspace; one that leaves it raises PathEscape.

    All methods raise EnvironmentFault when the service fails; what the code under test does is in the result.
    """

    async def exec(self, command: str, *, timeout: float = 20.0) -> ExecResult: ...

    async def read(self, path: str) -> str | None:
        """UTF-8 content (undecodable bytes replaced), or None when there is no such file."""
        ...

    async def write(self, files: Mapping[str, str]) -> None:
        """Create or overwrite files, parents included."""
        ...

    async def list(self) -> list[str]:
        """Sorted paths of all regular files in the workspace."""
        ...

    async def fork(self) -> Pod:
        """A new pod with a private copy of this one's files as they are now."""
        ...

    async def destroy(self) -> None:
        """Give the pod back. Idempotent; returns at once, the clean-up goes on in the background."""
        ...


class PodFactory(Protocol):
    """Where pods come from."""

    async def create(self, files: Mapping[str, str], limits: PodLimits | None = None) -> Pod: ...


class VerdictLike(Protocol):
    """What a verifier says."""

    @property
    def passed(self) -> bool: ...
    @property
    def output(self) -> str: ...


Verify = Callable[[Task, Pod, str, bool], Awaitable[VerdictLike]]
"""(task, final pod, final message, whether files were edited) -> verdict. Raises VerifierFault, EnvironmentFault.

``rewards.verifiers.verify`` is one; it is handed in by the composition root to rooms that do not know rewards."""
