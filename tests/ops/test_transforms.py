"""Every op under torch.compile, torch.library.opcheck and torch.func."""

import itertools

import pytest
import torch
from support.blocks import BLOCKS, COMPILED, Block, blocks, calls, in_turn, variants
from support.cases import (
    LAYERS,
    MODES,
    SEED,
    P,
    Setup,
    Sizes,
    assert_same,
    assert_same_within_rounding,
    clone,
    gradients,
    make,
    op_samples,
    output_gradient,
    seeded,
    setups,
    through_export,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import ckptkern
from ckptkern.memory import saved_tensors


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Without this, a test's compilation would count as a recompilation of another test's code."""
    torch._dynamo.reset()


# One of each set of tensors that an op saves: at "full" relu saves more than other activations in a stack alone.
STEPS = setups(("relu",), ("none", "selective"), (P,)) + setups(("gelu",), ("selective", "full"), (P,), LAYERS)
STEPS += setups(("relu",), ("full",), ops=("linear_stack",))
LLAMAS = [one for one in BLOCKS if one.name == "llama"]
LEARNED = variants(("full",), ("learned bias", "low-rank decoder"))

# -- the library ops ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("setup", STEPS + in_turn() + calls())
def test_opcheck(setup):
    """Schema, fakes, aot dispatch with dynamic shapes, on the arguments of a step; the first two on one that mixes dtypes, and
    of blocks.

    That has frozen inputs, and float32 parameters under bf16 autocast: a gradient has its parameter's dtype.
    """
    samples = op_samples(setup, make(setup))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        samples += op_samples(setup, make(setup, frozen=list(make(setup))[1::3]))
    assert [str(op) for op, _ in samples] == [f"ckptkern.{setup.op_name}_{way}.default" for way in ("fwd", "bwd")] * 2
    whole = 0 if isinstance(setup, Block) else 2
    for op, args in samples[:whole]:
        torch.library.opcheck(op, args)
    for op, args in samples[whole:]:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


# Of blocks on kernels those whose three projections write into one buffer (out=), which autograd must not see.
EXPORTED = [(one, backend) for one in setups(("relu",), dropout=(P,)) for backend in ("eager", "triton")]
EXPORTED += [(one, "eager") for one in in_turn(modes=("selective", "full"))]
EXPORTED += [(one, "triton") for one in blocks(("full",), names=("llama",))]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("setup", "backend"), [pytest.param(*one.values, backend, id=f"{one.id}-{backend}") for one, backend in EXPORTED]
)
def test_exported_graphs_have_gradients(setup, backend):
    """torch.export leaves only the bare ops. If these recorded no graph, parameters would silently get no gradient."""
    tensors = make(setup)
    with ckptkern.backend(backend):
        assert_same(through_export(setup.call, tensors), gradients(setup.fused, tensors))


# -- torch.compile -----------------------------------------------------------------------------------------------------


def compiled(setup: Setup, backend: str = "aot_eager", **options):
    """`setup.fused`, its call compiled as one graph."""
    call = torch.compile(setup.call, backend=backend, fullgraph=True, **options)

    def run(tensors):
        torch.manual_seed(SEED)
        return call(tensors)

    return run


@pytest.mark.sampled
@pytest.mark.parametrize("setup", STEPS + in_turn() + in_turn(COMPILED))
def test_compiled_equals_eager(setup):
    """One graph forward, one backward, the same bits and the same mask."""
    tensors = make(setup)
    assert_same(gradients(compiled(setup), tensors), gradients(setup.fused, tensors))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "setup", setups(("silu",), ("full",), dropout=(P,)) + blocks(("selective",), names=("llama",)) + calls()
)
def test_inductor(setup):
    """At "selective" o and the logsumexp pass from graph to graph: their fakes' strides are the real ones."""
    tensors = make(setup)
    with torch._inductor.config.patch(force_disable_caches=True):  # a cached graph has the fakes of an earlier run
        assert_same_within_rounding(gradients(compiled(setup, "inductor"), tensors), gradients(setup.fused, tensors))


@pytest.mark.sampled
@pytest.mark.parametrize("setup", setups(("gelu",), ("none", "full"), ops=LAYERS) + blocks(("full",), names=("llama",)))
def test_compiled_with_frozen_inputs(setup):
    """Only what needs a gradient gets one; x alone, the last weight alone."""
    names = list(make(setup))
    last_weight = [name for name in names if "weight" in name][-1]
    for trained in ({"x"}, {last_weight}):
        tensors = make(setup, frozen=set(names) - trained)
        torch._dynamo.reset()
        assert_same(gradients(compiled(setup), tensors), gradients(setup.fused, tensors))


@pytest.mark.sampled
@pytest.mark.parametrize("setup", setups(("gelu",), dropout=(P,)) + in_turn(LLAMAS, shift=1))
def test_compiled_autocast_saves_no_cast_weight(setup):
    """The same bytes as in eager mode, and the same bits."""
    tensors = make(setup)
    parameters = [t for name, t in tensors.items() if name != "x"]

    def call(t):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return setup.call(t)

    def counted(function):
        def run(t):
            torch.manual_seed(SEED)
            with saved_tensors(exclude=parameters) as saved:
                y = function(t)
            run.saved = saved.bytes
            return y

        return run

    eager, graph = counted(call), counted(torch.compile(call, backend="aot_eager", fullgraph=True))
    assert_same(gradients(graph, tensors), gradients(eager, tensors))
    assert graph.saved == eager.saved


@pytest.mark.parametrize("setup", setups(("gelu",), ("selective",), dropout=(P,)))
def test_one_graph_for_all_batch_sizes_and_seeds(setup):
    """The state is a tensor, so seeds compile nothing; sizes compile once, dynamically."""
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(setup.call, backend=counter, fullgraph=True)
    for length, seed in itertools.product((5, 8, 3, 130, 2), (1, 2)):
        tensors = make(setup, Sizes(lead=(2, length)))
        torch.manual_seed(seed)
        ours = gradients(call, tensors)
        torch.manual_seed(seed)
        assert_same(ours, gradients(setup.call, tensors))
    assert counter.frame_count <= 2  # the first size, then any size


@pytest.mark.parametrize(
    "setup",
    setups(("silu",), ("full",), dropout=(P,), ops=("mlp", "gated_mlp", "dropout"))
    + blocks(("full",), names=("pre-norm",))[2:]
    + [one for one in calls() if one.values[0].drops],
)
def test_two_masks_of_one_graph_differ(setup):
    """AOT's CSE merges what looks alike: two draws in one graph are two draws."""
    tensors = make(setup)

    def twice(t):
        return torch.stack([setup.call(t), setup.call(t)])

    ours = gradients(seeded(torch.compile(twice, backend="aot_eager", fullgraph=True)), tensors)
    assert_same(ours, gradients(seeded(twice), tensors))
    assert not torch.equal(*ours["y"])


@pytest.mark.parametrize("setup", setups(("gelu",), ("full",), dropout=(P,)))
def test_compiled_checkpoint(setup):
    """A compiled torch.utils.checkpoint recomputes the op in backward, and its mask with it."""
    tensors = make(setup)

    def checkpointed(t):
        torch.manual_seed(SEED)
        return whole(t)

    def whole(t):
        return checkpoint(lambda *v: setup.call(dict(zip(t, v, strict=True))).sin(), *t.values(), use_reentrant=False)

    expected = gradients(checkpointed, tensors)
    whole = torch.compile(whole, backend="aot_eager", fullgraph=True)
    assert_same(gradients(checkpointed, tensors), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["linear_stack", "mlp", "gated_mlp"])
def test_one_weight_as_several_inputs(op, mode):
    """Tied weights, one of them through its transpose: the gradient is the sum over the places, compiled too."""
    w = (torch.randn(6, 6, dtype=torch.float64) * 0.6).requires_grad_()
    x = torch.randn(4, 6, dtype=torch.float64)
    (setup,) = (one.values[0] for one in setups(("silu",), (mode,), ops=(op,)))
    weights = [name for name in make(setup) if "weight" in name]

    def run(call):
        places = dict.fromkeys(weights, w) | {weights[-1]: w.T}
        return torch.autograd.grad(call({"x": x, **places}).sum(), w)[0]

    expected = run(setup.unfused)
    torch.testing.assert_close(run(setup.call), expected)
    torch.testing.assert_close(run(torch.compile(setup.call, backend="aot_eager", fullgraph=True)), expected)


@pytest.mark.parametrize("setup", setups(("relu", "gelu"), ("full",), ops=LAYERS))
def test_compiled_module_in_a_chain(setup):
    """Graph outputs that alias what is saved, and ops before and after."""
    tensors = make(setup)

    def chain(t):
        return setup.call({**t, "x": t["x"].sin()}).cos()

    assert_same(
        gradients(torch.compile(chain, backend="aot_eager", fullgraph=True), tensors), gradients(chain, tensors)
    )


@pytest.mark.parametrize("setup", setups(("relu",), ("none",), dropout=(P,)))
def test_compiled_without_gradients(setup):
    """Evaluation, under no_grad and with nothing that needs a gradient: the graph has the mode that saves nothing."""
    tensors = make(setup)
    expected, counter = setup.fused(tensors).detach(), CompileCounterWithBackend("aot_eager")
    assert torch.equal(compiled(setup, counter)({name: t.detach() for name, t in tensors.items()}), expected)
    with torch.no_grad():
        y = compiled(setup, counter)(tensors)
    assert not y.requires_grad
    assert torch.equal(y, expected)
    op = getattr(torch.ops.ckptkern, f"{setup.op.name}_fwd").default
    calls = [node for graph in counter.graphs for node in graph.graph.nodes if node.target is op]
    modes = [[one for one in call.args[3] if one in ("none", "selective", "full", "forward")] for call in calls]
    mode = {"dropout": [], "linear_stack": ["forward"]}.get(setup.op.name, ["full"])
    assert modes == [mode, mode]


def test_changing_the_backend_compiles_again():
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda x: ckptkern.dropout(x, 0.5), backend=counter)
    x = torch.ones(4, 4)
    for _ in range(2):
        call(x)
        with ckptkern.backend("eager"):
            call(x)
    assert counter.frame_count == 2


