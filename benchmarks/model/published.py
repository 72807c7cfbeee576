"""The cost model beside what others have published: the same sizes, estimated for the GPU that they measured on.

What they published was not run here. Where it is eager PyTorch's time, the model's own error shows: the two should be equal.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptkern.benchmarks.cases import CASES as BENCHMARKED
from ckptkern.benchmarks.cases import EAGER, Case, Item, Maker, Size, lm_head_loss, variants
from ckptkern.benchmarks.models import LMHeadLoss
from ckptkern.benchmarks.report import with_part

from .estimate import total
from .rates import GPUS
from .sheet import codes_of
from .trace import build, peak, step

HEADER = ("source", "gpu", "case", "part", "variant", "ms", "tflops", "peak_mib", "note")
BEGIN, END = "<!-- published:begin -->", "<!-- published:end -->"
STEP, FORWARD, BACKWARD = "forward + backward", "forward", "backward"
CHUNKED = "ckptkern full, 256 MiB"  # the workspace of backward; otherwise a 32nd of the GPU's memory


class Figure(NamedTuple):
    """One line of the table. tflops: of the FLOPs that a group counts, so that ways with more matmuls compare. mib: peak."""

    source: str
    variant: str
    ms: float | None = None
    tflops: float | None = None
    mib: float | None = None
    note: str = ""


class Group(NamedTuple):
    """What was published of one size on one GPU. flops: what its TFLOP/s count."""

    gpu: str
    item: Item
    part: str
    flops: int
    figures: Sequence[Figure]

    def complete(self, one: Figure) -> Figure:
        """With TFLOP/s from the time, or the time from TFLOP/s."""
        if one.ms is None:
            return one._replace(ms=1e3 * self.flops / (1e12 * one.tflops))
        return one._replace(tflops=1e3 * self.flops / (1e12 * one.ms))


def _head(tokens: int, width: int, classes: int) -> Item:
    case = Case(
        f"linear_cross_entropy-V{classes}", lambda d: LMHeadLoss(d, classes), lm_head_loss, {"cuda": [Size(width, tokens)]}, 1,
        modes=("none", "full"), baselines={CHUNKED: lambda model, x: lm_head_loss(model, "full", "256MiB")},
    )  # fmt: skip
    return Item(case, case.sizes["cuda"][0], 1)


def _experts(tokens: int) -> Item:
    (case,) = (case for case in BENCHMARKED if case.name == "moe_mlp-silu")
    return Item(case, Size(2048, tokens), 1)


def _of_head(gpu: str, part: str, sizes: tuple[int, int, int], matmuls: int, figures: Sequence[Figure]) -> Group:
    tokens, width, classes = sizes
    return Group(gpu, _head(*sizes), part, 2 * matmuls * tokens * width * classes, figures)


def _of_experts(part: str, matmuls: int, figures: Sequence[Figure]) -> Group:
    """Qwen3-30B-A3B's experts, 32,768 tokens on an H100; a matmul: one of the three matrices of an expert."""
    return Group("h100", _experts(32768), part, 2 * matmuls * 32768 * 8 * 2048 * 768, figures)


CCE = functools.partial(Figure, "arXiv 2411.09009, table 1")
TRL = functools.partial(Figure, "huggingface/trl#6858")
LIGER_EXPERTS = functools.partial(Figure, "linkedin/Liger-Kernel#1294", note="the highest of several sizes")
VEOMNI = functools.partial(Figure, "ByteDance-Seed/VeOmni#460")
TRL_LOG_PROBS = functools.partial(Figure, "huggingface/trl#7244")
GIB = 1024


def _backward(cute: float, triton: float) -> list[Figure]:
    of = functools.partial(
        Figure, "linkedin/Liger-Kernel#1422", note="three matmuls: two would be above the GPU's peak"
    )
    return [of("Liger, CuTe", tflops=cute), of("verl, Triton", tflops=triton)]


