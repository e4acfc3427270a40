"""Promises: verifiers judge a fork with pristine files, and their own failure is never the model's zero."""

from __future__ import annotations

import asyncio

import pytest

from etude.base.errors import VerifierFault
from etude.base.records import AnswerVerifier, Category, MutantsVerifier, Task, TestsVerifier, Verifier
from etude.rewards.verifiers import Verdict, verify
from local_pods import LocalPods

GOOD, BAD = "def f(a):\n    return a + 1\n", "def f(a):\n    return a\n"
CHECK = "python3 -c 'from check import test; test()'"


def judge(
    verifier: Verifier, files: dict[str, str], message: str = "", edited: bool = True
) -> tuple[Verdict, dict[str, str], int]:
    """(verdict, the agent's files afterwards, pods left besides the agent's)."""
    task = Task(id="t", category=Category.DEBUGGING, instruction="", files={}, verifier=verifier)

    async def main() -> tuple[Verdict, dict[str, str], int]:
        pods = LocalPods()
        pod = await pods.create(files)
        verdict = await verify(task, pod, message, edited)
        after = {path: str(await pod.read(path)) for path in await pod.list()}
        await pod.destroy()
        return verdict, after, pods.alive

    return asyncio.run(main())


def test_tests_run_in_a_fork_over_pristine_files() -> None:
    verifier = TestsVerifier(command=CHECK, files={"check.py": "from lib import f\ndef test(): assert f(1) == 2\n"})
    tampered = {"lib.py": BAD, "check.py": "def test(): pass\n"}
    verdict, after, left = judge(verifier, tampered)
    assert not verdict.passed
    assert after == tampered, "the agent's own pod stays as it is"
    assert left == 0
    assert judge(verifier, {"lib.py": GOOD})[0].passed


def test_mutants_must_all_be_caught_and_the_original_restored() -> None:
    verifier = MutantsVerifier(command=CHECK, path="lib.py", original=GOOD, mutants=(BAD, "def f(a):\n    return 9\n"))
    sharp = {"lib.py": BAD, "check.py": "from lib import f\ndef test(): assert f(1) == 2\n"}
    blunt = {"lib.py": GOOD, "check.py": "from lib import f\ndef test(): assert f(1) < 9\n"}
    wrong = {"lib.py": GOOD, "check.py": "from lib import f\ndef test(): assert f(1) == 3\n"}
    assert judge(verifier, sharp)[0].passed
    assert "mutant 1 of 2 survives" in judge(verifier, blunt)[0].output
    assert "on the original" in judge(verifier, wrong)[0].output


def test_answers_are_compared_stripped_and_folded() -> None:
    verifier = AnswerVerifier(accepted=("lib.py", "Lib"))
    assert judge(verifier, {}, " LIB \n", edited=False)[0].passed
    assert not judge(verifier, {}, "lib.pyx", edited=False)[0].passed
    assert "must not change files" in judge(verifier, {}, "lib", edited=True)[0].output


def test_a_command_that_cannot_run_is_a_fault() -> None:
    with pytest.raises(VerifierFault, match="cannot run"):
        judge(TestsVerifier(command="no-such-program", files={}), {})
