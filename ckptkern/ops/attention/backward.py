"""The gradients of an attention sublayer, and what backward recomputes of it, group of heads by group."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ... import eager
from ..registration.gradients import PartGrads, WeightGrad, add_matmul
from ..registration.late import arrived, is_late
from ..registration.op import needed_names
from ..sublayer.lora import names_of
from ..sublayer.residual import OF_NORM
from .core import attention_grads, sink_gradient
from .core_sublayer import add_part, reads_core
from .sublayer import AttentionForward
from .tensors import AttentionTensors, Projection, in_group, out_projection, over_all_heads, projected_shape


def gate_needs(inner: Collection[str], t: AttentionTensors) -> bool:
    """Does one of the gradients of `inner` have a part from the gate?"""
    of_gate = {"wg", "bg"} if t.wg is not None else {"wq", "bq", *names_of("q")}
    return not of_gate.isdisjoint(inner) or not {"x", *OF_NORM}.isdisjoint(inner)


def core_needs(inner: Collection[str], t: AttentionTensors) -> tuple[bool, bool]:
    """(need dq, need dk and dv) for the gradients of `inner`."""
    inner = set(inner) - {"mask", "sinks", "wg", "bg"}
    behind_q, of_q = {"q_norm", "q_norm_bias"}, {"wq", "bq", *names_of("q")}
    packed, read_by_q = of_q if t.wk is None else set(), {"x", *OF_NORM}
    behind_both = packed if t.key_value is not None else packed | read_by_q
    behind_q |= (of_q | read_by_q) - behind_both
    if behind_both & inner:
        return True, True
    return bool(behind_q & inner), bool(inner - behind_q)


class AttentionSublayer(AttentionForward):
    """An attention sublayer with its gradients."""

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
            for name in (f"w{part.letter}", *of_update)
            if name in need
        }

    def add_to_sums(
        self, sums: dict[str, WeightGrad], part: Projection, d: Tensor, du: Tensor | None, rows: Tensor, start: int = 0
    ) -> None:
        """Adds what follows from the gradient d of a projection's result and the rows, from `start` on, that it reads."""
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

    def gate_gradient(self, do: Tensor, out: Tensor, gate: Tensor) -> Tensor:
        """Returns the gradient of the gate [B, S, heads, D or 1]: do o sigmoid(-gate), because do, the gradient of o, has the
        factor sigmoid(gate). 1 - sigmoid(gate) would have few digits in 16 bits."""
        made = (do * out).transpose(1, 2)
        if gate.shape[3] == 1 != self.D:
            context, core = self.o.context, self.core
            core = core if context is None else context.core_of_rows(core)
            made = self.p.attn_delta(out, do, core).transpose(1, 2)[..., None]
        return (made * torch.sigmoid(-gate)).to(gate.dtype)

    def buffer(self) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """(dqkv of `projected_shape`, the places of dq, dk, dv in it)."""
        dqkv = self.x.new_empty(projected_shape(self.B, self.S, self.t, self.o), dtype=self.o.dtype)
        return dqkv, self.split(dqkv)

    def core_gradients(
        self, heads, do, out, lse, delta, inner: Collection[str], grads: PartGrads
    ) -> tuple[list[Tensor | None], tuple | None]:
        """(the gradients of q, k, v [B, S, heads, D] as the core read them, the `buffer` if kernels wrote them there), from do;
        adds those of the mask and of the sinks."""
        buffer = self.buffer() if self.p is not eager and not self.core.fused else None
        outs = [place.transpose(1, 2) for place in buffer[1]] if buffer else [None] * 3
        need_dq, need_dkv = core_needs(inner, self.t)
        split = not isinstance(heads, tuple)
        if "sinks" in inner:
            of_sinks = heads.sink_gradient if split else sink_gradient
            dsinks, delta = of_sinks(self.p, do, out, lse, self.core, delta)
            heads_of_group = slice(self.index * self.o.num_heads, (self.index + 1) * self.o.num_heads)
            grads.put("sinks", dsinks, None if self.count == 1 else heads_of_group)
        if split:
            options = dict(delta=delta, need_dq=need_dq, need_dkv=need_dkv, dq=outs[0])
            made = [
                grad if grad is None else grad.transpose(1, 2)
                for grad in heads.grads(self.p, do, out, lse, self.core, **options)
            ]
            heads.close()
            return made, buffer
        *made, dmask, _ = attention_grads(
            self.p,
            *heads,
            do,
            out,
            lse,
            self.core,
            delta=delta,
            need_dq=need_dq,
            need_dkv=need_dkv,
            dmask_shape=self.t.mask.shape if "mask" in inner else None,
            out=outs,
        )
        if dmask is not None:
            add_part("mask", dmask, 1, grads, self.index, self.count)
        if buffer:
            return list(buffer[1]), buffer
        return [None if grad is None else grad.transpose(1, 2) for grad in made], None

    def projected_gradients(
        self,
        made: list[Tensor | None],
        buffer: tuple | None,
        raw,
        dgate: Tensor | None,
        inner: Collection[str],
        grads: PartGrads,
    ) -> list[Tensor | None]:
        """Returns the gradient of each projection [rows, outputs], from those of the gate and of q, k, v as the core read them;
        adds those of q's and k's norms.

        Projections of q, k and v alone take what the core gave, if no kernel wrote it in the buffer. made: is emptied.
        """
        alone = len(self.projections) - (self.t.wg is not None) == 3 and not self.o.gate_in_query
        if buffer is None and not alone:
            buffer = self.buffer()
        places = buffer[1] if buffer else made
        needed = core_needs(inner, self.t)
        for i, (name, is_formed) in enumerate(zip(("q_norm", "k_norm"), needed, strict=True)):
            if is_formed and self.rotates():
                made[i], *of_norm = self.rotation_backward(made[i], raw[i], name, places[i], inner)
                for field, grad in zip((name, f"{name}_bias"), of_norm, strict=True):
                    add_part(field, grad, 0, grads, self.index, self.count)
        if not buffer:
            ds = [None if grad is None else self.in_rows(grad) for grad in made]
            return ds if self.t.wg is None else [*ds, None if dgate is None else dgate.flatten(0, 1).flatten(1)]
        for place in places:
            grad = made.pop(0)
            if grad is not None and grad is not place:
                place.copy_(grad)
        (dqkv, _), o = buffer, self.o
        if dgate is not None:
            self.gate(dqkv).copy_(dgate)
        H_kv, group = o.num_kv_heads, o.num_heads // o.num_kv_heads
        if o.qkv_layout == "heads" and H_kv > 1 and group > 1:  # dq's place is no view
            by_kv_head = self.in_samples(self.parts(dqkv)[0][1]).unflatten(-1, (H_kv, group + 2, self.D))
            by_kv_head[:, :, :, :group].copy_(places[0].unflatten(2, (H_kv, group)))
        return [d for _, d in self.parts(dqkv)]

    def add_projection_gradients(
        self,
        ds: list[Tensor | None],
        h: Tensor | None,
        need: Collection[str],
        grads: PartGrads,
        totals: dict[bool, Tensor | None],
    ) -> None:
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
        self,
        whole: AttentionSublayer,
        h: Tensor | None,
        df: Tensor,
        du: Tensor | None,
        saved: dict[str, Tensor | None],
        need: Collection[str],
        grads: PartGrads,
        totals: dict[bool, Tensor | None],
    ) -> None:
        """Adds this group's gradients, from that of the branch's result.

        saved: out, lse and qkv of all heads, None for what is recomputed. totals: the gradients of h and of key_value.
        """
        t, o = self.t, self.o
        out, lse, qkv = (saved.get(name) for name in ("out", "lse", "qkv"))
        inner = self.behind_core(need)
        recomputed, gate = out is None and (bool(inner) or reads_core(need)), None
        if inner or recomputed:
            raw, gate = self.raw(h, whole, qkv)
            heads = self.heads(raw, save_raw=qkv is not None or t.q_norm is not None)
        elif reads_core(need):
            gate = self.gate_alone(h, whole, qkv)
        if recomputed and is_late(df):  # while it is on its way; delta, which is made of it, comes after it
            out, lse, _ = self.attended(heads)
        df = arrived(df)
        share = None if gate is None else torch.sigmoid(gate).transpose(1, 2)
        do = delta = dgate = None
        if inner:
            do = self.add_input_gradient(out_projection(t), df, du, None)
            do = do.view(self.B, self.S, o.num_heads, self.D).transpose(1, 2)
            do = do if share is None else do.mul_(share)
        if recomputed and out is None:
            out, lse, delta = self.attended(heads, do)
        elif not recomputed and out is not None and self.count > 1:
            out, lse = in_group((out, lse), self.index, self.count, 1)
            lse = lse.clone(memory_format=torch.contiguous_format)  # at an address as aligned as that of all
        self.add_out_gradients(df, du, out if share is None or not reads_core(need) else out * share, need, grads)
        share = None
        if inner:
            if gate is not None and gate_needs(inner, t):
                dgate = self.gate_gradient(do, out, gate)
            gate = None
            made, buffer = self.core_gradients(heads, do, out, lse, delta, inner, grads)
            heads = do = out = lse = delta = None
            raw = raw if t.q_norm is not None else (None, None)
            ds = self.projected_gradients(made, buffer, raw, dgate, inner, grads)
            raw = made = buffer = dgate = None
            self.add_projection_gradients(ds, h, need, grads, totals)

    def backward(self, dy, saved, needs, f=None):
        t, o, need = self.t, self.o, needed_names(AttentionTensors, needs)
        f, saved = self.recomputed_branch(saved, need, f)
        dy, df, grads = self.branch_gradients(dy, f, need)
        f, inner = None, self.behind_core(need)
        recomputes = reads_core(need) and (saved.get("out") is None or (self.gated and saved.get("qkv") is None))
        h = self.held_inputs() if inner or recomputes else None
        parts, totals = PartGrads(t, self.group_count * len(self.division.chunks)), {False: None, True: None}
        du = self.inner_gradient(out_projection(t), df, need, bool(inner))
        for group in self.groups():
            group.add_gradients(self, h, df, du, saved, need, parts, totals)
        h = df = None
        grads |= parts.results()
        dh, dkey_value = totals.values()
        if dkey_value is not None:
            grads["key_value"] = dkey_value.view(t.key_value.shape)
        if dh is not None:
            grads |= self.input_gradients(dh.to(o.dtype), dy, need)
        return self.finished(grads, need)
