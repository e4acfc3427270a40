"""Outcome verifiers: run in a fork of the final workspace, with pristine files written over whatever the agent left.

A verifier's own failure raises VerifierFault; it is never the model's zero. The reverse holds as well: nothing that the model
leaves in its workspace may turn its zero into a fault, since a fault is sampled again and never trained on.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from etude.base.errors import PathEscape, VerifierFault
from etude.base.protocols import Pod
from etude.base.records import AnswerVerifier, ExecResult, MutantsVerifier, Task, TestsVerifier
from etude.rewards.mutants import CAUGHT, SURVIVED, batches

VERIFY_SECONDS = 10.0
_CANNOT_RUN = (126, 127)


@dataclass(frozen=True)
class Verdict:
    passed: bool
    output: str = ""
    """What the tests printed, or why the answer was wrong."""


async def verify(task: Task, pod: Pod, final_message: str, edited: bool) -> Verdict:
    """Judge the final state of ``pod``; the pod itself is left as it is. Raises VerifierFault, EnvironmentFault."""
    verifier = task.verifier
    if isinstance(verifier, AnswerVerifier):
        return _answer(verifier, final_message, edited)
    fork = await pod.fork()
    try:
        if isinstance(verifier, TestsVerifier):
            return await _tests(verifier, fork, _hidden(task))
        return await _mutants(verifier, fork, _hidden(task))
    finally:
        await fork.destroy()


def _answer(verifier: AnswerVerifier, message: str, edited: bool) -> Verdict:
    if verifier.unchanged and edited:
        return Verdict(False, "a question must not change files")
    given = message.strip().casefold()
    if given in {answer.strip().casefold() for answer in verifier.accepted}:
        return Verdict(True)
    return Verdict(False, f"answered {message.strip()!r}, expected {verifier.accepted[0]!r}")


async def _tests(verifier: TestsVerifier, fork: Pod, hidden: Mapping[str, str]) -> Verdict:
    if not await _place(fork, {**hidden, **verifier.files}):
        return Verdict(False, "the workspace cannot take the test files")
    result = await fork.exec(verifier.command, timeout=VERIFY_SECONDS)
    await _check_runnable(fork, verifier.command, result)
    return Verdict(result.exit_code == 0, result.output)


async def _mutants(verifier: MutantsVerifier, fork: Pod, hidden: Mapping[str, str]) -> Verdict:
    """The agent's tests must pass on the original and fail on each mutant."""
    count = len(verifier.mutants)
    if not await _place(fork, {**hidden, verifier.path: verifier.original}):
        return Verdict(False, f"the workspace cannot take {verifier.path}")
    for command, seconds in batches(verifier):
        result = await fork.exec(command, timeout=seconds)
        if result.exit_code == SURVIVED:
            return Verdict(False, f"mutant {result.output.strip()} of {count} survives")
        if result.exit_code != CAUGHT:
            await _check_runnable(fork, verifier.command, result)
            return Verdict(False, f"on the original code: {result.output}")
    return Verdict(True, f"caught {count} mutants")


def _hidden(task: Task) -> dict[str, str]:
    """The task's own files that the agent's tools do not list, such as a test runner."""
    return {path: text for path, text in task.files.items() if any(p.startswith(".") for p in path.split("/"))}


async def _place(fork: Pod, files: Mapping[str, str]) -> bool:
    """Write pristine files, also where the agent made a folder of a file or the reverse; False when there is no room.

    Raises VerifierFault when one of the verifier's own paths leaves the workspace.
    """
    escaping = [path for path in files if path.startswith("/") or ".." in path.split("/") or not path]
    if escaping:
        raise VerifierFault(f"verifier file {escaping[0]!r} is outside the workspace")
    try:
        await fork.write(files)
        return True
    except PathEscape:
        await fork.exec(_clear_command(list(files)), timeout=VERIFY_SECONDS)
    try:
        await fork.write(files)
        return True
    except PathEscape:
        return False


def _clear_command(paths: list[str]) -> str:
    """Remove what stands where ``paths`` and their folders belong, and nothing else."""
    folders = {str(p) for path in paths for p in PurePosixPath(path).parents if str(p) != "."}
    lines = [f"[ -d ./{f} ] && [ ! -L ./{f} ] || rm -f -- ./{f}" for f in map(shlex.quote, sorted(folders))]
    return "\n".join([*lines, *(f"rm -rf -- ./{shlex.quote(path)}" for path in paths)])


async def _check_runnable(fork: Pod, command: str, result: ExecResult) -> None:
    """Raise VerifierFault when the shell could not find or execute ``command`` itself.

    Code under test can end with 126 or 127 as well; that is the model's doing, so the program is looked up before blaming
    the verifier.
    """
    if result.exit_code not in _CANNOT_RUN:
        return
    try:
        words = [word for word in shlex.split(command) if "=" not in word.split("/")[0]]
    except ValueError:
        words = []
    program = words[0] if words else ""
    if (await fork.exec(f"command -v {shlex.quote(program)}", timeout=VERIFY_SECONDS)).exit_code != 0:
        raise VerifierFault(f"verifier command cannot run: {result.output.strip()[:200]}")
