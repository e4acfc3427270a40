"""Promises: verifiers judge a fork with pristine files, and their own failure is never the model's zero."""

from __future__ import annotations

import asyncio

import pytest

from etude.base.errors import VerifierFault
from etude.base.records import AnswerVerifier, Category, MutantsVerifier, Task, TestsVerifier, Verifier
from etude.rewards.mutants import batches
from etude.rewards.verifiers import Verdict, verify
from local_pods import LocalPods

RUNNER = ".hidden/check.py"
GOOD, BAD = "def f(a):\n    return a + 1\n", "def f(a):\n    return a\n"
CHECK = "python3 -c 'from check import test; test()'"


def judge(
    verifier: Verifier,
    files: dict[str, str],
    message: str = "",
    edited: bool = True,
    given: dict[str, str] | None = None,
) -> tuple[Verdict, dict[str, str], int]:
    """(verdict, the agent's files afterwards, pods left besides the agent's)."""
    task = Task(id="t", category=Category.DEBUGGING, instruction="", files=given or {}, verifier=verifier)

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


def test_an_exit_code_of_the_code_under_test_is_not_a_fault() -> None:
    for code in (126, 127):
        verdict, _, _ = judge(TestsVerifier(command=f"python3 -c 'raise SystemExit({code})'", files={}), {})
        assert not verdict.passed
        verifier = MutantsVerifier(command=f"sh -c 'exit {code}'", path="lib.py", original=GOOD, mutants=(BAD,))
        assert not judge(verifier, {})[0].passed


def test_mutants_of_a_command_that_cannot_run_are_a_fault() -> None:
    verifier = MutantsVerifier(command="no-such-program", path="lib.py", original=GOOD, mutants=(BAD,))
    with pytest.raises(VerifierFault, match="cannot run"):
        judge(verifier, {})


def test_a_file_where_a_folder_belongs_and_the_reverse_do_not_save_the_agent() -> None:
    test = "from lib import f\ndef test(): assert f(1) == 2\ntest()\n"
    verifier = TestsVerifier(
        command="python3 deep/check.py", files={"deep/check.py": "import sys; sys.path += ['.']\n" + test}
    )
    for left in ({"deep": "in the way"}, {"deep/check.py/inner": "in the way"}):
        assert judge(verifier, {"lib.py": GOOD, **left})[0].passed
        assert not judge(verifier, {"lib.py": BAD, **left})[0].passed


def test_a_verifier_path_outside_the_workspace_is_a_fault() -> None:
    with pytest.raises(VerifierFault, match="outside"):
        judge(TestsVerifier(command="true", files={"../x": ""}), {})


def test_hidden_files_of_the_task_are_pristine() -> None:
    honest = {RUNNER: "import sys; sys.path.insert(0, '.')\nfrom lib import f\nassert f(1) == 2\n"}
    forged = {"lib.py": BAD, RUNNER: "pass\n"}
    assert not judge(TestsVerifier(command=f"python3 {RUNNER}"), forged, given=honest)[0].passed
    mutants = MutantsVerifier(command=f"python3 {RUNNER}", path="lib.py", original=GOOD, mutants=(BAD,))
    assert judge(mutants, forged, given=honest)[0].passed


@pytest.mark.parametrize(
    "trick",
    [
        "import os\ndef test():\n    assert not os.path.exists('seen')\n    open('seen', 'w').close()\n",
        f"def test(): assert open('lib.py').read() == {GOOD!r}\n",
        "import os\ndef test(): os.kill(os.getppid(), 9)\n",
    ],
)
def test_tests_that_count_runs_or_compare_text_catch_nothing(trick: str) -> None:
    verifier = MutantsVerifier(command=CHECK, path="lib.py", original=GOOD, mutants=(BAD, "def f(a):\n    return 9\n"))
    assert not judge(verifier, {"check.py": trick})[0].passed


def test_cached_bytecode_hides_no_mutant() -> None:
    """Python keys its cache by second and size of the source, and these mutants differ from the original in neither."""
    mutants = tuple(GOOD.replace("+", sign) for sign in "-*%")
    verifier = MutantsVerifier(command=CHECK, path="lib.py", original=GOOD, mutants=mutants)
    check = {"check.py": "from lib import f\ndef test(): assert f(5) == 6\n"}
    assert judge(verifier, check)[0] == Verdict(True, "caught 3 mutants")


def test_many_large_mutants_are_judged_in_several_commands() -> None:
    filler = "# it's long\n" * 2000
    mutants = tuple(f"def f(a):\n    return {number}\n{filler}" for number in (3, 4, 5, 2))
    verifier = MutantsVerifier(command=CHECK, path="lib.py", original=GOOD + filler, mutants=mutants)
    commands = [command for command, _ in batches(verifier)]
    assert len(commands) > 1
    assert all(len(command.encode()) < 128 * 1024 for command in commands)
    check = {"check.py": "from lib import f\ndef test(): assert f(1) == 2\n"}
    assert "mutant 4 of 4 survives" in judge(verifier, check)[0].output


def test_tests_that_hang_do_not_pass() -> None:
    hanging = {"check.py": "import time\nfrom lib import f\ndef test():\n    while f(1) != 2: time.sleep(0.1)\n"}
    verifier = MutantsVerifier(command=CHECK, path="lib.py", original=GOOD, mutants=(BAD,))
    assert judge(verifier, hanging)[0].passed, "a mutant that hangs the tests is caught"
