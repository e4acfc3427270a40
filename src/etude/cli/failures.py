"""The one place where errors become a line and an exit code.

2 is the user's to mend (recipe, directory, port, disk, dependency), 1 is a fault of a service or of Etude, 130 is Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable

from etude.base.errors import DiskFullError, EtudeError, UserError

INTERRUPTED = 130


def guarded(action: Callable[[], None]) -> int:
    """Run ``action`` and return its exit code; whatever it raises is told on stderr."""
    try:
        action()
    except SystemExit as stop:
        return _code(stop)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return _tell(error)
    return 0


def known(error: BaseException) -> EtudeError | None:
    """``error`` as one of ours when its cause is known, else None."""
    if isinstance(error, EtudeError):
        cause = getattr(error, "cause", None)  # Ray wraps an error of a worker and adds its traceback
        return cause if isinstance(cause, EtudeError) else error
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.split(".")[0] != "etude":
        package = error.name.split(".")[0]
        return UserError(f"dependency {package} is missing; `pip install {package}` or `make install` brings it")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(f"no space left on the disk{_of(error)}; free some and resume the run")
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return UserError(f"address already in use: {error}; choose another port")
    return None


def _tell(error: Exception) -> int:
    ours = known(error)
    if os.environ.get("ETUDE_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)
    if ours is not None:
        lines = str(ours).splitlines() or [type(ours).__name__]
        _say(lines[0])
        return ours.exit_code
    _say(f"unexpected {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    if os.environ.get("ETUDE_DEBUG") != "1":
        print(f"traceback: {_write_traceback(error)}", file=sys.stderr)
    return 1


def _say(line: str) -> None:
    print(f"error: {line}", file=sys.stderr)


def _of(error: OSError) -> str:
    return f" of {error.filename}" if error.filename else ""


def _write_traceback(error: Exception) -> str:
    """Path of a new file with the traceback, or why there is none."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="etude-traceback-", suffix=".txt", delete=False) as file:
            traceback.print_exception(error, file=file)
            return file.name
    except OSError as problem:
        return f"not written ({problem}); set ETUDE_DEBUG=1 to see it"


def _code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)
    return 1
