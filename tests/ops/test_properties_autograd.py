"""Every op of the catalogue as a part of autograd, torch.compile and torch.func: partial backwards and what they cost, strides,
sizes of zero, memory, checkpoints, graphs and transforms."""

import functools
from typing import NamedTuple

import pytest
import torch
from support.cases import (
    SEED,
    Watch,
    assert_flat_memory,
    every_other,
    output_gradient,
    padded_rows,
    through_export,
    transposed,
)
from support.properties import (
    HEADS,
    OF_OPS,
    TILED,
    Case,
    alone,
    assert_bits,
    assert_equal_to_rounding,
    calls_of,
    each,
    each_call,
    joined,
    many,
    mode_in_turn,
    outcome,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ckptkern
from ckptkern.memory import saved_tensors
from ckptkern.ops import catalog
from ckptkern.ops.catalog import Entry, Sizes

# -- each input alone --------------------------------------------------------------------------------------------------

# These let go of x where no input that is trained reads it, and save it for these alone.
READ_X = {"linear_act": {"weight"}, "mlp": {"fc1_weight"}, "gated_mlp": {"gate_weight", "up_weight"}}


def frozen_but(leaves: dict, name: str) -> dict:
    return {one: leaf.detach().requires_grad_(one == name) for one, leaf in leaves.items()}


def flops_of(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


class Backward(NamedTuple):
    """flops: of the matmuls that run; registered: by the ops' formulas."""

    flops: int
    registered: int
    grads: dict[str, torch.Tensor]

    @classmethod
    def of(cls, results, leaves, names):
        y = joined(results)
        with Watch() as watch:
            grads = torch.autograd.grad(y, [leaves[name] for name in names], output_gradient(y), retain_graph=True)
        return cls(watch.flops, watch.registered, dict(zip(names, grads, strict=True)))


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
    entry, leaves = case.entry, case.make(torch.float32)
    counted = "cu_seqlens" not in case.arguments and "cu_seq_q" not in case.arguments
    with saved_tensors() as everything:
        results = case.results(leaves)
    whole = Backward.of(results, leaves, list(leaves))
    assert whole.flops == whole.registered or not counted, (
        f"{case}: backward runs {whole.flops} FLOPs, but {whole.registered} are registered"
    )
    bounded = counted and entry.function.__name__ != "transformer_layer" and len(case.options) <= 2
    oracle, forward = (case.oracle(leaves), flops_of(lambda: case.oracle(leaves))) if bounded else ((), 0)
    for name in names:
        alone_, label = frozen_but(leaves, name), f"{case}, {name} alone"
        with saved_tensors() as saved:
            results_alone = case.results(alone_)
        trained, asked_for = Backward.of(results_alone, alone_, [name]), Backward.of(results, leaves, [name])
        expected = {name: whole.grads[name]}
        chosen = (
            "moe" in entry.name or "experts" in entry.name
        )  # whose h is formed another way for a weight's gradient alone
        compare = assert_equal_to_rounding if entry.name in HEADS or chosen else assert_bits
        compare(asked_for.grads, expected, f"{label} asked for", "a backward for all")
        compare(trained.grads, expected, f"{label} trained", "a backward for all")
        assert saved.bytes <= everything.bytes, f"{label}: saves {saved.bytes} bytes, with all {everything.bytes}"
        if case.mode in ("none", "selective") and name not in READ_X.get(entry.name, leaves):
            assert leaves["x"].shape not in [shape for shape, *_ in saved.tensors], f"{label}: x is saved and not read"
        if not bounded:
            continue
        eager = flops_of(functools.partial(backward_of, oracle, leaves[name]))
        assert trained.flops == trained.registered, (
            f"{label}: backward runs {trained.flops} FLOPs, but {trained.registered} are registered"
        )
        assert trained.flops == asked_for.flops, (
            f"{label}: backward runs {asked_for.flops} FLOPs if others are trained, but not asked for; else {trained.flops}"
        )
        most = min(whole.flops, eager + recomputed_flops(entry, forward))
        assert trained.flops <= most, (
            f"{label}: backward runs {trained.flops} FLOPs, but {most} are enough: {eager} are eager's"
        )


def backward_of(results, leaf) -> None:
    y = joined(results)
    torch.autograd.grad(y, leaf, output_gradient(y), retain_graph=True, allow_unused=True)


@pytest.mark.parametrize(("entry", "options"), each_call(OF_OPS))
def test_backward_again_and_again(entry: Entry, options):
    """Runs have the same bits, also a second backward through a retained graph; nothing is left behind, nothing that was given
    is changed."""
    for mode in entry.modes or ("",):
        case = Case(entry, options, mode)
        leaves = case.make(torch.float32)
        copies, first = case.make(torch.float32), outcome(case.results(leaves), leaves)
        results = case.results(leaves)
        y = joined(results)
        dy = output_gradient(y)
        sent = dy.clone()
        for again in range(2):
            grads = torch.autograd.grad(y, list(leaves.values()), dy, retain_graph=not again)
            found = {f"result {i}": one.detach() for i, one in enumerate(results)} | dict(
                zip(leaves, grads, strict=True)
            )
            assert_bits(found, first, case, "a run before")
        assert torch.equal(dy, sent)
        assert_bits(leaves, copies, f"inputs of {case}", "the values that were given")
    assert_flat_memory(case.function, leaves, next(iter(leaves)), steps=6)


@pytest.mark.parametrize("layout", [transposed, padded_rows, every_other], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize(("entry", "options"), each_call(OF_OPS))
def test_strides(entry: Entry, options, layout):
    """Inputs and output gradients with other strides; a gradient has the strides of its parameter, if that is dense."""
    case = Case(entry, options, sizes=Sizes(experts=4))
    dense = case.make(torch.float32)
    strided = {name: layout(leaf.detach()).requires_grad_() for name, leaf in dense.items()}
    found = []
    for leaves, laid in ((dense, lambda t: t), (strided, layout)):
        results = case.results(leaves)
        graphs = [one for one in results if one.requires_grad]
        sent = [laid(output_gradient(one)) if one.dim() else output_gradient(one) for one in graphs]
        grads = torch.autograd.grad(graphs, list(leaves.values()), sent)
        found.append(
            {f"result {i}": one.detach() for i, one in enumerate(results)} | dict(zip(leaves, grads, strict=True))
        )
    assert_equal_to_rounding(found[1], found[0], f"{case}, {layout.__name__}", "dense inputs")
    if layout is transposed:
        for name, leaf in strided.items():
            leaf.grad = None
            joined(case.results(strided)).sum().backward(inputs=[leaf])
            assert leaf.grad.stride() == leaf.stride(), (
                f"{case}: the gradient of {name} has strides {leaf.grad.stride()}"
            )


@pytest.mark.parametrize(("entry", "options"), each_call(OF_OPS))
def test_expanded_output_gradients(entry: Entry, options):
    """Strides of zero, as those of a sum or a mean."""
    case = Case(entry, options)
    leaves = case.make(torch.float32)
    y = next(one for one in case.results(leaves) if one.requires_grad)
    for dy in (y.new_tensor(0.7).expand(y.shape), *([output_gradient(y)[..., :1].expand(y.shape)] if y.dim() else [])):
        wanted = list(leaves.values())
        grads, dense = (
            torch.autograd.grad(y, wanted, one, retain_graph=True, allow_unused=True) for one in (dy, dy.clone())
        )
        found = ({n: g for n, g in zip(leaves, one, strict=True) if g is not None} for one in (grads, dense))
        assert_equal_to_rounding(*found, case, "a dense output gradient")


LEADING = [name for name, one in OF_OPS.items() if "cu_seq_q" not in one.parameters]


@pytest.mark.parametrize("lead", [(0, 3), (2, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("entry", each(LEADING))
def test_sizes_of_zero_and_one(entry: Entry, lead: tuple[int, ...]):
    """Gradients are there and finite; in deterministic mode, which fills what torch.empty gives with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        for mode in entry.modes or ("",):
            case = Case(entry, (), mode, Sizes(lead))
            options = {"reduction": "sum"} if "reduction" in entry.parameters else {}  # a mean of nothing is NaN
            leaves = case.make(torch.float32)
            found = outcome(case.results(leaves, **options), leaves)
            expected = outcome(case.oracle(leaves, **options), leaves)
            assert_equal_to_rounding(found, expected, f"{case}, of {lead} tokens", "the oracle")
    finally:
        torch.use_deterministic_algorithms(False)


# -- graphs and transforms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", each(OF_OPS))
def test_fakes(entry: Entry):
    """Shapes, dtypes and strides of every result on tensors without data; of each option, modes in turn, and under autocast."""
    for i, options in enumerate(alone(entry)):
        for inside in (False, True) if not options else (False,):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                calls = calls_of(Case(entry, options, mode_in_turn(entry, i)))
            check_fakes(calls)


@pytest.mark.parametrize("entry", [one for one in each(OF_OPS) if "made_on_meta" in vars(one.values[0].op)])
def test_fakes_of_what_kernels_save_in_other_shapes(entry: Entry):
    for mode in entry.modes or ("",):
        with ckptkern.backend("triton"):
            check_fakes(calls_of(Case(entry, (), mode, TILED)))


def check_fakes(calls: list[tuple]) -> None:
    for op, args in calls:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


# Compiling costs seconds: in `make test` each op with many options at once.
COMPILED = [
    pytest.param(
        *one.values, id=one.id, marks=[] if one.id.endswith("1") or one.id == "dropout-none" else pytest.mark.long
    )
    for one in each_call(OF_OPS)
]


def seeded_outcome(function, leaves) -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED)
    return outcome((function(leaves),), leaves)


@pytest.mark.parametrize(("entry", "options"), COMPILED)
def test_compiled_equals_eager(entry: Entry, options):
    """As one graph, with the same masks."""
    torch._dynamo.reset()
    case = Case(entry, options)
    leaves = case.make(torch.float32)
    call = case.bound(leaves)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    ours, theirs = (seeded_outcome(one, leaves) for one in (compiled, call))
    assert_equal_to_rounding(ours, theirs, f"{case}, compiled", "the call as it is")


@pytest.mark.slow
@pytest.mark.parametrize("entry", each(["mlp", "attention_block", "linear_cross_entropy"]))
def test_one_graph_for_all_sizes_and_modes_of_autograd(entry: Entry):
    """Sizes compile once, dynamically, and seeds compile nothing; evaluation has a graph of its own, which saves nothing."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    first = Case(entry, ("dropout_p",) if "dropout_p" in entry.parameters else ())

    def call(leaves, given):
        return catalog.call(entry, given, leaves)

    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for tokens, seed in ((3, 1), (5, 1), (5, 2), (9, 1), (33, 1)):
        case = first._replace(sizes=Sizes((2, tokens)))
        leaves = case.make(torch.float32)
        given = case.given(leaves)
        found = []
        for function in (compiled, call):
            torch.manual_seed(seed)
            found.append(outcome((function(leaves, given),), leaves))
        assert_equal_to_rounding(*found, f"{case} of {tokens} tokens, compiled", "the call as it is")
    assert counter.frame_count <= 2, (
        f"{counter.frame_count} graphs, but one of the first size and one of any are enough"
    )
    with torch.no_grad(), saved_tensors() as saved:
        assert not compiled(leaves, given).requires_grad
    assert saved.bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("entry", each(["gated_mlp", "attention_block", "scaled_dot_product_attention"]))
def test_inductor(entry: Entry):
    """What passes from graph to graph has the strides of its fake."""
    torch._dynamo.reset()
    case = Case(entry, ("dropout_p",), "selective" if entry.modes else "")
    leaves = case.make(torch.float32)
    call = case.bound(leaves)
    with torch._inductor.config.patch(force_disable_caches=True):
        ours = seeded_outcome(torch.compile(call, backend="inductor", fullgraph=True), leaves)
    assert_equal_to_rounding(ours, seeded_outcome(call, leaves), f"{case}, by inductor", "the call as it is")


EXPORTED = [
    pytest.param(
        OF_OPS[name], backend, id=f"{name}-{backend}", marks=[] if name in ("mlp", "mlp_block") else pytest.mark.long
    )
    for name in (
        "linear_act",
        "linear_stack",
        "mlp",
        "gated_mlp",
        "mlp_block",
        "attention_block",
        "moe_block",
        "dropout",
    )
    for backend in ("eager", "triton")
]


@pytest.mark.parametrize(("entry", "backend"), EXPORTED)
def test_exported_graphs_have_gradients(entry: Entry, backend: str):
    """torch.export leaves only the bare ops. If these recorded no graph, parameters would silently get no gradient."""
    case = Case(entry, ("dropout_p",) if "dropout_p" in entry.parameters else ())
    leaves = case.make(torch.float32)
    call = case.bound(leaves)
    with ckptkern.backend(backend):
        ours, theirs = through_export(call, leaves), seeded_outcome(call, leaves)
    ours["result 0"] = ours.pop("y")
    assert_equal_to_rounding(ours, theirs, f"{case}, exported", "the call as it is")


@pytest.mark.parametrize(("entry", "options"), each_call(OF_OPS))
def test_gradients_of_torch_func(entry: Entry, options):
    """torch.func.grad, and the vmap of a batch of output gradients."""
    case = Case(entry, options)
    leaves = case.make(torch.float32)
    call, names = case.bound(leaves), list(leaves)
    expected = outcome(case.results(leaves), leaves)
    dy = output_gradient(case.function(leaves))

    def loss(*values):
        return (call(dict(zip(names, values, strict=True))) * dy).sum()

    torch.manual_seed(SEED)
    values = [leaf.detach() for leaf in leaves.values()]
    grads = torch.func.grad(loss, argnums=tuple(range(len(names))))(*values)
    expected = {name: expected[name] for name in names}
    assert_equal_to_rounding(dict(zip(names, grads, strict=True)), expected, f"{case}, by torch.func.grad", "autograd")
    y = case.function(leaves)
    for create_graph in (False, True):
        batched = torch.autograd.grad(
            y,
            list(leaves.values()),
            torch.stack([dy, 2 * dy]),
            is_grads_batched=True,
            retain_graph=True,
            create_graph=create_graph,
        )
        for i in range(2):
            found = {name: one[i] / (i + 1) for name, one in zip(names, batched, strict=True)}
            assert_equal_to_rounding(found, expected, f"{case}, of a batch of output gradients", "autograd")


# Ops whose other arguments have no batch dimension.
BATCHED = [name for name in OF_OPS if name.startswith(("linear_act", "linear_stack", "mlp", "gated", "transformer"))]
BATCHED += [name for name in OF_OPS if name.endswith("_block") and name not in BATCHED]


@pytest.mark.parametrize("entry", each(BATCHED))
def test_gradients_of_each_sample(entry: Entry):
    """vmap(grad) over a batch equals a loop over its samples."""
    for mode in entry.modes:
        case = Case(entry, (), mode)
        leaves = case.make(torch.float32)
        call, names = case.bound(leaves), list(leaves)
        x, *parameters = (leaf.detach() for leaf in leaves.values())

        def loss(*values, call=call, names=names):
            return call(dict(zip(names, values, strict=True))).square().sum()

        grad = torch.func.grad(loss, argnums=tuple(range(len(names))))
        batched = torch.func.vmap(grad, in_dims=(0, *[None] * len(parameters)))(x, *parameters)
        for i in range(len(x)):
            pair = ([one[i] for one in batched], grad(x[i], *parameters))
            found = (dict(zip(names, grads, strict=True)) for grads in pair)
            assert_equal_to_rounding(*found, f"{case}, sample {i} of vmap", "the sample alone")


@pytest.mark.parametrize("entry", each(OF_OPS))
def test_forward_mode_is_refused(entry: Entry):
    case = Case(entry)
    leaves = case.make(torch.float32)
    (name, x), call = next(iter(leaves.items())), case.bound(leaves)
    message = f"^{entry.op.name}: forward-mode AD is not supported"
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        call({**leaves, name: torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))})
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(lambda one: call({**leaves, name: one}), (x.detach(),), (torch.ones_like(x),))


WRAPS = {
    "torch's checkpoint": functools.partial(checkpoint, use_reentrant=False),
    "a reentrant checkpoint": functools.partial(checkpoint, use_reentrant=True),
    "our checkpoint": ckptkern.checkpoint,
}


@pytest.mark.parametrize(("entry", "options"), each_call(OF_OPS))
def test_inside_checkpoints_and_hooks(entry: Entry, options):
    """The bits, the masks and the generator's state are those of the call alone."""
    case = Case(entry, options)
    leaves = case.make(torch.float32)
    call, names = case.bound(leaves), list(leaves)
    expected = seeded_outcome(lambda leaves: call(leaves).sin(), leaves)
    state = torch.get_rng_state()
    compare = assert_equal_to_rounding if entry.name in HEADS else assert_bits

    def region(*values):
        return call(dict(zip(names, values, strict=True))).sin()

    for name, wrap in WRAPS.items():
        torch.manual_seed(SEED)
        y = wrap(region, *leaves.values())
        y.backward(output_gradient(y))
        found = {"result 0": y.detach()} | {
            n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()
        }
        compare(found, expected, f"{case} inside {name}", "the call alone")
        assert torch.equal(torch.get_rng_state(), state), f"{case} inside {name} leaves the generator elsewhere"
        for leaf in leaves.values():
            leaf.grad = None
    with torch.autograd.graph.save_on_cpu():
        found = seeded_outcome(lambda leaves: call(leaves).sin(), leaves)
    compare(found, expected, f"{case} with saved tensors offloaded", "the call alone")
