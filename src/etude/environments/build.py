"""Compiles the pod launcher once per source version, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from etude.base.errors import UserError

SOURCE = Path(__file__).parent / "launcher.c"
SECONDS = 120.0


def launcher() -> Path:
    """Path of the compiled launcher. Raises UserError when there is no C compiler or it fails."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return compile_launcher(Path(home) / "etude")


def compile_launcher(cache: Path, *, search_path: str | None = None) -> Path:
    """Compile into ``cache`` unless this version is there; ``search_path`` replaces PATH in the search for a compiler."""
    target = cache / f"launcher-{platform.machine()}-{_version()}"
    if target.exists():
        return target
    names = ("cc", "gcc", "clang")
    compiler = next((found for name in names if (found := shutil.which(name, path=search_path))), None)
    if compiler is None:
        raise UserError("pods: no C compiler found; install one, e.g. `apt-get install gcc libc6-dev`")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            built = Path(scratch) / "launcher"
            _compile(compiler, built)
            os.replace(built, target)  # two that build at once give the same file
    except OSError as error:
        raise UserError(f"pods: cannot build the launcher in {cache}: {error.strerror}; set XDG_CACHE_HOME") from None
    return target


def _compile(compiler: str, built: Path) -> None:
    """Static where the C library allows it: a pod then starts without the dynamic linker."""
    said = ""
    for linking in (["-static"], []):
        command = [compiler, "-O2", *linking, "-o", str(built), str(SOURCE)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise UserError(f"pods: {compiler} did not build the launcher within {SECONDS:.0f}s") from None
        if done.returncode == 0:
            return
        said = " ".join(done.stderr.split())
    raise UserError(f"pods: {compiler} cannot build the launcher: {said[:300]}")


def _version() -> str:
    """Hash of the launcher and the files it includes."""
    digest = hashlib.sha256()
    for file in sorted(SOURCE.parent.glob("launcher*.c")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
