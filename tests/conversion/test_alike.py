"""Layers that are like one that was checked: which are, which are not, and what is then not run again."""

from __future__ import annotations

import functools

import pytest
import torch
from support.architectures import (
    ARCHITECTURES,
    WIDTH,
    Attention,
    Llama,
    RMSNorm,
    Stack,
    adapted,
    fused_of,
    ids,
    results,
)
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion import fuse
from ckptkern.conversion.alike import Numbers


@pytest.fixture
def attempts(monkeypatch) -> list[str]:
    """The modules that were checked by themselves."""
    made, original = [], fuse.attempt

    def attempt(form, args, kwargs):
        if not isinstance(form.module, Stack):  # which is read if it has one layer
            made.append(type(form.module).__name__)
        return original(form, args, kwargs)

    monkeypatch.setattr(fuse, "attempt", attempt)
    return made


class Numbered(Llama):
    """As libraries number their layers, and branch on it."""

    def __init__(self, layer_idx: int, every: int = 0, **options):
        super().__init__(**options)
        self.layer_idx, self.every, self.path = layer_idx, every, f"model.layers.{layer_idx}.mlp"

    def forward(self, x: Tensor, tables=None, attention_mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, tables, attention_mask)
        return 2.0 * y if self.every and self.layer_idx % self.every == 1 else y


def stack(*layers: nn.Module) -> Stack:
    torch.manual_seed(0)
    model = Stack(lambda: layers[0])
    model.layers = nn.ModuleList(layers)
    return model.train()


