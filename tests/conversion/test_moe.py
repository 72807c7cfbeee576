"""convert on MoE blocks, a router with experts and shared experts: moe_block in their place, and near-misses that are left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conversion.test_experts import D, E, Experts, H
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion.fuse import nearest_rows
from ckptkern.memory import saved_tensors

N = 2 * E  # experts, so that groups have some


class Many(Experts):
    def __init__(self):
        super().__init__()
        self.down = nn.Parameter(torch.randn(N, D, H) * H**-0.5)
        self.both = nn.Parameter(torch.randn(N, 2 * H, D) * D**-0.5)


class Router(nn.Module):
    """Softmax over all, then the best, as transformers' routers are."""

    k, normalize, scale = 2, True, 1.0

    def __init__(self):
        super().__init__()
        self.top_k = self.k
        self.weight = nn.Parameter(torch.randn(N, D) * D**-0.5)
        self.scaling = self.scale

    def scores(self, logits: Tensor) -> Tensor:
        return logits.float().softmax(-1)

    def choose(self, scores: Tensor) -> Tensor:
        return scores.topk(self.top_k, -1)[1]

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(h, self.weight)
        scores = self.scores(logits)
        index = self.choose(scores)
        w = scores.gather(-1, index)
        w = w / w.sum(-1, keepdim=True) if self.normalize else w
        return logits, (w * self.scaling).to(h.dtype), index


class Unnormalized(Router):
    k, normalize = 3, False


class Scaled(Unnormalized):
    scale = 2.5


class ChosenFirst(Router):
    """The softmax of the best logits."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(h, self.weight)
        best, index = logits.topk(2, -1)
        return logits, best.softmax(-1), index


class Biased(Router):
    """DeepSeek-V3's and GLM's, without groups."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Buffer(torch.zeros(N))

    def scores(self, logits: Tensor) -> Tensor:
        return logits.float().sigmoid()

    def choose(self, scores: Tensor) -> Tensor:
        return (scores + self.bias).topk(self.top_k, -1)[1]


class Grouped(Biased):
    """Of the best of four groups by their two best scores."""

    def __init__(self):
        super().__init__()
        self.groups, self.best = 4, 2

    def rank(self, groups: Tensor) -> Tensor:
        return groups.topk(2, -1)[0].sum(-1)

    def choose(self, scores: Tensor) -> Tensor:
        groups = (scores + self.bias).unflatten(-1, (self.groups, -1))
        best = self.rank(groups).topk(self.best, -1)[1]
        seen = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter(-1, best, True)
        return groups.masked_fill(~seen[..., None], -torch.inf).flatten(-2).topk(self.top_k, -1)[1]


class GroupedByBest(Grouped):
    k = 3  # of two groups, whose best are not the best of all then

    def rank(self, groups: Tensor) -> Tensor:
        return groups.amax(-1)


class Upcast(Router):
    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(h.float(), self.weight.float())
        scores = logits.softmax(-1)
        index = scores.topk(2, -1)[1]
        w = scores.gather(-1, index)
        return logits, w / w.sum(-1, keepdim=True), index


class Shared(nn.Module):
    def __init__(self, width: int = 20):
        super().__init__()
        self.gate, self.up = nn.Linear(D, width, False), nn.Linear(D, width, False)
        self.down = nn.Linear(width, D, False)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(h)) * self.up(h))


class Packed(nn.Module):
    """Gate and up in one weight, and biases."""

    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(D, 40), nn.Linear(20, D)

    def forward(self, h: Tensor) -> Tensor:
        up, gate = self.both(h).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    router: type = Router
    shared: Callable[[], nn.Module] | None = None
    gated = False

    def __init__(self):
        super().__init__()
        self.experts, self.gate = Many(), self.router()
        if self.shared is not None:
            self.shared_expert = type(self).shared()
        if self.gated:
            self.shared_gate = nn.Linear(D, 1, False)

    def of_shared(self, h: Tensor) -> Tensor:
        y = self.shared_expert(h)
        return F.sigmoid(self.shared_gate(h)) * y if self.gated else y

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1, D)
        _, w, index = self.gate(h)
        y = self.experts(h, index, w)
        return (y if self.shared is None else y + self.of_shared(h)).view(x.shape)


