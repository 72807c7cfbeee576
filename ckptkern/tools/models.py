"""Runs ``python -m ckptkern convert``, ``report`` and ``frontier`` on the model of FILE:FUNCTION."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from torch import nn

from ..conversion import convert
from ..conversion.convert import OTHERWISE
from ..conversion.report import write_rows
from ..extras import missing
from ..ops.dispatch.choices import MODES
from ..planning import frontier, plan, report
from ..planning.plan import arguments_of

OF_A_MODEL = """\
Example: python -m ckptkern {command}

FUNCTION takes no arguments and returns the model, or (model, inputs). The
inputs are a tensor, a tuple of positional arguments or a dict of keyword
arguments, {size}:

    def build():
        model = LlamaForCausalLM(LlamaConfig(...))
        ids = torch.randint(0, 100, (2, 16))
        return model, {{"input_ids": ids, "labels": ids, "use_cache": False}}

With labels the call computes the loss, which can be fused with the LM head.
"""
HELP = {
    "convert": OF_A_MODEL.format(command="convert model.py:build", size="as small as the model accepts"),
    "report": OF_A_MODEL.format(command="report model.py:build --budget 20GiB", size="of the training size"),
    "frontier": """\
Example: python -m ckptkern frontier model.py:build --budget 24GiB

FUNCTION takes no arguments and returns (model, make_inputs). make_inputs takes
a size, such as a number of tokens, and returns a step's inputs of that size: a
tensor, a tuple of positional arguments or a dict of keyword arguments:

    def build():
        def inputs(tokens):
            ids = torch.randint(0, 100, (1, tokens))
            return {"input_ids": ids, "labels": ids, "use_cache": False}

        return LlamaForCausalLM(LlamaConfig(...)), inputs

With labels the step contains the LM head and the loss.
""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the parser's command."""
    command, add = parser.prog.rpartition(" ")[2], parser.add_argument
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, HELP[command]
    add("target", metavar="FILE:FUNCTION", help="a file or importable module, and a function in it")
    if command == "frontier":
        add(
            "--budget", required=True, metavar="SIZE", help="memory that a step may allocate at its peak, such as 24GiB"
        )
        add("--multiple", type=int, default=64, metavar="N", help="try multiples of this size (default: %(default)s)")
        add("--limit", type=int, metavar="N", help="largest size to try")
        return
    if command == "report":
        bound = parser.add_mutually_exclusive_group()
        for name, amount in (("budget", "peak of a step"), ("saved", "size of the saved tensors")):
            text = f"show what ckptkern.plan chooses for this {amount}, such as 20GiB (needs scipy)"
            bound.add_argument(f"--{name}", metavar="SIZE", help=text)
        add("--figure", type=Path, metavar="FILE", help="draw memory over a step into this file (needs matplotlib)")
        add("--csv", type=Path, metavar="FILE", help="write a row for each region and mode to this file")
        return
    add("--recompute", choices=MODES, default="selective", help="recompute mode (default: %(default)s)")
    add("--workspace", metavar="SIZE", help="transient memory of each region, such as 16MiB (default: the device's)")
    for name, verb in (("include", "convert only"), ("exclude", "do not convert")):
        text = f"{verb} modules of this name; wildcards are allowed, and the option may be repeated"
        add(f"--{name}", action="append", metavar="NAME", help=text)
    add(
        "--otherwise",
        choices=OTHERWISE,
        default="checkpoint",
        help="make a layer that is not one fused op an activation checkpoint where that saves less, or leave it "
        "(default: %(default)s)",
    )
    add("--csv", type=Path, metavar="FILE", help="write a row for each module to this file")


def load(target: str) -> Callable:
    """Returns the function that FILE:FUNCTION names. A file that this process has loaded is not run again, so that its
    classes stay the same. Raises ValueError with the reason."""
    name, colon, function = target.rpartition(":")
    if not colon or not function.isidentifier():
        raise ValueError(f"wanted FILE:FUNCTION but got {target!r}")
    if name.endswith(".py") or Path(name).exists():
        path = Path(name).resolve()
        if not path.is_file():
            raise ValueError(f"there is no file {name}")
        module = sys.modules.get(path.stem)
        if getattr(module, "__file__", None) != str(path):
            sys.path.insert(0, str(path.parent))
            spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module  # so that its classes can be pickled
            spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
            raise ValueError(f"there is no file or module {name}") from None
    target = getattr(module, function, None)
    if not callable(target):
        raise ValueError(f"{name} has no function {function}")
    return target


def model_and_inputs(target: str) -> tuple[nn.Module, tuple, dict]:
    """Returns (model, positional arguments, keyword arguments) from FILE:FUNCTION."""
    built = load(target)()
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, ())
    if not isinstance(model, nn.Module):
        raise ValueError(f"FUNCTION must return a torch.nn.Module, or (model, inputs), not {type(model).__name__}")
    return model, *arguments_of(inputs)


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns 0; 2 if FILE:FUNCTION or an option is wrong."""
    try:
        if args.command == "frontier":
            built = load(args.target)()
            pair = isinstance(built, tuple) and len(built) == 2
            if not (pair and isinstance(built[0], nn.Module) and callable(built[1])):
                raise ValueError(
                    "FUNCTION must return (model, make_inputs), a torch.nn.Module and a function of a size"
                )
            largest = frontier(*built, args.budget, multiple=args.multiple, limit=args.limit)
            print(f"{largest.plan}\n\n{largest}")
            return 0
        if args.command == "convert":
            model, inputs, named = model_and_inputs(args.target)
            options = ("recompute", "workspace", "include", "exclude", "otherwise")
            conversion = convert(model, *inputs, **{name: getattr(args, name) for name in options}, **named)
            print(conversion)
            if args.csv:
                write_rows(args.csv, map(asdict, conversion))
            return 0
        plans = args.budget or args.saved
        if hint := missing(*["matplotlib"] * bool(args.figure), *["scipy"] * bool(plans)):
            raise ValueError(hint)
        model, inputs, named = model_and_inputs(args.target)
        if not (inputs or named):
            raise ValueError("FUNCTION must return (model, inputs), to measure with")
        measured = report(model, *inputs, **named)
        print(measured)
        if args.csv:
            measured.csv(args.csv)
        if args.figure:
            measured.figure(args.figure)
        if plans:
            print(f"\n{plan(model, *inputs, budget=args.budget, saved=args.saved, **named)}")
    except ValueError as error:
        print(f"ckptkern {args.command}: {error}", file=sys.stderr)
        return 2
    return 0
