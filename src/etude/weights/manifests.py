"""The manifests of a store: which versions there are, who wrote them, and by which links each can be reached.

Layout::

    writers/EEEEEE-NONCE                     a publisher's claim of fencing epoch E
    manifests/VVVVVVVV-EEEEEE-base.json      version V as a base         } both where a base falls due, so that an engine
    manifests/VVVVVVVV-EEEEEE-delta.json     version V from its parent   } that is up to date never downloads one
    bases/..., deltas/...                    the files, named by version and digest
    subscribers/NAME, horizon/VVVVVVVV       who needs what, and what was collected (:mod:`etude.weights.garbage`)

A writer of epoch E that publishes version V takes over from there: what older epochs wrote for V and above is void, also when
it arrives later (a replaced trainer that had not noticed). A manifest that cannot be read does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from etude.base.errors import WeightSyncError
from etude.base.records import PolicyVersion, WeightManifest
from etude.weights.store import ObjectStore

MANIFESTS = "manifests"
WRITERS = "writers"
Kind = Literal["base", "delta"]


@dataclass(frozen=True, order=True)
class Link:
    """A way to a version, read off the key of a manifest."""

    version: PolicyVersion
    epoch: int
    kind: str
    key: str


def manifest_key(version: PolicyVersion, epoch: int, kind: Kind) -> str:
    return f"{MANIFESTS}/{version:08d}-{epoch:06d}-{kind}.json"


def every_link(store: ObjectStore) -> list[Link]:
    """Links of all manifests, those of replaced writers included. Reads keys only. Raises WeightSyncError."""
    return [link for key in store.list(MANIFESTS) if (link := _link(key)) is not None]


def live_links(store: ObjectStore) -> list[Link]:
    """Links of all versions that no later writer has made void, by version. Reads keys only. Raises WeightSyncError."""
    links = every_link(store)
    taken_over: dict[int, PolicyVersion] = {}
    for link in links:
        taken_over[link.epoch] = min(link.version, taken_over.get(link.epoch, link.version))
    return sorted(
        link for link in links if all(link.version < first for epoch, first in taken_over.items() if epoch > link.epoch)
    )


def read_manifest(store: ObjectStore, link: Link) -> WeightManifest:
    """Raises WeightSyncError when it is missing, torn, or not what its key says."""
    try:
        manifest = WeightManifest.model_validate_json(store.get(link.key))
    except ValueError:
        raise WeightSyncError(f"weights: manifest {link.key} is torn") from None
    kind = "base" if manifest.parent is None else "delta"
    if (manifest.version, manifest.epoch, kind) != (link.version, link.epoch, link.kind):
        raise WeightSyncError(f"weights: manifest {link.key} describes another version")
    return manifest


def newest_epoch(store: ObjectStore) -> int:
    """The highest fencing epoch that was ever claimed or used; -1 in an empty store."""
    claimed = [int(key.rsplit("/", 1)[1].split("-")[0]) for key in store.list(WRITERS)]
    used = [link.epoch for link in every_link(store)]
    return max([*claimed, *used], default=-1)


def _link(key: str) -> Link | None:
    parts = key.rsplit("/", 1)[-1].removesuffix(".json").split("-")
    if len(parts) != 3 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return Link(int(parts[0]), int(parts[1]), parts[2], key)