class Linear(Block):
    """A router that is a linear layer, with a bias."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, N)

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1, D)
        w, index = self.gate(h).softmax(-1).topk(2, -1)
        return self.experts(h, index, w).view(x.shape)


class Model(nn.Module):
    """Layers of which only the MoE block is one op."""

    def __init__(self, block: Callable[[], nn.Module]):
        super().__init__()
        self.mixers = nn.ModuleList(nn.ModuleDict({"block": block()}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.mixers:
            x = x + x.roll(1, 1).sin() + one["block"](x / x.square().mean().sqrt())
        return x


def of(**attributes: Any) -> type:
    return type("Block", (Block,), attributes)


BLOCKS: dict[str, tuple[type, dict[str, Any]]] = {
    "Mixtral": (Block, dict(scoring="softmax", normalize=True, num_groups=1, score_bias=None, top_k=2)),
    "unnormalized": (of(router=Unnormalized), dict(normalize=False, top_k=3, routed_scaling_factor=1.0)),
    "scaled": (of(router=Scaled), dict(normalize=False, routed_scaling_factor=2.5)),
    "chosen first": (of(router=ChosenFirst), dict(scoring="softmax", normalize=True)),
    "biased": (of(router=Biased), dict(scoring="sigmoid", normalize=True, num_groups=1)),
    "grouped": (of(router=Grouped), dict(num_groups=4, top_groups=2, group_score="top2")),
    "grouped by best": (of(router=GroupedByBest), dict(num_groups=4, top_groups=2, group_score="max")),
    "shared": (of(shared=Shared), dict(normalize=True)),
    "packed": (of(shared=Packed, router=Unnormalized), dict(normalize=False)),
    "gated": (of(shared=Shared, gated=True), dict(normalize=True)),
    "linear": (Linear, dict(normalize=False)),
}  # fmt: skip


def inputs(seed: int = 0, length: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, length, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def model_of(block: Callable[[], nn.Module]) -> Model:
    torch.manual_seed(0)
    return Model(block)


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_step(ours: nn.Module, theirs: nn.Module) -> None:
    for length in (7, 40):
        mine, want = (step(model, inputs(2, length)) for model in (ours, theirs))
        torch.testing.assert_close(mine, want, rtol=1e-3, atol=1e-4)


def converted(theirs: nn.Module, op: str = "moe_block", **options: Any) -> nn.Module:
    ours = copy.deepcopy(theirs)
    conversion = ckptkern.convert(ours, inputs(), otherwise="leave", **options)
    found = {row.name: row.replaced_by for row in conversion.converted}
    assert found == {"mixers.0.block": op, "mixers.1.block": op}, str(conversion)
    return ours


def arguments_of(model: nn.Module) -> dict[str, Any]:
    return next(iter(model.mixers[0]["block"].forward.segments.values())).template


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_read_by_their_parts_and_calls(name: str) -> None:
    block, wanted = BLOCKS[name]
    theirs = model_of(block)
    ours = converted(theirs)
    arguments = arguments_of(ours)
    assert {option: arguments[option] for option in wanted} == wanted
    assert (arguments["score_bias"] is not None) == issubclass(block.router, Biased)
    assert_same_step(ours, theirs)
    with saved_tensors(ours) as mine:
        ours(inputs())
    with saved_tensors(theirs) as want:
        theirs(inputs())
    assert mine.bytes < want.bytes / 2
    ckptkern.revert(ours)
    assert_same_step(ours, theirs)


class TwoGroups(Grouped):
    def __init__(self):
        super().__init__()
        self.groups, self.best = 2, 1


@pytest.mark.parametrize("seed", range(6))
def test_groups_are_seen_whatever_bias_is_tried(seed: int) -> None:
    """A large bias puts the best experts into one group, of every token: the choice is then that without groups."""
    model = model_of(of(router=TwoGroups))
    torch.manual_seed(seed)
    ckptkern.convert(model, inputs(seed), otherwise="leave", include="mixers.0.block")
    assert arguments_of(model)["num_groups"] == 2


@pytest.mark.parametrize(("router", "wanted"), [(Router, None), (Upcast, torch.float32)])
def test_a_router_that_upcasts(router: type, wanted: torch.dtype | None) -> None:
    theirs = model_of(of(router=router))
    assert arguments_of(converted(theirs))["router_dtype"] == wanted
    theirs = theirs.bfloat16()
    ours = copy.deepcopy(theirs)
    ckptkern.convert(ours, inputs(dtype=torch.bfloat16), otherwise="leave")
    assert arguments_of(ours)["router_dtype"] == wanted
    x = inputs(5, dtype=torch.bfloat16)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0.1, atol=0.1)


# -- near-misses: each differs from what moe_block computes in one thing ---------------------------------------------


class Temperature(Router):
    def scores(self, logits: Tensor) -> Tensor:
        return (logits.float() / 2).softmax(-1)


class Clamped(Router):
    """No ordinary logit is so large."""

    def scores(self, logits: Tensor) -> Tensor:
        return logits.float().clamp(-20, 20).softmax(-1)


class Noisy(Router):
    def choose(self, scores: Tensor) -> Tensor:
        noise = torch.rand_like(scores) * 1e-12 if self.training else 0.0  # which no check of numbers sees
        return (scores + noise).topk(2, -1)[1]


class WeighedOtherwise(Router):
    """Chooses by a softmax, and weighs by sigmoids."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, index = super().forward(h)
        w = logits.sigmoid().gather(-1, index) ** 2
        return logits, w / w.sum(-1, keepdim=True), index


class WeighedWithBias(Biased):
    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(h, self.weight)
        w, index = (self.scores(logits) + self.bias).topk(2, -1)
        return logits, w / w.sum(-1, keepdim=True), index


class SecondBest(Router):
    def choose(self, scores: Tensor) -> Tensor:
        return scores.topk(3, -1)[1][..., 1:]


