"""Backward in two passes, the input's gradient first and the weights' later: what runs twice, what is held, and the bits."""

import contextlib
import functools
import weakref

import pytest
import torch
from support.calls import ENTRIES, call_of, dropping
from support.cases import Watch, assert_same, assert_same_within_rounding, output_gradient
from torch import nn
from torch.autograd import grad
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import ckptkern
from ckptkern import delay_weight_gradients, split_backward
from ckptkern.ops import catalog
from ckptkern.ops.registration import functions
from ckptkern.ops.registration.delayed import Stash, stashing
from ckptkern.ops.registration.functions import bodies_seen
from ckptkern.ops.registration.gradients import weight_grad
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
    tensors = call.make()
    y, flops, grads = call(tensors), 0, {}
    dy = output_gradient(y)
    for i, part in enumerate(parts):
        with bodies_seen(), FlopCounterMode(display=False, custom_mapping=LACKING) as counter:
            some = grad(y, [tensors[name] for name in part], dy, retain_graph=i < len(parts) - 1)
        flops += counter.get_total_flops()
        grads |= dict(zip(part, some, strict=True))
    return flops, grads


# Whose result is one tensor, and not reduced outside of the op, which would make another gradient of it in each pass.
SPLIT = [
    name for name in ENTRIES if "block" in name or "mlp" in name or name.startswith(("linear_act", "linear_stack"))
]
SPLIT = [name for name in (*SPLIT, "transformer_layer", "transformer_layer-latents") if name != "moe_block"]
SPLIT = [dropping(name, mode=mode) for name in SPLIT for mode in (0, -1)]
MLP = dropping("mlp")


@pytest.mark.parametrize(("call", "mode", "workspace", "again"), [
    *((call, "stash", None, False) for call in SPLIT),
    (MLP, "recompute", None, True), (MLP, "auto", 1, True), (MLP, "auto", "16MiB", False),
], ids=str)  # fmt: skip
def test_two_passes_run_what_one_runs(call, mode, workspace, again):
    """Unless there is no stash: in "auto" where the operands do not fit the workspace. Bits are one pass's."""
    first, *others = call.make()
    with split_backward(mode), ckptkern.workspace(workspace):
        whole, expected = in_passes(call, [[first, *others]])
        flops, grads = in_passes(call, [[first], others])
    assert flops > whole if again else flops == whole
    assert_same(grads, expected)


