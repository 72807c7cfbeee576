"""nn.Experts: layout, sharing with a module that exists, and transformers' experts run by it."""

from types import MethodType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ops.test_experts import moe, routing
from support.cases import check_exactness, gradients
from torch import nn

import ckptkern
from ckptkern import extras
from ckptkern.memory import peak_memory, saved_tensors
from ckptkern.tools.demo.moe import grouped_experts

E, D, H, K, T = 6, 16, 24, 2, 40


def data(seed: int = 0):
    """x, indices with dropped token-expert pairs, weights."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(T, D, generator=generator), routing("dropped", T, K, E), torch.rand(T, K, generator=generator)


@pytest.mark.parametrize("bias", [False, True])
def test_layout_and_values(bias):
    module = ckptkern.nn.Experts(E, D, H, "gelu", bias=bias)
    shapes = {"gate_up_proj": (E, 2 * H, D), "down_proj": (E, D, H)}
    shapes |= {"gate_up_proj_bias": (E, 2 * H), "down_proj_bias": (E, D)} if bias else {}
    assert {name: tuple(p.shape) for name, p in module.state_dict().items()} == shapes
    x, index, s = data()
    theirs = moe(
        x, index, s, module.gate_up_proj, module.down_proj, module.gate_up_proj_bias, module.down_proj_bias, F.gelu
    )
    torch.testing.assert_close(module(x, index, s), theirs)
    assert module(x, index, s).abs().max() > 0.01


def test_initialised_as_linear_layers():
    module = ckptkern.nn.Experts(50, 64, 16, bias=True)
    for p, fan_in in ((module.gate_up_proj, 64), (module.gate_up_proj_bias, 64), (module.down_proj, 16)):
        assert p.abs().max() <= fan_in**-0.5
        torch.testing.assert_close(p.square().mean(), torch.tensor(1 / (3 * fan_in)), rtol=0.05, atol=0)
    with torch.no_grad():
        module.down_proj.zero_()
    module.reset_parameters()
    assert module.down_proj.std() > 0.1


class Theirs(nn.Module):
    """The experts of a model, as transformers 5 writes them."""

    def __init__(self, act=None):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * H, D) * D**-0.5)
        self.down_proj = nn.Parameter(torch.randn(E, D, H) * H**-0.5)
        self.act_fn = act or nn.SiLU()

    def forward(self, x, index, s):
        return moe(x, index, s, self.gate_up_proj, self.down_proj, act=self.act_fn)


def clamped(self, x, index, s):
    return moe(x, index, s, self.gate_up_proj, self.down_proj, act=lambda g: F.silu(g.clamp(max=20)))


def up_first(self, x, index, s):
    w = self.gate_up_proj
    return moe(x, index, s, torch.cat(w.chunk(2, 1)[::-1], 1), self.down_proj, act=self.act_fn)


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU("tanh")], ids=["silu", "gelu_tanh"])
def test_from_torch_shares_parameters(act):
    theirs = Theirs(act)
    ours = ckptkern.nn.Experts.from_torch(theirs, recompute="selective")
    assert ours.gate_up_proj is theirs.gate_up_proj
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert (ours.recompute, ours.activation) == ("selective", {"SiLU": "silu", "GELU": "gelu_tanh"}[type(act).__name__])
    x, index, s = data()
    torch.testing.assert_close(ours(x, index, s), theirs(x, index, s))
    assert "num_experts=6, in_features=16, hidden_features=24" in repr(ours)


class Plus(nn.Module):
    def forward(self, z):
        return z + 1


def other(**attributes) -> nn.Module:
    module = Theirs()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


NEAR_MISSES = {
    "has no parameter gate_up_proj": lambda: other(gate_up_proj=None),
    "has a router, which Experts has not": lambda: other(router=nn.Parameter(torch.ones(3))),
    "has a norm, which Experts has not": lambda: other(norm=nn.LayerNorm(3)),
    "has is_transposed=True": lambda: other(is_transposed=True),
    "has has_gate=False": lambda: other(has_gate=False),
    "gate_up_weight must be [experts, 2 hidden": lambda: other(gate_up_proj=nn.Parameter(torch.ones(E, 9, D))),
    "down_weight must have shape (6, 16, 24)": lambda: other(down_proj=nn.Parameter(torch.ones(E, H, D))),
    "that computes one of them": lambda: other(act_fn=Plus()),
    "has another gate than act(g) * u": lambda: type("Gated", (Theirs,), {"_apply_gate": lambda self, g: g})(),
    "does not compute": lambda: type("Clamped", (Theirs,), {"forward": clamped})(),
    "does not compute what": lambda: type("UpFirst", (Theirs,), {"forward": up_first})(),
    "does not compute what ckptkern": lambda: type("NoRouting", (Theirs,), {"forward": lambda self, x: x})(),
    "has a forward set on the instance": lambda: other(forward=MethodType(up_first, Theirs())),
}


@pytest.mark.parametrize("message", NEAR_MISSES)
def test_near_misses_are_refused(message):
    """Other layouts, gates that clamp or that come after up: what no shape shows, numbers do."""
    with pytest.raises((TypeError, ValueError)) as error:
        ckptkern.nn.Experts.from_torch(NEAR_MISSES[message]())
    assert message in str(error.value)


# -- transformers ------------------------------------------------------------------------------------------------------


def mixtral(kind: str):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = dict(
        vocab_size=50, hidden_size=D, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_experts_per_tok=K, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, intermediate_size=H, num_local_experts=E)
        return transformers.MixtralForCausalLM(config)
    config = transformers.Qwen3MoeConfig(**sizes, intermediate_size=H, moe_intermediate_size=H, num_experts=E)
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_transformers_models(kind):
    """Their experts through the interface give the eager loop's loss and gradients, compiled too."""
    model = mixtral(kind)
    ids = torch.arange(34).view(2, 17) * 7 % 50

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
        assert spy.call_count == 2
        assert {call.kwargs["recompute"] for call in spy.call_args_list} == {name.partition("-")[2] or "full"}
        torch.testing.assert_close(ours, theirs)
    experts = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
    other = ckptkern.nn.Experts.from_torch(experts)
    x, index, s = data()
    x, s = x.requires_grad_(), s.requires_grad_()
    found = gradients(lambda t: other(t["x"], index, t["s"]), {"x": x, "s": s})
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for name, value in gradients(lambda t: compiled(t["x"], index, t["s"]), {"x": x, "s": s}).items():
        assert torch.equal(value, found[name]), name


