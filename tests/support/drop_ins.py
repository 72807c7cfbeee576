"""Modules beside what they replace: torch's classes, or the same written in PyTorch with the same constructor and parameters.
Pairwise options; outputs and gradients compared in float64."""

import itertools
import random
from typing import Any, NamedTuple

import pytest
import torch
from support.oracles import ACTIVATIONS, rotated
from torch import nn
from torch.nn import functional as F

import ckptkern
from ckptkern.memory import saved_tensors

E, H, HIDDEN, B, T, S = 12, 3, 20, 2, 5, 7  # width, heads, hidden width, samples, tokens, tokens of a memory


def pairwise(valid=lambda case: True, **factors):
    """pytest parameters: dicts that together hold every pair of two factors' values that a valid case can hold."""
    rows = list(itertools.product(*factors.values()))
    rows = random.Random(0).sample(rows, min(len(rows), 4000))  # any pair is in a hundred of them, and greed costs 1 s
    cases = filter(valid, (dict(zip(factors, row, strict=True)) for row in rows))
    wanted = [(set(itertools.combinations(case.items(), 2)), case) for case in cases]
    missing, chosen = set().union(*(pairs for pairs, _ in wanted)), []
    while missing:
        pairs, case = max(wanted, key=lambda row: len(row[0] & missing))
        chosen.append(case)
        missing -= pairs
        wanted = [row for row in wanted if not row[0].isdisjoint(missing)]
    return [pytest.param(case, id="-".join(_word(value) for value in case.values())) for case in chosen]


def _word(value):
    plain = isinstance(value, str | bool | tuple | torch.dtype)
    return str(value) if plain else getattr(value, "__name__", type(value).__name__)


# -- what ours replace, where torch has no class of the name -----------------------------------------------------------


class Linear(nn.Linear):
    def __init__(self, *args, activation="identity", **options):
        super().__init__(*args, **options)
        self.act = ACTIVATIONS[activation]

    def forward(self, x):
        return self.act(super().forward(x))


class LinearStack(nn.Module):
    def __init__(self, features, activation="relu", bias=True, **factory):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n, bias, **factory) for k, n in itertools.pairwise(features))
        self.act = ACTIVATIONS[activation]

    def forward(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return x


class MLP(nn.Module):
    def __init__(self, width, hidden, *, activation="gelu", bias=True, **factory):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden, bias, **factory), nn.Linear(hidden, width, bias, **factory)
        self.act = ACTIVATIONS[activation]

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class GatedMLP(nn.Module):
    def __init__(self, width, hidden, *, activation="silu", bias=False, **factory):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias, **factory) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias, **factory)
        self.act = ACTIVATIONS[activation]

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class LlamaAttention(nn.Module):
    """visible: bool, broadcastable to [B, H, S, S]."""

    def __init__(
        self,
        width,
        heads,
        num_kv_heads=None,
        head_dim=None,
        *,
        bias=False,
        qk_norm=False,
        rope_theta=10000.0,
        **factory,
    ):
        super().__init__()
        D = head_dim or width // heads
        self.q_proj = nn.Linear(width, heads * D, bias, **factory)
        self.k_proj, self.v_proj = (nn.Linear(width, (num_kv_heads or heads) * D, bias, **factory) for _ in range(2))
        self.o_proj = nn.Linear(heads * D, width, bias, **factory)
        self.q_norm, self.k_norm = (nn.RMSNorm(D, 1e-6, **factory) if qk_norm else None for _ in range(2))
        self.head_dim, self.rope_theta = D, rope_theta

    def forward(self, x, visible=None):
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (heads if norm is None else norm(heads) for heads, norm in ((q, self.q_norm), (k, self.k_norm)))
        q, k, v = (
            heads.transpose(1, 2) for heads in (*(rotated(heads, self.rope_theta, False) for heads in (q, k)), v)
        )
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if visible is None else visible
        o = F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class LlamaDecoderLayer(nn.Module):
    def __init__(
        self,
        width,
        heads,
        num_kv_heads=None,
        intermediate_size=None,
        head_dim=None,
        *,
        activation="silu",
        attention_bias=False,
        mlp_bias=False,
        dtype=None,
        **of_attention,
    ):
        super().__init__()
        of_attention |= {"dtype": dtype}
        self.input_layernorm = nn.RMSNorm(width, 1e-6, dtype=dtype)
        self.self_attn = LlamaAttention(width, heads, num_kv_heads, head_dim, bias=attention_bias, **of_attention)
        self.post_attention_layernorm = nn.RMSNorm(width, 1e-6, dtype=dtype)
        self.mlp = GatedMLP(width, intermediate_size or 4 * width, activation=activation, bias=mlp_bias, dtype=dtype)

    def forward(self, x, visible=None):
        x = x + self.self_attn(self.input_layernorm(x), visible)
        return x + self.mlp(self.post_attention_layernorm(x))


# -- the table ---------------------------------------------------------------------------------------------------------


class DropIn(NamedTuple):
    """The class that ours of the same name replaces, arguments for both, options for both that are no defaults of torch's."""

    theirs: type
    args: tuple
    options: dict[str, Any] = {}  # noqa: RUF012


