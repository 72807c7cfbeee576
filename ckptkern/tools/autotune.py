"""``python -m ckptkern autotune``: measure which implementation is quickest for each matmul here, and remember it for this
machine.

For every op, dtype and size it checks the implementations (`ops/dispatch/implementations.py`) against float64 and times
them in turns, forward and backward at "full" (`race.py`). The table has one row for an op, a dtype and a class of sizes.
What replaces the default there is quicker by more than the noise, summed over the problems of the row: its medians by
MARGIN, and its 80th percentiles below the default's medians.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import ops
from ..extras import progress
from ..ops.dispatch import choices as _choices
from ..ops.dispatch import implementations as _impls
from ..ops.dispatch import tuned as _tuned
from .convert import load, model_and_inputs
from .race import Outcome, Problem, choice, measure, totals

OPS = ("mlp", "gated_mlp", "linear_act")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES, ROWS = (2048, 4096, 1024, 512, 256), 8192  # what is measured by default, the most valuable first

Key = tuple[str, str, int]  # of a row: its op, dtype and features, as the file has them


def key_of(problem: Problem) -> Key:
    return problem.op, str(problem.dtype).removeprefix("torch."), _impls.SIZES[problem.size]


def sizes_of(problem: Problem) -> list[int]:
    return [problem.features, problem.hidden, problem.out, problem.tokens]


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Of the table's file: a row for each op, dtype and size of which something ran."""
    groups: dict[Key, list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault(key_of(one.problem), []).append(one)
    return [
        {
            "op": op, "features": features, "dtype": dtype, "measured": [sizes_of(one.problem) for one in group],
            "impl": choice(*group), "ms": {impl: round(ms, 4) for impl, ms in medians.items()},
        }
        for (op, dtype, features), group in groups.items() if (medians := totals(group, statistics.median))
    ]  # fmt: skip


# -- which problems ---------------------------------------------------------------------------------------------------


def shapes_of(text: str) -> list[tuple[int, int]]:
    """ "1024x4096,2048x8192" -> pairs. For argparse."""
    try:
        pairs = [tuple(map(int, part.split("x"))) for part in text.split(",")]
        if all(len(pair) == 2 and min(pair) > 0 for pair in pairs):
            return pairs
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"wanted FEATURESxHIDDEN, such as 1024x4096,2048x8192, but got {text!r}")


def of_model(target: str, dtypes: Sequence[torch.dtype] = ()) -> list[tuple]:
    """(op, features, hidden, out, dtype) of the matmuls that a forward of FILE:FUNCTION's model meets, each once, in these
    dtypes or those that it runs in."""
    model, given, named = model_and_inputs(load(target)())
    choice = _choices._choice
    choice.seen = seen = []
    try:
        with torch.random.fork_rng():
            copy.deepcopy(model).train()(*given, **named)
    finally:
        choice.seen = None
    found = dict.fromkeys((*sizes, one) for *sizes, ran in seen if sizes[0] in OPS for one in dtypes or (ran,))
    if not found:
        raise ValueError(
            f"{target}: the forward runs no fused MLP or linear layer; pass a model of ckptkern.nn, or convert it first"
        )
    return list(found)


def matmuls(args: argparse.Namespace) -> list[tuple]:
    """(op, features, hidden, out, dtype) of what the command line asks for, the most valuable first."""
    dtypes = [DTYPES[name] for name in args.dtype or ()]
    if args.model:
        if given := [f"--{name}" for name in ("ops", "shapes") if getattr(args, name)]:
            raise ValueError(f"--model selects the matmuls: {' and '.join(given)} cannot be combined with it")
        return of_model(args.model, dtypes)

    def problem(op: str, features: int, hidden: int | None, dtype: torch.dtype) -> tuple:
        if op == "linear_act":
            return op, features, 0, hidden or features, dtype
        return op, features, hidden or 4 * features, features, dtype

    shapes = args.shapes or [(n, None) for n in SIZES]
    dtypes = dtypes or [torch.bfloat16, torch.float16]
    return [problem(op, *shape, dtype) for dtype in dtypes for shape in shapes for op in args.ops or OPS]


def problems(args: argparse.Namespace, device: torch.device) -> list[Problem]:
    """Raises ValueError if there is nothing to choose."""
    found = [Problem(*matmul, args.tokens) for matmul in matmuls(args)]
    if all(len(_impls.candidates(problem.backend(device))) < 2 for problem in found):
        raise ValueError(f"nothing can be chosen on {device}: only PyTorch's ops run there")
    return found


