"""``python -m ckptkern frontier FILE:FUNCTION``: the longest sequence of a model of yours that trains within a budget."""

from __future__ import annotations

import argparse
import sys

from torch import nn

from ..planning import frontier
from .convert import load

HELP = """\
FUNCTION takes no arguments and returns (model, make_inputs): make_inputs takes
a size, such as a number of tokens, and returns the inputs of a step of that
size: a tensor, a tuple of positional arguments, or a dict of keyword arguments:

    def build():
        def inputs(tokens):
            ids = torch.randint(0, 100, (1, tokens))
            return {"input_ids": ids, "labels": ids, "use_cache": False}

        return LlamaForCausalLM(LlamaConfig(...)), inputs

With labels the LM head and loss are in the step.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = HELP
    parser.add_argument("target", metavar="FILE:FUNCTION", help="a file or an importable module, and a function in it")
    parser.add_argument(
        "--budget", required=True, metavar="SIZE", help="bytes that a step may allocate at its peak, such as 24GiB"
    )
    parser.add_argument(
        "--multiple", type=int, default=64, metavar="N", help="try multiples of this size (default: %(default)s)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="try no larger size")


def main(args: argparse.Namespace) -> int:
    try:
        built = load(args.target)()
        if not (
            isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module) and callable(built[1])
        ):
            raise ValueError("FUNCTION must return (model, make_inputs), a torch.nn.Module and a function of a size")
        found = frontier(*built, args.budget, multiple=args.multiple, limit=args.limit)
    except ValueError as error:
        print(f"ckptkern frontier: {error}", file=sys.stderr)
        return 2
    print(f"{found.plan}\n\n{found}")
    return 0
