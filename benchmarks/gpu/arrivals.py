"""Estimates when each row of the first figures arrives on a GPU: steps by the cost model, compilations as they take here.

    PYTHONPATH=build/triton-3.6.0 python -m benchmarks.gpu.arrivals --gpu h100

A job of `run.jobs_of` takes what `measure.measure` does: a float64 reference, checks of each variant, whose first launches
compile their kernels, and rounds. A row is on the disk when its variant is checked, and has its time at the rounds' end.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from ckptkern.benchmarks import cases, forecast, run
from ckptkern.benchmarks.measure import ENOUGH, GRAPH_BELOW_MS
from ckptkern.triton_kernels import fences

from ..codegen.compiling import specialize
from ..model import rates, trace
from ..model.sass import key

ASSUMED = {
    "build": (25.0, "seconds to build csrc on 16 cores; 65 on two"),
    "imports": (20.0, "seconds of imports, of a CUDA context and of the measured ceilings"),
    "float64": (40.0, "TFLOP/s of the float64 reference"),
    "torch_compile": (15.0, "seconds in which torch.compile compiles a variant"),
    "launcher": (0.3, "seconds in which gcc builds the C module of a kernel's launches, as until Triton 3.7"),
    "launch": (8.0, "microseconds of the host for a launch, of which a step takes no less"),
}
ROUNDS, SECONDS = 30, run.SECONDS["cuda"]  # of a job's timing: at most
LIMIT = 570  # seconds of a part


class Variant(NamedTuple):
    """seconds: of a step. compiling: of the kernels that no variant before it launches."""

    name: str
    seconds: float
    kernels: int
    compiling: float
    note: str = ""


class Row(NamedTuple):
    """Seconds from the start to when a row is on the disk, and to when it has its time."""

    case: str
    variant: Variant
    checked: float
    timed: float


class Compilations:
    """Compiles kernels for a GPU into an empty cache, one after the other; each counts once."""

    def __init__(self, arch: int, seconds: float | None, launcher: float):
        """seconds: a kernel's, instead of what its compilation takes here. launcher: those that come on top."""
        self.arch, self.assumed, self.launcher = arch, seconds, launcher
        self.known: dict[str, tuple[str, float]] = {}  # what it is compiled for -> (kernel, seconds)

    def __call__(self, launches: list[trace.Launch]) -> list[float]:
        """Returns the seconds of each kernel that is new."""
        new = []
        for caught in filter(None, (one.caught for one in launches)):
            if (name := key(caught, self.arch)) not in self.known:
                self.known[name] = caught.name, self._seconds(caught) + self.launcher
                new.append(self.known[name][1])
        return new

    def slowest(self) -> str:
        ordered = sorted((seconds, name) for name, seconds in self.known.values())[:-9:-1]
        return ", ".join(f"{name} {seconds:.1f}" for seconds, name in ordered)

    def _seconds(self, caught: trace.Caught) -> float:
        if self.assumed is not None:
            return self.assumed
        one = specialize(caught.kernel, caught.args, caught.kwargs, self.arch)
        compile = fences.compile_fenced if fences.MISSING else triton.compile
        begin = sum(os.times()[:4])  # of this process and of the assembler's: other work on this machine does not count
        compile(one.source, target=one.target, options=one.options.__dict__)
        return sum(os.times()[:4]) - begin


def modelled(gpu: str) -> dict[tuple[str, str], float]:
    """Returns (case, variant) -> seconds of a step, from the cost model's table."""
    with open(Path(__file__).parents[1] / "results" / "model" / f"{gpu}.csv", newline="") as file:
        return {(row["case"], row["variant"]): float(row["ms"]) / 1e3 for row in csv.DictReader(file)}


def traced(gpu: rates.GPU, item: cases.Item, make: cases.Maker) -> tuple[list[trace.Launch], str]:
    """Returns the launches of a variant's step, or none and why."""
    try:
        given = item.case.given
        built = given(torch.device("meta"), cases.DTYPES["cuda"]) if given else trace.build(item)
        return trace.step(gpu, make, *built).launches, ""
    except Exception as error:  # not installed, or nothing that the cost model traces
        return [], f"{'missing' if isinstance(error, ImportError) else 'not traced'}: {type(error).__name__}: {error}"[
            :90
        ]


