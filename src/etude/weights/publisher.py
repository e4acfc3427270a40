"""The trainer's end of the chain: a base, then deltas, a base again every so often; files first, the manifest last.

There is one writer. A publisher claims a fencing epoch above every other before it writes, and stops itself as soon as it sees a
higher one; subscribers believe no manifest that a later writer made void (:mod:`etude.weights.manifests`).
"""

from __future__ import annotations

import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor

from etude.base.errors import WeightSyncError, deadline_exceeded
from etude.base.records import PolicyVersion, WeightManifest
from etude.weights.codec import State, snapshot
from etude.weights.garbage import collect, reopen
from etude.weights.manifests import WRITERS, Kind, newest_epoch
from etude.weights.shards import ShardWriter, commit
from etude.weights.store import ObjectStore

PUBLISH_DEADLINE = 600.0
"""Seconds that a call waits for the version before it."""


class WeightPublisher:
    """Publishes versions in rising order; not thread-safe (one trainer loop), its background thread is its own.

    Opened over a store that has versions, it goes on with a higher epoch and a new base. ``epoch`` None takes the next free one;
    a given one that is not above all others is refused. ``keep_bases`` collects garbage after each base
    (:mod:`etude.weights.garbage`); None keeps everything. Raises WeightSyncError.
    """

    def __init__(
        self, store: ObjectStore, *, base_every: int = 25, epoch: int | None = None, keep_bases: int | None = None
    ) -> None:
        self.store, self.base_every, self.keep_bases = store, base_every, keep_bases
        self.epoch = _claim(store, epoch)
        self.blocked_seconds = 0.0
        """How long the last :meth:`publish_async` held up its caller: waiting for its forerunner, then copying the state."""
        self.published_seconds = 0.0
        """How long the last version took to encode and write."""
        self._shard = ShardWriter(store)
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
            last = self._shard.version
            done = f"version {last} was written" if last is not None else "nothing was written yet"
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
        last = self._shard.version
        if last is not None and version <= last:
            raise WeightSyncError(f"weights: version {version} does not come after {last}, which is published")
        base_due = last is None or self._since_base + 1 >= self.base_every
        if last is None:
            reopen(self.store, version)
        kinds: tuple[Kind, ...] = ("base",) if last is None else ("delta", "base") if base_due else ("delta",)
        written = [commit(self.store, [self._shard.write(version, state, kind)], self.epoch) for kind in kinds]
        self._shard.committed()
        self._since_base = 0 if base_due else self._since_base + 1
        if base_due and self.keep_bases is not None:
            collect(self.store, keep_bases=self.keep_bases)
        self.published_seconds = time.monotonic() - clock
        return written[0]


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
