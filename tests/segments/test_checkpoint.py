"""ckptkern.checkpoint against the unmodified call: gradients, random state, saved bytes, errors, and what torch's misses."""

import collections
import copy
import functools
import gc
import logging
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from support.cases import assert_same_within_rounding
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

import ckptkern
from ckptkern import checkpoint, checkpointed
from ckptkern.memory import saved_tensors

SEED = 3


def mlp(*, p: float = 0.0, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(p), nn.Linear(4 * width, width), nn.LayerNorm(width)
    )


def outcome(function, x, parameters):
    """(y, gradients, random state afterwards), all from one seed."""
    torch.manual_seed(SEED)
    x = x.detach().requires_grad_()
    y = function(x)
    grads = torch.autograd.grad(y, [x, *parameters], torch.ones_like(y), allow_unused=True)
    return y.detach(), grads, torch.get_rng_state()


def assert_same(one, other):
    assert torch.equal(one[0], other[0])
    for mine, theirs in zip(one[1], other[1], strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    assert torch.equal(one[2], other[2])


class Count(TorchDispatchMode):
    """How often each op runs inside."""

    def __init__(self):
        super().__init__()
        self.ops = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func._opname if hasattr(func, "_opname") else str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


# -- the same function ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16 autocast"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_bits_and_random_state_of_the_unmodified_run(p, autocast, early_stop):
    """Backward outside of autocast, and a weight used twice, so that its cast is cached."""
    model = mlp(p=p)
    x = torch.randn(5, 8)

    def run(segment):
        def call(x):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return segment(segment(x).float()).float() + torch.rand(())

        return outcome(call, x, model.parameters())

    assert_same(run(functools.partial(checkpoint, model, early_stop=early_stop)), run(model))


def test_matmul_dtypes_of_recompute():
    """Every matmul of a bf16 forward is a bf16 matmul in backward too, outside of the context."""
    model, dtypes = mlp(), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "mm" in str(func):
                dtypes.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(model, torch.randn(5, 8, requires_grad=True))
    with Watch():
        y.sum().backward()
    assert len(dtypes) >= 5
    assert set(dtypes) == {torch.bfloat16}


def test_autocast_cache_filled_without_gradients():
    """pytorch#112583: a no_grad pass first leaves casts without a graph in autocast's cache."""
    model, x = mlp(), torch.randn(5, 8)

    def run(function):
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                function(x)
            y = function(x)
        return torch.autograd.grad(y.float().sum(), list(model.parameters()))

    for mine, unfused in zip(run(lambda x: checkpoint(model, x)), run(model), strict=True):
        assert torch.equal(mine, unfused)


@pytest.mark.parametrize("preserve", [False, True])
def test_preserve_rng_state(preserve):
    """Without it recompute samples another mask; with it backward uses forward's."""
    torch.manual_seed(SEED)
    x = torch.ones(1000, requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x, 0.5) * x, x, preserve_rng_state=preserve)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal((grad != 0) & (y == 0), torch.zeros(1000, dtype=torch.bool)) == preserve


@pytest.mark.parametrize("between", [0, 1])
@pytest.mark.parametrize("before", [0, 1])
def test_normal_numbers_come_in_pairs(before, between):
    """The CPU's generator keeps the second of a pair for the next call, beside the state of its engine."""

    def run(wrap):
        torch.manual_seed(SEED)
        torch.randn(before)
        x = torch.ones(3, requires_grad=True)
        y = wrap(lambda x: (x * torch.randn(3)).sin())(x)
        torch.randn(between)
        return y, *torch.autograd.grad(y.sum(), x), torch.randn(3)

    for mine, unfused in zip(run(checkpointed), run(lambda function: function), strict=True):
        assert torch.equal(mine, unfused)


def test_two_calls_draw_two_masks_and_the_seed_reproduces_them():
    """Two calls differ, and a seed reproduces them (flash-attention#2088)."""

    def masks():
        torch.manual_seed(SEED)
        x = torch.ones(64, requires_grad=True)
        return [checkpoint(F.dropout, x, 0.5).detach() for _ in range(2)]

    first, second = masks()
    assert not torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip((first, second), masks(), strict=True))


Pair = collections.namedtuple("Pair", "left right")


def test_arguments_and_outputs_of_any_kind():
    """Nested containers, None, strings, integer tensors, in and out."""
    seen = []

    def function(pair, options, *, table, flag, index):
        seen.append((type(pair), list(options), flag))
        a = pair.left.sin() * options["w"][0] + table[1]
        return {"a": a, "index": index + 1, "none": None}, [a.cos(), "text"], pair.right

    tensors = [torch.randn(4, requires_grad=True) for _ in range(3)]

    def call(run):
        out, (cos, text), right = run(
            function, Pair(tensors[0], 7), {"w": [tensors[1], None]}, table=(1, tensors[2]), flag=True,
            index=torch.arange(3),
        )  # fmt: skip
        assert (text, right, out["none"]) == ("text", 7, None)
        assert torch.equal(out["index"], torch.arange(1, 4))
        return torch.autograd.grad((out["a"] * cos).sum(), tensors)

    mine, unfused = call(checkpoint), call(lambda f, *args, **kwargs: f(*args, **kwargs))
    assert all(torch.equal(a, b) for a, b in zip(mine, unfused, strict=True))
    assert seen[0] == seen[1]
    assert seen[0][0] is Pair


