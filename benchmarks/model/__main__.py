"""``python -m benchmarks.model``."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ckptkern.benchmarks.cases import BY_SUBLAYER, MODES, Item
from ckptkern.benchmarks.measure import one_line
from ckptkern.benchmarks.run import DEFAULT_RESULTS, items, say, select
from ckptkern.ops.dispatch import choices as _choices
from ckptkern.ops.dispatch import implementations as _impls

from . import __doc__ as description
from . import calibrate, published, rates, sheet, tensor_parallel
from .trace import Trace

DEFAULT_GPU = "h200"
NOTES = Path("benchmarks/NOTES.md")
DISTRIBUTED = Path("docs/how-to/distributed.md")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.model", description=description.split("\n")[0])
    made.add_argument(
        "--gpu",
        choices=rates.GPUS,
        help=f"whose rates (default: {DEFAULT_GPU}; of --calibrate, that of the run's env.json)",
    )
    made.add_argument("--cases", default="", metavar="REGEX", help="of case names; a comma means or (default: all)")
    made.add_argument("--modes", default="", help=f"of ours: some of {','.join(MODES + BY_SUBLAYER)} (default: all)")
    made.add_argument(
        "--explain", nargs="?", const="", metavar="REGEX",
        help="print every launch, its estimated time and what bounds it; of all steps, or those whose 'CASE, VARIANT' matches",
    )  # fmt: skip
    made.add_argument(
        "--out", type=Path, metavar="DIR",
        help=f"write DIR/GPU.csv (default: {DEFAULT_RESULTS}/model for all cases at the table's rates; for a part, nothing)",
    )  # fmt: skip
    made.add_argument(
        "--published", action="store_true",
        help="the sizes of figures that others published, on their GPUs, beside these figures: DIR/published.csv, and the "
        f"table in {NOTES} if it is here",
    )  # fmt: skip
    made.add_argument(
        "--tensor-parallel", action="store_true",
        help="one Llama layer on 2, 4 and 8 GPUs, beside torch's styles and checkpoint: DIR/tensor_parallel.csv, and the table "
        f"in {DISTRIBUTED} if it is here",
    )  # fmt: skip
    made.add_argument("--rates", type=Path, metavar="FILE", help="rates that --calibrate wrote")
    made.add_argument(
        "--calibrate", type=Path, metavar="RESULTS.csv",
        help="fit the rates to a run of `ckptkern bench` on that GPU, say how far the model was off, and write rates-GPU.json "
        "for --rates beside it, or into --out",
    )  # fmt: skip
    made.add_argument(
        "--impl", choices=tuple(_impls.OF_KERNELS), metavar="IMPL",
        help=f"of all matmuls that may take it, in place of the rule's: {' or '.join(_impls.OF_KERNELS)}",
    )  # fmt: skip
    made.add_argument(
        "--workspace", metavar="SIZE",
        help="of every op, such as 256MiB: chunks of tokens and groups of heads are then as many as it takes (default: that of "
        "the GPU)",
    )  # fmt: skip
    made.add_argument("--workers", type=int, default=2, help="compiling processes (default: %(default)s)")
    return made


def chosen(pattern: str) -> list[Item]:
    """Items that have an estimate. Raises ValueError where no name matches."""
    found = [item for item in select(pattern, items("cuda")) if not item.case.host]
    if not found:
        raise ValueError(f"--cases {pattern!r}: the cost model does not estimate host time")
    return found


def _calibrate(args: argparse.Namespace, items: Sequence[Item]) -> None:
    known = {item.name: item for item in items}
    gpu, measured, left = calibrate.read(args.calibrate, known, rates.GPUS.get(args.gpu))
    steps: dict[tuple[str, str], Trace] = {}
    for case in dict.fromkeys(row.case for row in measured):
        try:
            steps |= sheet.traces(gpu, [known[case]], only={(row.case, row.variant) for row in measured})
        except Exception as error:  # what a model raises on meta tensors
            left.append(f"left out, which cannot be counted: {case}: {one_line(error)}")
    rows = [row for row in measured if (row.case, row.variant) in steps]
    if others := sorted({row.variant for row in measured} - {row.variant for row in rows}):
        left.append(f"left out, of which the model has no variant: {', '.join(others)}")
    if not rows:
        raise ValueError("\n".join([f"{args.calibrate} has no variant that the cost model estimates", *left]))
    codes = sheet.codes_of(gpu, steps, args.workers)
    fitted = calibrate.fit(gpu, [steps[row.case, row.variant] for row in rows], [row.ms for row in rows], codes)
    print("\n".join([*calibrate.report(gpu, fitted, rows, steps, codes), *left]))
    folder = args.out or args.calibrate.parent
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rates-{gpu.name}.json"
    rates.write(fitted.gpu, path, f"fitted to {len(rows)} rows of {args.calibrate.name}")
    print(f"rates in {path}")


def _own_cases(args: argparse.Namespace) -> None:
    """Runs what --published and --tensor-parallel estimate."""
    flag = "--published" if args.published else "--tensor-parallel"
    both = args.published and args.tensor_parallel
    if both or args.cases or args.modes or args.explain is not None or args.rates or args.calibrate:
        raise ValueError(f"{flag} uses its own cases, modes, GPUs and rates: pass only --out and --workers")
    module, name, page = published, "published.csv", NOTES
    if args.tensor_parallel:
        module, name, page = tensor_parallel, "tensor_parallel.csv", DISTRIBUTED
    path = (args.out or DEFAULT_RESULTS / "model") / name
    module.write(module.estimated(workers=args.workers), path)
    text = module.table(path)
    print(text)
    if args.out is None and page.exists():
        module.put_into(page, text)


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 for arguments that make no sense."""
    args = parser().parse_args(argv)
    modes = [mode for mode in args.modes.split(",") if mode]
    gpu = rates.GPUS[args.gpu or DEFAULT_GPU]
    try:
        if unknown := set(modes) - {*MODES, *BY_SUBLAYER}:
            raise ValueError(f"--modes: {', '.join(sorted(unknown))} is none of {', '.join(MODES + BY_SUBLAYER)}")
        if args.workers < 1:
            raise ValueError(f"--workers: wanted at least 1 but got {args.workers}")
        re.compile(args.explain or "")
        _choices.parse_bytes("--workspace", args.workspace)
        items = chosen(args.cases)
        if args.published or args.tensor_parallel:
            _own_cases(args)
            return 0
        if args.calibrate:
            _calibrate(args, items)
            return 0
        gpu = rates.read(gpu, args.rates) if args.rates else gpu
    except re.error as error:
        say(f"benchmarks.model: --explain {args.explain!r}: {error}")
        return 2
    except (ValueError, OSError) as error:
        say(f"benchmarks.model: {error}")
        return 2
    with _choices.forced_impl(args.impl) if args.impl else contextlib.nullcontext(), _choices.workspace(args.workspace):
        steps = sheet.traces(gpu, items, modes)
    codes = sheet.codes_of(gpu, steps, args.workers)
    if args.explain is not None:
        told = {name: trace for name, trace in steps.items() if re.search(args.explain, ", ".join(name))}
        print(sheet.explanation(gpu, told, codes))
    found = sheet.rows(gpu, steps, codes)
    print(sheet.table(gpu, found))
    whole = not (args.cases or args.modes or args.rates or args.impl or args.workspace)
    if folder := args.out or (DEFAULT_RESULTS / "model" if whole else None):
        sheet.write(gpu, found, folder / f"{gpu.name}.csv")
        print(f"cost model in {folder / gpu.name}.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
