"""An object store through ``obstore``: a folder, or any URL it knows (S3, GCS, Azure). Errors are typed here.

Who writes: one publisher. Who reads: any number of subscribers. Objects are immutable and content-addressed, a ``put`` is atomic
(a folder writes beside and renames), and no conditional write is relied on: many S3-compatible servers accept and ignore them.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import obstore
from obstore.exceptions import NotFoundError
from obstore.store import LocalStore, from_url
from pydantic import Field

from etude.base.config import Config
from etude.base.errors import DiskFullError, EtudeError, WeightSyncError


class StoreConfig(Config):
    """How a remote store is spoken to. Credentials and endpoints are best left in the environment (``AWS_*``, ...)."""

    options: dict[str, str] = Field(default_factory=dict)
    """Options of the client as ``obstore`` names them: ``endpoint``, ``region``, ``allow_http``, ..."""
    request_seconds: float = Field(60.0, gt=0)
    """Bound of one request."""
    retry_seconds: float = Field(120.0, gt=0)
    """A store that fails or is slow is tried again for so long."""
    retries: int = Field(6, ge=0)
    first_backoff_seconds: float = Field(0.1, gt=0)


_FULL = ("(os error 28)", "(os error 122)", "No space left", "quota exceeded")


class ObjectStore(Protocol):
    """Immutable objects by key. Tests script it; :class:`Store` is the real one."""

    @property
    def location(self) -> str:
        """Where it is, for messages."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write an object; a reader sees all of it or nothing. Raises DiskFullError, WeightSyncError."""
        ...

    def get(self, key: str) -> bytes:
        """The object. Raises WeightSyncError that names it when it is missing or cannot be read."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Sorted keys in the folder ``prefix``. Raises WeightSyncError."""
        ...

    def exists(self, key: str) -> bool:
        """Whether there is such an object. Raises WeightSyncError when the store does not answer."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error. Raises WeightSyncError."""
        ...


class Store:
    """``location`` is a folder (made when missing) or a URL (``s3://bucket/prefix``, ``memory:///``)."""

    def __init__(self, location: str, config: StoreConfig | None = None) -> None:
        config = config or StoreConfig()
        self._location = location
        self._store: obstore.store.ObjectStore
        try:
            if "://" not in location:
                self._store = LocalStore(prefix=Path(location).resolve(), mkdir=True)
            elif location.startswith(("file:", "memory:")):
                self._store = from_url(location)
            else:
                self._store = from_url(location, **_client_arguments(config))
        except Exception as error:
            raise typed(error, location, "cannot be opened") from None

    @property
    def location(self) -> str:
        return self._location

    def put(self, key: str, data: bytes) -> None:
        try:
            obstore.put(self._store, key, data)
        except Exception as error:
            raise typed(error, self._location, f"cannot write {key}") from None

    def get(self, key: str) -> bytes:
        try:
            return bytes(obstore.get(self._store, key).bytes())
        except Exception as error:
            raise typed(error, self._location, f"cannot read {key}") from None

    def list(self, prefix: str) -> list[str]:
        try:
            return sorted(str(found["path"]) for found in obstore.list(self._store, prefix).collect())
        except Exception as error:
            raise typed(error, self._location, f"cannot list {prefix}") from None

    def exists(self, key: str) -> bool:
        try:
            obstore.head(self._store, key)
        except (FileNotFoundError, NotFoundError):
            return False
        except Exception as error:
            raise typed(error, self._location, f"cannot look for {key}") from None
        return True

    def delete(self, key: str) -> None:
        try:
            obstore.delete(self._store, key)
        except (FileNotFoundError, NotFoundError):
            return
        except Exception as error:
            raise typed(error, self._location, f"cannot delete {key}") from None


def _client_arguments(config: StoreConfig) -> dict[str, Any]:
    client: dict[str, Any] = {"timeout": timedelta(seconds=config.request_seconds)}
    if config.options.get("endpoint", "").startswith("http://"):
        client["allow_http"] = True
    backoff = {
        "init_backoff": timedelta(seconds=config.first_backoff_seconds),
        "max_backoff": timedelta(seconds=15.0),
        "base": 2.0,
    }
    retry = {
        "max_retries": config.retries,
        "retry_timeout": timedelta(seconds=config.retry_seconds),
        "backoff": backoff,
    }
    return {"config": config.options, "client_options": client, "retry_config": retry}


def typed(error: Exception, location: str, what: str) -> EtudeError:
    """An error of the client as one of ours, in one line: DiskFullError or WeightSyncError."""
    text = str(error) or type(error).__name__
    if any(mark in text for mark in _FULL):
        return DiskFullError(f"object store {location}: {what}: no space left; free some and resume the run")
    return WeightSyncError(f"object store {location}: {what}: {text.splitlines()[0]}")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