def test_containers_may_change_after_forward():
    """Recompute uses the arguments as they were given."""
    xs = [torch.randn(3, requires_grad=True)]
    y = checkpoint(lambda xs: xs[0].sin(), xs)
    x = xs.pop()
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], x.cos())


def test_arguments_that_autograd_cannot_save():
    """Inference tensors, and caches that forward itself writes."""
    x = torch.randn(3, requires_grad=True)
    with torch.inference_mode():
        mask = torch.ones(3)
    checkpoint(lambda x, d: (x.sin() + d["mask"]).exp(), x, {"mask": mask}).sum().backward()
    checkpoint(lambda x, mask: (x.sin() + mask).exp(), x, mask=mask).sum().backward()

    def write(x, caches):
        with torch.no_grad():
            caches[0].copy_(x)
        return x.sin().exp()

    y = checkpoint(write, x, [torch.zeros(3)])
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_a_list_that_holds_itself():
    items: list = []
    items.append(items)
    with pytest.raises(RecursionError):
        checkpoint(lambda x, items: x.sin(), torch.randn(3, requires_grad=True), items)


def test_jagged_nested_tensors():
    layer = nn.Linear(4, 4)
    parts = [torch.randn(n, 4) for n in (2, 5)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    checkpoint(lambda t: layer(t).sin().exp(), jagged).values().sum().backward()
    mine = layer.weight.grad.clone()
    layer.zero_grad()
    layer(torch.cat(parts)).sin().exp().sum().backward()
    torch.testing.assert_close(mine, layer.weight.grad)


@pytest.mark.parametrize("frozen", ["input", "all but a bias", "everything"])
def test_frozen(frozen):
    """A frozen input leaves the other gradients as they are (transformers#26221)."""
    model, x = mlp(), torch.randn(5, 8)
    if frozen != "input":
        model.requires_grad_(False)
        model[0].bias.requires_grad_(frozen == "all but a bias")
    trained = [p for p in model.parameters() if p.requires_grad]
    y, expected = checkpoint(model, x), model(x)
    assert y.requires_grad == expected.requires_grad == bool(trained)
    if trained:
        mine, unfused = (torch.autograd.grad(out.square().sum(), trained) for out in (y, expected))
        assert all(torch.equal(a, b) for a, b in zip(mine, unfused, strict=True))


def test_micro_batches_add_up():
    """Gradients of four micro-batches add up to those of one batch (Primus#1046)."""
    # in float64: the gradients behind a norm cancel, which in float32 takes half of the digits
    model, x = mlp().double(), torch.randn(8, 8, dtype=torch.float64)
    model(x).square().sum().backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for part in x.chunk(4):
        checkpoint(model, part).square().sum().backward()
    parts = dict(enumerate(p.grad for p in model.parameters()))
    assert_same_within_rounding(parts, dict(enumerate(whole)))


def test_second_backward_through_a_retained_graph():
    """It recomputes again, and gives the same."""
    model, x = mlp(p=0.5), torch.randn(5, 8, requires_grad=True)
    y = checkpoint(model, x).square().sum()
    first = torch.autograd.grad(y, [x, *model.parameters()], retain_graph=True)
    torch.rand(3)
    second = torch.autograd.grad(y, [x, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x)


def test_recomputed_tensors_are_let_go_with_retain_graph():
    """As in torch's: what a backward pass has read is freed, though the graph stays."""
    alive = []

    def function(x):
        y = x.sin()
        alive.append(weakref.ref(y))
        return y.cos().exp()

    x = torch.randn(1000, requires_grad=True)
    out = checkpoint(function, x)
    with saved_tensors() as saved:
        pass
    out.sum().backward(retain_graph=True)
    assert len(alive) == 2
    assert all(reference() is None for reference in alive)
    assert saved.bytes == 0


def test_double_backward():
    x = torch.randn(4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: checkpoint(lambda x: x.sin() * x.exp(), x), x)
    assert torch.autograd.gradgradcheck(lambda x: checkpoint(lambda x: x.sin() * x.exp(), x), x)


@pytest.mark.parametrize("early_stop", [False, True])
def test_backward_inside_a_region(early_stop):
    def function(x):
        y = x.sin()
        (gx,) = torch.autograd.grad(y.cos().sum(), x, create_graph=True)
        return gx * x.exp()

    x = torch.randn(4, requires_grad=True)
    mine, unfused = checkpoint(function, x, early_stop=early_stop), function(x)
    assert torch.equal(mine, unfused)
    assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (mine, unfused)))


