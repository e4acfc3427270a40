"""What may be deleted from a store, and who is asked first.

A subscriber that must not lose a version *registers* it: an object ``subscribers/NAME`` says which version it holds or wants,
and for how long that is to be believed. The collector keeps

* everything from the newest base at or before each registered version on, and
* the newest ``keep_bases`` bases and all that follows, so that a late subscriber starts at the newest base and a damaged base
  can be gone round by the one before;

and deletes manifests before the objects they name, so that a reader never meets a version that half exists. No conditional
write is needed for "never": the collector announces its horizon *before* it looks at the registrations once more, and a
subscriber looks at the horizon *after* it has registered. Whichever comes second sees the other (the store has to show a write
to every later read and list, as folders, S3, GCS and Azure do): the deletion is left out, or the registration is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from etude.base.errors import WeightSyncError
from etude.base.records import PolicyVersion, Record
from etude.weights.manifests import Link, every_link, live_links, read_manifest
from etude.weights.store import ObjectStore

SUBSCRIBERS = "subscribers"
HORIZON = "horizon"
FOLDERS = ("bases", "deltas")
LEASE_SECONDS = 3600.0
Clock = Callable[[], float]
"""Seconds since the epoch; clocks of collector and subscribers may differ by much less than a lease."""


class Registration(Record):
    """A subscriber's claim."""

    version: PolicyVersion
    """The oldest version it needs: what it holds, or what it is about to fetch."""
    until: float
    """Seconds since the epoch when the claim ends by itself, since a subscriber may die."""


@dataclass(frozen=True)
class Collected:
    """What a collection did."""

    horizon: PolicyVersion
    """Versions below it are gone."""
    deleted: tuple[str, ...]
    """Keys, in the order in which they went."""
    kept_for: tuple[str, ...]
    """Subscribers that held the horizon back."""


# --------------------------------------------------------------------------------------------------- subscribers


def register(
    store: ObjectStore,
    name: str,
    version: PolicyVersion,
    *,
    lease_seconds: float = LEASE_SECONDS,
    clock: Clock = time.time,
) -> None:
    """Keep ``version`` and all later ones for ``lease_seconds``; a later call of the same name replaces the claim.

    Raises WeightSyncError when the version is being collected or gone; the claim is withdrawn then.
    """
    if not name or "/" in name:
        raise WeightSyncError(f"weights: a subscriber cannot be called {name!r}; leave out slashes")
    claim = Registration(version=version, until=clock() + lease_seconds)
    store.put(f"{SUBSCRIBERS}/{name}", claim.model_dump_json().encode())
    if version < _horizon(store):
        store.delete(f"{SUBSCRIBERS}/{name}")
        raise WeightSyncError(
            f"weights: version {version} was collected in {store.location}; start from the newest base"
        )


def withdraw(store: ObjectStore, name: str) -> None:
    """Give up a claim; one that is not there is no error."""
    store.delete(f"{SUBSCRIBERS}/{name}")


# ----------------------------------------------------------------------------------------------------- collector


def collect(store: ObjectStore, *, keep_bases: int = 2, clock: Clock = time.time) -> Collected:
    """Delete what nobody needs. To be called by the writer alone. Raises WeightSyncError when the store fails; harmless then."""
    links = live_links(store)
    bases = sorted({link.version for link in links if link.kind == "base" and _readable(store, link)})
    if not bases:
        return Collected(0, (), ())
    newest = bases[-max(keep_bases, 1) :][0]
    horizon = min([newest, *(_base_before(bases, version) for version in _claims(store, clock).values())])
    if horizon > _horizon(store):
        store.put(f"{HORIZON}/{horizon:08d}", b"")
    claims = _claims(store, clock)  # once more: who registered meanwhile has seen the horizon, or is seen here
    horizon = min([horizon, *(_base_before(bases, version) for version in claims.values())])
    kept_for = tuple(sorted(name for name, version in claims.items() if _base_before(bases, version) < newest))
    condemned = [link.key for link in every_link(store) if link.version < horizon]
    condemned += _unreferenced(store, horizon, bases[-1])
    announced = store.list(HORIZON)
    condemned += sorted(announced)[:-1]
    for key in condemned:
        store.delete(key)
    return Collected(horizon, tuple(condemned), kept_for)


def reopen(store: ObjectStore, version: PolicyVersion) -> None:
    """A new writer goes on at ``version``: what it publishes from there on was never collected, whatever a replaced line had."""
    above = [key for key in store.list(HORIZON) if int(key.rsplit("/", 1)[1]) > version]
    if above:
        store.put(f"{HORIZON}/{version:08d}", b"")
    for key in above:
        store.delete(key)


def _unreferenced(store: ObjectStore, horizon: PolicyVersion, newest_base: PolicyVersion) -> list[str]:
    """Objects of versions below the horizon, and those that an interrupted upload left behind.

    An object whose version is older than the newest base gets no manifest any more, for versions rise. It stays when one of the
    version's manifests cannot be read, since that might name it.
    """
    named: set[str] = set()
    unreadable: set[PolicyVersion] = set()
    for link in every_link(store):
        if link.version >= horizon:
            try:
                named.update(file.key for file in read_manifest(store, link).files)
            except WeightSyncError:
                unreadable.add(link.version)
    found = []
    for folder in FOLDERS:
        for key in store.list(folder):
            version = int(key.rsplit("/", 1)[1].split("-")[0])
            orphan = version < newest_base and key not in named and version not in unreadable
            if version < horizon or orphan:
                found.append(key)
    return found


def _readable(store: ObjectStore, link: Link) -> bool:
    try:
        return all(store.exists(file.key) for file in read_manifest(store, link).files)
    except WeightSyncError:
        return False


def _base_before(bases: list[PolicyVersion], version: PolicyVersion) -> PolicyVersion:
    """The newest base from which ``version`` can be rebuilt; 0 where none is left, so that nothing is deleted for it."""
    return max((base for base in bases if base <= version), default=0)


def _claims(store: ObjectStore, clock: Clock) -> dict[str, PolicyVersion]:
    """Version by subscriber. A claim that cannot be read keeps everything: its lease is unknown."""
    claims = {}
    for key in store.list(SUBSCRIBERS):
        try:
            claim = Registration.model_validate_json(store.get(key))
        except ValueError:
            claims[key.rsplit("/", 1)[1]] = 0
            continue
        except WeightSyncError:
            if store.exists(key):
                raise
            continue  # withdrawn meanwhile
        if claim.until > clock():
            claims[key.rsplit("/", 1)[1]] = claim.version
    return claims


def _horizon(store: ObjectStore) -> PolicyVersion:
    return max((int(key.rsplit("/", 1)[1]) for key in store.list(HORIZON)), default=0)
