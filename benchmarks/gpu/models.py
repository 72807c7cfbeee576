"""Measures a training step of whole models in every variant, into DIR/results.csv.

    python -m benchmarks.gpu.models --out DIR

A step is forward and backward with gradients allocated before it, and no
optimizer. Its peak is above the memory that is allocated when it begins. The
models have random weights of configurations of transformers; on a CPU they are
small. First come times and peaks, then the longest sequences and torch.compile,
last the slow steps. Each row is written when it is measured, and rows that DIR
has are not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ckptkern.benchmarks import compare, measure, run
from ckptkern.benchmarks.cases import EAGER
from ckptkern.benchmarks.measure import OUT_OF_MEMORY, OVER_TIME, Row
from ckptkern.errors import BudgetError
from ckptkern.extras import missing
from ckptkern.memory import dense_parts, format_size, free_memory, peak_memory, saved_tensors
from ckptkern.planning.plan import CLOSE, crossing, search

from . import variants
from .variants import Model, Runner

ROUNDS_SECONDS = {"cuda": 8.0, "cpu": 0.5}  # of timing a group of variants
ROUNDS = 2, 20  # at least, at most
LONG = 3.0  # seconds of a step; where one takes longer, all are timed once, while their peaks are measured
MULTIPLE = {"cuda": 1024, "cpu": 128}  # of the longest sequences
CPU_BUDGET = 8 * 2**20  # bytes of the longest sequences' steps on a CPU
# Relative distances from eager's (or of the first variant that runs): of the loss, of the gradients' norm, and of the gradients
# at SAMPLES places of each parameter. In bfloat16 rounding moves the gradients of 16 layers by 1e-2.
BOUNDS = {torch.bfloat16: (2e-3, 0.02, 0.15), torch.float32: (1e-5, 1e-4, 1e-3)}
SAMPLES = 4096
HANGS, COMPILES = 240.0, 300.0  # seconds in which a variant is checked, and compiled, at most: 100,000 tokens take 45


class Spent(Exception):
    """Raised to end a search whose time is over."""


# -- right ------------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """A step's results. loss: a number. norm: of all gradients, in float32. samples: the gradients at some places, in
    float32."""

    loss: float
    norm: float
    samples: Tensor

    def distances(self, of: Result) -> tuple[float, float, float]:
        """Returns the relative distances of the loss, the norm and the samples from another result's."""
        far = torch.linalg.vector_norm(self.samples - of.samples) / torch.linalg.vector_norm(of.samples)
        return abs(self.loss - of.loss) / abs(of.loss), abs(self.norm - of.norm) / of.norm, far.item()


class Reference(NamedTuple):
    """The variant that others are compared with, its first step's result, and the seconds of a later step."""

    name: str
    runner: Runner
    result: Result
    seconds: float