@pytest.mark.parametrize("depth", [2, 3])
def test_nested(depth):
    """Each level keeps the flags and contexts of the one around it."""
    model = mlp(p=0.5)

    def nest(level, x):
        return model(x) if level == 0 else checkpoint(nest, level - 1, checkpoint(nest, level - 1, x))

    def unfused(level, x):
        return model(x) if level == 0 else unfused(level - 1, unfused(level - 1, x))

    x = torch.randn(5, 8)
    assert_same(
        outcome(lambda x: nest(depth, x), x, model.parameters()),
        outcome(lambda x: unfused(depth, x), x, model.parameters()),
    )


@pytest.mark.parametrize("ours_outside", [False, True])
def test_nested_with_torchs(ours_outside):
    model, x = mlp(p=0.5), torch.randn(5, 8)
    torchs = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)
    outer, inner = (checkpoint, torchs) if ours_outside else (torchs, checkpoint)
    assert_same(
        outcome(lambda x: outer(lambda x: inner(model, x).sin(), x), x, model.parameters()),
        outcome(lambda x: model(x).sin(), x, model.parameters()),
    )


def test_parts_of_a_region_backward():
    """Two backward passes over different parts; the second recomputes for itself."""
    model = mlp()
    x = torch.randn(5, 8, requires_grad=True)
    a, b = checkpoint(lambda x: (model(x), x.sin().exp()), x)
    expected = torch.autograd.grad(model(x).sum(), model[0].weight)[0]
    assert torch.equal(torch.autograd.grad(a.sum(), model[0].weight, retain_graph=True)[0], expected)
    torch.testing.assert_close(torch.autograd.grad(b.sum(), x)[0], x.sin().exp().detach() * x.cos().detach())


def test_group_of_backward_passes_recomputes_once():
    runs = []

    def function(x):
        runs.append(1)
        return x.sin().exp(), x.cos().exp()

    x = torch.randn(4, requires_grad=True)
    a, b = checkpoint(function, x, early_stop=False)
    with torch_checkpoint.GraphExecGroup():
        a.sum().backward()
        b.sum().backward()
    assert len(runs) == 2
    unfused = x.detach().requires_grad_()
    sum(part.sum() for part in function(unfused)).backward()
    torch.testing.assert_close(x.grad, unfused.grad)


def test_as_a_decorator():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        @checkpointed
        def forward(self, x, scale=1.0):
            """Doc."""
            return self.fc(x).sin().exp() * scale

        @checkpointed(preserve_rng_state=False, early_stop=False)
        def other(self, x):
            return self.fc(x).sin().exp()

    block, x = Block(), torch.randn(3, 4, requires_grad=True)
    assert Block.forward.__doc__ == "Doc."
    with saved_tensors(exclude=block.parameters()) as saved:
        y = block(x, scale=2.0)
    assert saved.bytes == x.nbytes
    torch.testing.assert_close(y, 2 * block.other(x))
    assert torch.autograd.grad(y.sum(), block.fc.weight)[0].abs().sum() > 0


# -- what is saved -----------------------------------------------------------------------------------------------------


def test_saved_bytes_are_the_arguments():
    model, x = mlp(width=32), torch.randn(64, 32, requires_grad=True)

    def saved(function):
        with saved_tensors(exclude=model.parameters()) as saved:
            function(x)
        return saved.bytes

    assert saved(lambda x: checkpoint(model, x)) == x.nbytes < saved(model) / 5


def test_hooks_around_a_region_see_its_arguments():
    """So save_on_cpu and our storage around a region reach what it saves."""
    model, x, seen = mlp(), torch.randn(5, 8, requires_grad=True), []

    def pack(t):
        seen.append(t)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = checkpoint(lambda d: model(d["x"]), {"x": x})
    assert len(seen) == 1
    assert seen[0] is x
    mine, unfused = (torch.autograd.grad(out.square().sum(), model[0].weight)[0] for out in (y, model(x)))
    assert torch.equal(mine, unfused)


@pytest.mark.parametrize("raises", [False, True])
def test_memory_is_flat_without_the_garbage_collector(raises):
    """No cycle through hooks, placeholders or exceptions; every tenth recompute raises. 200 steps."""
    model, failing = mlp(p=0.5), []

    def function(x):
        if failing:
            raise KeyError("injected")
        return model(x)

    def step(i):
        y = checkpoint(function, torch.randn(5, 8, requires_grad=True)).sum()
        if raises and i % 10 == 0:
            failing.append(1)
            try:
                y.backward()
            except KeyError:
                failing.clear()
            assert not failing
        else:
            y.backward()
        model.zero_grad(set_to_none=True)

    def counted() -> tuple[int, int]:
        """Tensors, and all objects that the collector knows of."""
        objects = gc.get_objects()
        return sum(issubclass(type(o), torch.Tensor) for o in objects), len(objects)

    gc.collect()
    gc.disable()
    try:
        for i in range(20):
            step(i)
        before = counted()
        for i in range(200):
            step(i)
        after = counted()
    finally:
        gc.enable()
    assert after[0] == before[0]
    assert after[1] <= before[1] + 2  # `before` itself


