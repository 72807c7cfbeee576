"""convert on multi-head latent attention: layers written in several ways, and modules that look alike and differ."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from conversion.steps import assert_same_steps, pair, saved, variant
from support.architectures import HEADS, WIDTH, Llama, RMSNorm, adapted, fused_of, rotary, rotated
from torch import nn
from torch.nn import functional as F

import ckptkern
from ckptkern.parallel.roles import places_of

NOPE, ROPE, V, RANK = 6, 4, 5, 7


class Attention(nn.Module):
    """As DeepSeek's. What is otherwise in another is its methods, or an attribute that is set here."""

    q_rank, epsilon = 9, 1e-6

    def __init__(self):
        super().__init__()
        self.q_a, self.q_norm = (nn.Linear(WIDTH, self.q_rank), RMSNorm(self.q_rank)) if self.q_rank else (None, None)
        self.q = nn.Linear(self.q_rank or WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a, self.kv_norm = nn.Linear(WIDTH, RANK + ROPE), RMSNorm(RANK, self.epsilon)
        self.kv_b = nn.Linear(RANK, HEADS * (NOPE + V), bias=False)
        self.out, self.scaling = nn.Linear(HEADS * V, WIDTH, bias=False), (NOPE + ROPE) ** -0.5
        self.dropout = nn.Dropout(0.5)

    def latent(self, c):
        return self.kv_norm(c)

    def latents(self, x):
        c, shared = self.kv_a(x).split([RANK, ROPE], -1)
        return self.latent(c), shared[:, None]

    def rotate(self, q, k, cos, sin):
        cos, sin = cos[:, None], sin[:, None]
        return q * cos + rotated(q) * sin, k * cos + rotated(k) * sin

    def keys(self, k, shared):
        return torch.cat((k, shared.expand(-1, HEADS, -1, -1)), -1)

    def core(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)

    def forward(self, x, tables, mask=None):
        q = self.q(x if self.q_a is None else self.q_norm(self.q_a(x)))
        unrotated, q = q.view(*x.shape[:2], HEADS, -1).transpose(1, 2).split([NOPE, ROPE], -1)
        c, shared = self.latents(x)
        q, shared = self.rotate(q, shared, *tables)
        k, v = self.kv_b(c).view(*c.shape[:2], HEADS, -1).transpose(1, 2).split([NOPE, V], -1)
        o = self.core(torch.cat((unrotated, q), -1), self.keys(k, shared), v)
        return self.out(o.transpose(1, 2).flatten(2)), None


with_ = partial(variant, Attention)


def by_setitem(self, k, shared):
    """As DeepSeek's own code joins k."""
    joined = k.new_empty(*k.shape[:3], NOPE + ROPE)
    joined[:, :, :, :NOPE] = k
    joined[:, :, :, NOPE:] = shared
    return joined


def by_copy(self, k, shared):
    """As transformers does."""
    joined = k.new_empty(*k.shape[:3], NOPE + ROPE)
    joined[..., :NOPE].copy_(k)
    joined[..., NOPE:].copy_(shared.expand(-1, HEADS, -1, -1))
    return joined


def through_a_view(change):
    """What is done to a part of the joined k."""

    def keys(self, k, shared):
        joined = by_copy(self, k, shared)
        change(joined[..., NOPE:])
        return joined

    return with_(keys=keys)


def of_neighbours(self, q, k, cos, sin):
    """As DeepSeek-V3's in transformers."""
    cos, sin = (table[:, None, :, : ROPE // 2] for table in (cos, sin))
    pairs = [(heads[..., 0::2], heads[..., 1::2]) for heads in (q, k)]
    return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in pairs)


class Complex(Attention):
    """Pairs as complex numbers, as DeepSeek-V2's."""

    def rotate(self, q, k, turns):
        q, k = (torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous()) * turns[:, None] for heads in (q, k))
        return tuple(torch.view_as_real(heads).flatten(3) for heads in (q, k))


def scaled(self, q, k, v):
    """Not by the root of the head dim."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling * 1.37**2)


READ = {
    "cat": Attention, "one latent": with_(q_rank=0), "setitem": with_(keys=by_setitem), "copy": with_(keys=by_copy),
    "interleaved": with_(rotate=of_neighbours), "complex": Complex, "a scale": with_(core=scaled),
    "no norm": with_(latent=lambda self, c: c), "no rotation": with_(rotate=lambda self, q, k, *tables: (q, k)),
}  # fmt: skip


def given(attention, S=8):
    x = torch.randn(2, S, WIDTH, generator=torch.Generator().manual_seed(S))
    cos, sin = (table[..., : ROPE // 2].repeat(1, 1, 2) for table in rotary(x))
    return x, (torch.complex(cos, sin)[..., : ROPE // 2],) if isinstance(attention, Complex) else (cos, sin)


@pytest.mark.parametrize(("name", "whole"), [("cat", True), ("copy", True), *((name, False) for name in READ)])
def test_what_is_read_is_right_and_saves_less(name, whole):
    torch.manual_seed(0)
    attention = READ[name]()
    ours, theirs, conversion = pair(Llama(attention) if whole else attention, *given(attention), recompute="full")
    assert fused_of(conversion) == ["transformer_layer" if whole else "latent_attention_block"], str(conversion)
    x, tables = given(attention, 11)
    assert saved(ours, x.requires_grad_(), tables) < saved(theirs, x, tables) / 3
    assert_same_steps(ours, theirs, x.detach(), tables, tolerance=1e-4)


def masked(self, q, k, v):
    """The mask is no argument; as in attention of other kinds."""
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) * self.scaling).masked_fill(later, -torch.inf)
    return F.dropout(scores.softmax(-1), 0.0, self.training) @ v


NEAR_MISSES = {
    "a core written out": with_(core=masked),
    "two epsilons": with_(epsilon=1e-3),
    "q alone is rotated": with_(rotate=lambda self, q, k, *tables: (Attention.rotate(self, q, k, *tables)[0], k)),
    "a scale of one part of k": with_(keys=lambda self, k, shared: Attention.keys(self, k, shared * 0.5)),
    "a scale through a view of k": through_a_view(lambda part: part.mul_(0.5)),
    # beyond the example's numbers
    "a clamp through a view of k": through_a_view(lambda part: part.clamp_(-50, 50)),
    "a clamped latent": with_(latent=lambda self, c: self.kv_norm(c.clamp(-50, 50))),
    "a scaled latent": with_(latent=lambda self, c: self.kv_norm(c) * 2.0),  # LongCat's
    "a dropout of the latent": with_(latent=lambda self, c: self.dropout(self.kv_norm(c))),
    "a latent of another input": with_(latents=lambda self, x: Attention.latents(self, x.roll(1, 1))),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_is_left(name):
    torch.manual_seed(0)
    ours, theirs, conversion = pair(attention := NEAR_MISSES[name](), *given(attention))
    assert "latent_attention_block" not in fused_of(conversion), str(conversion)
    for module in (ours, theirs):
        module.kv_a.weight.data.mul_(100)
    assert_same_steps(ours, theirs, *given(attention, 11), tolerance=1e-4)


def test_low_rank_updates_of_a_latents_projections_are_left():
    attention = adapted(Attention(), "kv_b")
    assert "latent_attention_block" not in fused_of(ckptkern.convert(attention, *given(attention)))


def test_it_has_no_sharded_form():
    for module in (Attention(), Llama(Attention())):
        ckptkern.convert(module, *given(module))
        with pytest.raises(TypeError, match="has latent attention, which has no sharded form"):
            places_of(module, 2, False)


def test_the_scale_is_read_in_each_module():
    """A module whose scale was changed later is not what was checked."""
    ours, theirs, _ = pair(attention := Attention(), *given(attention))
    ours = copy.deepcopy(ours)
    ours.scaling = theirs.scaling = 0.2
    assert_same_steps(ours, theirs, *given(ours), tolerance=1e-4)
