"""An engine's end of the chain: rebuilds a version from what it holds or from a base, and believes nothing unverified."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

from etude.base.errors import WeightSyncError
from etude.base.records import PolicyVersion, WeightFile, WeightManifest
from etude.weights.codec import State, StateDict, apply
from etude.weights.content import content_hash
from etude.weights.garbage import register
from etude.weights.manifests import Link, live_links, read_manifest
from etude.weights.store import ObjectStore, sha256

READS = 2
"""How often a damaged object is read before another way is taken."""

Held = tuple[PolicyVersion, State]
"""A version and its state. The state is never changed."""


@dataclass(frozen=True)
class FetchReport:
    """How a version was rebuilt."""

    version: PolicyVersion
    from_held: bool
    """Built on what the caller held; False: from a base."""
    num_files: int
    num_bytes: int
    """Downloaded by the way that worked."""
    seconds: float
    repaired: tuple[str, ...]
    """What was wrong with the ways that were tried before; empty when nothing was."""


@dataclass(frozen=True)
class _Way:
    """A start (what is held, or nothing before a base) and the manifests to apply, in order."""

    from_held: bool
    manifests: tuple[WeightManifest, ...]

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.manifests)


class WeightSubscriber:
    """Reads versions from a store. Keeps no weights: the caller passes what it holds.

    With a ``name`` it registers what it needs before it reads (:mod:`etude.weights.garbage`), so that a collector of the writer
    never takes it away; it then has to be able to write to the store.
    """

    def __init__(self, store: ObjectStore, name: str | None = None) -> None:
        self.store, self.name = store, name
        self.report: FetchReport | None = None
        """How the last :meth:`fetch` went."""

    def latest(self) -> PolicyVersion | None:
        """Newest published version whose manifest can be read, or None. Raises WeightSyncError when the store is silent."""
        for link in reversed(live_links(self.store)):
            try:
                return read_manifest(self.store, link).version
            except WeightSyncError:
                continue  # torn: the version before it is the newest
        return None

    def fetch(self, version: PolicyVersion, held: Held | None = None) -> StateDict:
        """The state of ``version``; the SHA-256 of every object and the content hash of the result were checked.

        Ways are tried by the bytes they need: from ``held`` along the deltas, or from a base. A corrupt or missing object is
        named in :attr:`report` when another way goes round it, else in the WeightSyncError that is raised.
        """
        clock = time.monotonic()
        problems: list[str] = []
        if self.name is not None:
            self._register(version, held)
        links = live_links(self.store)
        target = self._manifests(links, version, problems)
        if not target:
            reason = (
                problems[0] if problems else f"it is not there; the newest is {links[-1].version if links else None}"
            )
            raise WeightSyncError(f"weights: version {version} cannot be had from {self.store.location}: {reason}")
        walk = self._walk(links, version, held, problems)
        for way in itertools.chain(_nearest(walk, held), (way for _, _, ways in walk for way in ways)):
            try:
                state = self._rebuild(held[1] if way.from_held and held else {}, way.manifests, problems)
                if content_hash(state) != target[0].content_hash:
                    raise WeightSyncError(
                        f"weights: version {version} does not hash to its manifest {_start(way, version)}"
                    )
            except WeightSyncError as error:
                problems.append(str(error))
                continue
            files = sum(len(manifest.files) for manifest in way.manifests)
            seconds = time.monotonic() - clock
            if self.name is not None:
                register(self.store, self.name, version)
            self.report = FetchReport(version, way.from_held, files, way.num_bytes, seconds, tuple(problems))
            return state
        raise WeightSyncError(f"weights: version {version} cannot be rebuilt: {'; '.join(dict.fromkeys(problems))}")

    def _register(self, version: PolicyVersion, held: Held | None) -> None:
        """Claim the way from what is held, or, where that was collected, the wanted version alone."""
        assert self.name is not None
        if held is not None and held[0] < version:
            try:
                register(self.store, self.name, held[0])
                return
            except WeightSyncError:
                pass  # the deltas from there on are gone; a base leads to the wanted version
        register(self.store, self.name, version)

    def _walk(
        self, links: list[Link], version: PolicyVersion, held: Held | None, problems: list[str]
    ) -> Iterator[tuple[PolicyVersion, int, list[_Way]]]:
        """Back along the deltas: (version reached, bytes from there on, ways that start there)."""
        at, chain = version, tuple[WeightManifest, ...]()
        while True:
            here = self._manifests(links, at, problems)
            ways = [_Way(True, chain)] if held is not None and held[0] == at else []
            ways += [_Way(False, (manifest, *chain)) for manifest in here if manifest.parent is None]
            yield at, _num_bytes(chain), ways
            delta = next((manifest for manifest in here if manifest.parent is not None), None)
            if delta is None or delta.parent is None:
                return
            at, chain = delta.parent, (delta, *chain)
            if not any(link.version == at for link in links):
                problems.append(f"weights: version {delta.version} builds on {at}, whose manifest is missing")

    def _manifests(self, links: list[Link], version: PolicyVersion, problems: list[str]) -> list[WeightManifest]:
        """The readable manifests of a version: its base, its delta, or both."""
        found = []
        for link in links:
            if link.version == version:
                try:
                    found.append(read_manifest(self.store, link))
                except WeightSyncError as error:
                    problems.append(str(error))
        return found

    def _rebuild(self, start: State, manifests: tuple[WeightManifest, ...], problems: list[str]) -> StateDict:
        state = dict(start)
        for manifest in manifests:
            for file in manifest.files:
                data = self._object(file, manifest.version, problems)
                state = apply(state, data, verify=False)  # the content hash of the result covers every tensor
        return state

    def _object(self, file: WeightFile, version: PolicyVersion, problems: list[str]) -> bytes:
        """The file, read again once where it came damaged: it may be the way that is faulty and not the store."""
        for attempt in range(READS):
            data = self.store.get(file.key)
            if sha256(data) == file.sha256:
                return data
            if attempt + 1 < READS:
                problems.append(f"weights: object {file.key} of version {version} came corrupt; it was read again")
        raise WeightSyncError(f"weights: object {file.key} of version {version} is corrupt")


def _nearest(walk: Iterator[tuple[PolicyVersion, int, list[_Way]]], held: Held | None) -> list[_Way]:
    """The ways worth comparing, cheapest first; what lies further back on ``walk`` is only good for repair."""
    near: list[_Way] = []
    for at, cost, ways in walk:
        near += ways
        if near and (held is None or at <= held[0] or cost >= min(way.num_bytes for way in near)):
            break
    return sorted(near, key=lambda way: (way.num_bytes, not way.from_held))


def _num_bytes(manifests: tuple[WeightManifest, ...]) -> int:
    return sum(file.num_bytes for manifest in manifests for file in manifest.files)


def _start(way: _Way, version: PolicyVersion) -> str:
    if way.from_held:
        return "when built on the held state"
    return (
        f"when built from the base of version {way.manifests[0].version}" if way.manifests else f"of version {version}"
    )
