"""The trainer's end of the chain: a base, then deltas; files first, the manifest last.

Objects are immutable and content-addressed, and there is one writer: a manifest carries the writer's fencing epoch, and one of an
older epoch than the newest is never written (a writer that was replaced stops itself) nor believed.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from etude.base.errors import WeightSyncError
from etude.base.records import PolicyVersion, WeightFile, WeightManifest
from etude.weights.codec import encode, encode_base
from etude.weights.content import content_hash
from etude.weights.store import Store, sha256

MANIFESTS = "manifests"


class WeightPublisher:
    """Publishes versions in rising order. A new publisher over an old store starts with a base and a higher epoch."""

    def __init__(self, store: Store, *, base_every: int = 25) -> None:
        self.store, self.base_every = store, base_every
        newest = newest_manifest(store)
        self.epoch = newest.epoch + 1 if newest else 0
        self._last: tuple[PolicyVersion, dict[str, Tensor]] | None = None
        self._since_base = 0
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publisher")
        self._pending: Future[WeightManifest] | None = None
        self.blocked_seconds = 0.0
        """Time that the last :meth:`publish_async` held up its caller."""

    def publish(self, version: PolicyVersion, state: dict[str, Tensor]) -> WeightManifest:
        """Write ``version``; ``state`` must not change afterwards. Raises WeightSyncError, DiskFullError."""
        newest = newest_manifest(self.store)
        if newest is not None and newest.epoch > self.epoch:
            raise WeightSyncError(f"weights: another trainer (epoch {newest.epoch}) took over; epoch {self.epoch} stops")
        parent: PolicyVersion | None = None
        changed = 1.0
        if self._last is None or self._since_base >= self.base_every:
            data = encode_base(state)
            self._since_base = 0
        else:
            parent = self._last[0]
            data, changed = encode(self._last[1], state)
        digest = sha256(data)
        kind = "bases" if parent is None else "deltas"
        file = WeightFile(key=f"{kind}/{version:08d}-{digest[:16]}", sha256=digest, num_bytes=len(data))
        self.store.put(file.key, data)
        manifest = WeightManifest(
            version=version, parent=parent, files=(file,), content_hash=content_hash(state), num_tensors=len(state),
            changed_fraction=changed, epoch=self.epoch,
        )  # fmt: skip
        self.store.put(manifest_key(version, self.epoch), manifest.model_dump_json().encode())
        self._last = (version, state)
        self._since_base += 1
        return manifest

    def publish_async(self, version: PolicyVersion, state: dict[str, Tensor]) -> Future[WeightManifest]:
        """Publish on a background thread; waits for (and raises the error of) the one before."""
        clock = time.monotonic()
        if self._pending is not None:
            self._pending.result(timeout=300.0)
        self._pending = self._worker.submit(self.publish, version, state)
        self.blocked_seconds = time.monotonic() - clock
        return self._pending

    def close(self) -> None:
        self._worker.shutdown(wait=True)


def manifest_key(version: PolicyVersion, epoch: int) -> str:
    return f"{MANIFESTS}/{version:08d}-{epoch:06d}.json"


def read_manifests(store: Store) -> dict[PolicyVersion, WeightManifest]:
    """Version -> its manifest of the highest epoch; a torn manifest does not count."""
    found: dict[PolicyVersion, WeightManifest] = {}
    for key in store.list(MANIFESTS):
        try:
            manifest = WeightManifest.model_validate_json(store.get(key))
        except ValueError:
            continue
        if manifest.version not in found or manifest.epoch >= found[manifest.version].epoch:
            found[manifest.version] = manifest
    return found


def newest_manifest(store: Store) -> WeightManifest | None:
    """The manifest of the highest (epoch, version)."""
    keys = store.list(MANIFESTS)
    for key in sorted(keys, key=lambda k: k.rsplit("-", 1)[1] + k, reverse=True):
        try:
            return WeightManifest.model_validate_json(store.get(key))
        except ValueError:
            continue
    return None
