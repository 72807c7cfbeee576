"""Matmuls of backward where only some gradients are asked for, of each op with weights in each mode, counted on meta tensors.

    python -m benchmarks.dev.partial        # also writes the table into docs/concepts/recompute-modes.md

The unit is one [tokens, d] x [d, d], with all widths equal; core attention has two in forward and five in backward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from ckptkern.benchmarks.report import with_part
from ckptkern.ops.catalog import HEAD_DIM, OPS, Entry, Sizes, backend, call, input_shapes

NAMES = ("linear_act", "linear_stack", "mlp", "gated_mlp", "mlp_block", "attention_block", "transformer_layer")
MODES = ("none", "selective", "full")
PAGE = Path("docs/concepts/recompute-modes.md")
BEGIN, END = "<!-- partial:begin -->", "<!-- partial:end -->"


class Row(NamedTuple):
    """Matmuls of forward, and of backward for x alone, for all but x, and for everything."""

    op: str
    mode: str
    forward: float
    x: float
    weights: float
    all: float


def counted(entry: Entry, mode: str) -> Row:
    d = 2 * HEAD_DIM
    arguments = entry.inputs(Sizes((1, d), d, d, d, 2))
    leaves = {
        name: torch.empty(shape, device="meta", requires_grad=True) for name, shape in input_shapes(arguments).items()
    }
    names, found = list(leaves), []
    with backend("eager"):
        with FlopCounterMode(display=False) as counter:
            call(entry, arguments, leaves, recompute=mode)
        found.append(counter.get_total_flops())
        for wanted in (names[:1], names[1:], names):
            y = call(entry, arguments, leaves, recompute=mode)
            with FlopCounterMode(display=False) as counter:
                torch.autograd.grad(y, [leaves[name] for name in wanted], torch.empty_like(y))
            found.append(counter.get_total_flops())
    return Row(entry.name, mode, *(flops / (2 * d**3) for flops in found))


def rows() -> Iterator[Row]:
    for name in NAMES:
        for mode in MODES:
            yield counted(OPS[name], mode)


def table() -> str:
    lines = ["| op | mode | forward | x alone | weights alone | all |", "|---|---|---:|---:|---:|---:|"]
    for op, mode, *counts in rows():
        lines.append(f"| `{op}` | `{mode}` | {' | '.join(f'{count:g}' for count in counts)} |")
    return "\n".join(lines)


def main() -> int:
    text = table()
    print(text)
    if PAGE.exists():
        PAGE.write_text(with_part(PAGE, BEGIN, text, END))
    return 0


if __name__ == "__main__":
    sys.exit(main())
