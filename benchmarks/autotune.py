"""Measures which implementation is quickest for each matmul here, and stores it for this machine: ``python -m ckptkern
autotune``.

For every op, dtype and size the implementations (`ops/dispatch/implementations.py`) are checked against float64 and timed
interleaved, forward and backward at "full", as variants of a benchmark case (`measure`). The table has one row per op, dtype
and class of sizes. An implementation replaces the default if it is quicker by more than the noise, summed over the problems of
the row: its medians by MARGIN, and its 80th percentiles below the default's medians.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..extras import progress
from ..ops.dispatch import choices as _choices
from ..ops.dispatch import implementations as _impls
from ..ops.dispatch import tuned as _tuned
from ..tools.models import model_and_inputs
from ..tools.selftest import module_of
from . import measure
from .baselines import Function
from .cases import Case, variants

OPS = ("mlp", "gated_mlp", "linear_act")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES, ROWS = (2048, 4096, 1024, 512, 256), 8192  # the default sizes, the most valuable first
MARGIN = 0.03  # of the default's median
OURS = "ckptkern "  # begins the name of a variant of ckptkern, which must be as exact as eager


def forced_impl(name: str) -> contextlib.AbstractContextManager[None]:
    """Makes all matmuls inside use this implementation where they may; for tests, and to time implementations."""
    _choices.check_choice("forced_impl", "name", name, _impls.IMPLS)
    return _choices.setting("impl", name, _choices._choice)


class Problem(NamedTuple):
    """An op at a size. features, hidden, out: widths of its input, of the layer between (linear_act: 0) and of its output,
    as in choose_impl."""

    op: str
    features: int
    hidden: int
    out: int
    dtype: torch.dtype
    tokens: int

    @property
    def key(self) -> _tuned.Key:
        return self.op, str(self.dtype).removeprefix("torch."), _impls.size_class(max(self.features, self.out))

    @property
    def sizes(self) -> list[int]:
        return [self.features, self.hidden, self.out, self.tokens]

    def __str__(self) -> str:
        sizes = "x".join(str(n) for n in self.sizes[:3] if n)
        return f"{self.op} {sizes} {self.key[1]}, {self.tokens} tokens"


class Matmuls(nn.Module):
    """Runs a problem's op by PyTorch's ops or by an implementation."""

    def __init__(self, op: nn.Module):
        super().__init__()
        self.op = op

    def forward(self, x: Tensor, impl: str = "eager") -> Tensor:
        with ops.backend("eager" if impl == "eager" else "auto"), forced_impl(impl):
            return self.op(x)

    def by(self, impl: str) -> Function:
        """Returns the op by an implementation."""
        return functools.partial(self, impl=impl)


def build(problem: Problem, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Returns the op with random weights, and x."""
    activation = "silu" if problem.op == "gated_mlp" else "gelu"
    sizes, options = problem.sizes[:3], {"recompute": "full", "device": device, "dtype": dtype}
    x = torch.randn(problem.tokens, problem.features, device=device, dtype=dtype, requires_grad=True)
    return Matmuls(module_of(problem.op, activation, *sizes, **options)), x


def timed(problem: Problem, device: torch.device, seconds: float) -> dict[str, measure.Row]:
    """Returns the row of each implementation, checked, and timed interleaved for `seconds` in all."""
    rows: dict[str, measure.Row] = {}

    def emit(row: measure.Row) -> None:
        rows[row.variant.removeprefix(OURS)] = row

    make, modes = functools.partial(build, problem), [*_impls.OF_KERNELS]
    case = Case(str(problem), make, Matmuls.by, modes=modes, dtype=problem.dtype)
    ours = {name: make for name, make in variants(case).items() if name.startswith(OURS)}
    measure.measure(case, ours, device, emit, seconds=seconds)
    return rows


# -- the table --------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The rows of a problem's correct implementations, and its default implementation."""

    problem: Problem
    default: str
    rows: dict[str, measure.Row]


def summed(outcomes: Sequence[Outcome], figure: str) -> dict[str, float]:
    """Returns the sum of a figure over all problems for each implementation that was timed in all of them."""
    first, *others = (outcome.rows for outcome in outcomes)
    impls = [impl for impl in first if all(impl in rows for rows in others)]
    return {impl: sum(getattr(outcome.rows[impl], figure) for outcome in outcomes) for impl in impls}


