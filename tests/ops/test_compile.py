"""Ops in graphs: of torch.compile, with any sizes and several calls, and of torch.export."""

from unittest import mock

import pytest
import torch
from support.calls import LibraryCalls, call_of, dropping
from support.cases import (
    assert_same,
    assert_same_within_rounding,
    gradients,
    output_gradient,
    seeded,
)
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import ckptkern
from ckptkern.ops import catalog
from ckptkern.ops.dispatch import choices
from ckptkern.ops.registration.codec import values_of
from ckptkern.ops.transformer_layer import TransformerLayer


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Without this, a test's compilation would count as a recompilation of another test's code."""
    torch._dynamo.reset()


def compiled(function, backend="aot_eager"):
    return torch.compile(function, backend=backend, fullgraph=True)


@pytest.mark.parametrize("trained", ["x", "fc2_weight"])
def test_with_frozen_inputs(trained):
    call = call_of("mlp")
    tensors = call.make(frozen=call.make().keys() - {trained})
    assert_same(gradients(compiled(call.unseeded), tensors), gradients(call, tensors))


@pytest.mark.parametrize("name", ["dropout", "mlp"])
def test_two_masks_of_one_graph_differ(name):
    """AOT's CSE merges what looks alike: two draws in one graph are two draws."""
    call = dropping(name)

    def twice(t):
        return torch.stack([call.unseeded(t), call.unseeded(t)])

    ours = gradients(seeded(compiled(twice)), call.make())
    assert_same(ours, gradients(seeded(twice), call.make()))
    assert not torch.equal(*ours["y"])


def test_a_checkpoint():
    """A compiled torch.utils.checkpoint recomputes the op in backward, and its mask with it."""
    call = dropping("mlp")

    def whole(t):
        return checkpoint(
            lambda *v: call.unseeded(dict(zip(t, v, strict=True))).sin(), *t.values(), use_reentrant=False
        )

    assert_same(gradients(seeded(compiled(whole)), call.make()), gradients(seeded(whole), call.make()))


@pytest.mark.parametrize("mode", ["none", "full"])
def test_one_weight_as_several_inputs(mode):
    """Tied weights, one of them through its transpose: the gradient is the sum over the places, compiled too."""
    w, x = (torch.randn(6, 6, dtype=torch.float64) * 0.6).requires_grad_(), torch.randn(4, 6, dtype=torch.float64)

    def call(x):
        return ckptkern.gated_mlp(x, w, w, w.T, recompute=mode)

    expected = torch.autograd.grad((torch.nn.functional.silu(x @ w.T) * (x @ w.T) @ w).sum(), w)
    for function in (call, compiled(call)):
        torch.testing.assert_close(torch.autograd.grad(function(x).sum(), w), expected)


def test_a_chain():
    """Graph outputs that alias what is saved, and ops before and after."""
    call = call_of("linear_act", recompute="none")

    def chain(t):
        return call.unseeded({**t, "x": t["x"].sin()}).cos()

    assert_same(gradients(compiled(chain), call.make()), gradients(chain, call.make()))


def test_another_backend_compiles_again_and_reaches_its_kernels():
    """Dynamo cannot trace into Triton or the CUDA driver, so whether a kernel can run here is a constant."""
    counter, call = CompileCounterWithBackend("aot_eager"), call_of("mlp")
    run = compiled(call.unseeded, counter)
    for _ in range(2):
        for backend in ("eager", "triton"):
            with ckptkern.backend(backend):
                assert_same(gradients(run, call.make()), gradients(call.unseeded, call.make()))
    assert counter.frame_count == 2


def test_the_workspace():
    """Another workspace compiles again, one that was seen does not, and none is a symbol."""
    from ckptkern.ops.mlp.branch import MLPBranch

    call, backward, graphs, taken = call_of("mlp"), MLPBranch.backward_rows, [], []

    def noted(self, *args):
        taken.append(self.o.workspace)
        return backward(self, *args)

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    run = compiled(call.unseeded, aot_autograd(fw_compiler=count, bw_compiler=lambda graph, _: graph))
    with mock.patch.object(MLPBranch, "backward_rows", noted):
        for size, graphs_of in ((2**17, 1), (2**18, 2), (2**19, 3), ("128KiB", 3), (None, 4)):
            with ckptkern.workspace(size):
                run(call.make()).sum().backward()
            assert len(graphs) == graphs_of
            assert {*taken} - {None} == {choices.parse_bytes("", size) or choices.WORKSPACE}  # None: shapes alone
            taken.clear()


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_every_precision_of_a_graph_is_read(way, monkeypatch):
    """A compiled graph of CUDA tensors carries "auto", which no kernel knows; a layer has one for each sublayer."""
    call = call_of("transformer_layer", "parallel")
    with LibraryCalls() as calls:
        gradients(call, call.make())
    op, args = calls.found[way == "backward"]
    body, seen = getattr(TransformerLayer, way), []

    def watching(*arguments):
        seen.extend(values_of(arguments, "precision"))
        return body(*arguments)

    monkeypatch.setattr(TransformerLayer, way, staticmethod(watching))
    op(*(["auto" if one == "ieee" else one for one in arg] if isinstance(arg, list) else arg for arg in args))
    assert seen == ["ieee", "ieee"]


def test_a_transform_breaks_the_graph_and_says_so():
    call = call_of("mlp")
    tensors = {name: t.detach() for name, t in call.make().items()}
    grad = torch.func.grad(lambda t: call.unseeded(t).sum())
    assert_same(torch.compile(grad, backend="aot_eager")(tensors), grad(tensors))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"mlp: torch\.compile of a torch.func transform is not supported"):
        compiled(grad)(tensors)


def test_stacks_deeper_than_an_int64_has_bits():
    """A stack of 33 layers has 67 inputs; every one gets its gradient, in every form."""
    depth = 33
    weights, biases = ([catalog.Normal(shape)] * depth for shape in ((4, 4), (4,)))
    call = call_of("linear_stack", activation="silu", weights=weights, biases=biases, x=catalog.Normal((3, 4)))
    tensors = call.make(torch.float64)

    def unfused(t):
        h = t["x"]
        for i in range(depth):
            h = torch.nn.functional.silu(torch.nn.functional.linear(h, t[f"weights.{i}"], t[f"biases.{i}"]))
        return h

    expected = gradients(unfused, tensors)
    for function in (call.unseeded, compiled(call.unseeded)):
        assert_same_within_rounding(gradients(function, tensors), expected)
    detached = {name: t.detach() for name, t in tensors.items()}
    functional = torch.func.grad(lambda t: (call.unseeded(t) * output_gradient(expected["y"])).sum())(detached)
    assert_same_within_rounding({"y": expected["y"], **functional}, expected)
