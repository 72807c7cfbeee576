"""Backward in two passes, the input's gradient first and the weights' later: what runs twice, what is held, and the bits."""

import functools
import weakref

import pytest
import torch
from support.blocks import calls, in_turn
from support.cases import SAVED_SETS, P, Watch, assert_same, make, output_gradient, setups
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import ckptkern
from ckptkern.ops.registration import functions
from ckptkern.ops.registration.delayed import Stash, stashing
from ckptkern.ops.registration.functions import bodies_seen
from ckptkern.ops.registration.gradients import weight_grad
from ckptkern.ops.registration.library import FLOPS

LACKING = {op: formula for op, formula in FLOPS.items() if flop_registry.get(op) is not formula}
ALL = setups(SAVED_SETS, dropout=(P,)) + in_turn() + calls()


@pytest.fixture(autouse=True)
def stash():
    with ckptkern.split_backward("stash"):
        yield


def passes(function, tensors, parts, dys=None) -> tuple[list[int], dict]:
    """(FLOPs of each pass, all gradients). parts: names that each pass asks for."""
    y, flops, grads = function(tensors), [], {}
    dy = output_gradient(y)
    for i, part in enumerate(parts):
        with bodies_seen(), FlopCounterMode(display=False, custom_mapping=LACKING) as counter:
            some = torch.autograd.grad(
                y, [tensors[name] for name in part], dy if dys is None else dys[i], retain_graph=i < len(parts) - 1
            )
        flops.append(counter.get_total_flops())
        grads |= dict(zip(part, some, strict=True))
    return flops, grads


def two(tensors) -> list[tuple[str, ...]]:
    """The first tensor, and the others."""
    first, *others = tensors
    return [(first,), tuple(others)]


@pytest.mark.sampled
@pytest.mark.parametrize("setup", [one for one in ALL if "x" in make(one.values[0])])
def test_two_passes_run_what_one_runs(setup):
    tensors = make(setup)
    if len(tensors) == 1:
        pytest.skip("it has no weights")
    whole, expected = passes(setup.fused, tensors, [tuple(tensors)])
    flops, grads = passes(setup.fused, tensors, two(tensors))
    assert sum(flops) == whole[0]
    assert_same({name: grads[name] for name in expected}, expected)


@pytest.mark.parametrize("mode", ["recompute", "auto"])
def test_without_a_stash_each_pass_recomputes(mode):
    """In "auto" that is where the operands do not fit the workspace."""
    setup = setups(("gelu",), modes=("full",), ops=("mlp",))[0].values[0]
    with ckptkern.split_backward(mode), ckptkern.workspace(1 if mode == "auto" else None):
        tensors = make(setup)
        whole, expected = passes(setup.fused, tensors, [tuple(tensors)])
        flops, grads = passes(setup.fused, tensors, two(tensors))
    assert sum(flops) > whole[0]
    assert_same({name: grads[name] for name in expected}, expected)


def test_auto_stashes_what_fits():
    setup = setups(("gelu",), modes=("full",), ops=("mlp",))[0].values[0]
    with ckptkern.split_backward("auto"), ckptkern.workspace("16MiB"):
        tensors = make(setup)
        whole, _ = passes(setup.fused, tensors, [tuple(tensors)])
        flops, _ = passes(setup.fused, tensors, two(tensors))
    assert sum(flops) == whole[0]


def mlp(recompute="full", tokens=12):
    torch.manual_seed(0)
    x = torch.randn(tokens, 8, requires_grad=True)
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
    return x, weights, lambda: ckptkern.mlp(x, weights[0], None, weights[1], None, recompute=recompute)


