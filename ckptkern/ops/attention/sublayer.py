"""The attention sublayer of a layer: [norm ->] q, k, v projections [-> q/k norm] [-> rotary] -> attention -> output projection
and what is around it (`_half`). `attention_block` and `transformer_layer` are made of it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from ... import eager
from ..registration.gradients import PartGrads, WeightGrad, add_matmul
from ..registration.needs import needed_names
from ..registration.rows import rows_2d
from ..sublayer.lora import LowRank, low_rank, names_of
from ..sublayer.residual import Sublayer, reads_branch
from .core import CoreOptions, CoreTensors, attend, attention_grads, core_of
from .gradients import behind_core, core_needs, reads_core
from .groups import Division, division, group_of
from .masks import merged_mask
from .rotary import positions_of, rotary_tables
from .tensors import (
    LAYERS,
    AttentionOptions,
    AttentionTensors,
    Projection,
    batch_and_rows,
    head_dim,
    in_group,
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
    workspace = None if o.workspace is None else o.workspace // 2  # the other half is for heads and their gradients
    options = CoreOptions(
        dropout_p=o.dropout_p, scale=o.scale, left=o.left, right=o.right, max_q=o.max_len, max_k=o.max_len,
        backend=o.backend, precision=o.precision, fused=o.fused, softcap=o.softcap, first_plane=o.first_plane, planes=o.planes,
        workspace=workspace,
    )  # fmt: skip
    return core_of(CoreTensors(mask, t.slopes, t.rng, t.cu, t.cu), options)


def update_of(letter: str, rows: int, t: AttentionTensors, o: AttentionOptions) -> LowRank | None:
    """The low-rank update of wq, wk, wv or wo, for `rows` rows of x."""
    return low_rank(t, o, LAYERS, letter, rows if t.key_value is None else rows + rows_2d(t.key_value).shape[0])


class AttentionSublayer(Sublayer):
    """What an attention sublayer computes, for one input: every quantity once, from x and what was saved.

    The heads are computed in `groups`, each of which is such a sublayer with the parts of weights, masks and slopes of its
    heads. Around them, from x to h and from o to the output, is the sublayer of all heads.
    """

    index, count = 0, 1  # of this group among all; the sublayer of all heads is group 0 of 1

    def __init__(self, x: Tensor, t: AttentionTensors, o: AttentionOptions, *, shares: bool = False):
        super().__init__(x, t, o, shares=shares)
        self.B, self.S = batch_and_rows(x)
        self.D = head_dim(t, o)
        self.key_value = None if t.key_value is None else rows_2d(t.key_value).to(o.dtype)

    @functools.cached_property
    def division(self) -> Division:
        return division(self.x, self.t, self.o)

    @property
    def group_count(self) -> int:
        return self.division.groups

    def groups(self) -> Iterator[AttentionSublayer]:
        """The sublayer itself if all fits the workspace, else the sublayers of each group of heads."""
        if self.group_count == 1:
            yield self
            return
        for index in range(self.group_count):
            yield self.group(index, self.group_count)

    def group(self, index: int, count: int) -> AttentionSublayer:
        t, o, core = group_of(self.t, self.o, self.core, index, count)
        if self.key_value is not None:
            t = t._replace(key_value=self.key_value.view(t.key_value.shape))
        made = AttentionSublayer(self.x.view(*self.lead, self.x.shape[1]), t, o, shares=self.shares)
        made.index, made.count, made.core, made.angles = index, count, core, self.angles
        made.division = self.division
        made.projections = projections(self.t, self.o, index, count)
        return made

    @functools.cached_property
    def updates(self) -> dict[str, LowRank | None]:
        made = {letter: update_of(letter, self.x.shape[0], self.t, self.o) for letter in LAYERS}
        if self.index and (pair := made["o"]) is not None:
            made["o"] = pair._replace(dropout=(*pair.dropout[:3], self.index * self.width))
        return made

    def update(self, part: Projection) -> LowRank | None:
        pair = self.updates[part.letter]
        return pair if pair is None or part.rows is None else pair._replace(b=pair.b[part.rows])

    @functools.cached_property
    def projections(self) -> list[Projection]:
        return projections(self.t, self.o)

    @functools.cached_property
    def core(self) -> eager.AttentionCore:
        return sublayer_core(self.t, self.o)

    @functools.cached_property
    def angles(self) -> tuple[Tensor | None, Tensor | None]:
        return rotary_of(self.S, self.t, self.o)

    @property
    def width(self) -> int:
        """Of q's and o's rows."""
        return self.o.num_heads * self.D

    # -- forward

    def blocks(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of x and rows of key_value in qkv, which has `projected_shape`; twice all rows without a key_value."""
        if self.key_value is None:
            return qkv, qkv
        rows, width = self.x.shape[0], self.width
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

    def held_inputs(self) -> Tensor | None:
        """h, if it fits the workspace beside a group."""
        return self.inputs() if len(self.division.chunks) == 1 else None

    def read(self, h: Tensor | None, of_key_value: bool = False) -> Iterator[tuple[slice, Tensor]]:
        """(their place, rows) of what projections read: of h, formed a chunk at a time unless it is held, or of key_value."""
        if of_key_value:
            yield slice(None), self.key_value
        elif h is not None:
            yield slice(None), h
        else:
            for start, stop in self.division.chunks:
                yield slice(start, stop), self.input_rows(self.x[start:stop])

    def project(self, h: Tensor | None) -> Tensor:
        """q, k and v: all weights write into one buffer, none is copied."""
        qkv = self.x.new_empty(projected_shape(self.B, self.S, self.t, self.o), dtype=self.o.dtype)
        for of_key_value in (False, True):
            parts = [(*one, self.update(one[0])) for one in self.parts(qkv) if one[0].of_key_value == of_key_value]
            parts = [(self.cast(part.weight, last=False), self.cast(part.bias), *others) for part, *others in parts]
            for place, rows in self.read(h, of_key_value) if parts else ():
                for w, b, out, pair in parts:
                    eager.linear(rows, w, b, out=out[place])
                    if pair is not None:
                        pair.add(self.p, out[place], rows, place.start or 0)
        return qkv

    def split(self, qkv: Tensor, index: int = 0, count: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, S, heads, D] of the projections; of the heads of group `index` of `count`."""
        if self.key_value is None:
            return split_heads(qkv.view(self.B, self.S, qkv.shape[1]), self.o, index, count)
        q, kv = self.blocks(qkv)
        kv = kv.view(self.B, key_rows(self.S, self.t), 2 * self.o.num_kv_heads, self.D)
        parts = q.view(self.B, self.S, self.o.num_heads, self.D), *kv.split(self.o.num_kv_heads, 2)
        return in_group(parts, index, count)

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
        if self.count > 1 and weight is not None and weight.dim() == 1:  # a sum over groups, which is rounded once
            needs = {which: bool(dtype) for which, dtype in needs.items()}
        if not over_all_heads(weight, self.D):
            options = dict(kind=o.qk_norm, out=place, **needs)
            return self.p.heads_bwd(dy, raw, weight, o.qk_norm_eps, *self.angles, o.interleaved, **options)
        if self.angles[0] is not None:
            dy = self.p.heads_bwd(dy, raw, None, o.qk_norm_eps, *self.angles, o.interleaved, out=place)[0]
        dx, *made = self.p.norm_bwd(self.in_rows(dy), self.in_rows(raw), weight, o.qk_norm_eps, o.qk_norm, **needs)
        return dx.view(dy.shape), *made

    def in_rows(self, heads: Tensor) -> Tensor:
        """[B, S, heads, D] -> [tokens, heads D], a view where the strides allow it."""
        return heads.reshape(heads.shape[0] * heads.shape[1], heads.shape[2] * self.D)

    def heads(self, raw: tuple[Tensor, Tensor, Tensor], save_raw: bool) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, H, S, D] as the core reads them, from the projections [B, S, heads, D]: q/k norm and rotation done, in
        place unless `save_raw`.

        Not in place for torch's own core either: another layout may select another algorithm, and recompute must match
        forward.
        """
        t, (q, k, v) = self.t, raw
        save_raw = save_raw or bool(self.o.fused)
        if self.rotates():
            q, k = (
                self.rotated(q, t.q_norm, t.q_norm_bias, save_raw),
                self.rotated(k, t.k_norm, t.k_norm_bias, save_raw),
            )
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, save_raw: bool) -> dict[str, Tensor | None]:
        """out and lse of the core, and qkv, the projections, if `save_raw`, raw then."""
        h = self.held_inputs()
        if self.group_count == 1:
            qkv = self.project(h)
            out, lse, _ = attend(self.p, *self.heads(self.split(qkv), save_raw), self.core)
            return {"out": out, "lse": lse, "qkv": qkv}
        qkv = self.project(h) if save_raw else None
        heads = self.x.new_empty((), dtype=self.o.dtype).expand(self.B, self.o.num_heads, self.S, self.D)
        out = eager.empty_heads(heads)
        lse = None
        for group in self.groups():
            heads = group.heads(group.raw(h, self, qkv), save_raw)
            made, of_group, _ = attend(self.p, *heads, group.core)
            lse = of_group.new_empty(out.shape[:3]) if lse is None else lse
            (part,), (lse_part,) = (in_group((whole,), group.index, group.count, 1) for whole in (out, lse))
            part.copy_(made)
            lse_part.copy_(of_group)
        return {"out": out, "lse": lse, "qkv": qkv}

    def raw(self, h: Tensor | None, whole: AttentionSublayer, qkv: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """This group's projections [B, S, heads, D]: of qkv, which holds all heads', if it was saved."""
        return self.split(self.project(h)) if qkv is None else whole.split(qkv, self.index, self.count)

    def out_rows(self, out: Tensor) -> Tensor:
        """o [B, H, S, D] (memory [B, S, H, D]) -> [tokens, H D], a view."""
        return out.transpose(1, 2).reshape(self.x.shape[0], out.shape[1] * self.D)

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
        pair = self.update(part)
        if pair is None or not (reads_input or not need.isdisjoint(names_of(part.letter))):
            return None
        return pair.inner_gradient(d)

    def add_input_gradient(self, part: Projection, d: Tensor, du: Tensor | None, total: Tensor | None) -> Tensor:
        """total + the gradient of what a projection reads, in total if there is one; over several groups in float32."""
        total = add_matmul(total, d, self.cast(part.weight), wide=self.count > 1 and part.letter != "o")
        if du is not None:
            self.update(part).add_input_gradient(self.p, du, total)
        return total

    def weight_sums(
        self, part: Projection, need: Collection[str], grads: PartGrads, chunks: int = 1
    ) -> dict[str, WeightGrad]:
        """What sums the needed gradients of a projection's weight and low-rank update, over chunks of rows."""
        of_update, place, of_out = names_of(part.letter), part.rows, part.letter == "o"
        if of_out and self.count > 1:
            place = slice(None), slice(self.index * self.width, (self.index + 1) * self.width)
        shared = of_update[of_out]  # which all groups read; the other one is cut as the weight is
        return {
            name: grads.sum_of(name) if name == shared else grads.of_weight(name, place, chunks)
            for name in (f"w{part.letter}", *of_update) if name in need
        }  # fmt: skip

    def add_to_sums(
        self, sums: dict[str, WeightGrad], part: Projection, d: Tensor, du: Tensor | None, rows: Tensor, start: int = 0
    ) -> None:
        """From the gradient d of a projection's result and the rows, from `start` on, that it reads."""
        of_update = tuple(map(sums.get, names_of(part.letter)))
        if (of_weight := sums.get(f"w{part.letter}")) is not None:
            of_weight.add(d, rows)
        if of_update != (None, None):
            self.update(part).add_gradients(self.p, d, du, rows, *of_update, start)

    def add_out_gradients(
        self, df: Tensor, du: Tensor | None, out: Tensor | None, need: Collection[str], grads: PartGrads
    ) -> None:
        """Adds those of the output projection, from the gradient of the branch's result and o."""
        part = out_projection(self.t)
        if "bo" in need and not self.index:  # all groups'
            grads.grads["bo"] = eager.column_sum(df, part.bias.dtype)
        if sums := self.weight_sums(part, need, grads):
            self.add_to_sums(sums, part, df, du, self.out_rows(out))
            grads.written(sums)

    def buffer(self) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """(dqkv of `projected_shape`, the places of dq, dk, dv in it)."""
        dqkv = self.x.new_empty(projected_shape(self.B, self.S, self.t, self.o), dtype=self.o.dtype)
        return dqkv, self.split(dqkv)

    def core_gradients(
        self, heads, do, out, lse, delta, inner: Collection[str], grads: PartGrads
    ) -> tuple[list[Tensor | None], tuple | None]:
        """(the gradients of q, k, v [B, S, heads, D] as the core read them, the `buffer` if kernels wrote them there), from do;
        adds that of the mask."""
        buffer = self.buffer() if self.p is not eager and not self.core.fused else None
        outs = [place.transpose(1, 2) for place in buffer[1]] if buffer else [None] * 3
        need_dq, need_dkv = core_needs(inner, self.t)
        *made, dmask, _ = attention_grads(
            self.p, *heads, do, out, lse, self.core, delta=delta, need_dq=need_dq, need_dkv=need_dkv,
            dmask_shape=self.t.mask.shape if "mask" in inner else None, out=outs,
        )  # fmt: skip
        if dmask is not None:
            self.add_part("mask", dmask, 1, grads)
        if buffer:
            return list(buffer[1]), buffer
        return [None if grad is None else grad.transpose(1, 2) for grad in made], None

    def projected_gradients(
        self, made: list[Tensor | None], buffer: tuple | None, raw, inner: Collection[str], grads: PartGrads
    ) -> list[Tensor | None]:
        """Of each projection [rows, outputs], from those of q, k, v as the core read them; adds those of q's and k's norms.

        Projections of q, k and v alone take what the core gave, if no kernel wrote it in the buffer. made: is emptied.
        """
        if buffer is None and len(self.projections) < 3:
            buffer = self.buffer()
        places = buffer[1] if buffer else made
        needed = core_needs(inner, self.t)
        for i, (name, is_formed) in enumerate(zip(("q_norm", "k_norm"), needed, strict=True)):
            if is_formed and self.rotates():
                made[i], *of_norm = self.rotation_backward(made[i], raw[i], name, places[i], inner)
                for field, grad in zip((name, f"{name}_bias"), of_norm, strict=True):
                    self.add_part(field, grad, 0, grads)
        if not buffer:
            return [None if grad is None else self.in_rows(grad) for grad in made]
        for place in places:
            grad = made.pop(0)
            if grad is not None and grad is not place:
                place.copy_(grad)
        (dqkv, _), o = buffer, self.o
        H_kv, group = o.num_kv_heads, o.num_heads // o.num_kv_heads
        if o.qkv_layout == "heads" and H_kv > 1 and group > 1:  # dq's place is no view
            by_kv_head = dqkv.view(self.B, self.S, H_kv, group + 2, self.D)
            by_kv_head[:, :, :, :group].copy_(places[0].unflatten(2, (H_kv, group)))
        return [d for _, d in self.parts(dqkv)]

    def add_part(self, name: str, grad: Tensor | None, dim: int, grads: PartGrads) -> None:
        """The gradient of a parameter with entries for each head along `dim`, or else shared by all heads."""
        whole = getattr(grads.t, name)
        if grad is None or self.count == 1 or whole.dim() <= 1 or whole.shape[dim] == 1:
            grads.add(name, grad)
        else:
            first = self.index * grad.shape[dim]
            grads.put(name, grad, (slice(None),) * dim + (slice(first, first + grad.shape[dim]),))

    def add_projection_gradients(
        self, ds: list[Tensor | None], h: Tensor | None, need: Collection[str], grads: PartGrads,
        totals: dict[bool, Tensor | None],
    ) -> None:  # fmt: skip
        """Adds those of the projections' weights and biases, and in `totals` of h and key_value, from those of results."""
        wanted = {False: self.needs_dh(need), True: "key_value" in need}
        formed: dict[bool, list] = {False: [], True: []}
        for part, d in zip(self.projections, ds, strict=True):
            if d is None:
                continue
            reads_input, chunks = wanted[part.of_key_value], 1 if h is not None else len(self.division.chunks)
            du = self.inner_gradient(part, d, need, reads_input)
            if (name := f"b{part.letter}") in need:
                grads.put(name, eager.column_sum(d, part.bias.dtype), part.rows)
            if sums := self.weight_sums(part, need, grads, 1 if part.of_key_value else chunks):
                formed[part.of_key_value].append((sums, part, d, du))
            if reads_input:
                totals[part.of_key_value] = self.add_input_gradient(part, d, du, totals[part.of_key_value])
        for of_key_value, parts in formed.items():
            for place, rows in self.read(h, of_key_value) if parts else ():
                for sums, part, d, du in parts:
                    self.add_to_sums(sums, part, d[place], du if du is None else du[place], rows, place.start or 0)
            for sums, *_ in parts:
                grads.written(sums)

    def add_gradients(
        self, whole: AttentionSublayer, h: Tensor | None, df: Tensor, du: Tensor | None, saved: dict[str, Tensor | None],
        need: Collection[str], grads: PartGrads, totals: dict[bool, Tensor | None],
    ) -> None:  # fmt: skip
        """This group's gradients, from that of the branch's result.

        saved: out, lse and qkv of all heads, None for what is recomputed. totals: the gradients of h and of key_value.
        """
        t, o = self.t, self.o
        out, lse, qkv = (saved.get(name) for name in ("out", "lse", "qkv"))
        inner = behind_core(need, o)
        recomputed = out is None and (bool(inner) or reads_core(need))
        if inner or recomputed:
            raw = self.raw(h, whole, qkv)
            heads = self.heads(raw, save_raw=qkv is not None or t.q_norm is not None)
        do = delta = None
        if inner:
            do = self.add_input_gradient(out_projection(t), df, du, None)
            do = do.view(self.B, self.S, o.num_heads, self.D).transpose(1, 2)
        if recomputed:
            out, lse, delta = attend(self.p, *heads, self.core, do)
        elif out is not None and self.count > 1:
            out, lse = in_group((out, lse), self.index, self.count, 1)
            lse = lse.clone(memory_format=torch.contiguous_format)  # at an address as aligned as that of all
        self.add_out_gradients(df, du, out, need, grads)
        if inner:
            made, buffer = self.core_gradients(heads, do, out, lse, delta, inner, grads)
            heads = do = out = lse = delta = None
            raw = raw if t.q_norm is not None else (None, None)
            ds = self.projected_gradients(made, buffer, raw, inner, grads)
            raw = made = buffer = None
            self.add_projection_gradients(ds, h, need, grads, totals)


def saves(o: AttentionOptions) -> tuple[str, ...]:
    """What forward saves besides its tensors: o and lse of the core, and the projections."""
    return {"none": ("out", "lse", "qkv"), "selective": ("out", "lse"), "full": ()}[o.recompute]


def attention_sublayer(x: Tensor, t: AttentionTensors, o: AttentionOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """(y [tokens, d], what `saves` names)."""
    sublayer = AttentionSublayer(x, t, o)
    saved = sublayer.attend(o.recompute == "none")
    return sublayer.output(sublayer.branch(saved["out"])), saved


def attention_sublayer_backward(
    dy: Tensor, sublayer: AttentionSublayer, saved: dict[str, Tensor], needs: int, f: Tensor | None = None
) -> dict[str, Tensor | None]:
    """Gradients by name ("x" and AttentionTensors' fields) from dy [tokens, d]; what is not among the saved is recomputed.

    sublayer: shares copies. f: the branch's result, if it is at hand.
    """
    t, o, need = sublayer.t, sublayer.o, needed_names(AttentionTensors, needs)
    inner, reads = behind_core(need, o), reads_branch(o, need)
    if reads and f is None:
        if (
            saved.get("out") is None
        ):  # what a norm after the branch read comes before the gradient that delta is made of
            saved = sublayer.attend(save_raw=sublayer.group_count == 1)
        f = sublayer.branch(saved["out"])
    dy, df, grads = sublayer.branch_gradients(dy, f, need)
    f = None
    h = sublayer.held_inputs() if inner or (saved.get("out") is None and reads_core(need)) else None
    parts, totals = PartGrads(t, sublayer.group_count * len(sublayer.division.chunks)), {False: None, True: None}
    du = sublayer.inner_gradient(out_projection(t), df, need, bool(inner))
    for group in sublayer.groups():
        group.add_gradients(sublayer, h, df, du, saved, need, parts, totals)
    h = df = None
    grads |= parts.results()
    dh, dkey_value = totals.values()
    if dkey_value is not None:
        grads["key_value"] = dkey_value.view(t.key_value.shape)
    if dh is not None:
        grads |= sublayer.input_gradients(dh.to(o.dtype), dy, need)
    return sublayer.finished(grads, need)
