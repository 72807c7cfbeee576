"""``python -m benchmarks.codegen``."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import re
import sys
from pathlib import Path

from . import __doc__ as description
from .cases import ARCHS, all_cases, default_cases, sample_cases
from .opcodes import write_opcodes
from .sass import ATTENTION, Report, run
from .spills import misplaced

DROPOUT_LIMIT = 35  # instructions per element; tl.rand costs 52, and registers spill
DROPOUT_HEADER = ("case", "kernel", "instructions per element", "Philox calls for 8 elements")


def dropout_table(reports: list[Report]) -> list[tuple[str, str, float, float]]:
    """(case, kernel, instructions, Philox calls per 8 elements) that dropout adds per element of the scores.

    Instructions with dropout less those without, divided by the elements of a tile that a thread holds, in all copies of
    the loop. A call is 10 rounds of 2 multiplies; the mask's layout allows one call per 8 elements.
    """
    without = {(report.case, report.kernel): report for report in reports}
    rows = []
    for report in reports:
        plain = without.get((report.case.removesuffix("+dropout"), report.kernel))
        if report.kernel not in ATTENTION or plain is None or plain is report:
            continue
        elements = report.elements * report.loops
        rows.append((
            report.case, report.kernel, (report.instructions - plain.instructions) / elements,
            report.philox / 20 / (elements / 8),
        ))  # fmt: skip
    return rows


def write_csv(reports: list[Report], path: Path) -> None:
    """Writes the table to `path`, and dropout's table beside it as dropout.csv."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names, reported = [field.name for field in dataclasses.fields(Report)], map(dataclasses.astuple, reports)
    for target, header, rows in (
        (path, names, reported), (path.with_name("dropout.csv"), DROPOUT_HEADER, dropout_table(reports))
    ):  # fmt: skip
        with open(target, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codegen", description=description.split("\n")[0])
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--all", action="store_true", help="every activation and flag, not only the default tiles")
    kind.add_argument("--sample", action="store_true", help="one case of every kernel, in a minute")
    parser.add_argument("--only", default="", help="regular expression on case names, e.g. 'mlp_bwd/sm_90'")
    parser.add_argument("--workers", type=int, default=2, help="compiling processes (default: 2)")
    parser.add_argument("--csv", type=Path, help="write the table here")
    parser.add_argument(
        "--opcodes",
        type=Path,
        help="instead, write the opcode forms of the kernels here, and see that the emulator knows all",
    )
    args = parser.parse_args()
    chosen = all_cases() if args.all else sample_cases() if args.sample else default_cases()
    cases = [case for case in chosen if re.search(args.only, case.name)]
    if not cases:
        parser.error(f"--only {args.only!r} matches no case")
    if args.opcodes:
        cases = [case for case in cases if case.arch in ARCHS]  # those that the emulator runs
        unknown = write_opcodes(cases, args.opcodes, args.workers)
        print("\n".join(unknown) or f"the emulator translates every kernel; the forms are in {args.opcodes}")
        return 1 if unknown else 0
    reports, faults = run(cases, args.workers)
    dropout = dropout_table(reports)
    faults += [
        f"{name} ({kernel}): dropout costs {n:.1f} instructions" for name, kernel, n, _ in dropout if n >= DROPOUT_LIMIT
    ]
    if not (args.all or args.sample or args.only):
        faults += misplaced([f"{report.case} {report.kernel}" for report in reports if report.stack])
    if args.csv:
        write_csv(reports, args.csv)
    for report in reports:
        print(
            f"{report.case:64} {report.kernel:24} {report.tile:24} reg {report.registers:3} stack {report.stack:4} "
            f"smem {report.shared:6}"
        )
    if dropout:
        print("dropout, per element of the scores:")
    for name, kernel, instructions, calls in dropout:
        print(f"{name:64} {kernel:24} {instructions:5.1f} instructions, {calls:4.2f} Philox calls for 8")
    print("\n".join(faults) or f"code-generation check: {len(reports)} kernels, no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