# -- torch.func --------------------------------------------------------------------------------------------------------


def loss_of(setup: Setup, names: list[str], dy: torch.Tensor):
    def loss(*values):
        return (setup.call(dict(zip(names, values, strict=True))) * dy).sum()

    return loss


@pytest.mark.sampled
@pytest.mark.parametrize("setup", setups(dropout=(P,)) + in_turn() + LEARNED + calls())
def test_grad(setup):
    tensors = make(setup)
    dy = output_gradient(setup.fused(tensors))
    values = [t.detach() for t in tensors.values()]
    torch.manual_seed(SEED)
    grads = torch.func.grad(loss_of(setup, list(tensors), dy), argnums=tuple(range(len(values))))(*values)
    expected = gradients(setup.fused, tensors, dy)
    del expected["y"]
    assert_same(dict(zip(tensors, grads, strict=True)), expected)


@pytest.mark.parametrize("setup", setups())
def test_grad_of_grad(setup):
    """Second order through torch.func, against autograd's."""
    tensors = make(setup, dtype=torch.float64)
    values = [t.detach() for t in tensors.values()]

    def penalty(function):
        def inner(*v):
            return (function(dict(zip(tensors, v, strict=True))) ** 2).sum()

        def outer(*v):
            torch.manual_seed(SEED)
            return (torch.func.grad(inner)(*v) ** 2).sum()

        return torch.func.grad(outer, argnums=tuple(range(len(values))))(*values)

    torch.testing.assert_close(penalty(setup.call), penalty(setup.unfused))


