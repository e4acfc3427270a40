"""Compiles a kernel once per source version, compiler and processor, into the user's cache, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from etude.base.errors import UserError

HEADER = Path(__file__).parent / "vector.h"
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-pthread")


def load(source: Path, cache: Path | None = None, *, search_path: str | None = None) -> ctypes.CDLL:
    """The library that ``source`` makes. Raises UserError when there is no C compiler or it fails.

    ``cache`` defaults to the user's cache folder; ``search_path`` replaces PATH in the search for a compiler.
    """
    folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etude"
    compiler = next((c for n in ("cc", "gcc", "clang") if (c := shutil.which(n, path=search_path))), None)
    if compiler is None:
        raise UserError("native kernel: no C compiler found; install one, e.g. `apt-get install gcc libc6-dev`")
    identity = source.read_bytes() + HEADER.read_bytes() + repr((FLAGS, _version(compiler), _processor())).encode()
    target = folder / f"{source.stem}-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    if not target.exists():
        _compile(compiler, source, target)
    return ctypes.CDLL(str(target))


def _compile(compiler: str, source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / "kernel.so"
        command = [compiler, *FLAGS, f"-I{HEADER.parent}", "-o", str(built), str(source), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            raise UserError(f"native kernel: {compiler} cannot build {source.name}: {done.stderr.strip()[:300]}")
        os.replace(built, target)


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
