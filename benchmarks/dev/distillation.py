"""Time and peak of distilling one head into another, beside PyTorch's logits, Liger's chunks and TRL's: forward and backward.

    python -m benchmarks.dev.distillation --out OUT.csv --page docs/how-to/distillation.md

float32, one thread, gradients allocated before the step. Variants run interleaved: of times only the ratio to eager PyTorch
means anything, and only within one run. Peak bytes are exact. A library that is not installed is left out.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import ckptkern
from ckptkern.benchmarks.report import with_part
from ckptkern.memory import peak_memory

MIB = 2**20
TOKENS, FEATURES, CLASSES = 2048, 512, 32000
BETAS = {0.0: "forward KL", 0.5: "JSD"}
WORKSPACES = ("16MiB", "64MiB")
HEADER = ("tokens", "features", "classes", "beta", "variant", "seconds", "ratio", "peak_bytes")
BEGIN, END = "<!-- distillation:begin -->", "<!-- distillation:end -->"


class Heads(NamedTuple):
    """Hidden states [TOKENS, FEATURES] and weights [CLASSES, FEATURES]."""

    x: Tensor
    w: Tensor
    teacher_x: Tensor
    teacher_w: Tensor


Loss = Callable[[Heads, float], Tensor]  # and beta


def plain(t: Heads, beta: float) -> Tensor:
    with torch.no_grad():
        log_p = F.log_softmax(F.linear(t.teacher_x, t.teacher_w), -1)
    log_q = F.log_softmax(F.linear(t.x, t.w), -1)
    if beta == 0:
        return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    parts = (F.kl_div(log_m, one, reduction="batchmean", log_target=True) for one in (log_p, log_q))
    return sum(share * part for share, part in zip((beta, 1 - beta), parts, strict=True))


def ligers(module, t: Heads, beta: float) -> Tensor:
    loss = module.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False)
    return loss(t.x, t.w, t.teacher_x, t.teacher_w, torch.zeros(len(t.x), dtype=torch.int64))


def trls(module, t: Heads, beta: float) -> Tensor:
    function = module.ChunkedDivergenceFunction
    return function.apply(t.x, t.w, None, t.teacher_x, t.teacher_w, None, beta)[0].mean()


def ours(workspace: str, t: Heads, beta: float) -> Tensor:
    return ckptkern.linear_distillation(*t, beta=beta, workspace=workspace)


def variants() -> Iterator[tuple[str, Loss]]:
    yield "eager", plain
    others = {
        "Liger's LigerFusedLinearJSDLoss": (ligers, "liger_kernel.chunked_loss"),
        "TRL's ChunkedDivergenceFunction": (trls, "trl.kernels.chunked_divergence"),
    }
    for name, (loss, module) in others.items():
        try:
            yield name, functools.partial(loss, importlib.import_module(module))
        except ImportError as error:
            print(f"without {name}: {error}")
    for size in WORKSPACES:
        yield f"ckptkern, {size.replace('MiB', ' MiB')}", functools.partial(ours, size)


def rows_of(beta: float, losses: dict[str, Loss], rounds: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    shapes = ((TOKENS, FEATURES), (CLASSES, FEATURES)) * 2
    t = Heads(*(torch.randn(shape) / (1 if shape[0] == TOKENS else FEATURES**0.5) for shape in shapes))
    for one in t[:2]:
        one.requires_grad_().grad = torch.zeros_like(one)
    peaks, seconds, values = {}, {name: [] for name in losses}, {}
    for turn in range(rounds + 1):  # the first counts bytes, and warms up
        for name, loss in losses.items():
            start = time.thread_time()
            with peak_memory("cpu") as peak:
                value = loss(t, beta)
                value.backward()
            if turn:
                seconds[name].append(time.thread_time() - start)
            values[name], peaks[name] = value.item(), peak.bytes
    if any(not math.isclose(one, values["eager"], rel_tol=1e-4) for one in values.values()):
        raise ValueError(f"the variants disagree on the loss: {values}")
    medians = {name: statistics.median(one) for name, one in seconds.items()}
    sizes = TOKENS, FEATURES, CLASSES, beta
    return [
        dict(zip(HEADER, (*sizes, name, round(one, 3), round(one / medians["eager"], 3), peaks[name]), strict=True))
        for name, one in medians.items()
    ]


def table(rows: list[dict[str, object]]) -> str:
    lines = ["| divergence | variant | time | peak, MiB |", "|---|---|---:|---:|"]
    for row in rows:
        lines.append(
            f"| {BETAS[row['beta']]} | {row['variant']} | {row['ratio']:.2f} | {row['peak_bytes'] / MIB:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dev.distillation", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="timed steps, of which the median counts (default: 3)")
    parser.add_argument("--out", type=Path, help="the CSV to write")
    parser.add_argument("--page", type=Path, help="the page whose table is replaced")
    given = parser.parse_args()
    torch.set_num_threads(1)
    losses = dict(variants())
    rows = [row for beta in BETAS for row in rows_of(beta, losses, given.rounds)]
    print(table(rows))
    if given.out:
        with given.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, HEADER, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    if given.page:
        given.page.write_text(with_part(given.page, BEGIN, table(rows), END))


if __name__ == "__main__":
    main()
