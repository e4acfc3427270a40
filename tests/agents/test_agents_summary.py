"""Promises of the self-summary chain: the window is never exceeded, all sampled tokens are trained, nothing else is."""

from __future__ import annotations

import asyncio
import random

import pytest
from agent_fakes import FakePods, TokenSampler, always_passes, messages_sampler, outcome_only, says, task_of

from etude.agents.chain import CUT_NOTE, Chain, cut_to_fit
from etude.agents.loop import HarnessConfig, RolloutRunner
from etude.agents.prompt import SUMMARY_REQUEST
from etude.agents.summary import summary_text, window
from etude.base.config import resolve
from etude.base.errors import ConfigError
from etude.base.records import Message, Outcome, Rollout, ToolCall
from etude.data.chat import ChatCodec

READ = says(("read", {"path": "lib.py"}))
SUMMARY = Message(role="assistant", content="seen lib.py:2 done read next edit")
FIX = says(("edit", {"path": "lib.py", "change": "    return a - b\n====\n    return a + b"}))
FINISH = says(("finish", {"message": "fixed total"}))


def run(codec: ChatCodec, sampler: TokenSampler, config: HarnessConfig, lines: int = 2) -> Rollout:
    body = "".join(f"    item{i} = {i}\n" for i in range(lines - 2))
    task = task_of({"lib.py": f"def total(a, b):\n    return a - b\n{body}"})
    runner = RolloutRunner(sampler, FakePods(), codec, config, verify=always_passes, score=outcome_only)
    return asyncio.run(runner.run(task, rollout_id="r", seed=0))


def narrow(codec: ChatCodec, extra: int, **changes: int) -> HarnessConfig:
    """A budget that the opening of the task and ``extra`` tokens fill so far that the next completion does not fit."""
    opening = len(
        codec.encode(
            "coding agent. tools: list, read path, search text, edit path old ==== new, reset, run, finish message"
        )
    )
    opening += len(codec.encode("fix total in lib.py")) + 4
    return HarnessConfig(**{"context_budget": opening + extra + 32, "max_completion": 32, "max_summary": 24, **changes})


def test_a_full_context_is_summed_up_and_the_chain_goes_on(codec: ChatCodec) -> None:
    sampler = messages_sampler(codec, [READ, SUMMARY, FIX, FINISH])
    rollout = run(codec, sampler, narrow(codec, 110), lines=20)
    assert rollout.outcome is Outcome.COMPLETED
    assert [segment.end for segment in rollout.segments] == ["summary", "stop"]
    assert [turn.is_summary for turn in rollout.turns] == [False, True, False, False]
    assert [turn.segment for turn in rollout.turns] == [0, 0, 1, 1]
    assert rollout.effort.turns == 3  # a summary is no turn
    live, fresh = sampler.requests[1], sampler.requests[2]
    assert live.tokens[: len(sampler.requests[0].tokens)] == sampler.requests[0].tokens  # asked in the live context ...
    assert live.session == sampler.requests[0].session == "r/0"  # ... of the same session, so the cache is reused
    assert codec.decode(live.tokens).endswith(f"<|user|>{SUMMARY_REQUEST}<|end|><|assistant|>")
    assert fresh.session == "r/1"
    assert fresh.experts_start == 0
    text = codec.decode(fresh.tokens)
    assert "summary 1, turn 1: seen lib.py:2 done read next edit" in text
    assert "item3" not in text  # the old context is gone
    assert sampler.closed == ["r/0", "r/1"]


def test_the_carried_state_names_edited_files_and_turns(codec: ChatCodec) -> None:
    sampler = messages_sampler(codec, [FIX, READ, SUMMARY, FINISH])
    rollout = run(codec, sampler, narrow(codec, 140), lines=20)
    assert [segment.end for segment in rollout.segments] == ["summary", "stop"]
    assert "summary 1, turn 2: seen" in codec.decode(sampler.requests[3].tokens)
    assert "\nedited: lib.py" in codec.decode(sampler.requests[3].tokens)


def test_every_sampled_token_of_every_segment_is_marked_and_nothing_else(codec: ChatCodec) -> None:
    said = [READ, SUMMARY, READ, SUMMARY, FINISH]
    sampler = messages_sampler(codec, said)
    rollout = run(codec, sampler, narrow(codec, 110, max_summaries=2), lines=20)
    assert [segment.end for segment in rollout.segments] == ["summary", "summary", "stop"]
    sampled = [int(t) for segment in rollout.segments for t in segment.tokens[segment.sampled]]
    assert sampled == [i for message in said for i in codec.render_completion(message)]
    assert rollout.sampled_tokens == len(sampled)
    assert all((segment.versions[~segment.sampled] == -1).all() for segment in rollout.segments)


