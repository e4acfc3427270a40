"""One rank's part of a version: it encodes and uploads its own tensors, and no process ever gathers the model.

    rank r      ShardWriter.write(version, its tensors) -> Shard     small: a key, digests, counts
    one rank    commit(...) of all ranks' shards                     the manifest, written last
    rank r      ShardWriter.committed()                              the next delta starts from here

The tensors are divided by name, each whole on one rank: a trainer whose parameters are split hands every tensor to its owner
alone. Where a version is not committed, every rank goes on from the last one that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etude.base.errors import WeightSyncError
from etude.base.records import PolicyVersion, WeightFile, WeightManifest
from etude.weights.codec import State, encode, encode_base
from etude.weights.content import combined, fingerprints
from etude.weights.manifests import Kind, manifest_key
from etude.weights.store import ObjectStore, sha256


@dataclass(frozen=True)
class Shard:
    """What a rank wrote. Picklable and small."""

    kind: Kind
    version: PolicyVersion
    parent: PolicyVersion | None
    file: WeightFile
    lines: dict[str, str]
    """Fingerprints of all tensors of the rank, the unchanged ones too."""
    num_changed: int
    num_elements: int


@dataclass(frozen=True)
class _Version:
    version: PolicyVersion
    state: State
    digests: dict[str, str]


class ShardWriter:
    """Keeps what its rank uploaded last and writes the difference to it."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._last: _Version | None = None
        self._written: _Version | None = None

    @property
    def version(self) -> PolicyVersion | None:
        """The version that the next delta starts from; None before the first."""
        return self._last.version if self._last else None

    def write(self, version: PolicyVersion, state: State, kind: Kind) -> Shard:
        """Encode and upload; ``state`` is kept and must not change afterwards. Raises WeightSyncError, DiskFullError."""
        last = self._last
        if kind == "delta":
            if last is None:
                raise WeightSyncError(f"weights: version {version} cannot be a delta, nothing was published before it")
            made = encode(last.state, state)
            digests = {**last.digests, **made.digests}
        else:
            made = encode_base(state)
            digests = made.digests
        checksum = sha256(made.data)
        file = WeightFile(key=f"{kind}s/{version:08d}-{checksum}", sha256=checksum, num_bytes=len(made.data))
        self.store.put(file.key, made.data)
        self._written = _Version(version, state, digests)
        elements = sum(tensor.numel() for tensor in state.values())
        parent = last.version if kind == "delta" and last is not None else None
        changed = round(made.changed_fraction * elements)
        return Shard(kind, version, parent, file, fingerprints(state, digests), changed, elements)

    def committed(self) -> None:
        """What was written last is in a manifest now."""
        if self._written is not None:
            self._last, self._written = self._written, None


def commit(store: ObjectStore, shards: Sequence[Shard], epoch: int) -> WeightManifest:
    """Write the manifest that makes the shards of all ranks a version. Raises WeightSyncError unless they belong together."""
    first = shards[0]
    kinds = {(shard.kind, shard.version, shard.parent) for shard in shards}
    lines = {name: line for shard in shards for name, line in shard.lines.items()}
    if len(kinds) > 1 or len(lines) != sum(len(shard.lines) for shard in shards):
        raise WeightSyncError(
            f"weights: the shards of version {first.version} do not belong together: {sorted(map(str, kinds))}"
        )
    manifest = WeightManifest(
        version=first.version,
        parent=first.parent,
        files=tuple(shard.file for shard in shards),
        content_hash=combined(lines),
        num_tensors=len(lines),
        changed_fraction=sum(s.num_changed for s in shards) / max(sum(s.num_elements for s in shards), 1),
        epoch=epoch,
    )
    store.put(manifest_key(first.version, epoch, first.kind), manifest.model_dump_json().encode())
    return manifest
