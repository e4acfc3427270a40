"""Causal attention over rows that hold several sequences: key j is seen by the queries j .. reach[j] - 1 alone.

One int32 a position says it all for packed documents (``reach``: the end of the document) and for trees of shared prefixes in
depth-first order (the end of the subtree); the form is FlashMask's (Wang et al., 2024, arXiv:2410.01359). On a CPU a kernel in C
(``native/attention.c``) skips what cannot be seen; elsewhere, and without a C compiler, the mask is spelt out for PyTorch.

Shapes: B rows, H query heads, G key heads (H a multiple of G), S positions.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from etude.base.errors import UserError
from etude.base.native.build import load

SOURCE = Path(__file__).parent / "native" / "attention.c"
_POINTER = ctypes.c_void_p


def span_attention(q: Tensor, k: Tensor, v: Tensor, reach: Tensor, scale: float) -> Tensor:
    """``q [B, H, S, K]``, ``k [B, G, S, K]``, ``v [B, G, S, V]`` -> ``[B, H, S, V]``.

    ``reach`` int32 ``[B, S]``: the first position past j that does not see key j; at least j + 1, and S or more is the end.
    """
    if q.device.type == "cpu" and q.dtype == torch.float32 and _library() is not None:
        return _SpanAttention.apply(q, k, v, reach, scale)  # type: ignore[no-any-return, no-untyped-call]
    return dense_attention(q, k, v, reach, scale)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, reach: Tensor, scale: float) -> Tensor:
    """The same by PyTorch, with the mask spelt out."""
    mask = span_mask(reach)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=k.shape[1] != q.shape[1])


def span_mask(reach: Tensor) -> Tensor:
    """bool ``[B, S, S]``: whether the query (row) sees the key (column)."""
    at = torch.arange(reach.shape[1], device=reach.device)
    return (at[None, None, :] <= at[None, :, None]) & (at[None, :, None] < reach[:, None, :])


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return load(SOURCE)
    except UserError as error:
        logging.getLogger(__name__).warning("%s; attention is computed by PyTorch, which is slower", error)
        return None


class _SpanAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, reach: Tensor, scale: float) -> Tensor:
        q, k, v, reach = q.contiguous(), k.contiguous(), v.contiguous(), reach.to(torch.int32).contiguous()
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3])
        _call("etude_attention_forward", q, v, k.shape[1], scale, (q, k, v, reach, out, lse))
        ctx.save_for_backward(q, k, v, reach, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, reach, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        tensors = (q, k, v, reach, out, lse, gradients[0].contiguous(), dq, dk, dv)
        _call("etude_attention_backward", q, v, k.shape[1], ctx.scale, tensors)
        return dq, dk, dv, None, None


def _call(name: str, q: Tensor, v: Tensor, groups: int, scale: float, tensors: tuple[Tensor, ...]) -> None:
    batch, heads, length, key_dim = q.shape
    sizes = (ctypes.c_int64 * 7)(batch, heads, groups, length, key_dim, v.shape[3], torch.get_num_threads())
    failed = getattr(_library(), name)(sizes, ctypes.c_float(scale), *(_POINTER(t.data_ptr()) for t in tensors))
    if failed:
        raise MemoryError(f"no memory for attention over rows of {length} positions")