class Detached(Router):
    """Its weights have no gradient."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, w, index = super().forward(h)
        return logits, w.detach(), index


class RankedByMean(Grouped):
    def __init__(self):
        super().__init__()
        self.groups, self.best = 2, 1

    def rank(self, groups: Tensor) -> Tensor:
        return groups.mean(-1)


class Jittered(Block):
    """Mixtral's, with a jitter."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x *= torch.empty_like(x).uniform_(0.9, 1.1)
        return super().forward(x)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            x *= 1.5
        return y


class Capacity(Many):
    """No expert takes more than 400 rows."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        place = F.one_hot(index.flatten(), N).cumsum(0).gather(1, index.flatten()[:, None]).view(index.shape)
        return super().forward(x, index, weights * (place <= 400))


class Limited(Block):
    def __init__(self):
        super().__init__()
        self.experts = Capacity()


class ClampedExperts(Many):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x.clamp(-100, 100), index, weights)


class WithClamp(Block):
    def __init__(self):
        super().__init__()
        self.experts = ClampedExperts()


class OfAnother(Block):
    """Its experts read another tensor than its router."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1, D)
        _, w, index = self.gate(h)
        return self.experts(2 * h, index, w).view(x.shape)


class Tanh(Block):
    shared, gated = Shared, True

    def of_shared(self, h: Tensor) -> Tensor:
        return F.tanh(self.shared_gate(h)) * self.shared_expert(h)


class Twice(Block):
    shared = Shared

    def of_shared(self, h: Tensor) -> Tensor:
        return 2 * self.shared_expert(h)


class Wasted(Block):
    """Its shared expert is not added in training."""

    shared = Shared

    def of_shared(self, h: Tensor) -> Tensor:
        return self.shared_expert(h) * (not self.training)


class Dropped(Shared):
    def forward(self, h: Tensor) -> Tensor:
        return F.dropout(super().forward(h), 0.25, self.training)


NEAR_MISSES = {
    "temperature": of(router=Temperature), "clamped logits": of(router=Clamped), "noise": of(router=Noisy),
    "weighed otherwise": of(router=WeighedOtherwise), "weighed with the bias": of(router=WeighedWithBias),
    "second best": of(router=SecondBest), "detached weights": of(router=Detached), "ranked by mean": of(router=RankedByMean),
    "jitter": Jittered, "in place": InPlace, "capacity": Limited, "clamped experts": WithClamp, "another input": OfAnother,
    "tanh": Tanh, "twice": Twice, "not in training": Wasted, "dropout": of(shared=Dropped),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_other_blocks_are_left(name: str) -> None:
    theirs = model_of(NEAR_MISSES[name])
    ours = copy.deepcopy(theirs)
    conversion = ckptkern.convert(ours, inputs(), otherwise="leave")
    assert "moe_block" not in [row.replaced_by for row in conversion.converted], str(conversion)
    # of the experts, which are fused, the masks are our own; and autograd notices what is changed in place
    if name not in ("dropout", "in place"):
        assert_same_step(ours, theirs)


def test_rows_that_went_to_other_experts_are_not_compared_in_16_bits() -> None:
    """Where a score rounds otherwise a token goes to another expert; another forward differs in most rows."""
    theirs = torch.randn(2, 16, D)
    few, many = theirs.clone(), theirs.clone()
    few[0, ::2] += 1.0  # a quarter of all rows
    many[:, ::2] += 1.0
    assert torch.equal(*nearest_rows(few, theirs))
    assert not torch.equal(*nearest_rows(many, theirs))
    assert len(nearest_rows(few, theirs)[0]) == 24


LATER: dict[str, Callable[[nn.Module], Any]] = {
    "top_k": lambda block: setattr(block.gate, "top_k", 1),
    "scaling": lambda block: setattr(block.gate, "scaling", 3.0),
    "bias": lambda block: block.gate.bias.copy_(torch.linspace(-1, 1, N)),  # as a trainer balances loads
    "a hook of the router": lambda block: block.gate.register_forward_hook(lambda m, x, y: (y[0], 2 * y[1], y[2])),
    "frozen experts": lambda block: block.experts.requires_grad_(False),
    "another router": lambda block: setattr(block, "gate", WeighedWithBias()),
}


@pytest.mark.parametrize("what", LATER)
def test_a_later_change_counts(what: str) -> None:
    theirs = model_of(of(router=Biased))
    ours = converted(theirs)
    for model in (theirs, ours):
        torch.manual_seed(1)
        LATER[what](model.mixers[1]["block"])
    assert_same_step(ours, theirs)


def test_it_compiles_without_a_break() -> None:
    theirs = model_of(of(shared=Shared, gated=True))
    compiled = torch.compile(converted(theirs), fullgraph=True, backend="aot_eager")
    want, mine = (torch.autograd.grad(m(inputs()).square().sum(), [*m.parameters()]) for m in (theirs, compiled))
    torch.testing.assert_close(mine, want, rtol=1e-3, atol=1e-3)
