"""Runs the demo, and writes its picture and table into the documentation: `make demo-docs`, on an otherwise idle machine.

    python -m benchmarks.dev.demo ARGUMENTS

takes the arguments of `python -m ckptkern demo`, writes docs/demo.png, and the part of docs/index.md between its markers.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from ckptkern.benchmarks.report import with_part
from examples import demo

BEGIN, END = "<!-- demo:begin -->", "<!-- demo:end -->"


def refresh(out: Path, docs: Path) -> None:
    """Copies the results of a run in `out` into the documentation. Raises ValueError without the markers."""
    page = docs / "index.md"
    page.write_text(with_part(page, BEGIN, (out / "report.md").read_text().rstrip(), END))
    shutil.copy(out / "demo.png", docs / "demo.png")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.demo")
    demo.add_arguments(parser)
    args = parser.parse_args()
    status = demo.main(args)
    if status == 0:
        refresh(args.out, Path("docs"))
    return status


if __name__ == "__main__":
    sys.exit(main())
