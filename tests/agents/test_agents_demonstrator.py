"""Promises of the scripted agents: they speak through the loop, slip as told, mend what they see, and sum up truly."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from agent_fakes import FakePod, FakePods, outcome_only, run_for_real, says, task_of

from etude.agents.chain import CUT_NOTE
from etude.agents.demonstrator import Demonstrator, DemonstratorConfig
from etude.agents.loop import HarnessConfig, RolloutRunner
from etude.agents.scripted import NoopAgent, OracleAgent, Policy, ScriptedSampler, parse_conversation
from etude.agents.spoil import spoil
from etude.base.edits import apply_edit, split_change
from etude.base.records import Category, ExecResult, Message, Outcome, Rollout, Task, TestsVerifier, ToolCall
from etude.data.chat import ChatCodec
from etude.rewards.verifiers import verify
from etude.tasks.synth import generate

WIDE = HarnessConfig(context_budget=6000, max_completion=400, max_summary=200)
CAREFUL = {"careless_rate": 0.0, "give_up_rate": 0.0, "again_rate": 0.0}
TEST = "from lib import total\nassert total(1, 2) == 3, 'FAIL total'\nprint('1 passed')\n"


@cache
def executed(files: tuple[tuple[str, str], ...], command: str) -> ExecResult:
    """Real runs, each workspace once."""
    return run_for_real(FakePod(FakePods(), dict(files)), command)


def execute(pod: FakePod, command: str) -> ExecResult:
    return executed(tuple(sorted(pod.files.items())), command)


@cache
def generated(count: int, seed: int) -> tuple[Task, ...]:
    return tuple(generate("train", count, seed))


def roll(codec: ChatCodec, task: Task, policy: Policy, config: HarnessConfig = WIDE) -> Rollout:
    sampler = ScriptedSampler(policy, codec)
    runner = RolloutRunner(sampler, FakePods(execute), codec, config, verify=verify, score=outcome_only)
    return asyncio.run(runner.run(task, rollout_id=task.id, seed=0))


def demonstrate(codec: ChatCodec, tasks: Sequence[Task], config: HarnessConfig = WIDE, **rates: float) -> list[Rollout]:
    settings = DemonstratorConfig(**rates)
    made = [Demonstrator(task, random.Random(f"{i}"), settings) for i, task in enumerate(tasks)]
    return [roll(codec, task, policy, config) for task, policy in zip(tasks, made, strict=True)]


def hand_made() -> Task:
    solution = (
        says(("read", {"path": "lib.py"})),
        says(("edit", {"path": "lib.py", "change": "    return a - b\n====\n    return a + b"})),
        says(("run", {})),
        says(("finish", {"message": "fixed total"})),
    )
    files = {"lib.py": "def total(a, b):\n    return a - b\n", "test_lib.py": TEST}
    verifier = TestsVerifier(command="python3 -B test_lib.py", files={"test_lib.py": TEST})
    return task_of(files, verifier=verifier, test_command="python3 -B test_lib.py", solution=solution)


def share_passed(rollouts: Sequence[Rollout]) -> float:
    return sum(bool(rollout.passed) for rollout in rollouts) / len(rollouts)


@pytest.mark.parametrize("policy", [OracleAgent, lambda task: NoopAgent()], ids=["oracle", "noop"])
def test_the_reference_solves_every_task_and_doing_nothing_none(
    codec: ChatCodec, policy: Callable[[Task], Policy]
) -> None:
    tasks = [hand_made(), *generated(24, 1)]
    rollouts = [roll(codec, task, policy(task)) for task in tasks]
    assert {rollout.outcome for rollout in rollouts} == {Outcome.COMPLETED}
    assert [rollout.passed for rollout in rollouts] == [policy is OracleAgent] * len(tasks)


def test_a_demonstration_is_made_of_real_results_and_parses_back_from_its_tokens(codec: ChatCodec) -> None:
    task = hand_made()
    rollout = roll(codec, task, OracleAgent(task))
    (segment,) = rollout.segments
    assert parse_conversation(codec, segment.tokens.tolist())[2:] == [
        message for turn in rollout.turns[:-1] for message in (turn.message, *turn.results)
    ] + [rollout.turns[-1].message]
    assert rollout.turns[2].results[0].content == "1 passed"
    assert (segment.logprobs == 0).all()
    assert (segment.versions[segment.sampled] == 0).all()
    assert segment.experts is None


def test_a_careful_demonstrator_mends_nearly_all_its_slips(codec: ChatCodec) -> None:
    rollouts = demonstrate(codec, generated(40, 2), mistake_rate=1.0, **CAREFUL)
    assert share_passed(rollouts) >= 0.9
    assert sum("tests_failed" in rollout.events for rollout in rollouts) > len(rollouts) / 3


def test_carelessness_and_giving_up_cost_tasks(codec: ChatCodec) -> None:
    tasks = [task for task in generated(40, 2) if task.category is not Category.UNDERSTAND]
    careless = demonstrate(codec, tasks, mistake_rate=1.0, careless_rate=1.0)
    giving_up = demonstrate(codec, tasks, mistake_rate=1.0, careless_rate=0.0, give_up_rate=1.0)
    assert share_passed(careless) < 0.5
    assert share_passed(giving_up) < 0.5
    after_edit = [e for r in careless for t in r.turns for c in t.message.calls if (e := c.name) in ("edit", "run")]
    assert after_edit.count("run") < len(tasks) / 2  # some look at the failing tests first; none after an edit
    assert share_passed(demonstrate(codec, tasks, mistake_rate=0.0, careless_rate=1.0)) == 1.0


def test_the_same_seed_gives_the_same_demonstration(codec: ChatCodec) -> None:
    tasks = generated(40, 2)
    first, second = (demonstrate(codec, tasks, mistake_rate=0.5) for _ in range(2))
    assert [r.turns for r in first] == [r.turns for r in second]


def test_demonstrations_vary_in_how_they_begin_and_whether_calls_are_parallel(codec: ChatCodec) -> None:
    rollouts = demonstrate(codec, generated(40, 2), look_first_rate=0.7, parallel_rate=0.7, mistake_rate=0.0)
    assert share_passed(rollouts) == 1.0
    assert {"run", "list", "search", "read", "edit"} <= {r.turns[0].message.calls[0].name for r in rollouts}
    assert any(len(turn.message.calls) > 1 for r in rollouts for turn in r.turns)


def test_a_file_that_the_request_does_not_name_is_looked_for_first(codec: ChatCodec) -> None:
    task = hand_made().model_copy(update={"instruction": "total is wrong, fix it"})
    for seed in range(8):
        policy = Demonstrator(task, random.Random(seed), DemonstratorConfig(look_first_rate=0.0, mistake_rate=0.0))
        assert roll(codec, task, policy).turns[0].message.calls[0].name in ("list", "search")


def test_work_goes_on_correctly_after_a_summary(codec: ChatCodec) -> None:
    """Contexts that always fill up: chains are long, still nearly all tasks get done, and nobody edits what it cannot know."""
    tasks = generated(40, 2)
    lengths = [len(s.tokens) for r in demonstrate(codec, tasks, mistake_rate=1.0, **CAREFUL) for s in r.segments]
    config = HarnessConfig(
        context_budget=sorted(lengths)[len(lengths) // 2] + 100, max_completion=100, max_summary=80, max_summaries=6
    )
    rollouts = demonstrate(codec, tasks, config, mistake_rate=1.0, **CAREFUL)
    chains = [rollout for rollout in rollouts if len(rollout.segments) > 1]
    assert len(chains) > len(tasks) / 4
    assert share_passed(chains) >= 0.85
    for rollout in chains:
        for number in range(1, len(rollout.segments)):
            turns = [turn for turn in rollout.turns if turn.segment == number and not turn.is_summary]
            calls = [call for turn in turns for call in turn.message.calls]
            summary = next(t.message.content for t in rollout.turns if t.is_summary and t.segment == number - 1)
            if calls and calls[0].name == "edit":
                arguments = calls[0].arguments
                assert arguments["change"].startswith("====") or f"seen {arguments['path']}\n" in summary


def test_a_summary_tells_the_truth(codec: ChatCodec) -> None:
    tasks = generated(40, 2)
    config = HarnessConfig(context_budget=270, max_completion=100, max_summary=80, max_summaries=6)
    told = 0
    for task, rollout in zip(tasks, demonstrate(codec, tasks, config, mistake_rate=0.5, **CAREFUL), strict=True):
        files = dict(task.files)
        for turn in rollout.turns:
            if turn.is_summary and (seen := re.match(r"seen (\S+)\n(.*)", turn.message.content)):
                told += 1
                path, line = seen.groups()
                assert line in files[path].split("\n")
            for call, result in zip(turn.message.calls, turn.results, strict=False):
                if call.name == "reset":
                    files = dict(task.files)
                if call.name == "edit" and result.content.startswith(("ok", CUT_NOTE)):
                    arguments = call.arguments
                    files[arguments["path"]] = apply_edit(files.get(arguments["path"]), arguments["change"])
    assert told >= 6


def test_a_slip_keeps_the_form_of_the_edit_and_changes_something() -> None:
    rng = random.Random(0)
    edits = [
        ToolCall(name="edit", arguments={"path": "a.py", "change": change})
        for change in (
            "    return min(a, b)\n====\n    return min(a, b) + 1",
            'def f(a, b):\n====\ndef f(a, b):\n    """the sum of all items"""',
            "====\n    x = 1\n    return x",
        )
    ]
    for edit in edits:
        old, new = split_change(edit.arguments["change"])
        slips = [slip for _ in range(50) if (slip := spoil(edit, rng)) is not None]
        assert len(slips) >= 25
        for slip in slips:
            assert slip != edit
            quoted, put = split_change(slip.arguments["change"])
            assert (len(quoted), len(put)) == (len(old), len(new))
            assert sum(a != b for a, b in zip([*quoted, *put], [*old, *new], strict=True)) == 1
        assert len({slip.model_dump_json() for slip in slips}) >= 2


def test_a_failed_try_is_taken_back_and_made_again_as_often_as_it_slips(codec: ChatCodec) -> None:
    rates = {**CAREFUL, "mistake_rate": 1.0, "again_rate": 0.5, "parallel_rate": 0.0, "look_first_rate": 0.0}
    shapes = {
        " ".join(call.name for turn in rollout.turns for call in turn.message.calls)
        for rollout in demonstrate(codec, [hand_made()] * 30, **rates)
        if rollout.passed
    }
    once, again = "read edit run", " reset edit run"
    assert {f"{once}{again} finish", f"{once}{again}{again} finish"} <= shapes


def test_a_scripted_message_longer_than_its_limit_is_cut_like_any_other(codec: ChatCodec) -> None:
    class Talker:
        def act(self, conversation: Sequence[Message]) -> Message:
            return Message(role="assistant", content="total " * 50)

    config = HarnessConfig(context_budget=600, max_completion=10)
    rollout = roll(codec, hand_made(), Talker(), config)
    assert (rollout.outcome, rollout.sampled_tokens) == (Outcome.MODEL_FAULT, 10)
