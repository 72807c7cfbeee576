"""Defines the measured models in eager PyTorch, and as `ours` on the same parameters by ckptkern."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .. import eager, ops
from .. import nn as nn_modules


def act(name: str, z: Tensor) -> Tensor:
    """Applies an activation by its name, in torch's ops."""
    return eager.ACTIVATIONS[name].act(z)


class Stack(nn.Module):
    """Layers of act(x @ w.T + b). widths: of x and behind each layer."""

    def __init__(self, widths: Sequence[int], activation: str, bias: bool = True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n, bias) for k, n in itertools.pairwise(widths))
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight)  # keeps the size of activations over the depth
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = act(self.activation, layer(x))
        return x

    def ours(self, x: Tensor, mode: str) -> Tensor:
        weights, biases = [layer.weight for layer in self.layers], [layer.bias for layer in self.layers]
        return ops.linear_stack(x, weights, None if biases[0] is None else biases, self.activation, recompute=mode)


class Linear(Stack):
    """A stack of one layer, which is an op of its own."""

    def ours(self, x: Tensor, mode: str) -> Tensor:
        (layer,) = self.layers
        return ops.linear_act(x, layer.weight, layer.bias, self.activation, recompute=mode)


class Dropout(nn.Dropout):
    def ours(self, x: Tensor, mode: str) -> Tensor:
        return ops.dropout(x, self.p, self.training)


class MLP(nn.Module):
    """fc2(dropout(act(fc1(x)))), hidden width 4 d unless given."""

    def __init__(
        self, width: int, activation: str, bias: bool = True, hidden: int | None = None, dropout_p: float = 0.0
    ):
        super().__init__()
        hidden = hidden or 4 * width
        self.fc1, self.fc2 = nn.Linear(width, hidden, bias), nn.Linear(hidden, width, bias)
        self.activation, self.dropout_p = activation, dropout_p

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.dropout(act(self.activation, self.fc1(x)), self.dropout_p, self.training))

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of ckptkern.mlp_block."""
        return dict(
            up_weight=self.fc1.weight,
            up_bias=self.fc1.bias,
            down_weight=self.fc2.weight,
            down_bias=self.fc2.bias,
            activation=self.activation,
            dropout_p=self.dropout_p,
        )

    def ours(self, x: Tensor, mode: str) -> Tensor:
        return ops.mlp(x, *self.arguments().values(), training=self.training, recompute=mode)


class GatedMLP(nn.Module):
    """down(dropout(act(gate(x)) * up(x))). By default Llama's: silu, no biases, hidden width 8/3 d up to a multiple of 256 (of
    8 in narrow models)."""

    def __init__(
        self,
        width: int,
        activation: str = "silu",
        bias: bool = False,
        hidden: int | None = None,
        dropout_p: float = 0.0,
    ):
        super().__init__()
        hidden = hidden or self.hidden_of(width)
        self.gate, self.up = nn.Linear(width, hidden, bias), nn.Linear(width, hidden, bias)
        self.down, self.activation, self.dropout_p = nn.Linear(hidden, width, bias), activation, dropout_p

    @staticmethod
    def hidden_of(width: int) -> int:
        step = 256 if width >= 256 else 8
        return -(-8 * width // 3 // step) * step

    def forward(self, x: Tensor) -> Tensor:
        h = act(self.activation, self.gate(x)) * self.up(x)
        return self.down(F.dropout(h, self.dropout_p, self.training))

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of ckptkern.gated_mlp and mlp_block."""
        layers = {"gate": self.gate, "up": self.up, "down": self.down}
        arguments = {
            f"{name}_{kind}": getattr(layer, kind) for name, layer in layers.items() for kind in ("weight", "bias")
        }
        return arguments | {"activation": self.activation, "dropout_p": self.dropout_p}

    def ours(self, x: Tensor, mode: str) -> Tensor:
        return ops.gated_mlp(x, **self.arguments(), training=self.training, recompute=mode)


