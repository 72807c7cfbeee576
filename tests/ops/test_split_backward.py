"""Backward in two passes, the input's gradient first and the weights' later: what runs twice, what is held, and the bits."""

import contextlib
import functools
import re
import weakref
from collections import deque

import pytest
import torch
from support.cases import Watch, assert_same, assert_same_within_rounding, output_gradient
from support.properties import OF_OPS, dropping
from torch import nn
from torch.autograd import grad
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import ckptkern
from ckptkern import delay_weight_gradients, split_backward
from ckptkern.ops.registration import functions
from ckptkern.ops.registration.functions import bodies_seen
from ckptkern.ops.registration.library import FLOPS

LACKING = {op: formula for op, formula in FLOPS.items() if flop_registry.get(op) is not formula}


@pytest.fixture(autouse=True)
def stash():
    with split_backward("stash"):
        yield


def assert_equal(ours, theirs):
    assert_same(dict(enumerate(ours)), dict(enumerate(theirs)))


def in_passes(call, parts) -> tuple[int, dict]:
    """(FLOPs of all passes, all gradients). parts: names that each pass asks for."""
    tensors, flops, grads = call.make(), 0, {}
    y = call.results(tensors)[0]  # an MoE block's logits have no gradient: zeros that each pass would make anew
    dy = output_gradient(y)
    for i, part in enumerate(parts):
        with bodies_seen(), FlopCounterMode(display=False, custom_mapping=LACKING) as counter:
            some = grad(y, [tensors[name] for name in part], dy, retain_graph=i < len(parts) - 1)
        flops += counter.get_total_flops()
        grads |= dict(zip(part, some, strict=True))
    return flops, grads


# A result that is reduced outside of the op has another gradient in each pass.
SPLIT = [name for name in OF_OPS if re.search("block|mlp|linear_act|linear_stack|layer$|latents$", name)]
SPLIT = [dropping(name, mode=mode) for name in SPLIT for mode in (0, -1)]
MLP = dropping("mlp")


@pytest.mark.parametrize(
    ("call", "mode", "workspace", "again"),
    [
        *((call, "stash", None, False) for call in SPLIT),
        (MLP, "recompute", None, True),
        (MLP, "auto", 1, True),
        (MLP, "auto", "16MiB", False),
    ],
    ids=str,
)
def test_two_passes_run_what_one_runs(call, mode, workspace, again):
    """Unless there is no stash: in "auto" where the operands do not fit the workspace. Bits are one pass's, also where each
    tensor has a pass, and then another one, which recomputes."""
    first, *others = call.make()
    with split_backward(mode), ckptkern.workspace(workspace):
        whole, expected = in_passes(call, [[first, *others]])
        flops, grads = in_passes(call, [[first], others])
        _, one_by_one = in_passes(call, [[name] for name in (first, *others)] * 2)
    assert flops > whole if again else flops == whole
    assert_same(grads, expected)
    assert_same(one_by_one, expected)


def mlp():
    """(x, weights, dy, a function that calls the op)"""
    torch.manual_seed(0)
    x, *weights = (torch.randn(rows, 8, requires_grad=True) for rows in (12, 8, 8))
    return x, weights, torch.randn(12, 8), lambda: ckptkern.mlp(x, weights[0], None, weights[1], None, recompute="full")


@pytest.mark.parametrize("change", ["another", "in place"])
def test_a_second_pass_of_another_gradient_takes_no_stash(change):
    x, weights, dy, call = mlp()
    y, three = call(), 3 * dy
    grad(y, x, dy, retain_graph=True)
    assert_equal(grad(y, weights, dy.mul_(3) if change == "in place" else three), grad(call(), weights, three))


HELD = {  # what the first pass asks for, whether the graph stays, what runs then, and whether the gradient is still held
    "a freed graph": (False, False, lambda *_: None, False),
    "all gradients": (True, True, lambda *_: None, False),
    "one pass": (False, True, lambda *_: None, True),
    "two passes": (False, True, lambda y, weights, dy: grad(y, weights, dy, retain_graph=True), False),
    "a whole pass": (False, True, lambda y, weights, dy: y.backward(torch.randn(12, 8)), False),
}


@pytest.mark.parametrize(("everything", "retain", "then", "holds"), HELD.values(), ids=HELD)
def test_what_is_held(everything, retain, then, holds):
    x, weights, dy, call = mlp()
    y = call()
    grad(y, [x, *weights] if everything else x, dy, retain_graph=retain)
    then(y, weights, dy)
    held = weakref.ref(dy)
    del dy
    assert (held() is not None) == holds


