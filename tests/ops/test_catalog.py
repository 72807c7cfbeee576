"""The catalogue: every op is listed with every argument, options reach the fields of their names, and the documentation counts
the matmuls that it has."""

import inspect
import itertools
import re
from pathlib import Path

import pytest
import torch
from support.cases import MODES
from support.properties import OF_OPS, Case, alone, calls_of, each
from torch.utils.flop_counter import FlopCounterMode

import ckptkern
from ckptkern.ops import catalog
from ckptkern.ops.catalog import OPS, Entry, Sizes
from ckptkern.ops.registration import codec


def test_every_op_is_listed():
    assert OPS.keys() == {*ckptkern.ops.__all__} - {
        "ACTIVATIONS",
        "LoRA",
        "accumulate_in_place",
        "backend",
        "delay_weight_gradients",
        "split_backward",
        "workspace",
    }


@pytest.mark.parametrize("name", OPS)
def test_every_argument_is_an_input_or_an_option_with_another_value(name):
    entry, inputs, options = OPS[name], OPS[name].inputs(Sizes()), OPS[name].every_option()
    assert inputs.keys() | options.keys() == entry.parameters.keys(), "an argument that the catalogue does not list"
    for option, arguments in options.items():
        value, default = arguments[option], entry.parameters[option].default
        assert default is not inspect.Parameter.empty or option in inputs, option
        assert isinstance(value, torch.Tensor | catalog.Normal) or value != default, option


FIGURES = (Path(__file__).resolve().parents[2] / "docs" / "figures.md").read_text()
ROWS = re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\|[^|]*\|[^|]*\| ([0-9k, ]+?) \| (\w+) \|$", FIGURES, re.MULTILINE)


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


@pytest.mark.parametrize(("name", "matmuls", "default"), ROWS)
def test_the_documentations_matmuls_and_default(name, matmuls, default):
    entry, experts = OPS[name], 2  # of a token, in the example
    counts = [matmul_count(entry, recompute=mode) for mode in MODES]
    assert matmuls == ", ".join(f"{count / experts:.0f}k" if "k" in matmuls else f"{count:.0f}" for count in counts)
    assert default == entry.modes[0]


def test_the_documentation_has_the_ops_whose_matmuls_are_of_one_size():
    assert {name for name, *_ in ROWS} == {"linear_act", "mlp", "gated_mlp", "moe_mlp", "linear_cross_entropy"}


def test_nothing_runs_where_nothing_is_dropped():
    assert calls_of(Case(OPS["dropout"], ("training",))) == []


def fields(options) -> dict:
    """Their values by name, those of NamedTuples in them too; of two fields of one name, the outer one's."""
    inner = [one for one in options if isinstance(one, tuple)]
    found = {}
    for one in (*inner, *itertools.chain(*inner)):
        found |= fields(one) if hasattr(one, "_fields") else {}
    return found | (options._asdict() if hasattr(options, "_fields") else {})


@pytest.mark.parametrize("entry", each(OF_OPS))
def test_an_option_reaches_the_field_of_its_name(entry: Entry):
    """Each bool, and of the others the one that has another value than its default: no two are swapped. What `return_NAME` asks
    for is the result of that name."""
    for options in alone(entry):
        case = Case(entry, options)
        if case.entry.name == "dropout" and options == ("training",):
            continue
        (_, (_, *lists)), _ = calls_of(case)
        reached = fields(codec.unpack(codec.layout_of(entry.op.Options), lists))
        given = {name: parameter.default for name, parameter in entry.parameters.items()} | case.arguments
        for name in reached.keys() & given.keys():
            if isinstance(reached[name], bool) or (name in options and isinstance(given[name], int | float | str)):
                assert reached[name] == given[name], (
                    f"{case}: {name} is {reached[name]} in the op, but {given[name]} was given"
                )
        returned = {name for name in given if name.startswith("return_") and given[name]}
        assert returned == {f"return_{one}" for one in reached.get("results", ())} & given.keys(), case
