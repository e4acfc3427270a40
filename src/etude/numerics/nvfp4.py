"""NVFP4: E2M1 codes, an E4M3 scale per 16 values and a float32 scale per token. The whole format is in this file.

    s_token = amax(row) / (6 * 448)                    float32
    s_block = E4M3(amax(16 values) / (6 * s_token))    nearest even
    code    = E2M1(x / (s_block * s_token))            nearest even
    x'      = code * (s_block * s_token)

Source: Composer 2 report, section 6.1. Divisions are IEEE divisions: x * (1 / s) rounds twice and picks other codes near
a midpoint. The scale belongs to the token, not to the tensor: with one scale for the tensor the bytes of a row depend on
the rest of the batch, and on later tokens of its own sequence. Both lesser variants exist here for comparison only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from etude.numerics.formats import (
    E2M1_MAX,
    E4M3_MAX,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    pack_nibbles,
    unpack_nibbles,
)

BLOCK = 16
Outer = Literal["token", "tensor"]
Division = Literal["ieee", "reciprocal"]


@dataclass(frozen=True)
class NVFP4:
    """A quantised matrix of shape (rows, columns).

    codes: uint8 (rows, columns / 2), two E2M1 codes a byte, the even column in the low nibble.
    block_scales: uint8 (rows, columns / 16), bits of E4M3.
    row_scales: float32 (rows,); NaN marks a row that held a value that is not finite.
    """

    codes: Tensor
    block_scales: Tensor
    row_scales: Tensor

    def dequantise(self) -> Tensor:
        """float32 (rows, columns)."""
        scale = e4m3_decode(self.block_scales) * self.row_scales[:, None]
        blocks = e2m1_decode(unpack_nibbles(self.codes)).reshape(len(self.codes), -1, BLOCK)
        return (blocks * scale[:, :, None]).flatten(1)


def quantise(x: Tensor, *, outer: Outer = "token", division: Division = "ieee") -> NVFP4:
    """float (rows, columns) -> NVFP4; columns must be a multiple of 16, else ValueError.

    Blocks whose scale is zero get code 0. A row (with outer="tensor": the tensor) that holds an infinity or a NaN gets
    the row scale NaN and zero bytes: it reads back as NaN everywhere, and no other token is touched.
    """
    if x.ndim != 2 or x.shape[1] % BLOCK:
        raise ValueError(f"NVFP4 takes a matrix whose columns are a multiple of {BLOCK}, not {tuple(x.shape)}")
    blocks = x.to(torch.float32).reshape(len(x), -1, BLOCK)
    block_max = blocks.abs().amax(dim=2)
    row_max = block_max.amax(dim=1)
    if outer == "tensor":
        row_max = row_max.amax().expand_as(row_max)
    finite = torch.isfinite(row_max)
    row_scales = torch.where(finite, row_max / (E2M1_MAX * E4M3_MAX), torch.nan)
    # A row so small that its scale underflows has row_scales 0, and 0 / 0 or x / 0 below: those blocks become zero.
    live = (finite & (row_scales > 0))[:, None]
    block_scales = e4m3_encode(torch.where(live, block_max / (E2M1_MAX * row_scales[:, None]), 0.0))
    scale = torch.where(live, e4m3_decode(block_scales) * row_scales[:, None], 0.0)[:, :, None]
    scaled = blocks / scale if division == "ieee" else blocks * (1.0 / scale)
    codes = torch.where(scale > 0, e2m1_encode(torch.where(scale > 0, scaled, 0.0)), 0)
    return NVFP4(pack_nibbles(codes.to(torch.uint8).flatten(1)), block_scales, row_scales.contiguous())