@pytest.mark.parametrize("change", ["another", "in place"])
def test_a_second_pass_of_another_gradient_takes_no_stash(change):
    x, weights, call = mlp()
    y, dy = call(), torch.ones(12, 8)
    torch.autograd.grad(y, x, dy, retain_graph=True)
    if change == "in place":
        dy.mul_(3)
    else:
        dy = torch.full((12, 8), 3.0)
    grads = torch.autograd.grad(y, weights, dy)
    expected = torch.autograd.grad(call(), weights, torch.full((12, 8), 3.0))
    for ours, theirs in zip(grads, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_weights_in_several_passes_and_again():
    """Each weight's share of the stash is taken once; a third pass recomputes."""
    x, weights, call = mlp()
    y, dy = call(), torch.randn(12, 8)
    expected = torch.autograd.grad(y, [x, *weights], dy, retain_graph=True)
    for _ in range(2):
        found = [torch.autograd.grad(y, one, dy, retain_graph=True)[0] for one in (x, *weights)]
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_nothing_is_held_after_the_second_pass_or_without_one():
    x, weights, call = mlp()
    for wanted, retain in ((weights, True), (x, False)):
        y, dy = call(), torch.randn(12, 8)
        held = weakref.ref(dy)
        torch.autograd.grad(y, x, dy, retain_graph=retain)
        if retain:
            torch.autograd.grad(y, wanted, dy, retain_graph=True)
        del dy
        assert held() is None


def test_a_stash_counts_what_is_not_saved_already():
    x, big = torch.randn(4), torch.randn(16)
    stash = Stash(64, [x])
    assert stash.holds([x, big, big[:2], None])
    assert stash.bytes == 64
    assert not stash.holds([torch.randn(1)])
    assert not stash.fill([x], [0, 1], 2, {1: big})


def test_operands_that_change_make_no_stash():
    """A body that wrote over what a later matmul reads would give wrong gradients."""
    a, b, weight = torch.randn(4, 3), torch.randn(4, 2), torch.randn(3, 2)
    stash = Stash(torch.inf, [])
    with stashing(stash):
        delayed = weight_grad(a, b, weight)
    assert stash.fill([a], [0, 1], 2, {1: delayed})
    assert stash.covers([a], [1])
    b.add_(1)
    assert not stash.covers([a], [1])
    assert not Stash(torch.inf, []).fill([a], [0, 1], 2, {1: delayed})


@pytest.mark.parametrize("workspace", ["1KiB", None])
@pytest.mark.parametrize("passes", ["two", "by hand"])
def test_the_weights_matmuls_run_without_autocast_as_all_others(passes, workspace):
    """float32 weights, 16-bit operands, sums over chunks in float32."""
    torch.manual_seed(0)
    x, dy = torch.randn(300, 32, requires_grad=True), torch.randn(300, 32)
    mlp = ckptkern.nn.MLP(32, 64)
    with torch.autocast("cpu", torch.bfloat16), ckptkern.workspace(workspace):
        expected = torch.autograd.grad(mlp(x).float(), list(mlp.parameters()), dy)
        y = mlp(x).float()
        if passes == "two":
            torch.autograd.grad(y, x, dy, retain_graph=True)
            found = torch.autograd.grad(y, list(mlp.parameters()), dy)
        else:
            with ckptkern.delay_weight_gradients(mlp):
                y.backward(dy)
            found = [p.grad for p in mlp.parameters()]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_whole_pass_drops_the_stash():
    x, _, call = mlp()
    y, dy = call(), torch.randn(12, 8)
    held = weakref.ref(dy)
    torch.autograd.grad(y, x, dy, retain_graph=True)
    del dy
    assert held() is not None
    y.backward(torch.randn(12, 8))
    assert held() is None


def test_a_pass_that_asks_for_all_stashes_nothing():
    x, weights, call = mlp()
    y, dy = call(), torch.randn(12, 8)
    held = weakref.ref(dy)
    torch.autograd.grad(y, [x, *weights], dy, retain_graph=True)
    del dy
    assert held() is None


def test_all_regions_share_one_workspace():
    """In "auto": what one region holds, another one may not."""
    x, _, call = mlp()
    dy = torch.randn(12, 8)
    with ckptkern.split_backward("auto"), ckptkern.workspace(2000):
        ys = [call() for _ in range(3)]
        for y in ys:
            torch.autograd.grad(y, x, dy, retain_graph=True)
        assert [y.grad_fn.stash is not None for y in ys] == [True, False, False]
        del y
        ys.pop(0)
        torch.autograd.grad(ys[0], x, dy, retain_graph=True)
        assert ys[0].grad_fn.stash is not None


def test_a_result_that_nothing_is_computed_of_is_no_other_gradient(monkeypatch):
    """An MoE's router logits: zeros that each pass would make anew."""
    bodies, direct = [], functions.direct_backward
    monkeypatch.setattr(functions, "direct_backward", lambda *args: bodies.append(1) or direct(*args))
    torch.manual_seed(0)
    x, router, up, down = (torch.randn(*s, requires_grad=True) for s in ((9, 8), (4, 8), (4, 12, 8), (4, 8, 6)))
    arguments = dict(router_weight=router, gate_up_weight=up, down_weight=down, top_k=2)
    y = ckptkern.moe_block(x, **arguments)[0]
    dy = torch.randn(9, 8)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    found = torch.autograd.grad(y, [router, up, down], dy)
    assert len(bodies) == 1
    expected = torch.autograd.grad(ckptkern.moe_block(x, **arguments)[0], [x, router, up, down], dy)
    for ours, theirs in zip((dx, *found), expected, strict=True):
        assert torch.equal(ours, theirs)
    (dx,) = torch.autograd.grad(ckptkern.moe_block(x, **arguments)[1].sum(), x)  # y has none
    assert dx.any()


def test_under_create_graph_and_in_whole_passes_nothing_changes():
    x, weights, call = mlp()
    y = call()
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    second = torch.autograd.grad(dx.square().sum(), [x, *weights])
    with ckptkern.backend("eager"):
        z = torch.nn.functional.gelu(x @ weights[0].t()) @ weights[1].t()
    (dx,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
    for ours, theirs in zip(second, torch.autograd.grad(dx.square().sum(), [x, *weights]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_partial_backward_leaves_main_grads_alone():
    x, weights, call = mlp()
    for w in weights:
        w.main_grad = torch.zeros(8, 8)
    y, dy = call(), torch.randn(12, 8)
    torch.autograd.grad(y, x, dy, retain_graph=True)
    assert not any(w.main_grad.any() for w in weights)
    torch.autograd.grad(y, weights, dy, allow_unused=True)
    assert all(w.main_grad.any() for w in weights)


def test_another_mode_is_an_error():
    with pytest.raises(ValueError, match="split_backward: mode must be"):
        ckptkern.split_backward("later")


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


def gradients(model: nn.Module, delayed: bool, around=lambda call: call()) -> dict:
    torch.manual_seed(1)
    for batch in torch.randn(3, 5, 6):
        if delayed:
            with ckptkern.delay_weight_gradients(model) as later:
                around(lambda batch=batch: model(batch)).backward()
                later.flush()
        else:
            around(lambda batch=batch: model(batch)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tied", [False, True])
def test_delayed_gradients_have_the_bits(recompute, tied):
    ours, theirs = (gradients(Model(recompute, tied), delayed) for delayed in (True, False))
    for name, grad in theirs.items():
        if tied and "layers.0" in name:
            torch.testing.assert_close(ours[name], grad)
        else:
            assert torch.equal(ours[name], grad), name


def test_weights_wait_until_they_are_flushed():
    model = Model()
    with ckptkern.delay_weight_gradients(model) as later:
        model(torch.randn(5, 6)).backward()
        waits = [name for name, p in model.named_parameters() if p.grad is None]
        assert waits == [name for name, _ in model.named_parameters() if "layers" in name and "weight" in name]
        with bodies_seen(), Watch() as watch:
            later.flush()
        assert watch.flops == 2 * 2 * 2 * 5 * 8 * 16  # two layers of two weights
        assert all(p.grad is not None for p in model.parameters())
    assert not later.queue


def test_what_waits_is_flushed_at_the_end_but_after_an_error():
    model, failing = Model(), Model()
    with ckptkern.delay_weight_gradients(model):
        model(torch.randn(5, 6)).backward()
    assert all(p.grad is not None for p in model.parameters())
    later = ckptkern.delay_weight_gradients(failing)
    later.__enter__()
    failing(torch.randn(5, 6)).backward()
    later.__exit__(ArithmeticError, ArithmeticError(), None)
    assert not later.queue
    assert failing.layers[1].fc1.weight.grad is None


def test_a_models_weights_alone_wait():
    model, other = Model(), Model()
    with ckptkern.delay_weight_gradients(model):
        other(torch.randn(5, 6)).backward()
        assert all(p.grad is not None for p in other.parameters())


def test_a_pass_that_returns_a_weights_gradient_delays_nothing():
    model, x = Model(), torch.randn(5, 6)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    with ckptkern.delay_weight_gradients(model):
        found = torch.autograd.grad(model(x), list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_an_input_that_changes_before_the_flush_is_an_error():
    mlp, x = ckptkern.nn.MLP(8, 16), torch.randn(5, 8)
    delayed = ckptkern.delay_weight_gradients(mlp)
    delayed.__enter__()
    mlp(x).sum().backward()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place since backward"):
        delayed.flush()
    delayed.__exit__(RuntimeError, RuntimeError(), None)


def test_inside_an_activation_checkpoint_gradients_come_at_once():
    def around(call):
        return ckptkern.checkpoint(call)

    assert_same(gradients(Model(), True, around), gradients(Model(), False, around))


def test_main_grads_are_added_to_when_they_are_flushed():
    model, expected = Model(), gradients(Model(), False)
    weights = {name: p for name, p in model.named_parameters() if "layers" in name and "weight" in name}
    for p in weights.values():
        p.main_grad = torch.zeros_like(p)
    gradients(model, True)
    for name, p in weights.items():
        assert p.grad is None
        torch.testing.assert_close(p.main_grad, expected[name])


def test_errors_of_delayed_gradients():
    model = Model()
    handle = model.embed.weight.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match=r"embed.weight has hooks"):
        ckptkern.delay_weight_gradients(model)
    handle.remove()
    with ckptkern.delay_weight_gradients(model) as later, pytest.raises(RuntimeError, match="already"):
        later.__enter__()


def test_the_second_pass_runs_no_body(monkeypatch):
    """What torch's zero-bubble schedules do: the second pass begins at the region's node, with the tensors the first had."""
    count, direct = [], functions.direct_backward

    def counted(*args):
        count.append(args[0].name)
        return direct(*args)

    monkeypatch.setattr(functions, "direct_backward", counted)
    x, weights, call = mlp()
    y, got = call(), []
    handle = y.grad_fn.register_prehook(got.append)
    (dx,) = torch.autograd.grad(y.sin().sum(), x, retain_graph=True)
    handle.remove()
    edge = torch.autograd.graph.GradientEdge(y.grad_fn, 0)
    grads = torch.autograd.grad([edge], weights, grad_outputs=[got[0][0]])
    assert count == ["mlp"]
    for ours, theirs in zip((dx, *grads), torch.autograd.grad(call().sin().sum(), [x, *weights]), strict=True):
        assert torch.equal(ours, theirs)


# -- activation checkpoints --------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A LayerNorm is read by both passes, a Linear's input by the second alone."""

    def __init__(self, fused):
        super().__init__()
        torch.manual_seed(0)
        mlp = ckptkern.nn.MLP(8, 16) if fused else nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.layers = nn.Sequential(nn.LayerNorm(8), mlp, nn.Dropout(0.5))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layers(x)


def in_passes(block, x, dy, change=lambda: None):
    """(dx, gradients of parameters, each in a pass of its own)"""
    torch.manual_seed(3)
    y = ckptkern.checkpoint(block, x)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    change()
    return dx, *(torch.autograd.grad(y, p, dy, retain_graph=True)[0] for p in block.parameters())


@pytest.mark.parametrize(
    ("mode", "workspace", "runs"), [("stash", 1, 2), ("auto", "1MiB", 2), ("auto", 1, 8), ("recompute", None, 8)]
)
@pytest.mark.parametrize("fused", [False, True])
def test_passes_share_a_recompute(fused, mode, workspace, runs):
    block, x, dy = Block(fused), torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    torch.manual_seed(3)
    expected = torch.autograd.grad(block(x), [x, *block.parameters()], dy)
    block.calls = 0
    with ckptkern.split_backward(mode), ckptkern.workspace(workspace):
        found = in_passes(block, x, dy)
    assert block.calls == runs
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_parameter_that_changes_between_the_passes_is_an_error():
    block, x = Block(False), torch.randn(4, 8, requires_grad=True)

    def change():
        with torch.no_grad():
            block.layers[1][0].weight.mul_(2)

    with pytest.raises(CheckpointError, match="was changed in place"):
        in_passes(block, x, torch.randn(4, 8), change)


def test_what_was_recomputed_goes_with_the_graph():
    block, x, dy = Block(False), torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    made = []
    block.layers[1][0].register_forward_hook(lambda module, args, y: made.append(weakref.ref(y)))
    y = ckptkern.checkpoint(block, x)
    torch.autograd.grad(y, x, dy, retain_graph=True)
    torch.autograd.grad(y, list(block.parameters()), dy)
    del y
    assert not any(one() is not None for one in made)


def test_a_whole_pass_over_a_retained_graph_holds_nothing():
    block, x, dy = Block(False), torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    y = ckptkern.checkpoint(block, x)
    for _ in range(2):
        y.backward(dy, retain_graph=True)
    assert block.calls == 3


def test_an_argument_that_changes_between_the_passes_is_an_error():
    """The weight's gradient reads the argument itself."""
    block, x = nn.Linear(8, 8), torch.randn(4, 8)
    h, dy = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    y = ckptkern.checkpoint(lambda h, x: h * block(x), h, x)
    torch.autograd.grad(y, h, dy, retain_graph=True)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, list(block.parameters()), dy)


@pytest.mark.parametrize("outer", [ckptkern.checkpoint, functools.partial(checkpoint, use_reentrant=False)])
@pytest.mark.parametrize("workspace", [1, "1KiB", None])
def test_a_checkpoint_in_a_checkpoint(outer, workspace):
    block, x, dy = Block(False), torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    torch.manual_seed(3)
    expected = torch.autograd.grad(block(x.sin()), [x, *block.parameters()], dy)
    torch.manual_seed(3)
    with ckptkern.split_backward("auto"), ckptkern.workspace(workspace):
        y = outer(lambda x: ckptkern.checkpoint(block, x.sin()), x)
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        found = torch.autograd.grad(y, list(block.parameters()), dy)
    for ours, theirs in zip((dx, *found), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_sparse_tensors_are_not_held():
    a, x = torch.eye(4).to_sparse(), torch.randn(4, 3, requires_grad=True)
    w = torch.randn(3, 3, requires_grad=True)
    y = ckptkern.checkpoint(lambda x: torch.sparse.mm(a * 2, x @ w).square(), x)
    with ckptkern.split_backward("auto"):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        (dw,) = torch.autograd.grad(y.sum(), w)
    (expected,) = torch.autograd.grad((2 * (x @ w)).square().sum(), w)
    torch.testing.assert_close(dw, expected)


def test_a_pass_that_asks_for_all_holds_no_recompute():
    block, x, dy = Block(True), torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    y = ckptkern.checkpoint(block, x)
    for _ in range(2):
        torch.autograd.grad(y, [x, *block.parameters()], dy, retain_graph=True)
    assert block.calls == 3
