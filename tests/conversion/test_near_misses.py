"""What a check on one example does not show: other sizes, numbers and settings than the example's. Such a layer is left, or
replaced rightly."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conversion.steps import assert_same_steps, calls_of, pair, saved, variant
from support import architectures
from support.architectures import (
    HEADS,
    WIDTH,
    Attention,
    Buffers,
    D,
    Decoder,
    Gated,
    GatedAttention,
    Llama,
    Torchs,
    Vision,
    Weighted,
    WithSinks,
    fused_of,
    rotary,
    rotated,
)
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion import fuse


class Layer(Vision):
    """With some parameters that near-misses use. Each changes one of its methods."""

    scale = nn.Identity

    def __init__(self):
        super().__init__()
        del self.act
        self.act, self.config = F.gelu, SimpleNamespace(factor=1.0)
        self.factors = nn.Parameter(torch.randn(HEADS, 1, 1))
        self.cos, self.sin = (nn.Buffer(table[0]) for table in rotary(torch.empty(1, 32, 1)))

    def rotated(self, q, **kwargs):
        return q

    def core(self, q, k, v, **kwargs):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def attention(self, h, **kwargs):
        q, k, v = self.split(h)
        o = self.core(self.rotated(q, **kwargs), self.rotated(k, **kwargs), v, **kwargs)
        return self.proj(o.transpose(1, 2).flatten(2))

    def forward(self, x, **kwargs):
        x = x + self.attention(self.norm1(x), **kwargs) * self.config.factor
        return x + self.mlp(self.norm2(x))


class Adaptive(architectures.Adaptive):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)


class Remembering(Adaptive):
    """A module inside, of which the trace sees what it is given alone, reads what forward has put there."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(self, condition):
            return self.weight * condition * self.seen

    def __init__(self):
        super().__init__()
        self.reader = self.Reader()

    def of(self, condition, x):
        self.reader.seen = x.mean(1).detach()
        return self.reader(condition)


def rotated_by(q, cos, sin):
    return q * cos + rotated(q) * sin


def at(layer, q, positions):
    return rotated_by(q, layer.cos[positions][:, None], layer.sin[positions][:, None])


def keys_apart(layer, q, k, v, positions, of_keys):
    return F.scaled_dot_product_attention(at(layer, q, positions), at(layer, k, of_keys), v, is_causal=True)


def clamped_in_place(layer, h):
    qkv = layer.qkv(h).view(*h.shape[:2], 3, HEADS, D)
    qkv[:, :, 0].clamp_(-8, 8)
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


def as_complex(layer, q, turns):
    """Pairs of neighbours as complex numbers (Llama's own code)."""
    pairs = torch.view_as_complex(q.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(3).type_as(q)


def normed(q):
    return F.normalize(q, dim=-1)


def cosine(of_keys):
    """Queries and keys of length 1, and a factor for each head (Swin v2)."""

    def core(layer, q, k, v):
        scores = normed(q) @ of_keys(k).transpose(-1, -2)
        return (scores * layer.factors.clamp(max=4).exp()).softmax(-1) @ v

    return core


def over(*sizes):
    """Attention over windows of so many tokens, or over the whole batch."""
    return lambda layer, h: Layer.attention(layer, h.reshape(*sizes, WIDTH)).view(h.shape)


def masked(layer, q, k, v, mask):
    return (q @ k.transpose(-1, -2) * D**-0.5 + mask[:, None, None]).softmax(-1) @ v


def hiding(self, x, padding):
    h = self.ln_1(x)
    x = x + self.attention(h, h, h, key_padding_mask=padding[:, 0, 0], need_weights=False)[0]
    return x + self.mlp(self.ln_2(x))


def scaled_by_length(layer, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=math.log(q.shape[2] + 20) / 8)


def biased_by_length(layer, q, k, v):
    distances = (torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])).abs()
    return F.scaled_dot_product_attention(q, k, v, layer.factors.exp() * distances)


def repeated(layer, condition, x):
    return condition.repeat(1, 2).reshape(x.shape[0], 2, -1)[:, 0].expand(len(x), -1) * x.shape[0]