def test_a_graph_without_backward_is_freed():
    x = torch.randn(1000, requires_grad=True)
    inner = (x * 2).requires_grad_()
    alive = weakref.ref(inner)
    y = checkpoint(lambda t: t.sin().exp(), inner)
    gc.disable()
    try:
        del inner, y
        assert alive() is None
    finally:
        gc.enable()


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_wrong_arguments():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(ValueError, match="use_reentrant=True is not supported"):
        checkpoint(torch.sin, x, use_reentrant=True)
    assert torch.equal(checkpoint(torch.sin, x, use_reentrant=None), x.sin())
    with pytest.raises(ValueError, match=r"determinism_check should be one of .*'values'.* but got often"):
        checkpoint(torch.sin, x, determinism_check="often")
    with pytest.raises(ValueError, match="debug=True is incompatible with non-default context_fn"):
        checkpoint(torch.sin, x, debug=True, context_fn=lambda: (None, None))
    with pytest.raises(TypeError):
        checkpoint(torch.sin, x, wrong=1)


def alternating(*functions):
    """A function that is another one at each call."""
    turn = iter(functions)
    return lambda x: next(turn)(x)


MISMATCHES = {
    "fewer": (lambda x: x.sin().sin().sin(), lambda x: x.sin(), "A different number of tensors was saved"),
    "more": (lambda x: x.sin(), lambda x: x.sin().sin(), "trying to save more tensors during recomputation"),
    "shape": (lambda x: x.sin().exp(), lambda x: x[:2].sin().exp(), "have different metadata than during the forward"),
    "dtype": (lambda x: x.sin().exp(), lambda x: x.double().sin().exp(), "have different metadata"),
}


@pytest.fixture
def quiet(monkeypatch):
    """What torch logs with debug=True is not a format string, which pytest's log capture takes as an error.

    torch stops its logger from propagating, for good; pytest then attaches its capture to that logger in the next test.
    """
    monkeypatch.setattr(logging.getLogger("LoggingTensor"), "propagate", True)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", MISMATCHES)
def test_recompute_that_differs(name, debug, quiet):
    """Errors have torch's class and words, so that code which matches on them goes on working."""
    first, second, message = MISMATCHES[name]
    x = torch.randn(4, requires_grad=True)
    y = checkpoint(alternating(first, second), x, debug=debug, early_stop=False)
    state = torch.get_rng_state()
    with pytest.raises(CheckpointError, match="Operations executed" if debug else message):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_no_determinism_check():
    x = torch.randn(4, requires_grad=True)
    y = checkpoint(alternating(torch.sin, lambda x: x.double().sin()), x, determinism_check="none", early_stop=False)
    y.sum().backward()


def test_torchs_switches_apply(quiet):
    x, runs = torch.randn(4, requires_grad=True), []

    def function(x):
        y = x.sin().sin()
        runs.append(1)
        return y

    checkpoint(function, x).sum().backward()
    assert len(runs) == 1  # stopped at the last saved tensor
    with torch_checkpoint.set_checkpoint_early_stop(False):
        y = checkpoint(function, x)
    y.sum().backward()
    assert len(runs) == 3
    with torch_checkpoint.set_checkpoint_debug_enabled(True):
        y = checkpoint(alternating(lambda x: x.sin().exp(), lambda x: x[:2].sin().exp()), x)
    with pytest.raises(CheckpointError, match="Operations executed during recomputation"):
        y.sum().backward()


def test_early_stop_leaves_out_the_last_product():
    model, x = mlp(), torch.randn(5, 8, requires_grad=True)

    def matmuls(**options):
        with Count() as count:
            checkpoint(model[:4], x, **options).sum().backward()
        return count.ops["addmm"] + count.ops["mm"]

    assert matmuls() == matmuls(early_stop=False) - 1


