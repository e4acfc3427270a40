"""The formats one value at a time, straight from their definitions: slow, obvious, no torch."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# exponent 0 is subnormal; 0x7f is NaN and not in the table
E4M3 = [(c & 7) / 8 * 2.0**-6 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7) for c in range(127)]


def nearest(table: list[float], size: float) -> int:
    """Index of the nearest entry, ties to the even index, saturating. Midpoints are exact in float64."""
    right = bisect_left(table, size)
    if right == len(table):
        return right - 1
    if right == 0 or table[right] == size:
        return right
    below, above = size - table[right - 1], table[right] - size
    if below == above:
        return right if right % 2 == 0 else right - 1
    return right if above < below else right - 1


def e2m1(value: float) -> int:
    return nearest(E2M1, abs(value)) | (8 if math.copysign(1, value) < 0 else 0)


def e4m3(value: float) -> int:
    return nearest(E4M3, abs(value)) | (128 if math.copysign(1, value) < 0 else 0)


def nvfp4_row(row: np.ndarray) -> tuple[list[int], list[int], np.float32]:
    """(codes, E4M3 bits of block scales, row scale) of one float32 row."""
    if not np.isfinite(row).all():
        return [0] * len(row), [0] * (len(row) // 16), np.float32(np.nan)
    token = np.float32(np.abs(row).max()) / np.float32(2688)
    codes: list[int] = []
    scales: list[int] = []
    for start in range(0, len(row), 16):
        block = row[start : start + 16]
        bits = 0 if token == 0 else e4m3(float(np.abs(block).max() / (np.float32(6) * token)))
        scale = np.float32(E4M3[bits]) * token
        scales.append(bits)
        codes += [0 if scale == 0 else e2m1(float(x / scale)) for x in block]
    return codes, scales, token


def mxfp8_block(block: np.ndarray) -> tuple[list[int], int]:
    """(E4M3 bits, biased exponent) of one float32 block of at most 32 values."""
    if not np.isfinite(block).all():
        return [0] * len(block), 255
    exponent = -127
    while float(np.abs(block).max()) > math.ldexp(448.0, exponent):
        exponent += 1
    return [e4m3(math.ldexp(float(x), -exponent)) for x in block], exponent + 127