# -- calls


def tokens(B=2, S=6, seed=0):
    return torch.randn(B, S, WIDTH, generator=torch.Generator().manual_seed(seed))


def call(B=2, S=6, **kwargs):
    return tokens(B, S), kwargs


def conditioned(B=2, S=6):
    return call(B, S, condition=tokens(B, 1, 1)[:, 0])


def remembering(B=2, S=5, mask=None, samples=0):
    return call(B, memory=tokens(samples or B, S, 1), **({} if mask is None else {"memory_mask": mask}))


def tables(S):
    return {name: table[0] for name, table in zip(("cos", "sin"), rotary(torch.empty(1, S, 1)), strict=True)}


def halved(S):
    return {name: table[..., : D // 2] for name, table in tables(S).items()}


def turns(S):
    return {"turns": torch.complex(*halved(S).values())}


def larger(path, factor):
    return lambda layer: layer.get_parameter(path).data.mul_(factor)


def set_to(name, value):
    return lambda layer: setattr(layer, name, value)


class Miss(NamedTuple):
    """A layer; an example; calls that are other than the example; what is changed before these; is the whole layer one op?"""

    layer: Callable[[], nn.Module]
    example: tuple[Tensor, dict[str, Any]]
    calls: tuple[tuple[Tensor, dict[str, Any]], ...]
    change: Callable[[nn.Module], Any]
    fused: bool


def miss(*calls, kind=Layer, example=None, change=lambda layer: None, fused=False, **methods):
    """Makes a near-miss of a kind of layer with other methods. Without calls: one call of more samples and tokens than the
    example has."""
    inputs = {Adaptive: conditioned, Decoder: remembering}.get(kind, call)
    layer = variant(kind, **methods) if methods else kind
    return Miss(layer, example or inputs(), calls or (inputs(3, 12),), change, fused)


of_vectors, of_memory = (functools.partial(miss, kind=kind) for kind in (Adaptive, Decoder))
ROWS, MASKED = torch.arange(6)[None], "a mask of the memory"
NEAR_MISSES = {
    "rows of tables that a tensor chooses": miss(
        call(positions=ROWS % 3), rotated=at, example=call(positions=ROWS), fused=True
    ),
    "other positions of keys": miss(
        call(positions=ROWS, of_keys=ROWS.flip(1)), core=keys_apart, example=call(positions=ROWS, of_keys=ROWS.clone()),
        rotated=lambda self, q, **kwargs: q,
    ),
    "tables from their third row": miss(
        rotated=lambda self, q: rotated_by(q, *(t[2 : 2 + q.shape[2]] for t in (self.cos, self.sin)))
    ),
    "a clamp beyond the example's numbers": miss(
        rotated=lambda self, q: q.clamp(-8, 8), change=larger("qkv.weight", 50)
    ),
    "a clamp of a view in place": miss(split=clamped_in_place, change=larger("qkv.weight", 50)),
    "a window as long as the example": miss(attention=over(-1, 6)),
    "a batch that is one sequence": miss(attention=over(1, -1), example=call(1)),
    "a scale of the length": miss(core=scaled_by_length),
    "a mask of keys": miss(
        call(2, mask=torch.randn(2, 6)), call(6, mask=torch.randn(6, 6)), core=masked,
        example=call(1, mask=torch.zeros(1, 6)), fused=True,
    ),
    "a bias of the length": miss(core=biased_by_length),
    "cosines": miss(core=cosine(normed)),
    "cosines of q alone": miss(core=cosine(lambda k: k)),
    "longer tables": miss(
        call(2, 5, **tables(12)), rotated=lambda self, q, cos, sin: rotated_by(q, cos[: q.shape[2]], sin[: q.shape[2]]),
        example=call(2, 12, **tables(12)), fused=True,
    ),
    "pairs by two tables": miss(
        call(2, 9, **halved(9)), example=call(**halved(6)), fused=True,
        rotated=lambda self, q, cos, sin: as_complex(self, q, torch.view_as_complex(torch.stack((cos, sin), -1))),
    ),
    "pairs as complex numbers": miss(call(2, 9, **turns(9)), rotated=as_complex, example=call(**turns(6)), fused=True),
    "a memory that was the input": of_memory(
        remembering(), remembering(2, 6), example=(x := tokens(), {"memory": x}), fused=True
    ),
    MASKED: of_memory(
        remembering(mask=torch.rand(2, 1, 6, 5) > 0.3), remembering(3, 9, torch.randn(1, 1, 6, 9)),
        remembering(samples=1), fused=True,
    ),
    "one memory for all": of_memory(remembering(3, 4), example=remembering(1), fused=True),
    "a memory that is cut": of_memory(remembering(2, 9), remembered=lambda self, memory: memory[:, :5]),
    "a memory without a gradient": of_memory(remembered=lambda self, memory: memory.data),
    "vectors of each sample": of_vectors(conditioned(), conditioned(5, 9), conditioned(1), fused=True),
    "vectors of one sample": of_vectors(conditioned(3), conditioned(1, 9), example=conditioned(1), fused=True),
    "vectors in another order": of_vectors(change=set_to("order", [0, 1, 2, 4, 3, 5]), fused=True),
    "vectors that more is done to": of_vectors(
        change=lambda layer: layer.modulation.register_forward_hook(lambda *call: 2 * call[2]), fused=True
    ),
    "vectors of each token": of_vectors(
        call(3, 9, condition=tokens(3, 9, 1)), example=call(condition=tokens(seed=1)),
        modulated=lambda self, h, shift, scale: h * (1 + scale[:, 0]) + shift[:, 0],
        gated=lambda self, gate, y: y * gate[:, 0],
    ),
    "a gate before a dropout": of_vectors(gated=lambda self, gate, y: F.dropout(gate * y, 0.25, self.training)),
    "vectors of the input": of_vectors(of=lambda self, condition, x: F.silu(x.mean(1)) + condition),
    "vectors of what was put aside": miss(conditioned(3, 12), kind=Remembering, example=conditioned()),
    "sampled vectors": of_vectors(of=lambda self, condition, x: condition + torch.randn_like(condition)),
    "vectors of a dropout": of_vectors(of=lambda self, condition, x: self.drop(condition), fused=True),
    "vectors of a dropout's function": of_vectors(
        of=lambda self, condition, x: F.dropout(condition, 0.5, self.training)
    ),
    "numbers that follow the dtype": of_vectors(
        of=lambda self, condition, x: condition.clamp(torch.finfo(condition.dtype).min)
    ),
    # twice as large for twice as many samples, and not thrice for thrice
    "numbers that follow powers": of_vectors(of=lambda self, condition, x: condition * (1 << x.shape[0].bit_length())),
    "numbers that follow the batch": of_vectors(conditioned(3), conditioned(1), of=repeated, fused=True),
    "numbers that follow it otherwise": of_vectors(of=lambda self, condition, x: condition * (x.shape[0] + 1)),
    "numbers that are read on the host": miss(
        mlp=lambda self, x: (y := Layer.mlp(self, x)) / (2 if y.abs().max() > 1e4 else 1),
        change=larger("fc2.weight", 1e6),
    ),
    "another function": miss(change=set_to("act", F.relu), fused=True),
    "another configuration": miss(change=lambda layer: vars(layer.config).update(factor=0.5), fused=True),
    "another module": miss(change=lambda layer: setattr(layer, "proj", nn.Linear(WIDTH, WIDTH)), fused=True),
    "an argument that is looked at": miss(
        call(), call(double=True), call(double=False), fused=True,
        forward=lambda self, x, double=False: Layer.forward(self, 2 * x if double else x),
    ),
    # over 6 tokens it is causal, over 16 it is not
    "a window that the example does not reach": miss(call(2, 16), kind=lambda: Buffers(window=8)),
    "a causal mask of more rows than the example": miss(call(2, 16), kind=Buffers, fused=True),
    "padding of four dimensions": miss(
        call(3, 9, padding=torch.rand(3, 1, 1, 9) < 0.3), forward=hiding, kind=Torchs,
        example=call(padding=torch.zeros(2, 1, 1, 6, dtype=torch.bool)), fused=True,
    ),
    "an argument of many lengths": miss(
        forward=lambda self, x, other=None: Layer.forward(self, x), fused=True,
        example=call(other=torch.nested.nested_tensor_from_jagged(tokens()[0], torch.tensor([0, 2, 6]))),
    ),
    "torch's default epsilon": miss((1e-3 * tokens(), {}), kind=lambda: Llama(norm=nn.RMSNorm), fused=True),
}  # fmt: skip


# -- Llama's layer, of which a part is near a fused op


def limited(y):
    return y if y.abs().max() < 3 else y / 2


def counting(mlp, x):
    mlp.calls = getattr(mlp, "calls", 0) + 1
    return Gated.forward(mlp, x) / mlp.calls


def noisy(mlp, x):
    y = Gated.forward(mlp, x)
    return y + torch.randn_like(y) if mlp.training else y


def large(layer):
    """Gates and scores are of order 1."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(3)
    return layer


def with_mlp(forward):
    return miss(kind=lambda: Llama(mlp=variant(Gated, forward=forward)()))


def gate(opened):
    return miss(kind=lambda: large(Llama(variant(GatedAttention, opened=lambda self, gate: opened(gate))())))


def sinks(probabilities, fused=False):
    return miss(kind=lambda: large(Llama(variant(WithSinks, probabilities=probabilities)())), fused=fused)


def with_column(scores, column):
    return torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1)


def softmax_with(scores, column):
    return F.softmax(with_column(scores, column), -1)


def without_maximum(self, scores):
    scores = with_column(scores, self.sinks[:, None, None])
    return F.softmax(scores - scores.amax(-1, keepdim=True).detach(), -1)[..., :-1]


def sinks_of_rows(self, scores):
    column = self.sinks.repeat(-(-scores.shape[-2] // HEADS))[: scores.shape[-2], None]
    return softmax_with(scores, column)[..., :-1]


class Shifted(nn.Module):
    """A norm with a bias alone."""

    def __init__(self, width):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], None, self.bias)


class Stretched(architectures.Rotary):
    """Tables that differ for long sequences, whose length v's shape tells."""

    def forward(self, v, positions):
        return super().forward(v, positions / 2 if v.shape[2] > WIDTH else positions)


class Inside(architectures.RotaryInside):
    def __init__(self):
        super().__init__()
        self.rotary_emb = Stretched()


class Kernel(architectures.RMSNorm):
    """A norm whose kernel no mode of torch functions sees."""

    def forward(self, x):
        with torch._C.DisableTorchFunction():
            y = super().forward(x)
        return y.to(x.dtype)


def at_positions(S):
    return tokens(2, S), {"tables": torch.arange(S)[None]}


NEAR_MISSES |= {
    "tables of a shape": miss(at_positions(2 * WIDTH), kind=lambda: Llama(Inside()), example=at_positions(6)),
    "a norm's kernel": miss(kind=lambda: Llama(norm=Kernel), fused=True),
    "a norm without a weight": miss(kind=lambda: Llama(norm=Shifted), fused=True),
    "a host read": with_mlp(lambda mlp, x: limited(Gated.forward(mlp, x))),
    "changes its attributes": with_mlp(counting),
    "noise in training": with_mlp(noisy),
    "dropout before a branch": with_mlp(lambda mlp, x: Gated.forward(mlp, F.dropout(x, 0.1, mlp.training))),
    "a second output": miss(kind=Llama, forward=lambda self, x: ((y := Llama.forward(self, x)), y.mean())),
    "a scaled input": miss(
        kind=lambda: Llama(
            variant(Attention, forward=lambda self, x, *args: Attention.forward(self, 1.01 * x, *args))()
        )
    ),
    "BatchNorm": miss(call(3), kind=lambda: Llama(mlp=Gated(nn.Sequential(nn.BatchNorm1d(6), nn.SiLU())))),
    "another activation": miss(kind=lambda: Llama(mlp=Gated(nn.ELU()))),
    "scores beside the output": miss(call(3), kind=lambda: Weighted(scores=True)),
    "a steep gate": gate(lambda gate: torch.sigmoid(1.5 * gate)),
    "a gate whose mean is 1": gate(lambda gate: 2 * torch.sigmoid(gate)),  # T5Gemma's
    "sinks of rows": sinks(sinks_of_rows),
    "scaled sinks": sinks(lambda self, scores: softmax_with(scores, 2 * self.sinks[:, None, None])[..., :-1]),
    "one more in each denominator": sinks(lambda self, scores: softmax_with(scores, scores.new_zeros(1))[..., :-1]),
    "sinks without the maximum": sinks(without_maximum, fused=True),
    "sinks on scores": sinks(
        lambda self, scores: F.softmax(scores + self.sinks[:, None, None], -1), fused=True
    ),  # a bias
}


@pytest.mark.parametrize("why", NEAR_MISSES)
def test_other_calls_than_the_example_are_right(why):
    torch.manual_seed(0)
    layer, (x, kwargs), calls, change, fused = NEAR_MISSES[why]
    ours, theirs, conversion = pair(layer(), x, **kwargs)
    ops = {"transformer_layer", "attention_block" if "gate" in why or "sink" in why else ""} & {*fused_of(conversion)}
    assert ops == ({"transformer_layer"} if fused else set()), str(conversion)
    assert fused or all(row.reason for row in conversion.left)
    for m in (ours, theirs):
        torch.manual_seed(1)
        change(m)
    for x, kwargs in calls:
        assert_same_steps(ours, theirs, x, **kwargs, tolerance=1e-4)
    assert why != MASKED or calls_of(ours)["fused"] == 2, "a mask that appears later is covered"


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.float64)], ids=["rounding", "wrong"])
def test_gradients_that_differ_in_float32_are_compared_in_float64(dtypes, monkeypatch):
    """One value near ReLU's zero changes a gradient by more than all other rounding."""
    ours = fuse.RegionCheck.ours

    def with_other_gradients(self, flat):
        y = ours(self, flat)
        if y.requires_grad and y.dtype in dtypes:
            y.register_hook(lambda gradient: 1.01 * gradient)
        return y

    monkeypatch.setattr(fuse.RegionCheck, "ours", with_other_gradients)
    conversion = ckptkern.convert(Layer(), tokens(), otherwise="leave")
    assert ("transformer_layer" in fused_of(conversion)) == (len(dtypes) == 1), str(conversion)


