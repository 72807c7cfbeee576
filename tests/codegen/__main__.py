"""``python -m tests.codegen``."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import re
import sys
from pathlib import Path

from . import __doc__ as description
from .cases import all_cases, default_cases, sample_cases
from .sass import ATTENTION, Report, run
from .spills import misplaced

DROPOUT_LIMIT = 35  # instructions per element; tl.rand costs 52, and registers spill


def dropout_costs(reports: list[Report]) -> dict[str, float]:
    """Returns "case kernel" -> instructions that dropout adds per element of the scores.

    Instructions with dropout less those without, by the elements of a tile that a thread holds, in all copies of the loop.
    """
    instructions = {(report.case, report.kernel): report.instructions for report in reports}
    return {
        f"{report.case} {report.kernel}": (report.instructions - without) / (report.elements * report.loops)
        for report in reports
        if report.kernel in ATTENTION and report.case.endswith("+dropout")
        if (without := instructions.get((report.case.removesuffix("+dropout"), report.kernel)))
    }


def write_csv(reports: list[Report], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in dataclasses.fields(Report))
        writer.writerows(map(dataclasses.astuple, reports))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.codegen", description=description.split("\n")[0])
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--all", action="store_true", help="every activation and flag, not only the default tiles")
    kind.add_argument("--sample", action="store_true", help="one case of every kernel, in a minute")
    parser.add_argument("--only", default="", help="regular expression on case names, e.g. 'mlp_bwd/sm_90'")
    parser.add_argument("--workers", type=int, default=2, help="compiling processes (default: 2)")
    parser.add_argument("--csv", type=Path, help="write the table here")
    args = parser.parse_args()
    chosen = all_cases() if args.all else sample_cases() if args.sample else default_cases()
    cases = [case for case in chosen if re.search(args.only, case.name)]
    if not cases:
        parser.error(f"--only {args.only!r} matches no case")
    reports, faults = run(cases, args.workers)
    dropout = dropout_costs(reports)
    faults += [f"{name}: dropout costs {n:.1f} instructions" for name, n in dropout.items() if n >= DROPOUT_LIMIT]
    if not (args.all or args.sample or args.only):
        faults += misplaced([f"{report.case} {report.kernel}" for report in reports if report.stack])
    if args.csv:
        write_csv(reports, args.csv)
    for report in reports:
        print(
            f"{report.case:64} {report.kernel:24} {report.tile:24} reg {report.registers:3} stack {report.stack:4} "
            f"smem {report.shared:6}"
        )
    for name, cost in dropout.items():
        print(f"{name:89} {cost:5.1f} instructions of dropout per element of the scores")
    print("\n".join(faults) or f"code-generation check: {len(reports)} kernels, no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
