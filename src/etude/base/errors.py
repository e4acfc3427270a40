"""One error tree: an error is typed by the border it crossed and caught in one place.

``UserError`` and its children are the user's to mend: the command line prints one line and exits 2. Faults of a
service are caught by the executor of a rollout, which turns them into an :class:`~etude.base.records.Outcome`;
they never become a reward. Adding one: derive from the border it crosses, keep it picklable (a single message).
"""

from __future__ import annotations


class EtudeError(Exception):
    """Root of all errors that Etude raises on purpose. ``str(error)`` is one line that names thing and remedy."""

    exit_code = 1


class UserError(EtudeError):
    """Bad input or a missing precondition: message names the thing and the remedy. Exit code 2."""

    exit_code = 2


class ConfigError(UserError):
    """A recipe or an override is wrong; the key is named."""


class CheckpointError(UserError):
    """A checkpoint directory is missing, incomplete or of another shape."""


class DiskFullError(UserError):
    """No space left where a run writes."""


class ServiceError(EtudeError):
    """A service failed or could not be reached."""


class EnvironmentFault(ServiceError):
    """The environments service, not the code under test, failed."""


class InferenceFault(ServiceError):
    """The inference service failed or refused."""


class VerifierFault(ServiceError):
    """A verifier could not give a verdict."""


class WeightSyncError(ServiceError):
    """A weight version is missing, torn or does not hash to its manifest."""


class DeadlineExceeded(ServiceError):
    """A wait ended without its event. Build it with :func:`deadline_exceeded`."""


class PathEscape(EtudeError):
    """A file path points outside the workspace of a pod; the caller's fault, answered not raised to the user."""


def deadline_exceeded(
    component: str, waiting_for: str, seconds: float, version: int, last_progress: str
) -> DeadlineExceeded:
    """Error for a wait of ``seconds`` that ran out: names component, policy version and the last progress."""
    return DeadlineExceeded(
        f"{component} waited {seconds:.0f}s for {waiting_for} (policy version {version}); last progress: {last_progress}"
    )