def test_a_layer_that_is_skipped_at_random_is_left():
    layer = variant(Layer, forward=lambda self, x: x if random.random() < 0.5 else Layer.forward(self, x))()
    state = random.getstate()
    assert "Python's random numbers" in str(ckptkern.convert(layer, tokens()))
    assert random.getstate() == state


def test_arguments_that_nobody_looks_at_do_not_count():
    """Trainers hand a step's numbers to every layer, which hands them on to functions that take any keyword."""
    x = tokens().requires_grad_()
    ours, theirs, _ = pair(Layer(), x, count=torch.tensor(3))  # a number that nobody names is refused
    after = saved(ours, x, count=3)
    assert after < saved(theirs, x) / 3
    for kwargs in ({}, {"count": 4}, {"count": torch.tensor(5)}, {"other": 1}, {"other": 2, "count": None}):
        assert saved(ours, x, **kwargs) == after, kwargs
    ours.double()
    x = x.detach().double()
    assert saved(ours, x, later=6) == saved(ours, x, count=5), "names are tried on the module as it is now"


def test_what_only_train_reads_does_not_count():
    class Counting(Gated):
        modes = 0

        def train(self, mode=True):
            self.modes += 1
            return super().train(mode)

    ours, *_ = pair(Llama(mlp=Counting()), tokens())
    ours.eval().train()(tokens())
    assert calls_of(ours) == {"fused": 1, "checkpointed": 0, "original": 0}
