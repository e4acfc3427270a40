"""Compiles C sources when they are first used, once per version, into the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from etude.base.errors import UserError

HEADER = Path(__file__).parent / "vector.h"
KERNEL_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
SECONDS = 120.0


def load(source: Path, cache: Path | None = None, *, search_path: str | None = None) -> ctypes.CDLL:
    """The kernels in ``source`` as a library, one per source version, compiler and processor.

    ``cache`` defaults to the user's; ``search_path`` replaces PATH in the search for a compiler. Raises UserError when there is
    no compiler, it fails, or the cache cannot be written.
    """
    what = "native kernel"
    compiler = find_compiler(what, search_path)
    identity = source.read_bytes() + HEADER.read_bytes()
    identity += repr((KERNEL_FLAGS, _version(compiler), _processor())).encode()
    target = (cache or cache_folder()) / f"{source.stem}-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    if not target.exists():
        build(what, compiler, source, target, [(*KERNEL_FLAGS, f"-I{HEADER.parent}", "-lm")])
    return ctypes.CDLL(str(target))


def cache_folder() -> Path:
    """Where compiled code is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etude"


def find_compiler(what: str, search_path: str | None = None) -> str:
    """Path of a C compiler. Raises UserError, in the name of ``what`` needs it."""
    found = (shutil.which(name, path=search_path) for name in ("cc", "gcc", "clang"))
    compiler = next((path for path in found if path), None)
    if compiler is None:
        raise UserError(f"{what}: no C compiler found; install one, e.g. `apt-get install gcc libc6-dev`")
    return compiler


def build(what: str, compiler: str, source: Path, target: Path, attempts: Sequence[Sequence[str]]) -> None:
    """Compile ``source`` to ``target`` with the first of the lists of flags that works; nothing is left of a failure.

    Two that build at once give the same file. Raises UserError.
    """
    said = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / target.name
            for flags in attempts:
                command = [compiler, "-o", str(built), str(source), *flags]
                done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
                if done.returncode == 0:
                    os.replace(built, target)
                    return
                said = " ".join(done.stderr.split())
    except OSError as error:
        raise UserError(
            f"{what}: cannot build {source.name} in {target.parent}: {error.strerror}; set XDG_CACHE_HOME"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{what}: {compiler} did not build {source.name} within {SECONDS:.0f}s") from None
    raise UserError(f"{what}: {compiler} cannot build {source.name}: {said[:300]}")


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
