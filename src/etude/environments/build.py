"""Compiles the pod launcher once per source version, into the user's cache."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from etude.base.native.build import build, cache_folder, find_compiler

SOURCE = Path(__file__).parent / "launcher.c"


def launcher(cache: Path | None = None, *, search_path: str | None = None) -> Path:
    """Path of the compiled launcher; ``cache`` defaults to the user's.

    ``search_path`` replaces PATH in the search for a compiler. Raises UserError when there is none, it fails, or the cache cannot
    be written.
    """
    target = (cache or cache_folder()) / f"launcher-{platform.machine()}-{_version()}"
    if not target.exists():
        # static where the C library allows it: a pod then starts without the dynamic linker
        build("pods", find_compiler("pods", search_path), SOURCE, target, [("-O2", "-static"), ("-O2",)])
    return target


def _version() -> str:
    """Hash of the launcher and the files it includes."""
    digest = hashlib.sha256()
    for file in sorted(SOURCE.parent.glob("launcher*.c")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