def test_state_after_an_error_in_recompute():
    """Random state, autocast, grad mode, hooks and the region are as before; the next step is right."""
    model, failing, x = mlp(p=0.5), [], torch.randn(5, 8, requires_grad=True)

    def function(x):
        h = model(x)
        if failing:
            raise KeyError("injected")
        return h.sin()

    torch.manual_seed(SEED)
    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(function, x).float().sum()

    def hidden() -> int:
        return sum(type(o) is torch.Tensor and o.shape == (5, 32) for o in gc.get_objects())

    state, before = torch.get_rng_state(), hidden()
    failing.append(1)
    with pytest.raises(KeyError, match="injected"):
        y.backward(retain_graph=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.is_autocast_enabled("cpu")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert hidden() == before
    failing.clear()
    mine = torch.autograd.grad(y, x)[0]
    torch.manual_seed(SEED)
    with torch.autocast("cpu", torch.bfloat16):
        unfused = function(x).float().sum()
    assert torch.equal(mine, torch.autograd.grad(unfused, x)[0])


def test_grad_mode_of_backward_is_given_back():
    y = checkpoint(lambda x: x.sin().exp(), torch.randn(4, requires_grad=True))
    with torch.no_grad():
        assert torch.equal(y.grad_fn._saved_result, y)  # recomputes
        assert not torch.is_grad_enabled()


def test_error_in_forward():
    with pytest.raises(KeyError, match="injected"):
        checkpoint(lambda x: {}["injected"], torch.randn(3, requires_grad=True))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_argument_changed_in_place():
    x = torch.randn(4, requires_grad=True)
    h = x * 1
    y = checkpoint(lambda h: h.sin().exp(), h)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_output_changed_in_place():
    """A region that ends in an in-place op, and one whose output is changed after it."""
    model, x = mlp(), torch.randn(5, 8)
    assert_same(
        outcome(lambda x: checkpoint(lambda x: F.relu_(model(x)), x).mul_(2), x, model.parameters()),
        outcome(lambda x: F.relu(model(x)) * 2, x, model.parameters()),
    )


# -- what torch's checkpoint does not see -----------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["module", "method", "lambda", "captured tensor"])
def test_parameter_changed_in_place(given):
    model, x = mlp(), torch.randn(5, 8, requires_grad=True)
    weight = model[3].weight
    loose = torch.randn(8, 8, requires_grad=True)
    function = {
        "module": model, "method": model.forward, "lambda": lambda x: model(x), "captured tensor": lambda x: x @ loose,
    }[given]  # fmt: skip
    y = checkpoint(function, x)
    with torch.no_grad():
        (loose if given == "captured tensor" else weight).mul_(2)
    name = "a parameter" if given == "captured tensor" else r"the parameter '3\.weight'"
    with pytest.raises(
        CheckpointError, match=rf"{name} of shape \(8, \d+\) was changed in place .* forward saw version \d"
    ):
        y.sum().backward()


def test_a_parameter_that_autograd_does_not_save():
    """A bias is in no saved tensor, but changing it changes what is recomputed."""
    model, x = mlp(), torch.randn(5, 8, requires_grad=True)
    y = checkpoint(model, x)
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(CheckpointError, match=r"the parameter '0\.bias' of shape \(32,\) was changed in place"):
        y.sum().backward()


def test_optimizer_steps_before_backward():
    model, x = mlp(), torch.randn(5, 8)
    y = checkpoint(model, x)
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(CheckpointError, match="changed in place between forward and backward of the region Sequential"):
        y.sum().backward()


def test_a_forward_that_changes_its_own_parameter():
    """A weight that every forward clamps is not an error, also with a retained graph."""

    class Clamped(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x).sin()

    layer, x = Clamped(4, 4), torch.randn(3, 4, requires_grad=True)
    y = checkpoint(layer, x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, x)[0])


class Decorated(nn.Sequential):
    @checkpointed
    def forward(self, x):
        return super().forward(x)


STATISTICS = {
    "module": checkpoint,
    "lambda": lambda model, x: checkpoint(lambda x: model(x), x),
    "default": lambda model, x: checkpoint(lambda x, run=model: run(x), x),
    "argument": lambda model, x: checkpoint(lambda run, x: run(x), model, x),
    "keyword": lambda model, x: checkpoint(lambda x, run: run(x), x, run=model),
    "global": lambda model, x: checkpoint(eval("lambda x: run(x)", {"run": model}), x),
    "global list": lambda model, x: checkpoint(eval("lambda x: runs[0](x)", {"runs": [model]}), x),
    "partial": lambda model, x: checkpoint(functools.partial(lambda run, x: run(x), model), x),
    "decorator": lambda model, x: Decorated(*model)(x),
}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("given", STATISTICS)
def test_running_statistics_are_updated_once(given, momentum):
    """BatchNorm's statistics are updated once, not again by the recompute (pytorch#96136)."""

    def run(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU(), nn.Conv2d(4, 2, 3))
        x = torch.randn(2, 3, 8, 8, requires_grad=True)
        for _ in range(3):
            wrap(model, x).square().sum().backward()
        return [*model.state_dict().values(), *(p.grad for p in model.parameters()), x.grad]

    unfused = run(lambda model, x: model(x))
    assert int(unfused[6]) == 3  # num_batches_tracked
    for mine, expected in zip(run(STATISTICS[given]), unfused, strict=True):
        assert torch.equal(mine, expected)


