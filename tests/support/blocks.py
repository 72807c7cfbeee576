"""The attention regions, declared once for all tests: inputs, the call, the same in eager PyTorch, and what is saved.

A `Block` is used as a `cases.Setup` is: `fused`, `call` and `plain` take tensors by name, x first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from support.cases import ACTIVATIONS, MODES, SEED, Tensors
from torch import Tensor

import ckptkern
from ckptkern import state

HEADS, HEAD_DIM, FEATURES, HIDDEN = 4, 6, 10, 12
BATCH, LENGTH, KEY_LENGTH = 2, 7, 5
P, RESID_P, PATH_P = 0.3, 0.2, 0.3
RANK, LORA_SCALE = 3, 0.5
LAYERS = {
    "q": 0,
    "qkv": 0,
    "k": 1,
    "v": 2,
    "out": 3,
    "gate": 0,
    "up": 1,
    "down": 2,
}  # and the place of its update's dropout

RngStates = Iterator[Tensor]


def rng_states() -> RngStates:
    """The states that the calls after torch.manual_seed(SEED) draw, in order."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        yield torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator)


def apply_dropout(h: Tensor, p: float, drawn: RngStates) -> Tensor:
    """Dropout of the rows of h [..., N]."""
    if not p:
        return h
    mask = state.keep_mask(next(drawn), p, math.prod(h.shape[:-1]), h.shape[-1]).view(h.shape)
    return h * state.threshold_scale(p)[1] * mask


def unfused_norm(x: Tensor, kind: str | None, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if kind == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5) if kind else x


