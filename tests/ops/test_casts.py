"""Inside autocast a float32 parameter is copied to 16 bits: once in forward, once in backward for all that read it."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ckptkern
from ckptkern.ops.registration.functions import bodies_seen

D, HIDDEN, HEADS = 32, 64, 2
MODES = ("none", "selective", "full")


class Casts(TorchDispatchMode):
    """How often each of the named tensors is copied to another dtype."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__()
        self.names, self.counts = {t.data_ptr(): name for name, t in tensors.items()}, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::_to_copy", "aten::copy_"):
            source = args[func._schema.name == "aten::copy_"]
            if name := self.names.get(source.data_ptr()):
                self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def parameters(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.nn.Parameter(torch.randn(shape) / 8) for name, shape in shapes.items()}


PLAIN = {"up_weight": (HIDDEN, D), "up_bias": (HIDDEN,), "down_weight": (D, HIDDEN), "down_bias": (D,)}
GATE = {"gate_weight": (HIDDEN, D), "gate_bias": (HIDDEN,)}
ATTENTION = {"qkv_weight": (3 * D, D), "qkv_bias": (3 * D,), "out_weight": (D, D), "out_bias": (D,)}

LATENTS = {"q_a_weight": (24, D), "q_a_bias": (24,), "q_weight": (HEADS * 16, 24), "q_bias": (HEADS * 16,)}
LATENTS |= {"kv_a_weight": (16 + 8, D), "kv_a_bias": (24,), "kv_b_weight": (HEADS * 24, 16), "kv_b_bias": (HEADS * 24,)}
LATENTS |= {"out_weight": (D, HEADS * 16), "out_bias": (D,)}


def casts(monkeypatch, call, tensors: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[Counter, Counter]:
    """Of forward, and of backward."""
    with torch.autocast("cpu", torch.bfloat16), bodies_seen(), Casts(tensors) as forward:
        y = call(x)
    with bodies_seen(), Casts(tensors) as backward:
        y.backward(torch.ones_like(y))
    assert all(t.grad is not None for t in tensors.values())
    return forward.counts, backward.counts


def once(*names: str) -> Counter:
    return Counter(names)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("needs_dx", [True, False])
def test_an_mlp_casts_what_its_matmuls_read(monkeypatch, mode, needs_dx):
    t = parameters(**PLAIN)
    x = torch.randn(6, D, requires_grad=needs_dx)
    made = casts(monkeypatch, lambda x: ckptkern.mlp(x, *t.values(), recompute=mode), t, x)
    recomputed = ("up_weight", "up_bias") if mode == "full" else ()
    read = {"down_weight", *recomputed, *["up_weight"] * needs_dx}
    assert made == (once(*t), once(*read))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("needs_dx", [True, False])
def test_a_gated_mlp_casts_what_its_matmuls_read(monkeypatch, mode, needs_dx):
    t = parameters(**GATE, **PLAIN)
    x = torch.randn(6, D, requires_grad=needs_dx)
    weights = [t[f"{layer}_weight"] for layer in ("gate", "up", "down")]
    biases = {name: one for name, one in t.items() if name.endswith("bias")}
    made = casts(monkeypatch, lambda x: ckptkern.gated_mlp(x, *weights, **biases, recompute=mode), t, x)
    recomputed = ("gate_weight", "gate_bias", "up_weight", "up_bias") if mode == "full" else ()
    read = {"down_weight", *recomputed, *("gate_weight", "up_weight") * needs_dx}
    assert made == (once(*t), once(*read))


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("kind", ["attention", "latent", "mlp", "gated", "low rank", "layer", "cross"])
def test_a_block_casts_no_parameter_twice(monkeypatch, kind, norm_first, mode):
    attention, mlp = parameters(**ATTENTION), parameters(**PLAIN, **(GATE if kind in ("gated", "low rank") else {}))
    norms = [parameters(norm_weight=(D,), norm_bias=(D,)) for _ in range(3)]
    around = [dict(one, norm="layer", norm_first=norm_first) for one in norms]
    of_attention = dict(attention, **around[0], num_heads=HEADS)
    lora = parameters(lora_a=(4, D), lora_b=(HIDDEN, 4))
    crossing = parameters(**{f"cross_{name}": shape for name, shape in ATTENTION.items()})
    latents = parameters(**LATENTS)
    x = torch.randn(2, 8, D, requires_grad=True)

    def call(x):
        if kind == "latent":
            return ckptkern.latent_attention_block(
                x, **latents, num_heads=HEADS, **around[0], residual=True, recompute=mode
            )
        if kind == "attention":
            return ckptkern.attention_block(x, **of_attention, residual=True, recompute=mode)
        if kind in ("layer", "cross"):
            cross = None
            if kind == "cross":
                own = {name.removeprefix("cross_"): one for name, one in crossing.items()}
                cross = dict(own, **around[2], num_heads=HEADS, key_value=torch.randn(2, 8, D))
            return ckptkern.transformer_layer(
                x, of_attention, dict(mlp, **around[1]), cross_attention_arguments=cross, recompute=mode
            )
        update = {"up": ckptkern.LoRA(lora["lora_a"], lora["lora_b"])} if kind == "low rank" else None
        return ckptkern.mlp_block(x, **mlp, **around[1], lora=update, recompute=mode)

    tensors = {} if kind in ("mlp", "gated", "low rank") else latents if kind == "latent" else dict(attention)
    tensors |= {} if kind in ("attention", "latent") else mlp
    tensors |= crossing if kind == "cross" else lora if kind == "low rank" else {}
    forward, backward = casts(monkeypatch, call, tensors, x)
    assert forward == once(*tensors)
    assert set(backward.values()) == {1}, backward
    assert backward.keys() <= tensors.keys()
    assert {name for name in tensors if name.endswith("weight")} <= backward.keys()