@pytest.mark.parametrize("workspace", ["1KiB", None])
def test_the_weights_matmuls_run_without_autocast_as_all_others(workspace):
    """In a second pass, and where they are delayed: float32 weights, 16-bit operands, sums over chunks in float32."""
    x, dy, mlp = torch.randn(300, 32, requires_grad=True), torch.randn(300, 32), ckptkern.nn.MLP(32, 64)
    weights = list(mlp.parameters())
    with torch.autocast("cpu", torch.bfloat16), ckptkern.workspace(workspace):
        expected = grad(mlp(x).float(), weights, dy)
        y, again = mlp(x).float(), mlp(x).float()
        grad(y, x, dy, retain_graph=True)
        assert_equal(grad(y, weights, dy), expected)
        with delay_weight_gradients(mlp):
            again.backward(dy)
    assert_equal([p.grad for p in weights], expected)


def test_all_regions_share_one_workspace():
    """In "auto": what one region holds, another one may not."""
    x, _, dy, call = mlp()
    with split_backward("auto"), ckptkern.workspace(2000):
        ys = [call() for _ in range(3)]
        for y in ys:
            grad(y, x, dy, retain_graph=True)
        assert [y.grad_fn.stash is not None for y in ys] == [True, False, False]
        del y
        ys.pop(0)
        grad(ys[0], x, dy, retain_graph=True)
        assert ys[0].grad_fn.stash is not None


def test_the_second_pass_runs_no_body(monkeypatch):
    """What torch's zero-bubble schedules do: the second pass begins at the region's node, with the tensors the first had."""
    x, weights, _, call = mlp()
    y, got, bodies, direct = call(), [], [], functions.run_backward
    monkeypatch.setattr(functions, "run_backward", lambda op, *rest: bodies.append(op.name) or direct(op, *rest))
    handle = y.grad_fn.register_prehook(got.append)
    (dx,) = grad(y.sin().sum(), x, retain_graph=True)
    handle.remove()
    edge = torch.autograd.graph.GradientEdge(y.grad_fn, 0)
    actual = dx, *grad([edge], weights, grad_outputs=[got[0][0]])
    assert bodies == ["mlp"]
    assert_equal(actual, grad(call().sin().sum(), [x, *weights]))


def test_a_partial_backward_leaves_main_grads_alone_and_create_graph_as_it_is():
    x, weights, dy, call = mlp()
    for w in weights:
        w.main_grad = torch.zeros(8, 8)
    y = call()
    grad(y, x, dy, retain_graph=True)
    assert not any(w.main_grad.any() for w in weights)
    grad(y, weights, dy, allow_unused=True)
    assert all(w.main_grad.any() for w in weights)
    second = []
    for mode in ("stash", "recompute"):
        with split_backward(mode):
            (dx,) = grad(call().square().sum(), x, create_graph=True)
            second.append(grad(dx.square().sum(), [x, *weights]))
    assert_equal(*second)
    with pytest.raises(ValueError, match="split_backward: mode must be"):
        split_backward("later")


# -- by hand -----------------------------------------------------------------------------------------------------------


def model(recompute="full", tied=False) -> nn.Sequential:
    """tied: a layer runs twice, and the sums of its gradients have another order."""
    torch.manual_seed(0)
    layers = [ckptkern.nn.MLP(8, 16, recompute=recompute) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 8), *layers, *layers[: int(tied)])


def gradients(model: nn.Module, delayed: bool, run=nn.Module.__call__) -> dict:
    torch.manual_seed(1)
    for batch in torch.randn(3, 5, 6):
        with delay_weight_gradients(model) if delayed else contextlib.nullcontext():
            run(model, batch).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(("recompute", "tied"), [("none", False), ("full", False), ("full", True)])
def test_delayed_gradients_have_the_bits(recompute, tied):
    """Those inside an activation checkpoint come at once."""
    for run in (nn.Module.__call__, ckptkern.checkpoint):
        ours, theirs = (gradients(model(recompute, tied), delayed, run) for delayed in (True, False))
        (assert_same_within_rounding if tied else assert_same)(ours, theirs)


def waiting(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if "fc" in name and "weight" in name}


def test_delayed_gradients_are_added_to_main_grad():
    layers, expected = model(), gradients(model(), False)
    for p in waiting(layers).values():
        p.main_grad = torch.zeros_like(p)
    gradients(layers, True)
    assert all(p.grad is None for p in waiting(layers).values())
    actual = {name: p.main_grad for name, p in waiting(layers).items()}
    assert_same_within_rounding(actual, {name: expected[name] for name in actual})


def test_weights_wait_until_they_are_flushed():
    """By hand, or at the end, but not after an error. What is returned does not wait, nor do another model's weights."""
    ours, other, failing, x = model(), model(), model(), torch.randn(5, 6)
    with delay_weight_gradients(ours) as later:
        assert all(gradient is not None for gradient in grad(ours(x).sum(), list(ours.parameters())))
        ours(x).sum().backward()
        other(x).sum().backward()
        assert all(p.grad is not None for p in other.parameters())
        assert {name for name, p in ours.named_parameters() if p.grad is None} == waiting(ours).keys()
        with bodies_seen(), Watch() as watch:
            later.flush()
        assert watch.flops == 2 * 2 * 2 * 5 * 8 * 16  # two layers of two weights
        assert all(p.grad is not None for p in ours.parameters())
        with pytest.raises(RuntimeError, match="already"):
            later.__enter__()
    with contextlib.suppress(ArithmeticError), delay_weight_gradients(failing) as later:
        failing(x).sum().backward()
        raise ArithmeticError
    assert not later.queue
    assert all(p.grad is None for p in waiting(failing).values())


