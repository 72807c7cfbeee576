"""Modules of ours made from modules that exist."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from ckptkern import nn as ours
from ckptkern.nn import rotary_tables

E, H, KV, D, B, S = 16, 4, 2, 6, 2, 5


class Norm(nn.Module):
    """As Hugging Face's: `one` is 1 for Gemma's."""

    def __init__(self, width, one=0):
        super().__init__()
        self.weight, self.variance_epsilon, self.one = nn.Parameter(torch.rand(width)), 1e-5, one

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.one) * x


class Attention(nn.Module):
    def __init__(self, norms):
        super().__init__()
        self.head_dim, self.scaling, self.attention_dropout = D, D**-0.5, 0.0
        self.q_proj, self.o_proj = nn.Linear(E, H * D, norms), nn.Linear(H * D, E, False)
        self.k_proj, self.v_proj = nn.Linear(E, KV * D, norms), nn.Linear(E, KV * D, norms)
        if norms:
            self.q_norm, self.k_norm = Norm(D), Norm(D)

    def forward(self, x, rotary):
        q, k, v = (getattr(self, f"{name}_proj")(x).unflatten(-1, (-1, D)) for name in "qkv")
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        cos, sin = rotary
        q, k = (one * cos + torch.cat((-one[..., D // 2 :], one[..., : D // 2]), -1) * sin for one in (q, k))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(E, 20), nn.Linear(E, 20), nn.Linear(20, E)
        self.act_fn = nn.GELU("tanh")

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, norms=True):
        super().__init__()
        self.self_attn, self.mlp = Attention(norms), MLP()
        self.input_layernorm, self.post_attention_layernorm = Norm(E), Norm(E)

    def forward(self, x, rotary):
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        return x + self.mlp(self.post_attention_layernorm(x))


def sequential(*parts):
    return nn.Sequential(*parts)


def fc(n=E, k=E):
    return nn.Linear(k, n)


TABLES = rotary_tables(torch.arange(S), D)
OPTIONS = {"dropout": 0.0, "batch_first": True}
# name: (class of ours, (module, whether ours has its state_dict's keys, arguments of from_torch), further inputs)
CASES = {
    "Linear": (ours.Linear, fc, True, ()),
    "Dropout": (ours.Dropout, lambda: nn.Dropout(0.0), True, ()),
    "Sequential": (ours.Sequential, lambda: sequential(fc(), nn.Tanh(), fc(), nn.LayerNorm(E)), True, ()),
    "LinearStack": (ours.LinearStack, lambda: sequential(fc(20), nn.SiLU(), fc(E, 20), nn.SiLU()), False, ()),
    "MLP": (ours.MLP, lambda: sequential(fc(20), nn.GELU("tanh"), fc(E, 20)), False, ()),
    "MLP with dropout": (ours.MLP, lambda: sequential(fc(20), nn.ReLU(), nn.Dropout(0.0), fc(E, 20)), False, ()),
    "GatedMLP": (ours.GatedMLP, MLP, True, ()),
    "TransformerEncoderLayer": (
        ours.TransformerEncoderLayer, lambda: nn.TransformerEncoderLayer(E, H, 20, norm_first=True, **OPTIONS), True, (),
    ),
    "TransformerDecoderLayer": (
        ours.TransformerDecoderLayer, lambda: nn.TransformerDecoderLayer(E, H, 20, activation=F.gelu, **OPTIONS), True,
        (torch.randn(B, 3, E),),
    ),
    "LlamaAttention": (ours.LlamaAttention, lambda: Attention(False), True, (TABLES,)),
    "LlamaAttention with norms": (ours.LlamaAttention, lambda: Attention(True), True, (TABLES,)),
    "LlamaDecoderLayer": (ours.LlamaDecoderLayer, Layer, True, (TABLES,)),
}  # fmt: skip


def step(module, parameters, *more):
    x = torch.randn(B, S, E, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = module(x, *more)
    return y, torch.autograd.grad(y.square().sum(), [x, *parameters])


@pytest.mark.parametrize("name", CASES)
def test_results_and_parameters_are_the_modules(name):
    """The module itself is as it was."""
    cls, make, same_keys, more = CASES[name]
    module, calls = make(), []
    children, parameters = dict(module.named_modules()), [*module.parameters()]
    expected = step(module, parameters, *more)
    module.register_forward_hook(lambda *_: calls.append(None))
    other = cls.from_torch(module)
    assert type(other) is cls
    assert {id(p) for p in other.parameters()} == {id(p) for p in parameters}
    if same_keys:
        assert list(other.state_dict()) == list(module.state_dict())
    assert children == dict(module.named_modules())
    made = step(other, parameters, *more)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
    assert calls == [None]
    assert type(made[0].grad_fn) is type(step(copy.deepcopy(other), parameters[:0], *more)[0].grad_fn)
    assert not cls.from_torch(module.eval()).training
    for wrong in (nn.Bilinear(2, 2, 2), None):
        with pytest.raises(TypeError, match=rf"^{cls.__name__}: .*(Bilinear|None)"):
            cls.from_torch(wrong)
    module.forward = lambda *_: None
    with pytest.raises(TypeError, match=rf"^{cls.__name__}: {type(module).__name__} has a forward set on the instance"):
        cls.from_torch(module)


def test_settings():
    linear = ours.Linear.from_torch(fc(), F.silu, "full")
    assert (linear.activation, linear.recompute) == ("silu", "full")
    mlp = ours.MLP.from_torch(sequential(fc(), nn.SiLU(), nn.Dropout(0.25), fc()), "none", "1MiB")
    assert (mlp.activation, mlp.dropout, mlp.recompute, mlp.workspace) == ("silu", 0.25, "none", "1MiB")
    theirs = nn.TransformerEncoderLayer(E, H, 20, 0.5)
    theirs.dropout.p = 0.25
    layer = ours.TransformerEncoderLayer.from_torch(theirs, "full")
    assert [type(one).__module__ for one in (layer.self_attn, layer.dropout1)] == [
        "ckptkern.nn.attention",
        "ckptkern.nn.dropout",
    ]
    assert (layer.dropout.p, layer.dropout1.p, layer.self_attn.dropout, layer.self_attn.recompute) == (
        0.25,
        0.5,
        0.5,
        "full",
    )
    attention = ours.LlamaAttention.from_torch(Attention(True), rope_theta=100.0)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.rope_theta) == (H, KV, D, 100.0)
    assert ours.LlamaAttention.from_torch(attention).rope_theta == 100.0
    assert ours.Sequential.from_torch(sequential(fc(), fc()), "every 2", debug=True).options == {"debug": True}


def with_part(module, name, part):
    setattr(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], part)
    return module


def with_value(module, name, value):
    setattr(module, name, value)
    return module


class Wide(Norm):
    """A norm whose eps is not the one that it shows."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Own(nn.Linear):
    pass


