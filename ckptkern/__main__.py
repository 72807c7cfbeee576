"""Runs ``python -m ckptkern COMMAND``. A command's module is imported only when that command runs."""

from __future__ import annotations

import argparse
import importlib
import sys

from . import __version__
from .extras import from_checkout, missing

# name: (module, of the package if it begins with a dot, else of a checkout; what it does; packages besides torch that it needs)
COMMANDS = {
    "demo": (
        "examples.demo",
        "train a GPT in five variants side by side: memory over a step, time, loss",
        ("matplotlib",),
    ),
    "convert": (
        ".tools.models",
        "say what ckptkern.convert would do with a model of yours, and what it would save for backward",
        (),
    ),
    "report": (
        ".tools.models",
        "say what each region of a model of yours saves and costs in each mode",
        (),
    ),
    "frontier": (
        ".tools.models",
        "find the longest sequence of a model of yours that trains within a budget",
        ("scipy",),
    ),
    "estimate": (
        ".benchmarks.estimate",
        "count what a language model's training step takes in each way to save memory, from its config.json",
        ("transformers",),
    ),
    "bench": (".benchmarks.run", "run the benchmark cases on whatever is here", ()),
    "autotune": (
        ".benchmarks.autotune",
        "measure which implementation is quickest for each matmul here, and remember it",
        (),
    ),
    "selftest": (".tools.selftest", "check this installation: kernels, masks, saved bytes", ()),
    "examples": (
        "examples.tutorials",
        "run the tutorials' models with activation checkpoints beside the unmodified models",
        (),
    ),
    "build": (".tools.build", "build the C++ extension now, instead of on first use", ()),
    "env": (".tools.env", "print versions, devices, extension and backends", ()),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m ckptkern", description="Activation recomputation inside the backward kernels, for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"ckptkern {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    module, needed = None, ()
    for name, (path, summary, packages) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if argv[:1] == [name]:
            module = importlib.import_module(path, __package__) if path.startswith(".") else from_checkout(path, name)
            needed = packages
            module.add_arguments(subparser)
    args = parser.parse_args(argv)
    if hint := missing(*needed):
        parser.exit(2, f"ckptkern {args.command}: {hint}\n")
    return module.main(args)


if __name__ == "__main__":
    sys.exit(main())
