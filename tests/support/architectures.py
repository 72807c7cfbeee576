"""Transformer layers as others write them, for convert to read, and what is measured on them. None knows ckptkern."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

B, S, WIDTH, HEADS, HIDDEN = 2, 6, 32, 4, 48
D = WIDTH // HEADS


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6, plus_one=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * 0.1 + (0.0 if plus_one else 1.0))
        self.variance_epsilon, self.plus_one = eps, plus_one

    def forward(self, x):
        wide = x.float() if x.dtype.itemsize < 4 else x
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return ((self.weight + 1.0 if self.plus_one else self.weight) * normed).to(x.dtype)


class Transposed(nn.Module):
    """A linear layer whose weight is [in, out], as GPT-2's."""

    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * 0.1)
        self.bias = nn.Parameter(torch.randn(columns) * 0.1)

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


def rotated(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def rotary(x):
    angles = torch.arange(x.shape[1])[:, None] * 100.0 ** (-torch.arange(0, D, 2) / D)
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Three projections, grouped queries, rotary tables among the arguments, an optional mask."""

    def __init__(self, kv_heads=2, bias=False, norm=None):
        super().__init__()
        self.scaling, self.dropout = D**-0.5, 0.0
        self.q_proj = nn.Linear(WIDTH, HEADS * D, bias)
        self.k_proj = nn.Linear(WIDTH, kv_heads * D, bias)
        self.v_proj = nn.Linear(WIDTH, kv_heads * D, bias)
        self.o_proj = nn.Linear(HEADS * D, WIDTH, bias)
        self.q_norm, self.k_norm = (nn.Identity() if norm is None else norm(D) for _ in "qk")

    def heads(self, y):
        return y.view(*y.shape[:-1], -1, D).transpose(1, 2)

    def rotated(self, q, tables):
        if tables is None:
            return q
        cos, sin = (table.to(q.dtype).unsqueeze(1) for table in tables)
        return q * cos + rotated(q) * sin

    def queries(self, x):
        """Returns q and what is a gate behind `opened`."""
        return self.q_norm(self.heads(self.q_proj(x))), None

    def keys(self, x):
        return self.k_norm(self.heads(self.k_proj(x)))

    def opened(self, gate):
        return torch.sigmoid(gate)

    def core(self, q, k, v, attention_mask):
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attention_mask,
            self.dropout if self.training else 0.0,
            attention_mask is None,
            scale=self.scaling,
            enable_gqa=True,
        )

    def forward(self, x, tables=None, attention_mask=None):
        q, gate = self.queries(x)
        q, k = self.rotated(q, tables), self.rotated(self.keys(x), tables)
        o = self.core(q, k, self.heads(self.v_proj(x)), attention_mask).transpose(1, 2)
        return self.o_proj((o if gate is None else o * self.opened(gate)).flatten(2)), None


class Rotary(nn.Module):
    """Tables of positions, in v's dtype, as Moshi's."""

    def __init__(self):
        super().__init__()
        self.frequencies = nn.Buffer(100.0 ** (-torch.arange(0, D, 2) / D).repeat(2), persistent=False)

    @torch.no_grad()
    def forward(self, v, positions):
        angles = positions[..., None] * self.frequencies
        return angles.cos().to(v.dtype), angles.sin().to(v.dtype)


class RotaryInside(Attention):
    """Computes its own rotary tables."""

    def __init__(self):
        super().__init__()
        self.rotary_emb = Rotary()

    def rotated(self, q, tables):
        cos, sin = (table.unsqueeze(1) for table in tables)
        return q * cos + rotated(q) * sin

    def forward(self, x, positions, attention_mask=None):
        return super().forward(x, self.rotary_emb(self.heads(self.v_proj(x)), positions), attention_mask)


class WithSinks(Attention):
    """Written out as GPT-OSS's: a column of sinks that is left out again, and the maximum taken off."""

    def __init__(self, **options):
        super().__init__(bias=True, **options)
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def probabilities(self, scores):
        column = self.sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[-2], -1)
        scores = torch.cat([scores, column], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return F.softmax(scores, -1)[..., :-1]

    def core(self, q, k, v, attention_mask):
        k, v = (heads.repeat_interleave(HEADS // heads.shape[1], 1) for heads in (k, v))
        scores = q @ k.transpose(2, 3) * self.scaling
        scores = scores if attention_mask is None else scores + attention_mask
        return F.dropout(self.probabilities(scores), self.dropout, self.training) @ v


class GatedAttention(Attention):
    """o * sigmoid(gate) before the output projection. The gate lies in q's projection, as Qwen3-Next's, or has one of its own,
    with a row for each column (AFMoE) or each head (Step 3.5)."""

    def __init__(self, gate="query"):
        super().__init__(norm=lambda width: RMSNorm(width, plus_one=True))
        self.gate, rows = gate, {"query": 2 * HEADS * D, "columns": HEADS * D, "heads": HEADS}[gate]
        self.add_module("q_proj" if gate == "query" else "gate_proj", nn.Linear(WIDTH, rows, gate == "heads"))

    def queries(self, x):
        q = self.q_proj(x).view(*x.shape[:-1], HEADS, -1)
        q, gate = q.chunk(2, -1) if self.gate == "query" else (q, self.gate_proj(x).view(*x.shape[:-1], HEADS, -1))
        return self.q_norm(q).transpose(1, 2), gate


class Gated(nn.Module):
    def __init__(self, activation=None):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, HIDDEN, False), nn.Linear(WIDTH, HIDDEN, False)
        self.down_proj, self.activation = nn.Linear(HIDDEN, WIDTH, False), activation or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class GatedByHalves(nn.Module):
    """One weight for gate and up; which half is the gate only the numbers tell."""

    def __init__(self, gate, bias=False):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(WIDTH, 2 * HIDDEN, bias), nn.Linear(HIDDEN, WIDTH, bias)
        self.gate = gate

    def forward(self, x):
        halves = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(halves[self.gate]) * halves[1 - self.gate])


class Llama(nn.Module):
    def __init__(self, attention=None, mlp=None, norm=RMSNorm):
        super().__init__()
        self.self_attn, self.mlp = attention or Attention(), mlp or Gated()
        self.input_layernorm, self.post_attention_layernorm = norm(WIDTH), norm(WIDTH)

    def forward(self, x, tables=None, attention_mask=None):
        x = x + self.self_attn(self.input_layernorm(x), tables, attention_mask)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT(nn.Module):
    """A packed projection, dropouts at three places, a residual of the sum's other side."""

    def __init__(self, p=0.0):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = Transposed(WIDTH, 3 * WIDTH), Transposed(WIDTH, WIDTH)
        self.c_fc, self.c_out = Transposed(WIDTH, HIDDEN), Transposed(HIDDEN, WIDTH)
        self.act = nn.GELU(approximate="tanh")
        self.resid_dropout, self.p = nn.Dropout(p), p

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).split(WIDTH, -1)
        q, k, v = (t.view(*x.shape[:2], HEADS, D).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        x = self.resid_dropout(self.c_proj(o.transpose(1, 2).reshape(x.shape))) + x
        return (x + self.resid_dropout(self.c_out(self.act(self.c_fc(self.ln_2(x))))),)


class Bert(nn.Module):
    """Norms after the sum; scores, softmax and mask written out."""

    def __init__(self, p=0.0, softcap=None):
        super().__init__()
        self.softcap = softcap
        self.query, self.key, self.value, self.dense = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm, self.out_norm = nn.LayerNorm(WIDTH, 1e-12), nn.LayerNorm(WIDTH, 1e-12)
        self.dropout = nn.Dropout(p)

    def forward(self, x, attention_mask=None):
        q, k, v = (
            layer(x).view(*x.shape[:2], HEADS, D).permute(0, 2, 1, 3) for layer in (self.query, self.key, self.value)
        )
        scores = torch.matmul(q, k.transpose(-1, -2)) / D**0.5
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if attention_mask is not None:
            scores = scores + attention_mask
        o = torch.matmul(self.dropout(F.softmax(scores, -1)), v).permute(0, 2, 1, 3).contiguous().flatten(2)
        x = self.norm(x + self.dropout(self.dense(o)))
        return self.out_norm(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Torchs(nn.Module):
    """nn.MultiheadAttention inside a layer of another's."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(0.0), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x, attn_mask=None):
        h = self.ln_1(x)
        x = x + self.attention(h, h, h, attn_mask=attn_mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Decoder(Llama):
    """Cross-attention between self-attention and MLP, of fewer heads of k and v, with a mask of its own."""

    def __init__(self):
        super().__init__()
        self.cross_norm, self.cross = RMSNorm(WIDTH), Attention(kv_heads=2, bias=True)

    def remembered(self, memory):
        return memory

    def forward(self, x, memory, memory_mask=None):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        cross, h, memory = self.cross, self.cross_norm(x), self.remembered(memory)
        heads = map(cross.heads, (cross.q_proj(h), cross.k_proj(memory), cross.v_proj(memory)))
        o = F.scaled_dot_product_attention(*heads, memory_mask, enable_gqa=True)
        x = x + cross.o_proj(o.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class TorchsDecoder(nn.Module):
    """Norms after the sum, around nn.MultiheadAttention and what it attends to, whose padding is hidden."""

    def __init__(self):
        super().__init__()
        self.attention, self.cross = (nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x, memory, padding):
        x = self.norms[0](x + self.attention(x, x, x, need_weights=False)[0])
        x = self.norms[1](x + self.cross(x, memory, memory, padding, need_weights=False)[0])
        return self.norms[2](x + self.down(F.gelu(self.up(x))))  # no kink, where rounding decides


class Relative(Bert):
    """A trained bias that all layers add to their scores, and a bool mask that replaces it where it hides."""

    def forward(self, x, bias, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
        added = torch.where(attention_mask, bias, torch.finfo(x.dtype).min)
        return super().forward(x, added), bias


class Sandwich(Llama):
    """Norms before and after each branch; q and k normed over all heads."""

    def __init__(self):
        super().__init__(Attention(bias=True), norm=lambda width: RMSNorm(width, plus_one=True))
        self.self_attn.__class__ = NormedOverHeads
        self.self_attn.q_norm, self.self_attn.k_norm = RMSNorm(HEADS * D), RMSNorm(2 * D)
        self.after_attention, self.after_mlp = RMSNorm(WIDTH), RMSNorm(WIDTH)

    def forward(self, x, tables=None, attention_mask=None):
        h = self.self_attn(self.input_layernorm(x), tables, attention_mask)[0]
        x = x + self.after_attention(h)
        return x + self.after_mlp(self.mlp(self.post_attention_layernorm(x)))


class NormedOverHeads(Attention):
    def queries(self, x):
        return self.heads(self.q_norm(self.q_proj(x))), None

    def keys(self, x):
        return self.heads(self.k_norm(self.k_proj(x)))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(WIDTH) * 0.3)

    def forward(self, x):
        return x * self.gamma


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.drop_prob = p

    def forward(self, x):
        if not self.drop_prob or not self.training:
            return x
        keep = 1 - self.drop_prob
        return x * x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(keep).div_(keep)


class Vision(nn.Module):
    """A packed projection as [3, heads, D], layer scale and drop path."""

    scale = Scale

    def __init__(self, p=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, 1e-6), nn.LayerNorm(WIDTH, 1e-6)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
        self.ls1, self.ls2, self.drop_path1, self.drop_path2 = self.scale(), self.scale(), DropPath(p), DropPath(p)

    def split(self, x):
        """Returns q, k and v [B, heads, S, D]."""
        return self.qkv(x).reshape(*x.shape[:2], 3, HEADS, D).permute(2, 0, 3, 1, 4).unbind(0)

    def attention(self, x):
        return self.proj(F.scaled_dot_product_attention(*self.split(x)).transpose(1, 2).reshape(x.shape))

    def mlp(self, x):
        return self.fc2(self.act(self.fc1(x)))

    def forward(self, x):
        x = x + self.drop_path1(self.ls1(self.attention(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class Buffers(Vision):
    """A causal mask and rotary tables in buffers of many rows, and attention written out."""

    scale = nn.Identity

    def __init__(self, window=16):
        super().__init__()
        self.register_buffer("seen", torch.ones(16, 16).tril().triu(1 - window)[None, None])
        self.cos, self.sin = (nn.Buffer(table[0], persistent=False) for table in rotary(torch.empty(1, 16, 1)))

    def attention(self, x):
        S, (q, k, v) = x.shape[1], self.split(x)
        q, k = (t * self.cos[:S] + rotated(t) * self.sin[:S] for t in (q, k))
        scores = (q @ k.transpose(-2, -1)) * D**-0.5
        scores = scores.masked_fill(self.seen[:, :, :S, :S] == 0, float("-inf"))
        return self.proj((F.softmax(scores, -1) @ v).transpose(1, 2).contiguous().view(x.shape))


class Adaptive(Vision):
    """DiT's layer: norms without weights, whose scale and shift, and gates of the branches, are computed of a condition."""

    scale = nn.Identity

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, 1e-6, elementwise_affine=False) for _ in range(2))
        self.modulation, self.order = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH)), [*range(6)]

    def of(self, condition, x):
        return condition

    def modulated(self, h, shift, scale):
        return h * (1 + scale) + shift

    def gated(self, gate, y):
        return gate * y

    def forward(self, x, condition):
        parts = self.modulation(self.of(condition, x))[:, None].chunk(6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = (parts[i] for i in self.order)
        x = x + self.gated(gate1, self.attention(self.modulated(self.norm1(x), shift1, scale1)))
        return x + self.gated(gate2, self.mlp(self.modulated(self.norm2(x), shift2, scale2)))


class AdaptiveTable(Adaptive):
    """PixArt's: a table of the layer is added to what all layers are given, in sizes of the batch."""

    def __init__(self):
        super().__init__()
        self.modulation, self.table = nn.Identity(), nn.Parameter(torch.randn(6, WIDTH))

    def of(self, condition, x):
        return (self.table[None] + condition.repeat(1, 6).reshape(x.shape[0], 6, -1)).flatten(1)

    def modulated(self, h, shift, scale):
        return shift + (scale + 1) * h


class Windows(Vision):
    """Swin's attention, whose bias is looked up in a table of its own, and post-norms as Swin v2 has."""

    scale = nn.Identity

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * S - 1, HEADS))
        self.register_buffer("index", torch.arange(S)[:, None] - torch.arange(S) + S - 1)

    def attention(self, x):
        q, k, v = self.split(x)
        bias = self.table[self.index.view(-1)].view(S, S, -1).permute(2, 0, 1)
        o = (q @ k.transpose(-1, -2) * D**-0.5 + 16 * torch.sigmoid(bias)[None]).softmax(-1) @ v
        return self.proj(o.transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + self.norm1(self.attention(x))
        return x + self.norm2(self.mlp(x))


class Weighted(Windows):
    """Returns attention's probabilities, or its scores, beside its output, as GPT-J, Bloom and MPT do."""

    def __init__(self, scores=False):
        super().__init__()
        self.scores = scores

    def forward(self, x):
        q, k, v = self.split(self.norm1(x))
        scores = q @ k.transpose(-1, -2) * D**-0.5 + self.table[self.index].permute(2, 0, 1)
        weights = scores.softmax(-1)
        x = x + self.proj((weights @ v).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x)), scores if self.scores else weights


