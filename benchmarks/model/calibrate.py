"""Rates that fit a run of the benchmark: factors on the times of which the model's estimates consist.

log(measured / modelled) of every case and variant is made small by Gauss and Newton's steps. A part's share of the
modelled time is the derivative by the logarithm of its factor, so factors stay positive. What no row depends on stays at 1.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from . import rates
from .estimate import Codes, total
from .rates import GPU, Scales
from .trace import Trace

COLUMNS = ("case", "variant", "device", "dtype", "status", "ms")
HELD = 1e-9  # weight of "the factor is 1" beside one row: decides where no row does
STEPS, CLOSE, FARTHEST = (
    100,
    1e-9,
    0.5,
)  # Newton's steps at most, and a step's smallest and largest change of a logarithm
NOT_ESTIMATED = ("ceiling", "host")  # beginnings of cases that no estimate is asked for


class Measured(NamedTuple):
    case: str
    variant: str
    ms: float


def read(path: Path, known: Collection[str], gpu: GPU | None = None) -> tuple[GPU, list[Measured], list[str]]:
    """Returns the GPU of a results.csv by the env.json beside it, its timed rows that the cost model can estimate, and a line
    for each kind of row that is left out. known: the model's cases. gpu: whose run it must be.

    Raises ValueError for another kind of file, another GPU, and a file of which no row is left.
    """
    try:
        with open(path, newline="") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
                raise ValueError(
                    f"{path} is not a results.csv of `ckptkern bench`: it lacks the columns {', '.join(missing)}"
                )
            timed = [row for row in reader if row["status"] == "ok" and row["ms"]]
        device = json.loads(path.with_name("env.json").read_text()).get("device", "")
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from None
    measured_on = rates.of_device(device)
    if gpu not in (None, measured_on):
        raise ValueError(f"{path} was measured on {device}, not on {gpu.name}")
    rows, left = [], {}
    for row in timed:
        if row["case"].startswith(NOT_ESTIMATED):
            continue
        if reason := _unreadable(row, known):
            left.setdefault(reason, []).append(f"{row['case']} {row['variant']}")
        else:
            rows.append(Measured(row["case"], row["variant"], float(row["ms"])))
    lines = [f"left out, {reason}: {', '.join(names)}" for reason, names in left.items()]
    if not rows:
        raise ValueError("\n".join([f"{path} has no timed case that the cost model estimates", *lines]))
    return measured_on, rows, lines


def _unreadable(row: Mapping[str, str], known: Collection[str]) -> str | None:
    """Returns why the cost model has no estimate of a row, or None."""
    if row["device"] != "cuda":
        return f"measured on {row['device']}"
    if row["dtype"] != "bfloat16":
        return f"in {row['dtype']}, and the model's times are in bfloat16"
    return None if row["case"] in known else "of which the model has no case"


class Fit(NamedTuple):
    """A GPU with fitted factors, and the standard error of each, relative; infinite where no row depends on it."""

    gpu: GPU
    errors: Scales


def fit(gpu: GPU, steps: Sequence[Trace], ms: Sequence[float], codes: Codes) -> Fit:
    """The factors that bring the estimates of the steps closest to `ms`, in the mean square of logarithms."""
    measured = torch.tensor(ms, dtype=torch.float64).log()
    logs = torch.zeros(len(Scales._fields), dtype=torch.float64)
    hold = math.sqrt(HELD) * torch.eye(len(logs), dtype=torch.float64)
    for _ in range(STEPS):
        now = dataclasses.replace(gpu, scales=Scales(*logs.exp().tolist()))
        parts = [total(step.launches, now, codes).parts for step in steps]
        seconds = torch.tensor(parts, dtype=torch.float64)
        modelled = seconds.sum(1, keepdim=True)
        off = measured - (1e3 * modelled[:, 0]).log()
        equations = torch.cat([seconds / modelled, hold])
        step = torch.linalg.lstsq(equations, torch.cat([off, -math.sqrt(HELD) * logs])[:, None]).solution[:, 0]
        if step.abs().max() < CLOSE:
            break
        logs = logs + step.clamp(-FARTHEST, FARTHEST)
    spread = off.square().sum() / max(len(steps) - len(logs), 1)
    variance = spread * torch.linalg.inv(equations.T @ equations).diagonal()
    seen = seconds.sum(0) > 0
    errors = torch.where(seen, variance.sqrt(), torch.inf)
    return Fit(dataclasses.replace(gpu, scales=Scales(*logs.exp().tolist())), Scales(*errors.tolist()))


def report(
    table: GPU, fit: Fit, rows: Sequence[Measured], steps: Mapping[tuple[str, str], Trace], codes: Codes
) -> list[str]:
    """What came out: rates, and how far the model is off for each row, before and after."""
    fitted, scales = fit.gpu, fit.gpu.scales
    parts = {
        "cuBLAS, TFLOP/s": (table.matmuls / 1e12, scales.matmuls),
        "our kernels' tensor cores and epilogues, part of the table's": (1.0, scales.kernels),
        "bandwidth, TB/s": (table.bandwidth / 1e12, scales.bandwidth),
        f"torch's core, forward at {max(table.core_forward)}, TFLOP/s": (
            table.core_forward[max(table.core_forward)] / 1e12, scales.attention
        ),
        "gap between launches, us": (1e6 * table.launch, 1 / scales.launch),
    }  # fmt: skip
    lines = [f"cost model of {table.name}, fitted to {len(rows)} rows: rate in the table, and fitted"]
    for (name, (rate, scale)), error in zip(parts.items(), fit.errors, strict=True):
        sure = f"± {100 * error:.1f} %" if math.isfinite(error) else "no row depends on it"
        lines.append(f"  {name:62} {rate:8.3g} {rate / scale:8.3g}  {sure}")
    lines.append(f"{'case':40} {'variant':28} {'measured ms':>12} {'before':>8} {'after':>8}")
    errors: list[list[float]] = [[], []]
    for row in rows:
        launches = steps[row.case, row.variant].launches
        off = [1e3 * total(launches, gpu, codes).seconds / row.ms - 1 for gpu in (table, fitted)]
        for kind, error in zip(errors, off, strict=True):
            kind.append(abs(error))
        lines.append(f"{row.case:40} {row.variant:28} {row.ms:12.3f} {off[0]:+8.1%} {off[1]:+8.1%}")
    means = [sum(kind) / len(kind) for kind in errors]
    lines.append(f"mean distance: {means[0]:.1%} before, {means[1]:.1%} after")
    return lines
