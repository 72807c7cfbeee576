"""Every option of every op, as the catalogue lists them: what a new option must have besides its forward and backward.

A row of the catalogue, a reference implementation, gradients of every result that has a graph, fakes, and a workspace that
counts what its backward holds.
"""

import inspect
import itertools
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.cases import MODES, SEED, assert_same_within_rounding, output_gradient, seeded
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime.interpreter import InterpretedFunction

import ckptkern
from ckptkern.memory import memory_timeline, peak_memory
from ckptkern.ops import catalog
from ckptkern.ops.catalog import IN_TORCH_OPS, OPS, OTHER_OPS, Entry, Sizes
from ckptkern.ops.cross_entropy.op import LinearCrossEntropy
from ckptkern.ops.registration import codec
from ckptkern.ops.registration.needs import joined, needed
from ckptkern.ops.registration.op import run_forward

SIZES = Sizes()
TILED = Sizes((2, 3), 36, 40, 70)  # several of the interpreter's tiles, the last of which are not full
OF_OPS = (*OPS.values(), *OTHER_OPS)
ALL = (*OF_OPS, *IN_TORCH_OPS)
WITH_KERNELS = [one for one in OF_OPS if one.op.kernels]


def tensors_of(found) -> tuple[torch.Tensor, ...]:
    """What a function returns, without what was not asked for."""
    return tuple(one for one in tree_leaves(found) if one is not None)


class Case(NamedTuple):
    """An op with an option, at a recompute mode ("" where it has none); `function` as a `cases.Setup`'s `fused`."""

    entry: Entry
    option: str
    mode: str
    sizes: Sizes = SIZES

    @property
    def arguments(self) -> dict:
        chosen = self.entry.every_option(self.sizes)
        modes = {"recompute": self.mode} if self.mode else {}
        return self.entry.inputs(self.sizes) | modes | chosen.get(self.option, {})

    def make(self, dtype=torch.float64) -> dict:
        return catalog.random_leaves(self.arguments, dtype)

    def results(self, leaves: dict, **more) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(SEED)
        return tensors_of(catalog.call(self.entry, self.arguments, leaves, **more))

    def function(self, leaves: dict, **more) -> torch.Tensor:
        """Those that have a graph."""
        return torch.cat([one.reshape(-1) for one in self.results(leaves, **more) if one.requires_grad])


def alone(entry: Entry) -> list[str]:
    """The options that need no second process, and "" for none of them."""
    chosen = entry.every_option()
    return ["", *(name for name in chosen if catalog.ACROSS_RANKS not in chosen[name].values())]


def cases(*modes: int, entries=OF_OPS, once: bool = False) -> list:
    """pytest parameters: every option of these entries, at the modes in these places, the default's first. once: an option is
    `sampled` where an entry before has one of its name."""
    found = []
    for entry in entries:
        chosen = [entry.modes[i] for i in modes] if entry.modes else [""]
        for option in alone(entry):
            own = [""] if option == "recompute" else chosen
            found += [Case(entry, option, mode) for mode in own]
    first = {(one.option, one.mode): one for one in reversed(found)}
    return [
        pytest.param(
            one,
            id="-".join(filter(None, (one.entry.name, one.option or "none", one.mode))),
            marks=[pytest.mark.sampled] if once and one.option and first[one.option, one.mode] is not one else [],
        )
        for one in found
    ]


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
    entry, inputs, options = OPS[name], OPS[name].inputs(SIZES), OPS[name].every_option()
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


class Calls(TorchDispatchMode):
    """The library ops that run, and their arguments."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "ckptkern" and func._schema.name.endswith(("_fwd", "_bwd")):
            self.found.append((func, tree_map_only(torch.Tensor, torch.Tensor.detach, args)))
        return func(*args, **(kwargs or {}))


def calls_of(case: Case, dtype=torch.float64) -> list[tuple]:
    with Calls() as calls:
        y = case.function(case.make(dtype))
        y.backward(output_gradient(y))
    return calls.found


def test_nothing_runs_where_nothing_is_dropped():
    assert calls_of(Case(OPS["dropout"], "training", "")) == []


RUNS = [one for one in cases(0) if one.id != "dropout-training"]


def fields(options) -> dict:
    """Their values by name, those of NamedTuples in them too; of two fields of one name, the outer one's."""
    inner = [one for one in options if isinstance(one, tuple)]
    found = {}
    for one in (*inner, *itertools.chain(*inner)):
        found |= fields(one) if hasattr(one, "_fields") else {}
    return found | (options._asdict() if hasattr(options, "_fields") else {})


