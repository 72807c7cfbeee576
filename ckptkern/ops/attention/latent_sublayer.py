"""The sublayer of multi-head latent attention, in forward and backward: q, k and v are projected from latents of few features,
of which backward recomputes the heads, group by group."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import eager
from ..registration.gradients import PartGrads, add_matmul
from ..registration.op import cast_parameter, needed_names
from ..sublayer.residual import reference_inputs, reference_norm, reference_output
from .core import attend, attention_grads
from .core_sublayer import CoreSublayer, add_part, reads_core, rotary_of, sublayer_core
from .latent_tensors import (
    LatentGroup,
    LatentOptions,
    LatentSizes,
    LatentTensors,
    latent_group,
    latent_groups,
    sizes_of,
)
from .rotary import reference_rotary
from .tensors import batch_and_rows, in_group

OF_Q, OF_KV = frozenset(("wq", "bq")), frozenset(("wkvb", "bkvb"))
OF_Q_LATENT, OF_KV_LATENT = frozenset(("wqa", "bqa", "q_a_norm")), frozenset(("wkva", "bkva", "kv_a_norm"))


class Latents(NamedTuple):
    """raw: the latents before their norms, with the rotated part of k (`raw_parts`); q, kv: what wq and wkvb read, the latents
    after their norms, or h in place of q's."""

    raw: Tensor
    q: Tensor
    kv: Tensor


class LatentNeeds(NamedTuple):
    """Which gradients a backward forms: of what wq and wkvb read, and of q, and of k and v."""

    q_latent: bool
    kv_latent: bool
    dq: bool
    dkv: bool


