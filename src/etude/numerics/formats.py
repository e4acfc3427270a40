"""Element formats of block-scaled numbers, vectorised: E2M1 (4 bits), E4M3 (8 bits), E8M0 (power of two).

Sources: OCP Microscaling Formats (MX) v1.0, section 5; E4M3 is the "fn" form (no infinity, NaN is 0x7f, largest 448).
Every function is elementwise, so no result depends on a neighbour. Rounding is to nearest, ties to the even code.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E8M0_BIAS = 127
E8M0_NAN = 255
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_encode(values: Tensor) -> Tensor:
    """float32 of any shape -> uint8 codes 0..15 of the same shape: sign in bit 3, saturating at 6.

    A tie goes to the even code, so midpoints alternate between > and >=. NaN has no code: callers keep it out.
    """
    size = values.abs()
    code = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for midpoint in (0.25, 1.25, 2.5, 5.0):
        code += size > midpoint
    for midpoint in (0.75, 1.75, 3.5):
        code += size >= midpoint
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 -> float32 of the same shape, exact."""
    table = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], device=codes.device)
    return table[codes.long()]


def e4m3_encode(values: Tensor) -> Tensor:
    """float32 -> uint8 bits of E4M3, saturating at 448; NaN -> 0x7f or 0xff."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(bits: Tensor) -> Tensor:
    """uint8 bits of E4M3 -> float32, exact."""
    return bits.view(torch.float8_e4m3fn).to(torch.float32)


def e8m0_ceiling(block_max: Tensor) -> Tensor:
    """Biased exponent (uint8) of the least power of two that brings `block_max` (float32, >= 0) to 448 or less.

    2^ceil(log2(amax / 448)), computed from the bits: 448 is 1.75 * 2^8, so the answer is exact. A zero maximum gives 0
    (2^-127), a value that is not finite 255 (NaN).
    """
    mantissa, exponent = torch.frexp(block_max)
    biased = exponent.to(torch.int32) - 9 + (mantissa > 0.875).to(torch.int32) + E8M0_BIAS
    biased = torch.where(block_max == 0, 0, biased.clamp(0, 254))
    return torch.where(torch.isfinite(block_max), biased, E8M0_NAN).to(torch.uint8)


def e8m0_decode(biased: Tensor) -> Tensor:
    """Biased exponents (uint8) -> float32 powers of two, exact; 255 -> NaN."""
    power = torch.ldexp(torch.ones_like(biased, dtype=torch.float32), biased.to(torch.int32) - E8M0_BIAS)
    return torch.where(biased == E8M0_NAN, torch.nan, power)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes (..., n) with n even -> uint8 (..., n / 2): the even column lies in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`: uint8 (..., n / 2) -> uint8 (..., n)."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def tensor_core_layout(scales: Tensor) -> Tensor:
    """Block scales (rows, blocks), one byte each, in the order in which tcgen05 reads them; flat, zero padded.

    Tiles of 128 rows by 4 blocks, each tile stored as 32 x 4 x 4: row r, block c of a tile lies at byte
    (r % 32) * 16 + (r // 32) * 4 + c (NVIDIA cuBLAS documentation, "1D block scaling factors layout").
    """
    rows, blocks = scales.shape
    padded = scales.new_zeros((-(-rows // 128) * 128, -(-blocks // 4) * 4))
    padded[:rows, :blocks] = scales
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten()
