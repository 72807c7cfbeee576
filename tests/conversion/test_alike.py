"""Layers that are like one that was checked: which are, which are not, and what is then not run again."""

from __future__ import annotations

import functools

import pytest
import torch
from conversion.steps import assert_same_steps, pair, variant
from support.architectures import ARCHITECTURES, WIDTH, Attention, Gated, Llama, RMSNorm, Stack, adapted, ids
from torch import nn
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion import fuse
from ckptkern.conversion.alike import Numbers


@pytest.fixture
def attempts(monkeypatch):
    """Returns how many modules of a stack of these layers were checked by themselves."""
    attempted, original = [], fuse.tried

    def tried(form, call, like=None):
        if like is None and not isinstance(form.module, Stack):  # which is read if it has one layer
            attempted.append(type(form.module).__name__)
        return original(form, call, like)

    def count(model):
        del attempted[:]
        ckptkern.convert(model, ids())
        return len(attempted)

    monkeypatch.setattr(fuse, "tried", tried)
    return count


class Numbered(Llama):
    """As libraries number their layers, and branch on it."""

    def __init__(self, layer_idx):
        super().__init__()
        self.layer_idx, self.path = layer_idx, f"model.layers.{layer_idx}.mlp"

    def changed(self, x, y):
        return y

    def forward(self, x, tables=None, attention_mask=None):
        return self.changed(x, super().forward(x, tables, attention_mask))


def numbered(changed):
    kind = variant(Numbered, changed=changed)
    return [kind(i) for i in range(3)]


def stack(*layers):
    model = Stack(lambda: layers[0])
    model.layers = nn.ModuleList(layers)
    return model.train()


@pytest.mark.parametrize("name", ["llama", "phi3", "decoder"])
def test_the_second_layer_is_compared_once(name, attempts):
    model = ARCHITECTURES[name].model().train()
    once = attempts(model)
    model.layers = model.layers[:1]
    assert attempts(model) == once


@pytest.mark.slow
def test_numbered_layers_and_adapters_are_alike(attempts):
    layers = [adapted(Numbered(i)) for i in range(3)]
    ours, theirs, conversion = pair(stack(*layers), ids())
    assert len(conversion.converted) == 3
    assert_same_steps(ours, theirs, ids())
    assert attempts(stack(*layers)) == attempts(stack(layers[0]))


def with_(change, layer=Llama):
    module = layer()
    change(module)
    return module


def not_causal_beyond(layer):
    """Rows that no example reaches are no longer causal, so that the mask is not."""
    layer.seen = layer.seen.clone()
    layer.seen[..., -1, 0] = 0


class Gained(RMSNorm):
    """A factor that is neither parameter nor buffer."""

    def __init__(self, gain):
        super().__init__(WIDTH)
        self.gain = torch.tensor(gain)

    def forward(self, x):
        return super().forward(x) * self.gain


class Config:
    def __init__(self, **values):
        self.__dict__.update(values)


def held_by_itself():
    node = Config()
    node.other = Config(back=node)
    return with_(lambda layer: setattr(layer, "node", node))


buffers = ARCHITECTURES["buffers"].layer
ALL, FIRST = ["layers.0", "layers.1", "layers.2"], ["layers.0", "layers.2"]
DIFFERENT = {
    "a scale": (lambda: [Llama(), with_(lambda layer: setattr(layer.self_attn, "scaling", 0.1)), Llama()], ALL),
    "a buffer": (lambda: [buffers(), with_(not_causal_beyond, buffers), buffers()], FIRST),
    "a module": (lambda: [Llama(), Llama(norm=nn.LayerNorm), Llama()], ALL),
    "one weight in two places": (
        lambda: [Llama(), with_(lambda layer: setattr(layer.mlp.up_proj, "weight", layer.mlp.gate_proj.weight)), Llama()], ALL
    ),
    "frozen": (lambda: [Llama(), Llama().requires_grad_(False), Llama()], ALL),
    "functions": (lambda: [Llama(mlp=Gated(act)) for act in (lambda z: F.silu(z), functools.partial(F.relu), F.gelu)], ALL),
    "what cannot be compared": (lambda: [held_by_itself(), held_by_itself(), Llama()], ALL),
    "a number": (lambda: numbered(lambda self, x, y: 2.0 * y if self.layer_idx == 1 else y), FIRST),
    # the example does not show it, twice as many tokens do
    "a length": (lambda: numbered(lambda self, x, y: 2.0 * y if self.layer_idx == 1 and x.shape[1] > 8 else y), FIRST),
    # no check's numbers reach it, a trace does
    "a clamp": (lambda: numbered(lambda self, x, y: y.clamp(-1e6, 1e6) if self.layer_idx == 1 else y), FIRST),
    "numbers that nothing else shows": (
        lambda: [Llama(norm=lambda width, gain=gain: Gained(gain)) for gain in (1.0, 2.0, 1.0)], FIRST
    ),
}  # fmt: skip


@pytest.mark.parametrize("difference", DIFFERENT)
def test_other_layers_are_checked_by_themselves(difference, attempts):
    make, fused = DIFFERENT[difference]
    torch.manual_seed(0)
    layers = make()
    ours, theirs, conversion = pair(stack(*layers), ids())
    assert [row.name for row in conversion.converted if row.replaced_by == "transformer_layer"] == fused, str(
        conversion
    )
    assert_same_steps(ours, theirs, ids())
    assert attempts(stack(*layers)) > attempts(stack(layers[0]))


class Masked(Attention):
    """With a mask it has another scale."""

    def __init__(self, masked_scaling):
        super().__init__()
        self.masked_scaling = masked_scaling

    def core(self, q, k, v, mask):
        scale = self.scaling if mask is None else self.masked_scaling
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True)


def test_an_attribute_that_the_examples_call_does_not_read():
    model = stack(Llama(Masked(0.3)), Llama(Masked(0.9)))
    assert len(ckptkern.convert(model, ids()).converted) == 2
    x, mask = torch.randn(2, 6, WIDTH), torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    for layer in model.layers:
        torch.testing.assert_close(layer(x, None, mask), type(layer).forward(layer, x, None, mask))


class Subclassed(functools.partial):
    pass


TANH, NONE, ERF = (functools.partial(F.gelu, approximate=kind) for kind in ("tanh", "none", "none"))
SAME = [
    (3, 4), ("layers.3.mlp", "layers.4.mlp"), ([3, {"a": "x.3"}], [4, {"a": "x.4"}]), ({1, 2}, {2, 1}), (NONE, ERF),
]  # fmt: skip
OTHER = [
    (TANH, NONE), (NONE, functools.partial(F.silu, approximate="none")), (NONE, F.gelu),
    (NONE, Subclassed(F.gelu, approximate="none")),
    (functools.partial(max, [1]), functools.partial(max, [1])),
    (4, 3), (3, 5), (True, 1), ("layers.3", "layers.5"), ([3], (4,)), ([3], [4, 4]), ({"a": 1}, {"b": 1}), (0.5, 0.25),
    (Config(), Config(a=1)),
]  # fmt: skip


def test_values_that_are_the_same_but_for_a_layers_number():
    for x, y in SAME:
        assert Numbers(3, 4).same(x, y), (x, y)
    for x, y in OTHER:
        assert not Numbers(3, 4).same(x, y), (x, y)