class Parallel(Vision):
    """Attention and MLP read one input, through two norms or one; q, k and v of a head lie side by side."""

    scale = nn.Identity

    def __init__(self, norms):
        super().__init__()
        if norms == 1:
            self.norm2 = self.norm1

    def split(self, x):
        return self.qkv(x).view(*x.shape[:2], HEADS, 3 * D).transpose(1, 2).chunk(3, -1)

    def forward(self, x, tables):
        q, k, v = self.split(self.norm1(x))
        R = tables[0].shape[-1]
        q, k = (
            torch.cat((heads[..., :R] * tables[0] + rotated(heads[..., :R]) * tables[1], heads[..., R:]), -1)
            for heads in (q, k)
        )
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.mlp(self.norm2(x)) + self.proj(o) + x


class ParallelVision(Vision):
    """ViT-22B's layer: both sublayers read one norm, and queries and keys are normed."""

    scale = nn.Identity

    def __init__(self):
        super().__init__()
        self.norm2 = None
        self.q_norm, self.k_norm = nn.LayerNorm(D), nn.LayerNorm(D)

    def split(self, x):
        q, k, v = super().split(x)
        return self.q_norm(q), self.k_norm(k), v

    def forward(self, x):
        h = self.norm1(x)
        return x + self.attention(h) + self.mlp(h)


