"""convert on MoE blocks, a router with experts and shared experts: moe_block in their place, or moe_mlp in that of the experts
alone, and near-misses that are left."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from conversion.steps import assert_same_steps, by_deepcopy, by_pickle, calls_of, pair, saved, variant
from support.architectures import WIDTH, Gated, GatedByHalves
from torch import nn
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion.fuse import nearest_rows

N, H = 8, 24  # experts, so that groups have some


class Experts(nn.Module):
    """As transformers' MoE layers have them, under other names."""

    def __init__(self, act=F.silu, bias=False):
        super().__init__()
        self.act = act
        self.down = nn.Parameter(torch.randn(N, WIDTH, H) * H**-0.5)
        self.both = nn.Parameter(torch.randn(N, 2 * H, WIDTH) * WIDTH**-0.5)
        self.both_bias, self.down_bias = (
            nn.Parameter(torch.randn(N, rows)) if bias else None for rows in (2 * H, WIDTH)
        )

    def packed(self):
        return self.both

    def forward(self, x, index, weights):
        total, both = torch.zeros_like(x), self.packed()
        for e in range(len(self.down)):
            token, j = torch.where(index == e)
            of_gate, of_down = (None if b is None else b[e] for b in (self.both_bias, self.down_bias))
            gate, up = F.linear(x[token], both[e], of_gate).chunk(2, -1)
            y = F.linear(self.act(gate) * up, self.down[e], of_down) * weights[token, j][:, None]
            total = total.index_put((token,), y.to(x.dtype), accumulate=True)
        return total


class Router(nn.Module):
    """Softmax over all, then the best, as transformers' routers are."""

    k, normalize, scale, balanced = 2, True, 1.0, False

    def __init__(self):
        super().__init__()
        self.top_k, self.scaling = self.k, self.scale
        self.weight = nn.Parameter(torch.randn(N, WIDTH) * WIDTH**-0.5)
        if self.balanced:
            self.bias = nn.Buffer(torch.zeros(N))

    def scores(self, logits):
        return logits.float().softmax(-1)

    def choose(self, scores):
        return scores.topk(self.top_k, -1)[1]

    def weigh(self, logits, scores, index):
        w = scores.gather(-1, index)
        return w / w.sum(-1, keepdim=True) if self.normalize else w

    def forward(self, h):
        logits = F.linear(h, self.weight)
        scores = self.scores(logits)
        index = self.choose(scores)
        return logits, (self.weigh(logits, scores, index) * self.scaling).to(h.dtype), index


class Biased(Router):
    """DeepSeek-V3's and GLM's, without groups."""

    balanced = True

    def scores(self, logits):
        return logits.float().sigmoid()

    def choose(self, scores):
        return (scores + self.bias).topk(self.top_k, -1)[1]


class Grouped(Biased):
    """Chooses the best of some groups by their two best scores."""

    taken = 4, 2

    def __init__(self):
        super().__init__()
        self.groups, self.best = self.taken

    def rank(self, groups):
        return groups.topk(2, -1)[0].sum(-1)

    def choose(self, scores):
        groups = (scores + self.bias).unflatten(-1, (self.groups, -1))
        best = self.rank(groups).topk(self.best, -1)[1]
        seen = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter(-1, best, True)
        return groups.masked_fill(~seen[..., None], -torch.inf).flatten(-2).topk(self.top_k, -1)[1]


class Upcast(Router):
    def forward(self, h):
        logits = F.linear(h.float(), self.weight.float())
        scores = logits.softmax(-1)
        index = self.choose(scores)
        return logits, self.weigh(logits, scores, index), index


def chosen_first(router, h):
    """The softmax of the best logits."""
    logits = F.linear(h, router.weight)
    best, index = logits.topk(2, -1)
    return logits, best.softmax(-1), index


class Block(nn.Module):
    def __init__(self, experts=Experts, router=Router, shared=None, gated=False):
        super().__init__()
        self.experts, self.gate = experts(), router()
        self.shared_expert = shared() if shared else None
        self.shared_gate = nn.Linear(WIDTH, 1, False) if gated else None

    def of_shared(self, h):
        y = self.shared_expert(h)
        return y if self.shared_gate is None else F.sigmoid(self.shared_gate(h)) * y

    def routed(self, h):
        _, w, index = self.gate(h)
        return self.experts(h, index, w)

    def forward(self, x):
        h = x.view(-1, WIDTH)
        y = self.routed(h)
        return (y if self.shared_expert is None else y + self.of_shared(h)).view(x.shape)


class Model(nn.Module):
    """Layers of which only the MoE block is one op."""

    def __init__(self, block):
        super().__init__()
        self.mixers = nn.ModuleList(nn.ModuleDict({"block": block()}) for _ in range(2))

    def forward(self, x):
        for mixer in self.mixers:
            x = x + x.roll(1, 1).sin() + mixer["block"](x / x.square().mean().sqrt())
        return x


def of(kind=Block, **parts):
    return partial(kind, **parts)


def by_a_linear_layer(block, h):
    w, index = block.gate(h).softmax(-1).topk(2, -1)
    return block.experts(h, index, w)


