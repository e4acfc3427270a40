"""Promises of the loop: trained tokens are the sampled ones; faults are not zeros; every way to end gives the pod back."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from agent_fakes import (
    LINK_OUT,
    FakePod,
    FakePods,
    FakeVerdict,
    TokenSampler,
    always_passes,
    messages_sampler,
    outcome_only,
    says,
    task_of,
)

from etude.agents.loop import HarnessConfig, RolloutRunner
from etude.base.errors import EnvironmentFault, InferenceFault, VerifierFault
from etude.base.protocols import Sampler
from etude.base.records import Completion, ExecResult, Limits, Message, Outcome, Rollout, SamplingParams, Task, ToolCall
from etude.data.chat import ChatCodec
from etude.data.tokenizer import CALL, token_id

WIDE = HarnessConfig(context_budget=4000, max_completion=300)
READ = says(("read", {"path": "lib.py"}))
FIX = says(("edit", {"path": "lib.py", "change": "    return a - b\n====\n    return a + b"}))
RUN = says(("run", {}))
FINISH = says(("finish", {"message": "fixed total"}))


def rollout_of(
    codec: ChatCodec,
    sampler: Sampler,
    *,
    pods: FakePods | None = None,
    task: Task | None = None,
    config: HarnessConfig = WIDE,
    verify: Any = always_passes,
) -> Rollout:
    runner = RolloutRunner(sampler, pods or FakePods(), codec, config, verify=verify, score=outcome_only)
    return asyncio.run(runner.run(task or task_of(), rollout_id="r", seed=3))


def test_a_whole_rollout_is_recorded(codec: ChatCodec) -> None:
    pods = FakePods()
    seen: list[tuple[str, str, bool]] = []

    async def verify(task: Task, pod: FakePod, message: str, edited: bool) -> FakeVerdict:
        seen.append((pod.files["lib.py"], message, edited))
        return FakeVerdict(True, "3 passed")

    rollout = rollout_of(codec, messages_sampler(codec, [READ, FIX, RUN, FINISH]), pods=pods, verify=verify)
    assert seen == [("def total(a, b):\n    return a + b\n", "fixed total", True)]
    assert rollout.outcome is Outcome.COMPLETED
    assert rollout.passed is True
    assert rollout.reward is not None
    assert rollout.reward.total == 1.0
    assert rollout.verifier_output == "3 passed"
    assert rollout.events == ("tests_passed",)
    assert [turn.message.calls[0].name for turn in rollout.turns] == ["read", "edit", "run", "finish"]
    assert rollout.turns[1].results[0].content == "ok"
    assert (rollout.effort.calls, rollout.effort.turns) == (4, 4)
    assert set(rollout.seconds) == {"inference", "tools", "verify", "total"}
    assert pods.pods[0].destroyed
    assert [segment.end for segment in rollout.segments] == ["stop"]


def test_trained_tokens_are_exactly_the_sampled_ones_even_where_text_would_encode_otherwise(codec: ChatCodec) -> None:
    """Every call is spelled byte by byte; encoding the text again would give other ids."""
    spelled = []
    for message in (READ, RUN, FINISH):
        text = codec.decode(codec.render_completion(message)[1:-1])
        ids = [i for character in text for i in codec.encode(character)]
        spelled.append([token_id(codec.tokenizer, CALL), *ids, codec.end_id])
        assert ids != codec.encode(text)
    sampler = TokenSampler(spelled)
    rollout = rollout_of(codec, sampler)
    assert rollout.outcome is Outcome.COMPLETED
    (segment,) = rollout.segments
    assert segment.tokens[segment.sampled].tolist() == [i for ids in spelled for i in ids]
    for before, after in zip(sampler.requests, sampler.requests[1:], strict=False):
        assert after.tokens[: len(before.tokens)] == before.tokens  # a context only grows
    assert segment.tokens.tolist()[: len(sampler.requests[-1].tokens)] == sampler.requests[-1].tokens


def test_logprobs_versions_and_experts_stand_at_their_tokens(codec: ChatCodec) -> None:
    sampler = messages_sampler(codec, [READ, RUN, FINISH])
    (segment,) = rollout_of(codec, sampler).segments
    versions, logprobs = segment.versions, segment.logprobs
    assert (versions[~segment.sampled] == -1).all()
    assert (logprobs[~segment.sampled] == 0).all()
    starts = [len(request.tokens) for request in sampler.requests]
    for number, (start, message) in enumerate(zip(starts, (READ, RUN, FINISH), strict=True), 1):
        ids = codec.render_completion(message)
        span = slice(start, start + len(ids))
        assert segment.tokens[span].tolist() == ids
        assert (versions[span] == number).all()
        assert logprobs[span] == pytest.approx([-number - i / 100 for i in range(len(ids))])
    assert segment.experts is not None
    assert segment.experts.shape == (len(segment.tokens), 1, 2)
    assert segment.experts[:-1, 0, 0].tolist() == list(range(len(segment.tokens) - 1))
    assert (segment.experts[-1] == -1).all()  # never fed
    by_request = segment.experts[:-1, 0, 1]
    # position p keeps the routing of the first request that fed it
    ends = [start + len(codec.render_completion(m)) - 1 for start, m in zip(starts, (READ, RUN, FINISH), strict=True)]
    expected = np.concatenate(
        [np.full(end - begin, n) for n, (begin, end) in enumerate(zip([0, *ends], ends, strict=False), 1)]
    )
    assert by_request.tolist() == expected.tolist()
    assert [request.experts_start for request in sampler.requests] == [0, *ends[:-1]]


def test_no_experts_where_the_sampler_gives_none(codec: ChatCodec) -> None:
    (segment,) = rollout_of(codec, messages_sampler(codec, [READ, FINISH], experts=False)).segments
    assert segment.experts is None


def test_parallel_calls_run_in_order_and_each_gets_its_answer(codec: ChatCodec) -> None:
    both = says(*((call.name, call.arguments) for message in (READ, FIX, READ) for call in message.calls))
    sampler = messages_sampler(codec, [both, FINISH])
    rollout = rollout_of(codec, sampler)
    contents = [result.content for result in rollout.turns[0].results]
    assert contents[0].endswith("\n    return a - b")
    assert contents[1] == "ok"
    assert contents[2].endswith("\n    return a + b")
    shown = codec.decode(sampler.requests[1].tokens)
    assert shown.count("<|tool|>") == 3
    assert (rollout.effort.calls, rollout.effort.turns) == (4, 2)


def test_calls_after_finish_are_not_executed(codec: ChatCodec) -> None:
    pods = FakePods()
    message = says(("finish", {"message": "done"}), ("edit", {"path": "lib.py", "change": "====\nx"}))
    rollout = rollout_of(codec, messages_sampler(codec, [message]), pods=pods)
    assert rollout.outcome is Outcome.COMPLETED
    assert "x" not in pods.pods[0].files["lib.py"].split("\n")


def test_a_message_without_calls_is_the_final_message(codec: ChatCodec) -> None:
    heard: list[str] = []

    async def verify(task: Task, pod: FakePod, message: str, edited: bool) -> FakeVerdict:
        heard.append(message)
        return FakeVerdict(False)

    said = Message(role="assistant", content="it is total")
    rollout = rollout_of(codec, messages_sampler(codec, [READ, said]), verify=verify)
    assert heard == ["it is total"]
    assert (rollout.outcome, rollout.passed) == (Outcome.COMPLETED, False)


def test_malformed_calls_are_answered_counted_and_trained_on(codec: ChatCodec) -> None:
    wrong = [says(("raed", {"path": "lib.py"})), says(("edit", {"path": "lib.py"}))]
    sampler = messages_sampler(codec, [*wrong, FINISH])
    rollout = rollout_of(codec, sampler)
    assert rollout.outcome is Outcome.COMPLETED
    assert rollout.events == ("malformed_call", "malformed_call")
    assert "error: no tool 'raed'" in codec.decode(sampler.requests[1].tokens)
    assert "error: edit needs change" in codec.decode(sampler.requests[2].tokens)
    sampled = sum(len(codec.render_completion(m)) for m in (*wrong, FINISH))
    assert rollout.sampled_tokens == sampled


def test_a_call_cut_at_the_token_limit_is_not_executed(codec: ChatCodec) -> None:
    pods = FakePods()
    long = says(("edit", {"path": "lib.py", "change": "    return a - b\n====\n    return a + b + a + b + a + b"}))
    size = len(codec.render_completion(long)) - 4
    config = HarnessConfig(context_budget=4000, max_completion=size)
    sampler = messages_sampler(codec, [long, FINISH])
    rollout = rollout_of(codec, sampler, pods=pods, config=config)
    assert pods.pods[0].files == task_of().files
    assert rollout.events == ("malformed_call",)
    assert rollout.turns[0].results[0].content == f"error: cut at {size} tokens, write less"
    (segment,) = rollout.segments
    at = len(sampler.requests[0].tokens) + size
    assert segment.tokens[at] == codec.end_id  # the harness closed the message ...
    assert not segment.sampled[at]  # ... which the model did not, so it is not trained


def test_endless_talk_is_a_fault_of_the_model(codec: ChatCodec) -> None:
    config = HarnessConfig(context_budget=4000, max_completion=5)
    talk = Message(role="assistant", content="total total total total total total total total")
    rollout = rollout_of(codec, messages_sampler(codec, [talk]), config=config)
    assert (rollout.outcome, rollout.passed) == (Outcome.MODEL_FAULT, False)
    assert rollout.detail == "message cut at 5 tokens"
    assert rollout.reward is not None
    assert rollout.reward.total == 0.0


def test_turns_and_tokens_are_limited(codec: ChatCodec) -> None:
    task = task_of(limits=Limits(max_turns=3))
    rollout = rollout_of(codec, messages_sampler(codec, [READ] * 9), task=task)
    assert (rollout.outcome, rollout.detail) == (Outcome.MODEL_FAULT, "used 3 turns")
    assert len(rollout.turns) == 3
    task = task_of(limits=Limits(max_sampled_tokens=10))
    rollout = rollout_of(codec, messages_sampler(codec, [READ] * 9), task=task)
    assert rollout.outcome is Outcome.MODEL_FAULT
    assert rollout.sampled_tokens == 10
    assert rollout.segments[-1].end == "budget"


def test_a_model_fault_is_a_real_zero_without_a_verdict(codec: ChatCodec) -> None:
    async def verify(*_: object) -> FakeVerdict:
        raise AssertionError("must not be asked")

    rollout = rollout_of(
        codec, messages_sampler(codec, [FIX] * 9), task=task_of(limits=Limits(max_turns=1)), verify=verify
    )
    assert rollout.outcome.trainable
    assert rollout.passed is False
    assert rollout.reward is not None
    assert rollout.reward.total == 0.0


@pytest.mark.parametrize("outcome", [Outcome.INFERENCE_FAULT, Outcome.ENVIRONMENT_FAULT, Outcome.VERIFIER_FAULT])
def test_a_fault_of_a_service_is_an_outcome_and_never_a_reward(codec: ChatCodec, outcome: Outcome) -> None:
    said: list[Message | Exception] = [READ, RUN, FINISH]
    pods, verify = FakePods(), always_passes
    if outcome is Outcome.INFERENCE_FAULT:
        said[1] = InferenceFault("engine gone")
    elif outcome is Outcome.ENVIRONMENT_FAULT:
        pods = FakePods(lambda pod, command: EnvironmentFault("pod gone"))
    else:

        async def verify(*_: object) -> FakeVerdict:
            raise VerifierFault("no verdict")

    sampler = messages_sampler(codec, said)
    rollout = rollout_of(codec, sampler, pods=pods, verify=verify)
    assert rollout.outcome is outcome
    assert not rollout.outcome.trainable
    assert (rollout.reward, rollout.passed) == (None, None)
    assert rollout.detail in ("engine gone", "pod gone", "no verdict")
    assert pods.pods[0].destroyed
    assert sampler.closed == ["r/0"]
    assert len(rollout.turns) >= 1  # what was done is still told


def test_no_pod_is_a_fault_of_the_environment(codec: ChatCodec) -> None:
    rollout = rollout_of(codec, messages_sampler(codec, []), pods=FakePods(broken=True))
    assert rollout.outcome is Outcome.ENVIRONMENT_FAULT
    assert rollout.segments == ()


def test_a_task_whose_files_lead_out_of_the_workspace_is_a_fault_of_the_environment(codec: ChatCodec) -> None:
    rollout = rollout_of(codec, messages_sampler(codec, []), task=task_of(files={"../lib.py": "x"}))
    assert (rollout.outcome, rollout.reward) == (Outcome.ENVIRONMENT_FAULT, None)


def test_a_file_that_a_command_made_a_link_out_counts_as_changed(codec: ChatCodec) -> None:
    def link(pod: FakePod, command: str) -> ExecResult:
        pod.files["lib.py"] = LINK_OUT
        return ExecResult(exit_code=0, output="", seconds=0.0)

    seen: list[object] = []

    async def verify(*arguments: object) -> FakeVerdict:
        seen.extend(arguments)
        return FakeVerdict(passed=False)

    said = [says(("run", {"command": "ln -sf / lib.py"})), FINISH]
    rollout = rollout_of(codec, messages_sampler(codec, said), pods=FakePods(link), verify=verify)
    assert rollout.outcome is Outcome.COMPLETED
    assert seen[-1] is True


def test_a_prompt_that_cannot_fit_is_no_fault_of_the_model(codec: ChatCodec) -> None:
    config = HarnessConfig(context_budget=64, max_completion=40, max_summary=8)
    rollout = rollout_of(codec, messages_sampler(codec, []), task=task_of(instruction="fix total " * 30), config=config)
    assert rollout.outcome is Outcome.ENVIRONMENT_FAULT
    assert "context_budget" in rollout.detail


def test_inconsistent_answers_of_the_engine_are_its_fault(codec: ChatCodec) -> None:
    class Torn:
        async def generate(
            self, tokens: object, params: SamplingParams, *, session: str, experts_start: int = 0
        ) -> Completion:
            return Completion(tokens=(1, 2), logprobs=(0.0,), versions=(0, 0), stop_reason="stop")

        async def close_session(self, session: str) -> None: ...

    assert rollout_of(codec, Torn()).outcome is Outcome.INFERENCE_FAULT


class Stuck:
    """A sampler that never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def generate(
        self, tokens: object, params: SamplingParams, *, session: str, experts_start: int = 0
    ) -> Completion:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def close_session(self, session: str) -> None: ...


