"""convert under autocast, of models that enter it, and of layers that switch it off: checks run without it, and what a layer
keeps out of autocast stays out of it."""

import contextlib

import pytest
import torch
from conversion.steps import assert_same, pair, step
from torch import nn
from torch.nn import functional as F

import ckptkern

D, HEADS, V = 32, 4, 48
TOLERANCE = 2e-2  # of gradients in bfloat16
IDS = torch.randint(V, (2, 6), generator=torch.Generator().manual_seed(0))
POSITIONS = 1001 * torch.arange(6).repeat(2, 1)  # bfloat16 has eight bits: it rounds these angles by whole turns


def autocast(enabled=True):
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def rotated(x, angles):
    a, b = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-b, a), -1) * angles.sin()


class Scaled(nn.Linear):
    """Computes in float32, whatever autocast asks for."""

    def forward(self, x):
        with autocast(False):
            return super().forward(x.to(self.weight.dtype))


class Layer(nn.Module):
    """apart: what it computes without autocast; of "narrow attention" autocast would compute the same."""

    def __init__(self, apart="nothing"):
        super().__init__()
        self.apart = apart
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = (
            nn.Linear(D, 2 * D),
            (Scaled if apart == "a linear layer's own forward" else nn.Linear)(2 * D, D),
        )
        self.register_buffer("frequencies", 10.0 ** -torch.arange(D // HEADS // 2))

    def out_of_autocast(self, *parts):
        return autocast(False) if self.apart in parts else contextlib.nullcontext()

    def forward(self, x, positions=None):
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if positions is not None:
            with self.out_of_autocast("rotary tables"):
                angles = (self.frequencies.float()[None, :, None] @ positions[:, None].float()).mT.repeat(1, 1, 2)[
                    :, None
                ]
            q, k = rotated(q, angles), rotated(k, angles)
        with self.out_of_autocast("attention", "narrow attention"):
            if self.apart == "attention":
                q, k, v = (tensor.to(self.o.weight.dtype) for tensor in (q, k, v))
            scores = q @ k.mT * (D // HEADS) ** -0.5
            with self.out_of_autocast("softmax"):
                scores = scores.float().softmax(-1)
            o = scores.to(v.dtype) @ v
        x = x + self.o(o.transpose(1, 2).flatten(2))
        h = F.gelu(self.up(self.norm2(x)))
        with self.out_of_autocast("a linear layer"):
            return x + self.down(h.to(self.down.weight.dtype) if self.apart == "a linear layer" else h)


class Model(nn.Module):
    """enters: does its own forward enter autocast? head: what its logits are computed in."""

    def __init__(self, layer=Layer, enters=False, head="autocast"):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layers = nn.Embedding(V, D), nn.ModuleList([layer() for _ in range(2)])
        self.norm, self.head, self.enters, self.head_in = nn.LayerNorm(D), nn.Linear(D, V, bias=False), enters, head

    def forward(self, ids, positions=None, labels=None):
        with autocast() if self.enters else contextlib.nullcontext():
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x, positions)
            x = self.norm(x)
            with autocast(False) if self.head_in == "float32" else contextlib.nullcontext():
                logits = self.head(x.float())
            return (F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()),)


def model_with_its_own_autocast():
    return Model(enters=True), contextlib.nullcontext()


def prepared_by_accelerate():
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(Model()), contextlib.nullcontext()


@pytest.mark.parametrize(
    "build",
    [model_with_its_own_autocast, prepared_by_accelerate, lambda: (Model(), autocast())],
    ids=["the model enters it", "accelerate enters it", "convert is called in it"],
)
def test_the_rows_are_those_without_autocast(build):
    call = {"positions": POSITIONS, "labels": IDS}
    wanted = ckptkern.convert(Model().train(), IDS, **call)
    assert [row.replaced_by for row in wanted] == ["transformer_layer"] * 2 + ["linear_cross_entropy"]
    model, context = build()
    with context:
        conversion = ckptkern.convert(model.train(), IDS, **call)
    assert [(r.replaced_by, r.reason, r.saved_before, r.saved_after) for r in conversion] == [
        (r.replaced_by, r.reason, r.saved_before, r.saved_after) for r in wanted
    ]
    ours, theirs = (step(m, IDS, **call, autocast=torch.bfloat16) for m in (model, Model().train()))
    assert_same(ours, theirs, TOLERANCE)
    assert conversion.calls == {"fused": 3, "checkpointed": 0, "original": 0}


APART = {"nothing": True, "rotary tables": True, "softmax": True, "narrow attention": True, "attention": False,
         "a linear layer": False, "a linear layer's own forward": False}  # fmt: skip


@pytest.mark.parametrize("part", APART)
def test_what_a_layer_keeps_out_of_autocast(part):
    """It is fused without autocast, and with autocast unless that would round what is left out of it."""
    ours, theirs, conversion = pair(Model(lambda: Layer(part)).train(), IDS, positions=POSITIONS, labels=IDS)
    assert [row.replaced_by for row in conversion][:2] == ["transformer_layer"] * 2
    call = {"positions": POSITIONS, "labels": IDS}
    assert_same(step(ours, IDS, **call), step(theirs, IDS, **call))
    assert conversion.calls["fused"] == 3
    actual, wanted = (step(m, IDS, **call, autocast=torch.bfloat16) for m in (ours, theirs))
    # a fused layer rounds elsewhere; a checkpoint of the layer rounds where the layer does
    assert_same(actual, wanted, TOLERANCE)
    assert (conversion.calls["fused"], conversion.calls["checkpointed"]) == ((6, 0) if APART[part] else (4, 2))


def test_rotary_tables_out_of_autocast_are_exact():
    """In bfloat16 their angles would be wrong by whole turns."""
    torch.manual_seed(0)
    layer, x = Layer("rotary tables").train(), torch.randn(2, 6, D)
    with torch.no_grad():
        for weight in (layer.q.weight, layer.k.weight):
            weight.mul_(8)
        layer.o.weight.mul_(8)
    exact = layer(x, POSITIONS).detach()
    ckptkern.convert(layer, x, POSITIONS)
    with autocast():
        y = layer(x.requires_grad_(), POSITIONS).detach().float()
    assert layer.forward.calls["fused"] == 1
    assert float((y - exact).norm() / exact.norm()) < TOLERANCE


@pytest.mark.parametrize("head", ["autocast", "float32"])
def test_a_head_that_is_kept_out_of_autocast(head):
    ours, theirs, conversion = pair(Model(head=head).train(), IDS, positions=POSITIONS, labels=IDS)
    exact = step(theirs, IDS, positions=POSITIONS, labels=IDS)
    actual, wanted = (
        step(model, IDS, positions=POSITIONS, labels=IDS, autocast=torch.bfloat16) for model in (ours, theirs)
    )
    assert_same(actual, wanted, TOLERANCE)
    assert conversion.calls["fused"] == 3
    assert exact.keys() == actual.keys()