class ByTanh(Block):
    """A router that is none of moe_block's."""

    def routed(self, h):
        w, index = self.gate(h)[0].tanh().topk(2, -1)
        return self.experts(h, index, w)


def alone(act=F.silu, bias=False):
    """Experts in a block that is not one op."""
    return of(ByTanh, experts=lambda: Experts(act, bias))


Unnormalized = variant(Router, k=3, normalize=False)
BLOCKS = {
    "Mixtral": (of(), dict(scoring="softmax", normalize=True, num_groups=1, top_k=2, router_dtype=None)),
    "scaled": (of(router=variant(Unnormalized, scale=2.5)), dict(normalize=False, routed_scaling_factor=2.5)),
    "upcast": (of(router=Upcast), dict(router_dtype=torch.float32)),
    "chosen first": (of(router=variant(Router, forward=chosen_first)), dict(scoring="softmax", normalize=True)),
    "biased": (of(router=Biased), dict(scoring="sigmoid", normalize=True, num_groups=1)),
    "grouped": (of(router=Grouped), dict(num_groups=4, top_groups=2, group_score="top2")),
    "grouped by best": (  # of two groups, whose best three are not the best of all then
        of(router=variant(Grouped, k=3, rank=lambda self, groups: groups.amax(-1))),
        dict(num_groups=4, top_groups=2, group_score="max"),
    ),
    "shared": (of(shared=Gated), dict(normalize=True)),
    "packed": (
        of(shared=partial(GatedByHalves, 1, bias=True), router=Unnormalized),
        dict(normalize=False, top_k=3, routed_scaling_factor=1.0),
    ),
    "gated": (of(shared=Gated, gated=True), dict(normalize=True)),
    "linear": (of(variant(Block, routed=by_a_linear_layer), router=lambda: nn.Linear(WIDTH, N)), dict(normalize=False)),
}  # fmt: skip
EXPERTS = {"silu": alone(), "gelu and biases": alone(F.gelu, True), "relu": alone(F.relu)}


def inputs(seed=0, length=7):
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def converted(block, op="moe_block", **options):
    """Returns (the converted model, the model as it was)."""
    torch.manual_seed(0)
    ours, theirs, conversion = pair(Model(block), inputs(), otherwise="leave", **options)
    path = "block" if op == "moe_block" else "block.experts"
    replaced = {row.name: row.replaced_by for row in conversion.converted}
    assert replaced == {f"mixers.{i}.{path}": op for i in range(2)}, str(conversion)
    assert all(row.error < 2e-5 and row.saved_after < row.saved_before for row in conversion.converted)
    return ours, theirs


def assert_the_same(ours, theirs):
    for length in (7, 40):
        assert_same_steps(ours, theirs, inputs(2, length), tolerance=1e-4)


def arguments_of(model):
    return next(iter(model.mixers[0]["block"].forward.segments.values())).template


def assert_converted(ours, theirs, copied=by_deepcopy):
    assert_the_same(ours, theirs)
    assert calls_of(ours) == {"fused": 4, "checkpointed": 0, "original": 0}
    after = saved(ours, inputs())
    assert after < saved(theirs, inputs()) / 2
    other = copied(ours)
    assert_same_steps(other, theirs, inputs())
    assert saved(other, inputs()) == after


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_read_by_their_parts_and_calls(name):
    block, wanted = BLOCKS[name]
    ours, theirs = converted(block)
    arguments = arguments_of(ours)
    assert {option: arguments[option] for option in wanted} == wanted
    assert (arguments["score_bias"] is not None) == isinstance(ours.mixers[0]["block"].gate, Biased)
    assert_converted(ours, theirs)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_found_by_layout(name):
    assert_converted(*converted(EXPERTS[name], "moe_mlp"), by_pickle)


@pytest.mark.parametrize("seed", range(3))
def test_groups_are_seen_whatever_bias_is_tried(seed):
    """A large bias puts the best experts into one group, of every token: the choice is then that without groups."""
    model = Model(of(router=variant(Grouped, taken=(2, 1))))
    torch.manual_seed(seed)
    ckptkern.convert(model, inputs(seed), otherwise="leave", include="mixers.0.block")
    assert arguments_of(model)["num_groups"] == 2


# -- near-misses: each differs from what moe_block or moe_mlp computes in one thing


def with_experts(kind=Experts, **methods):
    return of(experts=variant(kind, **methods))


def with_router(kind=Router, **methods):
    return of(router=variant(kind, **methods))


def otherwise(*, shared=None, gated=False, **methods):
    return of(variant(Block, **methods), shared=shared, gated=gated)


def within_capacity(rows):
    """No expert takes more rows."""

    def forward(self, x, index, weights):
        place = F.one_hot(index.flatten(), N).cumsum(0).gather(1, index.flatten()[:, None]).view(index.shape)
        return Experts.forward(self, x, index, weights * (place <= rows))

    return with_experts(forward=forward)


def noisy(self, scores):
    noise = torch.rand_like(scores) * 1e-12 if self.training else 0.0  # which no check of numbers sees
    return (scores + noise).topk(2, -1)[1]