def test_a_buffer_that_forward_replaces():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return x.sin().exp()

    module = Counting()
    checkpoint(module, torch.randn(3, requires_grad=True)).sum().backward()
    assert int(module.calls) == 1


def test_scripted_and_traced_modules():
    """Their buffers lie in no dict."""
    x = torch.randn(5, 8, requires_grad=True)
    script = torch.jit.script(nn.Linear(8, 8))
    traced = torch.jit.trace(nn.BatchNorm1d(8), x.detach())
    model = nn.Sequential(script, traced, nn.Tanh())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mine = torch.autograd.grad(checkpoint(model, x).sum(), script.weight)[0]
    once = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    assert torch.equal(mine, torch.autograd.grad(model(x).sum(), script.weight)[0])
    for name, value in model.state_dict().items():
        assert torch.equal(value, once[name])


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh())
    checkpoint(model, torch.randn(5, 3)).sum().backward()
    assert model[0].weight.grad.shape == (8, 3)
    assert int(model[1].num_batches_tracked) == 1


def test_a_module_that_holds_itself():
    model = mlp()
    model[0]._modules["parent"] = model
    checkpoint(model[0], torch.randn(3, 8)).sum().backward()
    del model[0]._modules["parent"]


def test_a_parameter_that_the_region_does_not_use():
    """A closure over a whole model watches what autograd saves in the region, and no more."""

    class GAN(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(lambda x: self.generator(x).sin().exp(), x)

    gan = GAN()
    y = gan(torch.randn(3, 4))
    with torch.no_grad():
        gan.critic.weight.mul_(2)
    y.sum().backward()


def test_an_optimizer_that_steps_in_backward():
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    @torch.no_grad()
    def descend(p):
        p.sub_(p.grad)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(descend)
    x = torch.randn(3, 4)
    for i in range(3):
        x = checkpoint(lambda x, i=i: model[i](x).sin().exp(), x)
    x.sum().backward()


def test_modules_that_change_their_own_parameters_run_twice_and_nested():
    embedding = nn.Embedding(10, 4, max_norm=1.0)
    model, index = nn.Sequential(embedding, nn.Linear(4, 4), nn.Tanh()), torch.arange(5)
    (checkpoint(model, index) + checkpoint(model, index.flip(0))).sum().backward()

    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            with torch.no_grad():
                self.scale.clamp_(-0.5, 0.5)
            return (x + self.scale).sin()

    layer, x = Clamped(), torch.randn(3, 4, requires_grad=True)
    y = checkpoint(lambda x: checkpoint(layer, x.sin()).exp(), x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(layer(x.sin()).exp().sum(), x)[0])


def test_values_under_a_selective_policy():
    """The policy does not see the checksums' own ops."""
    x, drift = torch.randn(4, requires_grad=True), [0.0]
    for ops, changes in (
        ([torch.ops.aten.exp.default], [0.0]),
        ([torch.ops.aten.sum.default, torch.ops.aten.mul.Tensor], [0.0, 1e-3]),  # ops of the checksum itself
    ):
        policy = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, ops)
        for change in changes:
            drift[0] = 0.0
            y = checkpoint(lambda x: (x.sin() + drift[0]).exp().cos(), x, context_fn=policy, determinism_check="values")
            drift[0] = change
            if change:
                with pytest.raises(CheckpointError, match="recomputed other values"):
                    y.sum().backward()
            else:
                y.sum().backward()


def test_values_that_differ_are_found():
    drift = [0.0]

    def function(x):
        return (x.sin() + drift[0]).exp().cos()

    def run(check, change):
        drift[0] = 0.0
        x = torch.randn(4, 100, requires_grad=True)
        y = checkpoint(function, x, determinism_check=check)
        drift[0] = change
        y.sum().backward()

    run("values", 0.0)
    run("default", 1e-4)
    with pytest.raises(
        CheckpointError, match=r"function recomputed other values .* saved tensor 1 of 3, shape \(4, 100\)"
    ):
        run("values", 1e-4)
    run("values", 0.0)


def test_checks_of_values_under_dropout_and_autocast():
    model, x = mlp(p=0.5), torch.randn(5, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(model, x, determinism_check="values")
    y.float().sum().backward()
    y = checkpoint(F.dropout, x, 0.5, determinism_check="values", preserve_rng_state=False)
    with pytest.raises(CheckpointError, match="the region dropout recomputed other values"):
        y.sum().backward()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int16, torch.bool]
)
def test_checksum_sees_every_bit_and_place(dtype, monkeypatch):
    module = sys.modules["ckptkern.segments.checkpoint"]
    monkeypatch.setattr(module, "_hash_chunk", 7)  # several chunks
    x = (torch.randn(3, 11) * 3).to(dtype) if dtype != torch.bool else torch.randn(3, 11) > 0
    base = module._checksum(x)
    assert torch.equal(base, module._checksum(x.clone()))
    assert torch.equal(base, module._checksum(x.t().contiguous().t()))
    seen = {int(base)}
    for place in range(33):
        y = x.clone()
        y.view(-1)[place] = ~y.view(-1)[place] if dtype == torch.bool else y.view(-1)[place] + 2
        seen.add(int(module._checksum(y)))
    assert len(seen) == 34
    assert not torch.equal(base, module._checksum(x.flip(0))) or torch.equal(x, x.flip(0))
    assert int(module._checksum(x[:0])) == 0