def assert_converted(model: nn.Module, replaced_by: list[str]) -> None:
    theirs = results(model)
    assert fused_of(ckptkern.convert(model, ids())) == replaced_by
    torch.testing.assert_close(results(model), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt", "bert", "buffers", "decoder"])
def test_the_second_layer_is_compared_once(name: str, attempts: list[str]) -> None:
    model = ARCHITECTURES[name].model().train()
    assert_converted(model, [*ARCHITECTURES[name].replaced_by] * 2)
    once = len(attempts)
    del attempts[:]
    model.layers = model.layers[:1]
    ckptkern.convert(model, ids())
    assert len(attempts) == once


def test_numbered_layers_and_adapters_are_alike(attempts: list[str]) -> None:
    assert_converted(stack(*(adapted(Numbered(i)) for i in range(4))), ["transformer_layer"] * 4)
    alone = len(attempts)
    del attempts[:]
    ckptkern.convert(stack(Numbered(0)), ids())
    assert alone == len(attempts)


def another_scale() -> Llama:
    layer = Llama()
    layer.self_attn.scaling = 0.1
    return layer


def another_buffer() -> nn.Module:
    """Rows that no example reaches are no longer causal, so that the mask is not."""
    layer = ARCHITECTURES["buffers"].layer()
    layer.seen = layer.seen.clone()
    layer.seen[..., -1, 0] = 0
    return layer


def another_eps() -> Llama:
    layer = Llama()
    layer.post_attention_layernorm.variance_epsilon = 1e-3
    return layer


class Called(Llama):
    """An activation in an attribute."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation
        self.mlp.forward = None

    def forward(self, x: Tensor, tables=None, attention_mask=None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), tables, attention_mask)[0]
        h = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(self.activation(self.mlp.gate_proj(h)) * self.mlp.up_proj(h))


def tied() -> Llama:
    layer = Llama()
    layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight
    return layer


DIFFERENT = {
    "a scale": (Llama, another_scale),
    "a buffer": (ARCHITECTURES["buffers"].layer, another_buffer),
    "an epsilon": (Llama, another_eps),
    "shapes": (Llama, lambda: Llama(Attention(kv_heads=1))),
    "a module": (Llama, lambda: Llama(norm=nn.LayerNorm)),
    "an activation inside": (Llama, lambda: Llama(Attention(), ARCHITECTURES["gemma"].layer().mlp)),
    "one weight in two places": (Llama, tied),
    "frozen": (Llama, lambda: Llama().requires_grad_(False)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_other_layers_are_checked_by_themselves(what: str, attempts: list[str]) -> None:
    first, second = DIFFERENT[what]
    torch.manual_seed(0)
    model = stack(first(), second(), first())
    theirs = results(model)
    replaced = [row.replaced_by for row in ckptkern.convert(model, ids()) if row.name.count(".") == 1]
    assert replaced[::2] == ["transformer_layer"] * 2
    torch.testing.assert_close(results(model), theirs, rtol=1e-4, atol=1e-5)
    different = len(attempts)
    del attempts[:]
    ckptkern.convert(stack(first()), ids())
    assert different > len(attempts)


def test_a_layer_that_does_another_thing_by_its_number_is_not_taken_for_the_first(attempts: list[str]) -> None:
    model = stack(*(Numbered(i, every=2) for i in range(3)))
    theirs = results(model)
    conversion = ckptkern.convert(model, ids())
    assert [row.name for row in conversion.converted if row.replaced_by == "transformer_layer"] == [
        "layers.0",
        "layers.2",
    ]
    torch.testing.assert_close(results(model), theirs, rtol=1e-4, atol=1e-5)


class ByLength(Numbered):
    """Beyond some length the second layer does another thing: the example does not show it, twice as many tokens do."""

    def forward(self, x: Tensor, tables=None, attention_mask: Tensor | None = None) -> Tensor:
        y, is_long = Llama.forward(self, x, tables, attention_mask), x.shape[1] > 8
        return 2.0 * y if is_long and self.layer_idx == 1 else y


def test_another_length_is_compared_too() -> None:
    model = stack(ByLength(0), ByLength(1))
    conversion = ckptkern.convert(model, ids())
    assert "layers.1" not in [row.name for row in conversion.converted if row.replaced_by == "transformer_layer"]


class Clamped(Numbered):
    """The second layer clamps what no check's numbers reach."""

    def forward(self, x: Tensor, tables=None, attention_mask: Tensor | None = None) -> Tensor:
        x = x.clamp(-1e6, 1e6) if self.layer_idx == 1 else x
        return Llama.forward(self, x, tables, attention_mask)


def test_another_trace_is_checked_by_itself(attempts: list[str]) -> None:
    conversion = ckptkern.convert(stack(Clamped(0), Clamped(1)), ids(), otherwise="leave")
    assert [row.replaced_by for row in conversion if row.name == "layers.0"] == ["transformer_layer"]
    assert "layers.1" not in [row.name for row in conversion.converted]


class Masked(Attention):
    """With a mask it has another scale."""

    def __init__(self, masked_scaling: float):
        super().__init__()
        self.masked_scaling = masked_scaling

    def forward(self, x: Tensor, tables=None, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        q, k, v = (self.heads(one(x)) for one in (self.q_proj, self.k_proj, self.v_proj))
        scale = self.scaling if attention_mask is None else self.masked_scaling
        o = F.scaled_dot_product_attention(
            q, k, v, attention_mask, is_causal=attention_mask is None, scale=scale, enable_gqa=True
        )
        return self.o_proj(o.transpose(1, 2).flatten(2)), None


def test_an_attribute_that_the_examples_call_does_not_read() -> None:
    model = stack(Llama(Masked(0.3)), Llama(Masked(0.9)))
    assert fused_of(ckptkern.convert(model, ids())) == ["transformer_layer"] * 2
    x, mask = torch.randn(2, 6, WIDTH), torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    for layer in model.layers:
        torch.testing.assert_close(layer(x, None, mask), type(layer).forward(layer, x, None, mask))


class Gained(RMSNorm):
    """A factor that is neither parameter nor buffer."""

    def __init__(self, gain: float):
        super().__init__(WIDTH)
        self.gain = torch.tensor(gain)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


def test_numbers_that_nothing_else_shows() -> None:
    model = stack(*(Llama(norm=lambda width, gain=gain: Gained(gain)) for gain in (1.0, 2.0)))
    conversion = ckptkern.convert(model, ids())
    assert [row.name for row in conversion.converted if row.replaced_by == "transformer_layer"] == ["layers.0"]


def test_functions_in_attributes_are_compared_by_identity(attempts: list[str]) -> None:
    torch.manual_seed(0)
    activations = [lambda z: F.silu(z), lambda z: F.silu(z), functools.partial(F.gelu), functools.partial(F.relu)]
    model = stack(*map(Called, activations))
    theirs = results(model)
    ckptkern.convert(model, ids())
    torch.testing.assert_close(results(model), theirs, rtol=1e-4, atol=1e-5)


class Node:
    """Holds what holds it."""

    def __init__(self):
        self.other = Config(back=self)


def test_what_cannot_be_compared_is_checked_by_itself(attempts: list[str]) -> None:
    layers = [Llama(), Llama()]
    for layer in layers:
        layer.node = Node()
    assert_converted(stack(*layers), ["transformer_layer"] * 2)
    together = len(attempts)
    del attempts[:]
    ckptkern.convert(stack(layers[0]), ids())
    assert together == 2 * len(attempts)


class Config:
    def __init__(self, **values):
        self.__dict__.update(values)


SAME = [
    (3, 4), ("layers.3.mlp", "layers.4.mlp"), ([3, {"a": "x.3"}], [4, {"a": "x.4"}]), ({1, 2}, {2, 1}), (0.5, 0.5),
    (Config(a=3, b=[1]), Config(a=4, b=[1])),
]  # fmt: skip
OTHER = [
    (4, 3), (3, 5), (True, 1), ("layers.3", "layers.5"), ("a", "b"), ([3], (4,)), ([3], [4, 4]), ({"a": 1}, {"b": 1}),
    (0.5, 0.25), (lambda: 1, lambda: 2), (functools.partial(F.gelu), functools.partial(F.relu)), (object(), object()),
    (Config(), Config()), (Config(a=1), Config(a=2)),
]  # fmt: skip


@pytest.mark.parametrize(("x", "y"), SAME)
def test_values_that_are_the_same_but_for_a_layers_number(x, y) -> None:
    assert Numbers(3, 4).same(x, y)


@pytest.mark.parametrize(("x", "y"), OTHER)
def test_values_that_are_not(x, y) -> None:
    assert not Numbers(3, 4).same(x, y)
