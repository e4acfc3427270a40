"""The content hash of a whole state: what an engine reports and a trainer checks.

It is a hash over the digests of the tensors, so that ranks can hash their own shards and a publisher only what changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from etude.weights.codec import State, digest, dtype_name


def tensor_digests(state: State) -> dict[str, str]:
    """Tensor name -> XXH3-128 of its stored bits."""
    return {name: digest(tensor) for name, tensor in state.items()}


def fingerprints(state: State, digests: Mapping[str, str] | None = None) -> dict[str, str]:
    """Tensor name -> one line of name, dtype, shape and digest.

    ``digests`` are the tensors' digests where the caller has them already (:func:`tensor_digests`); they are trusted.
    """
    known = tensor_digests(state) if digests is None else digests
    return {name: f"{name}|{dtype_name(t)}|{tuple(t.shape)}|{known[name]}\n" for name, t in state.items()}


def combined(lines: Mapping[str, str]) -> str:
    """The content hash of the state whose fingerprints these are: SHA-256 over them in the order of the names."""
    whole = hashlib.sha256()
    for name in sorted(lines):
        whole.update(lines[name].encode())
    return whole.hexdigest()


def content_hash(state: State, digests: Mapping[str, str] | None = None) -> str:
    """SHA-256 over name, dtype, shape and digest of all tensors; ``digests`` as for :func:`fingerprints`."""
    return combined(fingerprints(state, digests))
