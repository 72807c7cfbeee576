"""What a check on one example does not show: other sizes, numbers and settings than the example's. Such a layer is left, or
replaced rightly."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conversion.steps import assert_same, pair, saved, step, variant
from support.architectures import (
    HEADS,
    WIDTH,
    Attention,
    D,
    Gated,
    GatedAttention,
    Llama,
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


class Layer(Vision):
    """With some parameters that near-misses use. Each changes one of its methods."""

    def __init__(self):
        super().__init__()
        del self.ls1, self.ls2, self.act
        self.act, self.norm3, self.config = F.gelu, nn.LayerNorm(WIDTH), SimpleNamespace(factor=1.0)
        self.factors, self.drop = nn.Parameter(torch.randn(HEADS, 1, 1)), nn.Dropout(0.5)
        self.cos, self.sin = (nn.Buffer(table[0]) for table in rotary(torch.empty(1, 32, 1)))

    def rotated(self, q, **kwargs):
        return q

    def core(self, q, k, v, **kwargs):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def attention(self, h, **kwargs):
        q, k, v = self.split(h)
        o = self.core(self.rotated(q, **kwargs), self.rotated(k, **kwargs), v, **kwargs)
        return self.proj(o.transpose(1, 2).flatten(2))

    def between(self, x, **kwargs):
        return x

    def forward(self, x, **kwargs):
        x = x + self.attention(self.norm1(x), **kwargs) * self.config.factor
        x = self.between(x, **kwargs)
        return x + self.mlp(self.norm2(x))


class Decoder(Layer):
    """With cross-attention."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = (nn.Linear(WIDTH, n * WIDTH) for n in (1, 2, 1))

    def remembered(self, memory):
        return memory

    def between(self, x, memory, memory_mask=None):
        memory = self.remembered(memory)
        q = self.q(self.norm3(x)).view(*x.shape[:2], HEADS, D).transpose(1, 2)
        k, v = self.kv(memory).view(*memory.shape[:2], 2, HEADS, D).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, memory_mask)
        return x + self.out(o.transpose(1, 2).flatten(2))

    def forward(self, x, memory, memory_mask=None):
        return super().forward(x, memory=memory, memory_mask=memory_mask)


class Adaptive(Layer):
    """Scale, shift and gate of each sample, which a condition gives."""

    def __init__(self):
        super().__init__()
        self.vectors, self.order = nn.Linear(WIDTH, 3 * WIDTH), [0, 1, 2]
        self.head = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def of(self, condition, x):
        return condition

    def modulated(self, h, scale, shift):
        return h * (1 + scale) + shift

    def gated(self, f, gate):
        return gate * f

    def forward(self, x, condition):
        parts = self.vectors(self.of(condition, x))[:, None].chunk(3, -1)
        scale, shift, gate = (parts[i] for i in self.order)
        x = x + self.attention(self.norm1(x))
        return x + self.gated(self.mlp(self.modulated(self.norm2(x), scale, shift)), gate)


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


def clamped_in_place(layer, h):
    qkv = layer.qkv(h).view(*h.shape[:2], 3, HEADS, D)
    qkv[:, :, 0].clamp_(-8, 8)
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