def variants_of(
    gpu: rates.GPU, item: cases.Item, makers: dict[str, cases.Maker], flops: int, known: dict[tuple[str, str], float],
    compilations: Compilations, assumed: argparse.Namespace,
) -> list[Variant]:  # fmt: skip
    """Returns a job's variants. A step that is not in the model's table takes eager's time, or a checkpoint's if it is one, or
    that of its matmuls; one that is not installed takes none."""
    found = []
    for name, make in makers.items():
        compiled = name in cases.COMPILED
        launches, note = ([], "") if compiled else traced(gpu, item, make)
        like = cases.CHECKPOINT if "checkpoint" in name else cases.EAGER
        matmuls = (sum(one.flops for one in launches) or flops) / gpu.matmuls
        step = known.get((item.name, name), known.get((item.name, like), matmuls))
        step = 0.0 if note.startswith("missing") else max(step, len(launches) * assumed.launch / 1e6)
        new = compilations(launches)
        found.append(Variant(name, step, len(new), assumed.torch_compile if compiled else sum(new), note))
    return found


def timing(variants: list[Variant]) -> float:
    """Returns the seconds of a job's rounds, once more as CUDA graphs if a step of eager is short."""
    a_round = sum(one.seconds for one in variants)
    seconds = max(ENOUGH * a_round, min(ROUNDS * a_round, SECONDS))
    return seconds * (1 + (variants[0].seconds * 1e3 < GRAPH_BELOW_MS))


def arrivals(gpu: rates.GPU, jobs: list[run.Job], assumed: argparse.Namespace, compilations: Compilations) -> list[Row]:
    """Returns the rows in the order in which they arrive."""
    known, found, seen = modelled(gpu.name), [], set()
    begin = time.perf_counter()
    counts = [forecast.counted(item, cases.DTYPES["cuda"])[-1] for item, _ in jobs]
    now = assumed.build + assumed.imports + (time.perf_counter() - begin)  # as `run.foreseen` counts
    for (item, makers), flops in zip(jobs, counts, strict=True):
        variants = variants_of(gpu, item, makers, flops, known, compilations, assumed)
        now += flops / (assumed.float64 * 1e12)
        checked = []
        for one in variants:
            now += one.compiling + forecast.CHECKS * one.seconds
            checked.append(now)
        now += timing(variants)
        rows = [Row(item.name, *row, now) for row in zip(variants, checked, strict=True)]
        found += [row for row in rows if (row.case, row.variant.name) not in seen]  # eager is timed in several jobs
        seen |= {(item.name, one.name) for one in variants}
    return found


def lines_of(rows: list[Row], compilations: Compilations) -> list[str]:
    lines = [f"{'checked':>8} {'timed':>8} {'step ms':>8} {'kernels':>7} {'compile':>7}  case, variant"]
    for row in rows:
        one = row.variant
        lines.append(
            f"{row.checked:8.1f} {row.timed:8.1f} {1e3 * one.seconds:8.2f} {one.kernels:7} {one.compiling:7.2f}  "
            f"{row.case}, {one.name}{' (' + one.note + ')' if one.note else ''}"
        )
    in_time = sum(row.timed <= LIMIT for row in rows)
    return [
        *lines,
        f"{in_time} of {len(rows)} rows have their time within {LIMIT} s",
        f"{len(compilations.known)} kernels compiled in {sum(one for _, one in compilations.known.values()):.1f} s by Triton "
        f"{triton.__version__}; the slowest: {compilations.slowest()}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.arrivals", description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", choices=rates.GPUS, default="h100", help="whose cost model (default: h100)")
    parser.add_argument("--cases", default="", metavar="REGEX", help="of case names; a comma means or (default: all)")
    parser.add_argument(
        "--published", action="store_true", help="of the cases of others' figures, not of the first figures"
    )
    parser.add_argument("--kernel", type=float, metavar="S", help="seconds to compile a kernel (default: compiles it)")
    for name, (value, what) in ASSUMED.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=float, default=value, help=f"{what} (default: {value:g})"
        )
    args = parser.parse_args()

    bench = argparse.ArgumentParser()
    run.add_arguments(bench)
    chosen = run.chosen(
        bench.parse_args(["--published" if args.published else "--headline", "--cases", args.cases]),
        torch.device("cuda"),
    )
    jobs = run.jobs_of(chosen, cases.FIRST_COMPILED, ())
    print("\n".join(f"assumed: {vars(args)[name]:g} {what}" for name, (_, what) in ASSUMED.items()))
    print(
        f"assumed: {forecast.CHECKS} steps check a variant; {ROUNDS} rounds or {SECONDS} s, at least {ENOUGH} rounds, time it"
    )
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        gpu, compilations = rates.GPUS[args.gpu], Compilations(rates.GPUS[args.gpu].arch, args.kernel, args.launcher)
        print("\n".join(lines_of(arrivals(gpu, jobs, args, compilations), compilations)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
