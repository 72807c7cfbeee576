"""Says whether all faults are found. `python -m tests.faults`, from the repository's root; `make faults`.

Each fault is put in a copy of the tree, where the smallest part of the suite that should see it is run, without tests that are
marked long. Exit status 1 if one is not found, or a fault's text is no longer in its file.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from .anchors import problems, without_tests
from .run import all_of, red_without, table_of
from .table import FAULTS

HERE = "<!-- faults -->"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="WORD", help="only faults with one of these in their name or file")
    parser.add_argument("--list", action="store_true", help="print the faults and the tests that should see them")
    parser.add_argument(
        "--check", action="store_true", help="only look for the places of the faults and for their tests"
    )
    parser.add_argument("--baseline", action="store_true", help="first run the tests without a fault: they must pass")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="at a time; default: the cores")
    parser.add_argument("--seconds", type=float, default=150, help="a run of tests may take (default: %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PAGE.md",
        help=f"write the table of which test found which after the page's line {HERE}",
    )
    options = parser.parse_args()

    faults = [
        fault for fault in FAULTS if not options.names or any(n in f"{fault.name} {fault.file}" for n in options.names)
    ]
    if not faults:
        sys.exit("faults: no fault has these words in its name or file; --list prints all")
    if options.list:
        for fault in faults:
            print(f"{fault.name} [{fault.file}]: {' | '.join(fault.tests)}")
        return
    if lost := [*problems(faults), *without_tests(faults)]:
        sys.exit("\n".join(lost))
    if options.check:
        print(f"{len(faults)} faults have a place and tests")
        return
    with tempfile.TemporaryDirectory(prefix="ckptkern-faults-") as name:
        folder, results = Path(name), []
        if options.baseline and (red := red_without(faults, folder, options.seconds)):
            sys.exit("\n".join(["faults: these tests fail without a fault:", *red]))
        for result in all_of(faults, folder, max(options.jobs, 1), options.seconds):
            results.append(result)
            print(f"{len(results)}/{len(faults)} {result.line()}", flush=True)
    results.sort(key=lambda result: faults.index(result.fault))
    table = table_of(results)
    if options.out is not None:
        page = options.out.read_text() if options.out.exists() else ""
        options.out.write_text(f"{page.partition(HERE)[0]}{HERE}\n\n{table}")
    missed = [result for result in results if result.by is None]
    print("\n" + table + "".join(f"\n{result.line()}" for result in missed))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
