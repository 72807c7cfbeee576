"""A recompute sees what forward saw: what forward can read, changed between forward and backward or gone by then, in every way
to make a region, gives plain autograd's gradient, or an error that names it."""

import functools
import sys
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.cases import P
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import ckptkern
from benchmarks.dev.recompute import CASES, WAYS, built, gradient, nothing, sample, verdict
from ckptkern import checkpoint
from ckptkern.state import SegmentState

IN_PLACE = {"a parameter in place": "gain", "a buffer in place": "shift", "a tensor attribute in place": "table"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_recompute_sees_what_forward_saw(name, way):
    case = CASES[name]
    found, plain = gradient(case, way), gradient(case, None)
    if name in IN_PLACE:
        assert isinstance(plain, RuntimeError)  # as it is with regions
        assert isinstance(found, CheckpointError)
        assert f"{IN_PLACE[name]}'" in str(found)
        return
    assert verdict(found, plain, gradient(case._replace(between=nothing), None)) == "right", found


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
    found = []
    for run in (lambda function, x: function(x), functools.partial(checkpoint, early_stop=early_stop)):
        torch.manual_seed(0)
        function, between = CAPTURED[name]()
        x = torch.linspace(-1, 1, 3, requires_grad=True)
        y = run(function, x)
        between()
        found.append(torch.autograd.grad(y.sum(), x)[0])
        found.append(function(x.detach()) if "module" not in name else found[-1])  # what was left behind
    torch.testing.assert_close(found[2:], found[:2], rtol=0, atol=0)


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
    found = []
    for run in (checkpoint, lambda function, x: function(x)):
        for m in layers.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.reset_running_stats()
        first = run(lambda x: layers[0](x), x)
        y = layers[2](first)
        with torch.no_grad():
            layers[1][0].weight.mul_(1.5)
        found.append(torch.autograd.grad(y.square().sum(), [x, *layers[0].parameters()]))
    torch.testing.assert_close(*found)


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

    given = make(x * 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = checkpoint(lambda c: take(c).sin().exp(), given)
    assert type(given) is type(make(x * 1))
    (found,) = torch.autograd.grad(y.sum(), x)
    (plain,) = torch.autograd.grad(take(make(x * 1)).sin().exp().sum(), x)
    torch.testing.assert_close(found, plain, rtol=0, atol=0)
    assert seen  # hooks around the region, such as a store's


def test_a_model_output_is_whole_again():
    output = pytest.importorskip("transformers.modeling_outputs").BaseModelOutput
    x = torch.linspace(-1, 1, 4, requires_grad=True)

    def function(given):
        h = given.last_hidden_state * len(given.keys())
        given["last_hidden_state"] = None
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
    found = []
    for run in (functions[name], lambda x: checkpoint(functions[name], x, determinism_check=check)):
        torch.manual_seed(0)
        x = torch.randn(64, 33, requires_grad=True)
        y = run(x)
        junk = [torch.full((64, 33), float("nan")) for _ in range(4)]  # what the allocator hands out next
        del junk
        found.append(torch.autograd.grad(y.sum(), x)[0])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_region_that_reaches_nothing_saves_nothing():
    state = SegmentState((torch.ones(3), 2), {}, False, False, None, ())
    assert state.parameters() == state.changed() == state.roots() == []


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
