"""The attention half of a layer: [norm ->] q, k, v projections [-> q/k norm] [-> rotary] -> attention -> output projection
and what is around it (`_half`). `attention_block` and `transformer_layer` are made of it."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.types import IntLikeType

from .. import eager
from ._gradients import weight_grad
from ._half import Half, after_branch, composite_inputs, composite_norm, composite_output, output_dtype, reads_branch
from ._masks import merged_mask
from ._needs import needed_names
from ._rows import cast_parameter
from .attention_core import (
    CoreOptions,
    CoreTensors,
    attend,
    attention_flops,
    attention_grads,
    core_of,
    gradient_products,
)
from .rotary import composite_rotary, positions_of, rotary_tables


class AttentionTensors(NamedTuple):
    """The tensors of an attention half. wq is the packed q, k, v weight where wk and wv are None; biases alike.

    q_norm, k_norm: weights [D], or [heads, D] with a row for each head, or [heads D] of a norm over all heads at once.
    """

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    post_norm_weight: Tensor | None
    post_norm_bias: Tensor | None
    branch_scale: Tensor | None
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
    q_norm_bias: Tensor | None
    k_norm_bias: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    mask: Tensor | None
    padding: Tensor | None
    slopes: Tensor | None
    cu: Tensor | None
    rng: Tensor | None = None
    resid_rng: Tensor | None = None
    path_rng: Tensor | None = None


class AttentionOptions(NamedTuple):
    """The half's other arguments. norm, post_norm "" is none; theta: for rotary tables that are made here, 0 for none; left,
    right: visible columns, None for no bound; max_len: the longest packed sequence."""

    num_heads: int
    num_kv_heads: int
    qkv_layout: str
    norm: str
    norm_eps: float
    norm_first: bool
    post_norm: str
    post_norm_eps: float
    branch_factor: float
    qk_norm: str
    qk_norm_eps: float
    theta: float
    interleaved: bool
    mask_hides: bool
    left: IntLikeType | None
    right: IntLikeType | None
    max_len: IntLikeType
    scale: float
    softcap: float
    dropout_p: float
    resid_p: float
    path_p: float
    residual: bool
    recompute: str
    backend: str
    precision: str
    fused: str
    dtype: torch.dtype


# Places, among the op's inputs with x first, of those without a gradient: all from cos on, except the mask.
CONSTANTS = frozenset(range(1 + AttentionTensors._fields.index("cos"), 1 + len(AttentionTensors._fields)))
CONSTANTS -= {1 + AttentionTensors._fields.index("mask")}


def batch_and_rows(x: Tensor) -> tuple[int, int]:
    """(B, S) of x [B, S, d] or [S, d]."""
    return (x.shape[0] if x.dim() == 3 else 1), x.shape[-2]


def head_dim(t: AttentionTensors, o: AttentionOptions) -> int:
    return t.wo.shape[1] // o.num_heads


def projections(t: AttentionTensors) -> list[tuple[Tensor, Tensor | None]]:
    """(weight, bias) of q, k, v, or of the packed projection alone."""
    return [(t.wq, t.bq)] if t.wk is None else [(t.wq, t.bq), (t.wk, t.bk), (t.wv, t.bv)]


def split_heads(qkv: Tensor, o: AttentionOptions) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [B, S, heads, D] of qkv [B, S, (H + 2 H_kv) D].

    Views, except q where several heads of q lie before each of several heads of k: no one stride leads from head to head.
    """
    H, H_kv = o.num_heads, o.num_kv_heads
    if o.qkv_layout == "qkv":
        return qkv.unflatten(-1, (H + 2 * H_kv, -1)).split([H, H_kv, H_kv], 2)
    q, k, v = qkv.unflatten(-1, (H_kv, H // H_kv + 2, -1)).split([H // H_kv, 1, 1], 3)
    return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


def over_all_heads(weight: Tensor | None, D: int) -> bool:
    """Is this the weight of a norm over all heads at once?"""
    return weight is not None and weight.dim() == 1 and weight.shape[0] != D


def rotary_of(S: int, t: AttentionTensors, o: AttentionOptions) -> tuple[Tensor | None, Tensor | None]:
    """(cos, sin): those that were given, or None; for a theta, tables made here, in forward and again in backward."""
    if not o.theta:
        return t.cos, t.sin
    positions = positions_of(S, t.wo.device, t.cu)
    return rotary_tables(positions, head_dim(t, o), o.theta, interleaved=o.interleaved)


def half_core(t: AttentionTensors, o: AttentionOptions) -> eager.AttentionCore:
    mask = merged_mask(t.mask, t.padding, o.mask_hides)
    return core_of(
        CoreTensors(mask, t.slopes, t.rng, t.cu, t.cu),
        CoreOptions(
            o.dropout_p, o.scale, o.left, o.right, o.max_len, o.max_len, o.backend, o.precision, o.fused, o.softcap
        ),
    )


class AttentionHalf(Half):
    """What an attention half computes, for one input: every quantity once, from x and what was kept."""

    def __init__(self, x: Tensor, t: AttentionTensors, o: AttentionOptions):
        super().__init__(x, t, o)
        self.B, self.S = batch_and_rows(x)
        self.D = head_dim(t, o)

    @functools.cached_property
    def core(self) -> eager.AttentionCore:
        return half_core(self.t, self.o)

    @functools.cached_property
    def angles(self) -> tuple[Tensor | None, Tensor | None]:
        return rotary_of(self.S, self.t, self.o)

    # -- forward

    def project(self, h: Tensor) -> Tensor:
        """qkv [tokens, (H + 2 H_kv) D]: three weights write into one buffer, none is copied."""
        parts = projections(self.t)
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
        """q, k and v [B, S, heads, D] of qkv [tokens, (H + 2 H_kv) D]."""
        return split_heads(qkv.view(self.B, self.S, qkv.shape[1]), self.o)

    def turns(self) -> bool:
        """Is there a norm or a rotation between the projections and the core?"""
        return self.t.q_norm is not None or self.angles[0] is not None

    def turned(self, raw: Tensor, weight: Tensor | None, bias: Tensor | None, keep_raw: bool) -> Tensor:
        """q or k [B, S, heads, D], norm and rotation done."""
        o, out = self.o, None if keep_raw else raw
        if over_all_heads(weight, self.D):
            normed = self.p.norm_fwd(self.in_rows(raw), weight, bias, o.qk_norm_eps, o.qk_norm, o.dtype)
            raw, weight, bias = normed.view(raw.shape), None, None
            if self.angles[0] is None:
                return raw
            out = raw
        return self.p.heads_fwd(
            raw, weight, o.qk_norm_eps, *self.angles, o.interleaved, bias=bias, kind=o.qk_norm, out=out
        )

    def turned_back(self, dy: Tensor, raw: Tensor, name: str, place: Tensor, need: Collection[str]) -> tuple:
        """Gradients of raw (q or k; in `place`, if that is where dy is or can be), of its norm's weight and of its bias."""
        o, weight = self.o, getattr(self.t, name)
        needs = dict(need_dweight=name in need, need_dbias=f"{name}_bias" in need)
        if not over_all_heads(weight, self.D):
            options = dict(kind=o.qk_norm, out=place, **needs)
            return self.p.heads_bwd(dy, raw, weight, o.qk_norm_eps, *self.angles, o.interleaved, **options)
        if self.angles[0] is not None:
            dy = self.p.heads_bwd(dy, raw, None, o.qk_norm_eps, *self.angles, o.interleaved, out=place)[0]
        dx, *made = self.p.norm_bwd(self.in_rows(dy), self.in_rows(raw), weight, o.qk_norm_eps, o.qk_norm, **needs)
        return dx.view(raw.shape), *made

    def in_rows(self, heads: Tensor) -> Tensor:
        """[B, S, heads, D] -> [tokens, heads D], a view where the strides allow it."""
        return heads.reshape(self.x.shape[0], heads.shape[2] * self.D)

    def heads(self, qkv: Tensor, keep_raw: bool) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, H, S, D] as the core reads them: q/k norm and rotation done, in place unless `keep_raw`.

        Not in place for torch's own core either: another layout may select another algorithm, and recompute must match
        forward.
        """
        t = self.t
        keep_raw = keep_raw or bool(self.o.fused)
        q, k, v = self.split(qkv)
        if self.turns():
            q, k = self.turned(q, t.q_norm, t.q_norm_bias, keep_raw), self.turned(k, t.k_norm, t.k_norm_bias, keep_raw)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, keep_raw: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse, qkv): o and lse of the core, and the projections, raw if `keep_raw`."""
        qkv = self.project(self.inputs())
        out, lse, _ = attend(self.p, *self.heads(qkv, keep_raw), self.core)
        return out, lse, qkv

    def out_rows(self, out: Tensor) -> Tensor:
        """o [B, H, S, D] (memory [B, S, H, D]) -> [tokens, H D], a view."""
        return out.transpose(1, 2).reshape(self.x.shape[0], self.o.num_heads * self.D)

    def branch(self, out: Tensor) -> Tensor:
        """dropout(o Wo^T + bo) [tokens, d]."""
        return self.drop(eager.product(self.out_rows(out), self.cast(self.t.wo), self.cast(self.t.bo)))

    # -- backward

    def core_gradients(self, heads, do, out, lse, delta, raw, inner: Collection[str]) -> tuple[Tensor, dict]:
        """(dqkv [tokens, (H + 2 H_kv) D], gradients of the q/k norms' weights and of the mask) from do."""
        t, o, p = self.t, self.o, self.p
        dqkv = torch.empty_like(raw, memory_format=torch.contiguous_format)
        places = self.split(dqkv)
        outs = [place.transpose(1, 2) for place in places]
        need_dq, need_dkv = core_needs(inner, packed=t.wk is None)
        *made, dmask = attention_grads(
            p, *heads, do, out, lse, self.core, delta=delta, need_dq=need_dq, need_dkv=need_dkv,
            dmask_shape=t.mask.shape if "mask" in inner else None, out=outs,
        )  # fmt: skip
        made = [
            place if grad is view or grad is None else grad.transpose(1, 2)
            for grad, view, place in zip(made, outs, places, strict=True)
        ]
        grads = {"mask": dmask}
        if self.turns():
            raw_q, raw_k, _ = self.split(raw)
            formed = (("q_norm", raw_q, need_dq), ("k_norm", raw_k, need_dkv))
            for i, (name, raw_heads, is_formed) in enumerate(formed):
                if is_formed:
                    made[i], grads[name], grads[f"{name}_bias"] = self.turned_back(
                        made[i], raw_heads, name, places[i], inner
                    )
        for place, grad in zip(places, made, strict=True):
            if grad is not place:
                place.copy_(grad)
        H_kv, group = o.num_kv_heads, o.num_heads // o.num_kv_heads
        if o.qkv_layout == "heads" and H_kv > 1 and group > 1:  # dq's place is no view
            groups = dqkv.view(self.B, self.S, H_kv, group + 2, self.D)
            groups[:, :, :, :group].copy_(places[0].unflatten(2, (H_kv, group)))
        return dqkv, grads

    def projection_gradients(self, dqkv: Tensor, h: Tensor, need: Collection[str]) -> tuple[Tensor | None, dict]:
        """(dh [tokens, d] or None, gradients of the projections' weights and biases)."""
        grads, dh, start = {}, None, 0
        for (w, _), suffix in zip(projections(self.t), "qkv", strict=False):
            part = dqkv[:, start : start + w.shape[0]]
            start += w.shape[0]
            if f"w{suffix}" in need:
                grads[f"w{suffix}"] = weight_grad(part, h, w.dtype)
            if f"b{suffix}" in need:
                grads[f"b{suffix}"] = eager.column_sum(part)
            if self.needs_dh(need):
                w = self.cast(w)
                dh = torch.mm(part, w) if dh is None else dh.addmm_(part, w)
        return dh, grads


def attention_half(x: Tensor, t: AttentionTensors, o: AttentionOptions):
    """(y [tokens, d], out, lse, qkv)."""
    half = AttentionHalf(x, t, o)
    out, lse, qkv = half.attend(o.recompute == "none")
    return half.output(half.branch(out)), out, lse, qkv


def behind_core(need: Collection[str], o: AttentionOptions) -> set[str]:
    """The inputs whose gradients come through the core."""
    return set(need) - {"wo", "bo"} - after_branch(o)


def core_needs(inner: Collection[str], packed: bool) -> tuple[bool, bool]:
    """(need dq, need dk and dv) for the gradients of `inner`. packed: q, k, v are one projection."""
    inner = set(inner) - {"mask"}
    if packed or {"x", "norm_weight", "norm_bias"} & inner:
        return bool(inner), bool(inner)
    behind_q = {"wq", "bq", "q_norm", "q_norm_bias"}
    return bool(behind_q & inner), bool(inner - behind_q)


def attention_half_backward(
    dy, x, t: AttentionTensors, o: AttentionOptions, out, lse, qkv, needs: int, f: Tensor | None = None
) -> dict:
    """Gradients by name ("x" and AttentionTensors' fields) from dy [tokens, d] and what was kept; None is rebuilt.

    f: the branch's result, if it is at hand.
    """
    half, need = AttentionHalf(x, t, o), needed_names(AttentionTensors, needs)
    inner, reads = behind_core(need, o), reads_branch(o, need)
    rebuilt = out is None and (bool(inner) or reads or "wo" in need)
    if inner or rebuilt:
        h = half.inputs()
        raw = half.project(h) if qkv is None else qkv
        heads = half.heads(raw, keep_raw=qkv is not None or t.q_norm is not None)
    if reads and f is None:
        if out is None:  # what a norm after the branch read comes before the gradient that delta is made of
            out, lse, _ = attend(half.p, *heads, half.core)
        f = half.branch(out)
    dy, df, grads = half.branch_gradients(dy, f, need)
    f = do = delta = None
    if inner:
        do = torch.mm(df, half.cast(t.wo)).view(half.B, half.S, o.num_heads, half.D).transpose(1, 2)
    if rebuilt and not reads:
        out, lse, delta = attend(half.p, *heads, half.core, do)
    if "wo" in need:
        grads["wo"] = weight_grad(df, half.out_rows(out), t.wo.dtype)
    if "bo" in need:
        grads["bo"] = eager.column_sum(df)
    if inner:
        dqkv, made = half.core_gradients(heads, do, out, lse, delta, raw, inner)
        grads |= made
        dh, made = half.projection_gradients(dqkv, h, need)
        grads |= made
        if dh is not None:
            grads |= half.input_gradients(dh, dy, need)
    return half.finished(grads, x, need)


def composite_qk_norm(heads: Tensor, weight: Tensor, bias: Tensor | None, o: AttentionOptions) -> Tensor:
    """The norm of q or k [B, S, heads, D] in differentiable PyTorch ops."""
    if over_all_heads(weight, heads.shape[-1]):
        return composite_norm(heads.flatten(-2), o.qk_norm, weight, bias, o.qk_norm_eps).view(heads.shape)
    if weight.dim() == 1:
        return composite_norm(heads, o.qk_norm, weight, bias, o.qk_norm_eps)
    h = composite_norm(heads, o.qk_norm, None, None, o.qk_norm_eps) * cast_parameter(weight, heads.dtype)
    return h if bias is None else h + cast_parameter(bias, heads.dtype)


def attention_composite(x: Tensor, t: AttentionTensors, o: AttentionOptions) -> Tensor:
    """The half in differentiable PyTorch ops."""
    B, S = batch_and_rows(x)
    D, H = head_dim(t, o), o.num_heads
    h = composite_inputs(x, t, o)

    def linear(rows: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.linear(rows, cast_parameter(w, o.dtype), cast_parameter(b, o.dtype))

    qkv = torch.cat([linear(h, w, b) for w, b in projections(t)], -1)
    q, k, v = split_heads(qkv.view(B, S, qkv.shape[-1]), o)
    if t.q_norm is not None:
        q, k = composite_qk_norm(q, t.q_norm, t.q_norm_bias, o), composite_qk_norm(k, t.k_norm, t.k_norm_bias, o)
    cos, sin = rotary_of(S, t, o)
    if cos is not None:
        q, k = (composite_rotary(heads, cos, sin, o.interleaved) for heads in (q, k))
    core = half_core(t, o)
    out = eager.attention_composite(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), core)
    f = linear(out.transpose(1, 2).reshape(*x.shape[:-1], H * D), t.wo, t.bo)
    return composite_output(x, f, t, o)


def attention_half_fake(x: Tensor, t: AttentionTensors, o: AttentionOptions):
    """(y, out, lse, qkv), empty."""
    B, S = batch_and_rows(x)
    D, like = head_dim(t, o), x.new_empty(0, dtype=o.dtype)
    out, lse, qkv = (x.new_empty(0) for _ in range(3))
    if o.recompute != "full":
        out = like.new_empty_strided((B, o.num_heads, S, D), (S * t.wo.shape[1], D, t.wo.shape[1], 1))
        lse = like.new_empty((B, o.num_heads, S), dtype=torch.promote_types(o.dtype, torch.float32))
    if o.recompute == "none":
        qkv = like.new_empty((B * S, sum(w.shape[0] for w, _ in projections(t))))
    return x.new_empty((*x.shape[:-1], t.wo.shape[0]), dtype=output_dtype(x, o)), out, lse, qkv


def _flops(x: Tensor, t: AttentionTensors, o: AttentionOptions, elements: int, core: int) -> int:
    """FLOPs of products with weights of `elements` elements in all, and of `core` products of attention's core."""
    B, S = batch_and_rows(x)
    shape = (B, o.num_heads, S, head_dim(t, o))
    return 2 * B * S * elements + attention_flops(shape, shape, core)


def attention_half_flops(x: Tensor, t: AttentionTensors, o: AttentionOptions) -> int:
    return _flops(x, t, o, t.wo.numel() + sum(w.numel() for w, _ in projections(t)), 2)


def attention_half_backward_flops(
    x, t: AttentionTensors, o: AttentionOptions, out, qkv, needs: int, f: Tensor | None = None
) -> int:
    need = needed_names(AttentionTensors, needs)
    inner, reads = behind_core(need, o), reads_branch(o, need)
    rebuilt = out is None and (bool(inner) or reads or "wo" in need)
    weights = [w for w, _ in projections(t)]
    qkv_elements = sum(w.numel() for w in weights)
    # do, dWo, and the branch's result
    elements = t.wo.numel() * (bool(inner) + ("wo" in need) + (reads and f is None))
    if inner or rebuilt:
        elements += qkv_elements if qkv is None else 0
    if inner & {"x", "norm_weight", "norm_bias"}:
        elements += qkv_elements
    elements += sum(w.numel() for w, name in zip(weights, ("wq", "wk", "wv"), strict=False) if name in need)
    need_dq, need_dkv = core_needs(inner, packed=t.wk is None)
    core = 2 * rebuilt + gradient_products(need_dq, need_dkv, "mask" in inner)
    return _flops(x, t, o, elements, core)
