"""Changes between forward and backward, or before a recompute, to a model of three layers in regions, and its gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import ckptkern

WIDTH, TOKENS = 6, 8
Run = Callable[[nn.Module, Tensor], Tensor]


class Layer(nn.Module):
    """Reads parameters, a buffer, numbers, its mode and what subclasses add."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.ones(WIDTH))
        self.table = torch.ones(WIDTH)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.inner(x) * self.shift * self.factor * self.gain) * self.table
        return x + self.outer(h.exp() * (2.0 if self.training else 1.0))


class Iterating(Layer):
    """A power iteration, as a spectral norm makes in every forward: it reads what it updates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", torch.arange(1.0, WIDTH + 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.u.copy_(F.normalize(self.inner.weight @ (self.inner.weight.mT @ self.u), dim=0))
        return super().forward(x / (self.u @ self.inner.weight).norm())


class Counting(Layer):
    """Its number of calls decides what it computes."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * self.calls)


class Remembering(Layer):
    """A state from call to call, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x + self.state)
        self.state = y.detach().mean((0, 1))
        return y


class Scaled(Layer):
    """Reads numbers in containers, as an adapter's scale and the names of active adapters are held."""

    def __init__(self) -> None:
        super().__init__()
        self.scales, self.active, self.range = {"a": 1.0, "b": 5.0}, ["a"], (-1.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(sum(self.scales[name] for name in self.active) * x.clamp(*self.range))


class Filling(Layer):
    """How much it has noted decides what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(x.detach().mean())
        return super().forward(x * len(self.notes))


class Attending(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q = self.inner(x)[:, None]
        return x + self.outer(F.scaled_dot_product_attention(q, q, q)[:, 0] * 2).sin()


class Sampling(Layer):
    """Reads a generator that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype))


class Thirds(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.tensor(1 / 3))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        return y * 2 if func in (torch.sin, Tensor.sin) else y


class Case(NamedTuple):
    """layer: its class; call: how the model is called in forward; between: changes a layer before backward."""

    layer: type[Layer]
    between: Callable[[Layer], Any]
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x)


def nothing(layer: Layer) -> None:
    pass


def replaced(model: nn.Module, x: Tensor) -> Tensor:
    """With other parameters and buffers, which are gone when forward returns."""
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    return torch.func.functional_call(model, {name: t * 2 for name, t in own.items() if t.is_floating_point()}, (x,))


def within(context: Callable[[], Any]) -> Callable[[nn.Module, Tensor], Tensor]:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        with context():
            return model(x)

    return call


@torch.no_grad()
def in_place(layer: Layer, name: str) -> None:
    getattr(layer, name).mul_(3)


def assigned(layer: Layer) -> None:
    layer.load_state_dict({name: 3 * t for name, t in layer.state_dict().items()}, assign=True)


CASES: dict[str, Case] = {
    "nothing": Case(Layer, nothing),
    "a parameter in place": Case(Layer, lambda layer: in_place(layer, "gain")),
    "a parameter that is replaced": Case(
        Layer, lambda layer: setattr(layer, "gain", nn.Parameter(3 * layer.gain.detach()))
    ),
    "functional_call": Case(Layer, nothing, replaced),
    "load_state_dict(assign=True)": Case(Layer, assigned),
    "requires_grad of parameters": Case(Layer, lambda layer: layer.inner.requires_grad_(False)),
    "eval()": Case(Layer, lambda layer: layer.eval()),
    "train()": Case(Layer, lambda layer: layer.train(), lambda model, x: model.eval()(x)),
    "a buffer in place": Case(Layer, lambda layer: in_place(layer, "shift")),
    "a buffer that is replaced": Case(Layer, lambda layer: setattr(layer, "shift", layer.shift * 3)),
    "a buffer that forward updates": Case(Iterating, nothing),
    "a buffer that a later forward updates": Case(
        Iterating, lambda layer: layer(torch.ones(1, TOKENS, WIDTH).double())
    ),
    "a tensor attribute in place": Case(Layer, lambda layer: in_place(layer, "table")),
    "a tensor attribute that is replaced": Case(Layer, lambda layer: setattr(layer, "table", layer.table * 3)),
    "a tensor attribute that forward replaces": Case(Remembering, nothing),
    "a number": Case(Layer, lambda layer: setattr(layer, "factor", 3.0)),
    "a number that forward changes": Case(Counting, nothing),
    "a number in a dict": Case(Scaled, lambda layer: layer.scales.update(a=3.0)),
    "a dict that is replaced": Case(Scaled, lambda layer: setattr(layer, "scales", {"a": 3.0})),
    "a list": Case(Scaled, lambda layer: layer.active.append("b")),
    "a list that is replaced": Case(Scaled, lambda layer: setattr(layer, "active", ["b"])),
    "a tuple that is replaced": Case(Scaled, lambda layer: setattr(layer, "range", (0.0, 0.5))),
    "a list that forward fills": Case(Filling, nothing),
    "a submodule that is replaced": Case(
        Layer, lambda layer: setattr(layer, "outer", nn.Linear(WIDTH, WIDTH).double())
    ),
    "a submodule that is removed": Case(Layer, lambda layer: delattr(layer, "outer")),
    "a hook": Case(Layer, lambda layer: layer.inner.register_forward_hook(lambda module, args, y: 3 * y)),
    "TorchFunctionMode": Case(Layer, nothing, within(Doubled)),
    "set_default_dtype": Case(Thirds, nothing, within(lambda: default_dtype(torch.float64))),
    "sdpa_kernel": Case(Attending, nothing, within(lambda: sdpa_kernel(SDPBackend.MATH))),
    "a generator of the layer": Case(Sampling, nothing),
}


