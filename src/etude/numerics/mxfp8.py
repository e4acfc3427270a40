"""MXFP8: E4M3 values with one E8M0 scale per 32, rounded up so that the largest value of a block is not clipped.

A GEMM contracts over the axis that is scaled, so the backward pass needs a copy scaled along rows and one scaled along
columns. Both are made from the high-precision tensor: one made from the other would be rounded twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from etude.numerics.formats import E8M0_NAN, e4m3_decode, e4m3_encode, e8m0_ceiling, e8m0_decode

BLOCK = 32


@dataclass(frozen=True)
class MXFP8:
    """A quantised matrix: codes uint8 (rows, columns), bits of E4M3; scales uint8 (rows, ceil(columns / 32)), E8M0."""

    codes: Tensor
    scales: Tensor

    def dequantise(self) -> Tensor:
        """float32 (rows, columns); blocks whose scale is NaN are NaN."""
        scale = e8m0_decode(self.scales).repeat_interleave(BLOCK, dim=1)[:, : self.codes.shape[1]]
        return e4m3_decode(self.codes) * scale


def quantise(x: Tensor) -> MXFP8:
    """float (rows, columns) -> MXFP8 scaled along each row; the last block may be short.

    A block that holds a value that is not finite gets the scale NaN and zero codes.
    """
    if x.ndim != 2:
        raise ValueError(f"MXFP8 takes a matrix, not {tuple(x.shape)}")
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, -columns % BLOCK)).reshape(len(x), -1, BLOCK)
    scales = e8m0_ceiling(padded.abs().amax(dim=2))
    bad = (scales == E8M0_NAN)[:, :, None]
    # A power of two: this multiplication is the division, exactly.
    inverse = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), 127 - scales.to(torch.int32))[:, :, None]
    codes = e4m3_encode(torch.where(bad, 0.0, padded * inverse))
    return MXFP8(codes.flatten(1)[:, :columns].reshape(rows, columns), scales)


def round_rows(x: Tensor) -> Tensor:
    """x as MXFP8 along rows would carry it, in x's dtype; the operand of a product that contracts over columns."""
    return quantise(x).dequantise().to(x.dtype)


def round_columns(x: Tensor) -> Tensor:
    """x as MXFP8 along columns would carry it, in x's dtype; the operand of a product that contracts over rows."""
    return quantise(x.t()).dequantise().t().to(x.dtype)