def mlp(recompute="full", tokens=12):
    torch.manual_seed(0)
    x, weights = torch.randn(tokens, 8, requires_grad=True), [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
    return x, weights, lambda: ckptkern.mlp(x, weights[0], None, weights[1], None, recompute=recompute)


@pytest.mark.parametrize("change", ["another", "in place"])
def test_a_second_pass_of_another_gradient_takes_no_stash(change):
    x, weights, call = mlp()
    y, dy = call(), torch.ones(12, 8)
    grad(y, x, dy, retain_graph=True)
    dy = dy.mul_(3) if change == "in place" else torch.full((12, 8), 3.0)
    assert_equal(grad(y, weights, dy), grad(call(), weights, torch.full((12, 8), 3.0)))


def test_weights_in_several_passes_and_again():
    """Each weight's share of the stash is taken once; a third pass recomputes."""
    x, weights, call = mlp()
    y, dy = call(), torch.randn(12, 8)
    expected = grad(y, [x, *weights], dy, retain_graph=True)
    for _ in range(2):
        assert_equal([grad(y, one, dy, retain_graph=True)[0] for one in (x, *weights)], expected)


HELD = {  # what the first pass asks for, whether the graph stays, what runs then, and whether the gradient is still held
    "a freed graph": (False, False, lambda *_: None, False),
    "all gradients": (True, True, lambda *_: None, False),
    "one pass": (False, True, lambda *_: None, True),
    "two passes": (False, True, lambda y, weights, dy: grad(y, weights, dy, retain_graph=True), False),
    "a whole pass": (False, True, lambda y, weights, dy: y.backward(torch.randn(12, 8)), False),
}


@pytest.mark.parametrize(("everything", "retain", "then", "holds"), HELD.values(), ids=HELD)
def test_what_is_held(everything, retain, then, holds):
    x, weights, call = mlp()
    y, dy = call(), torch.randn(12, 8)
    grad(y, [x, *weights] if everything else x, dy, retain_graph=retain)
    then(y, weights, dy)
    held = weakref.ref(dy)
    del dy
    assert (held() is not None) == holds


def test_operands_that_change_make_no_stash():
    """A body that wrote over what a later matmul reads would give wrong gradients."""
    a, b, stash = torch.randn(4, 3), torch.randn(4, 2), Stash(torch.inf, [])
    with stashing(stash):
        delayed = weight_grad(a, b, torch.randn(3, 2))
    assert stash.fill([a], [0, 1], 2, {1: delayed})
    assert stash.covers([a], [1])
    b.add_(1)
    assert not stash.covers([a], [1])
    assert not Stash(torch.inf, []).fill([a], [0, 1], 2, {1: delayed})


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
    x, _, call = mlp()
    dy = torch.randn(12, 8)
    with split_backward("auto"), ckptkern.workspace(2000):
        ys = [call() for _ in range(3)]
        for y in ys:
            grad(y, x, dy, retain_graph=True)
        assert [y.grad_fn.stash is not None for y in ys] == [True, False, False]
        del y
        ys.pop(0)
        grad(ys[0], x, dy, retain_graph=True)
        assert ys[0].grad_fn.stash is not None


@pytest.fixture
def bodies(monkeypatch) -> list[str]:
    """The ops whose backward runs."""
    names, direct = [], functions.direct_backward
    monkeypatch.setattr(functions, "direct_backward", lambda op, *rest: names.append(op.name) or direct(op, *rest))
    return names


def test_a_result_that_nothing_is_computed_of_is_no_other_gradient(bodies):
    """An MoE's router logits: zeros that each pass would make anew."""
    call = call_of("moe_block")
    x, *others = (tensors := call.make()).values()
    y, dy = catalog.call(call.entry, call.arguments, tensors)[0], torch.randn(2, 3, 6)
    expected = grad(y, [x, *others], dy, retain_graph=True)
    found = *grad(y, x, dy, retain_graph=True), *grad(y, others, dy)
    assert len(bodies) == 2
    assert_equal(found, expected)


def test_the_second_pass_runs_no_body(bodies):
    """What torch's zero-bubble schedules do: the second pass begins at the region's node, with the tensors the first had."""
    x, weights, call = mlp()
    y, got = call(), []
    handle = y.grad_fn.register_prehook(got.append)
    (dx,) = grad(y.sin().sum(), x, retain_graph=True)
    handle.remove()
    edge = torch.autograd.graph.GradientEdge(y.grad_fn, 0)
    found = dx, *grad([edge], weights, grad_outputs=[got[0][0]])
    assert bodies == ["mlp"]
    assert_equal(found, grad(call().sin().sum(), [x, *weights]))


def test_a_partial_backward_leaves_main_grads_alone_and_create_graph_as_it_is():
    x, weights, call = mlp()
    for w in weights:
        w.main_grad = torch.zeros(8, 8)
    y, dy = call(), torch.randn(12, 8)
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


class Model(nn.Module):
    """tied: a layer runs twice, and the sums of its gradients have another order."""

    def __init__(self, recompute="full", tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 8)
        self.layers = nn.Sequential(*(ckptkern.nn.MLP(8, 16, recompute=recompute) for _ in range(2)))
        self.last = self.layers[0] if tied else nn.Identity()

    def forward(self, x):
        return self.last(self.layers(self.embed(x))).square().sum()

    def weights(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if "layers" in name and "weight" in name}


X = torch.randn(5, 6)


def gradients(model: nn.Module, delayed: bool, around=lambda model, x: model(x)) -> dict:
    torch.manual_seed(1)
    for batch in torch.randn(3, 5, 6):
        with delay_weight_gradients(model) if delayed else contextlib.nullcontext():
            around(model, batch).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tied", [False, True])
def test_delayed_gradients_have_the_bits(recompute, tied):
    """Those inside an activation checkpoint come at once."""
    ours, theirs = (gradients(Model(recompute, tied), delayed) for delayed in (True, False))
    for name, one in theirs.items():
        exact = {"rtol": 0, "atol": 0} if not (tied and "layers.0" in name) else {}
        torch.testing.assert_close(ours[name], one, **exact)
    if not tied:
        assert_same(*(gradients(Model(recompute), delayed, ckptkern.checkpoint) for delayed in (True, False)))


def test_delayed_gradients_are_added_to_main_grad():
    model, expected = Model(), gradients(Model(), False)
    for p in model.weights().values():
        p.main_grad = torch.zeros_like(p)
    gradients(model, True)
    assert all(p.grad is None for p in model.weights().values())
    found = {name: p.main_grad for name, p in model.weights().items()}
    assert_same_within_rounding(found, {name: expected[name] for name in found})


def test_weights_wait_until_they_are_flushed():
    """By hand, or at the end, but not after an error. What is returned does not wait, nor do another model's weights."""
    model, other = Model(), Model()
    with delay_weight_gradients(model) as later:
        assert all(one is not None for one in grad(model(X), list(model.parameters())))
        model(X).backward()
        other(X).backward()
        assert all(p.grad is not None for p in other.parameters())
        assert [name for name, p in model.named_parameters() if p.grad is None] == list(model.weights())
        with bodies_seen(), Watch() as watch:
            later.flush()
        assert watch.flops == 2 * 2 * 2 * 5 * 8 * 16  # two layers of two weights
        assert all(p.grad is not None for p in model.parameters())
        with pytest.raises(RuntimeError, match="already"):
            later.__enter__()
    assert not later.queue
    failing = Model()
    with contextlib.suppress(ArithmeticError), delay_weight_gradients(failing) as later:
        failing(X).backward()
        raise ArithmeticError
    assert not later.queue
    assert failing.layers[1].fc1.weight.grad is None


def test_what_delayed_gradients_refuse():
    mlp, x = ckptkern.nn.MLP(8, 16), torch.randn(5, 8)

    def change():
        with delay_weight_gradients(mlp):
            mlp(x).sum().backward()
            x.mul_(2)

    with pytest.raises(RuntimeError, match="changed in place since backward"):
        change()
    model = Model()
    model.embed.weight.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match=r"embed.weight has hooks"):
        delay_weight_gradients(model)