def choice(outcomes: Sequence[Outcome]) -> str:
    """Returns the implementation that the table stores for the problems of one row."""
    medians, late, default = summed(outcomes, "ms"), summed(outcomes, "p80_ms"), outcomes[0].default
    limit = medians.get(default, float("inf"))
    surely = (impl for impl, ms in medians.items() if ms < (1 - MARGIN) * limit and late[impl] < limit)
    return next(surely, default)


def rows_of(outcomes: Sequence[Outcome]) -> dict[_tuned.Key, _tuned.Row]:
    """Returns the rows of the table's file: one for each op, dtype and size of which an implementation ran."""
    groups: dict[_tuned.Key, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.problem.key, []).append(outcome)
    rows = {}
    for (op, dtype, features), group in groups.items():
        if ms := summed(group, "ms"):
            row = {
                "op": op,
                "dtype": dtype,
                "features": features,
                "measured": [outcome.problem.sizes for outcome in group],
            }
            row |= {"impl": choice(group), "ms": {impl: round(total, 4) for impl, total in ms.items()}}
            rows[op, dtype, features] = row
    return rows


def write(file: Path, machine: dict[str, str], rows: Iterable[_tuned.Row]) -> None:
    """Writes a file for `_tuned.read` atomically, so that no other process reads half of it."""
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"format": _tuned.FORMAT, "machine": machine, "impls": [*rows]}, indent=1) + "\n")
    draft.replace(file)


# -- which problems ---------------------------------------------------------------------------------------------------


def shapes_of(text: str) -> list[tuple[int, int]]:
    """Parses "1024x4096,2048x8192" into pairs, for argparse."""
    try:
        pairs = [tuple(map(int, part.split("x"))) for part in text.split(",")]
        if all(len(pair) == 2 and min(pair) > 0 for pair in pairs):
            return pairs
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"wanted FEATURESxHIDDEN, such as 1024x4096,2048x8192, but got {text!r}")


def of_model(target: str) -> list[tuple]:
    """Returns (op, features, hidden, out, dtype) of the matmuls in a forward of FILE:FUNCTION's model, each once."""
    model, inputs, named = model_and_inputs(target)
    choice = _choices._choice
    choice.seen = seen = []
    try:
        with torch.random.fork_rng():
            copy.deepcopy(model).train()(*inputs, **named)
    finally:
        choice.seen = None
    if matmuls := [matmul for matmul in dict.fromkeys(seen) if matmul[0] in OPS]:
        return matmuls
    raise ValueError(
        f"{target}: the forward runs no fused MLP or linear layer; pass a model of ckptkern.nn, or convert it first"
    )


def problems(args: argparse.Namespace, device: torch.device) -> list[Problem]:
    """Returns the problems of the command line, the most valuable first. Raises ValueError if there are none."""
    dtypes = [DTYPES[name] for name in args.dtype or ()]
    if args.model:
        if flags := [f"--{name}" for name in ("ops", "shapes") if getattr(args, name)]:
            raise ValueError(f"--model selects the matmuls: {' and '.join(flags)} cannot be combined with it")
        candidates = [
            Problem(*sizes, dtype, args.tokens) for *sizes, ran in of_model(args.model) for dtype in dtypes or (ran,)
        ]
    else:
        shapes = args.shapes or [(n, None) for n in SIZES]
        candidates = [
            Problem(op, features, 0, hidden or features, dtype, args.tokens)
            if op == "linear_act"
            else Problem(op, features, hidden or 4 * features, features, dtype, args.tokens)
            for dtype in dtypes or (torch.bfloat16, torch.float16)
            for features, hidden in shapes
            for op in args.ops or OPS
        ]
    on_device = {
        dtype: torch.empty(0, dtype=dtype, device=device) for dtype in {problem.dtype for problem in candidates}
    }
    candidates = [
        problem for problem in candidates if _choices.choose_backend("autotune", on_device[problem.dtype]) == "triton"
    ]
    if not candidates:
        raise ValueError(f"{device} offers no choice: only PyTorch's ops run there")
    return candidates