def unfused_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's rotation, on [B, S, H, D]; dimensions beyond those of cos are left as they are."""
    R = cos.shape[-1]
    rotated, rest = x[..., :R], x[..., R:]
    swapped = torch.cat((-rotated[..., R // 2 :], rotated[..., : R // 2]), -1)
    cos, sin = (c.to(x.dtype).unsqueeze(-2) for c in (cos, sin))
    return torch.cat((rotated * cos + swapped * sin, rest), -1)


def unfused_rotary_of_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """GPT-J's rotation, on [B, S, H, D]: neighbours as complex numbers, rotated by an angle that the table holds twice."""
    R = cos.shape[-1]
    turns = torch.complex(*(c.to(x.dtype)[..., ::2].contiguous() for c in (cos, sin))).unsqueeze(-2)
    pairs = torch.view_as_complex(x[..., :R].unflatten(-1, (-1, 2)).contiguous())
    return torch.cat((torch.view_as_real(pairs * turns).flatten(-2), x[..., R:]), -1)


def unfused_attention(
    q,
    k,
    v,
    *,
    scale=None,
    softcap=None,
    slopes=None,
    added=None,
    causal=False,
    hidden=None,
    p=0.0,
    drawn=None,
    sinks=None,
) -> Tensor:
    """[B, H, S, D] of dropout(softmax(q k^T - slopes |i - j| + added)) v; slopes: [H] or [B, H]; softcap: as Gemma 2 caps the
    scores; sinks [H]: a column of scores that is left out of the softmax's result, as in GPT-OSS.

    hidden: bool, broadcast to the scores, True = not seen.
    """
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = torch.tanh(s / softcap) * softcap
    if slopes is not None:
        i, j = (torch.arange(size) for size in s.shape[-2:])
        s = s - slopes.to(s.dtype)[..., None, None] * (i[:, None] - j).abs()
    s = s if added is None else s + added
    if causal:
        later = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
        hidden = later if hidden is None else later | hidden
    if hidden is not None:
        s = s.masked_fill(hidden, -math.inf)
    if sinks is None:
        probabilities = s.softmax(-1)
    else:
        probabilities = torch.cat((s, sinks.to(s.dtype)[:, None, None].expand(*s.shape[:-1], 1)), -1).softmax(-1)[
            ..., :-1
        ]
    if p:
        B, H, Sq, Sk = s.shape
        keep = state.keep_mask(next(drawn), p, Sq, Sk, planes=B * H).view(s.shape)
        probabilities = probabilities * state.threshold_scale(p)[1] * keep
    return probabilities @ v


# -- the sublayers of a layer ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sublayer:
    """What both sublayers have: a norm before or after, dropout of the branch, a norm of it, a factor, a vector or a vector for
    each sample that scales it, dropout of whole samples of it, a residual. adaptive: a norm before it with scale and shift of
    each sample."""

    norm: str | None = "layer"
    norm_first: bool = True
    post_norm: str | None = None
    adaptive: bool = False
    layer_scale: float | str | None = None
    path_p: float = 0.0
    resid_p: float = RESID_P
    residual: bool = True
    bias: bool = True
    lora: tuple[str, ...] = ()  # the layers that have a low-rank update
    lora_p: float = 0.0

    prefix = ""

    def norm_shapes(self) -> dict[str, tuple[int, ...]]:
        kinds = {f"{self.prefix}norm": self.norm, f"{self.prefix}post_norm": self.post_norm}
        shapes = {f"{name}_weight": (FEATURES,) for name, kind in kinds.items() if kind}
        shapes |= {f"{name}_bias": (FEATURES,) for name, kind in kinds.items() if kind == "layer"}
        gates = {"vector": (FEATURES,), "samples": (BATCH, FEATURES)}
        shapes |= {f"{self.prefix}layer_scale": gates[self.layer_scale]} if self.layer_scale in gates else {}
        vectors = {"norm_scale": (BATCH, FEATURES), "norm_shift": (BATCH, 1, FEATURES)} if self.adaptive else {}
        return shapes | {f"{self.prefix}{name}": shape for name, shape in vectors.items()}

    def options(self, t: Tensors) -> dict:
        own = {name.removeprefix(self.prefix): value for name, value in t.items() if name in self.norm_shapes()}
        return dict(
            norm=self.norm, norm_first=self.norm_first, post_norm=self.post_norm, layer_scale=self.layer_scale,
            resid_dropout_p=self.resid_p, drop_path_p=self.path_p, residual=self.residual,
        ) | own  # fmt: skip

    def lora_shapes(self, weights: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        given = {name: weights[f"{name}_weight"] for name in self.lora}
        shapes = {f"{name}_lora_a": (RANK, columns) for name, (_, columns) in given.items()}
        return shapes | {f"{name}_lora_b": (rows, RANK) for name, (rows, _) in given.items()}

    def lora_arguments(self, t: Tensors) -> dict:
        tensors = {name: [t[f"{name}_lora_{one}"] for one in "ab"] for name in self.lora}
        return {
            "lora": {name: ckptkern.LoRA(a, b, LORA_SCALE, self.lora_p) for name, (a, b) in tensors.items()} or None
        }

    def lora_state(self, drawn: RngStates) -> Tensor | None:
        return next(drawn) if self.lora_p else None

    def linear(self, name: str, x: Tensor, t: Tensors, drawn: Tensor | None, more_rows: int = 0) -> Tensor:
        """more_rows: of the sublayer's other input."""
        y = F.linear(x, t[f"{name}_weight"], t.get(f"{name}_bias"))
        if name not in self.lora:
            return y
        if drawn is not None:
            rows = math.prod(x.shape[:-1])
            first = LAYERS[name] * (rows + more_rows)
            saved = state.keep_mask(drawn, self.lora_p, first + rows, x.shape[-1])[..., first:, :].view(x.shape)
            x = x * state.threshold_scale(self.lora_p)[1] * saved
        a, b = (t[f"{name}_lora_{one}"] for one in "ab")
        update = F.linear(F.linear(x if torch.is_autocast_enabled("cpu") else x.to(a.dtype), a), b) * LORA_SCALE
        return (y + update).to(y.dtype)

    def lora_matmuls(self) -> dict[str, tuple[Fraction, Fraction]]:
        """Multiply-adds per token of each update's matmuls with A and with B."""
        shapes = {name.removeprefix(self.prefix): math.prod(shape) for name, shape in self.shapes().items()}
        return {
            name: tuple(self.share(name) * shapes[f"{name}_lora_{one}"] for one in "ab") for name in self.lora
        }  # fmt: skip

    def lora_multiply_adds(self, recomputed: Iterable[str]) -> tuple[int, int]:
        """(forward's, backward's) of the updates, per token; recomputed: the layers that backward runs again."""
        matmuls = self.lora_matmuls()
        again = sum(sum(matmuls.get(name, ())) for name in recomputed)
        return sum(map(sum, matmuls.values())), sum(3 * a + 2 * b for a, b in matmuls.values()) + again

    def share(self, name: str) -> Fraction | int:
        """The rows that a layer reads, for each token."""
        return 1

    def drops(self) -> list[float]:
        return [self.lora_p, self.dropout_p, self.resid_p, self.path_p]

    def states(self) -> int:
        return sum(p > 0 for p in self.drops())

    def parameters_after(self) -> list[str]:
        """The names of the parameters behind the branch's last matmul."""
        return [name for name in self.norm_shapes() if not name.startswith(f"{self.prefix}norm") or not self.norm_first]

    def reads_branch(self) -> bool:
        """Does backward read what the branch gave?"""
        return bool(self.post_norm or self.layer_scale in ("vector", "samples") or (self.norm and not self.norm_first))

    def unfused(self, x: Tensor, t: Tensors, drawn: RngStates) -> Tensor:
        def norm(h, name="norm"):
            weight, bias = (t.get(f"{self.prefix}{name}_{parameter}") for parameter in ("weight", "bias"))
            return unfused_norm(h, getattr(self, name), weight, bias)

        h = norm(x) if self.norm_first else x
        if self.adaptive:
            h = h * (1 + t[f"{self.prefix}norm_scale"][:, None]) + t[f"{self.prefix}norm_shift"]
        y = apply_dropout(self.branch(h, t, drawn), self.resid_p, drawn)
        y = norm(y, "post_norm")
        if self.layer_scale:
            scale = t.get(f"{self.prefix}layer_scale", self.layer_scale)
            y = y * (scale[:, None] if self.layer_scale == "samples" else scale)
        if self.path_p:
            saved = state.keep_mask(next(drawn), self.path_p, len(y), 1).view(-1, 1, 1)
            y = y * state.threshold_scale(self.path_p)[1] * saved
        y = x + y if self.residual else y
        return y if self.norm_first else norm(y)


@dataclass(frozen=True)
class Attention(Sublayer):
    kv_heads: int = HEADS
    packed: bool = True  # one qkv weight; else three
    layout: str = "qkv"
    causal: bool = True
    padded: bool = False
    rotary: bool = False
    batched_tables: bool = False  # [B, S, R]; else [S, R]
    interleaved: bool = False
    slopes: tuple[int, ...] = ()  # their shape
    mask: tuple[int, ...] = ()  # the shape of one that is trained
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    gate: str = ""  # "columns" or "heads", with a projection of its own that has as many rows; or "query", in q's
    qk_norm: str = ""  # rms or layer, of one head, or followed by " rows" (one for each head) or " all" (heads at once)
    dropout_p: float = P
    out: int = FEATURES
    key_features: int = 0  # of key_value; 0 is self-attention

    @property
    def prefix(self) -> str:
        return "cross_" if self.key_features else ""

    def own(self, t: Tensors) -> Tensors:
        """The sublayer's tensors by its own names."""
        return {name.removeprefix(self.prefix): value for name, value in t.items() if name.startswith(self.prefix)}

    def share(self, name: str) -> Fraction | int:
        return Fraction(self.columns(), LENGTH) if name in ("k", "v") else 1

    def columns(self) -> int:
        return KEY_LENGTH if self.key_features else LENGTH

    def shapes(self) -> dict[str, tuple[int, ...]]:
        rows = {"q": HEADS * HEAD_DIM, "k": self.kv_heads * HEAD_DIM, "v": self.kv_heads * HEAD_DIM}
        rows = {"qkv": sum(rows.values())} if self.packed else rows
        rows |= {"q": 2 * rows["q"]} if self.gate == "query" else {}
        rows |= {"o_gate": self.gate_columns()} if self.gate not in ("", "query") else {}
        features = {"q": FEATURES, "qkv": FEATURES, "o_gate": FEATURES}
        shapes = {f"{name}_weight": (n, features.get(name, self.key_features or FEATURES)) for name, n in rows.items()}
        shapes |= {"out_weight": (self.out, HEADS * HEAD_DIM)}
        if self.bias:
            shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
        if self.qk_norm:
            shapes |= {"q_gain": self.qk_shape(HEADS), "k_gain": self.qk_shape(self.kv_heads)}
        if self.qk_norm.startswith("layer"):
            shapes |= {"q_shift": self.qk_shape(HEADS), "k_shift": self.qk_shape(self.kv_heads)}
        shapes |= {"mask": self.mask} if self.mask else {}
        shapes |= {"sinks": (HEADS,)} if self.sinks else {}
        shapes |= self.lora_shapes(shapes)
        shapes = {f"{self.prefix}{name}": shape for name, shape in shapes.items()}
        memory = {"key_value": (BATCH, KEY_LENGTH, self.key_features)} if self.key_features else {}
        return memory | shapes | self.norm_shapes()

    def gate_columns(self) -> int:
        return 0 if not self.gate else HEADS if self.gate == "heads" else HEADS * HEAD_DIM

    def qk_shape(self, heads: int) -> tuple[int, ...]:
        return {"rows": (heads, HEAD_DIM), "all": (heads * HEAD_DIM,)}.get(self.qk_norm.partition(" ")[2], (HEAD_DIM,))

    def unfused_qk_norm(self, heads: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = heads.flatten(-2) if self.qk_norm.endswith("all") else heads
        normed = unfused_norm(rows, self.qk_norm.partition(" ")[0], None, None) * weight
        return (normed if bias is None else normed + bias).view(heads.shape)

    def tables(self) -> tuple[Tensor, Tensor] | None:
        angles = torch.arange(LENGTH)[:, None] * torch.tensor([1.0, 0.1])
        if self.batched_tables:
            angles = torch.stack([angles * (b + 1) for b in range(BATCH)])  # angles + b would change no score
        angles = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return (angles.cos(), angles.sin()) if self.rotary else None  # for 4 of the 6 dimensions

    def alibi(self) -> Tensor | None:
        return 2.0 ** -torch.arange(1, 1 + math.prod(self.slopes)).view(self.slopes) if self.slopes else None

    def padding(self) -> Tensor | None:
        return torch.arange(self.columns()) >= torch.tensor([[self.columns()], [4]]) if self.padded else None

    def arguments(self, t: Tensors) -> dict:
        around, key_value, t = self.options(t), t.get("key_value"), self.own(t)
        weights, biases = ([t.get(f"{name}_{kind}") for name in "qkv"] for kind in ("weight", "bias"))
        return dict(
            key_value=key_value if self.key_features else None, qkv_weight=t["qkv_weight"] if self.packed else weights,
            qkv_bias=None if not self.bias else t["qkv_bias"] if self.packed else biases,
            out_weight=t["out_weight"], out_bias=t.get("out_bias"), num_heads=HEADS, num_kv_heads=self.kv_heads,
            qkv_layout=self.layout,
            qk_norm=tuple((t[f"{n}_gain"], t.get(f"{n}_shift")) for n in "qk") if self.qk_norm else None,
            qk_norm_kind=self.qk_norm.partition(" ")[0] or "rms", qk_norm_eps=1e-5, rotary=self.tables(),
            rotary_interleaved=self.interleaved, alibi_slopes=self.alibi(), scale=self.scale,
            softcap=self.softcap, is_causal=self.causal, sinks=t.get("sinks"), gate_weight=t.get("o_gate_weight"),
            gate_bias=t.get("o_gate_bias"), gate_in_query=self.gate == "query",
            attn_mask=t.get("mask"), key_padding_mask=self.padding(), dropout_p=self.dropout_p, **self.lora_arguments(t),
            **around,
        )  # fmt: skip

    def branch(self, h: Tensor, t: Tensors, drawn: RngStates) -> Tensor:
        key_value, t, lora = t.get("key_value"), self.own(t), self.lora_state(drawn)
        if self.key_features and not self.packed:
            rows = [math.prod(one.shape[:-1]) for one in (h, key_value)]
            q = self.linear("q", h, t, lora, rows[1])
            k, v = (self.linear(name, key_value, t, lora, rows[0]) for name in "kv")
            q, gate = self.unfused_gate(q, h, t)
            k, v = (one.unflatten(-1, (-1, HEAD_DIM)) for one in (k, v))
        elif self.key_features:
            weights, biases = ([t.get(f"{name}_{kind}") for name in "qkv"] for kind in ("weight", "bias"))
            if self.packed:
                weights = t["qkv_weight"].unflatten(0, (-1, HEAD_DIM)).split([HEADS, self.kv_heads, self.kv_heads])
                weights = [w.flatten(0, 1) for w in weights]
                biases = t["qkv_bias"].split([len(w) for w in weights]) if self.bias else biases
            rows = zip((h, key_value, key_value), weights, biases, strict=True)
            q, k, v = (F.linear(*one).unflatten(-1, (-1, HEAD_DIM)) for one in rows)
        elif self.packed:
            qkv = self.linear("qkv", h, t, lora)
        else:
            q, gate = self.unfused_gate(self.linear("q", h, t, lora), h, t)
            qkv = torch.cat([q.flatten(-2), *(self.linear(name, h, t, lora) for name in "kv")], -1)
        if self.packed:
            gate = self.unfused_gate(None, h, t)[1]
        if self.key_features:
            pass
        elif self.layout == "qkv":
            q, k, v = qkv.unflatten(-1, (-1, HEAD_DIM)).split([HEADS, self.kv_heads, self.kv_heads], -2)
        else:  # as GPT-NeoX and Falcon take them apart
            groups = qkv.unflatten(-1, (self.kv_heads, -1, HEAD_DIM))
            q, k, v = groups[..., :-2, :].flatten(-3, -2), groups[..., -2, :], groups[..., -1, :]
        if self.qk_norm:
            q = self.unfused_qk_norm(q, t["q_gain"], t.get("q_shift"))
            k = self.unfused_qk_norm(k, t["k_gain"], t.get("k_shift"))
        if self.rotary:
            turn = unfused_rotary_of_pairs if self.interleaved else unfused_rotary
            q, k = (turn(heads, *self.tables()) for heads in (q, k))
        hidden = self.padding()
        o = unfused_attention(
            *(heads.transpose(-3, -2) for heads in (q, k, v)), scale=self.scale, softcap=self.softcap,
            slopes=self.alibi(), added=t.get("mask"), causal=self.causal, p=self.dropout_p, drawn=drawn,
            hidden=None if hidden is None else hidden[:, None, None], sinks=t.get("sinks"),
        )  # fmt: skip
        if gate is not None:
            o = o * torch.sigmoid(gate).transpose(-3, -2)
        more_rows = math.prod(key_value.shape[:-1]) if self.key_features else 0
        return self.linear("out", o.transpose(-3, -2).flatten(-2), t, lora, more_rows)

    def unfused_gate(self, q: Tensor | None, h: Tensor, t: Tensors) -> tuple[Tensor | None, Tensor | None]:
        """(q, the gate) [B, S, H, D or 1]."""
        if self.gate == "query":  # as Qwen3-Next takes them apart
            return q.unflatten(-1, (HEADS, -1)).chunk(2, -1)
        q = None if q is None else q.unflatten(-1, (HEADS, -1))
        if not self.gate:
            return q, None
        return q, F.linear(h, t["o_gate_weight"], t.get("o_gate_bias")).unflatten(-1, (HEADS, -1))

    def saved(self, mode: str) -> tuple[int, int]:
        """(elements in the compute dtype, bytes) per token, without x."""
        core, keys = HEADS * HEAD_DIM, 2 * self.kv_heads * HEAD_DIM * Fraction(self.columns(), LENGTH)
        elements = {"full": 0, "selective": core, "none": 2 * core + keys + self.gate_columns()}[mode]
        return elements, 0 if mode == "full" else 4 * HEADS

    def matmuls(self) -> dict[str, int]:
        """Multiply-adds per token of each matmul, and of one [S, D] x [D, S] of all heads."""
        core = HEADS * HEAD_DIM
        keys = Fraction(self.columns(), LENGTH) * (self.key_features or FEATURES)
        qkv = FEATURES * (core + self.gate_columns()) + keys * 2 * self.kv_heads * HEAD_DIM
        return {"qkv": qkv, "out": core * self.out, "core": core * self.columns()}

    def multiply_adds(self, mode: str) -> tuple[int, int]:
        """(forward's, backward's) per token, everything trained."""
        qkv, out, core = self.matmuls().values()
        backward = 2 * (qkv + out) + 5 * core
        backward += {"none": 0, "selective": qkv, "full": qkv + 2 * core}[mode]
        recomputed = [name for name in ("q", "k", "v", "qkv") if mode != "none"] + ["out"] * self.reads_branch()
        lora = self.lora_multiply_adds(recomputed)
        branch = out + self.gate_again(mode) if self.reads_branch() else 0
        return qkv + out + 2 * core + lora[0], backward + branch + lora[1]

    def gate_again(self, mode: str) -> int:
        """Multiply-adds per token of the gate alone, which what the branch gave is recomputed of, with q if they have one
        projection; unless all projections are at hand."""
        columns = self.gate_columns() * (2 if self.gate == "query" else 1)
        return FEATURES * columns if mode == "selective" else 0


NOPE, ROPE = 3, 4  # of the 7 dimensions of q and k in latent attention
LATENT_EPS = 1e-2  # of the latents' norms, so that another norm's is another result


@dataclass(frozen=True)
class Latent(Attention):
    """Multi-head latent attention; of Attention's options those that it has."""

    q_rank: int = 0  # of q's latent; 0: none
    kv_rank: int = 8
    v: int = 5
    latent_norms: bool = True

    def projections(self) -> dict[str, tuple[int, int]]:
        shapes = {"q_a": (self.q_rank, FEATURES)} if self.q_rank else {}
        return shapes | {
            "q": (HEADS * (NOPE + ROPE), self.q_rank or FEATURES), "kv_a": (self.kv_rank + ROPE, FEATURES),
            "kv_b": (HEADS * (NOPE + self.v), self.kv_rank),
        }  # fmt: skip

    def shapes(self) -> dict[str, tuple[int, ...]]:
        weights = self.projections() | {"out": (self.out, HEADS * self.v)}
        shapes = {f"{name}_weight": shape for name, shape in weights.items()}
        if self.bias:
            shapes |= {f"{name}_bias": shape[:1] for name, shape in weights.items()}
        if self.latent_norms:
            ranks = {"q_a": self.q_rank, "kv_a": self.kv_rank}
            shapes |= {f"{name}_norm_weight": (rank,) for name, rank in ranks.items() if rank}
        return shapes | ({"mask": self.mask} if self.mask else {}) | self.norm_shapes()

    def arguments(self, t: Tensors) -> dict:
        own = {name: t[name] for name in self.shapes() if name != "mask" and name not in self.norm_shapes()}
        return dict(
            own, num_heads=HEADS, latent_norm_eps=LATENT_EPS, rotary=self.tables(), rotary_interleaved=self.interleaved,
            scale=self.scale, softcap=self.softcap, is_causal=self.causal, attn_mask=t.get("mask"),
            key_padding_mask=self.padding(), dropout_p=self.dropout_p, **self.options(t),
        )  # fmt: skip

    def branch(self, h: Tensor, t: Tensors, drawn: RngStates) -> Tensor:
        def linear(name: str, x: Tensor) -> Tensor:
            return F.linear(x, t[f"{name}_weight"], t.get(f"{name}_bias"))

        def norm(name: str, x: Tensor) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], t[f"{name}_norm_weight"], LATENT_EPS) if self.latent_norms else x

        q = linear("q", norm("q_a", linear("q_a", h)) if self.q_rank else h).unflatten(-1, (HEADS, -1))
        c, shared = linear("kv_a", h).split([self.kv_rank, ROPE], -1)
        k, v = linear("kv_b", norm("kv_a", c)).unflatten(-1, (HEADS, -1)).split([NOPE, self.v], -1)
        unrotated, q, shared = q[..., :NOPE], q[..., NOPE:], shared.unsqueeze(-2)
        if self.rotary:
            # as DeepSeek-V3 does: pairs become halves, of q and of k alike
            order = [*range(0, ROPE, 2), *range(1, ROPE, 2)] if self.interleaved else [*range(ROPE)]
            tables = [table[..., order] for table in self.tables()]
            q, shared = (unfused_rotary(heads[..., order], *tables) for heads in (q, shared))
        q = torch.cat((unrotated, q), -1)
        k = torch.cat((k, shared.expand(*shared.shape[:-2], HEADS, ROPE).to(k.dtype)), -1)
        hidden = self.padding()
        o = unfused_attention(
            *(heads.transpose(-3, -2) for heads in (q, k, v)), scale=self.scale, softcap=self.softcap, added=t.get("mask"),
            causal=self.causal, p=self.dropout_p, drawn=drawn, hidden=None if hidden is None else hidden[:, None, None],
        )  # fmt: skip
        return linear("out", o.transpose(-3, -2).flatten(-2))

    def saved(self, mode: str) -> tuple[int, int]:
        o, q, kv = (HEADS * n for n in (self.v, NOPE + ROPE, NOPE + self.v))
        elements = {"full": 0, "selective": o, "none": o + q + kv + self.q_rank + self.kv_rank + ROPE}[mode]
        return elements, 0 if mode == "full" else 4 * HEADS

    def matmuls(self) -> dict[str, int]:
        """The core's is of its one head dim."""
        core = HEADS * max(NOPE + ROPE, self.v) * LENGTH
        return {"qkv": sum(map(math.prod, self.projections().values())), "out": HEADS * self.v * self.out, "core": core}


@dataclass(frozen=True)
class MLP(Sublayer):
    activation: str = "gelu"
    gated: bool = False
    dropout_p: float = P

    prefix = "mlp_"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {"gate_weight": (HIDDEN, FEATURES)} if self.gated else {}
        shapes |= {"up_weight": (HIDDEN, FEATURES), "down_weight": (FEATURES, HIDDEN)}
        if self.bias:
            shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
        return shapes | self.lora_shapes(shapes) | self.norm_shapes()

    def arguments(self, t: Tensors) -> dict:
        return dict(
            up_weight=t["up_weight"], up_bias=t.get("up_bias"), down_weight=t["down_weight"],
            down_bias=t.get("down_bias"), gate_weight=t.get("gate_weight"), gate_bias=t.get("gate_bias"),
            activation=self.activation, dropout_p=self.dropout_p, **self.lora_arguments(t), **self.options(t),
        )  # fmt: skip

    def branch(self, h: Tensor, t: Tensors, drawn: RngStates) -> Tensor:
        act, lora = ACTIVATIONS[self.activation], self.lora_state(drawn)
        up = self.linear("up", h, t, lora)
        hidden = act(self.linear("gate", h, t, lora)) * up if self.gated else act(up)
        return self.linear("down", apply_dropout(hidden, self.dropout_p, drawn), t, lora)

    def saved(self, mode: str) -> tuple[int, int]:
        if self.gated:
            return HIDDEN * {"full": 0, "selective": 2, "none": 3}[mode], 0
        return HIDDEN * {"full": 0, "selective": 1, "none": 1 if self.activation == "relu" else 2}[mode], 0

    def matmuls(self) -> dict[str, int]:
        """Multiply-adds per token of each matmul."""
        return {"up": HIDDEN * FEATURES * (1 + self.gated), "out": HIDDEN * FEATURES}

    def multiply_adds(self, mode: str) -> tuple[int, int]:
        """(forward's, backward's) per token, everything trained."""
        up, down = self.matmuls().values()
        backward = 2 * (up + down) + (up if mode == "full" else 0)
        recomputed = down + (up if mode == "full" or self.lora else 0)  # what the branch gave
        first = ("gate", "up")
        again = first * (mode == "full") + (*first, "down") * self.reads_branch()
        lora = self.lora_multiply_adds(again)
        return up + down + lora[0], backward + (recomputed if self.reads_branch() else 0) + lora[1]


# -- the ops ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One op with its options: a sublayer, or both as a layer, with cross-attention between them if there is `cross`."""

    name: str
    attention: Attention | None = None
    mlp: MLP | None = None
    cross: Attention | None = None
    parallel: bool = False
    recompute: str = "selective"
    workspace: int | None = None

    def __str__(self) -> str:
        return f"{self.op}-{self.name}-{self.recompute}"

    @property
    def op(self) -> str:
        name = "transformer_layer" if self.is_layer else "attention_block" if self.attention else "mlp_block"
        return f"latent_{name}" if isinstance(self.attention, Latent) else name

    @property
    def is_layer(self) -> bool:
        return len(self.sublayers) > 1

    @property
    def op_name(self) -> str:
        return self.op

    @property
    def sublayers(self) -> list[Sublayer]:
        return [sublayer for sublayer in (self.attention, self.cross, self.mlp) if sublayer is not None]

    def with_(self, **options) -> Block:
        return replace(self, **options)

    def without_dropout(self) -> Block:
        off = {"dropout_p": 0.0, "resid_p": 0.0, "path_p": 0.0, "lora_p": 0.0}
        parts = {name: getattr(self, name) for name in ("attention", "cross", "mlp")}
        return self.with_(**{name: part and replace(part, **off) for name, part in parts.items()})

    def make(self, dtype: torch.dtype = torch.float32, *, lead=(BATCH, LENGTH), frozen=(), seed: int = 0) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"x": (*lead, FEATURES)}
        for sublayer in self.sublayers:
            shapes |= sublayer.shapes()
        if "key_value" in shapes:
            shapes["key_value"] = (*lead[:-1], *shapes["key_value"][1:])
        tensors = {}
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            if name not in ("x", "key_value") and len(shape) == 2:
                value = value * (2 / shape[1]) ** 0.5
            if name.endswith(("norm_weight", "gain")):
                value = 1 + value / 4
            tensors[name] = value.to(dtype).requires_grad_(name not in frozen)
        return tensors

    def call(self, t: Tensors) -> Tensor:
        x, chosen = t["x"], dict(recompute=self.recompute, workspace=self.workspace)
        if self.is_layer:
            return ckptkern.transformer_layer(
                x, self.attention.arguments(t), self.mlp.arguments(t), parallel=self.parallel, **chosen,
                cross_attention_arguments=self.cross.arguments(t) if self.cross else None,
            )  # fmt: skip
        if self.attention:
            return getattr(ckptkern, self.op)(x, **self.attention.arguments(t), **chosen)
        return ckptkern.mlp_block(x, **self.mlp.arguments(t), **chosen)

    def fused(self, t: Tensors) -> Tensor:
        torch.manual_seed(SEED)
        return self.call(t)

    def unfused(self, t: Tensors) -> Tensor:
        drawn, y = rng_states(), t["x"]
        if self.parallel:
            return self.attention.unfused(y, t, drawn) + replace(self.mlp, residual=False).unfused(y, t, drawn)
        for sublayer in self.sublayers:
            y = sublayer.unfused(y, t, drawn)
        return y

    def saved_bytes(self, x_itemsize: int, itemsize: int) -> int:
        """The table of transformer_layer's and the blocks' docstrings, and 16 bytes for each dropout."""
        tokens, states = BATCH * LENGTH, 16 * sum(sublayer.states() for sublayer in self.sublayers)
        total = tokens * FEATURES * x_itemsize + states
        for sublayer in self.sublayers:
            mode = self.recompute
            if sublayer is self.mlp and self.is_layer and mode == "selective":
                mode = "full"
            elements, more = sublayer.saved(mode)
            total += tokens * (elements * itemsize + more)
        if self.is_layer and self.recompute == "none" and not self.parallel:
            total += (len(self.sublayers) - 1) * tokens * FEATURES * x_itemsize  # what passes between the sublayers
        return total

    def multiply_adds(self) -> int:
        """A step, per token. A layer recomputes what passes between its sublayers: by one matmul from o, or all of it.

        That matmul gives a norm after the branch its input too.
        """
        if not self.is_layer:
            return sum(self.sublayers[0].multiply_adds(self.recompute))
        mode = self.recompute
        if self.parallel:
            return sum(self.attention.multiply_adds(mode)) + sum(
                self.mlp.multiply_adds("none" if mode == "none" else "full")
            )
        total = sum(self.mlp.multiply_adds("none" if mode == "none" else "full"))
        for sublayer in self.sublayers[:-1]:
            forward, backward = sublayer.multiply_adds("none" if mode == "full" else mode)
            out = sublayer.matmuls()["out"] + sum(sublayer.lora_matmuls().get("out", ())) + sublayer.gate_again(mode)
            between = {"none": 0, "selective": out, "full": forward}[mode]
            total += forward + backward + between - (out if mode != "none" and sublayer.reads_branch() else 0)
        return total


LLAMA = dict(norm="rms", bias=False)
BLOCKS = (
    Block("pre-norm", Attention()),
    Block("llama", Attention(**LLAMA, kv_heads=2, packed=False, rotary=True, qk_norm="rms")),
    Block("post-norm padded", Attention(norm_first=False, causal=False, padded=True, packed=False)),
    Block("bare", Attention(norm=None, residual=False, out=5, kv_heads=1, dropout_p=0.0, resid_p=0.0)),
    Block("pre-norm", mlp=MLP()),
    Block("llama", mlp=MLP(**LLAMA, gated=True, activation="silu")),
    Block("post-norm relu", mlp=MLP(norm_first=False, activation="relu")),
    Block("bare", mlp=MLP(norm=None, residual=False, dropout_p=0.0, resid_p=0.0)),
    Block("pre-norm", Attention(), MLP()),
    Block("llama", Attention(**LLAMA, kv_heads=2, packed=False, rotary=True, qk_norm="rms"),
          MLP(**LLAMA, gated=True, activation="silu")),
    Block("post-norm padded", Attention(norm_first=False, causal=False, padded=True), MLP(norm_first=False)),
)  # fmt: skip


# Fewer tests run these than BLOCKS: one for each way that models differ around and inside the sublayers.
VARIANTS = (
    Block("normed branch", Attention(norm=None, post_norm="layer", layer_scale=0.3, path_p=PATH_P, layout="heads",
                                     dropout_p=0.0)),
    Block("normed branch", mlp=MLP(norm_first=False, post_norm="layer", layer_scale="vector", path_p=PATH_P, resid_p=0.0)),
    Block("scaled branch", Attention(layer_scale="vector", path_p=PATH_P, dropout_p=0.0),
          MLP(layer_scale="vector", path_p=PATH_P)),
    Block("adaptive", Attention(adaptive=True, layer_scale="samples", path_p=PATH_P, dropout_p=0.0)),
    Block("adaptive", mlp=MLP(**LLAMA, adaptive=True, layer_scale="samples", post_norm="rms")),
    Block("adaptive", Attention(**LLAMA, adaptive=True, layer_scale="samples", dropout_p=0.0),
          MLP(adaptive=True, layer_scale="samples", resid_p=0.0)),
    Block("parallel", Attention(layout="heads", rotary=True, dropout_p=0.0), MLP(post_norm="rms"), parallel=True),
    Block("normed heads", Attention(norm=None, kv_heads=2, packed=False, qk_norm="layer all", rotary=True)),
    Block("normed heads in groups", Attention(norm=None, kv_heads=2, layout="heads", qk_norm="layer rows", rotary=True)),
    Block("gemma", Attention(**LLAMA, kv_heads=2, layout="heads", qk_norm="rms all", softcap=0.7, post_norm="rms", resid_p=0.0),
          MLP(**LLAMA, gated=True, activation="silu", post_norm="rms", resid_p=0.0)),
    Block("crossing", Attention(causal=False, key_features=FEATURES, norm_first=False, kv_heads=2)),
    Block("crossing padded", Attention(causal=False, key_features=8, packed=False, padded=True, qk_norm="rms all",
                                       layer_scale="vector", resid_p=0.0)),
    Block("decoder", Attention(dropout_p=0.0), MLP(), Attention(causal=False, padded=True, key_features=8, packed=False,
                                                                mask=(HEADS, LENGTH, KEY_LENGTH))),
    Block("post-norm decoder", Attention(norm_first=False), MLP(norm_first=False, dropout_p=0.0),
          Attention(causal=False, key_features=FEATURES, norm_first=False, scale=0.3, kv_heads=1)),
    Block("gpt-oss", Attention(norm="rms", kv_heads=2, packed=False, rotary=True, sinks=True, resid_p=0.0),
          MLP(**LLAMA, gated=True, activation="silu", resid_p=0.0)),
    Block("gated query", Attention(**LLAMA, kv_heads=2, packed=False, rotary=True, qk_norm="rms", gate="query")),
    Block("gated query", Attention(**LLAMA, kv_heads=2, packed=False, qk_norm="rms", gate="query"),
          MLP(**LLAMA, gated=True, activation="silu", resid_p=0.0)),
    Block("gated heads", Attention(kv_heads=2, layout="heads", gate="heads", sinks=True, softcap=2.0, post_norm="rms")),
    Block("gated columns", Attention(gate="columns", padded=True), MLP(dropout_p=0.0)),
    Block("gated crossing", Attention(causal=False, padded=True, key_features=8, packed=False, gate="query", sinks=True)),
    Block("learned bias", Attention(**LLAMA, kv_heads=2, packed=False, causal=False, padded=True, softcap=2.0, resid_p=0.0,
                                    mask=(HEADS, LENGTH, LENGTH))),
    Block("learned bias", Attention(mask=(BATCH, 1, LENGTH, LENGTH), resid_p=0.0), MLP(dropout_p=0.0)),
    Block("latent", Latent(**LLAMA, q_rank=9, rotary=True, interleaved=True)),
    Block("latent padded", Latent(norm_first=False, causal=False, padded=True, v=9, latent_norms=False)),
    Block("latent bias", Latent(norm=None, mask=(HEADS, LENGTH, LENGTH), layer_scale="vector", resid_p=0.0,
                                rotary=True, batched_tables=True, residual=False)),
    Block("latent", Latent(**LLAMA, rotary=True, q_rank=6, softcap=0.7, dropout_p=0.0),
          MLP(**LLAMA, gated=True, activation="silu", resid_p=0.0)),
    Block("low-rank", Attention(lora=("qkv",), lora_p=P, resid_p=0.0)),
    Block("low-rank", mlp=MLP(lora=("up", "down"), lora_p=P, activation="relu", norm_first=False)),
    Block("low-rank llama", Attention(**LLAMA, kv_heads=2, packed=False, lora=("q", "v", "out"), post_norm="rms"),
          MLP(**LLAMA, gated=True, activation="silu", lora=("gate", "up", "down"), lora_p=P, resid_p=0.0)),
    Block("low-rank decoder", Attention(dropout_p=0.0, lora=("out",)), MLP(lora=("down",), dropout_p=0.0, post_norm="layer"),
          Attention(causal=False, key_features=8, packed=False, lora=("q", "k", "v", "out"), lora_p=P, resid_p=0.0)),
)  # fmt: skip

ALL = BLOCKS + VARIANTS
# A layer's reference is that of its sublayers, which come alone: of layers, one for each way in which sublayers are joined.
TWICE = [
    one for one in ALL if len(one.sublayers) == 1 or one.name in ("post-norm padded", "decoder", "parallel", "latent")
]
COMPILED = [
    one for one in VARIANTS
    if one.name in ("gemma", "parallel", "crossing", "decoder", "low-rank decoder", "gpt-oss", "latent")
]  # fmt: skip
COMPILED += [one for one in VARIANTS if one.name == "gated query" and one.mlp is None]
COMPILED += [one for one in VARIANTS if one.name == "adaptive" and len(one.sublayers) == 2]
COMPILED += [one for one in VARIANTS if one.name == "learned bias" and one.mlp is None]


# -- attention alone ---------------------------------------------------------------------------------------------------


def heads(*shapes, dtype=torch.float32, seed=0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in zip(("q", "k", "v"), shapes, strict=True)
    }


BOOL = torch.rand(2, 4, 7, 5, generator=torch.Generator().manual_seed(5)) > 0.4
MASKS = {
    "all": BOOL.index_fill(3, torch.tensor(0), True),
    "keys": BOOL[:, :1, :1].index_fill(3, torch.tensor(0), True),
    "two dimensions": BOOL[0, 0].index_fill(1, torch.tensor(0), True),
    "additive": torch.randn(1, 4, 7, 5, generator=torch.Generator().manual_seed(6)),
    "additive keys": torch.randn(1, 5, generator=torch.Generator().manual_seed(7)),
}


CU_Q, CU_K = (torch.tensor(cu, dtype=torch.int32) for cu in ((0, 4, 4, 9), (0, 3, 5, 11)))


@dataclass(frozen=True)
class Call:
    """One of the two functions with its options; used as a `cases.Setup` is."""

    options: dict
    shapes: tuple = ((2, 4, 7, 6), (2, 4, 5, 6), (2, 4, 5, 6))
    mask: tuple = ()  # the shape of one that is trained
    sinks: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (*"qkv", *("mask",) * bool(self.mask), *("sinks",) * self.sinks)

    @property
    def packed(self) -> bool:
        return len(self.shapes[0]) == 3

    @property
    def drops(self) -> bool:
        return "dropout_p" in self.options

    op_name = "attention"

    def make(self, dtype=torch.float32, *, frozen=(), trained=("q", "k", "v", "mask", "sinks")):
        tensors = heads(*self.shapes, dtype=dtype)
        if self.mask:
            tensors["mask"] = torch.randn(self.mask, generator=torch.Generator().manual_seed(8)).to(dtype)
        if self.sinks:
            tensors["sinks"] = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=dtype)
        return {name: t.requires_grad_(name in trained and name not in frozen) for name, t in tensors.items()}

    def call(self, t):
        if self.packed:
            return ckptkern.varlen_attn(t["q"], t["k"], t["v"], CU_Q, CU_K, 5, 6, **self.options)
        options = self.options | ({"attn_mask": t["mask"]} if self.mask else {})
        options |= {"sinks": t["sinks"]} if self.sinks else {}
        return ckptkern.scaled_dot_product_attention(t["q"], t["k"], t["v"], **options)

    def fused(self, t):
        torch.manual_seed(SEED)
        return self.call(t)


CALLS = {
    "causal": Call({"is_causal": True}),
    "dropout": Call({"dropout_p": P}),
    "mask": Call({"attn_mask": MASKS["all"], "dropout_p": P}),
    "learned mask": Call({"dropout_p": P, "window_size": (5, 3)}, mask=(4, 1, 5)),
    "sinks": Call({"is_causal": True}, sinks=True),
    "sinks, dropout": Call({"dropout_p": P, "window_size": (5, 3)}, mask=(4, 1, 5), sinks=True),
    "packed": Call({}, ((11, 4, 6), (14, 4, 6), (14, 4, 6))),
    "packed grouped": Call({"window_size": (2, 1), "enable_gqa": True}, ((11, 4, 6), (14, 2, 6), (14, 2, 6))),
}


def joined_biases(results: Tensors) -> Tensors:
    """The biases of q, k and v as one, and of the norms of q and k: a k bias alone does not change softmax, except where rotary
    embedding turns it, and its gradient is rounding only."""
    for joined, names in (
        ("qkv_bias", ("q_bias", "k_bias", "v_bias")),
        ("cross_qkv_bias", ("cross_q_bias", "cross_k_bias", "cross_v_bias")),
        ("qk_shift", ("q_shift", "k_shift")),
    ):
        parts = [results[name].flatten() for name in names if name in results]
        results = {name: t for name, t in results.items() if name not in names}
        results |= {joined: torch.cat(parts)} if parts else {}
    return results


def _parameters(chosen: Iterable[Block], modes: Iterable[str]) -> list:
    each = [block.with_(recompute=mode) for block in chosen for mode in modes]
    return [pytest.param(block, id=str(block).replace(" ", "_")) for block in each]


def variants(modes=MODES, names: tuple[str, ...] | None = None) -> list:
    """pytest parameters: every variant, or those of these names, in every mode."""
    return _parameters([one for one in VARIANTS if names is None or one.name in names], modes)


def in_turn(chosen: Iterable[Block] = BLOCKS, modes=MODES, shift: int = 0) -> list:
    """pytest parameters: every block once, the modes in turn, so that each op comes in each mode.

    With a shift from case to case of another option, each of its values comes with every mode, and with every block.
    """
    each = [block.with_(recompute=modes[(i + shift) % len(modes)]) for i, block in enumerate(chosen)]
    return [pytest.param(block, id=str(block).replace(" ", "_")) for block in each]


def blocks(modes=MODES, *, names: tuple[str, ...] | None = None, dropout: bool = True) -> list:
    """pytest parameters: every block, or those of these names, in every mode."""
    chosen = [block for block in BLOCKS if names is None or block.name in names]
    chosen = chosen if dropout else [block.without_dropout() for block in chosen]
    return _parameters(chosen, modes)


def calls() -> list:
    """pytest parameters: every call of attention alone."""
    return [pytest.param(call, id=f"attention-{name.replace(' ', '_')}") for name, call in CALLS.items()]