class LatentSublayer(CoreSublayer):
    """What the sublayer computes, for one input: every quantity once, from x and what was saved."""

    @functools.cached_property
    def sizes(self) -> LatentSizes:
        return sizes_of(self.t, self.o.num_heads)

    @property
    def rotary_dim(self) -> int:
        return self.sizes.rope

    @functools.cached_property
    def group_count(self) -> int:
        return latent_groups(self.x, self.t, self.o)

    def groups(self) -> Iterator[LatentGroup]:
        for index in range(self.group_count):
            yield latent_group(self.t, self.sizes, self.core, index, self.group_count)

    # -- forward

    def by_token(self, rows: Tensor, heads: int) -> Tensor:
        """[tokens, heads N] -> [B, S, heads, N], a view."""
        return rows.unflatten(1, (heads, rows.shape[1] // heads)).unflatten(0, (self.B, self.S))

    def rotate(self, rows: Tensor, heads: int) -> None:
        """Rotates the last dimensions of each head of q, or of k's one, in place."""
        if self.angles[0] is not None:
            part = self.by_token(rows, heads)[..., -self.sizes.rope :]
            self.p.heads_fwd(part, None, 0.0, *self.angles, self.o.interleaved, out=part)

    def rotate_back(self, part: Tensor) -> None:
        """Turns the gradient [B, S, heads, rope] of what was rotated into that of what was not, in place."""
        if self.angles[0] is not None:
            self.p.heads_bwd(part, None, None, 0.0, *self.angles, self.o.interleaved, out=part)

    def raw_parts(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Returns q's latent [tokens, q_rank], and k's and v's with the rotated part of k [tokens, kv_rank + rope]: each is
        contiguous for the reason that AttentionForward.parts has."""
        rows, of_q = self.x.shape[0], self.sizes.q_rank
        q, kv = raw.split([rows * of_q, rows * (self.sizes.latents - of_q)])
        return q.view(rows, of_q), kv.view(rows, self.sizes.latents - of_q)

    def raw_latents(self, h: Tensor) -> Tensor:
        t, rope = self.t, self.sizes.rope
        raw = h.new_empty(h.shape[0] * self.sizes.latents)
        q, kv = self.raw_parts(raw)
        if t.wqa is not None:
            eager.linear(h, self.cast(t.wqa, last=False), self.cast(t.bqa), out=q)
        eager.linear(h, self.cast(t.wkva, last=False), self.cast(t.bkva), out=kv)
        if rope:
            self.rotate(kv[:, -rope:], 1)
        return raw

    def latents(self, raw: Tensor | None = None) -> Latents:
        """raw: if it was saved."""
        t, o = self.t, self.o
        h = self.inputs() if raw is None or t.wqa is None else None
        raw = self.raw_latents(h) if raw is None else raw
        of_q, of_kv = self.raw_parts(raw)
        q, kv = h if t.wqa is None else of_q, of_kv[:, : self.sizes.kv_rank]
        h = None
        if t.q_a_norm is not None:
            q = self.norm_fwd(q, t.q_a_norm, None, o.latent_norm_eps, "rms", o.dtype)
        if t.kv_a_norm is not None:
            kv = self.norm_fwd(kv, t.kv_a_norm, None, o.latent_norm_eps, "rms", o.dtype)
        return Latents(raw, q, kv)

    def project(self, latents: Latents, group: LatentGroup) -> tuple[Tensor, Tensor]:
        """q [tokens, heads (nope + rope)], rotated, and kv [tokens, heads (nope + v)] of a group's heads."""
        q = eager.linear(latents.q, self.cast(group.wq, last=False), self.cast(group.bq))
        self.rotate(q, group.heads)
        return q, eager.linear(latents.kv, self.cast(group.wkvb, last=False), self.cast(group.bkvb))

    def projected(
        self, latents: Latents, group: LatentGroup, saved: tuple[Tensor | None, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """The same, of q and kv of all heads if they were saved."""
        q, kv = saved
        if q is None:
            return self.project(latents, group)
        return (q, kv) if group.count == 1 else (q[:, group.rows_q], kv[:, group.rows_kv])

    def filled(self, heads: Tensor) -> Tensor:
        """[..., N] with zeros up to the head dim of core attention."""
        missing = self.sizes.D - heads.shape[-1]
        return F.pad(heads, (0, missing)) if missing else heads

    def heads(self, latents: Latents, group: LatentGroup, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, H, S, D] of a group as the core reads them: k is each head's own part beside the one that all share."""
        H, (_, nope, rope, _, _, _), D = group.heads, self.sizes, self.sizes.D
        kv = self.by_token(kv, H)
        k = kv.new_empty(self.B, self.S, H, D)
        k[..., :nope].copy_(kv[..., :nope])
        if rope:
            k[..., nope : nope + rope].copy_(self.by_token(self.raw_parts(latents.raw)[1][:, -rope:], 1))
        if nope + rope < D:
            k[..., nope + rope :].zero_()
        parts = self.filled(self.by_token(q, H)), k, self.filled(kv[..., nope:])
        return parts[0].transpose(1, 2), parts[1].transpose(1, 2), parts[2].transpose(1, 2)

    def attend(self, save_raw: bool) -> dict[str, Tensor | None]:
        """out [B, H, S, v] and lse of the core, and if `save_raw` what it is made of: latents, q and kv."""
        latents, sizes = self.latents(), self.sizes
        saved = self.project(latents, latent_group(self.t, sizes, self.core, 0, 1)) if save_raw else (None, None)
        out = lse = None
        for group in self.groups():
            heads = self.heads(latents, group, *self.projected(latents, group, saved))
            part, part_lse, _ = attend(self.p, *heads, group.core)
            heads = None
            if sizes.v != sizes.D:  # [B, H, S, v] (memory [B, S, H, v], not a view) of the core's [B, H, S, D]
                part = part[..., : sizes.v]
                part = eager.empty_heads(part).copy_(part)
            if group.count == 1:
                out, lse = part, part_lse
                break
            if out is None:
                like = self.x.new_empty((), dtype=self.o.dtype)
                out = eager.empty_heads(like.expand(self.B, sizes.H, self.S, sizes.v))
                lse = part_lse.new_empty(out.shape[:3])
            for whole, of_group in ((out, part), (lse, part_lse)):
                in_group((whole,), group.index, group.count, 1)[0].copy_(of_group)
            part = part_lse = of_group = None
        return {"out": out, "lse": lse, "latents": latents.raw if save_raw else None, "q": saved[0], "kv": saved[1]}

    def branch(self, saved: dict[str, Tensor | None]) -> Tensor:
        """dropout(o Wo^T + bo) [tokens, d]."""
        f = eager.linear(self.out_rows(saved["out"]), self.cast(self.t.wo, last=False), self.cast(self.t.bo))
        return self.drop(f)

    # -- backward

    def backward(self, dy, saved, needs, f=None):
        need = needed_names(LatentTensors, needs)
        f, saved = self.recomputed_branch(saved, need, f)
        dy, df, grads = self.branch_gradients(dy, f, need)
        f, inner = None, self.behind_core(need)
        through_h = bool(inner) and self.needs_dh(need)
        q_latent, kv_latent = (through_h or not of.isdisjoint(need) for of in (OF_Q_LATENT, OF_KV_LATENT))
        dq, dkv = q_latent or not OF_Q.isdisjoint(need), kv_latent or not OF_KV.isdisjoint(need)
        wants, parts = LatentNeeds(q_latent, kv_latent, dq, dkv), PartGrads(self.t, self.group_count)
        totals: dict[str, Tensor | None] = {"q": None, "kv": None, "rope": None}
        reads = inner or (saved.get("out") is None and reads_core(need))
        latents = self.latents(saved.get("latents")) if reads else None
        for group in self.groups():
            self.add_gradients(group, latents, df, saved, need, wants, inner, parts, totals)
        saved = df = None
        raw = latents.raw if latents is not None else None
        latents = dh = None
        if wants.q_latent or wants.kv_latent:
            dh = self.add_latent_gradients(raw, need, wants, parts, totals)
        grads |= parts.results()
        if dh is not None:
            grads |= self.input_gradients(dh.to(self.o.dtype), dy, need)
        return self.finished(grads, need)

    def add_gradients(
        self,
        group: LatentGroup,
        latents: Latents | None,
        df: Tensor,
        saved: dict[str, Tensor | None],
        need: Collection[str],
        wants: LatentNeeds,
        inner: Collection[str],
        grads: PartGrads,
        totals: dict[str, Tensor | None],
    ) -> None:
        """Adds a group's gradients, from that of the branch's result. totals: of what wq and wkvb read, and of k's rotated
        part."""
        out, lse = saved.get("out"), saved.get("lse")
        recomputed = out is None and (bool(inner) or reads_core(need))
        do = delta = heads = None
        if inner or recomputed:
            take = saved.pop if group.count == 1 else saved.get  # of all heads, they go when they are joined
            q, kv = self.projected(latents, group, (take("q", None), take("kv", None)))
            heads = self.heads(latents, group, q, kv)
            q = kv = None
        if inner:
            do = add_matmul(None, df, self.cast(group.wo), wide=False)
            do = self.filled(self.by_token(do, group.heads)).transpose(1, 2)
        if recomputed:
            out, lse, delta = attend(self.p, *heads, group.core, do)
        elif out is not None and group.count > 1:
            out, lse = in_group((out, lse), group.index, group.count, 1)
            lse = lse.clone(memory_format=torch.contiguous_format)  # at an address as aligned as that of all
        self.add_out_gradients(group, df, out, need, grads)
        if not inner:
            return
        if out.shape[-1] < self.sizes.D:
            out = eager.empty_heads(do).copy_(self.filled(out))
        mask_shape = None
        if "mask" in inner:
            B, H, *rows_and_columns = self.t.mask.shape
            mask_shape = B, H if H == 1 else group.heads, *rows_and_columns
        *made, dmask, _ = attention_grads(
            self.p,
            *heads,
            do,
            out,
            lse,
            group.core,
            delta=delta,
            need_dq=wants.dq,
            need_dkv=wants.dkv,
            dmask_shape=mask_shape,
        )
        heads = do = out = lse = delta = None
        if dmask is not None:
            add_part("mask", dmask, 1, grads, group.index, group.count)
        self.add_projection_gradients(group, latents, made, need, wants, grads, totals)

    def add_out_gradients(
        self, group: LatentGroup, df: Tensor, out: Tensor | None, need: Collection[str], grads: PartGrads
    ) -> None:
        if "bo" in need and not group.index:  # all groups'
            grads.grads["bo"] = eager.column_sum(df, self.t.bo.dtype)
        if "wo" in need:
            place = None if group.columns is None else (slice(None), group.columns)
            self.add_weight_gradient("wo", place, df, self.out_rows(out[..., : self.sizes.v]), grads)

    def add_weight_gradient(self, name: str, place, d: Tensor, rows: Tensor, grads: PartGrads) -> None:
        """Adds d^T rows, the gradient of the part of the weight at `place`."""
        total = grads.of_weight(name, place)
        total.add(d, rows)
        grads.written({name: total})

    def add_projection_gradients(
        self,
        group: LatentGroup,
        latents: Latents,
        made: list[Tensor | None],
        need: Collection[str],
        wants: LatentNeeds,
        grads: PartGrads,
        totals: dict[str, Tensor | None],
    ) -> None:
        """Adds what follows from the gradients of q, k, v as the core read them. made: is emptied."""
        dv, dk, dq = (made.pop() for _ in range(3))
        (_, nope, rope, v, _, _), qk, rows, wide = self.sizes, self.sizes.qk, self.x.shape[0], group.count > 1
        if wants.dq:
            dq = dq[..., :qk].transpose(1, 2).contiguous()  # [B, S, H, nope + rope]
            if rope:
                self.rotate_back(dq[..., nope:])
            dq = dq.view(rows, group.heads * qk)
            self.add_layer_gradients("q", group.rows_q, dq, latents.q, need, grads)
            if wants.q_latent:
                totals["q"] = add_matmul(totals["q"], dq, self.cast(group.wq), wide=wide)
        dq = None
        if wants.dkv:
            if wants.kv_latent and rope:
                shared = dk[..., nope:qk].sum(1, dtype=torch.promote_types(dk.dtype, torch.float32))
                totals["rope"] = shared if totals["rope"] is None else totals["rope"].add_(shared)
            dkv = dk.new_empty(self.B, self.S, group.heads, nope + v)
            dkv[..., :nope].copy_(dk[..., :nope].transpose(1, 2))
            dkv[..., nope:].copy_(dv[..., :v].transpose(1, 2))
            dk = dv = None
            dkv = dkv.view(rows, group.heads * (nope + v))
            self.add_layer_gradients("kvb", group.rows_kv, dkv, latents.kv, need, grads)
            if wants.kv_latent:
                totals["kv"] = add_matmul(totals["kv"], dkv, self.cast(group.wkvb), wide=wide)

    def add_layer_gradients(
        self, letter: str, place: slice | None, d: Tensor, rows: Tensor, need: Collection[str], grads: PartGrads
    ) -> None:
        """Adds the gradients of w and b of a linear layer, from the gradient of its result and the rows that it reads."""
        if (name := f"b{letter}") in need:
            grads.put(name, eager.column_sum(d, getattr(self.t, name).dtype), place)
        if (name := f"w{letter}") in need:
            self.add_weight_gradient(name, place, d, rows, grads)

    def latent_gradient(self, name: str, d: Tensor, raw: Tensor, need: Collection[str], grads: PartGrads) -> Tensor:
        """Returns the gradient of a latent before its norm, from that of what the projection reads."""
        weight, d = getattr(self.t, name), d.to(self.o.dtype)
        if weight is None:
            return d
        needs = dict(need_dweight=self.dtype_of(name, need), need_dbias=False)
        dx, dweight, _ = self.norm_bwd(d, raw, weight, self.o.latent_norm_eps, "rms", **needs)
        if dweight is not None:
            grads.put(name, dweight, None)
        return dx

    def add_latent_gradients(
        self, raw: Tensor, need: Collection[str], wants: LatentNeeds, grads: PartGrads, totals: dict[str, Tensor | None]
    ) -> Tensor | None:
        """Adds the gradients of the latents' weights and norms; returns that of h. totals: is emptied."""
        t, o, rope, kv_rank = self.t, self.o, self.sizes.rope, self.sizes.kv_rank
        of_q, of_kv = self.raw_parts(raw)
        reads_h = not {"wqa", "wkva"}.isdisjoint(need)
        h, dh = self.inputs() if reads_h else None, None
        through_h = self.needs_dh(need)
        d = totals.pop("q")
        if t.wqa is None:
            dh = d if through_h else None
        elif wants.q_latent:
            d = self.latent_gradient("q_a_norm", d, of_q, need, grads)
            self.add_layer_gradients("qa", None, d, h, need, grads)
            dh = add_matmul(None, d, self.cast(t.wqa), wide=False) if through_h else None
        d = None
        if not wants.kv_latent:
            return dh
        d = torch.empty_like(of_kv)
        d[:, :kv_rank] = self.latent_gradient("kv_a_norm", totals.pop("kv"), of_kv[:, :kv_rank], need, grads)
        if rope:
            shared = totals.pop("rope").unsqueeze(2)
            self.rotate_back(shared)
            d[:, kv_rank:] = shared.view(d.shape[0], rope)
        self.add_layer_gradients("kva", None, d, h, need, grads)
        if through_h:
            dh = add_matmul(dh, d, self.cast(t.wkva), wide=dh is not None and dh.dtype != o.dtype)
        return dh


def latent_reference(x: Tensor, t: LatentTensors, o: LatentOptions) -> Tensor:
    """The sublayer in differentiable PyTorch ops."""
    (B, S), (H, nope, rope, v, _, kv_rank) = batch_and_rows(x), sizes_of(t, o.num_heads)
    h = reference_inputs(x, t, o).reshape(B, S, x.shape[-1])

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(rows, cast_parameter(weight, o.dtype), cast_parameter(bias, o.dtype))

    def norm(latent: Tensor, weight: Tensor | None) -> Tensor:
        return latent if weight is None else reference_norm(latent, "rms", weight, None, o.latent_norm_eps)

    q = h if t.wqa is None else norm(linear(h, t.wqa, t.bqa), t.q_a_norm)
    q = linear(q, t.wq, t.bq).unflatten(-1, (H, nope + rope))
    latent, shared = linear(h, t.wkva, t.bkva).split([kv_rank, rope], -1)
    k, value = linear(norm(latent, t.kv_a_norm), t.wkvb, t.bkvb).unflatten(-1, (H, nope + v)).split([nope, v], -1)
    unrotated, q = q.split([nope, rope], -1)
    shared = shared.unsqueeze(2)
    cos, sin = rotary_of(S, rope, t, o)
    if cos is not None:
        q, shared = (reference_rotary(heads, cos, sin, o.interleaved) for heads in (q, shared))
    q, k = torch.cat((unrotated, q), -1), torch.cat((k, shared.expand(B, S, H, rope)), -1)
    out = eager.attention_reference(q.transpose(1, 2), k.transpose(1, 2), value.transpose(1, 2), sublayer_core(t, o))
    return reference_output(x, linear(out.transpose(1, 2).reshape(*x.shape[:-1], H * v), t.wo, t.bo), t, o)