def result_of(runner: Runner, model: nn.Module, ids: Tensor) -> Result:
    """Runs a step with gradients of zeros before it."""
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    for gradient in gradients:
        gradient.zero_()
    loss = runner.step(ids).item()
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients])
    samples = [g.flatten()[:: max(1, g.numel() // SAMPLES)].float() for g in gradients]
    return Result(loss, torch.linalg.vector_norm(norms).item(), torch.cat(samples))


def compared(row: Row, result: Result, reference: Reference, dtype: torch.dtype) -> bool:
    """Writes the distances into the row, and returns whether they are within their bounds."""
    distances = result.distances(reference.result)
    told = ", ".join(f"{name} {x:.1e}" for name, x in zip(("loss", "norm", "gradients"), distances, strict=True))
    row.add_note(f"relative distance from {reference.name}'s: {told}")
    right = all(x <= bound for x, bound in zip(distances, BOUNDS[dtype], strict=True))
    row.status = "ok" if right else "wrong"
    return right


# -- a model ----------------------------------------------------------------------------------------------------------


class Run:
    """The rows and limits of a run."""

    def __init__(self, sheet: run.Sheet, device: torch.device, deadline: float):
        self.sheet, self.device, self.deadline = sheet, device, deadline
        self.kind, self.dtype = device.type, variants.DTYPES[device.type]

    def row(self, model: Model, variant: str, **fields) -> Row:
        dtype = str(self.dtype).removeprefix("torch.")
        return Row(model.name, variant, self.kind, dtype, tokens=model.tokens, **fields)

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def dropped(self, row: Row) -> None:
        self.sheet(dataclasses.replace(row, status="dropped", note=OVER_TIME))

    def failed(self, row: Row, error: BaseException) -> None:
        """Writes the row of a failure. Raises GpuLost if the GPU is lost."""
        row.status, row.note = "failed", measure.one_line(error)
        if isinstance(error, ImportError):
            row.status = "missing"
        elif isinstance(error, torch.OutOfMemoryError):
            row.note = OUT_OF_MEMORY
        error.__traceback__ = error.__context__ = error.__cause__ = None  # their frames hold the step's tensors
        try:
            self.tidy()
        except Exception:  # of a device that is lost, whichever class the driver's error has
            row.note = measure.LOST + row.note
            self.sheet(row)
            raise measure.GpuLost(row.note) from error
        self.sheet(row)

    def tidy(self) -> None:
        """Returns unused memory to the GPU. Raises errors that a kernel left behind."""
        if self.kind == "cuda":
            gc.collect()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


def build(of: Run, model: Model, names: list[str]) -> nn.Module | None:
    """Builds the model. Returns None if that fails, and writes the reason into the rows of these variants."""
    if of.left() < 0:
        for name in names:
            of.dropped(of.row(model, name))
        return None
    try:
        return variants.build(model, of.device, of.dtype)
    except Exception as error:  # no memory, or what transformers raises: the rows of the model say it
        for name in names:
            of.failed(of.row(model, name), error)
        return None


def measure_model(of: Run, model: Model, names: list[str]) -> None:
    """Measures the rows of these variants, without `longest`. Baselines are checked and timed before any of ckptkern's,
    because a kernel that breaks the GPU ends the process; then ckptkern's, interleaved with the reference."""
    of.sheet.keep()
    left = [name for name in names if (model.name, name) not in of.sheet.final]
    whole = build(of, model, left) if left else None
    if whole is None:
        return
    ids = model.ids(of.device)
    note = f"parameters and gradients: {format_size(bytes_of(whole))}"
    if model.quantised and missing("bitsandbytes"):
        note = f"{variants.MXFP4}; {note}"
    ours = [name for name in left if name.startswith("ckptkern")]
    baselines = [EAGER, *(name for name in left if name not in (EAGER, *ours))]
    reference = measure_group(of, model, whole, ids, baselines, None, note)
    for name in (variants.CHECKPOINTING, variants.CHUNKED):
        if ours and reference is None and name not in baselines:
            reference = measure_group(of, model, whole, ids, [name], None, note)
    if ours:
        of.sheet.keep()
        measure_group(of, model, whole, ids, ours, reference, note)


def bytes_of(whole: nn.Module) -> int:
    """Returns the bytes of the parameters, quantised ones as they are stored, and of the gradients."""
    tensors = [*whole.parameters(), *(p.grad for p in whole.parameters() if p.requires_grad)]
    return sum(part.nbytes for tensor in tensors for part in dense_parts(tensor))


def measure_group(
    of: Run, model: Model, whole: nn.Module, ids: Tensor, names: list[str], reference: Reference | None, note: str
) -> Reference | None:
    """Checks the variants, then times the correct ones, beside the reference if there is one. Returns the reference, or else
    the first variant that ran."""
    rows, runners, seconds = {}, {}, {}
    if reference:
        name = reference.name
        rows[name], runners[name], seconds[name] = of.row(model, name, note=note), reference.runner, reference.seconds
    for name in names:
        row = of.row(model, name, note=note)
        if of.left() < (2.5 * reference.seconds if reference else 0):
            of.dropped(row)
            continue
        hangs = HANGS + (COMPILES if name == variants.COMPILE else 0)
        watch = measure.watched([row], of.sheet, hangs) if of.kind == "cuda" else contextlib.nullcontext()
        try:
            with watch:
                runner = variants.variants(of.kind)[name](whole, ids)
                result = result_of(runner, whole, ids)
                row.add_note(runner.check_fused())
                if reference and not compared(row, result, reference, of.dtype):
                    of.sheet(row)
                    continue
                long = reference is not None and reference.seconds > LONG
                seconds[name] = weighed(row, runner, whole, ids, of.device, long)
        except Exception as error:  # whatever a variant raises is its result, and the others still run
            of.failed(row, error)
            continue
        rows[name], runners[name] = row, runner
        reference = reference or Reference(name, runner, result, seconds[name])
        of.sheet(dataclasses.replace(row, status="checked"))
    time_group(of, rows, runners, seconds, ids)
    return reference


def weighed(row: Row, runner: Runner, whole: nn.Module, ids: Tensor, device: torch.device, long: bool) -> float:
    """Writes a step's peak into the row, and its saved bytes unless it is long. Returns the seconds of the step."""
    if not long:
        with saved_tensors(whole) as saved, runner.around():
            runner.loss(ids)
        row.saved_bytes = saved.bytes
    begin = time.perf_counter()
    with peak_memory(device) as peak:
        runner.step(ids)
    row.peak_bytes = peak.bytes
    return time.perf_counter() - begin


def time_group(
    of: Run, rows: dict[str, Row], runners: dict[str, Runner], seconds: dict[str, float], ids: Tensor
) -> None:
    """Times the variants interleaved, and writes their rows. seconds: of a step of each."""
    if max(seconds.values(), default=0.0) > LONG:
        eager = [1e3 * seconds[EAGER]] if EAGER in seconds else None
        for name, row in rows.items():
            measure.add_times(row, [1e3 * seconds[name]], eager)
            of.sheet(row)
        return
    steps = {name: functools.partial(_step, runner, ids) for name, runner in runners.items()}
    cuda, most = of.kind == "cuda", max(0.0, min(ROUNDS_SECONDS[of.kind], of.left()))
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(most / max(sum(seconds.values()), 1e-3))))
    measure.time_rows(rows, steps, measure.cuda_clock if cuda else measure.cpu_clock, rounds, most, of.sheet, cuda)


def _step(runner: Runner, ids: Tensor, index: int) -> None:
    runner.step(ids)


# -- the longest sequence ---------------------------------------------------------------------------------------------


def longest_first(kind: str) -> list[str]:
    """Returns the variants whose longest sequence is measured, the most valuable first."""
    return [EAGER, variants.CHUNKED, variants.LIGER, variants.bounded(kind), variants.CHECKPOINTING, variants.DEFAULT]


def measure_longest(of: Run, model: Model, parts: int) -> None:
    """Adds to the rows of a model the longest sequence whose step fits the memory, within its part of the time."""
    end = time.monotonic() + max(0.0, of.left()) / parts
    left = []
    for name in longest_first(of.kind):
        row = of.sheet.rows.get((model.name, name), {})
        if (row.get("status") == "ok" or row.get("note") == OUT_OF_MEMORY) and not row.get("longest"):
            left.append(name)
    whole = build(of, model, []) if left else None
    if whole is None:
        return
    for place, name in enumerate(left):
        share = time.monotonic() + max(0.0, end - time.monotonic()) / (len(left) - place)
        key, longest = (model.name, name), None
        try:
            of.tidy()
            runner = variants.variants(of.kind)[name](whole, model.ids(of.device, 1, MULTIPLE[of.kind]))
            longest, note = longest_of(of, model, runner, share)
        except Exception as error:  # whatever a variant raises is its result, and the others still run
            note = f"longest: {measure.one_line(error)}"
            if of.kind == "cuda":
                measure.raise_if_lost([], of.sheet)
            if name.startswith("ckptkern"):
                of.sheet.bad[key] = note
        of.sheet.update(key, longest=longest, note="; ".join(filter(None, (of.sheet.rows[key]["note"], note))))
        run.say(f"  {name:30} longest  {longest or 'unknown'}: {note}")


def longest_of(of: Run, model: Model, runner: Runner, deadline: float) -> tuple[int | None, str]:
    """Returns the tokens of the longest sequence whose step fits, and a note about it."""
    multiple, tried = MULTIPLE[of.kind], {}
    budget = free_memory(of.device) if of.kind == "cuda" else CPU_BUDGET
    took = [0.0, 1]  # seconds and size of the last step

    def peak_of(size: int) -> float:
        if time.monotonic() + took[0] * (size / took[1]) ** 2 > deadline:  # at most, because attention is quadratic
            raise Spent
        begin = time.monotonic()
        ids = model.ids(of.device, 1, size)
        try:
            with peak_memory(of.device) as peak:
                runner.step(ids)
            tried[size] = peak.bytes
        except torch.OutOfMemoryError:
            tried[size] = math.inf
        if tried[size] > budget:
            of.tidy()
        took[:] = time.monotonic() - begin, size
        return tried[size]

    def at_least(why: str) -> tuple[int | None, str]:
        tokens = max((size for size, peak in tried.items() if peak <= budget), default=None)
        line = int(crossing(tried, tokens, budget)) // multiple * multiple if tokens else 0
        return tokens, f"{end}: at least, because {why}" + (
            f"; the line through the peaks ends at {line:,}" if line else ""
        )

    end = f"longest within {format_size(budget)}"
    try:
        tokens, _ = search(peak_of, budget, multiple, 2 * multiple, model.limit)
    except BudgetError:
        return None, f"{end}: none, because {2 * multiple:,} tokens take more"
    except Spent:
        return at_least("the seconds of the search were over")
    return at_least("the search ends there") if tokens + max(multiple, tokens // CLOSE) > model.limit else (tokens, end)


# -- the program ------------------------------------------------------------------------------------------------------


def eager_of(model: Model, kind: str) -> list[str]:
    """Returns the names of the model's variants without torch.compile."""
    return list(model.only) or [name for name in variants.variants(kind) if name != variants.COMPILE]


def measure_all(of: Run, models: list[Model]) -> None:
    """Measures everything, the most valuable first; torch.compile only on a GPU."""
    for model in models:
        for figure in model.figures:
            of.sheet(dataclasses.replace(measure.row_of_figure(model.name, of.kind, figure), tokens=model.tokens))
    quick = [model for model in models if not model.only]
    searched = [model for model in quick if model.limit]
    compiled = [variants.COMPILE] if of.kind == "cuda" else []

    def jobs(group: list[Model]) -> list:
        return [(model, functools.partial(measure_model, names=eager_of(model, of.kind))) for model in group]

    def compiling(group: list[Model]) -> list:
        return [(model, functools.partial(measure_model, names=compiled)) for model in group]

    longest = [  # one part of the time is for what comes after them
        (model, functools.partial(measure_longest, parts=len(searched) + 1 - n)) for n, model in enumerate(searched)
    ]
    slow = [model for model in models if model.only]
    every = [*jobs(quick), *longest, *compiling(quick[:1]), *jobs(slow), *compiling(quick[1:])]
    for place, (model, job) in enumerate(every, 1):
        run.say(f"[{place}/{len(every)}] {model.name}, {max(0.0, of.left()):.0f} s left")
        job(of, model)
        of.tidy()


def opened(out: Path, device: torch.device) -> run.Sheet:
    """Opens the sheet with its existing rows. Raises ValueError if they were measured on another device, torch or triton."""
    environment = {"device": run.device_name(device), **run.environment(device)}
    standing = run.earlier_rows(out, compare.setting_of(environment))
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "env.json").exists():
        (out / "env.json").write_text(json.dumps(environment, indent=2) + "\n")
    return run.Sheet(out / "results.csv", standing, environment["commit"])


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--out", type=Path, required=True, metavar="DIR", help="has results.csv, whose rows stay")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    options.add_argument("--only", default="", metavar="REGEX", help="of case names; a comma means or (default: all)")
    options.add_argument(
        "--seconds", type=float, default=500.0, metavar="S", help="after which nothing new begins (default: 500)"
    )
    return options


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if all of ckptkern's variants were right and ran, 1 if not or if interrupted, 2 for invalid arguments,
    run.UNFINISHED if the time ended before all was measured, measure.LOST_STATUS if another process has to go on."""
    args = parser().parse_args(arguments)
    try:
        models = run.select("--only", args.only, variants.models(args.device))
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device: torch sees no CUDA device: pass --device cpu for small models")
        if hint := missing("transformers"):
            raise ValueError(hint)
        device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
        sheet = opened(args.out, device)
    except ValueError as error:
        run.say(f"models: {error}")
        return 2
    try:
        measure_all(Run(sheet, device, time.monotonic() + args.seconds), models)
    except KeyboardInterrupt:  # also of a time limit from outside
        sheet.bad["", ""] = run.INTERRUPTED
    except measure.GpuLost as error:
        run.say(f"{error}: the next run goes on with the other variants")
        return measure.LOST_STATUS
    return sheet.end({model.name for model in models})


if __name__ == "__main__":
    sys.exit(main())
