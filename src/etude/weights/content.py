"""The content hash of a whole state: what an engine reports and a trainer checks."""

from __future__ import annotations

import hashlib

from etude.weights.codec import State, bits


def content_hash(state: State) -> str:
    """SHA-256 over name, dtype, shape and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(bits(tensor).data)
    return digest.hexdigest()
