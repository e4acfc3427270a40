"""An engine's end of the chain: rebuilds a version from what it holds or from a base, and believes nothing unverified."""

from __future__ import annotations

from torch import Tensor

from etude.base.errors import WeightSyncError
from etude.base.records import PolicyVersion, WeightManifest
from etude.weights.codec import apply
from etude.weights.content import content_hash
from etude.weights.publisher import read_manifests
from etude.weights.store import Store, sha256

Held = tuple[PolicyVersion, dict[str, Tensor]]


class WeightSubscriber:
    """Reads versions from a store. Keeps nothing: the caller passes what it holds."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def latest(self) -> PolicyVersion | None:
        """Newest published version, or None."""
        return max(read_manifests(self.store), default=None)

    def fetch(self, version: PolicyVersion, held: Held | None = None) -> dict[str, Tensor]:
        """The state of ``version``, its hash checked.

        From ``held`` when it lies on the chain, else from the newest base; a broken link on the way from ``held`` is repaired
        from a base. Raises WeightSyncError that names the missing or corrupt object.
        """
        manifests = read_manifests(self.store)
        if version not in manifests:
            raise WeightSyncError(f"weights: version {version} is not in {self.store.location}; newest is {max(manifests, default=None)}")
        path = _path(manifests, version)
        if held is not None and held[0] in [manifest.version for manifest in path]:
            start = [manifest.version for manifest in path].index(held[0])
            try:
                if content_hash(held[1]) == path[start].content_hash:
                    return self._rebuild(held[1], path[start + 1 :])
            except WeightSyncError:
                pass  # repaired from the base below; if that fails too, its error is the one to see
        return self._rebuild({}, path)

    def _rebuild(self, state: dict[str, Tensor], path: list[WeightManifest]) -> dict[str, Tensor]:
        for manifest in path:
            for file in manifest.files:
                data = self.store.get(file.key)
                if sha256(data) != file.sha256:
                    raise WeightSyncError(f"weights: object {file.key} of version {manifest.version} is corrupt")
                state = apply(state, data)
        if path and content_hash(state) != path[-1].content_hash:
            raise WeightSyncError(f"weights: version {path[-1].version} does not hash to its manifest")
        return state


def _path(manifests: dict[PolicyVersion, WeightManifest], version: PolicyVersion) -> list[WeightManifest]:
    """Manifests from the newest base up to ``version``."""
    path = [manifests[version]]
    while (parent := path[0].parent) is not None:
        if parent not in manifests or manifests[parent].epoch != path[0].epoch:
            raise WeightSyncError(f"weights: version {path[0].version} builds on {parent}, whose manifest is missing")
        path.insert(0, manifests[parent])
    return path
