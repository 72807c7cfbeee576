"""nn.Experts: layout and values, and transformers' experts run by its op."""

import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.oracles import moe_mlp
from torch import nn

import ckptkern

E, D, H, K, T = 6, 16, 24, 2, 40


def data():
    """x, indices with dropped token-expert pairs, weights."""
    index = torch.rand(T, E).argsort(-1)[:, :K]
    index[::2, 0], index[1::3, -1] = -1, E
    return torch.randn(T, D), index, torch.rand(T, K)


@pytest.mark.parametrize("bias", [False, True])
def test_layout_and_values(bias):
    module = ckptkern.nn.Experts(E, D, H, "gelu", bias=bias)
    shapes = {"gate_up_proj": (E, 2 * H, D), "down_proj": (E, D, H)}
    shapes |= {"gate_up_proj_bias": (E, 2 * H), "down_proj_bias": (E, D)} if bias else {}
    assert {name: tuple(p.shape) for name, p in module.state_dict().items()} == shapes
    x, index, s = data()
    biases = dict(gate_up_bias=module.gate_up_proj_bias, down_bias=module.down_proj_bias)
    expected = moe_mlp(x, index, s, module.gate_up_proj, module.down_proj, "gelu", **biases)
    torch.testing.assert_close(module(x, index, s), expected)
    assert expected.abs().max() > 0.01


def test_initialised_as_linear_layers():
    module = ckptkern.nn.Experts(50, 64, 16, bias=True)
    with torch.no_grad():
        module.down_proj.zero_()
    module.reset_parameters()
    for p, fan_in in ((module.gate_up_proj, 64), (module.gate_up_proj_bias, 64), (module.down_proj, 16)):
        assert p.abs().max() <= fan_in**-0.5
        torch.testing.assert_close(p.square().mean(), torch.tensor(1 / (3 * fan_in)), rtol=0.05, atol=0)


class Theirs(nn.Module):
    """The experts of a model, as transformers 5 writes them."""

    def __init__(self, **attributes):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * H, D) * D**-0.5)
        self.down_proj = nn.Parameter(torch.randn(E, D, H) * H**-0.5)
        self.act_fn = nn.SiLU()
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x, index, s):
        y = torch.zeros_like(x)
        for e in range(E):
            token, place = torch.where(index == e)
            g, u = F.linear(x[token], self.gate_up_proj[e]).chunk(2, -1)
            y = y.index_add(0, token, s[token, place, None] * F.linear(self.act_fn(g) * u, self.down_proj[e]))
        return y


class Plus(nn.Module):
    def forward(self, z):
        return z + 1


# -- transformers ------------------------------------------------------------------------------------------------------


def model_of(kind):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = dict(
        vocab_size=50,
        hidden_size=D,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts_per_tok=K,
        intermediate_size=H,
    )
    torch.manual_seed(0)
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=E))
    config = transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=H, num_experts=E)
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_transformers_models(kind):
    """Their experts through the interface give the eager loop's loss and gradients."""
    model, ids = model_of(kind), torch.arange(34).view(2, 17) * 7 % 50

    def run(name):
        model.set_experts_implementation(name)
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        return {"y": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}

    ckptkern.register_experts()
    ckptkern.register_experts("ckptkern-selective", recompute="selective")
    theirs = run("eager")
    assert any("experts.gate_up_proj" in name for name in theirs)
    for name in ("ckptkern", "ckptkern-selective"):
        with mock.patch.object(ckptkern.ops, "moe_mlp", wraps=ckptkern.ops.moe_mlp) as spy:
            ours = run(name)
        assert [call.kwargs["recompute"] for call in spy.call_args_list] == [name.partition("-")[2] or "full"] * 2
        torch.testing.assert_close(ours, theirs)


NEAR_MISSES = {
    "has a router, which moe_mlp does not support": lambda: Theirs(router=nn.Parameter(torch.ones(3))),
    "has is_transposed=True": lambda: Theirs(is_transposed=True),
    "has has_gate=False": lambda: Theirs(has_gate=False),
    "gate_up_weight must be a Tensor": lambda: Theirs(gate_up_proj=None),
    "gate_up_weight must be [experts, 2 hidden": lambda: Theirs(gate_up_proj=nn.Parameter(torch.ones(E, 9, D))),
    "down_weight must have shape (6, 16, 24)": lambda: Theirs(down_proj=nn.Parameter(torch.ones(E, H, D))),
    "that computes one of them": lambda: Theirs(act_fn=Plus()),
    "has another gate than act(g) * u": lambda: type("Gated", (Theirs,), {"_apply_gate": lambda self, g: g})(),
}


def test_interface_refuses_experts_of_another_kind():
    pytest.importorskip("transformers", minversion="5.0")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    with pytest.raises(ValueError, match="register_experts: recompute must be one of"):
        ckptkern.register_experts(recompute="some")
    ckptkern.register_experts()
    forward = ALL_EXPERTS_FUNCTIONS["ckptkern"]
    for message, make in NEAR_MISSES.items():
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            forward(make(), *data())
    module = Theirs()
    for module.act_fn in (nn.GELU(), nn.SiLU()):
        torch.testing.assert_close(forward(module, *(inputs := data())), module(*inputs))
