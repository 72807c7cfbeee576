"""Converted layers of which nothing is known, in parts, beside layers of which all is known."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import pickle
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ckptkern
from ckptkern.conversion import blocks, revert
from ckptkern.memory import peak_memory

D, H, LAYERS, WORKSPACE = 64, 4, 3, 2**20


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    B, S, _ = q.shape
    q, k, v = (tensor.view(B, S, H, -1).transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, D)


def recurrence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, states = torch.zeros_like(v[:, 0]), []
    for i in range(0, v.shape[1], 32):
        at = slice(i, i + 32)
        state = torch.tanh(state + (k[:, at] * v[:, at]).cumsum(1)[:, -1])
        states.append(q[:, at] * state[:, None])
    return torch.cat(states, 1)


def bump(h: Tensor) -> Tensor:
    return torch.sin(h) * torch.exp(-h.square())


class MLP(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Layer(nn.Module):
    def __init__(self, mixer, activation):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.mixer, self.mlp = mixer, MLP(activation)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.out(self.mixer(self.q(h), self.k(h), self.v(h)))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, *kind):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(*kind) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Weighing(Layer):
    """Attention that is no op, and returns its weights if `returns`."""

    def __init__(self, returns):
        super().__init__(None, F.gelu)
        self.returns = returns

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        h = self.norm(x)
        q, k, v = (linear(h).unflatten(-1, (H, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        weights = (torch.sin(q) @ k.mT).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x)), weights if self.returns else None


class Weighed(Model):
    def __init__(self, returns=True):
        super().__init__(attention, F.gelu)
        self.layers = nn.ModuleList([Weighing(returns) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, self.weights = layer(x)
        return x


KINDS = {"known": (attention, F.gelu), "mixer": (recurrence, F.gelu), "unknown": (recurrence, bump)}


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def peak(model: nn.Module, x: Tensor) -> int:
    step(model, x)
    with peak_memory("cpu") as used:
        model.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
    return used.bytes


def converted(name: str) -> tuple[nn.Module, ckptkern.Conversion]:
    model = Model(*KINDS[name])
    conversion = ckptkern.convert(model, torch.randn(1, 64, D), recompute="full", workspace=WORKSPACE)
    rows = [row for row in conversion if row.kind == "Layer"]
    assert [row.replaced_by for row in rows] == ["transformer_layer" if name == "known" else "checkpoint"] * LAYERS
    assert name == "known" or all("in parts" in row.reason for row in rows), "the check of the parts passes"
    return model, conversion


def test_an_unknown_layer_peaks_within_the_workspace_of_a_known_one(one_thread):
    x, peaks = torch.randn(1, 2048, D), {}
    for name in KINDS:
        model, _ = converted(name)
        peaks[name] = peak(model, x)
    assert max(peaks.values()) - min(peaks.values()) <= WORKSPACE, peaks
    plain = Model(*KINDS["unknown"])
    for layer in plain.layers:
        layer.forward = ckptkern.checkpointed(layer.forward)
    assert peaks["unknown"] < 0.6 * peak(plain, x)


def test_a_sparse_operator_is_a_part(one_thread):
    neighbours = (torch.rand(512, 512) < 0.05).float().fill_diagonal_(1.0)

    class Graph(Layer):
        def __init__(self):
            super().__init__(None, bump)
            self.register_buffer("neighbours", neighbours)

        def forward(self, x):
            h = self.norm(x)
            mixed = torch.sparse.mm(self.neighbours.to_sparse(), self.v(h)[0])[None]
            return x + self.mlp(self.norm2(self.out(self.q(h) * mixed + self.k(h))))

    ours = nn.Sequential(*(Graph() for _ in range(2)))
    theirs, x = copy.deepcopy(ours), torch.randn(1, 512, D)
    conversion = ckptkern.convert(ours, x, recompute="full", workspace=WORKSPACE // 4)
    assert all("in parts" in row.reason and "addmm" in row.reason for row in conversion if row.kind == "Graph")
    for a, b in zip(step(ours, x), step(theirs, x), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


class Cumulative(torch.autograd.Function):
    """A mixer of tokens with a backward of its own."""

    @staticmethod
    def summed(x: Tensor) -> Tensor:
        return x.cumsum(1)

    @classmethod
    def forward(cls, ctx, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        state = torch.tanh(scale * cls.summed(k * v))
        ctx.save_for_backward(q, k, v, state)
        ctx.scale = scale
        return q * state

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, state = ctx.saved_tensors
        d = ctx.scale * (dy * q * (1 - state * state)).flip(1).cumsum(1).flip(1)
        return dy * state, d * v, d * k, None


class OfHost(Cumulative):
    """One whose kernel takes no fake tensors, as Triton's."""

    @staticmethod
    def summed(x: Tensor) -> Tensor:
        return torch.from_numpy(np.cumsum(x.detach().numpy(), 1))