# -- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m ckptkern autotune``."""
    parser.description = (
        "Measure the fastest implementation of each matmul on this machine (ckptkern's kernels, or cuBLAS and elementwise "
        "kernels), and store it in a table that ckptkern then reads. Nothing is tuned without this command."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="device to tune (default: cuda if there is one)")
    parser.add_argument(
        "--ops", nargs="+", choices=OPS, metavar="OP", help=f"ops to tune: {', '.join(OPS)} (default: all)"
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=tuple(DTYPES),
        metavar="DTYPE",
        help=f"dtypes to tune: {', '.join(DTYPES)} (default: bf16 and fp16, or the dtypes that --model runs in)",
    )
    parser.add_argument(
        "--shapes",
        type=shapes_of,
        metavar="SHAPE,...",
        help="sizes to tune, each FEATURESxHIDDEN, for linear_act INxOUT, such as 1024x4096 (default: one per size class)",
    )
    parser.add_argument(
        "--model", metavar="FILE:FUNCTION", help="tune the matmuls of your model, loaded as by `report`"
    )
    parser.add_argument(
        "--tokens", type=int, default=ROWS, metavar="N", help="rows of the input (default: %(default)d)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        metavar="M",
        help="start no matmul after this time (default: %(default)g); the next run starts with the rest",
    )
    parser.add_argument("--dry-run", action="store_true", help="measure, but do not write the table")
    parser.add_argument("--reset", action="store_true", help="remove this machine's table, and do not measure")


def outcome_of(problem: Problem, device: torch.device, seconds: float) -> Outcome:
    """Times a problem, and prints its line. A failure costs only its implementation, or this problem."""
    capability = (9, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)
    default = _impls.default_impl(problem.op, capability, problem.dtype, problem.key[2])
    try:
        rows = timed(problem, device, seconds)
    except Exception as error:  # raised by the reference, or because the device is lost
        rows = dict.fromkeys(_impls.OF_KERNELS, measure.Row("", "", "", "", "failed", note=measure.one_line(error)))
    texts = [f"{impl} {row.ms:.3g} ms" if row.status == "ok" else f"{impl}: {row.note}" for impl, row in rows.items()]
    print(f"{problem!s:44} {'; '.join(texts)}", flush=True)
    return Outcome(problem, default, {impl: row for impl, row in rows.items() if row.status == "ok"})


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the table; returns the exit status."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print("ckptkern autotune: torch sees no CUDA device", file=sys.stderr)
            return 2
        device = torch.device("cuda", torch.cuda.current_device())
    file, machine = _tuned.path(device.type, device.index), _tuned.machine(device.type, device.index)
    if args.reset:
        known = file.exists()
        file.unlink(missing_ok=True)
        print(f"removed {file}" if known else f"this machine has no table: {file}")
        return 0
    before, why = _tuned.read(file, machine)
    if why:
        print(f"{file} is written anew, because {why}")
    try:
        with ops.backend(
            "auto"
        ):  # whatever CKPTKERN_BACKEND says, because a table chooses among kernel implementations
            todo = problems(args, device)
        todo.sort(
            key=lambda problem: problem.sizes in before.get(problem.key, {}).get("measured", [])
        )  # unmeasured ones first
        if not args.dry_run:
            file.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=file.parent).close()  # fail before minutes of measuring
    except (ValueError, OSError) as error:
        print(f"ckptkern autotune: {error}", file=sys.stderr)
        return 2
    print(f"{machine['device']}, torch {machine['torch']}: {len(todo)} matmuls, at most {args.minutes:g} minutes")
    outcomes, rows, deadline = [], {}, time.perf_counter() + 60 * args.minutes
    with progress("autotune", len(todo)) as bar:
        for n, problem in enumerate(todo):
            left = deadline - time.perf_counter()
            if left <= 0:
                print(
                    f"the time is over: {len(todo) - n} of {len(todo)} matmuls were not measured. The same command starts with "
                    "them; --minutes gives it more time"
                )
                break
            bar(str(problem), n)
            outcomes.append(outcome_of(problem, device, left / (len(todo) - n)))
            rows = rows_of(outcomes)
            if rows and not args.dry_run:  # after each problem, so that an interrupt loses nothing
                write(file, machine, (before | rows).values())
    for (op, dtype, size), row in rows.items():
        print(f"{op} {dtype}, {_impls.size_text(size)}: {row['impl']}")
    if args.dry_run or not rows:
        print("nothing is written")
        return 0 if rows else 1
    print(f"the table is {file}\nprocesses that start from now on read it; `autotune --reset` removes it")
    return 0
