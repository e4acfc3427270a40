"""Attention over packed documents: the C kernel against PyTorch's scaled_dot_product_attention with the mask spelt out.

Forward and backward of four layers' worth of heads, by turns in one process; a row prints the medians and their ratio. Run::

    python benchmarks/span_attention.py [--quick] [--threads N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from etude.models.span_attention import dense_attention, span_attention

HEADS, KEY_DIM, VALUE_DIM = 4, 48, 32
SHAPES = ((12, 352, 352), (12, 352, 176), (4, 1024, 1024), (4, 1024, 256), (1, 4096, 512))
"""Rows, positions a row, positions a document."""


def seconds(function: Callable[..., Tensor], inputs: list[Tensor], reach: Tensor, gradient: Tensor) -> float:
    started = time.perf_counter()
    torch.autograd.grad(function(*inputs, reach, KEY_DIM**-0.5), inputs, gradient)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three repetitions of the first two shapes")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{'rows x positions':>18} {'document':>9} {'PyTorch ms':>11} {'kernel ms':>10} {'ratio':>6}")
    for rows, length, document in SHAPES[:2] if arguments.quick else SHAPES:
        widths = (KEY_DIM, KEY_DIM, VALUE_DIM)
        inputs = [torch.randn(rows, HEADS, length, width, requires_grad=True) for width in widths]
        gradient = torch.randn(rows, HEADS, length, VALUE_DIM)
        ends = (torch.arange(length) // document + 1) * document
        reach = ends.clamp(max=length).int().expand(rows, length).contiguous()
        found: dict[Callable[..., Tensor], list[float]] = {dense_attention: [], span_attention: []}
        for _ in range(4 if arguments.quick else 12):
            for function, times in found.items():
                times.append(seconds(function, inputs, reach, gradient))
        dense, kernel = (1e3 * statistics.median(times[1:]) for times in found.values())
        print(f"{rows:>7} x {length:<8} {document:>9} {dense:>11.1f} {kernel:>10.1f} {dense / kernel:>6.1f}")


if __name__ == "__main__":
    main()
