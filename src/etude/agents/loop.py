"""One rollout: a pod, a conversation, the rules for when it ends, and what its end means.

Map: ``RolloutRunner.run`` makes the pod, lets ``_converse`` take turns on a :class:`~etude.agents.chain.Chain`, has the final
workspace verified and scored, and gives the pod back, whatever happened. Faults of services are caught here and nowhere
else: they are the outcome of the rollout, never a reward of zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from etude.agents.chain import Chain, Sampled
from etude.agents.config import HarnessConfig
from etude.agents.prompt import opening
from etude.agents.summary import summarise
from etude.agents.tools import Workbench, call_tool
from etude.base.errors import EnvironmentFault, EtudeError, InferenceFault, PathEscape, ServiceError, VerifierFault
from etude.base.protocols import PodFactory, Sampler, VerdictLike, Verify
from etude.base.records import Message, Outcome, PodLimits, RewardBreakdown, Rollout, Task, ToolCall, Turn
from etude.data.chat import ChatCodec
from etude.data.tokenizer import CALL, token_id

T = TypeVar("T")


Score = Callable[[Rollout], RewardBreakdown]
"""Reward terms of a finished rollout whose ``passed`` is set."""

_FAULTS: dict[type[EtudeError], Outcome] = {
    InferenceFault: Outcome.INFERENCE_FAULT,
    VerifierFault: Outcome.VERIFIER_FAULT,
    EnvironmentFault: Outcome.ENVIRONMENT_FAULT,
    PathEscape: Outcome.ENVIRONMENT_FAULT,  # what the model wrote is checked by its tools: here the task's own files
}


@dataclass
class _Attempt:
    """What one rollout has come to so far."""

    chain: Chain
    bench: Workbench | None = None
    outcome: Outcome = Outcome.CANCELLED
    detail: str = ""
    passed: bool | None = None
    verifier_output: str = ""
    started: float = field(default_factory=time.monotonic)


class RolloutRunner:
    """Runs rollouts of one harness configuration against one sampler and one source of pods."""

    def __init__(
        self,
        sampler: Sampler,
        pods: PodFactory,
        codec: ChatCodec,
        config: HarnessConfig,
        *,
        verify: Verify,
        score: Score,
        pod_limits: PodLimits | None = None,
    ) -> None:
        self.sampler, self.pods, self.codec, self.config = sampler, pods, codec, config
        self.verify, self.score, self.pod_limits = verify, score, pod_limits
        self._running: dict[str, asyncio.Task[object]] = {}
        self._cancelled: set[str] = set()

    async def run(self, task: Task, *, rollout_id: str, seed: int) -> Rollout:
        """One attempt at ``task``. Never raises for a fault of a service: that is the outcome of the rollout.

        Cancelled through :meth:`cancel` it returns what there is, as ``CANCELLED``. When the asyncio task that awaits it
        is cancelled, it gives the pod back and lets the cancellation through, so that executors stop.
        """
        attempt = _Attempt(Chain(self.sampler, self.codec, self.config, rollout_id=rollout_id, seed=seed))
        current = asyncio.current_task()
        assert current is not None  # we are in a coroutine
        self._running[rollout_id] = current
        try:
            await self._attempt(task, attempt)
        except tuple(_FAULTS) as fault:
            attempt.outcome = next(outcome for kind, outcome in _FAULTS.items() if isinstance(fault, kind))
            attempt.detail = str(fault)
        except asyncio.CancelledError:
            if rollout_id not in self._cancelled:
                raise
            current.uncancel()
            attempt.outcome = Outcome.CANCELLED
        finally:
            del self._running[rollout_id]
            self._cancelled.discard(rollout_id)
            await self._give_back(attempt)
        return self._record(task, attempt)

    def cancel(self, rollout_id: str) -> bool:
        """Stop a running rollout; its :meth:`run` returns with outcome CANCELLED. False when it is not running."""
        running = self._running.get(rollout_id)
        if running is None:
            return False
        self._cancelled.add(rollout_id)
        return running.cancel()

    async def _attempt(self, task: Task, attempt: _Attempt) -> None:
        """Pod, conversation, verification. Raises the fault of the service that failed."""
        seconds, chain = task.limits.wall_seconds, attempt.chain
        creating = self.pods.create(task.files, self.pod_limits)
        pod = await _within(seconds, creating, EnvironmentFault(f"no pod within {seconds:.0f}s"))
        bench = attempt.bench = Workbench(task, pod)
        try:
            async with asyncio.timeout(seconds):
                attempt.outcome, attempt.detail = await self._converse(task, bench, chain)
        except TimeoutError:
            attempt.outcome, attempt.detail = _overdue(chain, seconds)
        if attempt.outcome is not Outcome.COMPLETED:
            attempt.passed = False if attempt.outcome is Outcome.MODEL_FAULT else None
            return
        with chain.timed("verify"):
            verifying = self._verdict(task, bench, chain.final_message)
            verdict = await _within(seconds, verifying, VerifierFault(f"no verdict within {seconds:.0f}s"))
        attempt.passed, attempt.verifier_output = verdict.passed, verdict.output

    async def _verdict(self, task: Task, bench: Workbench, final_message: str) -> VerdictLike:
        return await self.verify(task, bench.pod, final_message, await bench.changed())

    async def _converse(self, task: Task, bench: Workbench, chain: Chain) -> tuple[Outcome, str]:
        """Turns until the agent finishes or a limit is hit."""
        config, limits = self.config, task.limits
        chain.show(opening(task))
        if not chain.fits_completion:
            size = len(chain.recorder.tokens)
            raise EnvironmentFault(f"task {task.id}: its prompt of {size} tokens needs a larger context_budget")
        while True:
            left = limits.max_sampled_tokens - chain.num_sampled
            if chain.costs["turns"] >= limits.max_turns:
                return Outcome.MODEL_FAULT, f"used {limits.max_turns} turns"
            if left <= 0:
                return Outcome.MODEL_FAULT, f"sampled {chain.num_sampled} tokens"
            if not chain.fits_completion:
                if chain.num_summaries >= config.max_summaries or not chain.recorder.num_sampled:
                    return Outcome.MODEL_FAULT, f"context full after {chain.num_summaries} summaries"
                await summarise(chain, task, limit=min(left, config.max_summary), edited=sorted(bench.originals))
                continue
            sampled = await chain.sample(min(left, config.max_completion))
            if sampled.cut and not sampled.message.calls:
                _count(chain, sampled, None)
                chain.turns.append(Turn(message=sampled.message, segment=len(chain.segments)))
                return Outcome.MODEL_FAULT, f"message cut at {len(sampled.tokens)} tokens"
            if await self._act(bench, chain, sampled):
                return Outcome.COMPLETED, ""

    async def _act(self, bench: Workbench, chain: Chain, sampled: Sampled) -> bool:
        """Execute one message: its calls in order up to ``finish``. Returns whether it ended the rollout."""
        calls = list(sampled.message.calls)
        if sampled.cut:  # an incomplete call must not be executed, and must not pass in silence
            error = f"cut at {len(sampled.tokens)} tokens, write less"
            calls[-1] = calls[-1].model_copy(update={"error": error})
        finish = next((i for i, call in enumerate(calls) if call.name == "finish" and call.error is None), len(calls))
        final = not calls or finish < len(calls)
        _count(chain, sampled, finish if final else None)
        results: list[Message] = []
        try:
            with chain.timed("tools"):
                for call in calls[:finish]:
                    results.append(Message(role="tool", content=await call_tool(bench, call)))
        finally:
            shown = results if final else chain.show_results(results)
            message = sampled.message.model_copy(update={"calls": tuple(calls)})
            chain.turns.append(Turn(message=message, results=tuple(shown), segment=len(chain.segments)))
        if final:
            chain.final_message = _final_text(sampled.message, calls[finish:])
        return final

    async def _give_back(self, attempt: _Attempt) -> None:
        """Pod and session back to their services, also under cancellation; their failure changes nothing any more."""
        try:
            if attempt.bench is not None:
                with contextlib.suppress(EnvironmentFault):
                    await asyncio.shield(attempt.bench.pod.destroy())
        finally:
            with contextlib.suppress(InferenceFault):
                await asyncio.shield(self.sampler.close_session(attempt.chain.session))

    def _record(self, task: Task, attempt: _Attempt) -> Rollout:
        chain, outcome = attempt.chain, attempt.outcome
        chain.close("stop" if outcome is Outcome.COMPLETED else "budget")
        rollout = Rollout(
            id=chain.rollout_id,
            task_id=task.id,
            category=task.category,
            segments=tuple(chain.segments),
            turns=tuple(chain.turns),
            effort=chain.effort,
            outcome=outcome,
            detail=attempt.detail,
            passed=attempt.passed,
            verifier_output=attempt.verifier_output[-400:],
            events=tuple(attempt.bench.events) if attempt.bench else (),
            seconds={**chain.seconds, "total": time.monotonic() - attempt.started},
        )
        return rollout.model_copy(update={"reward": self.score(rollout)}) if outcome.trainable else rollout


async def _within(seconds: float, awaitable: Awaitable[T], fault: ServiceError) -> T:
    """Await with a deadline whose passing is ``fault``."""
    try:
        async with asyncio.timeout(seconds):
            return await awaitable
    except TimeoutError:
        raise fault from None


def _overdue(chain: Chain, seconds: float) -> tuple[Outcome, str]:
    """Whose doing it is that the wall limit passed: what the model sampled is bounded, so a slow engine is not its fault."""
    inference, tools = chain.seconds["inference"], chain.seconds["tools"]
    detail = f"exceeded {seconds:.0f}s: {inference:.1f}s in inference, {tools:.1f}s in tools"
    return (Outcome.INFERENCE_FAULT if inference > tools else Outcome.MODEL_FAULT), detail


def _count(chain: Chain, sampled: Sampled, finish: int | None) -> None:
    """Add one assistant message to the efforts. ``finish``: index of the call that ends the rollout, None if none does.

    Every sampled token counts once: reasoning; the final message (from ``finish`` on, or all words when there is no other
    call); the rest, words beside a call included, is calling.
    """
    thinking = chain.codec.counts(sampled.tokens).thinking
    rest = sampled.tokens[thinking:]
    call_id = token_id(chain.codec.tokenizer, CALL)
    starts = [i for i, token in enumerate(rest) if token == call_id]
    calling = 0 if not starts or finish == 0 else len(rest) if finish is None else starts[finish]
    chain.costs["thinking_tokens"] += thinking
    chain.costs["call_tokens"] += calling
    chain.costs["message_tokens"] += len(rest) - calling
    chain.costs["calls"] += len(sampled.message.calls)
    chain.costs["turns"] += 1


def _final_text(message: Message, calls: list[ToolCall]) -> str:
    return calls[0].arguments.get("message", "") if calls else message.content
