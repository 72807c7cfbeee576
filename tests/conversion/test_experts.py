"""convert on the experts of MoE layers, found by their layout: moe_mlp in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from conversion.test_convert import by_deepcopy, by_pickle
from ops.test_experts import moe
from support.cases import assert_as_exact
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion.experts import layout_of
from ckptkern.memory import saved_tensors

E, D, H, K = 4, 16, 24, 2


class Experts(nn.Module):
    """As transformers' MoE layers have them, under other names."""

    def __init__(self, act: Callable = F.silu, bias: bool = False):
        super().__init__()
        self.down = nn.Parameter(torch.randn(E, D, H) * H**-0.5)
        self.both = nn.Parameter(torch.randn(E, 2 * H, D) * D**-0.5)
        if bias:
            self.both_bias, self.down_bias = nn.Parameter(torch.randn(E, 2 * H)), nn.Parameter(torch.randn(E, D))
        else:
            self.both_bias = self.down_bias = None
        self.act = act

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return moe(x, index, weights, self.both, self.down, self.both_bias, self.down_bias, self.act)


class Block(nn.Module):
    """A router and its experts, between residuals."""

    def __init__(self, experts: Callable[[], nn.Module] = Experts):
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(D), nn.Linear(D, E, False), experts()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).flatten(0, -2)
        weights, index = self.router(h).softmax(-1).topk(K)
        return x + self.experts(h, index, weights).view(x.shape)


class Model(nn.Module):
    def __init__(self, experts: Callable[[], nn.Module] = Experts):
        super().__init__()
        self.blocks = nn.ModuleList(Block(experts) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def inputs(seed: int = 0, length: int = 7) -> Tensor:
    return torch.randn(2, length, D, generator=torch.Generator().manual_seed(seed))


def model_of(experts: Callable[[], nn.Module] = Experts) -> Model:
    torch.manual_seed(0)
    return Model(experts)


def converted(model: Model, **options) -> Model:
    model = copy.deepcopy(model)
    conversion = ckptkern.convert(model, inputs(), **options)
    replaced = [(row.name, row.replaced_by) for row in conversion.converted]
    assert replaced == [("blocks.0.experts", "moe_mlp"), ("blocks.1.experts", "moe_mlp")], str(conversion)
    assert all(row.error < 2e-5 and row.saved_after < row.saved_before for row in conversion.converted)
    return model


def step(model: Model, x: Tensor, autocast: torch.dtype | None = None) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype))
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_step(ours: Model, theirs: Model) -> None:
    for length in (7, 11):
        mine, want = (step(model, inputs(2, length)) for model in (ours, theirs))
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)


def saved(model: Model) -> int:
    with saved_tensors(model) as found:
        model(inputs().requires_grad_())
    return found.bytes


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", [F.silu, F.gelu, F.relu])
def test_experts_are_found_by_layout(act: Callable, bias: bool) -> None:
    theirs = model_of(lambda: Experts(act, bias))
    ours = converted(theirs)
    assert_same_step(ours, theirs)
    assert saved(ours) < saved(theirs) / 2
    assert "router.weight" in str(list(dict(ours.blocks[0].named_parameters())))
    ckptkern.revert(ours)
    assert saved(ours) == saved(theirs)


def test_the_router_is_trained_through_them() -> None:
    theirs = model_of()
    ours = converted(theirs)
    want, mine = (step(model, inputs(3))["blocks.0.router.weight"] for model in (theirs, ours))
    assert want.abs().max() > 1e-3
    torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-6)


def test_under_autocast() -> None:
    theirs = model_of()
    ours, exact = converted(theirs), step(copy.deepcopy(theirs).double(), inputs(3).double())
    exact.pop("y"), exact.pop("x")
    mine, want = ({name: step(m, inputs(3), torch.bfloat16)[name] for name in exact} for m in (ours, theirs))
    assert_as_exact(mine, want, exact)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_modes(mode: str) -> None:
    theirs = model_of()
    ours = converted(theirs, recompute=mode)
    assert_same_step(ours, theirs)
    assert (saved(ours) > saved(converted(theirs, recompute="full"))) == (mode == "none")


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle])
def test_a_copy_is_converted(copied: Callable) -> None:
    theirs = model_of()
    ours = converted(theirs)
    other = copied(ours)
    assert other.state_dict().keys() == theirs.state_dict().keys()
    assert_same_step(other, theirs)
    assert saved(other) == saved(ours)