@pytest.mark.parametrize("setup", setups(ops=LAYERS) + blocks(names=("pre-norm", "bare"), dropout=False))
def test_per_sample_gradients(setup):
    """vmap(grad) over a batch of samples equals a loop over them."""
    tensors = make(setup, Sizes(lead=(4, 3)))
    x, *parameters = (t.detach() for t in tensors.values())
    dy = output_gradient(setup.call(tensors))[0]
    grad = torch.func.grad(loss_of(setup, list(tensors), dy), argnums=tuple(range(len(tensors))))
    batched = torch.func.vmap(grad, in_dims=(0, *[None] * len(parameters)))(x, *parameters)
    for sample in range(len(x)):
        theirs = dict(zip(tensors, grad(x[sample], *parameters), strict=True))
        ours = {name: one[sample] for name, one in zip(tensors, batched, strict=True)}
        assert_same_within_rounding(ours, theirs)  # the library's matmuls of a slice may have other bits


@pytest.mark.parametrize("setup", setups(("gelu",), ("none", "full"), ops=LAYERS))
def test_vmap_over_anything(setup):
    """One op over stacked models, a batch dimension in the middle, and no gradient at all."""
    models = [make(setup, seed=seed) for seed in range(3)]
    stacked = {name: torch.stack([m[name].detach() for m in models], 1) for name in models[0]}
    out = torch.func.vmap(setup.call, in_dims=(dict.fromkeys(stacked, 1),))(stacked)
    for i, model in enumerate(models):
        # a sample of a stack may lie at another alignment, where the library's matmuls have other bits
        assert_same_within_rounding({"y": out[i]}, {"y": setup.call(model).detach()})


@pytest.mark.parametrize("setup", setups(("silu",), ("full",), dropout=(P,), ops=("mlp", "gated_mlp", "dropout")))
def test_masks_under_vmap(setup):
    """randomness="same" is one mask for all samples, "different" one for each; "error" says so."""
    tensors = make(setup, Sizes(lead=(4, 8), features=9))
    x = tensors["x"].detach()[:1].expand(4, 8, 9).contiguous()

    def outputs(randomness):
        return torch.func.vmap(lambda one: setup.call({**tensors, "x": one}), randomness=randomness)(x)

    same, different = outputs("same"), outputs("different")
    assert all(torch.equal(same[0], same[i]) for i in range(1, 4))
    assert all(not torch.equal(different[i], different[j]) for i, j in itertools.combinations(range(4), 2))
    with pytest.raises(RuntimeError, match="randomness"):
        outputs("error")


