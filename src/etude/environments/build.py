"""Compiles the pod launcher once per source version, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from etude.base.errors import UserError

SOURCE = Path(__file__).parent / "launcher.c"


def launcher() -> Path:
    """Path of the compiled launcher. Raises UserError when there is no C compiler or it fails."""
    return compile_launcher(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etude")


def compile_launcher(cache: Path, *, search_path: str | None = None) -> Path:
    """Compile into ``cache`` unless this version is there; ``search_path`` replaces PATH in the search for a compiler."""
    target = cache / f"launcher-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    if target.exists():
        return target
    names = ("cc", "gcc", "clang")
    compiler = next((found for name in names if (found := shutil.which(name, path=search_path))), None)
    if compiler is None:
        raise UserError("pods: no C compiler found; install one, e.g. `apt-get install gcc libc6-dev`")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        built = Path(scratch) / "launcher"
        done = subprocess.run([compiler, "-O2", "-o", built, SOURCE], capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise UserError(f"pods: {compiler} cannot build the launcher: {done.stderr.strip()[:300]}")
        os.replace(built, target)
    return target
