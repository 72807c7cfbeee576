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
from support.architectures import HEADS, WIDTH, D, rotary, rotated
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


def tokens(B: int = 2, S: int = 6) -> Tensor:
    return torch.randn(B, S, WIDTH)


def tables(S: int) -> dict[str, Tensor]:
    return {name: table[0] for name, table in zip(("cos", "sin"), rotary(torch.empty(1, S, 1)), strict=True)}


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
    inputs = {name: value.clone().requires_grad_() for name, value in kwargs.items() if name == "memory"}
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


REPLACED = {
    "a mask of keys", "longer tables", "pairs as complex numbers", "another function", "another configuration", "another list",
    "a memory that was the input", "a mask of the memory", "one memory for all",
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
