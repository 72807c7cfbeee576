"""The catalogue: every op is listed with every argument, and the documentation counts the matmuls that it has."""

import inspect
import re

import pytest
import torch
from support import catalog
from support.cases import MODES
from support.catalog import OPS, Entry, Sizes
from support.outside import ROOT
from torch.utils.flop_counter import FlopCounterMode

import ckptkern

NO_OPS = {
    "ACTIVATIONS", "LoRA", "accumulate_in_place", "backend", "delay_weight_gradients", "split_backward", "workspace"
}  # fmt: skip


def test_every_op_is_listed():
    of_ops = vars(ckptkern.ops)
    assert OPS.keys() == {name for name in ckptkern.__all__ if getattr(ckptkern, name) is of_ops.get(name)} - NO_OPS


@pytest.mark.parametrize("name", OPS)
def test_every_argument_is_an_input_or_an_option_with_another_value(name):
    entry, inputs, options = OPS[name], OPS[name].inputs(Sizes()), OPS[name].every_option()
    assert inputs.keys() | options.keys() == entry.parameters.keys(), "an argument that the catalogue does not list"
    for option, arguments in options.items():
        value, default = arguments[option], entry.parameters[option].default
        assert default is not inspect.Parameter.empty or option in inputs, option
        assert isinstance(value, torch.Tensor | catalog.Normal) or value != default, option


ROW = r"^\| `(\w+)`[^|]*\|[^|]*\|[^|]*\|[^|]*\| ([0-9k, ]+?) \| (\w+) \|$"
ROWS = {name: row for name, *row in re.findall(ROW, (ROOT / "docs/measurements/figures.md").read_text(), re.MULTILINE)}


def matmul_count(entry: Entry, **options) -> float:
    """GEMMs of forward and backward with everything trained, in units of [tokens, d] x [d, d]; the core of attention has two
    such in forward."""
    d = 2 * catalog.HEAD_DIM
    arguments = entry.inputs(Sizes((1, d), d, d, d, 2))
    shapes = catalog.input_shapes(arguments)
    leaves = {name: torch.empty(shape, device="meta", requires_grad=True) for name, shape in shapes.items()}
    with ckptkern.backend("eager"), FlopCounterMode(display=False) as counter:
        catalog.call(entry, arguments, leaves, **options).sum().backward()
    return counter.get_total_flops() / (2 * d**3)


# Ops whose matmuls are of one size.
@pytest.mark.parametrize("name", ["linear_act", "mlp", "gated_mlp", "moe_mlp", "linear_cross_entropy"])
def test_the_documentations_matmuls_and_default(name):
    matmuls, default = ROWS[name]
    experts = 2  # of a token, in the example
    counts = [matmul_count(OPS[name], recompute=mode) for mode in MODES]
    assert matmuls == ", ".join(f"{count / experts:.0f}k" if "k" in matmuls else f"{count:.0f}" for count in counts)
    assert default == OPS[name].modes[0]
