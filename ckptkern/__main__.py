"""``python -m ckptkern COMMAND``. A command's module is imported only when that command runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from types import ModuleType

from . import __version__

# name: (module, what it does, the extra that installs what it needs)
COMMANDS = {
    "demo": (".demo", "train a small GPT three ways side by side: loss, memory and time", "demo"),
    "bench": (".benchmarks.run", "run the benchmark cases on whatever is here", "bench"),
    "verify": (".verify", "check this installation: kernels, masks, kept bytes", None),
    "examples": (".examples", "run the tutorials' models in segments beside their plain selves", None),
    "env": (".env", "print versions, devices, extension and backends", None),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    # Kineto writes two lines to stderr for every profile taken, at any level below this one
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    parser = argparse.ArgumentParser(
        prog="python -m ckptkern", description="Activation recomputation inside the backward kernels, for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"ckptkern {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    module = None
    for name, (path, summary, extra) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if argv[:1] == [name]:
            module = import_command(parser, name, path, extra)
            module.add_arguments(subparser)
    args = parser.parse_args(argv)
    return module.main(args)


def import_command(parser: argparse.ArgumentParser, name: str, path: str, extra: str | None) -> ModuleType:
    """The module of a command; where a package of its extra is missing, exits with the command that installs it."""
    try:
        return importlib.import_module(path, __package__)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if extra is None or package in ("", "ckptkern", "torch"):
            raise
        parser.exit(2, f"ckptkern {name}: {package} is not installed: pip install 'ckptkern[{extra}]'\n")


if __name__ == "__main__":
    sys.exit(main())
