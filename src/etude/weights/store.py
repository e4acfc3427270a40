"""An object store through ``obstore``: a folder, or any URL it knows (S3, GCS, Azure). Errors are typed here."""

from __future__ import annotations

import hashlib
from pathlib import Path

import obstore
from obstore.store import LocalStore, from_url

from etude.base.errors import DiskFullError, WeightSyncError


class Store:
    """Immutable objects by key. ``location`` is a folder or a URL."""

    def __init__(self, location: str) -> None:
        self.location = location
        if "://" in location:
            self._store = from_url(location)
        else:
            Path(location).mkdir(parents=True, exist_ok=True)
            self._store = LocalStore(prefix=location, mkdir=True)

    def put(self, key: str, data: bytes) -> None:
        """Write an object (atomic: a reader sees all of it or nothing). Raises DiskFullError, WeightSyncError."""
        try:
            obstore.put(self._store, key, data)
        except Exception as error:
            if "No space left" in str(error) or "quota" in str(error).lower():
                raise DiskFullError(f"no space left in the object store {self.location}; free some and resume") from None
            raise WeightSyncError(f"object store {self.location}: cannot write {key}: {error}") from None

    def get(self, key: str) -> bytes:
        """The object. Raises WeightSyncError naming it when it is missing or cannot be read."""
        try:
            return bytes(obstore.get(self._store, key).bytes())
        except Exception as error:
            raise WeightSyncError(f"object store {self.location}: cannot read {key}: {str(error).splitlines()[0]}") from None

    def list(self, prefix: str) -> list[str]:
        """Sorted keys below ``prefix``."""
        try:
            return sorted(str(meta["path"]) for meta in obstore.list(self._store, prefix).collect())
        except Exception as error:
            raise WeightSyncError(f"object store {self.location}: cannot list {prefix}: {error}") from None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
