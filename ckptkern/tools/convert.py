"""``python -m ckptkern convert FILE:FUNCTION``: what ckptkern.convert does with a model of yours."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import memory
from ..conversion import Conversion, Row, convert
from ..conversion.convert import OTHERWISE

MODES = ("none", "selective", "full")

HELP = """\
FUNCTION takes no arguments and returns the model, or (model, inputs): a
tensor, a tuple of positional arguments, or a dict of keyword arguments,
as small as the model accepts:

    def build():
        model = LlamaForCausalLM(LlamaConfig(...))
        ids = torch.randint(0, 100, (2, 16))
        return model, {"input_ids": ids, "labels": ids, "use_cache": False}

With labels the call computes the loss, which can then be fused with the head.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = HELP
    parser.add_argument("target", metavar="FILE:FUNCTION", help="a file or an importable module, and a function in it")
    parser.add_argument("--recompute", choices=MODES, default="selective", help="the mode (default: %(default)s)")
    parser.add_argument(
        "--workspace", metavar="SIZE", help="transient memory of each region, such as 16MiB (default: the device's)"
    )
    parser.add_argument(
        "--include",
        action="append",
        metavar="NAME",
        help="only modules of this name, wildcards allowed; may be repeated",
    )
    parser.add_argument("--exclude", action="append", metavar="NAME", help="no modules of this name; may be repeated")
    parser.add_argument(
        "--otherwise", choices=OTHERWISE, default="checkpoint",
        help="what becomes of a layer that is not one fused op: an activation checkpoint where that saves less, or left "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a row for each module to this file")


def load(target: str, again: bool = True) -> Callable[..., Any]:
    """The function that FILE:FUNCTION names. again=False: a file that this process has loaded is not run a second time, so
    its classes stay the same. Raises ValueError with what is wrong."""
    name, colon, function = target.rpartition(":")
    if not colon or not function.isidentifier():
        raise ValueError(f"wanted FILE:FUNCTION but got {target!r}")
    if name.endswith(".py") or Path(name).exists():
        path = Path(name).resolve()
        if not path.is_file():
            raise ValueError(f"there is no file {name}")
        module = sys.modules.get(path.stem)
        if again or getattr(module, "__file__", None) != str(path):
            sys.path.insert(0, str(path.parent))
            spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module  # classes of it are found when they are pickled
            spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
            raise ValueError(f"there is no file or module {name}") from None
    found = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"{name} has no function {function}")
    return found


def model_and_inputs(built: Any) -> tuple[nn.Module, tuple, dict[str, Any]]:
    """(model, positional, keyword arguments) of what the function returned."""
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, ())
    if not isinstance(model, nn.Module):
        raise ValueError(f"FUNCTION must return a torch.nn.Module, or (model, inputs), not {type(model).__name__}")
    if isinstance(inputs, Tensor):
        return model, (inputs,), {}
    if isinstance(inputs, dict):
        return model, (), inputs
    return model, tuple(inputs), {}


def saved(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> int:
    was = [(m, m.training) for m in model.modules()]
    try:
        with torch.random.fork_rng(), memory.saved_tensors(model) as saved:
            model.train()(*args, **kwargs)
    finally:
        for m, training in was:
            m.training = training
    return saved.bytes


def write(conversion: Conversion, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
        writer.writeheader()
        writer.writerows(map(dataclasses.asdict, conversion))


def main(args: argparse.Namespace) -> int:
    try:
        model, given, named = model_and_inputs(load(args.target)())
    except ValueError as error:
        print(f"ckptkern convert: {error}", file=sys.stderr)
        return 2
    before = saved(model, given, named) if given or named else None
    conversion = convert(
        model, *given, recompute=args.recompute, workspace=args.workspace, include=args.include, exclude=args.exclude,
        otherwise=args.otherwise,
        **named,
    )  # fmt: skip
    print(conversion)
    if before is not None:
        after = saved(model, given, named)
        print(
            f"a training step of the whole model saves {memory.format_size(after)} instead of "
            f"{memory.format_size(before)}, besides parameters"
        )
    if args.csv:
        write(conversion, args.csv)
    return 0
