"""Outcome verifiers: run in a fork of the final workspace, with pristine tests written over whatever the agent left.

A verifier's own failure raises VerifierFault; it is never the model's zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from etude.base.errors import VerifierFault
from etude.base.protocols import Pod
from etude.base.records import AnswerVerifier, MutantsVerifier, Task, TestsVerifier

VERIFY_SECONDS = 10.0


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
            return await _tests(verifier, fork)
        return await _mutants(verifier, fork)
    finally:
        await fork.destroy()


def _answer(verifier: AnswerVerifier, message: str, edited: bool) -> Verdict:
    if verifier.unchanged and edited:
        return Verdict(False, "a question must not change files")
    given = message.strip().casefold()
    if given in {answer.strip().casefold() for answer in verifier.accepted}:
        return Verdict(True)
    return Verdict(False, f"answered {message.strip()!r}, expected {verifier.accepted[0]!r}")


async def _tests(verifier: TestsVerifier, fork: Pod) -> Verdict:
    await fork.write(verifier.files)
    result = await fork.exec(verifier.command, timeout=VERIFY_SECONDS)
    if result.exit_code in (126, 127):
        raise VerifierFault(f"verifier command cannot run: {result.output.strip()[:200]}")
    return Verdict(result.exit_code == 0, result.output)


async def _mutants(verifier: MutantsVerifier, fork: Pod) -> Verdict:
    """The agent's tests must pass on the original and fail on each mutant."""
    await fork.write({verifier.path: verifier.original})
    result = await fork.exec(verifier.command, timeout=VERIFY_SECONDS)
    if result.exit_code in (126, 127):
        raise VerifierFault(f"verifier command cannot run: {result.output.strip()[:200]}")
    if result.exit_code != 0:
        return Verdict(False, f"on the original code: {result.output}")
    for number, mutant in enumerate(verifier.mutants, 1):
        await fork.write({verifier.path: mutant})
        result = await fork.exec(verifier.command, timeout=VERIFY_SECONDS)
        if result.exit_code == 0:
            return Verdict(False, f"mutant {number} of {len(verifier.mutants)} survives")
    return Verdict(True, f"caught {len(verifier.mutants)} mutants")