@pytest.mark.parametrize("setup", setups(dropout=(P,)))
def test_jacobian(setup):
    tensors = make(setup, Sizes((2,), 3, 4, 2), torch.float64)

    def jacobian(function):
        def of_x(x):
            torch.manual_seed(SEED)
            return function({**tensors, "x": x})

        # chunk_size 1: the mask of a loop is the mask of one call
        return torch.func.jacrev(of_x, chunk_size=1)(tensors["x"].detach())

    torch.testing.assert_close(jacobian(setup.call), jacobian(setup.unfused))


@pytest.mark.sampled
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("setup", setups(dropout=(0.0, P)))
def test_batched_gradients(setup, create_graph):
    """is_grads_batched runs another vmap, which torch.func's queries do not see."""
    tensors = make(setup)
    y = setup.call(tensors)
    dys = torch.stack([output_gradient(y, seed=seed) for seed in range(3)])
    wanted = list(tensors.values())
    batched = torch.autograd.grad(y, wanted, dys, is_grads_batched=True, retain_graph=True, create_graph=create_graph)
    for i, dy in enumerate(dys):
        theirs = torch.autograd.grad(y, wanted, dy, retain_graph=True)
        assert_same_within_rounding(
            *(dict(zip(tensors, g, strict=True)) for g in ([one[i] for one in batched], theirs))
        )


@pytest.mark.parametrize("setup", setups(modes=("full",), dropout=(P,)))
def test_forward_mode_of_torch_func_is_refused(setup):
    tensors = make(setup)
    x = tensors["x"].detach()
    with pytest.raises(NotImplementedError, match=f"^{setup.op.name}: forward-mode AD is not supported"):
        torch.func.jvp(lambda one: setup.call({**tensors, "x": one}), (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("setup", setups(("gelu",), modes=("full",), ops=("mlp",)))
def test_compiled_transforms(setup):
    """torch.compile of vmap(grad) breaks the graph at the op, and says why where that is not allowed."""
    tensors = make(setup, Sizes(lead=(3, 2)))
    x, *parameters = (t.detach() for t in tensors.values())
    dy = output_gradient(setup.call(tensors))[0]
    grad = torch.func.vmap(torch.func.grad(loss_of(setup, list(tensors), dy)), in_dims=(0, *[None] * len(parameters)))
    assert torch.equal(torch.compile(grad, backend="aot_eager")(x, *parameters), grad(x, *parameters))
    torch._dynamo.reset()
    whole = torch.compile(grad, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=f"{setup.op.name}: torch.compile of a torch.func transform is not supported"):
        whole(x, *parameters)


def test_stacks_deeper_than_an_int64_has_bits():
    """A stack of 33 layers has 67 inputs; every one gets its gradient, in every form."""
    generator = torch.Generator().manual_seed(3)
    inputs = {"x": torch.randn(3, 4, generator=generator, dtype=torch.float64)}
    inputs |= {f"w{i}": torch.randn(4, 4, generator=generator, dtype=torch.float64) * 0.7 for i in range(33)}
    inputs |= {f"b{i}": torch.randn(4, generator=generator, dtype=torch.float64) for i in range(33)}
    tensors = {name: t.requires_grad_() for name, t in inputs.items()}

    def fused(t):
        weights, biases = ([t[f"{kind}{i}"] for i in range(33)] for kind in "wb")
        return ckptkern.linear_stack(t["x"], weights, biases, "silu", recompute="full")

    def unfused(t):
        h = t["x"]
        for i in range(33):
            h = torch.nn.functional.silu(torch.nn.functional.linear(h, t[f"w{i}"], t[f"b{i}"]))
        return h

    expected = gradients(unfused, tensors)
    assert min(g.abs().max() for g in expected.values()) > 0
    assert_same_within_rounding(gradients(fused, tensors), expected)
    compiled_stack = torch.compile(fused, backend="aot_eager", fullgraph=True)
    assert_same_within_rounding(gradients(compiled_stack, tensors), expected)
    detached = {name: t.detach() for name, t in tensors.items()}
    functional = torch.func.grad(lambda t: (fused(t) * output_gradient(expected["y"])).sum())(detached)
    assert_same_within_rounding({"y": expected["y"], **functional}, expected)
    alone = {name: t.detach().requires_grad_(name == "b32") for name, t in clone(tensors).items()}
    assert_same_within_rounding(gradients(fused, alone), {name: expected[name] for name in ("y", "b32")})
