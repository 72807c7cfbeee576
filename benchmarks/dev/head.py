"""Time and peak of the mean loss of a large vocabulary beside torch's own in chunks, forward and backward: `make bench-head`.

float32, one thread, gradients allocated before the step. Variants run interleaved: of times only the ratio to torch's chunks
means anything, and only within one run. Peak bytes are exact. Writes a CSV, and the table into the docs.
"""

from __future__ import annotations

import argparse
import csv
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.benchmarks.report import with_part
from ckptkern.memory import peak_memory

MIB = 2**20
SIZES = ((1024, 256, 8000), (2048, 512, 16000), (4096, 512, 32000), (2048, 1024, 50257), (8192, 256, 32000))
TORCHS = "torch, in chunks"
WORKSPACE = "8MiB"
HEADER = ("tokens", "features", "classes", "variant", "seconds", "ratio", "peak_bytes")
BEGIN, END = "<!-- head:begin -->", "<!-- head:end -->"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # x, weight, target


def plain(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def ours(recompute: str, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return ckptkern.linear_cross_entropy(x, weight, target, recompute=recompute, workspace=WORKSPACE)


def variants() -> dict[str, Loss]:
    found: dict[str, Loss] = {"eager": plain}
    if hasattr(nn, "LinearCrossEntropyOptions"):
        found[TORCHS] = functools.partial(F.linear_cross_entropy, options=nn.LinearCrossEntropyOptions())
    for mode in ("full", "none"):
        found[f'ckptkern, "{mode}", {WORKSPACE.replace("MiB", " MiB")}'] = functools.partial(ours, mode)
    return found


def rows_of(tokens: int, features: int, classes: int, rounds: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, features), torch.randn(classes, features) / features**0.5
    target = torch.randint(classes, (tokens,))
    for one in (x, weight):
        one.requires_grad_().grad = torch.zeros_like(one)
    peaks, seconds = {}, {name: [] for name in variants()}
    for turn in range(rounds + 1):  # the first counts bytes, and warms up
        for name, loss in variants().items():
            if turn == 0:
                with peak_memory("cpu") as peak:
                    loss(x, weight, target).backward()
                peaks[name] = peak.bytes
                continue
            start = time.thread_time()
            loss(x, weight, target).backward()
            seconds[name].append(time.thread_time() - start)
    medians = {name: statistics.median(one) for name, one in seconds.items()}
    ratios = {name: round(one / medians[TORCHS], 3) for name, one in medians.items()}
    return [
        dict(zip(HEADER, (tokens, features, classes, name, round(one, 3), ratios[name], peaks[name]), strict=True))
        for name, one in medians.items()
    ]


def table(rows: list[dict[str, object]]) -> str:
    lines = ["| tokens × features × classes | variant | time | peak, MiB |", "|---|---|---:|---:|"]
    for row in rows:
        size = f"{row['tokens']:,} × {row['features']:,} × {row['classes']:,}"
        lines.append(f"| {size} | {row['variant']} | {row['ratio']:.2f} | {row['peak_bytes'] / MIB:,.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dev.head", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="timed steps of each, of which the median counts (default: 3)"
    )
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="of the sizes, the first so many (default: all)")
    parser.add_argument("--out", type=Path, help="the CSV to write")
    parser.add_argument("--page", type=Path, help="the page whose table is replaced")
    given = parser.parse_args()
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        parser.error(f"wanted torch 2.13 or later, whose loss in chunks all is compared with, not {torch.__version__}")
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for size in SIZES[: given.sizes]:
        rows += rows_of(*size, given.rounds)
        print(table(rows[-len(variants()) :]), flush=True)
        if given.out:
            with given.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, HEADER, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    if given.page:
        given.page.write_text(with_part(given.page, BEGIN, table(rows), END))


if __name__ == "__main__":
    main()
