"""Measures time and peak of the mean loss of a large vocabulary beside torch's own in chunks: `make bench-head`.

Forward and backward, float32, one thread, gradients allocated before the step, variants interleaved. Of times, only the ratio
to torch's chunks within one run means anything. Peak bytes are exact. Prints the table, and writes it into the docs.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.benchmarks.report import with_part

from .frontier import MIB, Row, measured

SIZES = ((2048, 512, 16000), (2048, 1024, 50257), (8192, 256, 32000))
TORCHS = "torch, in chunks"
BEGIN, END = "<!-- head:begin -->", "<!-- head:end -->"


def losses() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Returns the losses of x, weight and target, by variant."""
    ours = functools.partial(ckptkern.linear_cross_entropy, workspace="8MiB")
    return {
        "eager": lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
        TORCHS: functools.partial(F.linear_cross_entropy, options=nn.LinearCrossEntropyOptions()),
        **{f'ckptkern, "{mode}", 8 MiB': functools.partial(ours, recompute=mode) for mode in ("full", "none")},
    }


def rows_of(tokens: int, features: int, classes: int, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, features), torch.randn(classes, features) / features**0.5
    target = torch.randint(classes, (tokens,))
    for leaf in (x, weight):
        leaf.requires_grad_().grad = torch.zeros_like(leaf)
    steps = {name: functools.partial(loss, x, weight, target) for name, loss in losses().items()}
    size = f"{tokens:,} × {features:,} × {classes:,}"
    return [{"size": size} | row for row in measured(steps, rounds, TORCHS)]


def table(rows: list[Row]) -> str:
    """Returns a Markdown table with a line per size; a cell holds a variant's ratio of time and its peak."""
    lines = [
        "| tokens × features × classes | " + " | ".join(losses()) + " |",
        "|---|" + "---:|" * len(losses()),
    ]
    for size in dict.fromkeys(row["size"] for row in rows):
        cells = [f"{row['ratio']:.2f}, {row['peak_bytes'] / MIB:,.0f}" for row in rows if row["size"] == size]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.head", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="of timed steps, of which the median counts (default: 3)")
    parser.add_argument("--page", type=Path, help="the page whose table is replaced")
    args = parser.parse_args()
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        parser.error(
            f"needs torch 2.13 or later, with whose chunked loss all is compared, but this is {torch.__version__}"
        )
    torch.set_num_threads(1)
    rows = [row for size in SIZES for row in rows_of(*size, args.rounds)]
    print(table(rows))
    if args.page:
        args.page.write_text(with_part(args.page, BEGIN, table(rows), END))


if __name__ == "__main__":
    main()
