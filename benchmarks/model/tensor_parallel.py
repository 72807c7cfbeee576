"""Cost model: one Llama layer on several GPUs, this package's TensorParallel beside torch's styles with its checkpoint.

Both run on meta tensors over a process group that communicates nothing, so the collectives, and what runs before each is waited
for, are those of the code. torch's layer gathers or sums x once for q, k and v, and once for gate and up, which its plans for
one linear layer after another do not. Its norms hold plain parameters, whose gradients under sequence parallelism are left out:
one all-reduce of 2 d numbers, which ours has.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import ckptkern
from ckptkern.benchmarks.models import LlamaLayer
from ckptkern.benchmarks.report import with_part
from ckptkern.parallel import TensorParallel

from .estimate import Codes, estimate
from .links import LINKS, Link, Timeline, timeline
from .rates import GPU, GPUS
from .sheet import codes_of
from .trace import Trace, step

RANKS = (2, 4, 8)
TOKENS = 8192
OVER = {"h200": ["nvlink4"], "h100": ["nvlink4", "pcie5", "400gb"], "a100": ["nvlink3", "pcie4"]}
TORCH = "torch checkpoint"
VARIANTS = (TORCH, "ckptkern selective", "ckptkern full")
HEADER = (
    "source", "gpu", "link", "model", "ranks", "sequence_parallel", "variant", "collectives", "collectives_ms", "hidden",
    "ms_without_overlap", "ms", "ratio",
)  # fmt: skip
BEGIN, END = "<!-- tensor-parallel:begin -->", "<!-- tensor-parallel:end -->"


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int


SHAPES = {"Llama 8B": Shape(32, 4096, 32, 8, 14336), "Llama 70B": Shape(80, 8192, 64, 8, 28672)}


class Case(NamedTuple):
    model: str
    ranks: int
    sequence: bool

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]


CASES = [Case(model, ranks, sequence) for model in SHAPES for ranks in RANKS for sequence in (False, True)]


@contextlib.contextmanager
def mesh_of(ranks: int) -> Iterator[DeviceMesh]:
    """The mesh of the first of so many ranks; the others are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def torch_layer(of: Shape, mesh: DeviceMesh, sequence: bool) -> nn.Module:
    """A layer in eager PyTorch with torch's styles on its linear layers; a norm's result is gathered once for all readers."""
    layer = LlamaLayer(of.width, of.kv_heads, of.hidden)
    x = Shard(1) if sequence else Replicate()
    read = PrepareModuleOutput(output_layouts=x, desired_output_layouts=Replicate(), use_local_output=False)
    out = RowwiseParallel(output_layouts=x)
    plan = {"norm": read, "mlp_norm": read, "out": out, "mlp.down": out}
    plan |= dict.fromkeys(("q", "k", "v", "mlp.gate", "mlp.up"), ColwiseParallel())
    return parallelize_module(layer, mesh, plan)


def our_layer(of: Shape, mesh: DeviceMesh, sequence: bool, mode: str) -> nn.Module:
    layer = ckptkern.nn.LlamaDecoderLayer(
        of.width, of.heads, of.kv_heads, intermediate_size=of.hidden, recompute=mode, device="meta"
    )
    return parallelize_module(layer, mesh, TensorParallel(sequence_parallel=sequence))


def maker(variant: str, of: Shape) -> Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]:
    """Of a function of x that runs a layer of `layer_of`."""
    if variant == TORCH:
        return lambda layer, x: lambda x: checkpoint(layer, x, use_reentrant=False)
    tables = [torch.empty(TOKENS, of.width // of.heads, device="meta", dtype=torch.bfloat16) for _ in range(2)]
    return lambda layer, x: lambda x: layer(x, tuple(tables))


def traced(gpu: GPU, case: Case, variants: Sequence[str] = VARIANTS) -> dict[str, Trace]:
    """variant -> the launches of a step of the layer."""
    found = {}
    with mesh_of(case.ranks) as mesh, torch.device("meta"):
        for variant in variants:
            if variant == TORCH:
                layer = torch_layer(case.shape, mesh, case.sequence)
            else:
                layer = our_layer(case.shape, mesh, case.sequence, variant.split()[-1])
            rows = TOKENS // case.ranks if case.sequence else TOKENS
            x = torch.empty(1, rows, case.shape.width, dtype=torch.bfloat16, requires_grad=True)
            found[variant] = step(gpu, maker(variant, case.shape), layer.to(torch.bfloat16), x)
    return found


class Row(NamedTuple):
    """One line. ratio: of the time to that of torch's variant."""

    gpu: str
    link: str
    case: Case
    variant: str
    collectives: int
    alone: Timeline  # each collective waited for where it starts
    time: Timeline
    ratio: float


def rows(gpu: GPU, link: Link, steps: dict[tuple[Case, str], Trace], codes: Codes) -> Iterator[Row]:
    theirs = 1.0
    for (case, variant), trace in steps.items():

        def of(launch):
            return estimate(launch, gpu, codes).seconds

        times = []
        for overlap in (False, True):
            forward, backward = (
                timeline(part, of, case.ranks, link, overlap) for part in (trace.forward, trace.backward)
            )
            times.append(forward.then(backward))
        theirs = times[1].seconds if variant == TORCH else theirs  # which comes first
        count = sum(launch.kind == "collective" for launch in trace.launches)
        yield Row(gpu.name, link.name, case, variant, count, *times, times[1].seconds / theirs)


def estimated(of: dict[str, Sequence[str]] = OVER, cases: Sequence[Case] = CASES, workers: int = 2) -> list[Row]:
    """The rows of all cases. of: GPU -> the links that its group is over."""
    found = []
    for gpu, links in of.items():
        steps = {(case, variant): trace for case in cases for variant, trace in traced(GPUS[gpu], case).items()}
        codes = codes_of(GPUS[gpu], steps, workers)
        found += [row for link in links for row in rows(GPUS[gpu], LINKS[link], steps, codes)]
    return found


def write(found: Sequence[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for row in found:
            alone, time = row.alone, row.time
            numbers = (1e3 * time.collectives, time.hidden, 1e3 * alone.seconds, 1e3 * time.seconds, row.ratio)
            writer.writerow(
                (
                    "cost model",
                    row.gpu,
                    row.link,
                    *row.case,
                    row.variant,
                    row.collectives,
                    *(f"{n:.4g}" for n in numbers),
                )
            )


def table(path: Path, gpu: str = "h100", link: str = "nvlink4") -> str:
    """The markdown table of a file of `write`: of one GPU over one link."""
    with open(path, newline="") as file:
        given = [row for row in csv.DictReader(file) if (row["gpu"], row["link"]) == (gpu, link)]
    lines = [
        "| | ranks | sequence parallel | torch: ms, hidden | ckptkern: ms, hidden | without overlap | ours / torch | "
        '`"full"` / torch |',
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for place in range(0, len(given), len(VARIANTS)):
        theirs, ours, full = given[place : place + len(VARIANTS)]
        both = [f"{float(one['ms']):.2f}, {100 * float(one['hidden']):.0f} %" for one in (theirs, ours)]
        sequence = "yes" if ours["sequence_parallel"] == "True" else "no"
        rest = (ours["ms_without_overlap"], ours["ratio"], full["ratio"])
        cells = (ours["model"], ours["ranks"], sequence, *both, *(f"{float(one):.2f}" for one in rest))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def put_into(page: Path, text: str) -> None:
    """Between the page's markers. Raises ValueError where it has none."""
    page.write_text(with_part(page, BEGIN, text, END))
