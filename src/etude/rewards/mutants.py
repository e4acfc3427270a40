"""One shell command that runs the agent's tests on the original code and on many mutants.

The verdict is the command's exit code and the code versions are in the command itself, so that nothing the tests print or
write forges it. The original is run twice: first as it is, and last with a blank line at its end. Tests that count their
runs, or compare the source with what they have seen, pass the first and fail the last.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from etude.base.records import MutantsVerifier

RUN_SECONDS = 5
"""Per run of the tests; a mutant that hangs them is caught."""
CAUGHT = 0
SURVIVED = 20
"""The output is then the number of the mutant, from 1."""
FAILED = 21
"""The tests fail on the original; the output is theirs. Exit codes 126 and 127 of the first run are passed on."""
MAX_VERSIONS_BYTES = 120_000
"""Of all code versions in one command, quoted; Linux takes at most 128 KiB in one argument of a program."""


def batches(verifier: MutantsVerifier) -> Iterator[tuple[str, float]]:
    """(command, deadline in seconds) of each batch; one is enough unless the mutants are large."""
    numbers: list[int] = []
    fixed = 2 * _size(verifier.original)
    size = fixed
    for number, mutant in enumerate(verifier.mutants, 1):
        if numbers and size + _size(mutant) > MAX_VERSIONS_BYTES:
            yield _command(verifier, numbers), _seconds(numbers)
            numbers, size = [], fixed
        numbers.append(number)
        size += _size(mutant)
    yield _command(verifier, numbers), _seconds(numbers)


def _size(text: str) -> int:
    return len(shlex.quote(text).encode())


def _seconds(numbers: list[int]) -> float:
    return RUN_SECONDS * (len(numbers) + 2) + 5.0


def _command(verifier: MutantsVerifier, numbers: list[int]) -> str:
    """Exit code CAUGHT, SURVIVED, FAILED, or 126/127 when the test command could not run."""
    versions = {"first": verifier.original, "last": verifier.original + "\n"}
    versions |= {str(number): verifier.mutants[number - 1] for number in numbers}
    arms = "\n".join(f"  {name}) printf %s {shlex.quote(text)} ;;" for name, text in versions.items())
    # bytecode that the agent left is keyed by time and size of its source: a mutant of the same size could go unseen
    stale = shlex.quote(f"./{PurePosixPath(verifier.path).parent / '__pycache__'}")
    return f"""version() {{
case $1 in
{arms}
esac
}}
try() {{
  rm -rf {stale}; version $1 >{shlex.quote("./" + verifier.path)} || exit {FAILED}
  output=$(timeout -k 1 {RUN_SECONDS} sh -c {shlex.quote(verifier.command)} 2>&1)
}}
broken() {{
  printf '%s\\n' "$output"
  case $1 in 126|127) exit $1;; esac
  exit {FAILED}
}}
try first || broken $?
for number in {" ".join(map(str, numbers))}; do
  if try $number; then echo $number; exit {SURVIVED}; fi
done
try last || broken 1
exit {CAUGHT}
"""
