"""Drawing the next token of a whole batch at once.

A request's randomness is counter-based: the uniform of its i-th token is a hash of (seed, i). So what it samples does not
depend on its neighbours in the batch, on chunking, or on how often the engine was asked.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = (np.uint64(shift) for shift in (30, 27, 31, 11))


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The SplitMix64 finaliser (Steele, Lea and Flood 2014): a bijection of 64 bits with full avalanche."""
    x = (x ^ (x >> _S30)) * _MIX1
    x = (x ^ (x >> _S27)) * _MIX2
    return np.asarray(x ^ (x >> _S31))


def uniforms(seeds: NDArray[np.uint64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) a row from ``seeds [B]`` and ``counters [B]``."""
    bits = mix(mix(seeds + _GOLDEN) + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return np.asarray((bits >> _S11) * 2.0**-53)


def draw(
    logits: Tensor, temperatures: NDArray[np.float32], uniform: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(tokens, logprobs) for ``logits [B, V]``; logprobs are those of the untempered distribution (natural log).

    ``temperatures [B]``: 0 is greedy. ``uniform [B]`` in [0, 1): the token is the inverse of the tempered distribution's
    cumulative sum at that point. Sums are float64, so that rare tokens keep their exact share.
    """
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    cumulative = shifted.exp().cumsum(dim=-1, dtype=torch.float64)
    log_sum = cumulative[:, -1].log()
    if not (temperatures == 1.0).all():
        scale = torch.from_numpy(np.maximum(temperatures, 1e-6))[:, None]
        cumulative = (shifted / scale).exp_().cumsum(dim=-1, dtype=torch.float64)
    threshold = cumulative[:, -1:] * torch.from_numpy(uniform)[:, None]
    tokens = (cumulative <= threshold).sum(dim=-1)
    greedy = temperatures == 0.0
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy), shifted.argmax(dim=-1), tokens)
    chosen = shifted.gather(1, tokens[:, None]).squeeze(1)
    return tokens.numpy(), (chosen - log_sum).float().numpy()