# -- contexts ---------------------------------------------------------------------------------------------------------


def test_selective_policies():
    """torch's policies: the matmuls are saved, everything else is recomputed."""
    model, x = mlp(p=0.5), torch.randn(5, 8)
    policy = functools.partial(
        torch_checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
    )
    assert_same(
        outcome(lambda x: checkpoint(model, x, context_fn=policy), x, model.parameters()),
        outcome(model, x, model.parameters()),
    )
    y = checkpoint(model, x.requires_grad_(), context_fn=policy)
    with Count() as count:
        y.sum().backward()
    with Count() as unfused:
        model(x).sum().backward()
    assert unfused.ops["addmm"] == 2
    assert count.ops["addmm"] == 0
    assert count.ops["gelu"] == 1


def test_context_managers_of_both_runs():
    entered = []

    class Context:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            entered.append(self.name)

        def __exit__(self, *_):
            entered.append(f"-{self.name}")

    x = torch.randn(4, requires_grad=True)
    y = checkpoint(lambda x: x.sin().exp(), x, context_fn=lambda: (Context("forward"), Context("recompute")))
    assert entered == ["forward", "-forward"]
    y.sum().backward()
    assert entered == ["forward", "-forward", "recompute", "-recompute"]


def test_a_context_of_length_zero():
    entered = []

    class Empty(list):
        def __enter__(self):
            entered.append(1)

        def __exit__(self, *_):
            pass

    x = torch.randn(4, requires_grad=True)
    checkpoint(lambda x: x.sin().exp(), x, context_fn=lambda: (Empty(), Empty())).sum().backward()
    assert entered == [1, 1]


def test_a_first_result_read_in_recompute():
    """A backward pass inside the recompute that needs the first run's tensors: the region recomputes inside itself."""
    stored, x = [], torch.randn(3, requires_grad=True)

    def function(x):
        side = x.sin().exp()
        stored.append(side)
        if len(stored) == 2:  # its placeholders are those of the region that is being recomputed
            (grad,) = torch.autograd.grad(stored[0].sum(), given, retain_graph=True)
            assert torch.equal(grad, side.detach() * x.detach().cos())
        return x.cos().exp()

    given = x
    y = checkpoint(function, x, early_stop=False)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], -x.cos().exp() * x.sin())
    assert len(stored) == 3


def test_device_context_is_saved():
    made = []

    def function(x):
        made.append(torch.empty(1).device.type)
        return x.sin().exp()

    x = torch.randn(4, requires_grad=True)
    with torch.device("meta"):
        y = checkpoint(function, x)
    y.sum().backward()
    assert made == ["meta", "meta"]


def test_without_gradients_nothing_is_saved():
    model, x = mlp(), torch.randn(5, 8)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, saved_tensors() as saved:
            assert torch.equal(checkpoint(model, x), model(x))
        assert saved.bytes == 0
    checkpoint(model, x).sum().backward()  # training after inference mode (pytorch#77967)


# -- with the rest of ckptkern and torch ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["ours", "torchs"])
def test_fused_ops_inside_run_at_none(wrapper):
    """Recomputing inside a recompute costs matmuls and saves nothing less, in forward and in recompute."""
    layer, x = ckptkern.nn.MLP(8, 32, dropout=0.5), torch.randn(5, 8)
    segment = checkpoint if wrapper == "ours" else functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)
    assert_same(outcome(lambda x: segment(layer, x), x, layer.parameters()), outcome(layer, x, layer.parameters()))
    x.requires_grad_()
    with Count() as count:
        segment(layer, x).sum().backward()
    unfused = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    with Count() as expected:
        segment(unfused, x).sum().backward()
    matmuls = [sum(c.ops[name] for name in ("mm", "addmm")) for c in (count, expected)]
    assert matmuls[0] <= matmuls[1] + 1  # a fused forward is one op: it has no last matmul to leave out


def test_ddp_style_hooks_on_parameters_fire_once():
    """Also where two regions share the parameter."""
    model, x, fired = mlp(), torch.randn(5, 8), collections.Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.update([name]))
    checkpoint(model, checkpoint(model, x)).sum().backward()
    assert set(fired.values()) == {1}
    assert len(fired) == len(list(model.parameters()))


