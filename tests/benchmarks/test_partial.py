"""Matmuls of backward where only some gradients are asked for, of each op with weights in each mode, counted on meta tensors: a
part runs no more than it needs.

The unit is one [tokens, d] x [d, d], with all widths equal; core attention has two in forward and five in backward.
"""

from typing import NamedTuple

import pytest
import torch
from support.catalog import HEAD_DIM, OPS, Entry, Sizes, call, input_shapes
from torch.utils.flop_counter import FlopCounterMode

from ckptkern.ops import backend

NAMES = ("linear_act", "linear_stack", "mlp", "gated_mlp", "mlp_block", "attention_block", "transformer_layer")
MODES = ("none", "selective", "full")


class Row(NamedTuple):
    """Matmuls of forward, and of backward for x alone, for all but x, and for everything."""

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
    names, flops = list(leaves), []
    with backend("eager"):
        with FlopCounterMode(display=False) as counter:
            call(entry, arguments, leaves, recompute=mode)
        flops.append(counter.get_total_flops())
        for wanted in (names[:1], names[1:], names):
            y = call(entry, arguments, leaves, recompute=mode)
            with FlopCounterMode(display=False) as counter:
                torch.autograd.grad(y, [leaves[name] for name in wanted], torch.empty_like(y))
            flops.append(counter.get_total_flops())
    return Row(*(count / (2 * d**3) for count in flops))


ROWS = {(name, mode): counted(OPS[name], mode) for name in NAMES for mode in MODES}


@pytest.mark.parametrize("name", NAMES)
def test_a_recompute_is_added_once_whatever_is_asked_for(name):
    """`"none"` recomputes nothing. Each matmul of its backward is in the pass for x, in that for the weights, or in both."""
    none = ROWS[name, "none"]
    assert max(none.x, none.weights) < none.all <= none.x + none.weights
    for mode in MODES:
        row = ROWS[name, mode]
        recomputed = row.all - none.all
        assert (row.x - none.x, row.weights - none.weights) == (recomputed, recomputed)
        assert 0 <= recomputed <= row.forward == none.forward


def test_an_mlp_by_hand():
    """dx takes dh and dx; the weights dh and two of their own; `"full"` computes h again."""
    assert ROWS["mlp", "none"] == (2, 2, 3, 4)
    assert ROWS["mlp", "full"] == (2, 3, 4, 5)


# forward | backward for x, for the weights, for both, each at "none", "selective", "full"
COUNTS = {
    "linear_act": "1 | 1, 1, 2 | 1, 1, 2 | 2, 2, 3",
    "linear_stack": "3 | 3, 3, 5 | 5, 5, 7 | 6, 6, 8",
    "mlp": "2 | 2, 2, 3 | 3, 3, 4 | 4, 4, 5",
    "gated_mlp": "3 | 3, 3, 5 | 4, 4, 6 | 6, 6, 8",
    "mlp_block": "2 | 2, 2, 3 | 3, 3, 4 | 4, 4, 5",
    "attention_block": "6 | 9, 12, 14 | 10, 13, 15 | 13, 16, 18",
    "transformer_layer": "8 | 11, 16, 18 | 14, 19, 21 | 17, 22, 24",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_counts(name):
    rows = [ROWS[name, mode] for mode in MODES]
    parts = [", ".join(f"{getattr(row, part):g}" for row in rows) for part in ("x", "weights", "all")]
    assert f"{rows[0].forward:g} | {' | '.join(parts)}" == COUNTS[name]
