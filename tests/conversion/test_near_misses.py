"""What a check on one example does not show: other sizes, numbers and settings than the example's. Such a layer is left, or
replaced rightly."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.architectures import HEADS, WIDTH, D, GatedAttention, Llama, WithSinks, rotary, rotated
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.memory import saved_tensors


class Layer(nn.Module):
    """A plain layer with a packed projection, in which each near-miss changes one step."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.act = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH), F.gelu
        self.config, self.scales = SimpleNamespace(factor=1.0), [1.0]
        cos, sin = rotary(torch.empty(1, 32, 1))
        self.register_buffer("cos", cos[0])
        self.register_buffer("sin", sin[0])

    def rotated(self, q: Tensor, **kwargs: Any) -> Tensor:
        return q

    def core(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def split(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.qkv(h).view(*h.shape[:2], 3, HEADS, D).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        q, k, v = self.split(self.norm1(x))
        o = self.core(self.rotated(q, **kwargs), self.rotated(k, **kwargs), v, **kwargs)
        x = x + self.proj(o.transpose(1, 2).reshape(x.shape)) * self.config.factor
        return x + self.down(self.act(self.up(self.norm2(x)))) * self.scales[0]


class Indexed(Layer):
    def rotated(self, q: Tensor, positions: Tensor) -> Tensor:
        return q * self.cos[positions][:, None] + rotated(q) * self.sin[positions][:, None]


class IndexedApart(Layer):
    """Keys at positions of their own, which in the example are those of queries."""

    def core(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, of_keys: Tensor) -> Tensor:
        q, k = (
            one * self.cos[at][:, None] + rotated(one) * self.sin[at][:, None]
            for one, at in ((q, positions), (k, of_keys))
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Shifted(Layer):
    def rotated(self, q: Tensor) -> Tensor:
        return q * self.cos[2 : 2 + q.shape[2]] + rotated(q) * self.sin[2 : 2 + q.shape[2]]


class Clamped(Layer):
    def rotated(self, q: Tensor) -> Tensor:
        return q.clamp(-8, 8)


class ClampedInPlace(Layer):
    def split(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv(h).view(*h.shape[:2], 3, HEADS, D)
        qkv[:, :, 0].clamp_(-8, 8)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)


class Windowed(Layer):
    """Attends within windows of 6 tokens, of which the example has one."""

    def forward(self, x: Tensor) -> Tensor:
        windows = self.norm1(x).view(-1, 6, WIDTH)
        q, k, v = self.split(windows)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ScaledByLength(Layer):
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=math.log(q.shape[2]) / 8)


class OneSequence(Layer):
    """Attends over the whole batch, of which the example has one sample."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.norm1(x).reshape(1, -1, WIDTH))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Cosine(Layer):
    """Queries and keys of length 1, and a factor for each head (Swin v2)."""

    def __init__(self):
        super().__init__()
        self.factors = nn.Parameter(torch.randn(HEADS, 1, 1))

    def units(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self.units(q, k)
        return (q @ k.transpose(-1, -2) * self.factors.clamp(max=4).exp()).softmax(-1) @ v


class CosineOfOne(Cosine):
    def units(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(q, dim=-1), k


class CosineOfTokens(Cosine):
    def units(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(q, dim=-2), F.normalize(k, dim=-2)


class CosineOfSums(Cosine):
    def units(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(q, 1, -1), F.normalize(k, 1, -1)


class Padded(Layer):
    """A mask [B, S] among the arguments."""

    def core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return ((q @ k.transpose(-1, -2)) * D**-0.5 + mask[:, None, None, :]).softmax(-1) @ v


class Sliced(Layer):
    """Rotary tables for more tokens than there are."""

    def rotated(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return q * cos[: q.shape[2]] + rotated(q) * sin[: q.shape[2]]


class AsComplex(Layer):
    """Pairs of neighbours as complex numbers (Llama's own code)."""

    def rotated(self, q: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(q.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(3).type_as(q)


class OtherComplex(AsComplex):
    """Rotates backwards."""

    def rotated(self, q: Tensor, turns: Tensor) -> Tensor:
        return super().rotated(q, turns.conj()) + 0.01 * q


class SkippedAtRandom(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and random.random() < 0.5 else super().forward(x)


class InPlace(Layer):
    """Adds to its argument, as the caller sees."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return x.add_(y) - x + y


class Decoder(Layer):
    """With cross-attention."""

    def __init__(self):
        super().__init__()
        self.norm3, self.q, self.kv, self.out = nn.LayerNorm(WIDTH), *(nn.Linear(WIDTH, n * WIDTH) for n in (1, 2, 1))

    def remembered(self, memory: Tensor) -> Tensor:
        return memory

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.norm1(x))
        x = x + self.proj(self.core(q, k, v).transpose(1, 2).reshape(x.shape))
        memory = self.remembered(memory)
        q = self.q(self.norm3(x)).view(*x.shape[:2], HEADS, D).transpose(1, 2)
        k, v = self.kv(memory).view(*memory.shape[:2], 2, HEADS, D).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, memory_mask)
        x = x + self.out(o.transpose(1, 2).reshape(x.shape))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Forgetful(Decoder):
    def remembered(self, memory: Tensor) -> Tensor:
        return memory[:, :5]


class Attached(Decoder):
    def remembered(self, memory: Tensor) -> Tensor:
        return memory.data


class Counting(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


class Limited(Layer):
    """Reads on the host whether numbers are large, which those of an example and of the check are not."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y / 2 if y.abs().max() > 1e4 else y


class Adaptive(Layer):
    """Scale, shift and gate of each sample, which a condition gives."""

    def __init__(self):
        super().__init__()
        self.norm3, self.vectors = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.order, self.head = [0, 1, 2], nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def of(self, condition: Tensor, x: Tensor) -> Tensor:
        return condition

    def modulated(self, h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return h * (1 + scale) + shift

    def gated(self, f: Tensor, gate: Tensor) -> Tensor:
        return gate * f

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.vectors(self.of(condition, x))[:, None].chunk(3, -1)
        scale, shift, gate = (parts[i] for i in self.order)
        q, k, v = self.split(self.norm1(x))
        x = x + self.proj(self.core(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.gated(self.down(F.gelu(self.up(self.modulated(self.norm2(x), scale, shift)))), gate)


class WithoutOne(Adaptive):
    def modulated(self, h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return h * scale + shift


class ShiftFirst(Adaptive):
    def modulated(self, h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return (h + shift) * (1 + scale)


class OfTokens(Adaptive):
    """The condition is [B, S, d]."""

    def modulated(self, h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return h * (1 + scale[:, 0]) + shift[:, 0]

    def gated(self, f: Tensor, gate: Tensor) -> Tensor:
        return f * gate[:, 0]


class GateBeforeADropout(Adaptive):
    def gated(self, f: Tensor, gate: Tensor) -> Tensor:
        return F.dropout(gate * f, 0.25, self.training)


class GateInANorm(Adaptive):
    def gated(self, f: Tensor, gate: Tensor) -> Tensor:
        return self.norm3(gate * f)


class Excited(Adaptive):
    """Of the input itself (squeeze and excitation)."""

    def of(self, condition: Tensor, x: Tensor) -> Tensor:
        return self.head(x.mean(1)) + condition


class Remembering(Adaptive):
    """A module inside, of which the trace sees what it is given alone, reads what forward has put there."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(self, condition: Tensor) -> Tensor:
            return self.weight * condition * self.seen

    def __init__(self):
        super().__init__()
        self.reader = self.Reader()

    def of(self, condition: Tensor, x: Tensor) -> Tensor:
        self.reader.seen = x.mean(1).detach()
        return self.reader(condition)


class Sampled(Adaptive):
    def of(self, condition: Tensor, x: Tensor) -> Tensor:
        return condition + torch.randn_like(condition)


class DroppedOut(Adaptive):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def of(self, condition: Tensor, x: Tensor) -> Tensor:
        return self.drop(condition)


class DroppedByAFunction(Adaptive):
    def of(self, condition: Tensor, x: Tensor) -> Tensor:
        return F.dropout(condition, 0.5, self.training)


class AboveTheLeast(Adaptive):
    """A number that follows the dtype."""

    def of(self, condition: Tensor, x: Tensor) -> Tensor:
        return condition.clamp(torch.finfo(condition.dtype).min)


class OfPowers(Adaptive):
    """A number that is twice as large for twice as many samples, and not thrice for thrice."""

    def of(self, condition: Tensor, x: Tensor) -> Tensor:
        return condition * (1 << x.shape[0].bit_length())


class OfSamples(Adaptive):
    """Sizes of the example's batch."""

    def of(self, condition: Tensor, x: Tensor) -> Tensor:
        return condition.repeat(1, 2).reshape(x.shape[0], 2, -1)[:, 0].expand(len(x), -1) * x.shape[0]


class OfMoreThanSamples(Adaptive):
    def of(self, condition: Tensor, x: Tensor) -> Tensor:
        return condition * (x.shape[0] + 1)


class OfLength(Adaptive):
    def of(self, condition: Tensor, x: Tensor) -> Tensor:
        return condition * x.shape[1]


class Biased(Layer):
    """A bias of attention that is computed of a parameter, of as many rows as the input has."""

    def __init__(self):
        super().__init__()
        self.slopes = nn.Parameter(torch.randn(HEADS, 1, 1))

    def distances(self, S: int) -> Tensor:
        return torch.arange(S)[:, None] - torch.arange(S)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.slopes.exp() * self.distances(q.shape[2]).abs())


def tokens(B: int = 2, S: int = 6) -> Tensor:
    return torch.randn(B, S, WIDTH)


def tables(S: int) -> dict[str, Tensor]:
    return {name: table[0] for name, table in zip(("cos", "sin"), rotary(torch.empty(1, S, 1)), strict=True)}


def conditioned(B: int = 2, S: int = 6) -> tuple[Tensor, dict[str, Tensor]]:
    return tokens(B, S), {"condition": torch.randn(B, WIDTH)}


def turns(S: int) -> dict[str, Tensor]:
    angles = torch.arange(S)[:, None] * 100.0 ** (-torch.arange(0, D, 2) / D)
    return {"turns": torch.polar(torch.ones_like(angles), angles)}


X = torch.randn(2, 6, WIDTH)


def set_to(name: str, value: Any) -> Callable[[Layer], None]:
    return lambda layer: setattr(layer, name, value)


# The layer; an example; calls that are other than the example; what is changed before these.
NEAR_MISSES: dict[str, tuple[type[Layer], tuple, list[tuple], Callable[[Layer], Any]]] = {
    "rows of tables that a tensor chooses": (
        Indexed, (tokens(), {"positions": torch.arange(6)[None]}),
        [(tokens(), {"positions": torch.tensor([[0, 1, 2, 0, 1, 2]])})], lambda layer: None,
    ),
    "other positions of keys": (
        IndexedApart, (tokens(), {"positions": torch.arange(6)[None], "of_keys": torch.arange(6)[None]}),
        [(tokens(), {"positions": torch.arange(6)[None], "of_keys": torch.arange(6).flip(0)[None]})], lambda layer: None,
    ),
    "tables from their third row": (Shifted, (tokens(), {}), [(tokens(2, 9), {})], lambda layer: None),
    "a clamp beyond the example's numbers": (
        Clamped, (tokens(), {}), [(tokens(), {})], lambda layer: layer.qkv.weight.data.mul_(50),
    ),
    "a clamp of a view in place": (
        ClampedInPlace, (tokens(), {}), [(tokens(), {})], lambda layer: layer.qkv.weight.data.mul_(50),
    ),
    "a window as long as the example": (Windowed, (tokens(), {}), [(tokens(2, 12), {})], lambda layer: None),
    "a scale of the length": (ScaledByLength, (tokens(), {}), [(tokens(2, 12), {})], lambda layer: None),
    "a batch that is one sequence": (OneSequence, (tokens(1), {}), [(tokens(3), {})], lambda layer: None),
    "a mask of keys": (
        Padded, (tokens(1), {"mask": torch.zeros(1, 6)}),
        [(tokens(2), {"mask": torch.randn(2, 6)}), (tokens(6), {"mask": torch.randn(6, 6)})], lambda layer: None,
    ),
    "cosines": (Cosine, (tokens(), {}), [(tokens(3, 9), {})], lambda layer: None),
    "cosines of q alone": (CosineOfOne, (tokens(), {}), [(tokens(), {})], lambda layer: None),
    "cosines of tokens": (CosineOfTokens, (tokens(), {}), [(tokens(), {})], lambda layer: None),
    "another length than the root of squares": (CosineOfSums, (tokens(), {}), [(tokens(), {})], lambda layer: None),
    "longer tables": (Sliced, (tokens(2, 12), tables(12)), [(tokens(2, 5), tables(12))], lambda layer: None),
    "pairs as complex numbers": (AsComplex, (tokens(), turns(6)), [(tokens(2, 9), turns(9))], lambda layer: None),
    "other complex numbers": (OtherComplex, (tokens(), turns(6)), [(tokens(2, 9), turns(9))], lambda layer: None),
    "a memory that was the input": (
        Decoder, (X, {"memory": X}), [(tokens(), {"memory": tokens(2, 5)}), (tokens(), {"memory": tokens(2, 6)})],
        lambda layer: None,
    ),
    "a mask of the memory": (
        Decoder, (tokens(), {"memory": tokens(2, 5)}), [
            (tokens(), {"memory": tokens(2, 5), "memory_mask": torch.rand(2, 1, 6, 5) > 0.3}),
            (tokens(3), {"memory": tokens(3, 9), "memory_mask": torch.randn(1, 1, 6, 9)}),
            (tokens(), {"memory": tokens(1, 5)}),
        ], lambda layer: None,
    ),
    "one memory for all": (
        Decoder, (tokens(1), {"memory": tokens(1, 5)}), [(tokens(3), {"memory": tokens(3, 4)})], lambda layer: None,
    ),
    "a memory that is cut": (
        Forgetful, (tokens(), {"memory": tokens(2, 5)}), [(tokens(), {"memory": tokens(2, 9)})], lambda layer: None,
    ),
    "a memory without a gradient": (
        Attached, (tokens(), {"memory": tokens(2, 5)}), [(tokens(), {"memory": tokens(2, 5)})], lambda layer: None,
    ),
    "vectors of each sample": (
        Adaptive, conditioned(), [conditioned(), conditioned(5, 9), conditioned(1)], lambda layer: None,
    ),
    "vectors of one sample": (Adaptive, conditioned(1), [conditioned(3), conditioned(1, 9)], lambda layer: None),
    "vectors in another order": (Adaptive, conditioned(), [conditioned()], set_to("order", [1, 0, 2])),
    "vectors that more is done to": (
        Adaptive, conditioned(), [conditioned()], lambda layer: layer.vectors.register_forward_hook(lambda *call: 2 * call[2]),
    ),
    "a scale without 1": (WithoutOne, conditioned(), [conditioned()], lambda layer: None),
    "a shift before the scale": (ShiftFirst, conditioned(), [conditioned()], lambda layer: None),
    "vectors of each token": (
        OfTokens, (tokens(), {"condition": tokens()}), [(tokens(3, 9), {"condition": tokens(3, 9)})], lambda layer: None,
    ),
    "a gate before a dropout": (GateBeforeADropout, conditioned(), [conditioned()], lambda layer: None),
    "a gate in a norm": (GateInANorm, conditioned(), [conditioned()], lambda layer: None),
    "vectors of the input": (Excited, conditioned(), [conditioned()], lambda layer: None),
    "vectors of what was put aside": (Remembering, conditioned(), [conditioned()], lambda layer: None),
    "sampled vectors": (Sampled, conditioned(), [conditioned()], lambda layer: None),
    "vectors of a dropout": (DroppedOut, conditioned(), [conditioned(), conditioned(5)], lambda layer: None),
    "vectors of a dropout's function": (DroppedByAFunction, conditioned(), [conditioned()], lambda layer: None),
    "numbers that follow the dtype": (AboveTheLeast, conditioned(), [conditioned()], lambda layer: None),
    "numbers that follow powers": (OfPowers, conditioned(), [conditioned(3)], lambda layer: None),
    "numbers that follow the batch": (OfSamples, conditioned(), [conditioned(3), conditioned(1)], lambda layer: None),
    "numbers that follow it otherwise": (OfMoreThanSamples, conditioned(), [conditioned(3)], lambda layer: None),
    "numbers that follow the length": (OfLength, conditioned(), [conditioned(2, 9)], lambda layer: None),
    "a bias of the length": (Biased, (tokens(), {}), [(tokens(2, 9), {})], lambda layer: None),
    "numbers that are read on the host": (
        Limited, (tokens(), {}), [(tokens(), {})], lambda layer: layer.down.weight.data.mul_(1e6),
    ),
    "another function": (Layer, (tokens(), {}), [(tokens(), {})], set_to("act", F.relu)),
    "another configuration": (Layer, (tokens(), {}), [(tokens(), {})], lambda layer: vars(layer.config).update(factor=0.5)),
    "another list": (Layer, (tokens(), {}), [(tokens(), {})], lambda layer: layer.scales.insert(0, 0.5)),
    "an untied weight": (
        Layer, (tokens(), {}), [(tokens(), {})],
        lambda layer: set_to("proj", nn.Linear(WIDTH, WIDTH))(layer),
    ),
}  # fmt: skip


def step(layer: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> list[Tensor | None]:
    x = x.clone().requires_grad_()
    inputs = {name: value.clone().requires_grad_() for name, value in kwargs.items() if name in ("memory", "condition")}
    torch.manual_seed(0)
    y = layer(x, **kwargs | inputs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
    return [y, *torch.autograd.grad(y, [x, *inputs.values(), *layer.parameters()], dy, allow_unused=True)]


@pytest.mark.parametrize("why", NEAR_MISSES)
def test_other_calls_than_the_example_are_right(why: str) -> None:
    kind, (x, kwargs), calls, change = NEAR_MISSES[why]
    torch.manual_seed(0)
    layer = kind()
    original = copy.deepcopy(layer)
    ckptkern.convert(layer, x, **kwargs)
    for one in (layer, original):
        torch.manual_seed(1)
        change(one)
    for x, kwargs in calls:
        torch.testing.assert_close(step(layer, x, kwargs), step(original, x, kwargs), rtol=1e-4, atol=1e-4)


# -- gates and sinks that look like those that are fused


class HardGate(GatedAttention):
    def opened(self, gate: Tensor) -> Tensor:
        return F.hardsigmoid(gate)


class TanhGate(GatedAttention):
    def opened(self, gate: Tensor) -> Tensor:
        return torch.tanh(gate)


class SteepGate(GatedAttention):
    def opened(self, gate: Tensor) -> Tensor:
        return torch.sigmoid(1.5 * gate)


class TwiceGate(GatedAttention):
    """As T5Gemma's Hadamard gates, whose mean is 1."""

    def opened(self, gate: Tensor) -> Tensor:
        return 2 * torch.sigmoid(gate)


class GateFirst(GatedAttention):
    """Of each head the gate lies before q."""

    def __init__(self):
        super().__init__()
        q_proj, kind = (
            self.q_proj,
            type("Swapped", (nn.Linear,), {"forward": lambda m, x: swapped(nn.Linear.forward(m, x))}),
        )
        q_proj.__class__ = kind


def swapped(y: Tensor) -> Tensor:
    return y.view(*y.shape[:-1], HEADS, 2, D).flip(-2).flatten(-3)


class GateBehind(GatedAttention):
    """The gate meets what the output projection gives."""

    def __init__(self):
        super().__init__("columns")
        self.gate_proj = nn.Linear(WIDTH, WIDTH, False)

    def opened(self, gate: Tensor) -> Tensor:
        return torch.ones_like(gate)

    def forward(self, x: Tensor, *args: Any) -> tuple[Tensor, None]:
        return super().forward(x, *args)[0] * torch.sigmoid(self.gate_proj(x)), None


class GateOfInput(Llama):
    """The gate reads the layer's input, and q its norm."""

    def __init__(self):
        super().__init__(GatedAttention("columns"))

    def forward(self, x: Tensor) -> Tensor:
        self_attn, gate = self.self_attn, torch.sigmoid(self.self_attn.gate_proj(x))
        h = self.input_layernorm(x)
        q, k = self_attn.heads(self_attn.q_proj(h)), self_attn.heads(self_attn.k_proj(h))
        q, k, v = self_attn.q_norm(q), self_attn.k_norm(k), self_attn.heads(self_attn.v_proj(h))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        x = x + self_attn.o_proj(o * gate)
        return x + self.mlp(self.post_attention_layernorm(x))


class AddedSinks(WithSinks):
    """The denominator has the sinks themselves, not their exponentials."""

    def probabilities(self, scores: Tensor) -> Tensor:
        exponentials = scores.exp()
        return exponentials / (exponentials.sum(-1, keepdim=True) + self.sinks.abs()[:, None, None])


class SinksOnScores(WithSinks):
    """Every score has the sink, which then changes nothing."""

    def probabilities(self, scores: Tensor) -> Tensor:
        return F.softmax(scores + self.sinks[:, None, None], -1)


class SinksOfRows(WithSinks):
    """Of the last rows, one sink for each."""

    def probabilities(self, scores: Tensor) -> Tensor:
        column = self.sinks.repeat(-(-scores.shape[-2] // HEADS))[: scores.shape[-2], None]
        return F.softmax(torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1), -1)[..., :-1]


class FirstLeftOut(WithSinks):
    """The sinks are the last column, and the first is left out."""

    def probabilities(self, scores: Tensor) -> Tensor:
        column = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        return F.softmax(torch.cat([scores, column], -1), -1)[..., 1:]


class ScaledSinks(WithSinks):
    def probabilities(self, scores: Tensor) -> Tensor:
        column = 2 * self.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        return F.softmax(torch.cat([scores, column], -1), -1)[..., :-1]


class OneMore(WithSinks):
    """One more in each denominator, as a sink of 0 that is no parameter."""

    def probabilities(self, scores: Tensor) -> Tensor:
        return F.softmax(torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 1)], -1), -1)[..., :-1]


LIKE_GATES_AND_SINKS = (
    HardGate, TanhGate, SteepGate, TwiceGate, GateFirst, GateBehind, AddedSinks, SinksOfRows, FirstLeftOut, ScaledSinks,
    OneMore,
)  # fmt: skip


@pytest.mark.parametrize("kind", [*LIKE_GATES_AND_SINKS, GateOfInput])
def test_what_looks_like_a_gate_or_sinks(kind: type) -> None:
    """Is refused, and computes what it did."""
    torch.manual_seed(0)
    layer = kind() if kind is GateOfInput else Llama(kind())
    for one in layer.modules():
        if isinstance(one, nn.Linear):
            one.weight.data.mul_(3)  # gates and scores of order 1
    original, x = copy.deepcopy(layer), tokens()
    conversion = ckptkern.convert(layer, x)
    assert not {"transformer_layer", "attention_block"} & {row.replaced_by for row in conversion.rows}, str(conversion)
    torch.testing.assert_close(step(layer, x, {}), step(original, x, {}), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [WithSinks, GatedAttention, SinksOnScores])
def test_those_that_are_fused(kind: type) -> None:
    """The last with a bias, which is trained."""
    layer, x = Llama(kind()), tokens()
    original = copy.deepcopy(layer)
    conversion = ckptkern.convert(layer, x)
    assert [row.replaced_by for row in conversion.converted] == ["transformer_layer"], str(conversion)
    torch.testing.assert_close(step(layer, x, {}), step(original, x, {}), rtol=1e-4, atol=1e-4)


REPLACED = {
    "a mask of keys", "longer tables", "another function", "another configuration", "another list", "pairs as complex numbers",
    "a memory that was the input", "a mask of the memory", "one memory for all", "vectors of each sample",
    "vectors of one sample", "vectors in another order", "vectors that more is done to", "numbers that follow the batch",
    "vectors of a dropout", "cosines", "rows of tables that a tensor chooses",
}  # fmt: skip


@pytest.mark.parametrize("why", NEAR_MISSES)
def test_which_of_them_are_replaced(why: str) -> None:
    kind, (x, kwargs), _, _ = NEAR_MISSES[why]
    whole = [row.replaced_by for row in ckptkern.convert(kind(), x, **kwargs).converted] == ["transformer_layer"]
    assert whole == (why in REPLACED or why == "an untied weight")


def test_a_layer_that_is_skipped_at_random_is_left() -> None:
    layer, state = SkippedAtRandom().train(), random.getstate()
    conversion = ckptkern.convert(layer, tokens())
    assert "Python's random numbers" in str(conversion)
    assert random.getstate() == state
    outputs = [layer(x) is x for x in [tokens()] * 64]
    assert 0 < sum(outputs) < 64


def test_a_layer_that_counts_its_calls_counts_them() -> None:
    layer = Counting()
    ckptkern.convert(layer, tokens())
    for _ in range(3):
        layer(tokens().requires_grad_()).sum().backward()
    assert layer.calls == 3


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_mask_of_the_memory_that_appears_later_is_covered(dtype: torch.dtype) -> None:
    layer, x, memory = Decoder(), tokens().requires_grad_(), tokens(2, 5)
    mask = torch.ones(2, 1, 6, 5, dtype=dtype)

    def saved() -> int:
        with saved_tensors([*layer.parameters(), memory, mask]) as saved:
            layer(x, memory, mask)
        return saved.bytes

    before = saved()
    ckptkern.convert(layer, x, memory)
    assert saved() < before / 3


def test_a_layer_that_changes_its_argument_is_left() -> None:
    conversion = ckptkern.convert(InPlace(), tokens())
    assert not conversion.converted
    assert "changes its arguments in place" in str(conversion)


def test_arguments_that_nobody_looks_at_do_not_count() -> None:
    """Trainers hand a step's numbers to every layer, which hands them on to functions that take any keyword."""
    layer, x = Layer(), tokens()

    def saved(**kwargs: Any) -> int:
        with saved_tensors(layer) as saved:
            layer(x.requires_grad_(), **kwargs)
        return saved.bytes

    before = saved()
    ckptkern.convert(layer, x, count=torch.tensor(3))  # a number that nobody names is refused
    after = saved(count=3)
    assert after < before / 3
    for kwargs in ({}, {"count": 4}, {"count": torch.tensor(5)}, {"other": 1}, {"other": 2, "count": None}):
        assert saved(**kwargs) == after, kwargs
    layer.double()
    x = x.detach().double()
    after = saved(count=5)
    assert saved(later=6) == after, "names are tried on the module as it is now"


def test_an_argument_that_is_looked_at_counts() -> None:
    class Doubling(Layer):
        def forward(self, x: Tensor, double: bool = False) -> Tensor:
            return super().forward(2 * x if double else x)

    layer, x = Doubling(), tokens()
    single, twice = layer(x), layer(x, double=True)
    ckptkern.convert(layer, x)
    torch.testing.assert_close(layer(x), single)
    torch.testing.assert_close(layer(x, double=True), twice)
    torch.testing.assert_close(layer(x, double=False), single)