REFUSED = {
    "a subclass": (ours.Linear, Own(E, E), "must be a torch.nn.Linear, not Own"),
    "parametrised": (ours.Linear, parametrizations.weight_norm(fc()), "not ParametrizedLinear"),
    "odd": (ours.LinearStack, sequential(fc(), nn.ReLU(), fc()), "is not Linear, activation, Linear, activation"),
    "two activations": (
        ours.LinearStack, sequential(fc(), nn.ReLU(), fc(), nn.SiLU()), "share one activation, but there are relu, silu",
    ),
    "a last dropout": (ours.MLP, sequential(fc(), nn.ReLU(), fc(), nn.Dropout()), "has a 3 that is not an nn.Linear: Dropout"),
    "two activations in a row": (ours.MLP, sequential(fc(), nn.ReLU(), nn.ReLU(), fc()), "has a ReLU that is not an"),
    "a dropout in evaluation": (ours.MLP, sequential(fc(), nn.ReLU(), nn.Dropout().eval(), fc()), "not an unmodified"),
    "no activation": (ours.GatedMLP, with_part(MLP(), "act_fn", None), "MLP has no act_fn; pass its activation"),
    "one more": (ours.GatedMLP, with_part(MLP(), "norm", Norm(20)), "MLP has a norm, which GatedMLP has not"),
    "a parameter": (ours.LlamaAttention, with_part(Attention(False), "sinks", nn.Parameter(torch.ones(H))), "has a sinks"),
    "an adapter": (ours.GatedMLP, with_part(MLP(), "up_proj", sequential(fc(20))), "is not an nn.Linear: Sequential"),
    "scaling": (ours.LlamaAttention, with_value(Attention(False), "scaling", 1.0), "scales its scores by 1.0, not by 1 / sqrt"),
    "head_dim": (ours.LlamaAttention, with_value(Attention(False), "head_dim", 5), "no head_dim that fits .*: 5"),
    "Gemma's norm": (ours.LlamaDecoderLayer, with_part(Layer(), "input_layernorm", Norm(E, 1)), "has a Norm that does not"),
    "another eps": (ours.LlamaDecoderLayer, with_part(Layer(), "input_layernorm", Wide(E).bfloat16()), "has a Wide that does"),
    "another norm": (
        ours.LlamaDecoderLayer, with_value(Layer(), "post_attention_layernorm", nn.LayerNorm(E)), "a LayerNorm that does not",
    ),
    "norms of all heads": (ours.LlamaAttention, with_part(Attention(True), "q_norm", Norm(H * D)), "has a Norm that does not"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    cls, module, message = REFUSED[case]
    with pytest.raises(TypeError, match=rf"^{cls.__name__}: .*{message}"):
        cls.from_torch(module)


def test_another_activation_is_refused():
    with pytest.raises(ValueError, match=r"^MLP: activation must be one of .* which Tanh\(\) does not"):
        ours.MLP.from_torch(sequential(fc(), nn.Tanh(), fc()))


def test_parts_that_a_layer_cannot_stand_for_are_called():
    """An adapter or a forward of its own stays what it is."""
    theirs = nn.TransformerEncoderLayer(E, H, 20, **OPTIONS)
    theirs.self_attn.forward = lambda *args, own=theirs.self_attn.forward, **kwargs: (2 * own(*args, **kwargs)[0], None)
    parametrizations.weight_norm(theirs.linear1)
    other, parameters = ours.TransformerEncoderLayer.from_torch(theirs), [*theirs.parameters()]
    assert other.self_attn is theirs.self_attn
    torch.testing.assert_close(step(other, parameters), step(theirs, parameters))