class InPlace(Cumulative):
    @classmethod
    def forward(cls, ctx, q: Tensor, *args) -> Tensor:
        ctx.mark_dirty(q)
        return q.copy_(super().forward(ctx, q.clone(), *args))


class OfSome(Cumulative):
    """The number of its results' rows follows their values."""

    @classmethod
    def forward(cls, ctx, q: Tensor, *args) -> Tensor:
        y = super().forward(ctx, q, *args)
        return torch.zeros_like(y).masked_scatter_(y > 0, y[y > 0]) + y.masked_fill(y > 0, 0)


@pytest.mark.parametrize("function", [Cumulative, OfHost, InPlace, OfSome])
def test_autograd_functions_are_parts(function, one_thread):
    def mixer(q, k, v):
        return function.apply(q, k, v, 0.5)

    apply = vars(torch.autograd.Function)["apply"]
    ours = Model(mixer, bump)
    theirs, plain = copy.deepcopy(ours), copy.deepcopy(ours)
    conversion = ckptkern.convert(ours, torch.randn(1, 64, D), recompute="full", workspace=WORKSPACE)
    (reason,) = {row.reason for row in conversion if row.kind == "Layer"}
    cut = function in (Cumulative, OfHost)
    assert (f" | {function.__name__} | " in reason) if cut else ("as a whole" in reason), reason
    for shape in ((1, 64, D), (2, 333, D)):
        x = torch.randn(shape)
        for a, b in zip(step(ours, x), step(theirs, x), strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()
    assert vars(torch.autograd.Function)["apply"] is apply
    if cut:
        for layer in plain.layers:
            layer.forward = ckptkern.checkpointed(layer.forward)
        x = torch.randn(1, 2048, D)
        assert peak(ours, x) < 0.5 * peak(plain, x)


class Calling(torch.autograd.Function):
    """Gets a function, as of torch's checkpoints, which holds what belongs to one layer or call."""

    @staticmethod
    def forward(ctx, x: Tensor, function) -> Tensor:
        ctx.function = function
        return x * function()

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.function(), None


@pytest.mark.parametrize("of_call", [False, True])
def test_a_function_that_holds_a_layer_or_a_call_is_no_part(of_call):
    class Holding(Layer):
        def __init__(self):
            super().__init__(None, bump)

        def scale(self):
            return self.norm2.bias.detach() + 1

        def forward(self, x):
            h = self.norm(x)
            mean = h.detach().mean() + 1
            mixed = Calling.apply(
                recurrence(self.q(h), self.k(h), self.v(h)), (lambda: mean) if of_call else self.scale
            )
            return x + self.mlp(self.norm2(self.out(mixed)))

    ours = nn.Sequential(*(Holding() for _ in range(3)))
    for layer in ours:
        nn.init.normal_(layer.norm2.bias)
    theirs, x = copy.deepcopy(ours), torch.randn(2, 1024, D)
    conversion = ckptkern.convert(ours, torch.randn(1, 64, D), recompute="full", workspace=WORKSPACE)
    for a, b in zip(step(ours, x), step(theirs, x), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
    assert all("may hold what belongs to this layer" in row.reason for row in conversion if row.kind == "Holding")


def test_a_fused_layer_with_more_weights_than_tokens_is_not_cut(one_thread, monkeypatch):
    """Sums of its weights' gradients over slices would take more than slices save."""
    monkeypatch.setitem(globals(), "D", 512)
    x, plain = torch.randn(1, 512, D), Model(*KINDS["mixer"])
    model, conversion = converted("mixer")
    assert any("| mlp |" in row.reason for row in conversion)
    for layer in plain.layers:
        layer.forward = ckptkern.checkpointed(layer.forward)
    assert peak(model, x) < 0.9 * peak(plain, x)


@dataclasses.dataclass
class Scales:
    """Equality of two raises an error."""

    up: Tensor


def test_layers_whose_objects_do_not_compare_share_no_plans():
    model = Model(*KINDS["unknown"])
    for layer in model.layers:
        layer.scales = Scales(torch.ones(2))
    theirs, x = copy.deepcopy(model), torch.randn(1, 64, D)
    ckptkern.convert(model, x, recompute="full", workspace=WORKSPACE // 8)
    assert len({id(layer.forward.parts) for layer in model.layers}) == LAYERS
    for a, b in zip(step(model, x), step(theirs, x), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_gradients_of_wide_weights_come_in_turn(one_thread):
    """A stage with one slice forms the gradient of a weight when that of the last one was added."""
    wide, few = 16 * D, torch.randn(1, 8, 16 * D)

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ModuleList([nn.Linear(wide, wide) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            return functools.reduce(lambda h, linear: bump(linear(h)), self.weights, x)

    model = nn.Sequential(Wide(), Wide())
    conversion = ckptkern.convert(model, few, recompute="full", workspace=WORKSPACE)
    assert all("addmm x4" in row.reason for row in conversion), conversion
    assert peak(model, few) < 1.5 * 4 * wide**2


@pytest.mark.parametrize("every", [1, 2])
def test_weights_that_nothing_reads_are_not_stored(every):
    peaks = []
    for returns in (False, True):
        model = Weighed(returns)
        conversion = ckptkern.convert(model, torch.randn(1, 64, D), recompute="full", workspace=WORKSPACE, every=every)
        assert all("in parts" in row.reason for row in conversion if row.kind == "Weighing")
        peaks.append(peak(model, torch.randn(1, 1024, D)))
    assert peaks[1] - peaks[0] <= WORKSPACE, peaks
    assert model.weights.original.cache_info().currsize == 0


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_weights_are_there_for_who_reads_them(use_reentrant):
    x, results = torch.randn(1, 512, D), []
    model = Weighed()
    copied = copy.deepcopy(model)
    ckptkern.convert(model, x, recompute="full", workspace=WORKSPACE)
    for layer in (model.layers[0], copied.layers[0]):
        x = x.detach().requires_grad_()
        run = layer if use_reentrant is None else functools.partial(checkpoint, layer, use_reentrant=use_reentrant)
        y, weights = run(x)
        (100 * weights * weights.detach().cos()).sum().add(y.sum()).backward()
        grads = torch.cat([p.grad.flatten() for p in (x, *layer.parameters())])
        results.append([y.detach(), weights.detach() + 0, grads])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("name", ["mixer", "unknown"])
def test_lengths_copies_hooks_and_changes(name):
    model, conversion = converted(name)
    for length, batch in ((700, 1), (1024, 2), (700, 1)):
        x = torch.randn(batch, length, D)
        for m in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            ours = step(m, x)
            for a, b in zip(ours, step(Model(*KINDS[name]), x), strict=True):
                assert (a - b).norm() <= 1e-5 * max(float(b.norm()), 1e-3)
    assert conversion.calls["original"] == 0
    reference = Model(*KINDS[name])
    step(reference, x)
    step(model, x)
    y = model(x)
    model.eval()
    y.square().mean().backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(a.grad, 2 * b.grad, rtol=1e-3, atol=1e-7), "eval() before backward"
    model.train()
    seen = []
    model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    step(model, x)
    assert seen, "a hook inside runs"
    for layer in model.layers:
        layer.mlp.activation = F.relu
    changed = Model(KINDS[name][0], F.relu)
    for a, b in zip(step(model, x), step(changed, x), strict=True):
        assert (a - b).norm() <= 1e-5 * max(float(b.norm()), 1e-3), "an attribute that changed counts"
    revert(model)
    assert all("forward" not in vars(layer) for layer in model.layers)


@pytest.mark.parametrize("name", ["mixer", "unknown"])
def test_under_autocast(name):
    """A fused MLP that runs for some tokens computes in autocast's dtype, in backward too."""
    model, x = converted(name)[0], torch.randn(1, 1024, D)
    reference = Model(*KINDS[name])
    exact = step(copy.deepcopy(reference).double(), x.double())
    seen = []
    fused = model.layers[0].mlp.__dict__.get("forward")
    if fused is not None:
        run = fused.run
        fused.run = lambda x: seen.append((x.shape[1], torch.is_autocast_enabled("cpu"))) or run(x)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (forward(x) for forward in (model, reference))
    for y in (ours, theirs):
        y.float().square().mean().backward()
    assert ours.dtype == theirs.dtype
    assert (name == "mixer") == any(tokens < x.shape[1] for tokens, _ in seen)
    assert all(enabled for _, enabled in seen)
    pairs = zip(
        (ours, *(p.grad for p in model.parameters())), (theirs, *(p.grad for p in reference.parameters())), strict=True
    )
    for (a, b), right in zip(pairs, [exact[0], *exact[2:]], strict=True):
        assert (a - right).norm() <= 2 * (b - right).norm() + 1e-3 * right.norm()


class Switches(Layer):
    """A layer that is not cut: it reads a number on the host."""

    def forward(self, x: Tensor) -> Tensor:
        scale = float(x.detach().abs().amax())
        h = self.norm(x) * scale
        return x + self.mlp(self.norm2(h)) + self.out(self.mixer(self.q(h), self.k(h), self.v(h)))


def test_a_layer_that_is_not_cut_says_why_and_what_is_fused_inside_bounds_its_own_memory():
    def built() -> nn.Module:
        model = Model(recurrence, F.gelu)
        for layer in model.layers:
            layer.__class__ = Switches
        return model

    model, x = built(), torch.randn(1, 2048, D)
    conversion = ckptkern.convert(model, x[:, :64], recompute="full", workspace=WORKSPACE)
    reasons = [row.reason for row in conversion if row.kind == "Switches"]
    assert len(reasons) == LAYERS
    assert all("it runs as a whole: " in reason for reason in reasons)
    assert [row.replaced_by for row in conversion if row.kind == "MLP"] == ["mlp_block"] * LAYERS
    for m in (model, copy.deepcopy(model)):
        for a, b in zip(step(m, x), step(built(), x), strict=True):
            assert (a - b).norm() <= 1e-5 * max(float(b.norm()), 1e-3)
    theirs = built()
    for layer in theirs.layers:
        layer.forward = ckptkern.checkpointed(layer.forward)
    wide = 4 * 2048 * 4 * D  # bytes of what the MLP's activation takes, and of what it returns
    assert peak(model, x) < peak(theirs, x) - 1.5 * wide


@pytest.mark.parametrize(
    ("factor", "how"), [(1 + 1e-4, "in parts"), (1.01, "differ in parts"), (None, "differ in parts")]
)
def test_a_layer_whose_parts_differ_by_more_than_rounding_is_a_checkpoint_of_the_whole(factor, how, monkeypatch):
    """Sums over slices of many tokens round in another order."""

    def step_of(module, run, call):
        tensors, left = training_step(module, run, call)
        if getattr(run, "parts", None) is not None and not run.parts.is_whole:
            tensors = [tensors[0], factor * tensors[1], *tensors[2:]]  # None is an error of parts
        return tensors, left

    training_step = blocks.training_step
    monkeypatch.setattr(blocks, "training_step", step_of)
    model, x = Model(*KINDS["unknown"]), torch.randn(1, 64, D)
    conversion = ckptkern.convert(model, x, recompute="full", workspace=WORKSPACE)
    rows = [row for row in conversion if row.kind == "Layer"]
    assert [row.replaced_by for row in rows] == ["checkpoint"] * LAYERS
    assert all(how in row.reason for row in rows), str(conversion)
    torch.testing.assert_close(step(model, x), step(Model(*KINDS["unknown"]), x))


def test_a_frozen_vector_hides_no_layer():
    """A router's correction has the shape [1, experts] and no gradient."""
    model = Model(recurrence, F.gelu)
    for layer in model.layers:
        layer.register_parameter("correction", nn.Parameter(torch.zeros(1, 8), requires_grad=False))
    conversion = ckptkern.convert(model, torch.randn(1, 64, D), recompute="full", workspace=WORKSPACE)
    assert [row.replaced_by for row in conversion if row.kind == "MLP"] == ["mlp_block"] * LAYERS


def test_second_derivatives_and_parameters_of_a_call():
    """A fused MLP that runs for some tokens computes with the parameters that its layer was called with."""
    model, reference = converted("mixer")[0], Model(*KINDS["mixer"])
    x, results = torch.randn(1, 600, D), []
    for m in (model, reference):
        parameters = dict(m.named_parameters())
        other = {name: (1.1 * p).detach().requires_grad_() for name, p in parameters.items()}
        loss = torch.func.functional_call(m, other, (x,)).square().mean()
        first = torch.autograd.grad(loss, [*other.values()], create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), [*other.values()])])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-4 * max(float(b.norm()), 1e-3)


class Positioned(Layer):
    """Scales by what is computed of a buffer and of parameters alone, in place (Swin v2's bias of positions)."""

    def __init__(self):
        super().__init__(recurrence, bump)
        self.register_buffer("places", torch.randn(1, 3, 3, 2))
        self.positions = nn.Sequential(nn.Linear(2, D), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.positions(self.places).mean((0, 1, 2))


def test_what_is_computed_in_place_of_parameters_alone():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Positioned() for _ in range(2))), torch.randn(1, 512, D)
    plain = copy.deepcopy(model)
    rows = ckptkern.convert(model, x, recompute="full", workspace=WORKSPACE).converted
    layers = [row for row in rows if row.kind == "Positioned"]
    assert [row.replaced_by for row in layers] == ["checkpoint"] * 2
    assert all("in parts" in row.reason for row in layers), "the check of the parts passes"
    torch.testing.assert_close(step(model, x), step(plain, x))


def read_without_gradients(model, x):
    y, weights = model.layers[0](x)
    with torch.no_grad():
        weights.mean().item()
    return y.sum() + weights.square().sum()


def read_outside_autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        _, weights = model.layers[0](x)
    assert (weights + 0).dtype == weights.dtype
    return weights.float().square().sum()


@pytest.mark.parametrize("loss", [read_without_gradients, read_outside_autocast])
def test_weights_are_computed_in_the_modes_of_their_call(loss):
    x, results = torch.randn(1, 512, D), []
    model = Weighed()
    copied = copy.deepcopy(model)
    ckptkern.convert(model, x, recompute="full", workspace=WORKSPACE)
    for m in (model, copied):
        loss(m, x).backward()
        results.append(m.layers[0].q.weight.grad)
    assert (results[0] - results[1]).norm() <= 1e-2 * results[1].norm()


def test_weights_are_not_read_with_other_parameters():
    model, x = Weighed(), torch.randn(1, 512, D)
    ckptkern.convert(model, x, recompute="full", workspace=WORKSPACE)
    layer = model.layers[0]
    doubled = {name: 2 * p for name, p in layer.named_parameters()}
    _, weights = torch.func.functional_call(layer, doubled, (x,))
    with pytest.raises(RuntimeError, match="inside functional_call"):
        weights.sum()


class WeighingAgain(Weighing):
    """Adds the weights of the layer before it, as RealFormer does its scores."""

    def forward(self, x: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, weights = super().forward(x)
        return (y if before is None else y + before.mean(1) @ x), weights


@pytest.mark.parametrize("every", [1, 2])
def test_weights_that_the_next_layer_reads(every):
    theirs, x = Weighed(), torch.randn(1, 512, D)
    for layer in theirs.layers:
        layer.__class__ = WeighingAgain
    ours, results = copy.deepcopy(theirs), []
    ours.__class__ = theirs.__class__ = Passing
    ckptkern.convert(ours, x, recompute="full", workspace=WORKSPACE, every=every)
    for m in (ours, theirs):
        results.append(step(m, x))
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-5 * max(float(b.norm()), 1e-3)


class Passing(Weighed):
    def forward(self, x: Tensor) -> Tensor:
        weights = None
        for layer in self.layers:
            x, weights = layer(x, weights)
        return x


# -- what a plan may not hold as a constant ---------------------------------------------------------------------------


class Numbered(nn.Module):
    """A layer that reads something of its own that the plan of another call, or of another layer, does not know."""

    def __init__(self, read, number):
        super().__init__()
        self.number, self.read = number, read
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("flag", torch.tensor(number > 0))
        self.register_buffer("count", torch.tensor(2 + number))
        self.loose, self.generator = torch.tensor(1.25), None

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        h = self.up(x)
        return x + self.down((h.sigmoid() * h).cumsum(1) / 9) * self.read(self, x, twice)


class Numbers(nn.Module):
    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Numbered(read, number) for number in range(LAYERS)])
        self.is_checkpointed = False

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, twice, use_reentrant=False) if self.is_checkpointed else layer(x, twice)
        return x


