"""The models that are measured, in eager PyTorch: MLPs, attention, and whole layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .. import nn as nn_modules


class MLP(nn.Module):
    """fc2(dropout(act(fc1(x)))), hidden width 4 d unless given."""

    def __init__(
        self, width: int, act: nn.Module, bias: bool = True, hidden: int | None = None, dropout_p: float = 0.0
    ):
        super().__init__()
        hidden = hidden or 4 * width
        self.fc1, self.act, self.fc2 = nn.Linear(width, hidden, bias), act, nn.Linear(hidden, width, bias)
        self.dropout_p = dropout_p

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.dropout(self.act(self.fc1(x)), self.dropout_p, self.training))

    def arguments(self) -> dict[str, Any]:
        """Those of ckptkern.mlp_block, without the activation."""
        return dict(
            up_weight=self.fc1.weight, up_bias=self.fc1.bias, down_weight=self.fc2.weight, down_bias=self.fc2.bias,
            dropout_p=self.dropout_p,
        )  # fmt: skip


class GatedMLP(nn.Module):
    """down(dropout(act(gate(x)) * up(x))). By default Llama's: silu, no biases, hidden width 8/3 d up to a multiple of 256 (of
    8 in narrow models)."""

    def __init__(
        self, width: int, act: nn.Module | None = None, bias: bool = False, hidden: int | None = None, dropout_p: float = 0.0
    ):  # fmt: skip
        super().__init__()
        hidden = hidden or self.hidden_of(width)
        self.gate, self.up = nn.Linear(width, hidden, bias), nn.Linear(width, hidden, bias)
        self.down, self.act, self.dropout_p = nn.Linear(hidden, width, bias), act or nn.SiLU(), dropout_p

    @staticmethod
    def hidden_of(width: int) -> int:
        step = 256 if width >= 256 else 8
        return -(-8 * width // 3 // step) * step

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self.act(self.gate(x)) * self.up(x), self.dropout_p, self.training))

    def arguments(self) -> dict[str, Any]:
        """Those of ckptkern.mlp_block, without the activation."""
        return dict(
            gate_weight=self.gate.weight, gate_bias=self.gate.bias, up_weight=self.up.weight, up_bias=self.up.bias,
            down_weight=self.down.weight, down_bias=self.down.bias, dropout_p=self.dropout_p,
        )  # fmt: skip


def grouped_experts(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, act: Callable[[Tensor], Tensor]
) -> Tensor:
    """What ckptkern.moe_mlp defines, as transformers 5 runs it ("grouped_mm"): rows gathered in the experts' order, two grouped
    matmuls, weights, the rows back in their order, and their sum.

    x [T, d], index and weights [T, k], gate_up [E, 2 h, d], down [E, d, h], of which torch wants rows of whole 16 bytes
    -> [T, d]. Autograd saves k (4 d + 8 h) bytes a token in 16 bits, besides the routing.
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
    """Every row through `top_k` of many gated MLPs, in the layout of transformers 5, each times a weight of its router.

    Which they are depends on the row's place alone: the choice of a router would change with the rounding.

    As transformers runs it: torch's grouped matmuls. `interleaved`, one expert after another, takes what these do not:
    float64, and rows of no whole 16 bytes.
    """

    def __init__(self, width: int, act: nn.Module, hidden: int, experts: int, top_k: int):
        super().__init__()
        self.act, self.experts, self.top_k = act, experts, top_k
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * hidden, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.router = nn.Linear(width, top_k, bias=False)

    def chosen(self, rows: int, device: torch.device | str) -> Tensor:
        """The experts of each row, [rows, top_k]."""
        pairs = torch.arange(rows * self.top_k, device=device)
        return (pairs * 40503 // 8 % self.experts).view(-1, self.top_k)

    def routing(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(experts [rows, top_k], weights)."""
        return self.chosen(x.shape[0], x.device), torch.sigmoid(self.router(x))

    def expert(self, e: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up[e]).chunk(2, -1)
        return F.linear(self.act(gate) * up, self.down[e])

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64 or any(side * x.itemsize % 16 for side in self.gate_up.shape[1:]):
            return self.interleaved(x)
        return self.grouped(x)

    def grouped(self, x: Tensor) -> Tensor:
        return grouped_experts(x, *self.routing(x), self.gate_up, self.down, self.act)

    def interleaved(self, x: Tensor) -> Tensor:
        index, (_, weights) = self.chosen(x.shape[0], "cpu"), self.routing(x)
        total = torch.zeros_like(x)
        for e in range(self.experts):
            rows, place = (found.to(x.device) for found in torch.where(index == e))
            total = total.index_add(0, rows, self.expert(e, x[rows]) * weights[rows, place, None])
        return total


class RoutedMoE(MoE):
    """An MoE layer with its router and a residual. A bias of the choice alone sends every row to the first experts, so that
    rounding changes none."""

    def __init__(self, width: int, act: nn.Module, hidden: int, experts: int, top_k: int):
        super().__init__(width, act, hidden, experts, top_k)
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


class GroupedRows(MoE):
    """The experts of an MoE layer on rows in their order, each of which has one; every other expert has twice as many, and an
    eighth of the rows is nobody's."""

    def __init__(self, width: int, act: nn.Module, hidden: int, experts: int):
        super().__init__(width, act, hidden, experts, 1)
        del self.router

    def end(self, rows: int, expert: int | Tensor) -> int | Tensor:
        """Where the rows of an expert end."""
        return rows * 7 * (3 * (expert + 1) // 2) // (8 * (3 * self.experts // 2))

    def ends(self, x: Tensor) -> list[int]:
        return [self.end(x.shape[0], expert) for expert in range(self.experts)]

    def ends_there(self, x: Tensor) -> Tensor:
        """The same as int32 on the device of x, without a copy from the host."""
        return self.end(x.shape[0], torch.arange(self.experts, device=x.device)).to(torch.int32)

    def grouped(self, x: Tensor) -> Tensor:
        ends = self.ends(x)
        used, offs = x[: ends[-1]], self.ends_there(x)
        gate, up = F.grouped_mm(used, self.gate_up.mT, offs=offs).chunk(2, -1)
        y = F.grouped_mm(self.act(gate) * up, self.down.mT, offs=offs)
        return torch.cat([y, torch.zeros_like(x[ends[-1] :])])

    def interleaved(self, x: Tensor) -> Tensor:
        ends = self.ends(x)
        rows = zip([0, *ends], ends, strict=False)
        return torch.cat(
            [*(self.expert(e, x[slice(*part)]) for e, part in enumerate(rows)), torch.zeros_like(x[ends[-1] :])]
        )


def norm_of(kind: str | None, width: int) -> nn.Module:
    """The module of attention_block's `norm`."""
    return nn.Identity() if kind is None else (nn.LayerNorm if kind == "layer" else nn.RMSNorm)(width, 1e-5)


def norm_arguments(kind: str | None, norm: nn.Module) -> dict[str, Any]:
    """Those of attention_block and mlp_block for it."""
    if kind is None:
        return {}
    return dict(norm=kind, norm_weight=norm.weight, norm_bias=getattr(norm, "bias", None), norm_eps=norm.eps)


class MLPBlock(nn.Module):
    """x + mlp(norm(x)). activation: the name of the MLP's."""

    def __init__(self, width: int, mlp: MLP | GatedMLP, activation: str, norm: str | None = "layer"):
        super().__init__()
        self.kind, self.activation, self.norm, self.mlp = norm, activation, norm_of(norm, width), mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))

    def arguments(self) -> dict[str, Any]:
        """Those of ckptkern.mlp_block."""
        return self.mlp.arguments() | norm_arguments(self.kind, self.norm) | {"activation": self.activation}


def attend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, causal: bool = True) -> Tensor:
    """Attention [B, H, S, D] by torch. float64 takes one head at a time: all 8192 x 8192 scores do not fit a GPU."""
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
        torch.stack([checkpoint(head, q[b, h], k[b, h // share], v[b, h // share], use_reentrant=False)
                     for h in range(q.shape[1])])
        for b in range(q.shape[0])
    ]  # fmt: skip
    return torch.stack(heads)


class Core(nn.Module):
    """Attention alone: x [B, S, (H + 2 H_kv) D] holds q, k and v, y [B, S, H D]."""

    def __init__(self, heads: int, kv_heads: int, dropout_p: float = 0.0, causal: bool = True):
        super().__init__()
        self.heads, self.kv_heads, self.dropout_p, self.causal = heads, kv_heads, dropout_p, causal

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, S, D], k and v [B, H_kv, S, D], views of x."""
        parts = [self.heads, self.kv_heads, self.kv_heads]
        return x.unflatten(-1, (sum(parts), -1)).transpose(1, 2).split(parts, 1)

    def forward(self, x: Tensor) -> Tensor:
        o = attend(*self.split(x), self.dropout_p if self.training else 0.0, self.causal)
        return o.transpose(1, 2).flatten(2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [B, H, S, R] by halves, as Hugging Face does; cos and sin [S, R]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Attention(nn.Module):
    """x + out(attention(norm(x))), heads of 128 (16 in narrow models) unless given: half of a GPT layer.

    share: query heads per key and value head. dropout_p: of the attention weights. positions: of rotary embeddings, with
    weights of their own for q, k and v; 0 for none of both.
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
        """cos and sin [S, D] of the positions of x."""
        return self.cos[: x.shape[1]], self.sin[: x.shape[1]]

    def split(self, h: Tensor) -> list[Tensor]:
        """q [B, H, S, D], k and v [B, H_kv, S, D] of normalized h, not rotated."""
        parts = [part(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv]
        return parts if len(parts) > 1 else parts[0].split(self.heads, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.norm(x))
        if self.cos is not None:
            q, k = (rotated(one, *self.tables(x)) for one in (q, k))
        o = attend(q, k, v, self.dropout_p if self.training else 0.0, self.causal)
        return x + self.out(o.transpose(1, 2).flatten(2))

    def arguments(self, x: Tensor) -> dict[str, Any]:
        """The arguments of ckptkern.attention_block."""
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


class LatentAttention(nn.Module):
    """x + out(attention(norm(x))) with k and v from a latent of four heads' width, as DeepSeek-V2-Lite's: a head of q and k has
    half as many rotated dimensions beside those that it has in `Attention`."""

    def __init__(
        self, width: int, heads: int, length: int, dropout_p: float = 0.0, bias: bool = False, norm: str | None = "rms",
        causal: bool = True,
    ):  # fmt: skip
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
        """The arguments of ckptkern.latent_attention_block."""
        return dict(
            q_weight=self.q.weight, q_bias=self.q.bias, kv_a_weight=self.kv_a.weight, kv_a_bias=self.kv_a.bias,
            kv_a_norm_weight=self.latent_norm.weight, kv_b_weight=self.kv_b.weight, kv_b_bias=self.kv_b.bias,
            out_weight=self.out.weight, out_bias=self.out.bias, num_heads=self.heads, rotary=(self.cos, self.sin),
            is_causal=self.causal, dropout_p=self.dropout_p, residual=True, **norm_arguments(self.kind, self.norm),
        )  # fmt: skip


class Layer(nn.Module):
    """Attention, and an MLP block."""

    def __init__(self, attention: Attention, block: MLPBlock):
        super().__init__()
        self.attention, self.block = attention, block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.attention(x))

    def arguments(self, x: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments of ckptkern.transformer_layer."""
        return self.attention.arguments(x), self.block.arguments()


class LlamaLayer(Layer):
    """RMSNorm, rotary attention with a quarter as many key and value heads, RMSNorm, SwiGLU, no biases."""

    def __init__(self, width: int):
        attention = Attention(width, 4, bias=False, norm="rms", positions=8192)
        super().__init__(attention, MLPBlock(width, GatedMLP(width), "silu", "rms"))


class LMHeadLoss(nn.Module):
    """The loss of each row in float32, or their mean: cross-entropy of linear(x), or softcap tanh of that over softcap; a row's
    place says its target. float64 takes the rows in chunks, because logits of a large vocabulary do not fit a GPU."""

    CHUNK = 2**27  # logits of a chunk in float64: 1 GiB
    negative = False  # returns losses, or their negatives

    def __init__(
        self, width: int, classes: int, bias: bool = False, softcap: float | None = None, reduction: str = "none"
    ):
        super().__init__()
        self.linear, self.softcap, self.reduction = nn.Linear(width, classes, bias), softcap, reduction

    def targets(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[0], device=x.device) * 40503 % self.linear.out_features

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of each row."""
        z = _upcast(self.linear(x))
        z = self.softcap * torch.tanh(z / self.softcap) if self.softcap else z
        return F.cross_entropy(z, targets, reduction="none")

    def chunked(self, x: Tensor, rows: int) -> Tensor:
        """The loss of each row, in checkpointed chunks of so many rows."""
        chunks = zip(x.split(rows), self.targets(x).split(rows), strict=True)
        return torch.cat([checkpoint(self.losses, *chunk, use_reentrant=False) for chunk in chunks])

    def signed(self, losses: Tensor) -> Tensor:
        return losses.neg() if self.negative else losses

    def reduced(self, losses: Tensor) -> Tensor:
        return self.signed(losses.mean() if self.reduction == "mean" else losses)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return self.reduced(self.chunked(x, max(1, self.CHUNK // self.linear.out_features)))
        return self.reduced(self.losses(x, self.targets(x)))


def _upcast(z: Tensor) -> Tensor:
    """Logits in float32, or in float64 if they are."""
    return z if z.dtype == torch.float64 else z.float()


class Distillation(LMHeadLoss):
    """The KL divergence of each row's probabilities from those of a teacher, or their mean; the teacher's head has weights of
    its own and reads the same rows; top_k: from its k largest and the rest as one class."""

    def __init__(self, width: int, classes: int, bias: bool = False, top_k: int = 0, reduction: str = "none"):
        super().__init__(width, classes, bias, reduction=reduction)
        self.teacher, self.top_k = nn.Linear(width, classes, bias).requires_grad_(False), top_k

    def likeliest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's k largest log-probabilities, and their classes."""
        return _upcast(self.teacher(x.detach())).log_softmax(-1).topk(self.top_k)

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """The divergence of each row, which has no target."""
        log_q = _upcast(self.linear(x)).log_softmax(-1)
        if not self.top_k:
            t = self.teacher(x.detach())
            return F.kl_div(log_q, t.to(log_q.dtype).log_softmax(-1), reduction="none", log_target=True).sum(-1)
        log_p, tokens = self.likeliest(x)
        log_p, log_q = (
            torch.cat([one, torch.log1p(-one.exp().sum(-1, keepdim=True))], -1)
            for one in (log_p, log_q.gather(-1, tokens))
        )
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


class SelectedLogProbs(LMHeadLoss):
    """The log-probability of each row's target."""

    negative = True