def step(function, x, index, s, parameters):
    """(saved bytes besides arguments and parameters, peak of forward and backward) of a step."""
    with saved_tensors(exclude=[x, index, s, *parameters]) as saved:
        function(x, index, s)
    with peak_memory("cpu") as peak:
        torch.autograd.grad(function(x, index, s), [x, s, *parameters], torch.ones_like(x))
    return saved.bytes, peak.bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("d", "h", "experts", "top_k"), [(64, 32, 16, 4), (64, 96, 4, 2), (128, 448, 4, 2)])
def test_saved_bytes_and_peak_beside_transformers(d, h, experts, top_k, dtype):
    """transformers' "grouped_mm", and the same in eager PyTorch of the demo and the benchmark, save gathered rows, g and u,
    act(g), h and the output before its weights. Ours at "full": nothing but its arguments, and a lower peak."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.MixtralConfig(
        vocab_size=8, hidden_size=d, intermediate_size=h, num_hidden_layers=1, num_attention_heads=2, num_local_experts=experts
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).to(dtype)
    model.set_experts_implementation("grouped_mm")
    theirs = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
    parameters, tokens = (theirs.gate_up_proj, theirs.down_proj), 512
    index = (torch.arange(tokens * top_k) * 7 % experts).view(tokens, top_k)
    arguments = torch.randn(tokens, d, dtype=dtype), index, torch.rand(tokens, top_k, dtype=dtype)
    arguments[0].requires_grad_(), arguments[2].requires_grad_()

    def unfused(x, index, s):
        return grouped_experts(x, index, s, *parameters, F.silu)

    saved, peak = step(unfused, *arguments, parameters)
    pairs, itemsize = tokens * top_k, dtype.itemsize
    assert saved == pairs * (itemsize * (2 * d + 4 * h + 1) + 3 * 8) + 4 * experts
    torch.testing.assert_close(unfused(*arguments), theirs(*arguments))
    saved_theirs, peak_theirs = step(theirs, *arguments, parameters)
    assert saved_theirs >= pairs * itemsize * (2 * d + 4 * h)
    for mode, elements in (("none", 2 * h), ("selective", 2 * h), ("full", 0)):
        ours = ckptkern.nn.Experts.from_torch(theirs, recompute=mode)
        saved_ours, peak_ours = step(ours, *arguments, parameters)
        assert saved_ours == pairs * itemsize * elements
        if mode == "full":
            assert peak_ours < min(peak, peak_theirs)


def test_interface_refuses_experts_of_another_kind():
    pytest.importorskip("transformers", minversion="5.0")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ckptkern.register_experts()
    forward = ALL_EXPERTS_FUNCTIONS["ckptkern"]
    with pytest.raises(TypeError, match="has is_transposed=True"):
        forward(other(is_transposed=True), *data())
    module = Theirs(nn.GELU())
    torch.testing.assert_close(forward(module, *data()), module(*data()))
    module.act_fn = nn.SiLU()
    torch.testing.assert_close(forward(module, *data()), module(*data()))


def test_without_transformers_the_error_says_what_to_install():
    absent = mock.patch.object(extras.importlib.util, "find_spec", return_value=None)
    with absent, pytest.raises(ImportError, match="transformers is not installed: pip install transformers"):
        ckptkern.register_experts()
    with pytest.raises(ValueError, match="register_experts: recompute must be one of"):
        ckptkern.register_experts(recompute="some")


def test_a_rank_of_expert_parallelism():
    """Two halves of the experts, each with its own token-expert pairs, add up to the whole, in gradients too
    (transformers#48687)."""
    whole = Theirs()
    x, index, s = data()
    t = {"x": x.requires_grad_(), "s": s.requires_grad_()}
    parts = [
        SimpleNamespace(w=whole.gate_up_proj[first : first + 3], wd=whole.down_proj[first : first + 3], first=first)
        for first in (0, 3)
    ]

    def together(t):
        return moe(t["x"], index, t["s"], whole.gate_up_proj.to(t["x"]), whole.down_proj.to(t["x"]))

    def sharded(t):
        def of(part):
            local = index - part.first
            return ckptkern.moe_mlp(
                t["x"], torch.where(index < 0, -1, local), t["s"], part.w.to(t["x"]), part.wd.to(t["x"])
            )

        return of(parts[0]) + of(parts[1])

    check_exactness(sharded, together, t)
