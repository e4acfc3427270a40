"""Promises: the kernel is attention under the spelt-out mask, forward and backward, for any tree, width and number of threads."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from etude.models import span_attention as module
from etude.models.span_attention import dense_attention, span_attention, span_mask

SHAPES = [
    (2, 4, 4, 130, 48, 32),
    (1, 4, 2, 37, 20, 12),
    (2, 3, 1, 49, 5, 7),
    (3, 2, 1, 1, 8, 8),
    (1, 1, 1, 97, 16, 64),
    (1, 2, 2, 48, 24, 16),
]
"""B, H, G, S, K, V: widths and lengths on and off the kernel's blocks of 16, 24 and 48."""


def random_reach(rows: int, length: int, seed: int) -> Tensor:
    """Random forests: a run of positions, then children inside it."""
    rng = random.Random(seed)
    reach = torch.zeros(rows, length, dtype=torch.int32)

    def grow(row: int, start: int, end: int) -> None:
        while start < end:
            stop = start + rng.randint(1, end - start)
            run = rng.randint(1, stop - start)
            reach[row, start : start + run] = stop + rng.choice([0, 0, length]) * (stop == length)
            grow(row, start + run, stop)
            start = stop

    for row in range(rows):
        grow(row, 0, length)
    return reach


def results(function: object, inputs: tuple[Tensor, ...], reach: Tensor, gradient: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_(True) for tensor in inputs]
    out = function(*leaves, reach, 0.3)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def made(shape: tuple[int, ...], seed: int = 0) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    batch, heads, groups, length, key_dim, value_dim = shape
    torch.manual_seed(seed)
    inputs = (
        torch.randn(batch, heads, length, key_dim),
        torch.randn(batch, groups, length, key_dim),
        torch.randn(batch, groups, length, value_dim),
    )
    return inputs, random_reach(batch, length, seed), torch.randn(batch, heads, length, value_dim)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradients_are_those_of_float64_under_the_mask(shape: tuple[int, ...], seed: int) -> None:
    inputs, reach, gradient = made(shape, seed)
    assert module._library() is not None, "the kernel is what is tested here"
    expected = results(dense_attention, tuple(tensor.double() for tensor in inputs), reach, gradient.double())
    for ours, theirs in zip(results(span_attention, inputs, reach, gradient), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-5)


def test_the_mask_is_the_definition() -> None:
    reach = random_reach(2, 23, 1)
    mask = span_mask(reach)
    for row in range(2):
        for query in range(23):
            for key in range(23):
                assert bool(mask[row, query, key]) == (key <= query < int(reach[row, key]))


def test_the_number_of_threads_changes_no_bit() -> None:
    inputs, reach, gradient = made(SHAPES[0])
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(results(span_attention, inputs, reach, gradient))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_what_is_not_seen_changes_nothing_however_large() -> None:
    """A document's outputs and gradients do not move when its neighbour's values explode."""
    inputs, _, gradient = made((1, 2, 2, 60, 16, 16))
    reach = torch.tensor([[30] * 30 + [60] * 30], dtype=torch.int32)
    gradient[:, :, 30:] = 0.0
    wild = tuple(torch.cat((tensor[:, :, :30], 1e4 * tensor[:, :, 30:]), dim=2) for tensor in inputs)
    for calm, loud in zip(
        results(span_attention, inputs, reach, gradient), results(span_attention, wild, reach, gradient), strict=True
    ):
        assert torch.equal(calm[:, :, :30], loud[:, :, :30])
        assert torch.isfinite(loud).all()


def test_scores_far_apart_do_not_overflow() -> None:
    inputs, reach, gradient = made(SHAPES[1])
    inputs = tuple(60.0 * tensor for tensor in inputs)
    expected = results(dense_attention, tuple(tensor.double() for tensor in inputs), reach, gradient.double())
    for ours, theirs in zip(results(span_attention, inputs, reach, gradient), expected, strict=True):
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=2e-2)


def test_without_a_compiler_pytorch_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, reach, gradient = made(SHAPES[1])
    native = results(span_attention, inputs, reach, gradient)
    monkeypatch.setattr(module, "_library", lambda: None)
    for ours, theirs in zip(native, results(span_attention, inputs, reach, gradient), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