def test_copies_of_a_module_are_independent():
    """Copies share nothing with the original (xformers#290)."""
    model = ckptkern.nn.Sequential(*mlp(), segments=2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        x = torch.randn(5, 8)
        other(x).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        assert other.segments == 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    """torch.compile sees torch's checkpoint, in one graph."""
    torch._dynamo.reset()
    model, x = mlp(), torch.randn(5, 8)

    def call(x):
        return checkpoint(model, x, preserve_rng_state=False).sin()

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for mine, unfused in zip(
        outcome(compiled, x, model.parameters())[1], outcome(call, x, model.parameters())[1], strict=True
    ):
        torch.testing.assert_close(mine, unfused, rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception, match=r"not supported under torch\.compile"):
        torch.compile(lambda x: checkpoint(model, x, determinism_check="values"), backend="eager", fullgraph=True)(x)


def test_compiled_modules_inside():
    torch._dynamo.reset()
    model, x = mlp(), torch.randn(5, 8)
    compiled = torch.compile(model, backend="aot_eager")
    mine = outcome(lambda x: checkpoint(compiled, x), x, model.parameters())
    torch.testing.assert_close(mine[1], outcome(model, x, model.parameters())[1])


def test_two_threads():
    """Segments of two threads, and one graph's backward from another thread."""
    results, errors = {}, []

    def work(seed):
        try:
            model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.randn(p.shape, generator=generator))
            x = torch.randn(5, 8, generator=generator, requires_grad=True)
            for _ in range(20):
                mine = torch.autograd.grad(checkpoint(model, x, preserve_rng_state=False).sum(), x)[0]
                assert torch.equal(mine, torch.autograd.grad(model(x).sum(), x)[0])
            results[seed] = checkpoint(model, x).sum(), x, torch.autograd.grad(model(x).sum(), x)[0]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for y, x, expected in results.values():
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)


def test_cuda_state_is_not_read_without_cuda_arguments():
    """A region of CPU tensors leaves a GPU, and its lazy initialisation, alone."""
    x = torch.randn(4, requires_grad=True)
    before = torch.cuda.is_initialized()
    checkpoint(torch.sin, x).sum().backward()
    assert torch.cuda.is_initialized() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("nested", [False, True])
def test_random_state_of_a_gpu(nested):
    """Also where the only tensor on it lies in a list in a dict."""
    x = torch.ones(1000, device="cuda", requires_grad=True)
    function = (lambda d: F.dropout(d["a"][0], 0.5) * d["a"][0]) if nested else (lambda x: F.dropout(x, 0.5) * x)
    y = checkpoint(function, {"a": [x]} if nested else x)
    state = torch.cuda.get_rng_state()
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad == 0, y == 0)
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph():
    """Refused with the way out where torch's state would be read; captured without it."""
    x, layer = torch.ones(64, device="cuda", requires_grad=True), ckptkern.nn.Dropout(0.5)

    def step(**options):
        y = checkpoint(lambda x: layer(x) * x, x, **options)
        return y, torch.autograd.grad(y.sum(), x)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(preserve_rng_state=False)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, grad = step(preserve_rng_state=False)
    outputs = []
    for _ in range(2):
        graph.replay()
        assert torch.equal(grad == 0, y == 0)
        outputs.append(y.detach().clone())
    assert not torch.equal(*outputs)
    with pytest.raises(RuntimeError, match="preserve_rng_state=False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step()


ENDS_IN_A_SEGMENT = """
import sys, threading, time, torch, ckptkern

inside, go_on = threading.Event(), threading.Lock()
go_on.acquire()

class Asked(tuple):
    @property
    def _make(self):  # in the constructor of the region's state
        inside.set()
        go_on.acquire()

class Last:
    def __del__(self, go_on=go_on.release, sleep=time.sleep):  # Python is ending: the thread that asks for it is unwound
        go_on()
        sleep(0.5)

x = torch.ones(1, requires_grad=True)
threading.Thread(target=ckptkern.checkpoint, args=(lambda x, _: x.sin(), x, Asked()), daemon=True).start()
inside.wait()
sys.last = Last()
"""


def test_a_thread_that_python_ends_inside_of_a_region():
    """The thread is unwound without a thread state, so nothing on its stack may need one. Three runs: not all would crash."""
    runs = [subprocess.Popen([sys.executable, "-c", ENDS_IN_A_SEGMENT]) for _ in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]


def test_one_tensor_in_two_places_is_one_again():
    """Also where hooks around the region, here another's, give a copy of what it saved."""
    seen = []

    def function(x, others, *, named):
        seen.append(x is others[0] is named)
        return (x * others[0]).sin() * named

    x = torch.randn(3, requires_grad=True)
    checkpoint(lambda x: checkpoint(function, 2 * x, [x], named=x), x).sum().backward()
    checkpoint(lambda x: checkpoint(function, x, [x], named=x), 2 * x).sum().backward()
    assert seen == [False, False, True, True]