def finished(rows: Sequence[dict[str, Any]], todo: Sequence[Problem]) -> set[Problem]:
    """The problems whose rows of the file are whole: all that the row is to be measured with was."""
    measured = {(row["op"], row["dtype"], row["features"]): row.get("measured", []) for row in rows}
    missing = {key_of(problem) for problem in todo if sizes_of(problem) not in measured.get(key_of(problem), [])}
    return {problem for problem in todo if key_of(problem) not in missing}


# -- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``python -m ckptkern autotune``."""
    parser.description = (
        "Measure which implementation is quickest for each matmul on this machine (our kernels, or cuBLAS and elementwise "
        "kernels), and write the table that ckptkern then reads. Nothing is tuned unless you ask."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="(default: cuda if there is one)")
    parser.add_argument("--ops", nargs="+", choices=OPS, metavar="OP", help=f"of {', '.join(OPS)} (default: all)")
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=tuple(DTYPES),
        metavar="DTYPE",
        help=f"of {', '.join(DTYPES)} (default: bf16 and fp16, or what --model runs in)",
    )
    parser.add_argument(
        "--shapes",
        type=shapes_of,
        metavar="SHAPE,...",
        help="FEATURESxHIDDEN each, of linear_act INxOUT (default: one of each size)",
    )
    parser.add_argument("--model", metavar="FILE:FUNCTION", help="the matmuls of your model, as `report` loads it")
    parser.add_argument("--tokens", type=int, default=ROWS, metavar="N", help="rows (default: %(default)d)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        metavar="M",
        help="begin no matmul after so many (default: %(default)g); again begins with what is left",
    )
    parser.add_argument("--dry-run", action="store_true", help="measure, and write nothing")
    parser.add_argument("--reset", action="store_true", help="remove this machine's table, and measure nothing")


def line(outcome: Outcome) -> str:
    """One problem's result."""
    parts = [f"{impl} {statistics.median(ms):.3g} ms" for impl, ms in outcome.ms.items()]
    parts += [f"{impl}: {why}" for impl, why in outcome.wrong.items()]
    parts += [] if outcome.ahead else ["kernels waited for the host, whose time is in these"]
    return f"{outcome.problem!s:44} {'; '.join(parts)}"


def valid_rows(file: Path, wanted: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of a file that is valid here."""
    try:
        _tuned.read(file, wanted)
        return _tuned.rows(file)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        print(f"{file} is made anew, because {error}")
        return []


def merged(before: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The earlier rows, with these over them."""
    return list({(row["op"], row["dtype"], row["features"]): row for row in (*before, *rows)}.values())


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the table; returns the exit status."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print("ckptkern autotune: there is no CUDA device", file=sys.stderr)
            return 2
        device = torch.device("cuda", torch.cuda.current_device())
    file, machine = _tuned.path(device.type, device.index), _tuned.machine(device.type, device.index)
    if args.reset:
        known = file.exists()
        file.unlink(missing_ok=True)
        print(f"removed {file}" if known else f"there is no table of this machine: {file}")
        return 0
    try:
        with ops.backend("auto"):  # whatever CKPTKERN_BACKEND says: kernel implementations are what a table is for
            todo, before = problems(args, device), valid_rows(file, machine)
            todo.sort(key=finished(before, todo).__contains__)
        if not args.dry_run:
            file.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=file.parent).close()  # before minutes of measuring
    except (ValueError, OSError) as error:
        print(f"ckptkern autotune: {error}", file=sys.stderr)
        return 2
    print(f"{machine['device']}, torch {machine['torch']}: {len(todo)} matmuls, at most {args.minutes:g} minutes")
    outcomes, rows, deadline = [], [], time.perf_counter() + 60 * args.minutes
    with progress("autotune", len(todo)) as bar, ops.backend("auto"):
        for n, problem in enumerate(todo):
            left = deadline - time.perf_counter()
            if left <= 0:
                print(
                    f"the time is over: {len(todo) - n} of {len(todo)} matmuls were not reached. The same command again begins "
                    "with them; --minutes gives more at once"
                )
                break
            bar(str(problem), n)
            outcomes.append(measure(problem, device, left / (len(todo) - n)))
            print(line(outcomes[-1]), flush=True)
            rows = rows_of(outcomes)
            if rows and not args.dry_run:
                _tuned.write(file, machine, merged(before, rows))  # after each: an interrupt loses nothing
    for row in rows:
        print(f"{row['op']} {row['dtype']}, {_impls.size_text(_impls.SIZES.index(row['features']))}: {row['impl']}")
    if args.dry_run or not rows:
        print("nothing is written")
        return 0 if rows else 1
    print(f"the table has these now: {file}\nprocesses that start from now on read it; `autotune --reset` removes it")
    return 0