GROUPS = (
    _of_head("a100", STEP, (8192, 2304, 256000), 3, [
        CCE("eager", 207, mib=28000), CCE("torch.compile", 143, mib=16000), CCE("8 chunks", 170, mib=9631),
        CCE("Liger", 303, mib=1474), CCE("CCE without filter", 362),
        CCE("CCE", 135, mib=1164, note="skips small gradients"),
    ]),
    _of_head("h100", STEP, (16384, 2048, 248320), 3, [
        TRL("eager, 16-bit logits", 137.00, mib=47.55 * GIB), TRL("chunks of tokens", 224.39, mib=19.67 * GIB),
        TRL("Liger", 321.16, mib=6.05 * GIB), TRL("CCE", 92.55, mib=3.09 * GIB, note="skips small gradients"),
    ]),
    _of_head("h100", STEP, (8192, 4096, 151936), 3, [
        TRL_LOG_PROBS("eager", 59, mib=19.9 * GIB), TRL_LOG_PROBS("chunks of tokens", 167, mib=13.1 * GIB),
        TRL_LOG_PROBS("Liger", 192, mib=6.1 * GIB),
    ]),
    _of_head("h200", BACKWARD, (8192, 2048, 65536), 3, _backward(661.4, 375.2)),
    _of_head("h200", BACKWARD, (2048, 4096, 131072), 3, _backward(767.9, 445.2)),
    _of_head("h200", BACKWARD, (8192, 4096, 131072), 3, _backward(762.8, 510.6)),
    _of_experts(FORWARD, 3, [
        VEOMNI("torch's grouped_mm", 10.218), VEOMNI("VeOmni, Triton", 11.502), LIGER_EXPERTS("Liger, Triton", tflops=501),
    ]),
    _of_experts(STEP, 9, [LIGER_EXPERTS("Liger, Triton", tflops=413)]),
)  # fmt: skip


def _makers(item: Item) -> dict[str, Maker]:
    return {name: make for name, make in variants(item.case).items() if name == EAGER or name.startswith("ckptkern")}


def estimated(groups: Iterable[Group] = GROUPS, workers: int = 2) -> list[tuple[Group, list[Figure]]]:
    """Each group with its figures, the published ones first, then the model's of eager and of ours."""
    traced: dict[tuple[str, str], dict] = {}
    for group in groups:
        if (group.gpu, group.item.name) not in traced:
            model, x = build(group.item)
            gpu, makers = GPUS[group.gpu], _makers(group.item)
            traced[group.gpu, group.item.name] = {
                variant: (step(gpu, make, model, x), peak(gpu, make, model, x)) for variant, make in makers.items()
            }
    codes = {}
    for name in {name for name, _ in traced}:
        steps = {
            (case, variant): one
            for (gpu, case), found in traced.items()
            if gpu == name
            for variant, (one, _) in found.items()
        }
        codes[name] = codes_of(GPUS[name], steps, workers)
    found = []
    for group in groups:
        own = []
        for variant, (one, most) in traced[group.gpu, group.item.name].items():
            launches = {STEP: one.launches, FORWARD: one.forward, BACKWARD: one.backward}[group.part]
            ms = 1e3 * total(launches, GPUS[group.gpu], codes[group.gpu]).seconds
            own.append(Figure("cost model", variant, ms, mib=most / 2**20 if group.part == STEP else None))
        found.append((group, [group.complete(one) for one in (*group.figures, *own)]))
    return found


def write(found: Sequence[tuple[Group, list[Figure]]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for group, figures in found:
            for one in figures:
                numbers = ("" if n is None else f"{n:.5g}" for n in (one.ms, one.tflops, one.mib))
                writer.writerow((one.source, group.gpu, group.item.name, group.part, one.variant, *numbers, one.note))


def table(path: Path) -> str:
    """The markdown table of a file of `write`."""
    lines = ["| | ms | TFLOP/s | peak, MiB | source |", "|---|---|---|---|---|"]
    before = None
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            group = f"{row['gpu'].upper()}, {row['case']}, {row['part']}"
            if group != before:
                lines.append(f"| **{group}** | | | | |")
            before = group
            numbers = [f"{float(row[name]):.{digits}f}" if row[name] else "" for name, digits in
                       (("ms", 1), ("tflops", 0), ("peak_mib", 0))]  # fmt: skip
            source = "; ".join(filter(None, (row["source"], row["note"])))
            lines.append(f"| {row['variant']} | {' | '.join(numbers)} | {source} |")
    return "\n".join(lines)


def put_into(page: Path, text: str) -> None:
    """Between the page's markers. Raises ValueError where it has none."""
    page.write_text(with_part(page, BEGIN, text, END))
