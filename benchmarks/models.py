"""The models that are measured, in plain PyTorch: MLPs, attention, and whole layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .. import nn as nn_modules


class MLP(nn.Module):
    """fc2(act(fc1(x))), hidden width 4 d."""

    def __init__(self, width: int, act: nn.Module, bias: bool = True):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width, bias), act, nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), hidden width 8/3 d up to a multiple of 256 (of 8 below 256), no biases: Llama's."""

    def __init__(self, width: int):
        super().__init__()
        step = 256 if width >= 256 else 8
        hidden = -(-8 * width // 3 // step) * step
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def attend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Causal attention [B, H, S, D] by torch. float64 takes one head at a time: all 8192 x 8192 scores do not fit a GPU."""
    if q.dtype != torch.float64:
        return F.scaled_dot_product_attention(
            q, k, v, None, dropout_p, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
    assert not dropout_p, "float64 is the reference, without dropout"
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.T * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf")).softmax(-1) @ v

    share = q.shape[1] // k.shape[1]
    heads = [
        torch.stack([checkpoint(head, q[b, h], k[b, h // share], v[b, h // share], use_reentrant=False)
                     for h in range(q.shape[1])])
        for b in range(q.shape[0])
    ]  # fmt: skip
    return torch.stack(heads)


class Attention(nn.Module):
    """x + out(attention(norm(x))), causal, heads of 128 (16 in narrow models): half of a GPT layer.

    share: query heads per key and value head. dropout_p: of the attention weights.
    """

    def __init__(self, width: int, share: int = 1, dropout_p: float = 0.0):
        super().__init__()
        self.head_dim, self.dropout_p = 128 if width >= 512 else 16, dropout_p
        self.heads = width // self.head_dim
        self.kv_heads = max(1, self.heads // share)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        o = attend(q, k, v, self.dropout_p if self.training else 0.0)
        return x + self.out(o.transpose(1, 2).flatten(2))

    def arguments(self, x: Tensor) -> dict[str, Any]:
        """The arguments of ckptkern.attention_block."""
        return dict(
            qkv_weight=self.qkv.weight, qkv_bias=self.qkv.bias, out_weight=self.out.weight, out_bias=self.out.bias,
            num_heads=self.heads, num_kv_heads=self.kv_heads, norm="layer", norm_weight=self.norm.weight,
            norm_bias=self.norm.bias, norm_eps=self.norm.eps, is_causal=True, dropout_p=self.dropout_p, residual=True,
        )  # fmt: skip


class GPTLayer(nn.Module):
    """Attention, and x + mlp(norm(x)) with GELU."""

    def __init__(self, width: int):
        super().__init__()
        self.attention, self.norm, self.mlp = Attention(width), nn.LayerNorm(width), MLP(width, nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.mlp(self.norm(x))

    def arguments(self, x: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments of ckptkern.transformer_layer."""
        mlp = self.mlp
        return self.attention.arguments(x), dict(
            up_weight=mlp.fc1.weight, up_bias=mlp.fc1.bias, down_weight=mlp.fc2.weight, down_bias=mlp.fc2.bias,
            activation="gelu", norm="layer", norm_weight=self.norm.weight, norm_bias=self.norm.bias,
            norm_eps=self.norm.eps,
        )  # fmt: skip


class LlamaLayer(nn.Module):
    """RMSNorm, rotary attention with a quarter as many key and value heads, RMSNorm, SwiGLU, no biases."""

    POSITIONS = 8192

    def __init__(self, width: int):
        super().__init__()
        self.head_dim = 128 if width >= 512 else 16
        self.heads = width // self.head_dim
        self.kv_heads = max(1, self.heads // 4)
        rows = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        self.q, self.k, self.v = (nn.Linear(width, n, bias=False) for n in rows)
        self.out, self.mlp = nn.Linear(width, width, bias=False), GatedMLP(width)
        self.norm, self.mlp_norm = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        cos, sin = nn_modules.rotary_tables(torch.arange(self.POSITIONS), self.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates x [B, H, S, D] by halves, as Hugging Face does."""
        S, half = x.shape[2], self.head_dim // 2
        return x * self.cos[:S] + torch.cat((-x[..., half:], x[..., :half]), -1) * self.sin[:S]

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(attend(self.rotate(q), self.rotate(k), v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))

    def arguments(self, x: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments of ckptkern.transformer_layer."""
        S, mlp = x.shape[1], self.mlp
        return dict(
            qkv_weight=[self.q.weight, self.k.weight, self.v.weight], qkv_bias=None, out_weight=self.out.weight,
            out_bias=None, num_heads=self.heads, num_kv_heads=self.kv_heads, norm="rms", norm_weight=self.norm.weight,
            norm_eps=self.norm.eps, rotary=(self.cos[:S], self.sin[:S]), is_causal=True,
        ), dict(
            gate_weight=mlp.gate.weight, up_weight=mlp.up.weight, up_bias=None, down_weight=mlp.down.weight,
            down_bias=None, activation="silu", norm="rms", norm_weight=self.mlp_norm.weight,
            norm_eps=self.mlp_norm.eps,
        )  # fmt: skip
