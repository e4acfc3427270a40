"""State of the environments service: which pods are alive and on what lease, and the snapshots it keeps."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from etude.base.errors import EnvironmentFault
from etude.base.records import PodLimits
from etude.environments.config import EnvironmentsConfig
from etude.environments.namespaces import NamespaceBackend
from etude.environments.pods import NamespacePod, Packed

SWEEP_SECONDS = 0.05
CLOSE_SECONDS = 2.0


@dataclass
class Lease:
    """One pod, the requests in progress on it, and when the last one ended."""

    pod: NamespacePod
    key: str | None
    busy: int = 0
    touched: float = field(default_factory=time.monotonic)


class PodService:
    """Leases, snapshots, and the backend behind them."""

    def __init__(self, backend: NamespaceBackend, config: EnvironmentsConfig) -> None:
        self.backend, self.config = backend, config
        self.leases: dict[str, Lease] = {}
        self.created = 0
        self._snapshots: dict[str, tuple[Packed, PodLimits]] = {}
        self._snapshot_bytes = 0
        self._by_key: dict[str, asyncio.Future[str]] = {}
        self._starting = 0

    async def create(self, packed: Packed, limits: PodLimits, key: str | None = None) -> str:
        """Id of a new pod; the same ``key`` gives the same pod again while it lives.

        Raises EnvironmentFault, PathEscape, ValueError for bad limits.
        """
        if key is not None and key in self._by_key:
            return await asyncio.shield(self._by_key[key])
        if len(self.leases) + self._starting >= self.config.max_pods:
            raise EnvironmentFault(
                f"{self.config.max_pods} pods are alive, which is the limit; destroy some or raise max_pods"
            )
        promise: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if key is not None:
            self._by_key[key] = promise
        self._starting += 1
        try:
            pod = await self.backend.create(packed, limits)
        except BaseException as error:
            if key is not None:
                del self._by_key[key]
            cancelled = isinstance(error, asyncio.CancelledError)
            promise.set_exception(EnvironmentFault("the creation was cancelled") if cancelled else error)
            promise.exception()  # it is raised here; nobody else may be waiting
            raise
        finally:
            self._starting -= 1
        name = secrets.token_hex(8)
        self.leases[name] = Lease(pod, key)
        self.created += 1
        promise.set_result(name)
        return name

    @contextmanager
    def use(self, name: str) -> Iterator[NamespacePod]:
        """The pod for the length of one request. Raises EnvironmentFault when there is none of that name."""
        lease = self.leases.get(name)
        if lease is None:
            raise EnvironmentFault(f"no pod {name}: destroyed, or its lease of {self.config.lease_seconds:.0f}s ended")
        lease.busy += 1
        try:
            yield lease.pod
        finally:
            lease.busy -= 1
            lease.touched = time.monotonic()

    def destroy(self, name: str) -> None:
        """Returns at once; :meth:`sweep` collects the rest. No error for a pod that is gone."""
        lease = self.leases.pop(name, None)
        if lease is not None:
            self.backend.destroy(lease.pod)
            self._by_key.pop(lease.key or "", None)

    async def snapshot(self, name: str) -> str:
        """Keep a pod's workspace as it is now; its id."""
        with self.use(name) as pod:
            packed, limits = await pod.dump(), pod.limits
        size = sum(map(len, packed))
        if self._snapshot_bytes + size > self.config.max_snapshot_mb << 20:
            raise EnvironmentFault(
                f"snapshots would take more than {self.config.max_snapshot_mb} MB; delete some or raise max_snapshot_mb"
            )
        snapshot = secrets.token_hex(8)
        self._snapshots[snapshot] = (packed, limits)
        self._snapshot_bytes += size
        return snapshot

    async def restore(self, snapshot: str) -> str:
        """Id of a new pod with a snapshot's files."""
        if snapshot not in self._snapshots:
            raise EnvironmentFault(f"no snapshot {snapshot}")
        return await self.create(*self._snapshots[snapshot])

    def forget(self, snapshot: str) -> None:
        """Delete a snapshot. No error when it is gone."""
        packed, _ = self._snapshots.pop(snapshot, ((), PodLimits()))
        self._snapshot_bytes -= sum(map(len, packed))

    def health(self) -> dict[str, Any]:
        """Counts, and what the probe at the start found: this service would not run had it failed."""
        return {
            "pods": len(self.leases),
            "created": self.created,
            "snapshots": len(self._snapshots),
            "snapshot_bytes": self._snapshot_bytes,
            "backend": "namespaces",
            "probe": "passed",
            "bounds": self.backend.bounds(),
        }

    async def sweep(self) -> None:
        """Forever: reap dead pods and end leases."""
        while True:
            self.backend.reap()
            oldest = time.monotonic() - self.config.lease_seconds
            for name in [n for n, lease in self.leases.items() if not lease.busy and lease.touched < oldest]:
                self.destroy(name)
            await asyncio.sleep(SWEEP_SECONDS)

    async def close(self) -> None:
        """Destroy everything; returns within about two seconds."""
        for name in list(self.leases):
            self.destroy(name)
        deadline = time.monotonic() + CLOSE_SECONDS
        while self.backend.reap() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self.backend.close()
