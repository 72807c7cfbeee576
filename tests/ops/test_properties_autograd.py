"""Every op of the catalogue as a part of autograd, torch.compile and torch.func: partial backwards and what they cost, strides,
sizes of zero, memory, checkpoints, graphs and transforms."""

import functools
import gc

import pytest
import torch
from support import catalog
from support.cases import (
    Tensors,
    Watch,
    assert_same,
    assert_same_within_rounding,
    every_other,
    gradients,
    output_gradient,
    padded_rows,
    seeded,
    transposed,
    uninitialised_is_nan,
)
from support.catalog import Entry, Sizes
from support.properties import (
    HEADS,
    OF_OPS,
    TILED,
    Case,
    alone,
    calls_of,
    each,
    each_call,
    joined,
    many,
    mode_in_turn,
    outcome,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import ckptkern
from ckptkern.memory import saved_tensors

# -- each input alone --------------------------------------------------------------------------------------------------

# These let go of x where no input that is trained reads it, and save it for these alone.
READ_X = {"linear_act": {"weight"}, "mlp": {"fc1_weight"}, "gated_mlp": {"gate_weight", "up_weight"}}


def flops_of(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def backward(results, leaves: Tensors, *names: str) -> tuple[Watch, Tensors]:
    y = joined(results)
    with Watch() as watch:
        grads = torch.autograd.grad(y, [leaves[name] for name in names], output_gradient(y), retain_graph=True)
    return watch, dict(zip(names, grads, strict=True))


def with_own_core(entry: Entry, options: tuple[str, ...]) -> tuple[str, ...]:
    """With dropout of attention's weights: torch's own kernel, which has none, forms the gradients of q, k and v together."""
    if entry.function.__name__ == "transformer_layer":
        return options or ("many options after a norm",)
    attends = {"num_heads", "query"} & entry.parameters.keys() and "dropout_p" in entry.parameters
    return (*options, "dropout_p") if attends and "dropout_p" not in options else options


def recomputed_flops(entry: Entry, forward: int) -> int:
    """At most forward again, in attention with the scores once more, where latents' values are as wide as keys, and of heads
    with updates these."""
    if entry.name in HEADS:
        return 2 * forward
    rows = {"attention_block": 3 * 4, "latent_attention_block": 3 * (6 + 3), "scaled_dot_product_attention": 4 * 4}
    return forward + 2 * Sizes().tokens * Sizes().heads * rows.get(entry.name, 0)


@pytest.mark.parametrize("entry", each(OF_OPS))
def test_each_input_alone(entry: Entry):
    """An input's gradient is the one of a whole backward, where others are frozen and where others are not asked for. It costs
    at most eager PyTorch's matmuls and what the mode recomputes, saves no more, and has the registered FLOPs.

    Without an option each input; with one those that it brings, and with many every third. Matmuls of packed sequences are not
    known from their shapes.
    """
    common = Case(entry).make().keys()
    for i, options in enumerate(dict.fromkeys([*alone(entry), *many(entry.name)])):
        for mode in entry.modes if entry.name in READ_X and not options else [mode_in_turn(entry, i)]:
            case = Case(entry, with_own_core(entry, options), mode)
            names = [name for name in case.make() if name not in common or len(options) != 1]
            check_inputs_alone(case, names[i % 3 :: 3] if len(names) > 15 else names)


def check_inputs_alone(case: Case, names: list[str]) -> None:
    entry, leaves = case.entry, case.make()
    with saved_tensors() as everything:
        results = case.results(leaves)
    whole, grads = backward(results, leaves, *leaves)
    counted = not {"cu_seqlens", "cu_seq_q"} & case.arguments.keys()
    assert whole.flops == whole.registered or not counted, (
        f"{case}: backward runs {whole.flops} FLOPs, but {whole.registered} are registered"
    )
    bounded = counted and entry.function.__name__ != "transformer_layer" and len(case.options) <= 2
    oracle, forward = (joined(case.oracle(leaves)), flops_of(lambda: case.oracle(leaves))) if bounded else (None, 0)
    # an expert's h is formed another way for a weight's gradient alone
    rounded = entry.name in HEADS or "moe" in entry.name or "experts" in entry.name
    compare = assert_same_within_rounding if rounded else assert_same
    for name in names:
        alone_, label = case.make(frozen=leaves.keys() - {name}), f"{case}, {name} alone"
        with saved_tensors() as saved:
            results_alone = case.results(alone_)
        asked_for, grad = backward(results, leaves, name)
        compare(grad, {name: grads[name]}, f"{label} asked for", "a backward for all")
        trained, grad = backward(results_alone, alone_, name)
        compare(grad, {name: grads[name]}, f"{label} trained", "a backward for all")
        assert saved.bytes <= everything.bytes, f"{label}: saves {saved.bytes} bytes, with all {everything.bytes}"
        if case.mode in ("none", "selective") and name not in READ_X.get(entry.name, leaves):
            assert leaves["x"].shape not in [shape for shape, *_ in saved.tensors], f"{label}: x is saved and not read"
        if not bounded:
            continue
        assert trained.flops == trained.registered == asked_for.flops, (
            f"{label}: backward runs {trained.flops} FLOPs, and {asked_for.flops} if others are trained, but not asked for; "
            f"{trained.registered} are registered"
        )
        of_eager = functools.partial(
            torch.autograd.grad, oracle, leaves[name], output_gradient(oracle), retain_graph=True
        )
        eager = flops_of(of_eager)
        most = min(whole.flops, eager + recomputed_flops(entry, forward))
        assert trained.flops <= most, (
            f"{label}: backward runs {trained.flops} FLOPs, but {most} are enough: {eager} are eager's"
        )


# -- again, and other layouts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("entry", "options"), each_call(OF_OPS))
def test_backward_again_and_again(entry: Entry, options):
    """Runs have the same bits, also a second backward through a retained graph; nothing that was given is changed, and with the
    garbage collector off nothing is left behind, also where a graph is dropped."""
    sent = []
    for mode in entry.modes or ("",):
        case = Case(entry, options, mode)
        leaves = case.make()
        first, results = outcome(case.results(leaves), leaves), case.results(leaves)
        for retain_graph in (True, False):
            again = outcome(results, leaves, lambda dy: sent.append(dy) or dy, retain_graph=retain_graph)
            assert_same(again, first, case, "a run before")
        assert not any(dy._version for dy in sent), f"{case}: backward writes the gradient that it was given"
        assert_same(leaves, case.make(), f"inputs of {case}", "the values that were given")
    name = next(iter(leaves))

    def step(backward: bool = True) -> None:
        y = case({**leaves, name: leaves[name] * 1})
        if backward:
            y.square().mean().backward()

    def left() -> int:
        return sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())

    gc.disable()
    gc.freeze()  # what is there already is not looked through, and counted, again and again
    try:
        step()
        before = left()
        for runs_backward in (True, True, False):
            step(runs_backward)
        assert left() == before, f"{case}: two steps and a forward leave {left() - before} tensors"
    finally:
        gc.unfreeze()
        gc.enable()


def expanded_rows(t: torch.Tensor) -> torch.Tensor:
    return t[..., :1].expand(t.shape)


def one_number(t: torch.Tensor) -> torch.Tensor:
    return t.new_tensor(0.7).expand(t.shape)


OF_INPUTS = transposed, padded_rows, every_other


@pytest.mark.parametrize("layout", [*OF_INPUTS, expanded_rows, one_number], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize(("entry", "options"), each_call(OF_OPS))
def test_strides(entry: Entry, options, layout):
    """Inputs and output gradients with other strides, the latter also with those of a sum, which are zero; a gradient has the
    strides of its parameter, if that is dense."""
    case = Case(entry, options, sizes=Sizes(experts=4))
    strided, dense = case.make(), case.make()
    if layout in OF_INPUTS:
        strided = {name: layout(leaf.detach()).requires_grad_() for name, leaf in strided.items()}
    actual = outcome(case.results(strided), strided, layout)
    expected = outcome(case.results(dense), dense, lambda dy: layout(dy).contiguous())
    assert_same_within_rounding(actual, expected, f"{case}, {layout.__name__}", "dense ones")
    for name, leaf in strided.items() if layout is transposed else ():
        case(strided).sum().backward(inputs=[leaf])
        strides = leaf.grad.stride()
        assert strides == leaf.stride(), f"{case}: the gradient of {name} has strides {strides}"


LEADING = [name for name, entry in OF_OPS.items() if "cu_seq_q" not in entry.parameters]


@pytest.mark.parametrize("lead", [(0, 3), (2, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("entry", each(LEADING))
@uninitialised_is_nan()
def test_sizes_of_zero_and_one(entry: Entry, lead: tuple[int, ...]):
    """Gradients are there and finite."""
    for mode in entry.modes or ("",):
        case = Case(entry, (), mode, Sizes(lead))
        options = {"reduction": "sum"} if "reduction" in entry.parameters else {}  # a mean of nothing is NaN
        leaves = case.make()
        both = (outcome(of(leaves, **options), leaves) for of in (case.results, case.oracle))
        assert_same_within_rounding(*both, f"{case}, of {lead} tokens", "the oracle")


# -- graphs and transforms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", each(OF_OPS))
def test_fakes(entry: Entry):
    """Shapes, dtypes and strides of every result on tensors without data; of each option, modes in turn, under autocast, and of
    what kernels save in other shapes."""
    called = [calls_of(Case(entry, options, mode_in_turn(entry, i))) for i, options in enumerate(alone(entry))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        called.append(calls_of(Case(entry)))
    for calls in called:
        check_fakes(calls)
    with ckptkern.backend("triton"):
        for mode in (entry.modes or ("",)) if "made_on_meta" in vars(entry.op) else ():
            check_fakes(calls_of(Case(entry, (), mode, TILED)))


def check_fakes(calls: list[tuple]) -> None:
    for op, args in calls:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def compiled(call, backend: str = "aot_eager"):
    torch._dynamo.reset()
    return torch.compile(call, backend=backend, fullgraph=True)


def offloaded(region):
    def run(*values):
        with torch.autograd.graph.save_on_cpu():
            return region(*values)

    return run


def exported(region, backend: str):
    """torch.export leaves only the bare ops. If these recorded no graph, parameters would silently get no gradient."""

    class Module(torch.nn.Module):
        def forward(self, *values):
            return region(*values)

    def run(*values):
        with ckptkern.backend(backend):
            return torch.export.export(Module(), values).module()(*values)

    return run


AROUND = {
    "inside our checkpoint": lambda region: functools.partial(ckptkern.checkpoint, region),
    "with saved tensors offloaded": offloaded,
    "compiled": compiled,
    "exported": lambda region: exported(region, "eager"),
    "exported with kernels": lambda region: exported(region, "triton"),
    "compiled by inductor": lambda region: compiled(region, "inductor"),
}
BITS = [*AROUND][:2]
WITH_X = "mlp", "mlp_block", "linear_act", "linear_stack", "gated_mlp", "attention_block", "moe_block", "dropout"
WITH_X_DROPPING = [
    pytest.param(OF_OPS[name], ("dropout_p",) * ("dropout_p" in OF_OPS[name].parameters), id=name) for name in WITH_X
]
# What compiling or exporting costs are seconds: in `make test` each op is compiled with many options at once.
IN_GRAPHS = [(case, way, False) for case in each_call(OF_OPS) for way in BITS]
IN_GRAPHS += [(case, "compiled", not case.id.endswith("1") and case.id != "dropout-none") for case in each_call(OF_OPS)]
IN_GRAPHS += [(case, way, "mlp" not in case.id) for case in WITH_X_DROPPING for way in [*AROUND][3:5]]
IN_GRAPHS += [(case, "compiled by inductor", True) for case in WITH_X_DROPPING[4:6]]


@pytest.mark.parametrize(
    ("entry", "options", "way"),
    [
        pytest.param(*case.values, way, id=f"{case.id}-{way}", marks=[pytest.mark.long] * is_long)
        for case, way, is_long in IN_GRAPHS
    ],
)
def test_inside_checkpoints_hooks_and_graphs(entry: Entry, options, way):
    """The masks and the generator's state are those of the call alone; outside of graphs bits are, too."""
    case = Case(entry, options).with_()
    leaves = case.make()

    def region(*values):
        return case.unseeded(dict(zip(leaves, values, strict=True))).sin()

    def step(run) -> Tensors:
        return gradients(seeded(lambda leaves: run(*leaves.values())), leaves)

    expected, state = step(region), torch.get_rng_state()
    compare = assert_same_within_rounding if entry.name in HEADS or way not in BITS else assert_same
    compare(step(AROUND[way](region)), expected, f"{case} {way}", "the call alone")
    assert torch.equal(torch.get_rng_state(), state), f"{case} {way} leaves the generator elsewhere"


def test_dynamo_traces_every_op():
    """Releases of torch differ in what Dynamo takes, so this is one test: it runs on each of them, with `--quick` too."""
    for entry in OF_OPS.values():
        case = Case(entry).with_()
        leaves = case.make()
        compiled(case.unseeded, "eager")(leaves)


@pytest.mark.slow
@pytest.mark.parametrize("entry", each(["mlp", "attention_block", "linear_cross_entropy"]))
def test_one_graph_for_all_sizes_and_modes_of_autograd(entry: Entry):
    """Sizes compile once, dynamically, and seeds compile nothing; evaluation has a graph of its own, which saves nothing."""
    counter = CompileCounterWithBackend("aot_eager")
    first = Case(entry, ("dropout_p",) if "dropout_p" in entry.parameters else ())

    def call(leaves, inputs):
        return catalog.call(entry, inputs, leaves)

    run = compiled(call, counter)
    for tokens, seed in ((3, 1), (5, 1), (5, 2), (9, 1), (33, 1)):
        case = first._replace(sizes=Sizes((2, tokens)))
        leaves = case.make()
        inputs = case.given(leaves)
        outcomes = []
        for function in (run, call):
            torch.manual_seed(seed)
            outcomes.append(outcome([function(leaves, inputs)], leaves))
        assert_same_within_rounding(*outcomes, f"{case} of {tokens} tokens, compiled", "the call as it is")
    graphs = counter.frame_count
    assert graphs <= 2, f"{graphs} graphs, but one of the first size and one of any are enough"
    with torch.no_grad(), saved_tensors() as saved:
        assert not run(leaves, inputs).requires_grad
    assert saved.bytes == 0


@pytest.mark.parametrize(("entry", "options"), each_call(OF_OPS))
def test_gradients_of_torch_func(entry: Entry, options):
    """torch.func.grad, and the vmap of a batch of output gradients."""
    case = Case(entry, options)
    leaves = case.make()
    y = case(leaves)
    dy, wanted = output_gradient(y), list(leaves.values())
    grads = torch.func.grad(lambda leaves: (case(leaves) * dy).sum())({n: t.detach() for n, t in leaves.items()})
    expected = gradients(case, leaves)
    del expected["y"]
    assert_same_within_rounding(grads, expected, f"{case}, by torch.func.grad", "autograd")
    for create_graph in (True, False):
        both = torch.stack([dy, 2 * dy])
        batched = torch.autograd.grad(y, wanted, both, True, create_graph, is_grads_batched=True)
        for i in range(2):
            actual = {name: rows[i] / (i + 1) for name, rows in zip(leaves, batched, strict=True)}
            assert_same_within_rounding(actual, expected, f"{case}, of a batch of output gradients", "autograd")


# Ops whose other arguments have no batch dimension.
BATCHED = [name for name in OF_OPS if name.startswith(("linear_act", "linear_stack", "mlp", "gated", "transformer"))]
BATCHED += [name for name in OF_OPS if name.endswith("_block") and name not in BATCHED]


@pytest.mark.parametrize("entry", each(BATCHED))
def test_gradients_of_each_sample(entry: Entry):
    """vmap(grad) over a batch equals a loop over its samples."""
    for mode in entry.modes:
        case = Case(entry, (), mode).with_()
        leaves = {name: t.detach() for name, t in case.make().items()}
        grad = torch.func.grad(lambda t, case=case: case.unseeded(t).square().sum())
        batched = torch.func.vmap(grad, in_dims=(dict.fromkeys(leaves) | {"x": 0},))(leaves)
        for i, sample in enumerate(leaves["x"]):
            actual, expected = {name: t[i] for name, t in batched.items()}, grad(leaves | {"x": sample})
            assert_same_within_rounding(actual, expected, f"{case}, sample {i} of vmap", "the sample alone")


@pytest.mark.parametrize("entry", each(OF_OPS))
def test_forward_mode_is_refused(entry: Entry):
    case = Case(entry)
    leaves = case.make()
    name, x = next(iter(leaves.items()))
    with pytest.raises(NotImplementedError, match=f"^{entry.op.name}: forward-mode AD is not supported"):
        torch.func.jvp(lambda value: case({**leaves, name: value}), (x.detach(),), (torch.ones_like(x),))