class Clamped(Experts):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        act = lambda g: F.silu(g.clamp(max=0.5))  # noqa: E731
        return moe(x, index, weights, self.both, self.down, act=act)


class ClampedFar(Experts):
    """As DeepSeek V4's and GPT-OSS's, whose limits no ordinary row reaches."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        act = lambda g: F.silu(g.clamp(max=100.0))  # noqa: E731
        return moe(x, index, weights, self.both, self.down, act=act)


class UpFirst(Experts):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return moe(x, index, weights, torch.cat(self.both.chunk(2, 1)[::-1], 1), self.down)


class Unweighted(Experts):
    """Its routing weights get no gradient."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return moe(x, index, weights.detach(), self.both, self.down)


class Capacity(Experts):
    """No expert takes more than 16 rows."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        place = F.one_hot(index.flatten(), E).cumsum(0).gather(1, index.flatten()[:, None]).view(index.shape)
        return moe(x, index, weights * (place <= 16), self.both, self.down)


class LargeCapacity(Experts):
    """No expert takes more than 400 rows."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        place = F.one_hot(index.flatten(), E).cumsum(0).gather(1, index.flatten()[:, None]).view(index.shape)
        return moe(x, index, weights * (place <= 400), self.both, self.down)


class Another(Experts):
    """With a parameter more."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, index, weights) * self.scale.sum()


class Interleaved(Experts):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        both = torch.cat((self.both[:, ::2], self.both[:, 1::2]), 1)
        return moe(x, index, weights, both, self.down)


@pytest.mark.parametrize(
    "kind", [Clamped, ClampedFar, UpFirst, Unweighted, Capacity, LargeCapacity, Another, Interleaved]
)
def test_other_experts_are_left(kind: type) -> None:
    theirs = model_of(kind)
    ours = copy.deepcopy(theirs)
    conversion = ckptkern.convert(ours, inputs())
    assert not conversion.converted
    assert (kind is Another) or any(row.name == "blocks.0.experts" and row.reason for row in conversion), str(
        conversion
    )
    assert_same_step(ours, theirs)


def test_a_layout_that_is_none() -> None:
    assert layout_of(Experts(bias=True)).keys() == {"gate_up_weight", "gate_up_bias", "down_weight", "down_bias"}
    assert not layout_of(Another())
    assert not layout_of(nn.Linear(D, D))
    for name, shape in (
        ("both", (E, D, 2 * H)),
        ("down", (E, H, D)),
        ("both", (E + 1, 2 * H, D)),
        ("down_bias", (E, H)),
    ):
        experts = Experts(bias=True)
        setattr(experts, name, nn.Parameter(torch.randn(shape)))
        assert not layout_of(experts), name


LATER = {
    "another activation": lambda experts: setattr(experts, "act", F.relu),
    "a hook": lambda experts: experts.register_forward_hook(lambda module, args, y: 2 * y),
    "another weight": lambda experts: setattr(experts, "down", nn.Parameter(torch.randn(E, D, H))),
    "frozen": lambda experts: experts.requires_grad_(False),
    "more experts": lambda experts: (
        setattr(experts, "both", nn.Parameter(torch.randn(E + 2, 2 * H, D))),
        setattr(experts, "down", nn.Parameter(torch.randn(E + 2, D, H))),
    ),
}


@pytest.mark.parametrize("what", LATER)
def test_a_later_change_counts(what: str) -> None:
    theirs = model_of()
    ours = converted(theirs)
    for model in (theirs, ours):
        torch.manual_seed(1)
        LATER[what](model.blocks[1].experts)
    assert_same_step(ours, theirs)


def test_without_gradients_the_original_runs() -> None:
    theirs = model_of().eval()
    ours = converted(theirs)
    with torch.no_grad():
        assert torch.equal(ours(inputs()), theirs(inputs()))
    experts = ours.blocks[0].experts
    x, index = torch.randn(5, D), torch.randint(E, (5, K))
    assert experts(x, index, torch.rand(5, K)).grad_fn is not None
    with pytest.raises(TypeError):
        experts(x, index)


def test_it_compiles_without_a_break() -> None:
    theirs = model_of(lambda: Experts(F.gelu))
    compiled = torch.compile(converted(theirs), fullgraph=True, backend="aot_eager")
    want, mine = (torch.autograd.grad(m(inputs()).square().sum(), [*m.parameters()]) for m in (theirs, compiled))
    torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4)
