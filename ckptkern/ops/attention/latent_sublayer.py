"""Computes the sublayer of multi-head latent attention, forward and backward. q, k and v are projected from latents of few
features; backward recomputes the heads from these, group by group."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import eager
from ..registration.gradients import add_matmul
from ..registration.op import Named, with_fields
from ..sublayer.lora import reference_linear
from ..sublayer.residual import AroundTensors, RandomStates, SublayerOptions
from .core import CoreOptions
from .core_sublayer import (
    CoreSublayer,
    Gradients,
    Saved,
    Table,
    from_core,
    input_operands,
    linear_operands,
    norm_operands,
)
from .tensors import Division, HeadsOptions, PositionTensors, bytes_around


@with_fields(AroundTensors, ..., PositionTensors, RandomStates)
class LatentTensors(NamedTuple):
    """Holds the tensors of a sublayer of multi-head latent attention. wqa, q_a_norm: of q's latent, None where wq reads h;
    wkva: projects to the latent of k and v and to the rotated part of k; wkvb: projects that latent to v and to the
    other part of k."""

    wqa: Tensor | None
    bqa: Tensor | None
    q_a_norm: Tensor | None
    wq: Tensor
    bq: Tensor | None
    wkva: Tensor
    bkva: Tensor | None
    kv_a_norm: Tensor | None
    wkvb: Tensor
    bkvb: Tensor | None
    wo: Tensor
    bo: Tensor | None

    slopes = sinks = cu = key_value = None  # arguments of attention that it does not take


@with_fields(CoreOptions, HeadsOptions, ..., SublayerOptions)
class LatentOptions(NamedTuple):
    """Holds the sublayer's other options, named as in AttentionOptions. latent_norm_eps: of both latents' norms."""

    latent_norm_eps: float

    projected = ("latents", "q", "kv")  # names of what the core reads


class LatentSizes(NamedTuple):
    """H: heads. nope, rope: dimensions of q and k per head without and with rotation. v: dimensions of v. q_rank, kv_rank:
    dimensions of the latents; q_rank is 0 where q has none."""

    H: int
    nope: int
    rope: int
    v: int
    q_rank: int
    kv_rank: int

    @property
    def qk(self) -> int:
        return self.nope + self.rope

    @property
    def D(self) -> int:
        """Returns the head dim of core attention: smaller heads are padded with zeros."""
        return max(self.qk, self.v)

    @property
    def latents(self) -> int:
        """Returns the columns of [q's latent | k's and v's latent | the rotated part of k]."""
        return self.q_rank + self.kv_rank + self.rope


def sizes_of(t: LatentTensors, num_heads: int) -> LatentSizes:
    H, kv_rank = num_heads, t.wkvb.shape[1]
    v = t.wo.shape[1] // H
    q_rank = 0 if t.wqa is None else t.wqa.shape[0]
    return LatentSizes(H, t.wkvb.shape[0] // H - v, t.wkva.shape[0] - kv_rank, v, q_rank, kv_rank)


# -- groups of heads ---------------------------------------------------------------------------------------------------


def latent_groups(x: Tensor, t: LatentTensors, o: LatentOptions) -> int:
    """Returns the fewest equal groups of heads that each fit the workspace, for x [tokens, d], at most one for each head.

    Without a workspace there is one group, so no comparison depends on symbolic sizes.
    """
    if o.workspace is None:
        return 1
    sizes, (rows, d), width, size = sizes_of(t, o.num_heads), x.shape, t.wo.shape[1], o.dtype.itemsize
    h, df = bytes_around(x, t, o)
    # besides heads: h, and the latents before and after their norms
    held = (0 if sizes.q_rank else h) + (0 if o.recompute == "none" else sizes.latents) * size
    held += (sizes.q_rank * (t.q_a_norm is not None) + sizes.kv_rank * (t.kv_a_norm is not None)) * size
    # float32 sums over groups; rounding copies the largest
    of_latents = max(4, size) * ((sizes.q_rank or d) + sizes.kv_rank + sizes.rope)
    of_latents += size * max(sizes.q_rank or d, sizes.kv_rank) if size < 4 else 0
    # plus forward's o, if it is not saved, or backward's gradients of the branch's result, the latents and h
    beside = rows * (held + max(width * size if o.recompute == "full" else 0, df + of_latents))
    of_heads, room = bytes_of_latent_heads(rows, sizes, o), o.workspace - beside
    counts = [n for n in range(1, sizes.H + 1) if sizes.H % n == 0]
    return next((n for n in counts if of_heads <= room * n), counts[-1])


def bytes_of_latent_heads(rows: int, sizes: LatentSizes, o: LatentOptions) -> int:
    """Returns the transient bytes of all heads at once in backward, which needs more than forward: q, k, v, o, do, dq, dk
    and dv as the core reads them (kv and q are not counted if saved, o is not if unpadded), then the gradients of q and
    kv beside these, and temporaries of PyTorch ops."""
    size, eagerly, D, kv = o.dtype.itemsize, o.backend == "eager", sizes.D, sizes.nope + sizes.v
    saved, filled = o.recompute == "none", sizes.v < D
    q = 0 if saved and sizes.qk == D else D
    v = D if filled else 0 if saved else kv
    core = q + D + v + (D if filled or o.recompute == "full" else 0) + 4 * D
    core += 4 * D // size if o.fused == "flash" else 0  # which sums dq in float32
    copied = 4 * max(sizes.qk, kv) if eagerly and size < 4 else 0  # a CPU has no float32 matmul of 16-bit operands
    temporaries = 4 * sizes.rope * max(size, 4) if eagerly else 0
    by_scores = eagerly and (o.dropout_p > 0 or o.softcap > 0 or o.dtype == torch.float16)  # not flash attention
    block = D * max(size, 4) if by_scores else 0  # in float32, the least size of a block of scores
    per_head = max(core * size + block, (3 * D + sizes.qk + kv) * size + max(copied, temporaries))
    return rows * sizes.H * (per_head + 3 * 4)  # and lse, and delta twice


# -- the sublayer ------------------------------------------------------------------------------------------------------


def latent_table(latent_q: bool, norms: tuple[bool, bool], trailing: bool, post_norm: bool) -> Table:
    """Returns the quantities of the sublayer: the latents (kv_latent with the rotated part of k), and the inputs of wq and
    wkvb, which are the latents after their norms, or h for q. norms: whether q's latent and that of k and v have norms."""
    return {
        "h": input_operands(trailing),
        "q_latent": linear_operands("h", "qa") if latent_q else {},
        "kv_latent": linear_operands("h", "kva"),
        "q_read": norm_operands("q_latent", "q_a_norm", norms[0]) if latent_q else {"h": ()},
        "kv_read": norm_operands("kv_latent", "kv_a_norm", norms[1]),
        "q": linear_operands("q_read", "q"),
        "kv": linear_operands("kv_read", "kvb"),
        "q_heads": {"q": ()},
        "k_heads": {"kv": (), "kv_latent": ()},
        "v": {"kv": ()},
        **from_core(False, trailing, post_norm),
    }


class Latents(NamedTuple):
    """raw: the latents before their norms, with the rotated part of k (`raw_parts`); q, kv: the inputs of wq and wkvb,
    which are the latents after their norms, or h for q."""

    raw: Tensor
    q: Tensor
    kv: Tensor


class LatentSublayer(CoreSublayer):
    table = latent_table
    saved_as = (("out", ("o",)), ("latents", ("q_latent", "kv_latent")), ("q", ("q",)), ("kv", ("kv",)))
    source_values = frozenset(("q_latent", "kv_latent", "q_read", "kv_read"))

    def __init__(self, x: Tensor, t: LatentTensors, o: LatentOptions, **options: bool | None):
        super().__init__(x, t, o, **options)
        self.sizes = sizes_of(t, o.num_heads)
        self.D, self.D_v, self.rotary_dim = self.sizes.D, self.sizes.v, self.sizes.rope
        self.layout = t.wqa is not None, (t.q_a_norm is not None, t.kv_a_norm is not None)

    @functools.cached_property
    def division(self) -> Division:
        return Division(latent_groups(self.x, self.t, self.o), [(0, self.x.shape[0])])

    def of_heads(self) -> dict[str, int]:
        """Returns the tensors that a group has a part of, with the dimension along which heads lie."""
        return {"wq": 0, "bq": 0, "wkvb": 0, "bkvb": 0, "wo": 1, "mask": 1}

    # -- forward

    def by_token(self, rows: Tensor, heads: int) -> Tensor:
        """Returns rows [tokens, heads N] as [B, S, heads, N], a view."""
        return rows.unflatten(1, (heads, rows.shape[1] // heads)).unflatten(0, (self.B, self.S))

    def rotate(self, part: Tensor, back: bool = False) -> None:
        """Rotates the last dimensions of heads of q, or k's shared part [B, S, heads, rope], or their gradient `back`, in
        place."""
        if self.angles[0] is not None and back:
            self.p.heads_bwd(part, None, None, 0.0, *self.angles, self.o.interleaved, out=part)
        elif self.angles[0] is not None:
            self.p.heads_fwd(part, None, 0.0, *self.angles, self.o.interleaved, out=part)

    def raw_parts(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Returns q's latent [tokens, q_rank], and the latent of k and v with the rotated part of k [tokens, kv_rank +
        rope]; each is contiguous (see AttentionSublayer.blocks)."""
        rows, of_q = self.x.shape[0], self.sizes.q_rank
        q, kv = raw.split([rows * of_q, rows * (self.sizes.latents - of_q)])
        return q.view(rows, of_q), kv.view(rows, self.sizes.latents - of_q)

    def normed_latent(self, latent: Tensor, weight: Tensor | None) -> Tensor:
        """Returns a latent after its norm, if it has one."""
        return (
            latent
            if weight is None
            else self.norm_fwd(latent, weight, None, self.o.latent_norm_eps, "rms", self.o.dtype)
        )

    def source(self, saved: Saved) -> Latents:
        """Returns the latents, from the raw ones if these were saved."""
        t, raw, rope = self.t, saved.get("latents"), self.sizes.rope
        formed = raw is None
        h = self.inputs() if formed or t.wqa is None else None
        raw = h.new_empty(h.shape[0] * self.sizes.latents) if formed else raw
        of_q, of_kv = self.raw_parts(raw)
        if formed:
            if t.wqa is not None:
                eager.linear(h, self.cast(t.wqa, last=False), self.cast(t.bqa), out=of_q)
            eager.linear(h, self.cast(t.wkva, last=False), self.cast(t.bkva), out=of_kv)
            if rope:
                self.rotate(self.by_token(of_kv[:, -rope:], 1))
        q, h = h if t.wqa is None else of_q, None
        q = self.normed_latent(q, t.q_a_norm)
        return Latents(raw, q, self.normed_latent(of_kv[:, : self.sizes.kv_rank], t.kv_a_norm))

    def projected(self, latents: Latents) -> Named:
        """Returns q [tokens, heads (nope + rope)], rotated, kv [tokens, heads (nope + v)], and their raw latents, by name."""
        t = self.t
        q = eager.linear(latents.q, self.cast(t.wq, last=False), self.cast(t.bq))
        self.rotate(self.by_token(q, self.o.num_heads)[..., -self.sizes.rope :])
        kv = eager.linear(latents.kv, self.cast(t.wkvb, last=False), self.cast(t.bkvb))
        return {"latents": latents.raw, "q": q, "kv": kv}

    def heads(
        self, latents: Latents, saved: Saved, save_raw: bool, *, backward: bool
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple, None]:
        """Returns ((q, k, v), (None, None), None): q, k, v [B, H, S, D] as the core reads them, from `saved` of all heads
        or projected. k is each head's own part beside the shared one. Backward reads nothing else."""
        if saved.get("q") is None:
            _, q, kv = self.projected(latents).values()
        else:
            q, kv = self.own(saved["q"], 1), self.own(saved["kv"], 1)
        for name in ("latents", "q", "kv") if self.count == 1 and not save_raw else ():
            saved.pop(name, None)  # frees them once k, q and v are joined
        H, (_, nope, rope, _, _, _), D = self.o.num_heads, self.sizes, self.D
        kv = self.by_token(kv, H)
        k = kv.new_empty(self.B, self.S, H, D)
        k[..., :nope].copy_(kv[..., :nope])
        if rope:
            k[..., nope : nope + rope].copy_(self.by_token(self.raw_parts(latents.raw)[1][:, -rope:], 1))
        if nope + rope < D:
            k[..., nope + rope :].zero_()
        parts = self.filled(self.by_token(q, H)), k, self.filled(kv[..., nope:])
        return tuple(part.transpose(1, 2) for part in parts), (None, None), None

    # -- backward

    def add_projection_gradients(self, results: dict[str, Any], latents: Latents, grads: Gradients) -> None:
        """Adds the gradients of wq, wkvb and their biases, and of their inputs and k's rotated part to the totals, from the
        result of `core_gradients`."""
        dq, dk, dv = results.pop("heads")
        (_, nope, rope, v, _, _), qk, rows, wide = self.sizes, self.sizes.qk, self.x.shape[0], self.count > 1
        H, formed, totals = self.o.num_heads, grads.plan.formed, grads.totals
        if "q" in formed:
            dq = dq[..., :qk].transpose(1, 2).contiguous()  # [B, S, H, nope + rope]
            if rope:
                self.rotate(dq[..., nope:], back=True)
            dq = dq.view(rows, H * qk)
            self.add_layer("q", dq, latents.q, grads)
            if "q_read" in formed:
                totals["q"] = add_matmul(totals.get("q"), dq, self.cast(self.t.wq), wide=wide)
        dq = None
        if "kv" in formed:
            if "kv_read" in formed and rope:
                shared = dk[..., nope:qk].sum(1, dtype=eager.wide_of(dk.dtype))
                totals["rope"] = shared if "rope" not in totals else totals["rope"].add_(shared)
            dkv = dk.new_empty(self.B, self.S, H, nope + v)
            dkv[..., :nope].copy_(dk[..., :nope].transpose(1, 2))
            dkv[..., nope:].copy_(dv[..., :v].transpose(1, 2))
            dk = dv = None
            dkv = dkv.view(rows, H * (nope + v))
            self.add_layer("kvb", dkv, latents.kv, grads)
            if "kv_read" in formed:
                totals["kv"] = add_matmul(totals.get("kv"), dkv, self.cast(self.t.wkvb), wide=wide)

    def latent_gradient(self, name: str, d: Tensor, raw: Tensor, grads: Gradients) -> Tensor:
        """Returns the gradient of a latent before its norm, from that after it."""
        weight, d = getattr(self.t, name), d.to(self.o.dtype)
        if weight is None:
            return d
        needs = dict(need_dweight=self.dtype_of(name, grads.plan.need), need_dbias=False)
        dx, dweight, _ = self.norm_bwd(d, raw, weight, self.o.latent_norm_eps, "rms", **needs)
        if dweight is not None:
            grads.put(name, dweight, None)
        return dx

    def input_gradient(self, raw: Tensor | None, grads: Gradients) -> Tensor | None:
        """Adds the gradients of the latents' weights and norms and returns the gradient of h. Empties the totals."""
        t, o, rope, kv_rank, totals = self.t, self.o, self.sizes.rope, self.sizes.kv_rank, grads.totals
        need, formed, _ = grads.plan
        if "q_read" not in formed and "kv_read" not in formed:
            return None
        of_q, of_kv = self.raw_parts(raw)
        h, dh = None if need.isdisjoint(("wqa", "wkva")) else self.inputs(), None
        d = totals.pop("q", None)
        if t.wqa is None:
            dh = d
        elif "q_read" in formed:
            d = self.latent_gradient("q_a_norm", d, of_q, grads)
            self.add_layer("qa", d, h, grads)
            dh = add_matmul(None, d, self.cast(t.wqa), wide=False) if "h" in formed else None
        d = None
        if "kv_read" not in formed:
            return dh
        d = torch.empty_like(of_kv)
        d[:, :kv_rank] = self.latent_gradient("kv_a_norm", totals.pop("kv"), of_kv[:, :kv_rank], grads)
        if rope:
            shared = totals.pop("rope").unsqueeze(2)
            self.rotate(shared, back=True)
            d[:, kv_rank:] = shared.view(d.shape[0], rope)
        self.add_layer("kva", d, h, grads)
        if "h" in formed:
            dh = add_matmul(dh, d, self.cast(t.wkva), wide=dh is not None and dh.dtype != o.dtype)
        return dh

    # -- the reference implementation

    def reference_heads(self, h: Tensor) -> tuple[tuple[Tensor, ...], None]:
        t, o, (H, nope, rope, v, _, kv_rank) = self.t, self.o, self.sizes
        h = h.reshape(self.B, self.S, h.shape[-1])
        q = h if t.wqa is None else self.normed_latent(reference_linear(h, t.wqa, t.bqa), t.q_a_norm)
        unrotated, q = reference_linear(q, t.wq, t.bq).unflatten(-1, (H, nope + rope)).split([nope, rope], -1)
        latent, shared = reference_linear(h, t.wkva, t.bkva).split([kv_rank, rope], -1)
        kv = reference_linear(self.normed_latent(latent, t.kv_a_norm), t.wkvb, t.bkvb)
        (k, value), shared = kv.unflatten(-1, (H, nope + v)).split([nope, v], -1), shared.unsqueeze(2)
        if self.angles[0] is not None:
            q, shared = (eager.heads_fwd(heads, None, 0.0, *self.angles, o.interleaved) for heads in (q, shared))
        heads = torch.cat((unrotated, q), -1), torch.cat((k, shared.expand_as(q)), -1), value
        return tuple(part.transpose(1, 2) for part in heads), None
