"""Estimates when each row of a benchmark arrives on a GPU, from the times that an H200 measured.

    python -m benchmarks.gpu.arrivals [options of bench, by default --headline]

A job of `run.jobs_of` takes what `measure.measure` does: a float64 reference, checks of each variant, whose first launches
compile their kernels, and rounds. A row is on the disk when its variant is checked, and has its time at the rounds' end.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ckptkern.benchmarks import cases, run
from ckptkern.benchmarks.measure import ENOUGH, GRAPH_BELOW_MS

RESULTS = Path(__file__).parents[1] / "results/h200/results.csv"
START = 34.0  # seconds to the first case: a build where the extension changed, imports, a CUDA context and the ceilings
KERNELS = 1.5  # seconds to compile what a variant of ours launches first: 119 for the first 197 rows
COMPILES = 15.0  # seconds of torch.compile, forward and backward, of a layer
CHECKS = 5  # steps of a variant before it is timed: its check, its bytes, its warm-up
FLOAT64 = 20  # steps of eager in bfloat16 that the float64 reference takes: 798 and about 40 TFLOP/s
ROUNDS, SECONDS = 30, run.SECONDS["cuda"]  # of a job's timing: at most
LIMIT = 570  # seconds of a part


class Row(NamedTuple):
    """Seconds of a step, until its row is on the disk, and until it has its time."""

    case: str
    variant: str
    step: float
    checked: float
    timed: float


def measured(path: Path = RESULTS) -> dict[tuple[str, str], float]:
    """Returns (case, variant) -> seconds of a step."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "ok"]
    return {(row["case"], row["variant"]): float(row["ms"]) / 1e3 for row in rows}


def timing(steps: list[float]) -> float:
    """Returns the seconds of a job's rounds, doubled for CUDA graphs if a step of eager, the first, is short."""
    seconds = max(ENOUGH * sum(steps), min(ROUNDS * sum(steps), SECONDS))
    return seconds * (1 + (steps[0] * 1e3 < GRAPH_BELOW_MS))


def arrivals(jobs: list[run.Job], known: dict[tuple[str, str], float]) -> Iterator[Row]:
    """Yields the rows as they arrive. A variant that was not measured takes eager's time, a case eager's median."""
    eagers = [known[case.name, cases.EAGER] for case, _ in jobs if (case.name, cases.EAGER) in known]
    now, seen, median = START, set(), statistics.median(eagers or [0.0])
    for case, makers in jobs:
        eager = known.get((case.name, cases.EAGER), median)
        steps = {name: known.get((case.name, name), eager) for name in makers}
        now += FLOAT64 * eager
        checked = {}
        for name, seconds in steps.items():
            compiling = COMPILES if name in cases.COMPILED else KERNELS * name.startswith("ckptkern")
            checked[name] = now = now + compiling + CHECKS * seconds
        now += timing([*steps.values()])
        for name, seconds in steps.items():
            if (case.name, name) not in seen:  # eager is timed in several jobs
                seen.add((case.name, name))
                yield Row(case.name, name, seconds, checked[name], now)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.arrivals", description=__doc__.split("\n")[0])
    run.add_arguments(parser)
    args = parser.parse_args(sys.argv[1:] or ["--headline"])
    jobs = run.jobs_of(run.chosen(args, torch.device("cuda")), cases.FIRST_COMPILED, ())
    rows = list(arrivals(jobs, measured()))
    print(f"{'checked':>8} {'timed':>8} {'step ms':>8}  case, variant")
    for row in rows:
        print(f"{row.checked:8.1f} {row.timed:8.1f} {1e3 * row.step:8.2f}  {row.case}, {row.variant}")
    print(f"{sum(row.timed <= LIMIT for row in rows)} of {len(rows)} rows have their time within {LIMIT} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