# -- activation checkpoints --------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A LayerNorm is read by both passes, a Linear's input by the second alone."""

    def __init__(self, fused=False):
        super().__init__()
        torch.manual_seed(0)
        mlp = ckptkern.nn.MLP(8, 16) if fused else nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.layers = nn.Sequential(nn.LayerNorm(8), mlp, nn.Dropout(0.5))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layers(x)


X8, DY = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)


def each_in_a_pass(block, wrapped, change=lambda: None):
    """The gradients of x and of the parameters."""
    torch.manual_seed(3)
    y = wrapped(X8)
    (dx,) = grad(y, X8, DY, retain_graph=True)
    change()
    return dx, *(grad(y, p, DY, retain_graph=True)[0] for p in block.parameters())


def in_one_pass(block):
    torch.manual_seed(3)
    return grad(block(X8), [X8, *block.parameters()], DY)


@pytest.mark.parametrize(
    ("mode", "workspace", "runs"), [("stash", 1, 2), ("auto", "1MiB", 2), ("auto", 1, 8), ("recompute", None, 8)]
)
@pytest.mark.parametrize("fused", [False, True])
def test_passes_share_a_recompute(fused, mode, workspace, runs):
    block = Block(fused)
    with split_backward(mode), ckptkern.workspace(workspace):
        found = each_in_a_pass(block, functools.partial(ckptkern.checkpoint, block))
    assert block.calls == runs
    assert_equal(found, in_one_pass(block))


@pytest.mark.parametrize("outer", [ckptkern.checkpoint, functools.partial(checkpoint, use_reentrant=False)])
@pytest.mark.parametrize("workspace", [1, "1KiB", None])
def test_a_checkpoint_in_a_checkpoint(outer, workspace):
    block = Block()
    with split_backward("auto"), ckptkern.workspace(workspace):
        found = each_in_a_pass(block, lambda x: outer(lambda x: ckptkern.checkpoint(block, x), x))
    assert_equal(found, in_one_pass(block))


def test_what_changes_between_the_passes_is_an_error():
    """A parameter, and an argument that the weight's gradient reads."""
    block = Block()
    with pytest.raises(CheckpointError, match="was changed in place"):
        each_in_a_pass(block, functools.partial(ckptkern.checkpoint, block), block.layers[1][0].weight.detach().zero_)
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        each_in_a_pass(linear, lambda h: ckptkern.checkpoint(lambda h, x: h * linear(x), h, x), lambda: x.mul_(2))


def test_what_was_recomputed_goes_with_the_graph():
    """And whole passes over a retained graph hold none."""
    block, made = Block(), []
    block.layers[1][0].register_forward_hook(lambda module, args, y: made.append(weakref.ref(y)))
    each_in_a_pass(block, functools.partial(ckptkern.checkpoint, block))
    assert not any(one() is not None for one in made)
    block.calls = 0
    y = ckptkern.checkpoint(block, X8)
    for _ in range(3):
        grad(y, [X8, *block.parameters()], DY, retain_graph=True)
    assert block.calls == 4


def test_sparse_tensors_are_not_held():
    a, w = torch.eye(4).to_sparse(), torch.randn(8, 3, requires_grad=True)
    y = ckptkern.checkpoint(lambda x: torch.sparse.mm(a * 2, x @ w).square(), X8)
    with split_backward("auto"):
        grad(y.sum(), X8, retain_graph=True)
        found = grad(y.sum(), w)
    torch.testing.assert_close(found, grad((2 * (X8 @ w)).square().sum(), w))
