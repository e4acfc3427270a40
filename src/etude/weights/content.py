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


def content_hash(state: State, digests: Mapping[str, str] | None = None) -> str:
    """SHA-256 over name, dtype, shape and bytes of all tensors, in the order of their names.

    ``digests`` are the tensors' digests where the caller has them already (:func:`tensor_digests`); they are trusted.
    """
    whole = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        of_bytes = digests[name] if digests is not None else digest(tensor)
        whole.update(f"{name}|{dtype_name(tensor)}|{tuple(tensor.shape)}|{of_bytes}\n".encode())
    return whole.hexdigest()