READS = {
    "index, for an argument": lambda layer, x, twice: 1 + layer.number if twice else 1,
    "index, by length": lambda layer, x, twice: 1 + layer.number if x.shape[1] > 40 else 1,
    "index, in evaluation": lambda layer, x, twice: 1 if layer.training else 1 + layer.number,
    "index": lambda layer, x, twice: 1 + layer.number,
    "item of a parameter": lambda layer, x, twice: layer.scale.item() + layer.scale,
    "list of a parameter": lambda layer, x, twice: layer.scale.tolist() + layer.scale,
    "if a buffer": lambda layer, x, twice: 2 if layer.flag else 1,
    "slice to a buffer": lambda layer, x, twice: x[:, : layer.count].sum(1, keepdim=True),
    "item of a tensor": lambda layer, x, twice: layer.loose.item(),
    "own generator of NumPy": lambda layer, x, twice: float(layer.generator.random()),
    "own generator of Python": lambda layer, x, twice: layer.generator.random(),
}


@pytest.mark.parametrize("kind", READS)
def test_what_a_layer_reads_of_its_own_is_no_constant(kind):
    """In later calls of other kinds, and after changes, beside torch's checkpoint, which runs the forward again."""
    results = []
    for is_ours in (False, True):
        model, rows = Numbers(READS[kind]), []
        for layer in model.layers if "generator" in kind else ():
            layer.generator = (np.random.default_rng if kind.endswith("NumPy") else random.Random)(layer.number)
        if is_ours:
            rows = ckptkern.convert(model, torch.randn(2, 16, D), recompute="full", workspace="2KiB").rows
        model.is_checkpointed = not is_ours
        results.append([])
        for i, (length, twice) in enumerate([(16, False), (16, True), (64, True)]):
            for layer in model.layers:
                layer.train(i != 1)
                layer.scale.data.fill_(1.0 + i)
                layer.flag.fill_(i > 1)
                layer.count.fill_(2 + i)
                layer.loose = torch.tensor(1.0 + i)
            model.zero_grad()
            y = model(torch.randn(2, length, D, generator=torch.Generator().manual_seed(i)), twice)
            y.square().mean().backward()
            results[-1] += [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    assert len(rows) == LAYERS
    assert all(("it runs in parts" in row.reason) == kind.startswith("index") for row in rows), rows
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-5 * max(float(b.norm()), 1e-3)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_hooks_of_all_modules_in_one_pass_alone(when):
    """As those of FlopCounterMode around a forward: backward recomputes as forward ran."""
    model, x = Model(recurrence, bump), torch.randn(1, 512, D)
    theirs = step(copy.deepcopy(model), x)
    ckptkern.convert(model, x[:, :64], recompute="full", workspace=2**16)
    x.requires_grad_()
    with contextlib.ExitStack() as stack:
        hook = functools.partial(nn.modules.module.register_module_forward_hook, lambda *call: None)
        if when == "forward":
            stack.callback(hook().remove)
        y = model(x)
        if when == "forward":
            stack.close()
        else:
            stack.callback(hook().remove)
        y.square().mean().backward()
    for a, b in zip([y.detach(), x.grad, *(p.grad for p in model.parameters())], theirs, strict=True):
        assert (a - b).norm() <= 1e-5 * max(float(b.norm()), 1e-3)