def as_complex(q, turns):
    """Pairs of neighbours as complex numbers (Llama's own code)."""
    pairs = torch.view_as_complex(q.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(3).type_as(q)


def cosine(normed, of_keys=None):
    """Queries and keys of length 1, and a factor for each head (Swin v2)."""

    def core(layer, q, k, v):
        scores = normed(q) @ (of_keys or normed)(k).transpose(-1, -2)
        return (scores * layer.factors.clamp(max=4).exp()).softmax(-1) @ v

    return variant(Layer, core=core)


def over(rows):
    """Attention over windows of so many tokens, or over the whole batch (-1)."""

    def attention(layer, h):
        return Layer.attention(layer, h.reshape(*((-1, rows) if rows > 0 else (1, -1)), WIDTH)).view(h.shape)

    return attention


# -- calls


def tokens(B=2, S=6, seed=0):
    return torch.randn(B, S, WIDTH, generator=torch.Generator().manual_seed(seed))


def call(B=2, S=6, **kwargs):
    return tokens(B, S), kwargs


def conditioned(B=2, S=6):
    return call(B, S, condition=tokens(B, 1, 1)[:, 0])


def remembering(B=2, S=5, mask=None, samples=0):
    return call(B, memory=tokens(samples or B, S, 1), **({} if mask is None else {"memory_mask": mask}))


def indexed(*positions):
    return torch.tensor(positions)[None]


def tables(S):
    return {name: table[0] for name, table in zip(("cos", "sin"), rotary(torch.empty(1, S, 1)), strict=True)}


def turns(S):
    angles = torch.arange(S)[:, None] * 100.0 ** (-torch.arange(0, D, 2) / D)
    return {"turns": torch.polar(torch.ones_like(angles), angles)}


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


def miss(layer, *calls, example=None, change=lambda layer: None, fused=False):
    """Without calls: one of more samples and tokens than the example has."""
    given = conditioned if isinstance(layer, type) and issubclass(layer, Adaptive) else call
    return Miss(layer, example or given(), calls or (given(3, 12),), change, fused)


def adaptive(**methods):
    return miss(variant(Adaptive, **methods))


def of(function, *calls, fused=False):
    """function: what the vectors are computed of, of (layer, condition, x)."""
    return miss(variant(Adaptive, of=function), *calls, fused=fused)


INDEXED = variant(
    Layer, rotated=lambda self, q, positions: rotated_by(q, self.cos[positions][:, None], self.sin[positions][:, None])
)
INDEXED_APART = variant(
    Layer,
    core=lambda self, q, k, v, positions, of_keys: F.scaled_dot_product_attention(
        *(
            rotated_by(one, self.cos[at][:, None], self.sin[at][:, None])
            for one, at in ((q, positions), (k, of_keys))
        ), v, is_causal=True,
    ),
)  # fmt: skip
PADDED = variant(
    Layer, core=lambda self, q, k, v, mask: (q @ k.transpose(-1, -2) * D**-0.5 + mask[:, None, None]).softmax(-1) @ v
)
SLICED = variant(Layer, rotated=lambda self, q, cos, sin: rotated_by(q, cos[: q.shape[2]], sin[: q.shape[2]]))
COMPLEX = variant(Layer, rotated=lambda self, q, turns: as_complex(q, turns))
ROWS = torch.arange(6)[None]
NEAR_MISSES = {
    "rows of tables that a tensor chooses": miss(
        INDEXED, call(positions=indexed(0, 1, 2, 0, 1, 2)), example=call(positions=ROWS), fused=True
    ),
    "other positions of keys": miss(
        INDEXED_APART, call(positions=ROWS, of_keys=ROWS.flip(1)), example=call(positions=ROWS, of_keys=ROWS.clone())
    ),
    "tables from their third row": miss(
        variant(Layer, rotated=lambda self, q: rotated_by(q, *(t[2 : 2 + q.shape[2]] for t in (self.cos, self.sin))))
    ),
    "a clamp beyond the example's numbers": miss(
        variant(Layer, rotated=lambda self, q: q.clamp(-8, 8)), change=larger("qkv.weight", 50)
    ),
    "a clamp of a view in place": miss(variant(Layer, split=clamped_in_place), change=larger("qkv.weight", 50)),
    "a window as long as the example": miss(variant(Layer, attention=over(6))),
    "a batch that is one sequence": miss(variant(Layer, attention=over(-1)), example=call(1)),
    "a scale of the length": miss(
        variant(
            Layer,
            core=lambda self, *qkv: F.scaled_dot_product_attention(
                *qkv, is_causal=True, scale=math.log(qkv[0].shape[2]) / 8
            ),
        )
    ),
    "a mask of keys": miss(
        PADDED, call(2, mask=torch.randn(2, 6)), call(6, mask=torch.randn(6, 6)), example=call(1, mask=torch.zeros(1, 6)),
        fused=True,
    ),
    "cosines": miss(cosine(lambda q: F.normalize(q, dim=-1)), fused=True),
    "cosines of q alone": miss(cosine(lambda q: F.normalize(q, dim=-1), lambda k: k)),
    "longer tables": miss(SLICED, call(2, 5, **tables(12)), example=call(2, 12, **tables(12)), fused=True),
    "pairs as complex numbers": miss(COMPLEX, call(2, 9, **turns(9)), example=call(**turns(6)), fused=True),
    "a memory that was the input": miss(
        Decoder, remembering(), remembering(2, 6), example=(x := tokens(), {"memory": x}), fused=True
    ),
    "a mask of the memory": miss(
        Decoder, remembering(mask=torch.rand(2, 1, 6, 5) > 0.3), remembering(3, 9, torch.randn(1, 1, 6, 9)),
        remembering(samples=1), example=remembering(), fused=True,
    ),
    "one memory for all": miss(Decoder, remembering(3, 4), example=remembering(1), fused=True),
    "a memory that is cut": miss(
        variant(Decoder, remembered=lambda self, memory: memory[:, :5]), remembering(2, 9), example=remembering()
    ),
    "a memory without a gradient": miss(
        variant(Decoder, remembered=lambda self, memory: memory.data), remembering(), example=remembering()
    ),
    "vectors of each sample": miss(Adaptive, conditioned(), conditioned(5, 9), conditioned(1), fused=True),
    "vectors of one sample": miss(Adaptive, conditioned(3), conditioned(1, 9), example=conditioned(1), fused=True),
    "vectors in another order": miss(Adaptive, change=set_to("order", [1, 0, 2]), fused=True),
    "vectors that more is done to": miss(
        Adaptive, change=lambda layer: layer.vectors.register_forward_hook(lambda *call: 2 * call[2]), fused=True
    ),
    "vectors of each token": miss(
        variant(
            Adaptive, modulated=lambda self, h, scale, shift: h * (1 + scale[:, 0]) + shift[:, 0],
            gated=lambda self, f, gate: f * gate[:, 0],
        ), call(3, 9, condition=tokens(3, 9, 1)), example=call(condition=tokens(seed=1)),
    ),
    "a gate before a dropout": adaptive(gated=lambda self, f, gate: F.dropout(gate * f, 0.25, self.training)),
    "vectors of the input": of(lambda self, condition, x: self.head(x.mean(1)) + condition),
    "vectors of what was put aside": miss(Remembering),
    "sampled vectors": of(lambda self, condition, x: condition + torch.randn_like(condition)),
    "vectors of a dropout": of(lambda self, condition, x: self.drop(condition), fused=True),
    "vectors of a dropout's function": of(lambda self, condition, x: F.dropout(condition, 0.5, self.training)),
    "numbers that follow the dtype": of(lambda self, condition, x: condition.clamp(torch.finfo(condition.dtype).min)),
    # twice as large for twice as many samples, and not thrice for thrice
    "numbers that follow powers": of(lambda self, condition, x: condition * (1 << x.shape[0].bit_length())),
    "numbers that follow the batch": of(
        lambda self, condition, x: condition.repeat(1, 2).reshape(x.shape[0], 2, -1)[:, 0].expand(len(x), -1) * x.shape[0],
        conditioned(3), conditioned(1), fused=True,
    ),
    "numbers that follow it otherwise": of(lambda self, condition, x: condition * (x.shape[0] + 1)),
    "a bias of the length": miss(
        variant(
            Layer, core=lambda self, q, k, v: F.scaled_dot_product_attention(
                q, k, v, self.factors.exp() * (torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])).abs()
            ),
        ),
    ),
    "numbers that are read on the host": miss(
        variant(Layer, mlp=lambda self, x: (y := Layer.mlp(self, x)) / (2 if y.abs().max() > 1e4 else 1)),
        change=larger("fc2.weight", 1e6),
    ),
    "another function": miss(Layer, change=set_to("act", F.relu), fused=True),
    "another configuration": miss(Layer, change=lambda layer: vars(layer.config).update(factor=0.5), fused=True),
    "another module": miss(Layer, change=lambda layer: setattr(layer, "proj", nn.Linear(WIDTH, WIDTH)), fused=True),
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
    for one in layer.modules():
        if isinstance(one, nn.Linear):
            one.weight.data.mul_(3)
    return layer


