"""Quantisers give the bytes of the scalar reference, and NVFP4 with token scales keeps rows apart."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from scalar_formats import E2M1, E4M3, e2m1, e4m3, mxfp8_block, nvfp4_row

from etude.numerics import formats, mxfp8, nvfp4


def hard_rows(rows: int, columns: int) -> torch.Tensor:
    """Random rows of many magnitudes with subnormals, zeros, ties, huge values, infinities and NaNs strewn in."""
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, columns)) * 2.0 ** random.integers(-149, 120, (rows, 1))
    x *= 2.0 ** random.integers(-12, 3, (rows, columns))
    kind = np.arange(rows) % 8
    x[kind == 0] = random.choice(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.0, 0.0], (int((kind == 0).sum()), columns)
    )
    x[kind == 1, 0] = 2688.0
    x[kind == 2, :32] = 0.0
    x[::97] = 0.0
    x[5::101, 3] = np.inf
    x[6::103, 7] = np.nan
    x[7::107, 1] = 3.4e38
    return torch.from_numpy(x.astype(np.float32))


def test_nvfp4_bytes_equal_the_scalar_reference() -> None:
    x = hard_rows(2048, 256)
    got = nvfp4.quantise(x)
    codes = formats.unpack_nibbles(got.codes).numpy()
    for i, row in enumerate(x.numpy()):
        expected = nvfp4_row(row)
        assert codes[i].tolist() == expected[0], i
        assert got.block_scales[i].tolist() == expected[1], i
        assert got.row_scales[i].numpy().tobytes() == expected[2].tobytes() or np.isnan(expected[2]), i


def test_mxfp8_bytes_equal_the_scalar_reference() -> None:
    x = hard_rows(512, 80)
    got = mxfp8.quantise(x)
    for i, row in enumerate(x.numpy()):
        for block in range(3):
            part = slice(block * 32, min(80, block * 32 + 32))
            codes, scale = mxfp8_block(row[part])
            assert got.scales[i, block] == scale, (i, block)
            assert got.codes[i, part].tolist() == codes, (i, block)


def test_elements_round_as_the_tables_say() -> None:
    edges = [np.float32(t) for table in (E2M1, E4M3) for a, b in pairwise(table) for t in (a, b, (a + b) / 2)]
    near = [np.nextafter(e, np.float32(d)) for e in edges for d in (-1e9, 1e9)]
    values = [float(v) for e in edges + near for v in (e, -e)] + [1e30, -1e30]
    x = torch.tensor(values)
    assert formats.e2m1_encode(x).tolist() == [e2m1(v) for v in values]
    assert formats.e4m3_encode(x).tolist() == [e4m3(v) for v in values]


def test_nvfp4_rows_do_not_depend_on_the_batch_and_the_tensor_scale_does() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    x[7] *= 3  # row 0 must not hold the tensor's maximum
    other = x.clone()
    other[5:] *= 100  # later tokens: causality is the same property seen along a sequence
    for outer, same in (("token", True), ("tensor", False)):
        one, two = nvfp4.quantise(x, outer=outer), nvfp4.quantise(other, outer=outer)
        alone = nvfp4.quantise(x[:1], outer=outer)
        for a, b in ((two, slice(0, 5)), (alone, slice(0, 1))):
            equal = torch.equal(one.block_scales[b], a.block_scales[b]) and torch.equal(one.codes[b], a.codes[b])
            assert (equal and torch.equal(one.row_scales[b], a.row_scales[b])) == same


def test_a_reciprocal_picks_other_codes_than_division() -> None:
    x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert not torch.equal(nvfp4.quantise(x).codes, nvfp4.quantise(x, division="reciprocal").codes)


def test_only_the_copy_scaled_along_columns_keeps_small_columns() -> None:
    """Scales are powers of two, so copies differ only where a block spans more than E4M3's range: here along rows."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(3)) * torch.logspace(-12, 12, 96)
    size = x.abs().amax(dim=0)
    assert ((mxfp8.round_columns(x) - x).abs() <= size / 16).all()
    assert not ((mxfp8.round_rows(x) - x).abs() <= size / 16).all()


def test_tensor_core_layout_puts_each_scale_at_its_documented_byte() -> None:
    scales = torch.randint(0, 256, (200, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    flat = formats.tensor_core_layout(scales)
    assert len(flat) == 256 * 8
    for r in range(200):
        for c in range(6):
            tile = (r // 128) * 2 + c // 4
            assert flat[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] == scales[r, c]


def test_a_shape_that_has_no_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        nvfp4.quantise(torch.zeros(2, 20))


def test_nvfp4_reads_back_as_code_times_scales() -> None:
    x = hard_rows(128, 64)
    got = nvfp4.quantise(x)
    back = got.dequantise()
    for i, row in enumerate(x.numpy()):
        codes, scales, token = nvfp4_row(row)
        for j, code in enumerate(codes):
            expected = np.float32(E2M1[code & 7] * (-1 if code & 8 else 1)) * (
                np.float32(E4M3[scales[j // 16]]) * token
            )
            assert back[i, j].item() == expected or (np.isnan(expected) and back[i, j].isnan()), (i, j)
