"""Runs ``python -m ckptkern COMMAND``. A command's module is imported only when that command runs."""

from __future__ import annotations

import argparse
import importlib
import sys
import textwrap

from . import __version__
from .extras import from_checkout, missing

# name: (module, in the package if it begins with a dot, else in a checkout; summary; packages needed besides torch)
COMMANDS = {
    "demo": (
        "examples.demo",
        "train a GPT in five variants side by side: memory over a step, time, loss",
        ("matplotlib",),
    ),
    "convert": (
        ".tools.models",
        "show what ckptkern.convert would do with your model, and what it would save for backward",
        (),
    ),
    "report": (
        ".tools.models",
        "show what each region of your model saves and costs in each recompute mode",
        (),
    ),
    "frontier": (
        ".tools.models",
        "find the longest sequence with which your model trains within a budget",
        ("scipy",),
    ),
    "estimate": (
        ".benchmarks.estimate",
        "estimate a language model's training step with each way to save memory, from its config.json",
        ("transformers",),
    ),
    "bench": (".benchmarks.run", "run the benchmark on this machine", ()),
    "autotune": (
        ".benchmarks.autotune",
        "measure the fastest implementation of each matmul on this machine, and store it",
        (),
    ),
    "selftest": (".tools.selftest", "check this installation: kernels, masks, saved bytes", ()),
    "examples": (
        "examples.tutorials",
        "run common tutorials' models with activation checkpoints beside the unmodified models",
        (),
    ),
    "build": (".tools.build", "build the C++ extension now instead of on first use", ()),
    "env": (".tools.env", "print versions, devices, extension and backends", ()),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m ckptkern",
        description="Activation recomputation inside the backward kernels, for PyTorch.",
        epilog="python -m ckptkern COMMAND --help lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"ckptkern {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    module, needed = None, ()
    for name, (path, summary, packages) in COMMANDS.items():
        description = textwrap.fill(f"{summary[:1].upper()}{summary[1:]}.", 78)
        subparser = subparsers.add_parser(name, help=summary, description=description)
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
