"""Ops in graphs of torch.compile, with several calls, and under torch.func: what no rule over the catalogue shows."""

import functools
import itertools

import pytest
import torch
from support import catalog
from support.cases import assert_same, assert_same_within_rounding, checkpointed, gradients, output_gradient, seeded
from support.properties import Calls, call_of, dropping
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, jacrev, vmap
from torch.utils.checkpoint import checkpoint

import ckptkern
from ckptkern.ops.dispatch import choices
from ckptkern.ops.mlp.branch import MLPBranch
from ckptkern.ops.registration.library import values_of
from ckptkern.ops.transformer_layer import TransformerLayer


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Without this, a test's compilation would count as a recompilation of another test's code."""
    torch._dynamo.reset()


def compiled(function, backend="aot_eager"):
    return torch.compile(function, backend=backend, fullgraph=True)


def twice(call, t):
    return torch.stack([call.unseeded(t), call.unseeded(t)])


def in_a_checkpoint(call, t):
    """Recomputed in backward, and its mask with it."""
    return checkpointed(lambda t: call.unseeded(t).sin(), functools.partial(checkpoint, use_reentrant=False))(t)


def in_a_chain(call, t):
    """Graph outputs that alias what is saved, and ops before and after."""
    return call.unseeded({**t, "x": t["x"].sin()}).cos()


IN_A_GRAPH = {
    "x alone": (lambda call, t: call.unseeded(t), call_of("mlp")),
    "fc2_weight alone": (lambda call, t: call.unseeded(t), call_of("mlp")),
    "two masks": (twice, dropping("dropout")),
    "two masks of an mlp": (twice, dropping("mlp")),
    "a checkpoint": (in_a_checkpoint, dropping("mlp")),
    "a chain": (in_a_chain, call_of("linear_act", recompute="none")),
}


@pytest.mark.parametrize("name", IN_A_GRAPH)
def test_a_graph_has_the_bits(name):
    """AOT's CSE merges what looks alike, but two draws in one graph are two draws."""
    function, call = IN_A_GRAPH[name]
    run, tensors = functools.partial(function, call), call.make()
    if "alone" in name:
        tensors = call.make(frozen=tensors.keys() - {name.split()[0]})
    ours, theirs = (gradients(seeded(function), tensors) for function in (compiled(run), run))
    assert_same(ours, theirs)
    assert "two" not in name or not torch.equal(*ours["y"])


@pytest.mark.parametrize("mode", ["none", "full"])
def test_one_weight_as_several_inputs(mode):
    """Tied weights, one of them through its transpose: the gradient is the sum over the places, compiled too."""
    w, x = (torch.randn(6, 6, dtype=torch.float64) * 0.6).requires_grad_(), torch.randn(4, 6, dtype=torch.float64)

    def call(x):
        return ckptkern.gated_mlp(x, w, w, w.T, recompute=mode)

    expected = torch.autograd.grad((torch.nn.functional.silu(x @ w.T) * (x @ w.T) @ w).sum(), w)
    for function in (call, compiled(call)):
        torch.testing.assert_close(torch.autograd.grad(function(x).sum(), w), expected)


def test_another_backend_compiles_again_and_reaches_its_kernels():
    """Dynamo cannot trace into Triton or the CUDA driver, so whether a kernel can run here is a constant."""
    counter, call = CompileCounterWithBackend("aot_eager"), call_of("mlp")
    run = compiled(call.unseeded, counter)
    for _ in range(2):
        for backend in ("eager", "triton"):
            with ckptkern.backend(backend):
                assert_same(gradients(run, call.make()), gradients(call.unseeded, call.make()))
    assert counter.frame_count == 2


@pytest.mark.slow
def test_the_workspace(monkeypatch):
    """Another workspace compiles again, one that was seen does not, and none is a symbol."""
    call, counter, taken, backward = (
        call_of("mlp"),
        CompileCounterWithBackend("aot_eager"),
        set(),
        MLPBranch.backward_rows,
    )
    monkeypatch.setattr(
        MLPBranch, "backward_rows", lambda self, *args: taken.add(self.o.workspace) or backward(self, *args)
    )
    run = compiled(call.unseeded, counter)
    for size, graphs in ((2**17, 1), (2**18, 2), (2**19, 3), ("128KiB", 3), (None, 4)):
        with ckptkern.workspace(size):
            run(call.make()).sum().backward()
        assert counter.frame_count == graphs
        assert taken - {None} == {choices.parse_bytes("", size) or choices.WORKSPACE}  # None: shapes alone
        taken.clear()


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_every_precision_of_a_graph_is_read(way, monkeypatch):
    """A compiled graph of CUDA tensors carries "auto", which no kernel knows; a layer has one for each sublayer."""
    call = call_of("transformer_layer", "parallel")
    with Calls() as calls:
        gradients(call, call.make())
    op, args = calls.found[way == "backward"]
    body, seen = getattr(TransformerLayer, way), []

    def watching(*arguments):
        seen.extend(values_of(arguments, "precision"))
        return body(*arguments)

    monkeypatch.setattr(TransformerLayer, way, staticmethod(watching))
    op(*(["auto" if value == "ieee" else value for value in arg] if isinstance(arg, list) else arg for arg in args))
    assert seen == ["ieee", "ieee"]