@pytest.mark.parametrize("case", RUNS)
def test_an_option_reaches_the_field_of_its_name(case):
    """Each bool, and of the others the one that has another value than its default: no two are swapped. What `return_NAME` asks
    for is the result of that name."""
    (_, (_, *lists)), _ = calls_of(case)
    found, entry = fields(codec.unpack(codec.layout_of(case.entry.op.Options), lists)), case.entry
    given = {name: one.default for name, one in entry.parameters.items()} | case.arguments
    for name in found.keys() & given.keys():
        if isinstance(found[name], bool) or (name == case.option and isinstance(given[name], int | float | str)):
            assert found[name] == given[name], name
    returned = {name for name in given if name.startswith("return_") and given[name]}
    assert returned == {f"return_{one}" for one in found.get("results", ())} & given.keys()


@pytest.mark.parametrize("case", RUNS)
def test_the_reference_implementation_has_the_option(case):
    """Its values and its gradients are forward's and backward's, in float64."""
    (_, (tensors, *lists)), (bwd, args) = calls_of(case)
    op, needs, ours = case.entry.op, joined(args[-1]), bwd(*args)
    options = codec.unpack(codec.layout_of(op.Options), lists)
    more, wanted = len(op.more_results(options)), [i for i in range(len(tensors)) if needed(needs, i)]
    y = run_forward(op, tensors, options)[: 1 + more]
    theirs = op.reference([t.requires_grad_() if i in wanted else t for i, t in enumerate(tensors)], options)
    theirs = theirs if isinstance(theirs, tuple) else (theirs,)
    torch.testing.assert_close(list(theirs), y)
    grads = torch.autograd.grad(theirs, [tensors[i] for i in wanted], [args[0], *args[2][len(args[2]) - more :]])
    for i, grad in zip(wanted, grads, strict=True):
        torch.testing.assert_close(ours[i], grad)


@pytest.mark.parametrize("case", cases(0, entries=IN_TORCH_OPS))
def test_what_runs_in_torch_ops_has_the_option(case):
    """It gives what the op gives of its own arguments."""
    leaves, op = case.make(), case._replace(entry=OPS[case.entry.function.__name__])
    for ours, theirs in zip(case.results(leaves), op.results(leaves), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.requires_grad == theirs.requires_grad


@pytest.mark.parametrize("case", cases(0, -1, entries=ALL))
def test_results_that_have_a_graph_have_gradients(case):
    """A statistic without a gradient is detached, or its gradient is right."""
    leaves = case.make()

    def function(*values):
        return case.function(dict(zip(leaves, values, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(leaves.values()), fast_mode=True)


@pytest.mark.parametrize("case", cases(0, entries=ALL, once=True))
def test_second_order(case):
    leaves = case.make()

    def function(*values):
        return case.function(dict(zip(leaves, values, strict=True)))

    assert torch.autograd.gradgradcheck(function, tuple(leaves.values()), fast_mode=True)


@pytest.mark.parametrize("case", cases(0, -1))
def test_fakes(case):
    for op, args in calls_of(case, torch.float32):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("case", cases(0, -1, entries=[one for one in OF_OPS if "made_on_meta" in vars(one.op)]))
def test_fakes_of_what_kernels_save_in_other_shapes(case):
    with ckptkern.backend("triton"):
        test_fakes(case._replace(sizes=TILED))


@pytest.mark.parametrize("case", cases(0, entries=ALL, once=True))
def test_compiled_equals_eager(case):
    torch._dynamo.reset()
    leaves = case.make(torch.float32)

    def gradients(function):
        y = torch.cat([one.reshape(-1) for one in function(leaves)])
        return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), output_gradient(y)), strict=True))

    def call(leaves):
        return [one for one in tensors_of(catalog.call(case.entry, case.arguments, leaves)) if one.requires_grad]

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_same_within_rounding(gradients(seeded(compiled)), gradients(seeded(call)))