class LoRA(nn.Module):
    """An adapter as PEFT puts it in a linear layer's place."""

    def __init__(self, base, p=0.0, bias=False, rank=2):
        super().__init__()
        out_features, in_features = base.weight.shape if isinstance(base, nn.Linear) else base.weight.shape[::-1]
        self.base_layer, self._active, self._disabled = base.requires_grad_(False), ["default"], False
        self.scaling = {"default": 0.5, "other": 2.0}
        self.lora_A = nn.ModuleDict({name: nn.Linear(in_features, rank, bias=False) for name in self.scaling})
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, out_features, bias=bias) for name in self.scaling})
        self.dropout = nn.Dropout(p) if p else nn.Identity()

    def forward(self, x):
        y = self.base_layer(x)
        if self._disabled:
            return y
        for name in self._active:
            x = x.to(self.lora_A[name].weight.dtype)
            y = y + self.lora_B[name](self.lora_A[name](self.dropout(x))) * self.scaling[name]
        return y


def adapted(module, only="", **options):
    """Puts adapters in the place of the linear layers whose paths have `only` in them."""
    for path, child in [*module.named_modules()]:
        if isinstance(child, (nn.Linear, Transposed)) and only in path:
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, LoRA(child, **options))
    return module


class Scaled(Llama):
    """A sum that no op has: only attention and MLP are read."""

    def second(self, x):
        return torch.tanh(self.mlp(self.post_attention_layernorm(x)))

    def forward(self, x, tables=None, attention_mask=None):
        x = x + torch.tanh(self.self_attn(self.input_layernorm(x), tables, attention_mask)[0])
        return x + self.second(x)


