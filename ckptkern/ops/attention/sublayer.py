"""The attention sublayer of a layer: [norm ->] q, k, v projections [-> q/k norm] [-> rotary] -> attention -> output projection
and what is around it (`residual`). `attention_block` and `transformer_layer` are made of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ... import eager
from ..registration.op import rows_2d
from ..sublayer.lora import LowRank, low_rank
from .context import ExchangedHeads, GatheredHeads
from .core import attend
from .core_sublayer import CoreSublayer
from .groups import Division, division, group_of
from .tensors import (
    LAYERS,
    AttentionOptions,
    AttentionTensors,
    Projection,
    has_gate,
    head_dim,
    in_group,
    key_rows,
    over_all_heads,
    projected_shape,
    projections,
    split_gate,
    split_heads,
    split_query,
)

Heads = tuple[Tensor, Tensor, Tensor] | GatheredHeads | ExchangedHeads


def update_of(letter: str, rows: int, t: AttentionTensors, o: AttentionOptions) -> LowRank | None:
    """The low-rank update of wq, wk, wv or wo, for `rows` rows of x."""
    return low_rank(t, o, LAYERS, letter, rows if t.key_value is None else rows + rows_2d(t.key_value).shape[0])


class AttentionForward(CoreSublayer):
    """What an attention sublayer computes, for one input: every quantity once, from x and what was saved.

    The heads are computed in `groups`, each of which is such a sublayer with the parts of weights, masks and slopes of its
    heads. Around them, from x to h and from o to the output, is the sublayer of all heads.
    """

    index, count = 0, 1  # of this group among all; the sublayer of all heads is group 0 of 1

    def __init__(self, x: Tensor, t: AttentionTensors, o: AttentionOptions, **options: bool | None):
        super().__init__(x, t, o, **options)
        self.D = self.rotary_dim = head_dim(t, o)
        self.key_value = None if t.key_value is None else rows_2d(t.key_value).to(o.dtype)

    @functools.cached_property
    def division(self) -> Division:
        return division(self.x, self.t, self.o)

    @property
    def group_count(self) -> int:
        return self.division.groups

    def groups(self) -> Iterator[AttentionForward]:
        """The sublayer itself if all fits the workspace, else the sublayers of each group of heads."""
        if self.group_count == 1:
            yield self
            return
        for index in range(self.group_count):
            yield self.group(index, self.group_count)

    def group(self, index: int, count: int) -> AttentionForward:
        t, o, core = group_of(self.t, self.o, self.core, index, count)
        if self.key_value is not None:
            t = t._replace(key_value=self.key_value.view(t.key_value.shape))
        made = type(self)(self.x.view(*self.lead, self.x.shape[1]), t, o, shares=self.shares, holds=self.holds)
        made.index, made.count, made.core, made.angles, made.held = index, count, core, self.angles, self.held
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
        pair = self.updates.get(part.letter)
        return pair if pair is None or part.rows is None else pair._replace(b=pair.b[part.rows])

    @functools.cached_property
    def projections(self) -> list[Projection]:
        return projections(self.t, self.o)

    @property
    def width(self) -> int:
        """Returns the width of o's rows."""
        return self.o.num_heads * self.D

    @functools.cached_property
    def gated(self) -> bool:
        return has_gate(self.t, self.o)

    # -- forward

    def parts(self, qkv: Tensor) -> list[tuple[Projection, Tensor]]:
        """Every projection with its result in qkv, or its gradient in dqkv: a block [rows, outputs] each. cuBLASLt adds a bias
        in its epilogue to contiguous rows alone; into columns of wider ones ATen copies it before (Blas.cpp)."""
        shapes = [
            (self.key_value.shape[0] if part.of_key_value else self.x.shape[0], part.weight.shape[0])
            for part in self.projections
        ]
        blocks = qkv.split([rows * width for rows, width in shapes])
        return [(part, one.view(shape)) for part, one, shape in zip(self.projections, blocks, shapes, strict=True)]

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
                yield slice(start, stop), self.rows(start, stop).inputs()

    def project(self, h: Tensor | None, letters: str = "qkvg") -> Tensor:
        """q, k, v and a gate, or of these alone what `letters` names: all weights write into one buffer, none is copied."""
        qkv = self.x.new_empty(projected_shape(self.B, self.S, self.t, self.o), dtype=self.o.dtype)
        for of_key_value in (False, True):
            parts = [(*one, self.update(one[0])) for one in self.parts(qkv) if one[0].of_key_value == of_key_value]
            parts = [
                (self.cast(part.weight, last=False), self.cast(part.bias), *others)
                for part, *others in parts
                if part.letter in letters
            ]
            for place, rows in self.read(h, of_key_value) if parts else ():
                for w, b, out, pair in parts:
                    eager.linear(rows, w, b, out=out[place])
                    if pair is not None:
                        pair.add(self.p, out[place], rows, place.start or 0)
        return qkv

    def split(self, qkv: Tensor, index: int = 0, count: int = 1) -> tuple[Tensor, ...]:
        """q, k and v [B, S, heads, D] of the projections; of the heads of group `index` of `count`."""
        first, *others = [rows for part, rows in self.parts(qkv) if part.letter != "g"]
        if not others:
            return split_heads(self.in_samples(first), self.o, self.D, index, count)
        q, _ = split_query(self.in_samples(first), self.o, self.D)
        of_sample = self.B, key_rows(self.S, self.t)
        kv = [rows.view(*of_sample, rows.shape[1] // self.D, self.D).split(self.o.num_kv_heads, 2) for rows in others]
        return in_group((q, *itertools.chain(*kv)), index, count)

    def in_samples(self, rows: Tensor) -> Tensor:
        """[tokens, N] -> [B, S, N]."""
        return rows.view(self.B, self.S, rows.shape[1])

    def gate(self, qkv: Tensor, index: int = 0, count: int = 1) -> Tensor | None:
        """The gate [B, S, heads, D or 1] of the projections, if there is one; of the heads of group `index` of `count`."""
        if not self.gated:
            return None
        _, rows = self.parts(qkv)[0 if self.o.gate_in_query else -1]
        return split_gate(self.in_samples(rows), self.t, self.o, index, count)

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

    def in_rows(self, heads: Tensor) -> Tensor:
        """[B, S, heads, D] -> [tokens, heads D], a view where the strides allow it."""
        return heads.reshape(heads.shape[0] * heads.shape[1], heads.shape[2] * self.D)

    def heads(self, raw: tuple[Tensor, ...], save_raw: bool) -> Heads:
        """q, k, v [B, H, S, D] as the core reads them, from the projections [B, S, heads, D]: q/k norm and rotation done, in
        place unless `save_raw`.

        Not in place for torch's own core either: another layout may select another algorithm, and recompute must match
        forward. Where a sequence lies on several ranks, they are on their way.
        """
        t, (q, k, v) = self.t, raw
        save_raw = save_raw or bool(self.o.fused)
        rotates = self.rotates()

        def queries() -> Tensor:
            return (self.rotated(q, t.q_norm, t.q_norm_bias, save_raw) if rotates else q).transpose(1, 2)

        def keys() -> Tensor:
            return (self.rotated(k, t.k_norm, t.k_norm_bias, save_raw) if rotates else k).transpose(1, 2)

        v = v.transpose(1, 2)
        if self.o.context is None:
            return queries(), keys(), v
        return self.o.context.spread(queries, keys(), v)

    def attended(self, heads: Heads, do: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """(o, lse, delta) of what `heads` gave."""
        if isinstance(heads, tuple):
            return attend(self.p, *heads, self.core, do)
        return heads.attend(self.p, self.core, do)

    def attend(self, save_raw: bool) -> dict[str, Tensor | None]:
        """out and lse of the core, and qkv, the projections, if `save_raw`, raw then."""
        h = self.held_inputs()
        if self.group_count == 1:
            qkv = self.project(h)
            out, lse, _ = self.attended(self.heads(self.split(qkv), save_raw))
            return {"out": out, "lse": lse, "qkv": qkv}
        qkv = self.project(h) if save_raw else None
        heads = self.x.new_empty((), dtype=self.o.dtype).expand(self.B, self.o.num_heads, self.S, self.D)
        out, lse = eager.empty_heads(heads), None
        for group in self.groups():
            raw, _ = group.raw(h, self, qkv, letters="qkv")
            made, of_group, _ = group.attended(group.heads(raw, save_raw))
            if lse is None:
                B, H, rows = of_group.shape
                lse = of_group.new_empty((B, H * group.count, rows))
            (part,), (lse_part,) = (in_group((whole,), group.index, group.count, 1) for whole in (out, lse))
            part.copy_(made)
            lse_part.copy_(of_group)
        return {"out": out, "lse": lse, "qkv": qkv}

    def raw(
        self, h: Tensor | None, whole: AttentionForward, qkv: Tensor | None, letters: str = "qkvg"
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """(q, k and v [B, S, heads, D], the gate) of this group: of qkv, which holds all heads', if it was saved."""
        if qkv is None:
            own = self.project(h, letters)
            return self.split(own), self.gate(own)
        return whole.split(qkv, self.index, self.count), whole.gate(qkv, self.index, self.count)

    def gate_alone(self, h: Tensor | None, whole: AttentionForward, qkv: Tensor | None) -> Tensor | None:
        """Returns this group's gate, likewise, by the one matmul that it comes from."""
        if not self.gated:
            return None
        return self.raw(h, whole, qkv, "q" if self.o.gate_in_query else "g")[1]

    def gated_heads(self, out: Tensor, qkv: Tensor | None) -> Tensor:
        """o sigmoid(gate) [B, H, S, D]. The gate is projected again, group by group, unless qkv holds it: so forward does, and
        backward, which then get the same bits."""
        if not self.gated:
            return out
        h, made = self.held_inputs() if qkv is None else None, eager.empty_heads(out)
        for group in self.groups():
            part, of_group = in_group((made, out), group.index, group.count, 1)
            torch.mul(of_group, torch.sigmoid(group.gate_alone(h, self, qkv)).transpose(1, 2), out=part)
        return made

    def branch(self, saved: dict[str, Tensor | None]) -> Tensor:
        """dropout(o sigmoid(gate) Wo^T + bo) [tokens, d]. saved: out, and qkv of all heads, if they are at hand."""
        rows = self.out_rows(self.gated_heads(saved["out"], saved.get("qkv")))
        f = eager.linear(rows, self.cast(self.t.wo, last=False), self.cast(self.t.bo))
        if (pair := self.updates["o"]) is not None:
            pair.add(self.p, f, rows)
        return self.drop(f)
