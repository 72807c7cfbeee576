"""A recompute sees what forward saw: what forward can read, changed between forward and backward or gone by then, in every way
to make a region, gives plain autograd's gradient, or an error that names it."""

import functools
import gc
import sys
import types
import weakref
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.cases import P
from support.changes import CASES, TORCH, WAYS, built, gradient, nothing, sample, verdict
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import ckptkern
from ckptkern import checkpoint
from ckptkern.segments.reachable import reachable_of
from ckptkern.state import SegmentState

IN_PLACE = {"a parameter in place": "gain", "a buffer in place": "shift", "a tensor attribute in place": "table"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_recompute_sees_what_forward_saw(name, way):
    case = CASES[name]
    actual, plain = gradient(case, way), gradient(case, None)
    if name in IN_PLACE:
        assert isinstance(plain, RuntimeError)  # as it is with regions
        assert isinstance(actual, CheckpointError)
        assert f"{IN_PLACE[name]}'" in str(actual)
        return
    assert verdict(actual, plain, gradient(case._replace(between=nothing), None)) == "right", actual


# What torch's non-reentrant checkpoint does where its gradients are not wrong: the table of docs/migration.md.
TORCHS = {
    "nothing": "right", "a submodule that is removed": "AttributeError", "requires_grad of parameters": "CheckpointError",
    "sdpa_kernel": "CheckpointError", "set_default_dtype": "CheckpointError",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_torchs_recompute_sees(name):
    case = CASES[name]
    plain, unchanged = gradient(case, None), gradient(case._replace(between=nothing), None)
    outcome = verdict(gradient(case, None, TORCH), plain, unchanged)
    assert outcome == TORCHS[name] if name in TORCHS else outcome.endswith(" off"), outcome


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_it_leaves_the_world_as_it_was(name, way):
    """Modules hold after backward what they held before, and each buffer has been updated once."""
    case, x = CASES[name], sample()
    model, plain = built(case, way), built(case, None)
    y, _ = case.call(model, x), case.call(plain, x)
    for layer, other in zip(model.layers, plain.layers, strict=True):
        case.between(layer), case.between(other)
    held = {name: dict(vars(m)) | m._parameters | m._buffers | m._modules for name, m in model.named_modules()}
    hooks = {name: list(m._forward_hooks) for name, m in model.named_modules()}
    if name not in IN_PLACE:
        torch.autograd.grad(y.square().sum(), x)
    for path, m in model.named_modules():
        now = dict(vars(m)) | m._parameters | m._buffers | m._modules
        assert now.keys() == held[path].keys()
        assert all(now[key] is value for key, value in held[path].items())
        assert list(m._forward_hooks) == hooks[path]
        assert [p.requires_grad for p in m.parameters()] == [
            p.requires_grad for p in plain.get_submodule(path).parameters()
        ]
        for name_of, buffer in m.named_buffers():
            torch.testing.assert_close(buffer, plain.get_submodule(path).get_buffer(name_of), rtol=0, atol=0)


# -- what the implementations of a region's state have to agree on ---------------------------------------------------------


class Scaled(nn.Module):
    """Multiplies by a buffer or a constant tensor; equal to every other one."""

    def __init__(self, scale):
        super().__init__()
        self.register_buffer("scale", scale)

    def __eq__(self, other):
        return self.scale == other.scale  # a tensor, which is neither true nor false

    __hash__ = nn.Module.__hash__

    def forward(self, x):
        scale = self.scale.imag if self.scale.is_complex() else self.scale
        return (x * scale).exp()


COMPLEX = torch.complex(torch.arange(6.0), torch.arange(6.0) - 2.5).conj()


@pytest.mark.parametrize("scale", [COMPLEX, COMPLEX.imag], ids=["conjugate", "negative"])
def test_a_buffer_of_lazily_changed_sign(scale):
    x = sample()
    actual, plain = (
        torch.autograd.grad(call(x).sum(), x) for call in (functools.partial(checkpoint, Scaled(scale)), Scaled(scale))
    )
    assert torch.equal(actual[0], plain[0])


def test_submodules_that_compare_as_tensors():
    model, x = nn.Sequential(Scaled(torch.ones(6)), nn.Tanh()), sample()
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    y = checkpoint(model, x)
    model[0] = Scaled(torch.full((6,), 2.0))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain)


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", None)

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return (x * self.calls).exp() if self.cache is None else x


def test_forward_adds_an_attribute_to_a_module_whose_buffers_are_none():
    model, x = Counted(), sample()
    (grad,) = torch.autograd.grad(checkpoint(model, x).sum(), x)
    assert torch.equal(grad, x.exp())
    assert (model.calls, model._buffers) == (1, {"cache": None})


def test_an_argument_that_says_it_is_a_dict():
    x = sample()
    (grad,) = torch.autograd.grad(checkpoint(lambda x, _: x.exp(), x, mock.Mock(spec=dict)).sum(), x)
    assert torch.equal(grad, x.exp())


def test_a_sparse_leaf_of_a_region_that_is_asked_for_a_part():
    matrix, x, w = (
        torch.eye(3).to_sparse().requires_grad_(),
        torch.arange(3.0).requires_grad_(),
        torch.ones(3).requires_grad_(),
    )
    y = checkpoint(lambda x: (torch.sparse.mm(matrix, x[:, None]) * w[:, None]).exp(), x).sum()
    (dx,) = torch.autograd.grad(y, x, retain_graph=True)
    (dw,) = torch.autograd.grad(y, w)
    assert torch.equal(dx, x.exp())
    assert torch.equal(dw, x * x.exp())


class Names(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_modes_see_the_calls_of_forward_and_of_hooks():
    x = sample()
    with Names() as mode, torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        checkpoint(lambda x: x.exp().sin(), x)
    assert mode.names == ["clone", "exp", "sin"]


# -- what a function captures ---------------------------------------------------------------------------------------------


def rebound():
    scale = torch.full((3,), 2.0)

    def function(x):
        return (x * scale).exp()

    def between():
        nonlocal scale
        scale = torch.full((3,), 5.0)

    return function, between


def rebound_module():
    layers, functions = [nn.Tanh(), nn.Sigmoid()], []
    for layer in layers:
        functions.append(lambda x: layer(x).exp())  # noqa: B023
    return functions[0], lambda: None


def in_a_loop():
    """Functions of a loop share their variable: at its region's call it is the first layer."""
    layer = nn.Tanh()

    def function(x):
        return layer(x).exp()

    def between():
        nonlocal layer
        layer = nn.Sigmoid()

    return function, between


def number():
    factor = 2.0

    def function(x):
        return (x * factor).exp()

    def between():
        nonlocal factor
        factor = 5.0

    return function, between


def counted():
    calls = 0

    def function(x):
        nonlocal calls
        calls += 1
        return (x * calls).exp()

    return function, lambda: None


def running_total():
    total = torch.zeros(3)

    def function(x):
        total.add_(1.0)
        return (x * total.clone()).exp()

    return function, lambda: None


class Caller:
    """No module, but it holds one."""

    def __init__(self):
        self.layer = nn.Dropout(0.5)

    def __call__(self, x):
        return self.layer(x).exp()

    def method(self, x):
        return self.layer(x).exp()


def of_an_object(method):
    caller = Caller()
    return (caller.method if method else caller), lambda: caller.layer.eval()


CAPTURED = {
    "a tensor that is rebound": rebound,
    "a loop's variable": in_a_loop,
    "a module of a finished loop": rebound_module,
    "a number": number,
    "a count": counted,
    "a tensor that it updates": running_total,
    "an object's module": functools.partial(of_an_object, False),
    "a bound object's module": functools.partial(of_an_object, True),
}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("name", CAPTURED)
def test_what_a_function_captures(name, early_stop):
    results = []
    for run in (lambda function, x: function(x), functools.partial(checkpoint, early_stop=early_stop)):
        torch.manual_seed(0)
        function, between = CAPTURED[name]()
        x = torch.linspace(-1, 1, 3, requires_grad=True)
        y = run(function, x)
        between()
        results.append(torch.autograd.grad(y.sum(), x)[0])
        results.append(function(x.detach()) if "module" not in name else results[-1])  # what was left behind
    torch.testing.assert_close(results[2:], results[:2], rtol=0, atol=0)


SCALES: list[Tensor] = []


@pytest.mark.parametrize("how", ["closure", "default", "partial", "global list"])
def test_a_captured_tensor_in_place_is_an_error(how, monkeypatch):
    x, scale = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    functions = {
        "closure": lambda x: (x * scale).exp(),
        "default": lambda x, scale=scale: (x * scale).exp(),
        "partial": functools.partial(lambda scale, x: (x * scale).exp(), scale),
        "global list": lambda x: (x * SCALES[0]).exp(),
    }
    monkeypatch.setattr(sys.modules[__name__], "SCALES", [scale])
    y = checkpoint(functions[how], x)
    scale.mul_(2)
    with pytest.raises(CheckpointError, match="a tensor that the function captures of shape"):
        torch.autograd.grad(y.sum(), x)


def test_what_a_recompute_does_not_read_may_change():
    """As where an optimizer steps in backward: a closure reaches the whole model, and the region runs one layer."""
    layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.BatchNorm1d(3)) for _ in range(3)).double()
    x = torch.randn(4, 3, dtype=torch.double, requires_grad=True)
    grads = []
    for run in (checkpoint, lambda function, x: function(x)):
        for m in layers.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.reset_running_stats()
        first = run(lambda x: layers[0](x), x)
        y = layers[2](first)
        with torch.no_grad():
            layers[1][0].weight.mul_(1.5)
        grads.append(torch.autograd.grad(y.square().sum(), [x, *layers[0].parameters()]))
    torch.testing.assert_close(*grads)