class Noisy(Scaled):
    def second(self, x):
        return F.dropout(super().second(x), 0.3, self.training)


class Choosing(Scaled):
    """A router, whose scores a recompute rounds otherwise by at most `noise`."""

    noise = 0.0

    def __init__(self):
        super().__init__()
        self.mlp = nn.ModuleList(Gated() for _ in range(4))
        self.router = nn.Linear(WIDTH, len(self.mlp))
        nn.init.zeros_(self.router.bias)
        self.router.weight.data.mul_(1e-4)

    def second(self, x):
        scores = self.router(x)
        if torch._C._current_graph_task_id() >= 0:  # inside of backward
            scores = scores + self.noise * torch.arange(scores.numel()).sin().view_as(scores)
        chosen = scores.topk(1, -1).indices
        return sum((chosen == i) * scores[..., i : i + 1].exp() * expert(x) for i, expert in enumerate(self.mlp))


def nothing(x):
    return {}


class Stack(nn.Module):
    """Layers, an embedding whose weight the head shares, a rotary embedding that all layers share."""

    def __init__(self, layer, calls=nothing, count=2):
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.head = nn.Linear(WIDTH, 20, False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.3)  # logits of order 1, so that no sample outweighs the others
        self.calls = calls

    def forward(self, ids, **kwargs):
        x = self.embed(ids)
        kwargs = self.calls(x) | kwargs
        for layer in self.layers:
            x = layer(x, **kwargs)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x)


