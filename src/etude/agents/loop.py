"""One rollout: a pod, a conversation, and the rules for when it ends.

Token in, token out: the context is a growing list of ids; what the sampler returns is appended unchanged, tool results are
rendered once and appended. When the next completion might not fit the context budget, the model is asked *in the live context*
for a summary (its prefix cache is reused), and the chain goes on in a new segment from prompt, task and summary.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import Field, model_validator

from etude.agents.prompt import SUMMARY_REQUEST, opening, reopening
from etude.agents.recorder import SegmentRecorder
from etude.agents.tools import Workbench, call_tool
from etude.base.config import Config
from etude.base.errors import EnvironmentFault, InferenceFault, VerifierFault
from etude.base.protocols import Pod, PodFactory, Sampler
from etude.base.records import (
    Effort,
    Message,
    Outcome,
    PodLimits,
    RewardBreakdown,
    Rollout,
    SamplingParams,
    Segment,
    Task,
    Turn,
)
from etude.data.chat import ChatCodec


class HarnessConfig(Config):
    """Limits of the harness; those of the task apply as well."""

    context_budget: int = Field(320, ge=64)
    """Tokens a context may hold before the model is asked for a summary."""
    max_completion: int = Field(64, ge=1)
    """Sampled tokens of one assistant message."""
    max_summary: int = Field(48, ge=1)
    """Sampled tokens of one summary."""
    max_summaries: int = Field(2, ge=0)
    temperature: float = Field(1.0, ge=0.0)

    @model_validator(mode="after")
    def _fits(self) -> HarnessConfig:
        if self.max_completion + self.max_summary >= self.context_budget:
            raise ValueError("context_budget must hold a completion and a summary (max_completion + max_summary)")
        return self


class VerdictLike(Protocol):
    """What a verifier says."""

    @property
    def passed(self) -> bool: ...
    @property
    def output(self) -> str: ...


Verify = Callable[[Task, Pod, str, bool], Awaitable[VerdictLike]]
"""(task, final pod, final message, whether files were edited) -> verdict. Raises VerifierFault, EnvironmentFault."""
Score = Callable[[Rollout], RewardBreakdown]
"""Reward terms of a finished rollout whose ``passed`` is set."""


@dataclass
class _State:
    """Everything that changes while a rollout runs."""

    recorder: SegmentRecorder
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    thinking_tokens: int = 0
    call_tokens: int = 0
    output_tokens: int = 0
    message_tokens: int = 0
    calls: int = 0
    num_turns: int = 0
    summaries: int = 0
    sampled: int = 0
    final_message: str = ""
    seconds: dict[str, float] = field(default_factory=lambda: {"inference": 0.0, "tools": 0.0, "verify": 0.0})

    @property
    def effort(self) -> Effort:
        return Effort(
            thinking_tokens=self.thinking_tokens,
            call_tokens=self.call_tokens,
            output_tokens=self.output_tokens,
            message_tokens=self.message_tokens,
            calls=self.calls,
            turns=self.num_turns,
        )


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

    async def run(self, task: Task, *, rollout_id: str, seed: int) -> Rollout:
        """One attempt at ``task``. Never raises for a fault of a service: that is the outcome of the rollout."""
        started = time.monotonic()
        state = _State(SegmentRecorder())
        bench: Workbench | None = None
        passed: bool | None = None
        output = detail = ""
        try:
            bench = Workbench(task, await self.pods.create(task.files, self.pod_limits))
            async with asyncio.timeout(task.limits.wall_seconds):
                outcome, detail = await self._converse(task, bench, state, rollout_id, seed)
            clock = time.monotonic()
            verdict = await self.verify(task, bench.pod, state.final_message, bool(bench.edited))
            state.seconds["verify"] = time.monotonic() - clock
            passed, output = verdict.passed and outcome is Outcome.COMPLETED, verdict.output
        except TimeoutError:
            outcome, detail, passed = Outcome.MODEL_FAULT, f"exceeded {task.limits.wall_seconds:.0f}s", False
        except InferenceFault as error:
            outcome, detail = Outcome.INFERENCE_FAULT, str(error)
        except EnvironmentFault as error:
            outcome, detail = Outcome.ENVIRONMENT_FAULT, str(error)
        except VerifierFault as error:
            outcome, detail = Outcome.VERIFIER_FAULT, str(error)
        finally:
            if bench is not None:
                await asyncio.shield(bench.pod.destroy())
            await self.sampler.close_session(_session(rollout_id, state))
        if state.recorder.tokens:
            state.segments.append(state.recorder.segment("stop" if outcome is Outcome.COMPLETED else "budget"))
        state.seconds["total"] = time.monotonic() - started
        rollout = Rollout(
            id=rollout_id,
            task_id=task.id,
            category=task.category,
            segments=tuple(state.segments),
            turns=tuple(state.turns),
            effort=state.effort,
            outcome=outcome,
            detail=detail,
            passed=passed,
            verifier_output=output[-400:],
            events=tuple(bench.events) if bench else (),
            seconds=state.seconds,
        )
        return rollout.model_copy(update={"reward": self.score(rollout)}) if outcome.trainable else rollout

    async def _converse(
        self, task: Task, bench: Workbench, state: _State, rollout_id: str, seed: int
    ) -> tuple[Outcome, str]:
        """Turns until the agent finishes or a limit is hit."""
        config, limits = self.config, task.limits
        state.recorder.show(self.codec.render(opening(task)))
        while True:
            if state.num_turns >= limits.max_turns:
                return Outcome.MODEL_FAULT, f"used {limits.max_turns} turns"
            if state.sampled >= limits.max_sampled_tokens:
                return Outcome.MODEL_FAULT, f"sampled {state.sampled} tokens"
            if len(state.recorder.tokens) + 1 + config.max_completion > config.context_budget:
                if state.summaries >= config.max_summaries or len(state.recorder.tokens) > 2 * config.context_budget:
                    return Outcome.MODEL_FAULT, f"context full after {state.summaries} summaries"
                await self._summarise(task, bench, state, rollout_id, seed)
                continue
            message, sampled = await self._sample(state, rollout_id, seed, config.max_completion)
            counts = self.codec.counts(sampled)
            state.thinking_tokens += counts.thinking
            state.num_turns += 1
            finish = next((call for call in message.calls if call.name == "finish" and call.error is None), None)
            others = [call for call in message.calls if call is not finish]
            state.calls += len(message.calls)
            if finish is not None or not message.calls:
                state.final_message = finish.arguments.get("message", "") if finish else message.content
                state.message_tokens += counts.call + counts.message
            else:
                state.call_tokens += counts.call + counts.message
            clock = time.monotonic()
            results = [Message(role="tool", content=await call_tool(bench, call)) for call in others]
            state.seconds["tools"] += time.monotonic() - clock
            state.turns.append(Turn(message=message, results=tuple(results), segment=len(state.segments)))
            if finish is not None or not message.calls:
                return Outcome.COMPLETED, ""
            shown = self.codec.render(results)
            state.output_tokens += len(shown)
            state.recorder.show(shown)

    async def _summarise(self, task: Task, bench: Workbench, state: _State, rollout_id: str, seed: int) -> None:
        """Ask for a summary in the live context, close the segment and open the next one."""
        state.recorder.show(self.codec.render([Message(role="user", content=SUMMARY_REQUEST)]))
        message, _ = await self._sample(state, rollout_id, seed, self.config.max_summary)
        state.turns.append(Turn(message=message, segment=len(state.segments), is_summary=True))
        await self.sampler.close_session(_session(rollout_id, state))
        state.segments.append(state.recorder.segment("summary"))
        state.summaries += 1
        summary = message.content or " ".join(v for call in message.calls for v in call.arguments.values())
        state.recorder = SegmentRecorder()
        messages = reopening(task, summary, summaries=state.summaries, edited=sorted(bench.edited))
        state.recorder.show(self.codec.render(messages))

    async def _sample(self, state: _State, rollout_id: str, seed: int, limit: int) -> tuple[Message, list[int]]:
        """One completion appended to the context as sampled; returns it parsed, with its ids."""
        state.recorder.show([self.codec.assistant_id])
        params = SamplingParams(
            max_new_tokens=limit,
            temperature=self.config.temperature,
            stop_token_ids=self.codec.stop_token_ids,
            seed=seed * 1_000_003 + state.sampled,
        )
        clock = time.monotonic()
        completion = await self.sampler.generate(
            state.recorder.tokens,
            params,
            session=_session(rollout_id, state),
            experts_start=state.recorder.num_experts_known,
        )
        state.seconds["inference"] += time.monotonic() - clock
        state.recorder.sample(completion)
        if not completion.tokens or completion.tokens[-1] not in self.codec.stop_token_ids:
            state.recorder.show([self.codec.end_id])  # cut at the limit: close the message, untrained
        state.sampled += len(completion.tokens)
        return self.codec.parse(completion.tokens), list(completion.tokens)


def _session(rollout_id: str, state: _State) -> str:
    return f"{rollout_id}/{len(state.segments)}"