def grouped_experts(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, act: Callable[[Tensor], Tensor]
) -> Tensor:
    """Computes ckptkern.moe_mlp as transformers 5 does ("grouped_mm"): gathers rows in the experts' order, runs two grouped
    matmuls, weights the rows, puts them back in their order, and sums them.

    x [T, d], index and weights [T, k], gate_up [E, 2 h, d], down [E, d, h], whose rows torch wants in multiples of 16 bytes ->
    [T, d]. Autograd saves k (4 d + 8 h) bytes a token in 16 bits, besides the routing.
    """
    pairs = torch.arange(index.numel(), device=x.device)
    ids, order = torch.sort(index.flatten())
    ends = torch.searchsorted(ids, torch.arange(len(gate_up), device=x.device), right=True).int()
    back = torch.empty_like(order).scatter_(0, order, pairs)
    gate, up = F.grouped_mm(x[order // index.shape[1]], gate_up.mT, offs=ends).chunk(2, -1)
    y = F.grouped_mm(act(gate) * up, down.mT, offs=ends)
    y = (y * weights.flatten()[order, None])[back]
    return y.view(-1, index.shape[1], y.shape[1]).sum(1)


class MoE(nn.Module):
    """Experts: sends every row through `top_k` of many gated MLPs, each times a router's weight, in the layout of transformers
    5.

    The row's index alone determines its experts: a router's choice would change with the rounding.

    It runs as in transformers, by torch's grouped matmuls. `interleaved`, one expert after another, also takes float64 and rows
    that are not multiples of 16 bytes.
    """

    def __init__(self, width: int, activation: str, hidden: int, experts: int, top_k: int):
        super().__init__()
        self.activation, self.experts, self.top_k = activation, experts, top_k
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * hidden, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.router = nn.Linear(width, top_k, bias=False)

    def chosen(self, rows: int, device: torch.device | str) -> Tensor:
        """Returns the experts of each row, [rows, top_k]."""
        pairs = torch.arange(rows * self.top_k, device=device)
        return (pairs * 40503 // 8 % self.experts).view(-1, self.top_k)

    def routing(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the experts [rows, top_k] and their weights."""
        return self.chosen(x.shape[0], x.device), torch.sigmoid(self.router(x))

    def expert(self, e: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up[e]).chunk(2, -1)
        return F.linear(act(self.activation, gate) * up, self.down[e])

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64 or any(side * x.itemsize % 16 for side in self.gate_up.shape[1:]):
            return self.interleaved(x)
        return self.grouped(x)

    def grouped(self, x: Tensor) -> Tensor:
        return grouped_experts(x, *self.routing(x), self.gate_up, self.down, functools.partial(act, self.activation))

    def ours(self, x: Tensor, mode: str) -> Tensor:
        return ops.moe_mlp(x, *self.routing(x), self.gate_up, self.down, self.activation, recompute=mode)

    def interleaved(self, x: Tensor) -> Tensor:
        index, (_, weights) = self.chosen(x.shape[0], "cpu"), self.routing(x)
        total = torch.zeros_like(x)
        for e in range(self.experts):
            rows, place = (indices.to(x.device) for indices in torch.where(index == e))
            total = total.index_add(0, rows, self.expert(e, x[rows]) * weights[rows, place, None])
        return total


class RoutedMoE(MoE):
    """An MoE layer with its router and a residual. A bias that only affects the choice sends every row to the first experts,
    so that rounding does not change it."""

    def __init__(self, width: int, activation: str, hidden: int, experts: int, top_k: int):
        super().__init__(width, activation, hidden, experts, top_k)
        self.router = nn.Linear(width, self.experts, bias=False)
        self.register_buffer("score_bias", torch.where(torch.arange(self.experts) < self.top_k, 2.0, 0.0))

    def chosen(self, rows: int, device: torch.device | str) -> Tensor:
        return torch.arange(self.top_k, device=device).expand(rows, self.top_k)

    def routing(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)[:, : self.top_k]  # a softmax whose chosen weights are divided by their sum
        dtype = torch.promote_types(x.dtype, torch.float32)
        return self.chosen(x.shape[0], x.device), torch.softmax(logits, -1, dtype).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)

    def ours(self, x: Tensor, mode: str) -> Tensor:
        weights = self.router.weight, self.gate_up, self.down
        options = dict(top_k=self.top_k, score_bias=self.score_bias, recompute=mode)
        return ops.moe_block(x, *weights, self.activation, **options)[0]


class GroupedRows(MoE):
    """The experts of an MoE layer on rows in their order, one expert per row. Every other expert has twice as many rows, and
    an eighth of the rows has none."""

    def __init__(self, width: int, activation: str, hidden: int, experts: int):
        super().__init__(width, activation, hidden, experts, 1)
        del self.router

    def end(self, rows: int, expert: int | Tensor) -> int | Tensor:
        """Returns the end of each expert's rows."""
        return rows * 7 * (3 * (expert + 1) // 2) // (8 * (3 * self.experts // 2))

    def ends(self, x: Tensor) -> list[int]:
        return [self.end(x.shape[0], expert) for expert in range(self.experts)]

    def ends_there(self, x: Tensor) -> Tensor:
        """Returns the ends as int32 on the device of x, without a copy from the host."""
        return self.end(x.shape[0], torch.arange(self.experts, device=x.device)).to(torch.int32)

    def grouped(self, x: Tensor) -> Tensor:
        ends = self.ends(x)
        used, offs = x[: ends[-1]], self.ends_there(x)
        gate, up = F.grouped_mm(used, self.gate_up.mT, offs=offs).chunk(2, -1)
        y = F.grouped_mm(act(self.activation, gate) * up, self.down.mT, offs=offs)
        return torch.cat([y, torch.zeros_like(x[ends[-1] :])])

    def interleaved(self, x: Tensor) -> Tensor:
        ends = self.ends(x)
        rows = zip([0, *ends], ends, strict=False)
        return torch.cat(
            [*(self.expert(e, x[slice(*part)]) for e, part in enumerate(rows)), torch.zeros_like(x[ends[-1] :])]
        )

    def ours(self, x: Tensor, mode: str) -> Tensor:
        ends = self.ends_there(x)
        return ops.grouped_gated_mlp(x, ends, self.gate_up, self.down, self.activation, recompute=mode)


def norm_of(kind: str | None, width: int) -> nn.Module:
    """Returns the module of attention_block's `norm`."""
    return nn.Identity() if kind is None else (nn.LayerNorm if kind == "layer" else nn.RMSNorm)(width, 1e-5)


def norm_arguments(kind: str | None, norm: nn.Module) -> dict[str, Any]:
    """Returns the arguments of attention_block and mlp_block for the norm."""
    if kind is None:
        return {}
    return dict(norm=kind, norm_weight=norm.weight, norm_bias=getattr(norm, "bias", None), norm_eps=norm.eps)


class MLPBlock(nn.Module):
    """x + mlp(norm(x))."""

    def __init__(self, width: int, mlp: MLP | GatedMLP, norm: str | None = "layer"):
        super().__init__()
        self.kind, self.norm, self.mlp = norm, norm_of(norm, width), mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of ckptkern.mlp_block."""
        return self.mlp.arguments() | norm_arguments(self.kind, self.norm)

    def ours(self, x: Tensor, mode: str) -> Tensor:
        return ops.mlp_block(x, **self.arguments(), training=self.training, recompute=mode)


def attend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, causal: bool = True) -> Tensor:
    """Computes attention [B, H, S, D] by torch. float64 takes one head at a time: all 8192 x 8192 scores do not fit a GPU."""
    if q.dtype != torch.float64:
        return F.scaled_dot_product_attention(
            q, k, v, None, dropout_p, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
    assert not dropout_p, "float64 is the reference, without dropout"
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1 if causal else k.shape[2])

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.T * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf")).softmax(-1) @ v

    share = q.shape[1] // k.shape[1]
    heads = [
        torch.stack(
            [
                checkpoint(head, q[b, h], k[b, h // share], v[b, h // share], use_reentrant=False)
                for h in range(q.shape[1])
            ]
        )
        for b in range(q.shape[0])
    ]
    return torch.stack(heads)


class Core(nn.Module):
    """Attention alone: x [B, S, (H + 2 H_kv) D] holds q, k and v, y [B, S, H D]."""

    def __init__(self, heads: int, kv_heads: int, dropout_p: float = 0.0, causal: bool = True):
        super().__init__()
        self.heads, self.dropout_p, self.causal = [heads, kv_heads, kv_heads], dropout_p, causal

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q [B, H, S, D], k and v [B, H_kv, S, D], views of x."""
        return x.unflatten(-1, (sum(self.heads), -1)).transpose(1, 2).split(self.heads, 1)

    def attended(self, core: Callable[..., Tensor], x: Tensor, *options: Any, **more: Any) -> Tensor:
        o = core(*self.split(x), *options, self.dropout_p if self.training else 0.0, self.causal, **more)
        return o.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attended(attend, x)

    def ours(self, x: Tensor, mode: str) -> Tensor:
        shared = self.heads[0] != self.heads[1]
        return self.attended(ops.scaled_dot_product_attention, x, None, enable_gqa=shared)


class PackedCore(Core):
    """Attention alone on packed sequences of one length."""

    def ours(self, x: Tensor, mode: str) -> Tensor:
        batch, length, _ = x.shape
        qkv = (part.transpose(1, 2).flatten(0, 1) for part in self.split(x))
        bounds = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=x.device)
        options = dict(is_causal=self.causal, enable_gqa=self.heads[0] != self.heads[1])
        return ops.varlen_attn(*qkv, bounds, bounds, length, length, **options).reshape(batch, length, -1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [B, H, S, R] by halves, as Hugging Face does; cos and sin [S, R]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Attention(nn.Module):
    """x + out(attention(norm(x))), the attention sublayer of a GPT layer, with heads of 128 (16 in narrow models) unless given.

    share: query heads per key and value head. dropout_p: of the attention weights. positions: of rotary embeddings, with
    separate weights for q, k and v; 0 for neither.
    """

    def __init__(
        self,
        width: int,
        share: int = 1,
        dropout_p: float = 0.0,
        heads: int | None = None,
        bias: bool = True,
        norm: str | None = "layer",
        causal: bool = True,
        positions: int = 0,
    ):
        super().__init__()
        heads = heads or width // (128 if width >= 512 else 16)
        self.heads, self.head_dim = [heads, *[max(1, heads // share)] * 2], width // heads
        self.dropout_p, self.causal, self.kind = dropout_p, causal, norm
        self.norm, self.out = norm_of(norm, width), nn.Linear(width, width, bias)
        parts = self.heads if positions else [sum(self.heads)]
        self.qkv = nn.ModuleList(nn.Linear(width, n * self.head_dim, bias) for n in parts)
        tables = nn_modules.rotary_tables(torch.arange(positions), self.head_dim) if positions else (None, None)
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin [S, D] of the positions of x."""
        return self.cos[: x.shape[1]], self.sin[: x.shape[1]]

    def split(self, h: Tensor) -> list[Tensor]:
        """Returns q [B, H, S, D], k and v [B, H_kv, S, D] of normalized h, not rotated."""
        parts = [part(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv]
        return parts if len(parts) > 1 else parts[0].split(self.heads, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.norm(x))
        if self.cos is not None:
            q, k = (rotated(heads, *self.tables(x)) for heads in (q, k))
        o = attend(q, k, v, self.dropout_p if self.training else 0.0, self.causal)
        return x + self.out(o.transpose(1, 2).flatten(2))

    def arguments(self, x: Tensor) -> dict[str, Any]:
        """Returns the arguments of ckptkern.attention_block."""
        weights = [part.weight for part in self.qkv]
        return dict(
            qkv_weight=weights if len(weights) > 1 else weights[0],
            qkv_bias=self.qkv[0].bias,
            out_weight=self.out.weight,
            out_bias=self.out.bias,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            is_causal=self.causal,
            dropout_p=self.dropout_p,
            residual=True,
            rotary=None if self.cos is None else self.tables(x),
            **norm_arguments(self.kind, self.norm),
        )

    def ours(self, x: Tensor, mode: str) -> Tensor:
        return ops.attention_block(x, **self.arguments(x), training=self.training, recompute=mode)


class LatentAttention(nn.Module):
    """x + out(attention(norm(x))) with k and v from a latent of four heads' width, as in DeepSeek-V2-Lite: a head of q and k
    has half as many rotated dimensions beside those that it has in `Attention`."""

    def __init__(
        self,
        width: int,
        heads: int,
        length: int,
        dropout_p: float = 0.0,
        bias: bool = False,
        norm: str | None = "rms",
        causal: bool = True,
    ):
        super().__init__()
        self.heads, self.dropout_p, self.causal, self.kind = heads, dropout_p, causal, norm
        self.v = width // heads
        self.rope, self.rank = max(2, self.v // 4 * 2), 4 * self.v
        self.norm, self.latent_norm = norm_of(norm, width), nn.RMSNorm(self.rank, 1e-6)
        self.q = nn.Linear(width, heads * (self.v + self.rope), bias)
        self.kv_a = nn.Linear(width, self.rank + self.rope, bias)
        self.kv_b, self.out = nn.Linear(self.rank, heads * 2 * self.v, bias), nn.Linear(width, width, bias)
        cos, sin = nn_modules.rotary_tables(torch.arange(length), self.rope)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, q_r = self.q(h).unflatten(-1, (self.heads, -1)).transpose(1, 2).split([self.v, self.rope], -1)
        c, shared = self.kv_a(h).split([self.rank, self.rope], -1)
        kv = self.kv_b(self.latent_norm(c)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = kv.split([self.v, self.v], -1)
        shared = rotated(shared[:, None], self.cos, self.sin).expand(-1, self.heads, -1, -1)
        q, k = torch.cat((q, rotated(q_r, self.cos, self.sin)), -1).to(x.dtype), torch.cat((k, shared), -1).to(x.dtype)
        o = attend(q, k, v, self.dropout_p if self.training else 0.0, self.causal)
        return x + self.out(o.transpose(1, 2).flatten(2))

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of ckptkern.latent_attention_block."""
        return dict(
            q_weight=self.q.weight,
            q_bias=self.q.bias,
            kv_a_weight=self.kv_a.weight,
            kv_a_bias=self.kv_a.bias,
            kv_a_norm_weight=self.latent_norm.weight,
            kv_b_weight=self.kv_b.weight,
            kv_b_bias=self.kv_b.bias,
            out_weight=self.out.weight,
            out_bias=self.out.bias,
            num_heads=self.heads,
            rotary=(self.cos, self.sin),
            is_causal=self.causal,
            dropout_p=self.dropout_p,
            residual=True,
            **norm_arguments(self.kind, self.norm),
        )

    def ours(self, x: Tensor, mode: str) -> Tensor:
        return ops.latent_attention_block(x, **self.arguments(), training=self.training, recompute=mode)


class Layer(nn.Module):
    """An attention and an MLP sublayer."""

    def __init__(self, attention: Attention, block: MLPBlock):
        super().__init__()
        self.attention, self.block = attention, block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.attention(x))

    def ours(self, x: Tensor, mode: str) -> Tensor:
        """Runs the layer by ckptkern. mode: one for both sublayers, or "attention's/MLP's"."""
        recompute = tuple(mode.split("/")) if "/" in mode else mode
        sublayers = self.attention.arguments(x), self.block.arguments()
        return ops.transformer_layer(x, *sublayers, training=self.training, recompute=recompute)


class LlamaLayer(Layer):
    """RMSNorm, rotary attention with a quarter as many key and value heads, RMSNorm, SwiGLU, no biases."""

    def __init__(self, width: int):
        attention = Attention(width, 4, bias=False, norm="rms", positions=8192)
        super().__init__(attention, MLPBlock(width, GatedMLP(width), "rms"))
