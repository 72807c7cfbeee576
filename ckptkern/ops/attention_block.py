"""attention_block: [norm ->] q, k, v projections [-> q/k norm] [-> rotary] -> attention -> output projection
[-> dropout] [-> + x] as one segment. Its two halves, forward and backward, also serve `transformer_layer`."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import eager
from ..errors import DtypeError, ShapeError
from ._common import (
    WeightGrad,
    cast_parameter,
    check_choice,
    check_count,
    check_flags,
    check_input,
    check_level,
    check_number,
    check_probability,
    check_tensor,
    check_weight,
    choose_backend,
    choose_level,
    column_sum,
    compute_dtype,
    draw_state,
    dropout_arguments,
    head_dim_not_covered,
    matmul_precision,
    primitives,
    row_count,
    unflattened,
)  # fmt: skip
from ._op import Op, build, needed
from .attention import (
    as_mask,
    attend,
    attention_flops,
    attention_grads,
    check_window,
    core_of,
    diagonal_of,
    fused_core,
    within,
)  # fmt: skip

NORMS = ("layer", "rms")


class AttentionTensors(NamedTuple):
    """The tensors of an attention half. wq is the packed q, k, v weight where wk and wv are None; biases alike."""

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    wq: Tensor
    wk: Tensor | None
    wv: Tensor | None
    bq: Tensor | None
    bk: Tensor | None
    bv: Tensor | None
    wo: Tensor
    bo: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    mask: Tensor | None
    padding: Tensor | None
    slopes: Tensor | None
    cu: Tensor | None
    rng: Tensor | None
    resid_rng: Tensor | None


class AttentionOptions(NamedTuple):
    """The rest. norm "" is none; theta: of the rotary tables that are made here, 0 where none are; left, right: visible
    columns, None for no bound; max_len: the longest packed sequence."""

    num_heads: int
    num_kv_heads: int
    norm: str
    norm_eps: float
    norm_first: bool
    qk_norm_eps: float
    theta: float
    interleaved: bool
    mask_hides: bool
    left: int | None
    right: int | None
    max_len: int
    scale: float
    dropout_p: float
    resid_p: float
    residual: bool
    recompute: str
    backend: str
    precision: str
    fused: str
    dtype: torch.dtype


TENSOR_SCHEMA = (
    "Tensor? norm_weight, Tensor? norm_bias, Tensor wq, Tensor? wk, Tensor? wv, Tensor? bq, Tensor? bk, Tensor? bv, "
    "Tensor wo, Tensor? bo, Tensor? q_norm, Tensor? k_norm, Tensor? cos, Tensor? sin, Tensor? mask, Tensor? padding, "
    "Tensor? slopes, Tensor? cu, Tensor? rng, Tensor? resid_rng"
)
OPTION_SCHEMA = (
    "int num_heads, int num_kv_heads, str norm, float norm_eps, bool norm_first, float qk_norm_eps, float theta, "
    "bool interleaved, bool mask_hides, SymInt? left, SymInt? right, SymInt max_len, float scale, float dropout_p, "
    "float resid_p, bool residual, str recompute, str backend, str precision, str fused, ScalarType dtype"
)
TENSORS = len(AttentionTensors._fields)
CONSTANTS = frozenset(range(1 + AttentionTensors._fields.index("cos"), 1 + TENSORS))  # from cos on: no gradient
OPTIONS = len(AttentionOptions._fields)


def tokens(x: Tensor) -> Tensor:
    """[..., S, d] -> [tokens, d]."""
    return x.reshape(row_count(x), x.shape[-1])


def with_lead(rows: Tensor, x: Tensor) -> Tensor:
    """[tokens, e] -> [*x's leading shape, e], no view: it may be changed in place by what follows."""
    return unflattened(rows, x.shape[:-1])


def batch_and_rows(x: Tensor) -> tuple[int, int]:
    """(B, S) of x [B, S, d] or [S, d]."""
    return (x.shape[0] if x.dim() == 3 else 1), x.shape[-2]


def merged_mask(mask: Tensor | None, padding: Tensor | None, mask_hides: bool = False) -> Tensor | None:
    """The core's mask from attn_mask, broadcastable to [B, H, S, S], and key_padding_mask [B, S] (its True hides).

    Not from forward to backward: what is kept are the masks that were given, which all layers of a model share.
    """
    padding = None if padding is None else torch.atleast_2d(padding)[:, None, None]
    seen = added = None
    for one, hides in ((mask, mask_hides), (padding, True)):
        if one is None:
            continue
        if one.is_floating_point():
            added = one if added is None else added + one
        else:
            one = ~one if hides else one
            seen = one if seen is None else seen & one
    if added is not None:
        return added if seen is None else added.masked_fill(~seen, -math.inf)
    return seen


def rotary_tables(
    positions: Tensor,
    dim: int,
    theta: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """(cos, sin) [..., S, dim] of the angles a_i = positions · theta^(-2i/dim), i < dim/2: rotary embedding.

    Each angle comes twice, at the two elements that turn together: a_0, a_1, ..., a_0, a_1, ... (Llama), or with interleaved
    a_0, a_0, a_1, a_1, ... (GPT-J), as attention_block's rotary_interleaved reads it.
    positions [S] or [B, S], integers. The angles are formed in float32. Raises ValueError for an odd dim and theta <= 0.
    """
    if not isinstance(positions, Tensor):
        raise TypeError(f"rotary_tables: positions must be a Tensor, not {type(positions).__name__}")
    check_count("rotary_tables", "dim", dim)
    check_theta("rotary_tables", "theta", theta)
    if dim % 2:
        raise ValueError(f"rotary_tables: dim must be even, not {dim}")
    frequencies = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angles = positions.float()[..., None] * frequencies
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def positions_of(S: int, device: torch.device, cu_seqlens: Tensor | None) -> Tensor:
    """[S]: 0, 1, ..., from 0 again where a packed sequence begins."""
    rows = torch.arange(S, device=device)
    if cu_seqlens is None:
        return rows
    return rows - cu_seqlens[torch.searchsorted(cu_seqlens, rows, right=True) - 1]


def rotary_of(S: int, t: AttentionTensors, o: AttentionOptions) -> tuple[Tensor | None, Tensor | None]:
    """(cos, sin): those that were given, or None; theta's are made where they are read, in forward and in backward."""
    if not o.theta:
        return t.cos, t.sin
    D = t.wo.shape[1] // o.num_heads
    return rotary_tables(positions_of(S, t.wo.device, t.cu), D, o.theta, interleaved=o.interleaved)


def half_core(t: AttentionTensors, o: AttentionOptions) -> eager.AttentionCore:
    mask = merged_mask(t.mask, t.padding, o.mask_hides)
    return core_of(
        o.scale, o.precision, o.left, o.right, mask, t.slopes, t.rng, o.dropout_p, t.cu, t.cu, o.max_len, o.max_len,
        o.fused,
    )  # fmt: skip


class AttentionHalf:
    """What an attention half computes, for one input: every quantity once, from x and what was kept."""

    def __init__(self, x: Tensor, t: AttentionTensors, o: AttentionOptions):
        self.p, self.x, self.t, self.o = primitives(o.backend), tokens(x), t, o
        self.B, self.S = batch_and_rows(x)
        self.D = t.wo.shape[1] // o.num_heads

    @functools.cached_property
    def core(self) -> eager.AttentionCore:
        return half_core(self.t, self.o)

    @functools.cached_property
    def angles(self) -> tuple[Tensor | None, Tensor | None]:
        return rotary_of(self.S, self.t, self.o)

    def cast(self, parameter: Tensor | None) -> Tensor | None:
        return cast_parameter(parameter, self.o.dtype)

    def weights(self) -> list[tuple[Tensor, Tensor | None]]:
        """(weight, bias) of q, k, v, or of the packed projection alone."""
        t = self.t
        return [(t.wq, t.bq)] if t.wk is None else [(t.wq, t.bq), (t.wk, t.bk), (t.wv, t.bv)]

    def inputs(self) -> Tensor:
        """What the projections read: norm(x), or x."""
        o = self.o
        if o.norm and o.norm_first:
            return self.p.norm_fwd(self.x, self.t.norm_weight, self.t.norm_bias, o.norm_eps, o.norm, o.dtype)
        return self.x.to(o.dtype)

    def project(self, h: Tensor) -> Tensor:
        """qkv [tokens, (H + 2 H_kv) D]: three weights write into one buffer, none is copied."""
        parts = self.weights()
        if len(parts) == 1:
            return eager.product(h, self.cast(parts[0][0]), self.cast(parts[0][1]))
        qkv = h.new_empty((h.shape[0], sum(w.shape[0] for w, _ in parts)))
        start = 0
        for w, b in parts:
            out = qkv[:, start : start + w.shape[0]]
            w, b = self.cast(w), self.cast(b)
            torch.mm(h, w.t(), out=out) if b is None else torch.addmm(b, h, w.t(), out=out)
            start += w.shape[0]
        return qkv

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views [B, S, heads, D] of q, k and v."""
        H, H_kv = self.o.num_heads, self.o.num_kv_heads
        return qkv.view(self.B, self.S, H + 2 * H_kv, self.D).split([H, H_kv, H_kv], 2)

    def heads(self, qkv: Tensor, keep_raw: bool) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, H, S, D] as the core reads them: q/k norm and rotation done, in place unless `keep_raw`.

        Nor for torch's own core: it may take another way for another layout, and recompute must take forward's.
        """
        t, o = self.t, self.o
        keep_raw = keep_raw or bool(o.fused)
        q, k, v = self.split(qkv)
        if t.q_norm is not None or self.angles[0] is not None:
            q, k = (
                self.p.heads_fwd(raw, weight, o.qk_norm_eps, *self.angles, o.interleaved, out=None if keep_raw else raw)
                for raw, weight in ((q, t.q_norm), (k, t.k_norm))
            )
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def out_rows(self, out: Tensor) -> Tensor:
        """o [B, H, S, D] (memory [B, S, H, D]) -> [tokens, H D], a view."""
        return out.transpose(1, 2).reshape(self.x.shape[0], self.o.num_heads * self.D)

    def drop(self, f: Tensor) -> Tensor:
        """Residual dropout, forward and backward."""
        if self.t.resid_rng is None:
            return f
        return self.p.dropout(f, *dropout_arguments(self.t.resid_rng, self.o.resid_p))

    def branch(self, out: Tensor) -> Tensor:
        """dropout(o Wo^T + bo) [tokens, d]."""
        return self.drop(eager.product(self.out_rows(out), self.cast(self.t.wo), self.cast(self.t.bo)))

    def total(self, f: Tensor) -> Tensor:
        """The block's output before a trailing norm."""
        return self.x + f if self.o.residual else f

    def normed(self, y: Tensor) -> Tensor:
        """The block's output from what is before a trailing norm."""
        o = self.o
        if o.norm and not o.norm_first:
            return self.p.norm_fwd(y, self.t.norm_weight, self.t.norm_bias, o.norm_eps, o.norm, y.dtype)
        return y

    def attend(self, keep_raw: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse, qkv): o and lse of the core, and the projections, raw if `keep_raw`."""
        qkv = self.project(self.inputs())
        out, lse, _ = attend(self.p, *self.heads(qkv, keep_raw), self.core)
        return out, lse, qkv


def attention_half(x: Tensor, t: AttentionTensors, o: AttentionOptions):
    """(y [tokens, d], out, lse, qkv)."""
    half = AttentionHalf(x, t, o)
    out, lse, qkv = half.attend(o.recompute == "none")
    return half.normed(half.total(half.branch(out))), out, lse, qkv


def attention_half_backward(
    dy, x, t: AttentionTensors, o: AttentionOptions, out, lse, qkv, needs: int, total: Tensor | None = None
) -> dict:
    """Gradients by name ("x" and AttentionTensors' fields) from dy [tokens, d] and what was kept; None: rebuilt.

    total: what a trailing norm read, if it is at hand.
    """
    half, grads = AttentionHalf(x, t, o), {}
    p, need = half.p, lambda name: needed(needs, 0 if name == "x" else 1 + AttentionTensors._fields.index(name))
    trailing = bool(o.norm) and not o.norm_first
    inner = [n for n in ("x", "wq", "wk", "wv", "bq", "bk", "bv", "q_norm", "k_norm") if need(n)]
    inner += [n for n in ("norm_weight", "norm_bias") if need(n) and not trailing]
    rebuilt = out is None and (bool(inner) or trailing or need("wo"))
    weights = half.weights()

    raw = h = None
    if inner or rebuilt:
        h = half.inputs()
        raw = half.project(h) if qkv is None else qkv
        q, k, v = half.heads(raw, keep_raw=qkv is not None or t.q_norm is not None)
    if trailing:
        if out is None:  # the trailing norm's input comes before the gradient that delta is made of
            out, lse, _ = attend(p, q, k, v, half.core)
        total = half.total(half.branch(out)) if total is None else total
        dy, dweight, dbias = p.norm_bwd(
            dy, total, t.norm_weight, o.norm_eps, o.norm, need_dweight=need("norm_weight"), need_dbias=need("norm_bias")
        )
        grads |= {"norm_weight": dweight, "norm_bias": dbias}
    df = half.drop(dy.to(o.dtype))
    do = delta = None
    if inner:
        do = torch.mm(df, half.cast(t.wo)).view(half.B, half.S, o.num_heads, half.D).transpose(1, 2)
    if rebuilt and not trailing:
        out, lse, delta = attend(p, q, k, v, half.core, do)
    if need("wo"):
        grad = WeightGrad(t.wo.dtype, 1)
        grad.add(df, half.out_rows(out))
        grads["wo"] = grad.result()
    if need("bo"):
        grads["bo"] = column_sum(df)
    if inner:
        dqkv = torch.empty_like(raw, memory_format=torch.contiguous_format)
        places = half.split(dqkv)
        heads = [place.transpose(1, 2) for place in places]
        need_dq, need_dkv = core_needs(inner, packed=t.wk is None)
        made = attention_grads(
            p, q, k, v, do, out, lse, half.core, delta=delta, need_dq=need_dq, need_dkv=need_dkv, out=heads
        )
        made = [
            place if grad is view or grad is None else grad.transpose(1, 2)
            for grad, view, place in zip(made, heads, places, strict=True)
        ]
        if t.q_norm is not None or half.angles[0] is not None:
            raw_q, raw_k, _ = half.split(raw)
            formed = (("q_norm", raw_q, t.q_norm, need_dq), ("k_norm", raw_k, t.k_norm, need_dkv))
            for i, (name, raw_heads, weight, is_formed) in enumerate(formed):
                if not is_formed:
                    continue
                made[i], grads[name] = p.heads_bwd(
                    made[i], raw_heads, weight, o.qk_norm_eps, *half.angles, o.interleaved, out=places[i],
                    need_dweight=need(name),
                )  # fmt: skip
        for place, grad in zip(places, made, strict=True):
            if grad is not place:
                place.copy_(grad)
        dh, start = None, 0
        for (w, _), suffix in zip(weights, "qkv", strict=False):
            part = dqkv[:, start : start + w.shape[0]]
            start += w.shape[0]
            if need(f"w{suffix}"):
                grad = WeightGrad(w.dtype, 1)
                grad.add(part, h)
                grads[f"w{suffix}"] = grad.result()
            if need(f"b{suffix}"):
                grads[f"b{suffix}"] = column_sum(part)
            if need("x") or (not trailing and (need("norm_weight") or need("norm_bias"))):
                w = half.cast(w)
                dh = torch.mm(part, w) if dh is None else dh.addmm_(part, w)
        residual = dy if o.residual else None
        if o.norm and o.norm_first:
            grads["x"], grads["norm_weight"], grads["norm_bias"] = p.norm_bwd(
                dh, half.x, t.norm_weight, o.norm_eps, o.norm, residual=residual, need_dweight=need("norm_weight"),
                need_dbias=need("norm_bias"),
            ) if dh is not None else (None, None, None)  # fmt: skip
        elif dh is not None:
            grads["x"] = dh if residual is None else dh + residual
    if need("x"):
        grads["x"] = grads["x"].to(x.dtype).view(x.shape)
    for name, parameter in t._asdict().items():
        if grads.get(name) is not None:
            grads[name] = grads[name].to(parameter.dtype)
    return grads


def core_needs(inner: Collection[str], packed: bool) -> tuple[bool, bool]:
    """(dq, dk and dv): what of the core's gradients leads to those of `inner`. packed: q, k, v are one projection."""
    if packed or {"x", "norm_weight", "norm_bias"} & set(inner):
        return bool(inner), bool(inner)
    need_dq = bool({"wq", "bq", "q_norm"} & set(inner))
    return need_dq, bool(set(inner) - {"wq", "bq", "q_norm"})


def attention_composite(x: Tensor, t: AttentionTensors, o: AttentionOptions) -> Tensor:
    """The half in differentiable PyTorch ops."""
    B, S = batch_and_rows(x)
    D = t.wo.shape[1] // o.num_heads
    h = composite_norm(x, t.norm_weight, t.norm_bias, o.norm, o.norm_eps) if o.norm and o.norm_first else x
    h = h.to(o.dtype)
    parts = [(t.wq, t.bq)] if t.wk is None else [(t.wq, t.bq), (t.wk, t.bk), (t.wv, t.bv)]
    qkv = torch.cat([F.linear(h, cast_parameter(w, o.dtype), cast_parameter(b, o.dtype)) for w, b in parts], -1)
    q, k, v = qkv.view(B, S, o.num_heads + 2 * o.num_kv_heads, D).split(
        [o.num_heads, o.num_kv_heads, o.num_kv_heads], 2
    )
    if t.q_norm is not None:
        q, k = F.rms_norm(q, (D,), t.q_norm, o.qk_norm_eps), F.rms_norm(k, (D,), t.k_norm, o.qk_norm_eps)
    cos, sin = rotary_of(S, t, o)
    if cos is not None:
        q, k = (composite_rotary(heads, cos, sin, o.interleaved) for heads in (q, k))
    core = half_core(t, o)
    out = eager.attention_composite(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), core)
    f = F.linear(
        out.transpose(1, 2).reshape(*x.shape[:-1], t.wo.shape[1]),
        cast_parameter(t.wo, o.dtype),
        cast_parameter(t.bo, o.dtype),
    )
    f = eager.composite_dropout(f, dropout_arguments(t.resid_rng, o.resid_p))
    y = x + f if o.residual else f
    return composite_norm(y, t.norm_weight, t.norm_bias, o.norm, o.norm_eps) if o.norm and not o.norm_first else y


def composite_norm(x, weight, bias, kind: str, eps: float) -> Tensor:
    if kind == "layer":
        # the bias apart: beside no weight torch's second derivative of layer_norm is None
        y = F.layer_norm(x, x.shape[-1:], cast_parameter(weight, x.dtype), None, eps)
    else:
        y = F.rms_norm(x, x.shape[-1:], cast_parameter(weight, x.dtype), eps)
    return y if bias is None else y + cast_parameter(bias, x.dtype)


def composite_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, S, H, D], cos and sin [S, R], [1, S, R] or [B, S, R]: the first R dimensions are rotated."""
    R = cos.shape[-1]
    cos, sin = (c.to(x.dtype)[..., None, :] for c in (cos, sin))
    turned, rest = x[..., :R], x[..., R:]
    if interleaved:
        half = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        half = torch.cat((-turned[..., R // 2 :], turned[..., : R // 2]), -1)
    return torch.cat((turned * cos + half * sin, rest), -1)


class AttentionBlock(Op):
    name = "attention_block"
    inputs = f"Tensor x, {TENSOR_SCHEMA}"
    kept = "Tensor? out, Tensor? lse, Tensor? qkv"
    statics = OPTION_SCHEMA
    results = "(Tensor y, Tensor out, Tensor lse, Tensor qkv)"
    grads = "Tensor[]"
    constants = CONSTANTS

    @staticmethod
    def forward(x, *args):
        t, o = AttentionTensors(*args[:TENSORS]), AttentionOptions(*args[TENSORS:])
        y, out, lse, qkv = attention_half(x, t, o)
        return (
            with_lead(y, x),
            out if o.recompute != "full" else None,
            lse if o.recompute != "full" else None,
            qkv if o.recompute == "none" else None,
        )

    @staticmethod
    def forward_fake(x, *args):
        t, o = AttentionTensors(*args[:TENSORS]), AttentionOptions(*args[TENSORS:])
        return fake_results(x, t, o)

    @staticmethod
    def saved(tensors, outputs, statics, needs):
        recompute = statics[AttentionOptions._fields.index("recompute")]
        _, out, lse, qkv = outputs
        kept = (None, None) if recompute == "full" else (out, lse)
        return [*tensors, *kept, qkv if recompute == "none" else None]

    @staticmethod
    def backward(dy, x, *args):
        t, rest = AttentionTensors(*args[:TENSORS]), args[TENSORS:]
        out, lse, qkv = rest[:3]
        grads = attention_half_backward(
            tokens(dy), x, t, AttentionOptions(*rest[3 : 3 + OPTIONS]), out, lse, qkv, rest[-1]
        )
        return [grads[name] if needed(rest[-1], i) else None for i, name in enumerate(("x", *AttentionTensors._fields))]

    @staticmethod
    def backward_fake(dy, x, *args):
        inputs = (x, *args[:TENSORS])
        return [t.new_empty(t.shape) if needed(args[-1], i) else dy.new_empty(0) for i, t in enumerate(inputs)]

    @staticmethod
    def composite(x, *args):
        return attention_composite(x, AttentionTensors(*args[:TENSORS]), AttentionOptions(*args[TENSORS:]))

    @staticmethod
    def forward_flops(x, *args, out_val=None):
        return attention_half_flops(x, AttentionTensors(*args[:TENSORS]), AttentionOptions(*args[TENSORS:]))

    @staticmethod
    def backward_flops(dy, x, *args, out_val=None):
        t, rest = AttentionTensors(*args[:TENSORS]), args[TENSORS:]
        out, _, qkv = rest[:3]
        return attention_half_backward_flops(x, t, AttentionOptions(*rest[3 : 3 + OPTIONS]), out, qkv, rest[-1])


def fake_results(x: Tensor, t: AttentionTensors, o: AttentionOptions):
    """(y, out, lse, qkv) of an attention half, empty."""
    B, S = batch_and_rows(x)
    D, M = t.wo.shape[1] // o.num_heads, B * S
    like = x.new_empty(0, dtype=o.dtype)
    total = t.wq.shape[0] if t.wk is None else t.wq.shape[0] + t.wk.shape[0] + t.wv.shape[0]
    wide = torch.promote_types(o.dtype, torch.float32)
    y_dtype = torch.promote_types(x.dtype, o.dtype) if o.residual else o.dtype
    if o.recompute == "full":
        out, lse = x.new_empty(0), x.new_empty(0)
    else:
        out = like.new_empty_strided((B, o.num_heads, S, D), (S * t.wo.shape[1], D, t.wo.shape[1], 1))
        lse = like.new_empty((B, o.num_heads, S), dtype=wide)
    qkv = like.new_empty((M, total)) if o.recompute == "none" else x.new_empty(0)
    return x.new_empty((*x.shape[:-1], t.wo.shape[0]), dtype=y_dtype), out, lse, qkv


def attention_half_flops(x, t: AttentionTensors, o: AttentionOptions) -> int:
    B, S = batch_and_rows(x)
    weights = sum(w.numel() for w in (t.wq, t.wk, t.wv, t.wo) if w is not None)
    D = t.wo.shape[1] // o.num_heads
    shape = (B, o.num_heads, S, D)
    return 2 * B * S * weights + attention_flops(shape, shape, 2)


def attention_half_backward_flops(
    x, t: AttentionTensors, o: AttentionOptions, out, qkv, needs: int, total: Tensor | None = None
) -> int:
    B, S = batch_and_rows(x)
    fields = ("x", *AttentionTensors._fields)
    need = {name for i, name in enumerate(fields) if needed(needs, i)}
    trailing = bool(o.norm) and not o.norm_first
    inner = need - {"wo", "bo"} - ({"norm_weight", "norm_bias"} if trailing else set())
    rebuilt = out is None and (bool(inner) or trailing or "wo" in need)
    projections = [w for w in (t.wq, t.wk, t.wv) if w is not None]
    qkv_weights = sum(w.numel() for w in projections)
    # do, dWo, and the trailing norm's input
    products = t.wo.numel() * (bool(inner) + ("wo" in need) + (trailing and total is None))
    if inner or rebuilt:
        products += qkv_weights if qkv is None else 0
    if inner & {"x", "norm_weight", "norm_bias"}:
        products += qkv_weights
    products += sum(w.numel() for w, n in zip(projections, ("wq", "wk", "wv"), strict=False) if n in need)
    D = t.wo.shape[1] // o.num_heads
    shape = (B, o.num_heads, S, D)
    need_dq, need_dkv = core_needs(inner, packed=t.wk is None)
    core = 2 * rebuilt + (2 + need_dq + 2 * need_dkv) * bool(inner)
    return 2 * B * S * products + attention_flops(shape, shape, core)


_apply = build(AttentionBlock)


def check_theta(op: str, name: str, theta: float) -> None:
    check_number(op, name, theta)
    if not 0 < theta < math.inf:
        raise ValueError(f"{op}: {name} must be above 0 and finite, not {theta!r}")


def check_rotary(op: str, x: Tensor, rotary, D: int) -> tuple[Tensor | None, Tensor | None, float]:
    """(cos, sin, theta) of attention_block's `rotary`: two tables, a number theta, or None."""
    if rotary is None:
        return None, None, 0.0
    if not isinstance(rotary, (tuple, list)):
        check_theta(op, "rotary", rotary)
        if D % 2:
            raise ShapeError(f"{op}: the head dim must be even for rotary embedding, which turns pairs, but is {D}")
        return None, None, float(rotary)
    cos, sin = rotary
    for table in rotary:
        check_tensor(op, "rotary", table, x)
    B, S = batch_and_rows(x)
    R = cos.shape[-1]
    if cos.shape != sin.shape or R % 2 or R > D or cos.shape[:-1] not in ((S,), (1, S), (B, S)):
        raise ShapeError(
            f"{op}: rotary must be (cos, sin) of shape [S={S}, R], [1, S={S}, R] or [B={B}, S={S}, R] with R even and at "
            f"most {D}, but they have shapes {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        raise ValueError(f"{op}: no gradient is formed for rotary")
    return cos, sin, 0.0


def check_norm(op: str, x: Tensor, norm: str | None, weight, bias, features: int) -> None:
    if norm is None:
        if weight is not None or bias is not None:
            raise ValueError(f"{op}: norm_weight and norm_bias need norm='layer' or 'rms'")
        return
    check_choice(op, "norm", norm, (*NORMS, None))
    for name, parameter in (("norm_weight", weight), ("norm_bias", bias)):
        if parameter is None:
            continue
        check_tensor(op, name, parameter, x)
        if parameter.shape != (features,):
            raise ShapeError(f"{op}: {name} must have shape ({features},), but has {tuple(parameter.shape)}")


def gather(
    op, x, qkv_weight, qkv_bias, out_weight, out_bias, num_heads, num_kv_heads=None, *, norm=None, norm_weight=None,
    norm_bias=None, norm_eps=1e-5, norm_first=True, qk_norm=None, qk_norm_eps=1e-6, rotary=None,
    rotary_interleaved=False, is_causal=False, attn_mask=None, mask_hides=False, key_padding_mask=None, window_size=None,
    alibi_slopes=None, cu_seqlens=None, max_seqlen=None, scale=None, dropout_p=0.0, resid_dropout_p=0.0, residual=False,
    training=True, recompute="selective",
) -> tuple[AttentionTensors, AttentionOptions]:  # fmt: skip
    """Checks everything; returns the half's tensors, as yet without random states, and options."""
    check_level(op, recompute)
    check_probability(op, dropout_p)
    check_probability(op, resid_dropout_p)
    check_input(op, x)
    if x.dim() not in (2, 3):
        raise ShapeError(f"{op}: input must be [B, S, d], [S, d], or [tokens, d] with cu_seqlens, not {tuple(x.shape)}")
    features, H = x.shape[-1], num_heads
    H_kv = H if num_kv_heads is None else num_kv_heads
    check_flags(
        op, norm_first=norm_first, rotary_interleaved=rotary_interleaved, is_causal=is_causal, mask_hides=mask_hides,
        residual=residual, training=training,
    )  # fmt: skip
    check_count(op, "num_heads", H)
    check_count(op, "num_kv_heads", H_kv)
    for name, number in (
        ("norm_eps", norm_eps),
        ("qk_norm_eps", qk_norm_eps),
        ("scale", 1.0 if scale is None else scale),
    ):
        check_number(op, name, number)
    # isinstance first, as in check_probability
    is_theta = isinstance(rotary, (int, float)) or (
        rotary.dim() == 0 if isinstance(rotary, Tensor) else hasattr(rotary, "__float__")
    )
    for name, pair, other in (
        ("qk_norm", qk_norm, ""),
        ("rotary", None if is_theta else rotary, " or a number (theta)"),
    ):
        if pair is not None and (not isinstance(pair, (tuple, list)) or len(pair) != 2):
            raise TypeError(f"{op}: {name} must be a pair of tensors{other}, not {type(pair).__name__}")
    if H % H_kv:
        raise ValueError(f"{op}: num_kv_heads={H_kv} must divide num_heads={H}")
    if not isinstance(qkv_weight, Iterable):
        raise TypeError(f"{op}: qkv_weight must be one Tensor or three (q, k, v), not {type(qkv_weight).__name__}")
    parts = (qkv_weight,) if isinstance(qkv_weight, Tensor) else tuple(qkv_weight)
    if qkv_bias is not None and not isinstance(qkv_bias, Iterable):
        raise TypeError(f"{op}: qkv_bias must be one Tensor or three (q, k, v), not {type(qkv_bias).__name__}")
    biases = (
        (qkv_bias,) * len(parts)
        if qkv_bias is None
        else (qkv_bias,)
        if isinstance(qkv_bias, Tensor)
        else tuple(qkv_bias)
    )
    if len(parts) not in (1, 3) or len(biases) != len(parts):
        raise ValueError(f"{op}: qkv_weight must be one tensor or three (q, k, v), and qkv_bias alike")
    for name, w, b in zip(
        ("qkv_weight",) if len(parts) == 1 else ("q_weight", "k_weight", "v_weight"), parts, biases, strict=True
    ):
        check_weight(op, name, w, b, x, features, "input")
    D, remainder = divmod(parts[0].shape[0], H + 2 * H_kv if len(parts) == 1 else H)
    if remainder or (len(parts) == 3 and any(w.shape[0] != H_kv * D for w in parts[1:])):
        raise ShapeError(
            f"{op}: q, k, v weights with {[w.shape[0] for w in parts]} rows do not fit {H} query and {H_kv} key and value heads"
        )
    check_weight(op, "out_weight", out_weight, out_bias, x, H * D, "the attention core")
    if residual and out_weight.shape[0] != features:
        raise ShapeError(f"{op}: residual needs out_weight with {features} rows, but it has {out_weight.shape[0]}")
    check_norm(op, x, norm, norm_weight, norm_bias, features if norm_first else out_weight.shape[0])
    q_norm, k_norm = (None, None) if qk_norm is None else qk_norm
    for name, weight in (("q", q_norm), ("k", k_norm)):
        if weight is None:
            continue
        check_tensor(op, f"{name}'s norm weight", weight, x)
        if weight.shape != (D,):
            raise ShapeError(f"{op}: {name}'s norm weight must have shape ({D},), but has {tuple(weight.shape)}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{op}: qk_norm must be a pair of weights")
    B, S = batch_and_rows(x)
    cos, sin, theta = check_rotary(op, x, rotary, D)
    left, right = check_window(op, window_size)
    diagonal = diagonal_of(op, attn_mask, S, S)
    attn_mask = attn_mask if diagonal is None else None
    right = within(within(right, diagonal), 0 if is_causal else None)
    like = x.new_empty(0).expand(B, H, S, 0)
    mask = None if attn_mask is None else as_mask(op, attn_mask, like, S)
    padding = None
    if key_padding_mask is not None:
        check_tensor(op, "key_padding_mask", key_padding_mask, x, floating=False)
        padding = key_padding_mask if x.dim() == 3 else key_padding_mask[None]
        if padding.dtype == torch.float64 != x.dtype:
            raise DtypeError(f"{op}: key_padding_mask is {padding.dtype}, which no input of {x.dtype} goes with")
        if not (padding.dtype == torch.bool or padding.is_floating_point()) or padding.shape != (B, S):
            raise ShapeError(
                f"{op}: key_padding_mask must be bool (True = masked out) or floating point (added) of shape ({B}, {S}), "
                f"but is {padding.dtype} of shape {tuple(key_padding_mask.shape)}"
            )
    for one in (mask, padding):
        if one is not None and one.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: no gradient is formed for masks; use ckptkern.scaled_dot_product_attention")
    slopes = None
    if alibi_slopes is not None:
        check_tensor(op, "alibi_slopes", alibi_slopes, x)
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: no gradient is formed for alibi_slopes; use ckptkern.scaled_dot_product_attention")
        if alibi_slopes.shape not in ((H,), (B, H)):
            raise ShapeError(
                f"{op}: alibi_slopes must be [{H}] or [{B}, {H}], but has shape {tuple(alibi_slopes.shape)}"
            )
        slopes = alibi_slopes.float().reshape(-1, H).contiguous()
    max_len = 0
    if cu_seqlens is None and max_seqlen is not None:
        raise ValueError(f"{op}: max_seqlen is of sequences packed by cu_seqlens, which is None")
    if cu_seqlens is not None:
        check_tensor(op, "cu_seqlens", cu_seqlens, x, floating=False)
        if mask is not None or padding is not None:
            raise ValueError(f"{op}: attn_mask and key_padding_mask have no meaning for sequences packed by cu_seqlens")
        if x.dim() != 2 or cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
            raise ShapeError(f"{op}: cu_seqlens must be int32 [N + 1] and come with an input [tokens, d]")
        max_len = S if max_seqlen is None else max_seqlen
        check_count(op, "max_seqlen", max_len, least=0)
    dtype = compute_dtype(op, x, *parts, out_weight)
    resid_p, attn_p = float(resid_dropout_p), float(dropout_p)
    three = (*parts, None, None)[:3]
    t = AttentionTensors(
        norm_weight, norm_bias, *three, *(*biases, None, None)[:3], out_weight, out_bias, q_norm, k_norm, cos, sin, mask,
        padding, slopes, cu_seqlens, None, None,
    )  # fmt: skip
    probe = x.new_empty(0, dtype=dtype)
    scale = float(max(D, 1) ** -0.5 if scale is None else scale)
    backend = choose_backend(op, probe, head_dim_not_covered(D))
    fused = fused_core(
        backend, x, dtype, (B, H, S, D), (B, H_kv, S, D), left, right, scale, mask, padding, slopes, cu_seqlens,
        "dropout" if training and attn_p > 0.0 else None,
    )  # fmt: skip
    o = AttentionOptions(
        H, H_kv, norm or "", float(norm_eps), norm_first, float(qk_norm_eps), theta, rotary_interleaved,
        mask_hides, left, right,
        max_len, scale, attn_p, resid_p, residual, choose_level(recompute),
        backend, matmul_precision(probe), fused, dtype,
    )  # fmt: skip
    return t, o


def drawn(t: AttentionTensors, o: AttentionOptions, x: Tensor, training: bool) -> AttentionTensors:
    """t with the random states: drawn last, so that an error leaves the generator alone."""
    if not training or o.dropout_p == o.resid_p == 0.0:
        return t
    return t._replace(rng=draw_state(x, o.dropout_p, training), resid_rng=draw_state(x, o.resid_p, training))


def attention_block(
    x: Tensor,
    qkv_weight: Tensor | Sequence[Tensor],
    qkv_bias: Tensor | Sequence[Tensor | None] | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    num_heads: int,
    num_kv_heads: int | None = None,
    *,
    norm: str | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm_eps: float = 1e-5,
    norm_first: bool = True,
    qk_norm: tuple[Tensor, Tensor] | None = None,
    qk_norm_eps: float = 1e-6,
    rotary: tuple[Tensor, Tensor] | float | None = None,
    rotary_interleaved: bool = False,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    mask_hides: bool = False,
    key_padding_mask: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    resid_dropout_p: float = 0.0,
    residual: bool = False,
    training: bool = True,
    recompute: str = "selective",
) -> Tensor:
    """Self-attention with everything round it, as one segment.

        h = norm(x);  q, k, v = h Wqkv^T + b;  q, k = rotary(qk_norm(q, k));  o = attention(q, k, v)
        y = [x +] dropout(o Wo^T + bo)                        norm_first=False: y = norm([x +] dropout(...)), h = x

    x [B, S, d], [S, d], or [tokens, d] with cu_seqlens -> y of the same leading shape, [..., e].
    qkv_weight: one tensor [(H + 2 H_kv) D, d], or the three a model already has; biases alike. out_weight [e, H D].
    norm: None, "layer" or "rms", with norm_weight [d] and norm_bias [d] or None. qk_norm: RMS-norm weights ([D], [D]).
    rotary: (cos, sin), [S, R], [1, S, R] or [B, S, R], R even, of any floating dtype. The first R <= D dimensions of every q
    and k turn, the others stay: element i < R/2 with i + R/2 (Llama), whose two angles stand at columns i and i + R/2 of the
    tables, or with rotary_interleaved 2i with 2i + 1 (GPT-J), whose angles stand at columns 2i and 2i + 1. Both columns hold
    one angle: ckptkern.nn.rotary_tables makes either. Given tables are kept, so layers should share one pair. Or a number,
    theta: rotary_tables(positions, D, theta), positions 0, 1, ..., from 0 again in each packed sequence; these are made
    again in backward, not kept.
    attn_mask: bool (True = keep; with mask_hides True = masked out, as in nn.MultiheadAttention) or additive, broadcastable
    to [B, H, S, S], or torch's CausalBias, which is is_causal; key_padding_mask: bool [B, S], True = masked out, or additive.
    The masks are kept for backward as they are, so that layers share them. is_causal, window_size, alibi_slopes: as in
    scaled_dot_product_attention.
    cu_seqlens: int32 [N + 1]; max_seqlen: the longest of these sequences (default: all tokens). Attention gives zeros for
    tokens in no sequence and for those beyond max_seqlen, and does not see them.
    dropout_p of the attention weights, resid_dropout_p of the branch: replayed from 16 bytes each.
    recompute: what is kept for backward besides parameters (of x, x itself):

        "none"       x, q, k, v, o, lse
        "selective"  x, o, lse: the core is not run again
        "full"       x: as many products as torch.utils.checkpoint

    Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (choices),
    RuntimeError (backend).
    """
    t, o = gather(
        "attention_block", x, qkv_weight, qkv_bias, out_weight, out_bias, num_heads, num_kv_heads, norm=norm,
        norm_weight=norm_weight, norm_bias=norm_bias, norm_eps=norm_eps, norm_first=norm_first, qk_norm=qk_norm,
        qk_norm_eps=qk_norm_eps, rotary=rotary, rotary_interleaved=rotary_interleaved, is_causal=is_causal,
        attn_mask=attn_mask, mask_hides=mask_hides, key_padding_mask=key_padding_mask, window_size=window_size,
        alibi_slopes=alibi_slopes, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, scale=scale, dropout_p=dropout_p,
        resid_dropout_p=resid_dropout_p,
        residual=residual, training=training, recompute=recompute,
    )  # fmt: skip
    return _apply(tuple(o), x, *drawn(t, o, x, training))