# -- ways to make a region -----------------------------------------------------------------------------------------------


def patched(layer: nn.Module, x: Tensor) -> Tensor:
    with ckptkern.patch_torch():
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)


def in_a_list(layer: nn.Module, x: Tensor) -> Tensor:
    return ckptkern.nn.LayerStack([layer, nn.Identity()], every=1)(x)


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module], run: Run):
        super().__init__()
        self.layers, self.run = nn.ModuleList(layers), run

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return x


PLAIN: Run = lambda layer, x: layer(x)  # noqa: E731
TORCH: Run = lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)  # noqa: E731
WAYS: dict[str, Run] = {
    "checkpoint": ckptkern.checkpoint,
    "of a method": lambda layer, x: ckptkern.checkpoint(layer.forward, x),
    "of a closure": lambda layer, x: ckptkern.checkpoint(lambda x: layer(x), x),
    "of a partial": lambda layer, x: ckptkern.checkpoint(functools.partial(lambda m, x: m(x), layer), x),
    "of an argument": lambda layer, x: ckptkern.checkpoint(lambda m, x: m[0](x), [layer], x),
    "checkpointed": lambda layer, x: ckptkern.checkpointed(lambda m, x: m(x))(layer, x),
    "with values": lambda layer, x: ckptkern.checkpoint(layer, x, determinism_check="values"),
    "in another": lambda layer, x: ckptkern.checkpoint(ckptkern.checkpoint, layer, x),
    "patch_torch": patched,
    "checkpoint_sequential": lambda layer, x: ckptkern.checkpoint_sequential([layer], "every 1", x),
    "nn.Sequential": lambda layer, x: ckptkern.nn.Sequential(layer, segments="every 1")(x),
    "nn.LayerStack": in_a_list,
    "tiled": lambda layer, x: ckptkern.tiled(layer, x, chunks=1),
}


def built(case: Case, way: str | None) -> Model:
    """A model of three layers. way: of WAYS; None: without regions."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [case.layer().double() for _ in range(3)]
    for layer in layers:
        layer.table = layer.table.double()  # type: ignore[assignment]
        if isinstance(layer, Remembering):
            layer.state = layer.state.double()
    return Model(layers, PLAIN if way is None else WAYS[way])


def sample() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, TOKENS, WIDTH, dtype=torch.double, requires_grad=True)


def gradient(case: Case, way: str | None, run: Run | None = None) -> Tensor | Exception:
    """The gradients of a step in one tensor, or the error. run: a way of its own."""
    model, x = built(case, way), sample()
    if run is not None:
        model.run = run
    leaves = [x, *model.parameters()]
    y = case.call(model, x)
    try:
        for layer in model.layers:
            case.between(layer)
        leaves = [t for t in leaves if t.requires_grad]
        grads = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    except Exception as error:  # it is the result
        return error
    return torch.cat(
        [torch.zeros_like(t).flatten() if g is None else g.flatten() for t, g in zip(leaves, grads, strict=True)]
    )


def verdict(outcome: Tensor | Exception, plain: Tensor | Exception, unchanged: Tensor | Exception) -> str:
    """unchanged: of the same forward, where nothing has changed before backward."""
    if isinstance(outcome, Exception):
        return type(outcome).__name__
    plain = unchanged if isinstance(plain, Exception) else plain
    assert isinstance(plain, Tensor)
    distance = ((outcome - plain).norm() / plain.norm()).item()
    return "right" if distance < 1e-12 else f"{distance:.2g} off"
