"""The attention sublayer of a layer: [norm ->] q, k, v projections [-> q/k norm] [-> rotary] -> attention -> output projection
and what is around it (`_half`). `attention_block` and `transformer_layer` are made of it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import eager
from ..registration.gradients import WeightGrad, weight_grad
from ..registration.needs import needed_names
from ..registration.rows import cast_parameter, rows_2d
from ..sublayer.lora import LowRank, low_rank, names_of
from ..sublayer.residual import Sublayer, after_branch, reads_branch, reference_inputs, reference_norm, reference_output
from .core import CoreOptions, CoreTensors, attend, attention_grads, core_of
from .masks import merged_mask
from .rotary import positions_of, reference_rotary, rotary_tables
from .tensors import (
    LAYERS,
    AttentionOptions,
    AttentionTensors,
    Projection,
    batch_and_rows,
    head_dim,
    key_rows,
    out_projection,
    over_all_heads,
    projected_shape,
    projections,
    split_heads,
)


def rotary_of(S: int, t: AttentionTensors, o: AttentionOptions) -> tuple[Tensor | None, Tensor | None]:
    """(cos, sin): those that were given, or None; for a theta, tables made here, in forward and again in backward."""
    if not o.theta:
        return t.cos, t.sin
    positions = positions_of(S, t.wo.device, t.cu)
    return rotary_tables(positions, head_dim(t, o), o.theta, interleaved=o.interleaved)


def sublayer_core(t: AttentionTensors, o: AttentionOptions) -> eager.AttentionCore:
    mask = merged_mask(t.mask, t.padding, o.mask_is_exclusion)
    options = CoreOptions(
        o.dropout_p, o.scale, o.left, o.right, o.max_len, o.max_len, o.backend, o.precision, o.fused, o.softcap, o.first_plane,
        o.planes, o.workspace,
    )  # fmt: skip
    return core_of(CoreTensors(mask, t.slopes, t.rng, t.cu, t.cu), options)


def update_of(letter: str, rows: int, t: AttentionTensors, o: AttentionOptions) -> LowRank | None:
    """The low-rank update of wq, wk, wv or wo, for `rows` rows of x."""
    return low_rank(t, o, LAYERS, letter, rows if t.key_value is None else rows + rows_2d(t.key_value).shape[0])


class AttentionSublayer(Sublayer):
    """What an attention sublayer computes, for one input: every quantity once, from x and what was saved."""

    def __init__(self, x: Tensor, t: AttentionTensors, o: AttentionOptions, *, shares: bool = False):
        super().__init__(x, t, o, shares=shares)
        self.B, self.S = batch_and_rows(x)
        self.D = head_dim(t, o)
        self.key_value = None if t.key_value is None else rows_2d(t.key_value).to(o.dtype)

    @functools.cached_property
    def updates(self) -> dict[str, LowRank | None]:
        return {letter: update_of(letter, self.x.shape[0], self.t, self.o) for letter in LAYERS}

    @functools.cached_property
    def projections(self) -> list[Projection]:
        return projections(self.t, self.o)

    @functools.cached_property
    def core(self) -> eager.AttentionCore:
        return sublayer_core(self.t, self.o)

    @functools.cached_property
    def angles(self) -> tuple[Tensor | None, Tensor | None]:
        return rotary_of(self.S, self.t, self.o)

    # -- forward

    def blocks(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of x and rows of key_value in qkv, which has `projected_shape`; twice all rows without a key_value."""
        if self.key_value is None:
            return qkv, qkv
        rows, width = self.x.shape[0], self.o.num_heads * self.D
        of_key_value = qkv[rows * width :].view(self.key_value.shape[0], 2 * self.o.num_kv_heads * self.D)
        return qkv[: rows * width].view(rows, width), of_key_value

    def parts(self, qkv: Tensor) -> Iterator[tuple[Projection, Tensor]]:
        """Every projection with its result in qkv, or its gradient in dqkv: [rows, outputs]."""
        starts = [0, 0]
        for part in self.projections:
            block, width = self.blocks(qkv)[part.of_key_value], part.weight.shape[0]
            start = starts[part.of_key_value]
            yield part, block[:, start : start + width]
            starts[part.of_key_value] += width

    def project(self, h: Tensor) -> Tensor:
        """q, k and v: all weights write into one buffer, none is copied."""
        qkv = h.new_empty(projected_shape(self.B, self.S, self.t, self.o))
        for part, out in self.parts(qkv):
            rows = self.key_value if part.of_key_value else h
            w, b = self.cast(part.weight, last=False), self.cast(part.bias)
            torch.mm(rows, w.t(), out=out) if b is None else torch.addmm(b, rows, w.t(), out=out)
            if (pair := self.updates[part.letter]) is not None:
                pair.add(self.p, out, rows)
        return qkv

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, S, heads, D] of the projections."""
        if self.key_value is None:
            return split_heads(qkv.view(self.B, self.S, qkv.shape[1]), self.o)
        q, kv = self.blocks(qkv)
        kv = kv.view(self.B, key_rows(self.S, self.t), 2 * self.o.num_kv_heads, self.D)
        return q.view(self.B, self.S, self.o.num_heads, self.D), *kv.split(self.o.num_kv_heads, 2)

    def rotates(self) -> bool:
        """Is there a norm or a rotation between the projections and the core?"""
        return self.t.q_norm is not None or self.angles[0] is not None

    def rotated(self, raw: Tensor, weight: Tensor | None, bias: Tensor | None, save_raw: bool) -> Tensor:
        """q or k [B, S, heads, D], norm and rotation done."""
        o, out = self.o, None if save_raw else raw
        if over_all_heads(weight, self.D):
            normed = self.p.norm_fwd(self.in_rows(raw), weight, bias, o.qk_norm_eps, o.qk_norm, o.dtype)
            raw, weight, bias = normed.view(raw.shape), None, None
            if self.angles[0] is None:
                return raw
            out = raw
        return self.p.heads_fwd(
            raw, weight, o.qk_norm_eps, *self.angles, o.interleaved, bias=bias, kind=o.qk_norm, out=out
        )

    def rotation_backward(self, dy: Tensor, raw: Tensor, name: str, place: Tensor, need: Collection[str]) -> tuple:
        """Gradients of raw (q or k; in `place`, if that is where dy is or can be), of its norm's weight and of its bias."""
        o, weight = self.o, getattr(self.t, name)
        needs = dict(need_dweight=self.dtype_of(name, need), need_dbias=self.dtype_of(f"{name}_bias", need))
        if not over_all_heads(weight, self.D):
            options = dict(kind=o.qk_norm, out=place, **needs)
            return self.p.heads_bwd(dy, raw, weight, o.qk_norm_eps, *self.angles, o.interleaved, **options)
        if self.angles[0] is not None:
            dy = self.p.heads_bwd(dy, raw, None, o.qk_norm_eps, *self.angles, o.interleaved, out=place)[0]
        dx, *made = self.p.norm_bwd(self.in_rows(dy), self.in_rows(raw), weight, o.qk_norm_eps, o.qk_norm, **needs)
        return dx.view(raw.shape), *made

    def in_rows(self, heads: Tensor) -> Tensor:
        """[B, S, heads, D] -> [tokens, heads D], a view where the strides allow it."""
        return heads.reshape(heads.shape[0] * heads.shape[1], heads.shape[2] * self.D)

    def heads(self, qkv: Tensor, save_raw: bool) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, H, S, D] as the core reads them: q/k norm and rotation done, in place unless `save_raw`.

        Not in place for torch's own core either: another layout may select another algorithm, and recompute must match
        forward.
        """
        t = self.t
        save_raw = save_raw or bool(self.o.fused)
        q, k, v = self.split(qkv)
        if self.rotates():
            q, k = (
                self.rotated(q, t.q_norm, t.q_norm_bias, save_raw),
                self.rotated(k, t.k_norm, t.k_norm_bias, save_raw),
            )
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, save_raw: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse, qkv): o and lse of the core, and the projections, raw if `save_raw`."""
        qkv = self.project(self.inputs())
        out, lse, _ = attend(self.p, *self.heads(qkv, save_raw), self.core)
        return out, lse, qkv

    def out_rows(self, out: Tensor) -> Tensor:
        """o [B, H, S, D] (memory [B, S, H, D]) -> [tokens, H D], a view."""
        return out.transpose(1, 2).reshape(self.x.shape[0], self.o.num_heads * self.D)

    def branch(self, out: Tensor) -> Tensor:
        """dropout(o Wo^T + bo) [tokens, d]."""
        rows = self.out_rows(out)
        f = eager.linear(rows, self.cast(self.t.wo, last=False), self.cast(self.t.bo))
        if (pair := self.updates["o"]) is not None:
            pair.add(self.p, f, rows)
        return self.drop(f)

    # -- backward

    def inner_gradient(self, part: Projection, d: Tensor, need: Collection[str], reads_input: bool) -> Tensor | None:
        """What a low-rank update's gradients are made of, if there is one and any of them is needed."""
        pair = self.updates[part.letter]
        if pair is None or not (reads_input or not need.isdisjoint(names_of(part.letter))):
            return None
        return pair.inner_gradient(d)

    def add_input_gradient(self, part: Projection, d: Tensor, du: Tensor | None, total: Tensor | None) -> Tensor:
        """total + the gradient of what a projection reads, in total if there is one."""
        w = self.cast(part.weight)
        total = torch.mm(d, w) if total is None else total.addmm_(d, w)
        if du is not None:
            self.updates[part.letter].add_input_gradient(self.p, du, total)
        return total

    def weight_gradients(
        self, part: Projection, d: Tensor, du: Tensor | None, rows: Tensor, need: Collection[str]
    ) -> dict[str, Tensor]:
        """Of a projection's weight, bias and low-rank update, from the gradient d of its result and the rows it reads."""
        (w, b), (lora_a, lora_b), grads = (f"w{part.letter}", f"b{part.letter}"), names_of(part.letter), {}
        if w in need:
            grads[w] = weight_grad(d, rows, getattr(self.t, w), part.rows)
        if b in need:
            grads[b] = eager.column_sum(d, part.bias.dtype)
        sums = {name: WeightGrad(getattr(self.t, name), 1) for name in (lora_a, lora_b) if name in need}
        if sums:
            self.updates[part.letter].add_gradients(self.p, d, du, rows, sums.get(lora_a), sums.get(lora_b))
        return grads | {name: total.result() for name, total in sums.items()}

    def core_gradients(self, heads, do, out, lse, delta, raw, inner: Collection[str]) -> tuple[Tensor, dict]:
        """(gradients of the projections, those of the q/k norms' weights and of the mask) from do."""
        t, o, p = self.t, self.o, self.p
        dqkv = torch.empty_like(raw, memory_format=torch.contiguous_format)
        places = self.split(dqkv)
        outs = [place.transpose(1, 2) for place in places]
        need_dq, need_dkv = core_needs(inner, t)
        *made, dmask, _ = attention_grads(
            p, *heads, do, out, lse, self.core, delta=delta, need_dq=need_dq, need_dkv=need_dkv,
            dmask_shape=t.mask.shape if "mask" in inner else None, out=outs,
        )  # fmt: skip
        made = [
            place if grad is view or grad is None else grad.transpose(1, 2)
            for grad, view, place in zip(made, outs, places, strict=True)
        ]
        grads = {"mask": dmask}
        if self.rotates():
            raw_q, raw_k, _ = self.split(raw)
            formed = (("q_norm", raw_q, need_dq), ("k_norm", raw_k, need_dkv))
            for i, (name, raw_heads, is_formed) in enumerate(formed):
                if is_formed:
                    made[i], grads[name], grads[f"{name}_bias"] = self.rotation_backward(
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
        """(dh [tokens, d] or None, gradients of key_value and of the projections' weights and biases)."""
        grads: dict[str, list[Tensor | None]] = {}  # None: added to a main_grad
        inputs = {False: (h, self.needs_dh(need), []), True: (self.key_value, "key_value" in need, [])}
        for part, d in self.parts(dqkv):
            rows, wanted, total = inputs[part.of_key_value]
            du = self.inner_gradient(part, d, need, wanted)
            for name, grad in self.weight_gradients(part, d, du, rows, need).items():
                grads.setdefault(name, []).append(grad)
            if wanted:
                total[:] = [self.add_input_gradient(part, d, du, total[0] if total else None)]
        joined = {
            name: made[0] if len(made) == 1 or made[0] is None else torch.cat(made) for name, made in grads.items()
        }
        (_, _, dh), (_, _, dkey_value) = inputs.values()
        if dkey_value:
            joined["key_value"] = dkey_value[0].view(self.t.key_value.shape)
        return dh[0] if dh else None, joined


def saves(o: AttentionOptions) -> tuple[str, ...]:
    """What forward saves besides its tensors: o and lse of the core, and the projections."""
    return {"none": ("out", "lse", "qkv"), "selective": ("out", "lse"), "full": ()}[o.recompute]


def attention_sublayer(x: Tensor, t: AttentionTensors, o: AttentionOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """(y [tokens, d], what `saves` names)."""
    sublayer = AttentionSublayer(x, t, o)
    out, lse, qkv = sublayer.attend(o.recompute == "none")
    return sublayer.output(sublayer.branch(out)), {"out": out, "lse": lse, "qkv": qkv}


OF_OUTPUT = frozenset(("wo", "bo", *names_of("o")))


def behind_core(need: Collection[str], o: AttentionOptions) -> set[str]:
    """The inputs whose gradients come through the core."""
    return set(need) - OF_OUTPUT - after_branch(o)


def reads_core(need: Collection[str]) -> bool:
    """Are there gradients of what reads o?"""
    return not OF_OUTPUT.isdisjoint(need - {"bo"})


def core_needs(inner: Collection[str], t: AttentionTensors) -> tuple[bool, bool]:
    """(need dq, need dk and dv) for the gradients of `inner`."""
    inner = set(inner) - {"mask"}
    behind_q, of_q = {"q_norm", "q_norm_bias"}, {"wq", "bq", *names_of("q")}
    packed, read_by_q = of_q if t.wk is None else set(), {"x", "norm_weight", "norm_bias"}
    behind_both = packed if t.key_value is not None else packed | read_by_q
    behind_q |= (of_q | read_by_q) - behind_both
    if behind_both & inner:
        return True, True
    return bool(behind_q & inner), bool(inner - behind_q)


def attention_sublayer_backward(
    dy: Tensor, sublayer: AttentionSublayer, saved: dict[str, Tensor], needs: int, f: Tensor | None = None
) -> dict[str, Tensor | None]:
    """Gradients by name ("x" and AttentionTensors' fields) from dy [tokens, d]; what is not among the saved is recomputed.

    sublayer: shares copies. f: the branch's result, if it is at hand.
    """
    t, o, need = sublayer.t, sublayer.o, needed_names(AttentionTensors, needs)
    out, lse, qkv = (saved.get(name) for name in ("out", "lse", "qkv"))
    inner, reads = behind_core(need, o), reads_branch(o, need)
    recomputed = out is None and (bool(inner) or reads or reads_core(need))
    if inner or recomputed:
        h = sublayer.inputs()
        raw = sublayer.project(h) if qkv is None else qkv
        heads = sublayer.heads(raw, save_raw=qkv is not None or t.q_norm is not None)
    if reads and f is None:
        if out is None:  # what a norm after the branch read comes before the gradient that delta is made of
            out, lse, _ = attend(sublayer.p, *heads, sublayer.core)
        f = sublayer.branch(out)
    dy, df, grads = sublayer.branch_gradients(dy, f, need)
    f = do = delta = None
    last = out_projection(t)
    du = sublayer.inner_gradient(last, df, need, bool(inner))
    if inner:
        do = sublayer.add_input_gradient(last, df, du, None)
        do = do.view(sublayer.B, sublayer.S, o.num_heads, sublayer.D).transpose(1, 2)
    if recomputed and not reads:
        out, lse, delta = attend(sublayer.p, *heads, sublayer.core, do)
    grads |= sublayer.weight_gradients(last, df, du, sublayer.out_rows(out) if reads_core(need) else None, need)
    if inner:
        dqkv, made = sublayer.core_gradients(heads, do, out, lse, delta, raw, inner)
        grads |= made
        dh, made = sublayer.projection_gradients(dqkv, h, need)
        grads |= made
        if dh is not None:
            grads |= sublayer.input_gradients(dh, dy, need)
    return sublayer.finished(grads, need)


def reference_qk_norm(heads: Tensor, weight: Tensor, bias: Tensor | None, o: AttentionOptions) -> Tensor:
    """The norm of q or k [B, S, heads, D] in differentiable PyTorch ops."""
    if over_all_heads(weight, heads.shape[-1]):
        return reference_norm(heads.flatten(-2), o.qk_norm, weight, bias, o.qk_norm_eps).view(heads.shape)
    if weight.dim() == 1:
        return reference_norm(heads, o.qk_norm, weight, bias, o.qk_norm_eps)
    h = reference_norm(heads, o.qk_norm, None, None, o.qk_norm_eps) * cast_parameter(weight, heads.dtype)
    return h if bias is None else h + cast_parameter(bias, heads.dtype)


def attention_reference(x: Tensor, t: AttentionTensors, o: AttentionOptions) -> Tensor:
    """The sublayer in differentiable PyTorch ops."""
    B, S = batch_and_rows(x)
    D, H = head_dim(t, o), o.num_heads
    h = reference_inputs(x, t, o)

    def linear(rows: Tensor, part: Projection) -> Tensor:
        y = F.linear(rows, cast_parameter(part.weight, o.dtype), cast_parameter(part.bias, o.dtype))
        pair = update_of(part.letter, B * S, t, o)
        return y if pair is None else y + pair.reference(rows)

    sources = h, h if t.key_value is None else t.key_value.to(o.dtype)
    qkv = [linear(sources[part.of_key_value], part) for part in projections(t, o)]
    if t.key_value is None:
        q, k, v = split_heads(torch.cat(qkv, -1).view(B, S, projected_shape(B, S, t, o)[1]), o)
    else:
        q, kv = qkv[0].view(B, S, H, D), torch.cat(qkv[1:], -1).view(B, key_rows(S, t), 2 * o.num_kv_heads, D)
        k, v = kv.split(o.num_kv_heads, 2)
    if t.q_norm is not None:
        q, k = reference_qk_norm(q, t.q_norm, t.q_norm_bias, o), reference_qk_norm(k, t.k_norm, t.k_norm_bias, o)
    cos, sin = rotary_of(S, t, o)
    if cos is not None:
        q, k = (reference_rotary(heads, cos, sin, o.interleaved) for heads in (q, k))
    core = sublayer_core(t, o)
    out = eager.attention_reference(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), core)
    f = linear(out.transpose(1, 2).reshape(*x.shape[:-1], H * D), out_projection(t))
    return reference_output(x, f, t, o)
