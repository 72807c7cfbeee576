"""Computes the attention sublayer, forward and backward: [norm ->] q, k, v projections [-> q/k norm] [-> rotary] ->
attention -> output projection, and what is around them (`residual`). `attention_block` and `transformer_layer` run it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ... import eager
from ..registration.gradients import add_matmul
from ..registration.op import Named, rows_2d
from ..sublayer.lora import LowRank, low_rank, names_of, reference_linear
from .context import ExchangedHeads, GatheredHeads
from .core_sublayer import (
    CoreSublayer,
    Gradients,
    Layer,
    Saved,
    Table,
    from_core,
    input_operands,
    linear_operands,
    norm_operands,
)
from .tensors import (
    LAYERS,
    AttentionOptions,
    AttentionTensors,
    Division,
    Projection,
    division,
    over_all_heads,
    part_of,
)

Heads = tuple[Tensor, Tensor, Tensor] | GatheredHeads | ExchangedHeads


def attention_table(packed: bool, crosses: bool, gate: str, normed: bool, trailing: bool, post_norm: bool) -> Table:
    """Returns the quantities of an attention sublayer. packed: whether one weight projects q, k and v; gate: the letter of
    the projection with the gate g, "" for none; normed: whether q and k have norms."""
    k, v, of_keys = "q" if packed else "k", "q" if packed else "v", "key_value" if crosses else "h"
    return {
        "h": input_operands(trailing),
        "q": linear_operands("h", "q"),
        "k": linear_operands(of_keys, k),
        "v": linear_operands(of_keys, v),
        "g": linear_operands("h", gate) if gate else {},
        "q_heads": norm_operands("q", "q_norm", normed),
        "k_heads": norm_operands("k", "k_norm", normed),
        **from_core(bool(gate), trailing, post_norm),
    }


class AttentionSublayer(CoreSublayer):
    table = attention_table
    saved_as = (("out", ("o",)), ("qkv", ("q", "k", "v", "g")))
    source_values = frozenset(("h",))

    def __init__(self, x: Tensor, t: AttentionTensors, o: AttentionOptions, **options: bool | None):
        super().__init__(x, t, o, **options)
        self.D = self.D_v = self.rotary_dim = t.wo.shape[1] // o.num_heads
        self.key_value = None if t.key_value is None else rows_2d(t.key_value).to(o.dtype)
        self.gate_letter = "g" if t.wg is not None else "q" if o.gate_in_query else ""
        self.rotates = t.q_norm is not None or t.cos is not None or bool(o.theta)
        self.writes_buffer = self.p is not eager and not o.fused
        self.set_projections(t, o)
        self.layout = t.wk is None, t.key_value is not None, self.gate_letter, t.q_norm is not None

    def set_projections(self, t: AttentionTensors, o: AttentionOptions, index: int = 0, count: int = 1) -> None:
        """Sets the projections of q, k, v (or of their packed weight) and of a gate, for the heads of group `index` of `count`,
        from the tensors and options of all heads.

        With key_value, a packed weight has rows that read x and rows that read key_value. With `gate_in_query` q's weight
        has the gate's rows.
        """
        crosses, q = t.key_value is not None, t.wo.shape[1] * (2 if o.gate_in_query else 1)
        kv = o.num_kv_heads * self.D
        if t.wk is not None:
            blocks = [("q", 0, q, False), ("k", 0, kv, crosses), ("v", 0, kv, crosses)]
        elif o.qkv_layout == "heads" or (count == 1 and not crosses):
            blocks = [("q", 0, q + 2 * kv, False)]
        elif count == 1:
            blocks = [("q", 0, q, False), ("q", q, 2 * kv, True)]
        else:
            blocks = [("q", 0, q, False), ("q", q, kv, crosses), ("q", q + kv, kv, crosses)]
        if t.wg is not None:
            blocks.append(("g", 0, t.wg.shape[0], False))
        self.projections, self.shapes = [], []
        for letter, start, width, of_key_value in blocks:
            weight, bias, rows = getattr(t, f"w{letter}"), getattr(t, f"b{letter}"), None
            part = part_of(width, index, count, 1 if letter == "g" else self.D)
            n = part.stop - part.start
            if n < weight.shape[0]:
                rows = slice(start + part.start, start + part.stop)
                weight, bias = weight[rows], None if bias is None else bias[rows]
            self.projections.append(Projection(letter, weight, bias, of_key_value, rows))
            self.shapes.append(((self.key_value if of_key_value else self.x).shape[0], n))
        self.sizes = [rows * width for rows, width in self.shapes]

    @functools.cached_property
    def division(self) -> Division:
        return division(self.x, self.t, self.o)

    def of_heads(self) -> dict[str, int]:
        """Returns the tensors that a group has a part of, with the dimension along which heads lie; `projections` has those
        of q, k and v."""
        t = self.t
        dims = {"wo": 1, "wg": 0, "o_lora_a": 1, "sinks": 0, "mask": 1}
        norms = "q_norm", "k_norm", "q_norm_bias", "k_norm_bias"
        return dims | {name: 0 for name in norms if (weight := getattr(t, name)) is not None and weight.dim() == 2}

    def group(self, index: int) -> AttentionSublayer:
        part = super().group(index)
        part.set_projections(self.t, self.o, index, part.count)
        part.__dict__.pop("updates", None)
        return part

    @functools.cached_property
    def updates(self) -> dict[str, LowRank]:
        updates, rows = {}, self.x.shape[0] + (0 if self.key_value is None else self.key_value.shape[0])
        for letter in LAYERS if self.o.lora else ():
            if (pair := low_rank(self.t, self.o, LAYERS, letter, rows)) is not None:
                updates[letter] = pair
        if self.index and "o" in updates:
            pair = updates["o"]
            updates["o"] = pair._replace(dropout=(*pair.dropout[:3], self.index * self.o.num_heads * self.D))
        return updates

    def update(self, part: Projection) -> LowRank | None:
        pair = self.updates.get(part.letter)
        return pair if pair is None or part.rows is None else pair._replace(b=pair.b[part.rows])

    # -- forward

    def source(self, saved: Saved) -> Tensor | None:
        """Returns h if it fits the workspace beside a group, else None."""
        return self.inputs() if len(self.division.chunks) == 1 else None

    def read(self, h: Tensor | None, of_key_value: bool) -> Iterator[tuple[slice, Tensor]]:
        """Yields (place, rows) of the projections' input: key_value, h, or h computed a chunk at a time if it is not held."""
        if of_key_value:
            yield slice(None), self.key_value
        elif h is not None:
            yield slice(None), h
        else:
            for start, stop in self.division.chunks:
                yield slice(start, stop), self.rows(start, stop).inputs()

    def blocks(self, qkv: Tensor | list[Tensor]) -> list[Tensor]:
        """Returns each projection's result [rows, outputs] in qkv, or its gradient in dqkv, as a contiguous block. cuBLASLt
        adds a bias in its epilogue to contiguous rows alone; into columns of wider rows ATen copies it before
        (Blas.cpp)."""
        if isinstance(qkv, list):  # the reference implementation's
            return qkv
        parts = (qkv,) if len(self.sizes) == 1 else qkv.split(self.sizes)
        return [block.view(shape) for block, shape in zip(parts, self.shapes, strict=True)]

    def split(self, qkv: Tensor, own: Callable[[Tensor, int], Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v [B, S, heads, D] of the projections. own: selects a group's heads along a dimension.

        Returns views, except of q where several heads of q lie before each of several heads of k: these have no common
        stride.
        """
        o, D, (first, *others) = self.o, self.D, self.blocks(qkv)
        H, H_kv, width = o.num_heads, o.num_kv_heads, o.num_heads * D
        first = first.view(self.B, self.S, first.shape[1])
        if o.qkv_layout == "heads":
            heads = first.unflatten(-1, (H_kv, H // H_kv + 2, D))
            q, k, v = (heads if own is None else own(heads, 2)).split([H // H_kv, 1, 1], 3)
            return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
        if o.gate_in_query:
            q, rest = first[..., : 2 * width].unflatten(-1, (H, 2, D))[..., 0, :], first[..., 2 * width :]
        else:
            q, rest = first[..., :width].unflatten(-1, (H, D)), first[..., width:]
        if self.gate_letter == "g":
            others.pop()
        S_k = self.S if self.t.key_value is None else self.t.key_value.shape[-2]
        keys = [rows.view(self.B, S_k, rows.shape[1] // D, D) for rows in others] or [rest.unflatten(-1, (2 * H_kv, D))]
        k, v = keys if len(keys) == 2 else keys[0].split(H_kv, 2)
        return (q, k, v) if own is None else (own(q, 2), own(k, 2), own(v, 2))

    def project(self, h: Tensor | None, letters: str = "qkvg") -> Tensor:
        """Computes q, k, v and the gate, or only those in `letters`, in one buffer; no weight is copied."""
        qkv = self.x.new_empty(sum(self.sizes), dtype=self.o.dtype)
        for of_key_value in (False, True) if self.key_value is not None else (False,):
            layers = [
                (self.cast(part.weight, last=False), self.cast(part.bias), out, self.update(part))
                for part, out in zip(self.projections, self.blocks(qkv), strict=True)
                if part.of_key_value == of_key_value and part.letter in letters
            ]
            for place, rows in self.read(h, of_key_value) if layers else ():
                for w, b, out, pair in layers:
                    eager.linear(rows, w, b, out=out[place])
                    if pair is not None:
                        pair.add(self.p, out[place], rows, place.start or 0)
        return qkv

    def projected(self, h: Tensor | None) -> Named:
        return {"qkv": self.project(h)}

    def rotated(self, raw: Tensor, name: str, keeps_raw: bool) -> Tensor:
        """Returns q or k [B, H, S, D] as the core reads it, from its projection [B, S, H, D]: normed and rotated, in place
        unless `keeps_raw`. name: of its norm."""
        p, o, out = self.p, self.o, None if keeps_raw else raw
        weight, bias, normed = getattr(self.t, name), getattr(self.t, f"{name}_bias"), not self.rotates
        if over_all_heads(weight, self.D):
            raw = p.norm_fwd(in_rows(raw), weight, bias, o.qk_norm_eps, o.qk_norm, o.dtype).view(raw.shape)
            weight, bias, out, normed = None, None, raw, self.angles[0] is None
        if not normed:
            options = dict(bias=bias, kind=o.qk_norm, out=out)
            raw = p.heads_fwd(raw, weight, o.qk_norm_eps, *self.angles, o.interleaved, **options)
        return raw.transpose(1, 2)

    def heads(
        self, h: Tensor | None, saved: Saved, save_raw: bool, *, backward: bool
    ) -> tuple[Heads, tuple, Tensor | None]:
        """Returns ((q, k, v) [B, H, S, D] as the core reads them, (q, k) before their norms if backward reads them, the
        gate in backward), from `saved` of all heads or projected. q/k norm and rotation run in place unless the
        projections are saved or backward reads them.

        With torch's kernels they do not run in place either: another layout may select another algorithm, and recompute
        must match forward. In a split sequence the heads arrive asynchronously.
        """
        qkv, normed, gate = saved.get("qkv"), self.t.q_norm is not None, None
        keeps_raw = save_raw or bool(self.o.fused) or (backward and (qkv is not None or normed))
        if qkv is None:
            qkv = self.project(h, "qkvg" if backward else "qkv")
            q, k, v = self.split(qkv)
        else:
            q, k, v = (self.whole or self).split(qkv, self.own)
        if backward and self.gate_letter:
            gate = self.gate_of(qkv, saved)
        raw, v = (q, k) if backward and normed else (None, None), v.transpose(1, 2)
        if self.o.context is None:
            return (self.rotated(q, "q_norm", keeps_raw), self.rotated(k, "k_norm", keeps_raw), v), raw, gate
        k = self.rotated(k, "k_norm", keeps_raw)
        spread = GatheredHeads if self.o.context.exchange == "gather" else ExchangedHeads
        return spread(self.o.context, lambda: self.rotated(q, "q_norm", keeps_raw), k, v), raw, gate

    def gate_of(self, qkv: Tensor, saved: Saved | None = None) -> Tensor:
        """Returns this group's gate [B, S, heads, D or 1] from its own projections or, if saved, from those of all heads."""
        whole = self if saved is None or saved.get("qkv") is not qkv else self.whole or self
        rows, H, in_query = (
            whole.blocks(qkv)[0 if self.o.gate_in_query else -1],
            whole.o.num_heads,
            self.o.gate_in_query,
        )
        rows = rows.view(self.B, self.S, rows.shape[1])
        if in_query:
            gate = rows[..., : 2 * H * self.D].unflatten(-1, (H, 2, self.D))[..., 1, :]
        else:
            gate = rows.unflatten(-1, (H, rows.shape[2] // H))
        return gate if whole is self else self.own(gate, 2)

    def gate_alone(self, h: Tensor | None, saved: Saved) -> Tensor:
        """Returns this group's gate, by one matmul if it was not saved."""
        qkv = saved.get("qkv")
        return self.gate_of(self.project(h, self.gate_letter) if qkv is None else qkv, saved)

    def gated_heads(self, saved: Saved) -> Tensor:
        """Returns o sigmoid(gate) [B, H, S, D]. Forward and backward both project the gate again, group by group, unless it
        was saved, so they get the same bits."""
        out = saved["out"]
        h, gated = self.source({}) if saved.get("qkv") is None else None, eager.empty_heads(out)
        for group in self.groups():
            gate = torch.sigmoid(group.gate_alone(h, saved)).transpose(1, 2)
            torch.mul(group.own(out), gate, out=group.own(gated))
        return gated

    # -- backward

    def gate_gradient(self, do: Tensor, out: Tensor, gate: Tensor) -> Tensor:
        """Returns the gradient of the gate [B, S, heads, D or 1]: do o sigmoid(-gate). do, the gradient of o, already has
        the factor sigmoid(gate). 1 - sigmoid(gate) would have few digits in 16 bits."""
        product = (do * out).transpose(1, 2)
        if gate.shape[3] == 1 != self.D:
            core = self.core if self.o.context is None else self.core._replace(cu_q=None, cu_k=None)
            product = self.p.attn_delta(out, do, core).transpose(1, 2)[..., None]
        return (product * torch.sigmoid(-gate)).to(gate.dtype)

    def buffer(self) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Returns an empty dqkv, laid out as in `project`, and the places of dq, dk, dv in it."""
        dqkv = self.x.new_empty(sum(self.sizes), dtype=self.o.dtype)
        return dqkv, self.split(dqkv)

    def rotation_backward(self, dy: Tensor, raw: Tensor, name: str, place: Tensor, grads: Gradients) -> Tensor:
        """Returns the gradient of raw, q or k, in `place` if dy is there or can be written there; adds the gradients of its
        norm."""
        o, weight, need = self.o, getattr(self.t, name), grads.plan.need
        needs = dict(need_dweight=self.dtype_of(name, need), need_dbias=self.dtype_of(f"{name}_bias", need))
        if self.count > 1 and name not in self.places:  # a sum over groups, which is rounded once
            needs = {which: bool(dtype) for which, dtype in needs.items()}
        if over_all_heads(weight, self.D):
            if self.angles[0] is not None:
                dy = self.p.heads_bwd(dy, raw, None, o.qk_norm_eps, *self.angles, o.interleaved, out=place)[0]
            dx, *of_norm = self.p.norm_bwd(in_rows(dy), in_rows(raw), weight, o.qk_norm_eps, o.qk_norm, **needs)
            dx = dx.view(dy.shape)
        else:
            options = dict(kind=o.qk_norm, out=place, **needs)
            dx, *of_norm = self.p.heads_bwd(dy, raw, weight, o.qk_norm_eps, *self.angles, o.interleaved, **options)
        for field, grad in zip((name, f"{name}_bias"), of_norm, strict=True):
            self.add_part(field, grad, grads)
        return dx

    def projected_gradients(self, results: dict[str, Any], grads: Gradients) -> list[Tensor | None]:
        """Returns the gradient of each projection [rows, outputs], from the results of `core_gradients`, which are emptied;
        adds the gradients of the norms of q and k.

        Separate projections of q, k and v take the core's gradients directly, unless a kernel wrote these into the buffer.
        """
        buffer, dgate, raw = results.pop("buffer", None), results.pop("gate"), results.pop("raw")
        heads = [None if grad is None else grad.transpose(1, 2) for grad in results.pop("heads")]
        if buffer is not None and self.o.context is None:  # kernels wrote them there
            heads = list(buffer[1])
        alone = len(self.projections) - (self.gate_letter == "g") == 3 and self.gate_letter != "q"
        if buffer is None and not alone:
            buffer = self.buffer()
        places = heads if buffer is None else buffer[1]
        formed = "q_heads" in grads.plan.formed, "k_heads" in grads.plan.formed
        for i, name in enumerate(("q_norm", "k_norm")):
            if self.rotates and formed[i]:
                heads[i] = self.rotation_backward(heads[i], raw[i], name, places[i], grads)
        if buffer is None:
            ds = [None if grad is None else in_rows(grad) for grad in heads]
            return ds if not self.gate_letter else [*ds, None if dgate is None else dgate.flatten(0, 1).flatten(1)]
        dqkv, o = buffer[0], self.o
        for place in places:
            grad = heads.pop(0)
            if grad is not None and grad is not place:
                place.copy_(grad)
        if dgate is not None:
            self.gate_of(dqkv).copy_(dgate)
        ds, H_kv, group = self.blocks(dqkv), o.num_kv_heads, o.num_heads // o.num_kv_heads
        if o.qkv_layout == "heads" and H_kv > 1 and group > 1:  # dq's place is not a view
            by_kv_head = ds[0].view(self.B, self.S, H_kv, group + 2, self.D)
            by_kv_head[:, :, :, :group].copy_(places[0].unflatten(2, (H_kv, group)))
        return ds

    def add_projection_gradients(self, results: dict[str, Any], h: Tensor | None, grads: Gradients) -> None:
        """Adds the gradients of wq, wk, wv and wg (d^T rows of each projection's input), of their biases and low-rank
        updates, and of h and key_value to the totals, which several groups sum in float32. results: from
        `core_gradients`."""
        formed, layers = grads.plan.formed, {False: [], True: []}
        sharers = self.count // self.whole.o.num_kv_heads if self.count > 1 else 1  # groups that share k and v
        for i, (part, d) in enumerate(zip(self.projections, self.projected_gradients(results, grads), strict=True)):
            if d is None:
                continue
            if sharers > 1 and i in (1, 2):  # k and v, with the last of these groups
                before = grads.shared.pop(i, None)
                d = d.to(eager.wide_of(d.dtype)) if before is None else before.add_(d)
                if (self.index + 1) % sharers:
                    grads.shared[i] = d
                    continue
                d = d.to(self.o.dtype)
            reads, update, du = "key_value" if part.of_key_value else "h", self.update(part), None
            if update is not None and not formed.isdisjoint((reads, *names_of(part.letter))):
                du = update.inner_gradient(d)
            layers[part.of_key_value].append(Layer(part.letter, part.rows, update, d, du))
            if reads in formed:
                total = add_matmul(grads.totals.get(reads), d, self.cast(part.weight), wide=self.count > 1)
                if du is not None:
                    update.add_input_gradient(self.p, du, total)
                grads.totals[reads] = total
        for of_key_value, group in layers.items():
            chunks = 1 if of_key_value or h is not None else len(self.division.chunks)
            self.add_layer_gradients(group, self.read(h, of_key_value), grads, chunks)

    def input_gradient(self, latents: None, grads: Gradients) -> Tensor | None:
        """Returns the gradient of h; stores that of key_value."""
        if "key_value" in grads.totals:
            grads.put("key_value", grads.totals["key_value"].view(self.t.key_value.shape), None)
        return grads.totals.get("h")

    # -- the reference implementation

    def reference_heads(self, h: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        blocks = []
        for part in self.projections:
            rows = self.t.key_value.to(self.o.dtype) if part.of_key_value else h
            pair = None if part.letter == "g" else self.update(part)
            blocks.append(reference_linear(rows, part.weight, part.bias, pair).flatten(0, -2))
        heads, _, gate = self.heads(None, {"qkv": blocks}, True, backward=True)
        return heads, gate


def in_rows(heads: Tensor) -> Tensor:
    """Reshapes [B, S, heads, D] to [tokens, heads D], a view where the strides allow it."""
    B, S, H, D = heads.shape
    return heads.reshape(B * S, H * D)