class BiasedStack(Stack):
    def __init__(self, *args):
        super().__init__(*args)
        self.bias = nn.Parameter(torch.randn(1, HEADS, 2 * S, 2 * S))

    def forward(self, ids, **kwargs):
        length = ids.shape[1]
        return super().forward(ids, bias=self.bias[..., :length, :length], **kwargs)


def every_second(count, first, second):
    """Returns lengths [count, 1] of samples."""
    return torch.tensor([first, second]).repeat(count)[:count, None]


def with_condition(x):
    return {"condition": x.mean(1)}


def with_tables(x):
    return {"tables": rotary(x)}


def with_positions(x):
    return {"tables": torch.arange(x.shape[1])[None]}


def with_tables_and_mask(x):
    return with_tables(x) | with_mask(x)


def with_part_of_tables(x):
    angles = torch.arange(x.shape[1])[:, None] * 100.0 ** (-torch.arange(0, D // 2, 2) / D)
    angles = torch.cat((angles, angles), -1)[None, None]
    return {"tables": (angles.cos(), angles.sin())}


def with_memory(x):
    return {"memory": 2 * x[:, :4].flip(1)}


def with_padded_memory(x):
    return with_memory(x) | {"padding": torch.arange(4) >= every_second(len(x), 4, 2)}


def with_mask(x):
    padding = torch.zeros(x.shape[0], 1, 1, x.shape[1])
    padding[0, ..., -2:] = -1e4
    return {"attention_mask": padding}


def with_bool_mask(x):
    return {"attention_mask": (torch.arange(x.shape[1]) < every_second(len(x), x.shape[1], 4))[:, None, None]}


@dataclass
class Architecture:
    """layer: makes one; calls: its arguments besides x; replaced_by: the ops that convert finds in a layer of it."""

    layer: Callable[[], nn.Module]
    calls: Callable[[Tensor], dict[str, Any]] = nothing
    replaced_by: tuple[str, ...] = ("transformer_layer",)
    stack: type[Stack] = Stack

    def model(self):
        return self.stack(self.layer, self.calls)


ARCHITECTURES = {
    "llama": Architecture(Llama, with_tables),
    "gemma": Architecture(
        lambda: Llama(mlp=Gated(nn.GELU("tanh")), norm=lambda width: RMSNorm(width, 1e-5, plus_one=True)), with_tables
    ),
    "qwen": Architecture(lambda: Llama(Attention(bias=True, norm=RMSNorm)), with_tables),
    "rotary inside": Architecture(lambda: Llama(RotaryInside()), with_positions),
    "sinks": Architecture(lambda: Llama(WithSinks()), with_tables_and_mask),
    "gated query": Architecture(lambda: Llama(GatedAttention()), with_tables),
    "gated columns": Architecture(lambda: Llama(GatedAttention("columns")), with_tables),
    "gated heads": Architecture(lambda: Llama(GatedAttention("heads")), with_tables),
    "phi3": Architecture(lambda: Llama(mlp=GatedByHalves(0))),
    "gate second": Architecture(lambda: Llama(mlp=GatedByHalves(1))),
    "gpt": Architecture(GPT),
    "bert": Architecture(Bert, with_mask),
    "softcap": Architecture(lambda: Bert(softcap=2.0), with_mask),
    "relative bias": Architecture(Relative, stack=BiasedStack),
    "padded relative bias": Architecture(Relative, with_bool_mask, stack=BiasedStack),
    "buffers": Architecture(Buffers),
    "torch attention": Architecture(Torchs),
    "decoder": Architecture(Decoder, with_memory),
    "torch decoder": Architecture(TorchsDecoder, with_padded_memory),
    "sandwich": Architecture(Sandwich, with_tables),
    "vision": Architecture(Vision),
    "adaptive": Architecture(Adaptive, with_condition),
    "adaptive by a table": Architecture(AdaptiveTable, with_condition),
    "windows": Architecture(Windows),
    "weighted": Architecture(Weighted),
    "parallel": Architecture(lambda: Parallel(2), with_part_of_tables),
    "parallel, normed heads": Architecture(ParallelVision),
    "parallel, one norm": Architecture(lambda: Parallel(1), with_part_of_tables),
}


def ids(seed=1):
    return torch.randint(0, 20, (B, S), generator=torch.Generator().manual_seed(seed))


# -- what is measured on them


def fused_of(conversion):
    return [row.replaced_by for row in conversion.converted]