def test_the_number_of_summaries_is_bounded(codec: ChatCodec) -> None:
    sampler = messages_sampler(codec, [READ, SUMMARY] * 9)
    rollout = run(codec, sampler, narrow(codec, 110, max_summaries=3), lines=20)
    assert (rollout.outcome, rollout.passed) == (Outcome.MODEL_FAULT, False)
    assert rollout.detail == "context full after 3 summaries"
    assert sum(turn.is_summary for turn in rollout.turns) == 3


def test_a_summary_written_as_a_call_is_taken_as_text(codec: ChatCodec) -> None:
    sampler = messages_sampler(codec, [READ, FIX, FINISH])
    rollout = run(codec, sampler, narrow(codec, 110), lines=20)
    assert rollout.outcome is Outcome.COMPLETED
    assert rollout.turns[1].is_summary
    assert rollout.effort.calls == 2  # read and finish; the summary's call was not executed
    assert "summary 1, turn 1: edit lib.py     return a - b\n====\n    return a + b" in codec.decode(
        sampler.requests[2].tokens
    )


def test_the_text_of_a_summary_leaves_its_reasoning_out() -> None:
    call = ToolCall(name="finish", arguments={"message": "x"})
    assert summary_text(Message(role="assistant", content=" a ", thinking="secret", calls=(call,))) == "a finish x"


def test_reasoning_in_a_summary_is_counted_as_reasoning(codec: ChatCodec) -> None:
    thoughtful = SUMMARY.model_copy(update={"content": "next edit", "thinking": "the sum"})
    rollout = run(codec, messages_sampler(codec, [READ, thoughtful, FINISH]), narrow(codec, 110), lines=20)
    assert rollout.effort.thinking_tokens == len(codec.encode("the sum")) + 2


@pytest.mark.parametrize("seed", range(12))
def test_no_context_ever_exceeds_its_window_whatever_is_said(codec: ChatCodec, seed: int) -> None:
    """Random ids, random calls, long files: the hard bound holds, and all that was sampled is there and marked."""
    rng = random.Random(seed)
    replies: list[list[int]] = []
    for _ in range(60):
        if rng.random() < 0.4:
            replies.append([rng.randrange(codec.tokenizer.get_vocab_size()) for _ in range(rng.randint(1, 60))])
        else:
            calls = tuple(READ.calls[0] for _ in range(rng.randint(1, 4)))
            replies.append(codec.render_completion(Message(role="assistant", calls=calls)))
    sampler = TokenSampler(replies)
    config = narrow(codec, rng.randint(40, 120), max_summaries=4)
    rollout = run(codec, sampler, config, lines=rng.randint(4, 60))
    limit = window(Chain(sampler, codec, config, rollout_id="r", seed=0))
    assert rollout.outcome.trainable
    for segment in rollout.segments:
        assert len(segment.tokens) <= limit
    for request in sampler.requests:
        is_summary = request.params.max_new_tokens == config.max_summary
        assert len(request.tokens) + config.max_completion <= config.context_budget or is_summary
    versions = [int(v) for segment in rollout.segments for v in segment.versions[segment.sampled]]
    assert versions == sorted(versions)
    assert set(versions) == set(range(1, len(sampler.requests) + 1))


def test_a_result_that_does_not_fit_is_cut_at_a_line_with_a_note(codec: ChatCodec) -> None:
    result = Message(role="tool", content="\n".join(f"{i}:    return a" for i in range(1, 40)))
    whole = len(codec.render_message(result))
    assert cut_to_fit(codec, result, whole) is result
    for room in range(whole):
        cut = cut_to_fit(codec, result, room)
        if cut is None:
            assert room < len(codec.render_message(Message(role="tool", content=CUT_NOTE)))
            continue
        *kept, note = cut.content.split("\n")
        assert note == CUT_NOTE
        assert kept == result.content.split("\n")[: len(kept)]
        assert len(codec.render_message(cut)) <= room


def test_a_budget_that_cannot_work_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match="context_budget"):
        resolve(HarnessConfig, {"context_budget": 100, "max_completion": 64, "max_summary": 48}, source="test")