def test_a_slow_engine_at_the_wall_limit_is_not_the_models_zero(codec: ChatCodec) -> None:
    pods = FakePods()
    rollout = rollout_of(codec, Stuck(), pods=pods, task=task_of(limits=Limits(wall_seconds=0.05)))
    assert rollout.outcome is Outcome.INFERENCE_FAULT
    assert rollout.reward is None
    assert pods.pods[0].destroyed


def test_slow_commands_at_the_wall_limit_are_the_models_doing(codec: ChatCodec) -> None:
    class SlowPod(FakePod):
        async def exec(self, command: str, *, timeout: float = 20.0) -> ExecResult:
            await asyncio.Event().wait()
            raise AssertionError

    class SlowPods(FakePods):
        async def create(self, files: Any, limits: Any = None) -> FakePod:
            self.pods.append(SlowPod(self, files))
            return self.pods[-1]

    pods = SlowPods()
    task = task_of(limits=Limits(wall_seconds=0.2))
    rollout = rollout_of(codec, messages_sampler(codec, [RUN]), pods=pods, task=task)
    assert (rollout.outcome, rollout.passed) == (Outcome.MODEL_FAULT, False)
    assert rollout.turns[0].message.calls[0].name == "run"
    assert pods.pods[0].destroyed


def test_cancelling_the_task_gives_the_pod_back_and_goes_through(codec: ChatCodec) -> None:
    async def main() -> FakePods:
        pods, sampler = FakePods(), Stuck()
        runner = RolloutRunner(sampler, pods, codec, WIDE, verify=always_passes, score=outcome_only)
        running = asyncio.create_task(runner.run(task_of(), rollout_id="r", seed=0))
        await asyncio.wait_for(sampler.asked.wait(), 5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return pods

    assert asyncio.run(main()).pods[0].destroyed


def test_a_rollout_cancelled_by_name_returns_as_cancelled(codec: ChatCodec) -> None:
    async def main() -> tuple[Rollout, FakePods, RolloutRunner]:
        pods, sampler = FakePods(), Stuck()
        runner = RolloutRunner(sampler, pods, codec, WIDE, verify=always_passes, score=outcome_only)
        running = asyncio.create_task(runner.run(task_of(), rollout_id="r", seed=0))
        await asyncio.wait_for(sampler.asked.wait(), 5)
        assert runner.cancel("r")
        return await running, pods, runner

    rollout, pods, runner = asyncio.run(main())
    assert rollout.outcome is Outcome.CANCELLED
    assert (rollout.reward, rollout.passed) == (None, None)
    assert pods.pods[0].destroyed
    assert not runner.cancel("r")


def test_every_sampled_token_is_counted_in_one_effort(codec: ChatCodec) -> None:
    thoughtful = READ.model_copy(update={"thinking": "the sum is off", "content": "let me see"})
    ending = says(("run", {}), ("finish", {"message": "fixed"}), thinking="it is right now")
    rollout = rollout_of(codec, messages_sampler(codec, [thoughtful, ending]))
    effort = rollout.effort
    assert effort.thinking_tokens + effort.call_tokens + effort.message_tokens == rollout.sampled_tokens
    finish = codec.render_completion(says(("finish", {"message": "fixed"})))
    assert effort.message_tokens == len(finish)
    both = len(codec.encode("the sum is off")) + len(codec.encode("it is right now")) + 4
    assert effort.thinking_tokens == both
    shown = rollout.turns[0].results
    assert effort.output_tokens == len(codec.render(shown))
    assert ToolCall(name="run") in ending.calls


def test_seeds_differ_between_completions_and_repeat_between_runs(codec: ChatCodec) -> None:
    first, second = (messages_sampler(codec, [READ, RUN, FINISH]) for _ in range(2))
    rollout_of(codec, first)
    rollout_of(codec, second)
    seeds = [request.params.seed for request in first.requests]
    assert len(set(seeds)) == 3
    assert seeds == [request.params.seed for request in second.requests]