def test_what_delayed_gradients_refuse():
    layers, x = model()[1], torch.randn(5, 8)
    with pytest.raises(RuntimeError, match="changed in place since backward"), delay_weight_gradients(layers):  # noqa: PT012
        layers(x).sum().backward()
        x.mul_(2)
    layers.fc1.weight.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match=r"fc1.weight has hooks"):
        delay_weight_gradients(layers)


# -- activation checkpoints --------------------------------------------------------------------------------------------


class Block(nn.Sequential):
    """A LayerNorm is read by both passes, a Linear's input by the second alone."""

    def __init__(self, fused=False):
        torch.manual_seed(0)
        mlp = ckptkern.nn.MLP(8, 16) if fused else nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        super().__init__(nn.LayerNorm(8), mlp, nn.Dropout(0.5))
        self.calls = deque()  # a number or a list would be put back after a recompute

    def forward(self, x):
        self.calls.append(None)
        return super().forward(x)


X, DY = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)


def each_in_a_pass(block, change=lambda: None, wrapped=None):
    """The gradients of X and of the parameters. wrapped: the checkpoint, if it is not the block's own."""
    torch.manual_seed(3)
    y = (wrapped or functools.partial(ckptkern.checkpoint, block))(X)
    (dx,) = grad(y, X, DY, retain_graph=True)
    change()
    return dx, *(grad(y, p, DY, retain_graph=True)[0] for p in block.parameters())


def check(block, wrapped=None):
    actual = each_in_a_pass(block, wrapped=wrapped)
    calls = len(block.calls)
    torch.manual_seed(3)
    assert_equal(actual, grad(block(X), [X, *block.parameters()], DY))
    return calls


@pytest.mark.parametrize(
    ("mode", "workspace", "runs"), [("stash", 1, 2), ("auto", "1MiB", 2), ("auto", 1, 8), ("recompute", None, 8)]
)
@pytest.mark.parametrize("fused", [False, True])
def test_passes_share_a_recompute(fused, mode, workspace, runs):
    with split_backward(mode), ckptkern.workspace(workspace):
        assert check(Block(fused)) == runs


@pytest.mark.parametrize("outer", [ckptkern.checkpoint, functools.partial(checkpoint, use_reentrant=False)])
@pytest.mark.parametrize("workspace", [1, "1KiB", None])
def test_a_checkpoint_in_a_checkpoint(outer, workspace):
    block = Block()
    with split_backward("auto"), ckptkern.workspace(workspace):
        check(block, lambda x: outer(lambda x: ckptkern.checkpoint(block, x), x))


def test_what_changes_between_the_passes_is_an_error():
    """A parameter, an argument that the weight's gradient reads, and an op's input."""
    block = Block()
    with pytest.raises(CheckpointError, match="was changed in place"):
        each_in_a_pass(block, block[1][0].weight.detach().zero_)
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)
    inplace = pytest.raises(RuntimeError, match="modified by an inplace operation")
    with inplace:
        each_in_a_pass(linear, lambda: x.mul_(2), lambda h: ckptkern.checkpoint(lambda h, x: h * linear(x), h, x))
    x, weights, dy, call = mlp()
    y = call()
    grad(y, x, dy, retain_graph=True)
    x.detach().mul_(2)
    with inplace:
        grad(y, weights, dy)


def test_what_was_recomputed_goes_with_the_graph():
    """And whole passes over a retained graph hold none."""
    block, outputs = Block(), []
    block[1][0].register_forward_hook(lambda module, args, y: outputs.append(weakref.ref(y)))
    each_in_a_pass(block)
    assert not any(reference() is not None for reference in outputs)
    block.calls.clear()
    y = ckptkern.checkpoint(block, X)
    for _ in range(3):
        grad(y, [X, *block.parameters()], DY, retain_graph=True)
    assert len(block.calls) == 4


def test_sparse_tensors_are_not_held():
    a, w = torch.eye(4).to_sparse(), torch.randn(8, 3, requires_grad=True)
    y = ckptkern.checkpoint(lambda x: torch.sparse.mm(a * 2, x @ w).square(), X)
    with split_backward("auto"):
        grad(y.sum(), X, retain_graph=True)
        gradient = grad(y.sum(), w)
    torch.testing.assert_close(gradient, grad((2 * (X @ w)).square().sum(), w))