def with_mlp(forward):
    return miss(lambda: Llama(mlp=variant(Gated, forward=forward)()))


def gate(opened):
    return miss(lambda: large(Llama(variant(GatedAttention, opened=lambda self, gate: opened(gate))())))


def sinks(probabilities, fused=False):
    return miss(lambda: large(Llama(variant(WithSinks, probabilities=probabilities)())), fused=fused)


def softmax_with(scores, column):
    return F.softmax(torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1), -1)


def sinks_of_rows(self, scores):
    column = self.sinks.repeat(-(-scores.shape[-2] // HEADS))[: scores.shape[-2], None]
    return softmax_with(scores, column)[..., :-1]


NEAR_MISSES |= {
    "a host read": with_mlp(lambda mlp, x: limited(Gated.forward(mlp, x))),
    "changes its attributes": with_mlp(counting),
    "noise in training": with_mlp(noisy),
    "dropout before a branch": with_mlp(lambda mlp, x: Gated.forward(mlp, F.dropout(x, 0.1, mlp.training))),
    "a second output": miss(variant(Llama, forward=lambda self, x: ((y := Llama.forward(self, x)), y.mean()))),
    "a scaled input": miss(
        lambda: Llama(variant(Attention, forward=lambda self, x, *args: Attention.forward(self, 1.01 * x, *args))())
    ),
    "BatchNorm": miss(lambda: Llama(mlp=Gated(nn.Sequential(nn.BatchNorm1d(6), nn.SiLU()))), call(3)),
    "another activation": miss(lambda: Llama(mlp=Gated(nn.ELU()))),
    "scores beside the output": miss(lambda: Weighted(scores=True), call(3)),
    "a steep gate": gate(lambda gate: torch.sigmoid(1.5 * gate)),
    "a gate whose mean is 1": gate(lambda gate: 2 * torch.sigmoid(gate)),  # T5Gemma's
    "sinks of rows": sinks(sinks_of_rows),
    "scaled sinks": sinks(lambda self, scores: softmax_with(scores, 2 * self.sinks[:, None, None])[..., :-1]),
    "one more in each denominator": sinks(lambda self, scores: softmax_with(scores, scores.new_zeros(1))[..., :-1]),
    "sinks on scores": sinks(
        lambda self, scores: F.softmax(scores + self.sinks[:, None, None], -1), fused=True
    ),  # a bias
}


@pytest.mark.parametrize("why", NEAR_MISSES)
def test_other_calls_than_the_example_are_right(why):
    torch.manual_seed(0)
    layer, (x, kwargs), calls, change, fused = NEAR_MISSES[why]
    ours, theirs, conversion = pair(layer(), x, **kwargs)
    found = {"transformer_layer", "attention_block" if "gate" in why or "sink" in why else ""} & {*fused_of(conversion)}
    assert found == ({"transformer_layer"} if fused else set()), str(conversion)
    assert fused or all(row.reason for row in conversion.left)
    for one in (ours, theirs):
        torch.manual_seed(1)
        change(one)
    for x, kwargs in calls:
        assert_same(step(ours, x, **kwargs), step(theirs, x, **kwargs), 1e-4)


# -- layers that do something else than compute


def test_a_layer_that_is_skipped_at_random_is_left():
    def forward(self, x):
        return x if self.training and random.random() < 0.5 else Layer.forward(self, x)

    layer, state = variant(Layer, forward=forward)().train(), random.getstate()
    conversion = ckptkern.convert(layer, tokens())
    assert "Python's random numbers" in str(conversion)
    assert random.getstate() == state
    assert 0 < sum(layer(x) is x for x in [tokens()] * 64) < 64


def test_a_layer_that_changes_its_argument_is_left():
    def forward(self, x):
        y = Layer.forward(self, x)
        return x.add_(y) - x + y

    conversion = ckptkern.convert(variant(Layer, forward=forward)(), tokens())
    assert not conversion.converted
    assert "changes its arguments in place" in str(conversion)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_mask_of_the_memory_that_appears_later_is_covered(dtype):
    x, memory, mask = tokens().requires_grad_(), tokens(2, 5), torch.ones(2, 1, 6, 5, dtype=dtype)
    ours, theirs, _ = pair(Decoder(), x, memory=memory)
    after, before = (saved(one, x, memory=memory, memory_mask=mask) for one in (ours, theirs))
    assert after < before / 2


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


def test_an_argument_that_is_looked_at_counts():
    def forward(self, x, double=False):
        return Layer.forward(self, 2 * x if double else x)

    ours, theirs, _ = pair(variant(Layer, forward=forward)(), tokens())
    for kwargs in ({}, {"double": True}, {"double": False}):
        assert_same(step(ours, tokens(), **kwargs), step(theirs, tokens(), **kwargs))