def test_a_large_buffer_that_forward_updates_is_an_error():
    class Queue(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("queue", torch.ones(200, 200))

        def forward(self, x):
            y = (x @ self.queue.clone()).exp()
            self.queue[0] = x.detach()[0]
            return y

    x = torch.zeros(1, 200, requires_grad=True)
    y = checkpoint(Queue(), x)
    with pytest.raises(
        CheckpointError, match=r"the buffer 'queue' of shape .* was updated in the forward .* too large"
    ):
        torch.autograd.grad(y.sum(), x)


# -- arguments ------------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    h: Any
    other: int = 1


@dataclass(frozen=True, slots=True)
class Frozen:
    h: Any


class Pair(NamedTuple):
    h: Any
    other: int


class Rows(list):
    pass


CONTAINERS = {
    "list": (lambda h: [h], lambda c: c.pop()),
    "dict": (lambda h: {"h": h}, lambda c: c.pop("h")),
    "OrderedDict": (lambda h: OrderedDict(h=h, other=1), lambda c: c.pop("h")),
    "defaultdict": (lambda h: defaultdict(int, h=h), lambda c: c.pop("h") + c["no"]),
    "Counter": (lambda h: Counter(h=h), lambda c: c.pop("h")),
    "UserDict": (lambda h: UserDict(h=h), lambda c: c.pop("h")),
    "UserList": (lambda h: UserList([h]), lambda c: c.pop()),
    "deque": (lambda h: deque([h], maxlen=1), lambda c: c.pop() * c.maxlen),
    "list's subclass": (lambda h: Rows([h]), lambda c: c.pop()),
    "dataclass": (lambda h: Data(h), lambda c: vars(c).pop("h") * c.other),
    "frozen dataclass": (Frozen, lambda c: c.h),
    "namespace": (lambda h: types.SimpleNamespace(h=h), lambda c: vars(c).pop("h")),
    "named tuple": (lambda h: Pair(h, 1), lambda c: c.h * c.other),
    "set": (lambda h: {h}, lambda c: c.pop()),
    "nested": (lambda h: OrderedDict(a=deque([Data([h])])), lambda c: c.pop("a").pop().h.pop()),
    "torch.Size beside it": (lambda h: [h, h.shape], lambda c: c[0].view(c[1])),
    "result of max": (lambda h: h.view(2, 2).max(-1), lambda c: c.values),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_consumed_container_is_whole_again(name):
    make, take = CONTAINERS[name]
    x, seen = torch.linspace(-1, 1, 4, requires_grad=True), []

    def pack(t):
        seen.append(t)
        return t

    container = make(x * 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = checkpoint(lambda c: take(c).sin().exp(), container)
    assert type(container) is type(make(x * 1))
    (grad,) = torch.autograd.grad(y.sum(), x)
    (plain,) = torch.autograd.grad(take(make(x * 1)).sin().exp().sum(), x)
    torch.testing.assert_close(grad, plain, rtol=0, atol=0)
    assert seen  # hooks around the region, such as a store's


def test_a_model_output_is_whole_again():
    output = pytest.importorskip("transformers.modeling_outputs").BaseModelOutput
    x = torch.linspace(-1, 1, 4, requires_grad=True)

    def function(output):
        h = output.last_hidden_state * len(output.keys())
        output["last_hidden_state"] = None
        return h.sin().exp()

    y = checkpoint(function, output(last_hidden_state=x * 1))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(x.sin().exp().sum(), x)[0])


@pytest.mark.parametrize("place", ["argument", "nested", "closure", "of a module in a list"])
def test_a_generator_samples_again(place, device):
    x = torch.ones(1000, device=device, requires_grad=True)
    generator = torch.Generator(device).manual_seed(3)

    def drop(x, generator):
        return torch.where(torch.rand(x.shape, generator=generator, device=device) < P, 0.0, x) * x

    holder = nn.Module()
    holder.generator = generator
    calls = {
        "argument": lambda: checkpoint(drop, x, generator),
        "nested": lambda: checkpoint(lambda d, x: drop(x, d["g"][0]), {"g": [generator]}, x),
        "closure": lambda: checkpoint(lambda x: drop(x, generator), x),
        "of a module in a list": lambda: checkpoint(lambda ms, x: drop(x, ms[0].generator), [holder], x),
    }
    y = calls[place]()
    state = generator.get_state()
    torch.rand(1, generator=generator, device=device)
    later = generator.get_state()
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad == 0, y == 0)
    assert torch.equal(generator.get_state(), later)
    assert not torch.equal(state, later)


# -- ops that fill what they saved ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["default", "values"])
@pytest.mark.parametrize("name", ["rrelu", "dropout", "relu", "norm and rrelu", "linear and rrelu in place"])
def test_a_recompute_ends_after_the_kernel_that_fills_what_it_saved(name, check):
    """pytorch#193671: the noise of rrelu is saved before its kernel runs."""
    functions = {
        "rrelu": lambda x: F.rrelu(x, training=True),
        "dropout": lambda x: F.dropout(x, 0.5),
        "relu": F.relu,
        "norm and rrelu": lambda x: F.rrelu(F.layer_norm(x, x.shape[-1:]), training=True) + 1,
        "linear and rrelu in place": lambda x: F.rrelu(x * 2, training=True, inplace=True),
    }
    grads = []
    for run in (functions[name], lambda x: checkpoint(functions[name], x, determinism_check=check)):
        torch.manual_seed(0)
        x = torch.randn(64, 33, requires_grad=True)
        y = run(x)
        junk = [torch.full((64, 33), float("nan")) for _ in range(4)]  # what the allocator hands out next
        del junk
        grads.append(torch.autograd.grad(y.sum(), x)[0])
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_a_region_that_reaches_nothing_saves_nothing():
    state = SegmentState((torch.ones(3), 2), {}, False, False, None, ())
    assert state.parameters() == state.changed() == state.roots() == []


# -- what must not be held, and what must not break -----------------------------------------------------------------------


class Logging(nn.Module):
    """Leaves a tensor with its graph in an attribute, as for a log."""

    def __init__(self):
        super().__init__()
        self.inner, self.loss = nn.Linear(3, 3), None

    def forward(self, x):
        self.loss = self.inner(x).square().mean()
        return self.inner(x).exp()


def test_graphs_of_earlier_steps_are_freed():
    model, old = Logging(), []
    gc.disable()
    try:
        for _ in range(4):
            checkpoint(model, torch.randn(2, 3)).sum().backward()
            old.append(weakref.ref(model.loss))
        assert [reference() is not None for reference in old] == [False, False, False, True]
    finally:
        gc.enable()


def test_names_of_attributes_are_no_globals():
    held = reachable_of(lambda x: x.SCALES.bit_length(), ())[1]
    assert not any(value is SCALES for value in held)


def test_an_error_while_the_state_is_put_back_leaves_it_as_it_was():
    """A flag that cannot be put back: integers take no gradient."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.factor, self.table = nn.Linear(3, 3), 3, torch.ones(3, requires_grad=True)

        def forward(self, x):
            return self.inner(x).exp() * self.factor

    model, x = Model(), torch.ones(1, 3, requires_grad=True)
    y = checkpoint(model, x)
    model.factor = 5
    model.table.requires_grad_(False).data = torch.ones(3, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="floating point"):
        torch.autograd.grad(y.sum(), x)
    assert model.factor == 5
    assert not model.table.requires_grad


def test_hooks_that_an_early_stop_leaves_behind_are_those_of_no_other_module():
    model, other, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)

    def function(x):
        handle = model.register_forward_hook(lambda module, args, y: y * 7)
        y = F.linear(model(x).sin(), model.weight)  # the recompute ends before this matmul
        handle.remove()
        return y

    y = checkpoint(function, x)
    model.register_forward_hook(lambda *_: None)
    torch.autograd.grad(y.sum(), x)
    assert len(model._forward_hooks) == 1
    grads = torch.autograd.grad(checkpoint(lambda x: other(x).exp(), x).sum(), x)
    torch.testing.assert_close(grads, torch.autograd.grad(other(x).exp().sum(), x))


class Sharing(nn.Module):
    """An attribute is a view of a buffer that forward writes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("cache", torch.zeros(2, 3))
        self.row = self.cache[0]

    def forward(self, x):
        self.cache[0].copy_(x.detach().mean(0))
        return (self.inner(x) * self.row.clone()).exp()


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.history = nn.Linear(3, 3), torch.ones(1, 3)

    def forward(self, x):
        y = torch.sin(self.inner(x) * self.history.sum(0))
        self.history = torch.cat([self.history, y.detach()])
        return y.exp()


class Reading(nn.Module):
    """Reads the statistics that a norm inside updates, as layers for quantised training do."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        variance = self.norm.running_var.clone()
        return (self.norm(self.inner(x)) / variance.sqrt() * 2).exp()


class Wide(nn.BatchNorm1d):
    """Its statistics are too large to be copied; it does not read them."""

    def __init__(self):
        super().__init__(20000)

    def forward(self, x):
        return super().forward(x.repeat(1, 6667)[:, :20000]).tanh()[:, :3].exp()


class Writing(nn.Module):
    """Writes a large buffer, and reads nothing of it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("queue", torch.zeros(30000, 3))
        self.register_buffer("mean", torch.zeros(20000))

    def forward(self, x):
        y = self.inner(x).exp()
        self.queue[:4] = y.detach()
        self.mean.lerp_(y.detach().mean(), 0.1)
        return y.sin()


class Labelled(nn.Module):
    """A buffer with an attribute of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(3))
        self.table.scale = 3.0

    def forward(self, x):
        return (self.inner(x) * self.table * self.table.scale).exp()


class Slices(tuple):
    """Takes its parts one by one."""

    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


class Taking(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return checkpoint(lambda pair: self.inner(pair[0]).exp() * pair[1], Slices(x, 2.0))


class Proxied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        inner = weakref.proxy(self.inner)
        return checkpoint(lambda x: inner(x).exp(), x)


@pytest.mark.parametrize("kind", [Sharing, Growing, Reading, Wide, Writing, Labelled, Taking, Proxied])
@pytest.mark.parametrize("closure", [False, True])
def test_modules_with_a_state(kind, closure):
    """Two calls, then both backward passes: gradients, and what is left in the module."""
    if closure and kind is Reading:
        pytest.skip("of a norm that a call can reach, statistics are not copied")

    def step(run):
        torch.manual_seed(0)
        model, x = kind().train(), torch.randn(4, 3, requires_grad=True)
        loss = run(model, x).square().mean() + run(model, x).mean()
        grads = torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True)
        return grads, dict(model.named_buffers()), getattr(model, "history", None)

    around = (lambda model, x: checkpoint(lambda x: model(x), x)) if closure else checkpoint
    torch.testing.assert_close(step(around), step(lambda model, x: model(x)))


@pytest.mark.parametrize("how", ["pop", "move", "delete and append", "append"])
def test_a_list_of_layers_that_changes(how):
    changes = {
        "pop": lambda layers: layers._modules.pop("0"),
        "move": lambda layers: layers._modules.update({"0": layers._modules.pop("0")}),
        "delete and append": lambda layers: (layers.__delitem__(0), layers.append(nn.Linear(3, 3))),
        "append": lambda layers: layers.append(nn.ReLU()),
    }
    grads = []
    for run in (checkpoint, lambda function, x: function(x)):
        torch.manual_seed(0)
        layers, x = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), torch.randn(2, 3, requires_grad=True)
        y = run(lambda x, layers=layers: layers(x).exp(), x)
        changes[how](layers)
        names = list(layers._modules)
        grads.append(torch.autograd.grad(y.sum(), x))
        assert list(layers._modules) == names
    torch.testing.assert_close(*grads)


def test_a_compiled_layer_where_the_optimizer_steps_in_backward():
    """A closure reaches all layers, of which those behind have stepped when a region is recomputed."""

    def step(run):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))
        compiled = [torch.compile(layer, backend="aot_eager") for layer in layers]
        for p in layers.parameters():
            p.register_post_accumulate_grad_hook(sgd)
        x = torch.randn(2, 3, requires_grad=True)
        h = x
        for i in range(3):
            h = run(lambda h, i=i: compiled[i](h), h)
        h.square().sum().backward()
        return [x.grad, *(p.detach() for p in layers.parameters())]

    @torch.no_grad()
    def sgd(p):
        p.sub_(0.1 * p.grad)

    torch.testing.assert_close(step(checkpoint), step(lambda function, x: function(x)))


# -- converted models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["eval()", "functional_call", "load_state_dict(assign=True)"])
@pytest.mark.parametrize("every", [1, 2])
def test_converted_layers(every, change):
    """Layers whose dropout trains, as fused ops and in groups."""

    def step(ours):
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(4)]
        model = nn.Sequential(*layers).double()
        x = torch.randn(2, 5, 8, dtype=torch.double, requires_grad=True)
        if ours:
            conversion = ckptkern.convert(model, x, recompute="full", every=every)
            assert len(conversion.converted) == 4
            assert bool(conversion.groups) == (every > 1)
        y = CASES[change].call(model, x)
        for layer in model:
            if change == "load_state_dict(assign=True)":
                layer.load_state_dict({name: 3 * t for name, t in layer.state_dict().items()}, assign=True)
            elif change == "eval()":
                layer.eval()
        return torch.autograd.grad(y.square().sum(), x)

    torch.testing.assert_close(step(True), step(False))
