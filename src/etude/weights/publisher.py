"""The trainer's end of the chain: a base, then deltas, a base again every so often; files first, the manifest last.

There is one writer. A publisher claims a fencing epoch above every other before it writes, and stops itself as soon as it sees a
higher one; subscribers believe no manifest that a later writer made void (:mod:`etude.weights.manifests`).
"""

from __future__ import annotations

import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from etude.base.errors import WeightSyncError, deadline_exceeded
from etude.base.records import PolicyVersion, WeightFile, WeightManifest
from etude.weights.codec import Encoded, State, encode, encode_base, snapshot
from etude.weights.content import content_hash
from etude.weights.manifests import WRITERS, Kind, manifest_key, newest_epoch
from etude.weights.store import ObjectStore, sha256

PUBLISH_DEADLINE = 600.0
"""Seconds that a call waits for the version before it."""


@dataclass(frozen=True)
class _Published:
    """What the next delta starts from: a private copy."""

    version: PolicyVersion
    state: State
    digests: dict[str, str]


class WeightPublisher:
    """Publishes versions in rising order; not thread-safe (one trainer loop), its background thread is its own.

    Opened over a store that has versions, it goes on with a higher epoch and a new base. ``epoch`` None takes the next free one;
    a given one that is not above all others is refused. Raises WeightSyncError.
    """

    def __init__(self, store: ObjectStore, *, base_every: int = 25, epoch: int | None = None) -> None:
        self.store, self.base_every = store, base_every
        self.epoch = _claim(store, epoch)
        self.blocked_seconds = 0.0
        """How long the last :meth:`publish_async` held up its caller: waiting for its forerunner, then copying the state."""
        self.published_seconds = 0.0
        """How long the last version took to encode and write."""
        self._last: _Published | None = None
        self._since_base = 0
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publisher")
        self._pending: tuple[PolicyVersion, Future[WeightManifest]] | None = None

    def publish(self, version: PolicyVersion, state: State) -> WeightManifest:
        """Write ``version`` and wait for it; ``state`` is copied. The manifest of its delta, or of its base when it has none.

        Raises WeightSyncError, DiskFullError, DeadlineExceeded.
        """
        self.flush()
        return self._publish(version, snapshot(state))

    def publish_async(self, version: PolicyVersion, state: State) -> Future[WeightManifest]:
        """Copy ``state`` now, encode and write in the background.

        The error of a version surfaces from its future and, once more, at the next call of any method; that call has then done
        nothing, and may be repeated: deltas start from the last version that was published whole.
        """
        clock = time.monotonic()
        self.flush()
        future = self._worker.submit(self._publish, version, snapshot(state))
        self._pending = (version, future)
        self.blocked_seconds = time.monotonic() - clock
        return future

    def flush(self, deadline: float = PUBLISH_DEADLINE) -> None:
        """Wait until the version in the background is written; raises its error, DeadlineExceeded after ``deadline`` seconds."""
        if self._pending is None:
            return
        version, future = self._pending
        try:
            future.exception(deadline)
        except TimeoutError:
            done = f"version {self._last.version} was written" if self._last else "nothing was written yet"
            what = f"version {version} to reach {self.store.location}"
            raise deadline_exceeded("weight publisher", what, deadline, version, done) from None
        self._pending = None
        future.result()

    def close(self) -> None:
        """Flush and end the background thread. Raises the error of the last version."""
        try:
            self.flush()
        finally:
            self._worker.shutdown(wait=False, cancel_futures=True)

    def _publish(self, version: PolicyVersion, state: State) -> WeightManifest:
        clock = time.monotonic()
        seen = newest_epoch(self.store)
        if seen > self.epoch:
            raise WeightSyncError(
                f"weights: another trainer (epoch {seen}) took over; the one of epoch {self.epoch} stops"
            )
        last = self._last
        if last is not None and version <= last.version:
            raise WeightSyncError(f"weights: version {version} does not come after {last.version}, which is published")
        base_due = last is None or self._since_base + 1 >= self.base_every
        written: list[WeightManifest] = []
        digests: dict[str, str] = {}
        if last is not None:
            delta = encode(last.state, state)
            digests = {**last.digests, **delta.digests}
            written.append(self._write("delta", version, last, delta, state, digests))
        if base_due:
            base = encode_base(state)
            digests = base.digests
            written.append(self._write("base", version, None, base, state, digests))
        self._last = _Published(version, state, digests)
        self._since_base = 0 if base_due else self._since_base + 1
        self.published_seconds = time.monotonic() - clock
        return written[0]

    def _write(
        self,
        kind: Kind,
        version: PolicyVersion,
        parent: _Published | None,
        made: Encoded,
        state: State,
        digests: dict[str, str],
    ) -> WeightManifest:
        """One object and its manifest."""
        checksum = sha256(made.data)
        file = WeightFile(key=f"{kind}s/{version:08d}-{checksum}", sha256=checksum, num_bytes=len(made.data))
        self.store.put(file.key, made.data)
        manifest = WeightManifest(
            version=version,
            parent=parent.version if parent else None,
            files=(file,),
            content_hash=content_hash(state, digests),
            num_tensors=len(state),
            changed_fraction=made.changed_fraction,
            epoch=self.epoch,
        )
        self.store.put(manifest_key(version, self.epoch, kind), manifest.model_dump_json().encode())
        return manifest


def _claim(store: ObjectStore, wanted: int | None) -> int:
    """A fencing epoch that nobody else holds, without conditional writes.

    Write a claim, then look: of two that claimed the same epoch, the one with the greater nonce claims a higher one,
    which fences the other.
    """
    nonce = uuid.uuid4().hex[:12]
    while True:
        newest = newest_epoch(store)
        epoch = newest + 1 if wanted is None else wanted
        if epoch <= newest:
            raise WeightSyncError(f"weights: epoch {epoch} is stale, {store.location} has seen epoch {newest}")
        store.put(f"{WRITERS}/{epoch:06d}-{nonce}", b"")
        rivals = [key for key in store.list(WRITERS) if f"/{epoch:06d}-" in key]
        if min(rivals).endswith(nonce):
            return epoch
        wanted = None