def squared(self, logits, scores, index):
    """Chooses by a softmax, and weighs by sigmoids."""
    w = logits.sigmoid().gather(-1, index) ** 2
    return w / w.sum(-1, keepdim=True)


def with_the_bias(self, logits, scores, index):
    return Router.weigh(self, logits, scores + self.bias, index)


def jittered(self, x):
    """Mixtral's."""
    if self.training:
        x *= torch.empty_like(x).uniform_(0.9, 1.1)
    return Block.forward(self, x)


def in_place(self, x):
    y = Block.forward(self, x)
    if self.training:
        x *= 1.5
    return y


def of_another(self, h):
    """Experts read another tensor than the router."""
    _, w, index = self.gate(h)
    return self.experts(2 * h, index, w)


class Another(Experts):
    """With a parameter more."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def packed(self):
        return self.both * self.scale.sum()


OTHER_EXPERTS = {
    # as DeepSeek V4's and GPT-OSS's, whose limits no ordinary row reaches
    "clamped gates": of(experts=lambda: Experts(lambda g: F.silu(g.clamp(max=100.0)))),
    "up first": with_experts(packed=lambda self: torch.cat(self.both.chunk(2, 1)[::-1], 1)),
    "interleaved": with_experts(packed=lambda self: torch.cat((self.both[:, ::2], self.both[:, 1::2]), 1)),
    "unweighted": with_experts(forward=lambda self, x, index, w: Experts.forward(self, x, index, w.detach())),
    "a small capacity": within_capacity(16),
    "a large capacity": within_capacity(400),
    "clamped experts": with_experts(
        forward=lambda self, x, *others: Experts.forward(self, x.clamp(-100, 100), *others)
    ),
    "a parameter more": with_experts(Another),
}
NEAR_MISSES = OTHER_EXPERTS | {
    # no ordinary logit is so large
    "clamped logits": with_router(scores=lambda self, logits: logits.float().clamp(-20, 20).softmax(-1)),
    "noise": with_router(choose=noisy),
    "weighed otherwise": with_router(weigh=squared),
    "weighed with the bias": with_router(Biased, weigh=with_the_bias),
    "detached weights": with_router(weigh=lambda self, *args: Router.weigh(self, *args).detach()),
    "ranked by mean": with_router(Grouped, taken=(2, 1), rank=lambda self, groups: groups.mean(-1)),
    "jitter": otherwise(forward=jittered),
    "in place": otherwise(forward=in_place),
    "another input": otherwise(routed=of_another),
    "tanh": otherwise(
        of_shared=lambda self, h: F.tanh(self.shared_gate(h)) * self.shared_expert(h), shared=Gated, gated=True
    ),
    "not in training": otherwise(of_shared=lambda self, h: self.shared_expert(h) * (not self.training), shared=Gated),
    "dropout": otherwise(of_shared=lambda self, h: F.dropout(self.shared_expert(h), 0.25, self.training), shared=Gated),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_other_blocks_are_left(name):
    torch.manual_seed(0)
    ours, theirs, conversion = pair(Model(NEAR_MISSES[name]), inputs(), otherwise="leave")
    refused = ("moe_block", "moe_mlp") if name in OTHER_EXPERTS else ("moe_block",)
    assert not {*refused} & {row.replaced_by for row in conversion.converted}, str(conversion)
    if name in OTHER_EXPERTS and name != "a parameter more":  # is no layout of experts
        assert any(row.name == "mixers.0.block.experts" and row.reason for row in conversion), str(conversion)
    # of the experts, which are fused, the masks are our own; and autograd notices what is changed in place
    if name not in ("dropout", "in place"):
        assert_the_same(ours, theirs)


def test_rows_that_went_to_other_experts_are_not_compared_in_16_bits():
    """Where a score rounds otherwise a token goes to another expert; another forward differs in most rows."""
    theirs = torch.randn(2, 16, WIDTH)
    few, many = theirs.clone(), theirs.clone()
    few[0, ::2] += 1.0  # a quarter of all rows
    many[:, ::2] += 1.0
    assert [torch.equal(*nearest_rows(ours, theirs)) for ours in (few, many)] == [True, False]
    assert len(nearest_rows(few, theirs)[0]) == 24


# -- what changes later


OF_ROUTERS = {
    "top_k": lambda gate: setattr(gate, "top_k", 1),
    "scaling": lambda gate: setattr(gate, "scaling", 3.0),
    "bias": lambda gate: gate.bias.copy_(torch.linspace(-1, 1, N)),  # as a trainer balances loads
    "a hook of the router": lambda gate: gate.register_forward_hook(lambda m, x, y: (y[0], 2 * y[1], y[2])),
}


@pytest.mark.parametrize("change", OF_ROUTERS)
def test_a_later_change_of_a_router_counts(change):
    ours, theirs = converted(of(router=Biased))
    for model in (ours, theirs):
        torch.manual_seed(1)
        OF_ROUTERS[change](model.mixers[1]["block"].gate)
    assert_the_same(ours, theirs)