MANY = Sizes((2, 3), 8, 40, 2050)  # three times as many slices of classes as are combined at once


@pytest.mark.parametrize("case", cases(0, -1, entries=WITH_KERNELS, once=True))
def test_kernels_compute_what_eager_does(case):
    """Every result, with a graph or without, and the gradients."""
    case = case._replace(sizes=MANY if case.entry.op is LinearCrossEntropy else TILED)
    leaves = case.make(torch.float32)

    def found() -> dict[str, torch.Tensor]:
        results = case.results(leaves)
        y = torch.cat([one.reshape(-1) for one in results if one.requires_grad])
        grads = torch.autograd.grad(y, list(leaves.values()), output_gradient(y))
        values = {str(i): one.detach() if one.is_floating_point() else one.double() for i, one in enumerate(results)}
        return values | dict(zip(leaves, grads, strict=True))

    with ckptkern.backend("triton"):
        ours = found()
    assert_same_within_rounding(ours, found())


HEADS = ("linear_cross_entropy", "selected_log_probs", "linear_distillation", "linear_topk_distillation")
BOUNDED = dict.fromkeys(HEADS, Sizes((640,), 16, 16, 2048))  # scaled_dot_product_attention: test_query_blocks.py
BOUNDED |= dict.fromkeys(
    (
        "attention_block",
        "latent_attention_block",
        "transformer_layer",
        "transformer_layer-experts",
        "transformer_layer-latents",
        "transformer_layer-latents and experts",
    ),
    Sizes((2, 256), 8, 64, 8, 4),
)
LAYERS = ("linear_stack", "mlp", "gated_mlp", "mlp_block", "moe_block", "moe_mlp", "grouped_gated_mlp")
BOUNDED |= dict.fromkeys(LAYERS, Sizes((1280,), 8, 64, 8))


def test_ops_with_a_workspace_are_bounded():
    assert BOUNDED.keys() == {one.name for one in OF_OPS if "workspace" in one.parameters} - {
        "scaled_dot_product_attention"
    }


@pytest.mark.parametrize("case", cases(0, -1, entries=[one for one in WITH_KERNELS if one.name in BOUNDED]))
def test_the_workspace_counts_what_kernels_hold(case, monkeypatch):
    """Kernels are not run: here they are what their launchers allocate."""
    monkeypatch.setattr(InterpretedFunction, "run", lambda *args, **options: None)
    check_what_a_pass_holds(case, "triton")


@pytest.mark.parametrize("case", cases(0, -1, entries=[one for one in OF_OPS if one.name in BOUNDED]))
def test_the_workspace_counts_what_a_pass_holds(case):
    check_what_a_pass_holds(case, "eager")


def check_what_a_pass_holds(case, backend):
    """With room for four of the smallest chunks forward takes no fifth, and backward neither."""
    case = case._replace(sizes=BOUNDED[case.entry.name])
    leaves = case.make(torch.float32)

    def transient(workspace: int) -> tuple[int, int]:
        """How far memory rises above what stays."""
        with ckptkern.backend(backend), memory_timeline("cpu") as forward:
            results = case.results(leaves, workspace=workspace)
        y = torch.cat([one.reshape(-1) for one in results if one.requires_grad])
        dy = output_gradient(y)
        with peak_memory("cpu") as backward:
            grads = torch.autograd.grad(y, list(leaves.values()), dy)
        return forward.peak - forward.bytes[-1], backward.bytes - sum(grad.nbytes for grad in grads)

    for i, least in enumerate(transient(1)):
        if least > 0:  # a backward that scales the gradients that forward formed holds less than these
            assert transient(4 * least)[i] <= 4 * least, ("forward", "backward")[i]