LAYER = {"dropout": 0.0, "layer_norm_eps": 1e-3, "batch_first": True}
DROP_INS = {
    "Linear": DropIn(Linear, (E, 8)),
    "LinearStack": DropIn(LinearStack, ([E, 9, 6, 8],)),
    "MLP": DropIn(MLP, (E, HIDDEN)),
    "GatedMLP": DropIn(GatedMLP, (E, HIDDEN)),
    "MultiheadAttention": DropIn(nn.MultiheadAttention, (E, H), {"batch_first": True}),
    "TransformerEncoderLayer": DropIn(nn.TransformerEncoderLayer, (E, H, HIDDEN), LAYER),
    "TransformerDecoderLayer": DropIn(nn.TransformerDecoderLayer, (E, H, HIDDEN), LAYER),
    "LlamaAttention": DropIn(LlamaAttention, (E, 4, 2, 6)),
    "LlamaDecoderLayer": DropIn(LlamaDecoderLayer, (E, 4, 2, HIDDEN, 6)),
}
OWN = ("recompute", "workspace", "dropout", "resid_dropout")  # options that a class written here has not


def ours_of(name, args=None, **options):
    return getattr(ckptkern.nn, name)(*args or DROP_INS[name].args, **DROP_INS[name].options | options)


def theirs_of(name, args=None, **options):
    theirs, default_args, defaults = DROP_INS[name]
    unknown = OWN[:2] if theirs.__module__.startswith("torch.") else OWN
    return theirs(
        *args or default_args, **{key: value for key, value in (defaults | options).items() if key not in unknown}
    )


def pair_of(name, **options):
    """(ours, theirs) in float64 with one set of parameters. None of them is zero or one, as torch initialises some.
    state_dict goes both ways, strictly."""
    mine, other = ours_of(name, dtype=torch.float64, **options), theirs_of(name, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    mine.load_state_dict(other.state_dict(), strict=True)
    other.load_state_dict(mine.state_dict(), strict=True)
    return mine, other


def tokens(layout, length, width=E, grad=True):
    shape = {"unbatched": (length, width), "seq_first": (length, B, width), "batch_first": (B, length, width)}[layout]
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


def inputs_of(name, layout="batch_first", grad=True):
    """x and, of a decoder's layer, memory."""
    memory = {"memory": tokens(layout, S, grad=grad)} if name == "TransformerDecoderLayer" else {}
    return {"x": tokens(layout, T, grad=grad)} | memory


def call(module, x, *others, memory=None, **options):
    """The output alone; attention without weights unless the options ask for them."""
    others = others if memory is None else (memory,)
    if isinstance(module, nn.MultiheadAttention):
        keys = others[0] if others else x
        return module(x, keys, keys, **{"need_weights": False} | options)[0]
    return module(x, *others, **options)


def step(module, *inputs, function=call, held=()):
    """([output, gradients of the inputs and parameters that need one], saved bytes besides parameters and `held`), from one
    seed."""
    torch.manual_seed(5)
    parameters = [*module.parameters()]
    with saved_tensors(exclude=[*parameters, *held]) as saved:
        y = function(module, *inputs)
    wanted = [t for t in (*inputs, *parameters) if t.requires_grad]
    grads = torch.autograd.grad(y.square().sum(), wanted, allow_unused=True) if y.requires_grad else []
    return [y.detach(), *grads], saved.bytes


class Adapter(nn.Module):
    """Takes the place of a layer with weight and bias, and does more: LoRA."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.weight, self.bias = layer, layer.weight, getattr(layer, "bias", None)

    def forward(self, x):
        return 2 * self.layer(x)


def raised(call):
    """The class and the message of what call() raises; None if it returns."""
    try:
        call()
    except Exception as error:  # whatever it is: what torch's module raises is compared with it
        return type(error), str(error)
    return None


def run(module, call, inputs):
    """Outputs of call(module, **inputs) and the gradients of a random function of them."""
    inputs = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in inputs.items()}
    outputs = call(module, **inputs)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None]
    generator = torch.Generator().manual_seed(5)
    dys = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs]
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    trained |= {name: t for name, t in inputs.items() if t.requires_grad}
    grads = torch.autograd.grad(outputs, list(trained.values()), dys, allow_unused=True)
    return {f"output {i}": y.detach() for i, y in enumerate(outputs)} | dict(zip(trained, grads, strict=True))


def assert_drop_in(ours, theirs, call, inputs, their_call=None):
    """Outputs and gradients of both are equal within float64's rounding, or that of rotary angles, which is float32's."""
    rotates = any(getattr(module, "rope_theta", None) is not None for module in ours.modules())
    rtol, atol = (1e-5, 1e-6) if rotates else (1e-9, 1e-11)
    mine, reference = run(ours, call, inputs), run(theirs, their_call or call, inputs)
    assert list(mine) == list(reference)
    for name, wanted in reference.items():
        got = mine[name]
        assert (got is None) == (wanted is None), name
        if wanted is not None:
            assert wanted.isfinite().all(), name
            torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def bool_mask(*shape, p=0.4):
    """True = hidden; the first key is visible to everyone, so that torch's own weights are not NaN."""
    mask = torch.rand(shape) < p
    mask[..., 0] = False
    return mask


def causal_mask(L, S):
    return torch.full((L, S), -torch.inf, dtype=torch.float64).triu(1)


def padding_mask(kind, lead, S):
    """kind: none, bool (left-aligned tokens) or float."""
    if kind == "none":
        return None
    mask = torch.zeros(*lead, S, dtype=torch.bool)
    mask.view(-1, S)[-1, S - 2 :] = True
    return mask if kind == "bool" else torch.where(mask, -torch.inf, 0.25).double()


def attention_mask(kind, B, H, L, S):
    """kind: none, bool2, bool3, float2, float3 or causal."""
    if kind == "none":
        return None
    if kind == "causal":
        return causal_mask(L, S)
    shape = (L, S) if kind.endswith("2") else (B * H, L, S)
    hidden = bool_mask(*shape)
    return hidden if kind.startswith("bool") else torch.randn(shape).double().masked_fill(hidden, -torch.inf)
