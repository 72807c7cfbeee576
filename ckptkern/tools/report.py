"""``python -m ckptkern report FILE:FUNCTION``: what each region of a model of yours saves and costs in each mode."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..extras import missing
from ..planning import plan, report
from .convert import HELP, load, model_and_inputs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = HELP.replace("as small as the model accepts", "of the size that training has")
    parser.add_argument("target", metavar="FILE:FUNCTION", help="a file or an importable module, and a function in it")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a row for each region and mode to this file")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="draw memory over the step into this file (needs matplotlib)"
    )
    bound = parser.add_mutually_exclusive_group()
    bound.add_argument(
        "--budget", metavar="SIZE", help="show what ckptkern.plan chooses for this peak, such as 20GiB (needs scipy)"
    )
    bound.add_argument(
        "--saved", metavar="SIZE", help="show what it chooses for these saved bytes, such as 10GiB (needs scipy)"
    )


def main(args: argparse.Namespace) -> int:
    needed = [*(["matplotlib"] if args.figure else []), *(["scipy"] if args.budget or args.saved else [])]
    try:
        if hint := missing(*needed):
            raise ValueError(hint)
        model, given, named = model_and_inputs(load(args.target)())
        if not (given or named):
            raise ValueError("FUNCTION must return (model, inputs), to measure with")
        found = report(model, *given, **named)
        print(found)
        if args.csv:
            found.csv(args.csv)
        if args.figure:
            found.figure(args.figure)
        if args.budget or args.saved:
            print(f"\n{plan(model, *given, budget=args.budget, saved=args.saved, **named)}")
    except ValueError as error:
        print(f"ckptkern report: {error}", file=sys.stderr)
        return 2
    return 0