@pytest.mark.slow
def test_a_transform_breaks_the_graph_and_says_so():
    call = call_of("mlp")
    tensors = {name: t.detach() for name, t in call.make().items()}
    of = grad(lambda t: call.unseeded(t).sum())
    assert_same(torch.compile(of, backend="aot_eager")(tensors), of(tensors))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"mlp: torch\.compile of a torch.func transform is not supported"):
        compiled(of)(tensors)


@pytest.mark.slow
def test_stacks_deeper_than_an_int64_has_bits():
    """A stack of 33 layers has 67 inputs; every one gets its gradient, in every form."""
    layers = {name: [catalog.Normal(shape)] * 33 for name, shape in (("weights", (4, 4)), ("biases", (4,)))}
    call = call_of("linear_stack", activation="silu", x=catalog.Normal((3, 4)), **layers)
    tensors = call.make(torch.float64)
    expected = gradients(lambda t: call.oracle(t)[0], tensors)
    for function in (call.unseeded, compiled(call.unseeded)):
        assert_same_within_rounding(gradients(function, tensors), expected)
    detached = {name: t.detach() for name, t in tensors.items()}
    functional = grad(lambda t: (call.unseeded(t) * output_gradient(expected["y"])).sum())(detached)
    assert_same_within_rounding({"y": expected["y"], **functional}, expected)


# -- torch.func --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0, -1])
@pytest.mark.parametrize("name", ["linear_act", "linear_stack", "mlp", "gated_mlp"])
def test_vmap_over_models(name, mode):
    """One op over stacked models, a batch dimension in the middle, and no gradient at all."""
    call = call_of(name, mode=mode)
    models = [call.make(seed=seed) for seed in range(3)]
    stacked = {key: torch.stack([m[key].detach() for m in models], 1) for key in models[0]}
    out = vmap(call.unseeded, in_dims=(dict.fromkeys(stacked, 1),))(stacked)
    expected = {i: call.unseeded(model).detach() for i, model in enumerate(models)}
    assert_same_within_rounding(dict(enumerate(out)), expected)


@pytest.mark.parametrize("name", ["mlp", "dropout"])
def test_masks_under_vmap(name):
    """randomness="same" is one mask for all samples, "different" one for each; "error" says so."""
    call = dropping(name, sizes=catalog.Sizes((8,), 9, 16))
    tensors = call.make()

    def outputs(randomness):
        x = tensors["x"].detach().expand(4, 8, 9).contiguous()
        return vmap(lambda sample: call.unseeded({**tensors, "x": sample}), randomness=randomness)(x)

    for randomness in ("same", "different"):
        for first, other in itertools.combinations(outputs(randomness), 2):
            assert torch.equal(first, other) == (randomness == "same")
    with pytest.raises(RuntimeError, match="randomness"):
        outputs("error")


def test_jacobians_and_gradients_of_gradients():
    call = call_of("mlp", sizes=catalog.Sizes((2,), 3, 4, 2), activation="silu", dropout_p=0.25)
    tensors = {name: t.detach() for name, t in call.make(torch.float64).items()}

    def found(function):
        def penalty(t):
            return sum(g.square().sum() for g in grad(lambda t: function(t).square().sum())(t).values())

        # chunk_size 1: the mask of a loop is the mask of one call
        return jacrev(lambda x: function({**tensors, "x": x}), chunk_size=1)(tensors["x"]), grad(penalty)(tensors)

    torch.testing.assert_close(found(call), found(lambda t: call.oracle(t)[0]))


@pytest.mark.parametrize("window_size", [(5, 5), (40, 40), (5, 0)], ids=str)
def test_a_window_exports_for_any_length(window_size):
    """A length is compared with no bound of the window, which would be a guard of the exported program."""

    class Attends(torch.nn.Module):
        def forward(self, q, k, v):
            return ckptkern.scaled_dot_product_attention(q, k, v, window_size=window_size)

    def inputs(rows: int) -> list[torch.Tensor]:
        return [torch.randn(2, 2, rows, 16) for _ in range(3)]

    length = {2: torch.export.Dim("S", min=2, max=4096)}
    with torch.no_grad():
        program = torch.export.export(Attends(), tuple(inputs(32)), dynamic_shapes=(length,) * 3).module()
        for rows in (8, 32, 100):
            args = inputs(rows)
            torch.testing.assert_close(program(*args), Attends()(*args))
