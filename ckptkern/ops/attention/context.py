"""Computes attention over a sequence whose rows are split over ranks (context parallelism).

    exchange   core                                 travels in forward      saved by a rank
    "gather"   its rows of q, all of k and v        k and v                 its rows of o and lse
    "heads"    all rows of its part of the heads    q, k and v; then o      its rows of o, its heads' lse

A rank saves for its rows what a whole sequence's attention saves. Backward repeats forward's collectives, and sends the
gradients back. "gather" is the all-gather of k and v of Llama 3 (arXiv 2407.21783, 3.3.2), "heads" the all-to-all of
DeepSpeed Ulysses (arXiv 2309.14509). Rows are in the sequence's order, or zigzag: a rank has chunks r and 2 n - 1 - r of 2
n, which balances causal attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ... import eager
from .core import attend, attention_grads

EXCHANGES = ("gather", "heads")
_c10d = torch.ops._c10d_functional


class Rows(NamedTuple):
    """Neighbouring rows: [start, stop) among a rank's rows, which begin at `first` in the sequence."""

    start: int
    stop: int
    first: int

    @property
    def end(self) -> int:
        return self.first + self.stop - self.start


class Context(NamedTuple):
    """This rank's place in a context-parallel group. group: its name for torch's functional collectives."""

    group: str
    rank: int
    size: int
    zigzag: bool
    exchange: str

    # -- rows

    def whole(self, x: Tensor) -> Tensor:
        """Returns a tensor without memory, with the rows of all ranks and the dtype and device of x [..., S, d], for
        checks."""
        return x.new_empty(()).expand(*x.shape[:-2], self.size * x.shape[-2], x.shape[-1])

    @property
    def chunks(self) -> int:
        """Returns the number of chunks of the sequence; a rank has one, or in zigzag order two."""
        return 2 * self.size if self.zigzag else self.size

    def rows(self, S: int) -> list[Rows]:
        """Returns the places in the sequence of this rank's S rows."""
        if not self.zigzag:
            return [Rows(0, S, self.rank * S)]
        half = S // 2
        return [Rows(0, half, self.rank * half), Rows(half, S, (2 * self.size - 1 - self.rank) * half)]

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's rows, along dim, of x with the rows of all ranks."""
        parts = [x.narrow(dim, rows.first, rows.stop - rows.start) for rows in self.rows(x.shape[dim] // self.size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def joined(self, parts: Tensor) -> Tensor:
        """Joins the ranks' [n, B, S, ...] to [B, n S, ...] in the sequence's order."""
        if not self.zigzag:
            return parts.movedim(0, 1).flatten(1, 2)
        first, second = parts.chunk(2, 2)
        return torch.cat((first.movedim(0, 1), second.flip(0).movedim(0, 1)), 1).flatten(1, 2)

    def parted(self, x: Tensor) -> Tensor:
        """Splits [B, n S, ...] into the ranks' [n, B, S, ...]."""
        parts = x.unflatten(1, (self.chunks, -1)).movedim(1, 0)
        if not self.zigzag:
            return parts
        return torch.stack((parts[: self.size], parts[self.size :].flip(0)), 2).flatten(2, 3)

    def stream(self, rng: Tensor) -> Tensor:
        """Returns this rank's own random state, derived from a state that is equal on all ranks, for masks of its rows."""
        return rng if self.rank == 0 else rng ^ (self.rank * 0x9E3779B97F4A7C15 & 0x7FFFFFFFFFFFFFFF)

    # -- collectives; each returns a tensor to pass to wait_tensor

    def gathering(self, x: Tensor) -> Tensor:
        """Starts the all-gather of [m, ...] to [n m, ...]."""
        return _c10d.all_gather_into_tensor(x.contiguous(), self.size, self.group)

    def exchanging(self, x: Tensor) -> Tensor:
        """Starts the all-to-all of [n, ...]: part r goes to rank r, and rank r's part takes its place."""
        ones = [1] * self.size
        return _c10d.all_to_all_single(x.contiguous(), ones, ones, self.group)


class SpreadHeads:
    """Heads that come from other ranks. pending: the running collective's result, until it is first read."""

    pending: Tensor | None

    def arrived(self) -> Tensor:
        parts, self.pending = _c10d.wait_tensor(self.pending), None
        return parts

    def close(self) -> None:
        """Waits for a result that nothing has read, because no requested gradient needs it."""
        if self.pending is not None:
            self.arrived()


class GatheredHeads(SpreadHeads):
    """This rank's rows of q, and all rows of k and v."""

    def __init__(self, context: Context, queries: Callable[[], Tensor], k: Tensor, v: Tensor):
        self.context, self.kv_shape = context, k.shape
        self.pending = context.gathering(torch.cat((k.transpose(1, 2), v.transpose(1, 2)), 2))
        self.q = queries()

    @functools.cached_property
    def kv(self) -> tuple[Tensor, Tensor]:
        """Returns k and v [B, H_kv, n S, D]."""
        (B, H_kv, S, D), size = self.kv_shape, self.context.size
        k, v = self.context.joined(self.arrived().view(size, B, S, 2 * H_kv, D)).transpose(1, 2).chunk(2, 1)
        return k, v

    def parts(self, core: eager.AttentionCore) -> Iterator[tuple[Rows, int, eager.AttentionCore]]:
        """Yields (rows of q, the number of columns that they may see, their core) for neighbouring rows."""
        S, whole = self.q.shape[2], self.q.shape[2] * self.context.size
        for rows in self.context.rows(S):
            right = core.window[1]
            if core.cu_q is not None:  # a sequence's last row on this rank sees the last column, its own
                ends = rows.end if right is not None else whole
                cu_q = (core.cu_q - rows.first).clamp(0, rows.stop - rows.start)
                yield rows, whole, core._replace(cu_q=cu_q, cu_k=core.cu_k.clamp(max=ends), max_q=min(core.max_q, S))
                continue
            columns = whole if right is None else max(0, min(whole, rows.end + right))
            mask = core.mask
            if mask is not None:
                mask = mask[:, :, rows.first : rows.end] if mask.shape[2] > 1 else mask
                mask = mask[..., :columns] if mask.shape[3] > 1 else mask
            yield rows, columns, core._replace(mask=mask, row_base=rows.first, max_q=whole)

    def attend(self, p: ModuleType, core: eager.AttentionCore, do: Tensor | None = None):
        """Returns (o, lse, delta) of this rank's rows, as `core.attend` does."""
        (k, v), results = self.kv, []
        for rows, columns, own in self.parts(core):
            at = slice(rows.start, rows.stop)
            of_do = None if do is None else do[:, :, at]
            results.append(attend(p, self.q[:, :, at], k[:, :, :columns], v[:, :, :columns], own, of_do))
        if len(results) == 1:
            return results[0]
        o = eager.empty_heads(self.q)
        for rows, (part, *_) in zip(self.context.rows(self.q.shape[2]), results, strict=True):
            o[:, :, rows.start : rows.stop].copy_(part)
        _, lse, delta = zip(*results, strict=True)
        return o, torch.cat(lse, 2), None if delta[0] is None else torch.cat(delta, 2)

    def grads(self, p, do, o, lse, core: eager.AttentionCore, *, delta, need_dq, need_dkv, need_dsinks, out) -> tuple:
        """Returns (dq, dk, dv, dsinks) of this rank's rows, dq in out[0] if that is a tensor. dk and dv are summed over
        rows and ranks in float32."""
        dsinks = sums = None
        if need_dsinks:
            delta = p.attn_delta(o, do, core._replace(cu_q=None, cu_k=None)) if delta is None else delta
            dsinks = eager.sink_gradient(lse, delta, core.sinks)
        if not (need_dq or need_dkv):
            self.close()
            return None, None, None, dsinks
        (B, H_kv, S, D), (k, v), size = self.kv_shape, self.kv, self.context.size
        dq = None if not need_dq else eager.empty_heads(self.q) if out[0] is None else out[0]
        if need_dkv:
            sums = k.new_zeros((B, size * S, 2 * H_kv, D), dtype=eager.wide_of(k.dtype))
        for rows, columns, own in self.parts(core):
            at = slice(rows.start, rows.stop)
            outs = [None] * 2 if sums is None else sums.transpose(1, 2)[:, :, :columns].chunk(2, 1)
            later = rows.start > 0  # earlier rows have written their sums already
            places = [None if dq is None else dq[:, :, at], *outs]
            if later and need_dkv:
                places[1:] = [torch.empty_like(total) for total in outs]
            results = attention_grads(
                p,
                self.q[:, :, at],
                k[:, :, :columns],
                v[:, :, :columns],
                do[:, :, at],
                o[:, :, at],
                lse[:, :, at],
                own,
                delta=None if delta is None else delta[:, :, at],
                need_dq=need_dq,
                need_dkv=need_dkv,
                out=places,
            )[:3]
            for place, part in zip(places, results, strict=True):
                if place is not None and part is not place:
                    place.copy_(part)
            for total, part in zip(outs, places[1:], strict=True):
                if later and total is not None:
                    total.add_(part)
        if sums is None:
            return dq, None, None, dsinks
        sent = self.context.parted(sums).flatten(0, 1).contiguous()  # [n ...] -> this rank's part, summed over ranks
        parts = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(sent, "sum", size, self.context.group))
        dk, dv = parts.view(B, S, 2 * H_kv, D).to(k.dtype).transpose(1, 2).chunk(2, 1)
        return dq, dk, dv, dsinks


class ExchangedHeads(SpreadHeads):
    """This rank's part of the heads, with all rows of q, k and v."""

    def __init__(self, context: Context, queries: Callable[[], Tensor], k: Tensor, v: Tensor):
        q = queries()
        self.context, self.counts = context, [heads.shape[1] // context.size for heads in (q, k, v)]
        self.out: Tensor | None = None
        self.pending = self.sent(q, k, v)

    def sent(self, *rows: Tensor) -> Tensor:
        """Starts sending tensors [B, heads, S, D] to the ranks of their heads."""
        parts = [heads.unflatten(1, (self.context.size, -1)) for heads in rows]
        return self.context.exchanging(torch.cat(parts, 2).movedim(1, 0).transpose(2, 3))

    def whole(self, parts: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
        """Returns [B, heads of this rank, n S, D] of each tensor that was sent."""
        return self.context.joined(parts).transpose(1, 2).split(counts, 1)

    def back(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """Returns tensors [B, heads, S, D] of this rank's rows from [B, heads of this rank, n S, D]."""
        parts = self.context.parted(torch.cat(heads, 1).transpose(1, 2))
        parts = _c10d.wait_tensor(self.context.exchanging(parts))  # [n, B, S, heads, D]
        arrived = parts.split([tensor.shape[1] for tensor in heads], 3)
        return tuple(part.movedim(0, 2).flatten(2, 3).transpose(1, 2) for part in arrived)

    @functools.cached_property
    def qkv(self) -> tuple[Tensor, ...]:
        return self.whole(self.arrived(), self.counts)

    def core(self, core: eager.AttentionCore) -> eager.AttentionCore:
        """Returns `core` of this rank's heads."""
        count = self.counts[0]
        return core.of_heads(self.context.rank * count, count, self.context.size * count)

    def attend(self, p: ModuleType, core: eager.AttentionCore, do: Tensor | None = None):
        """Returns (o of this rank's rows, lse of its heads, None)."""
        self.out, lse, _ = attend(p, *self.qkv, self.core(core))
        (o,) = self.back(self.out)
        return eager.as_heads(o), lse, None

    def grads(self, p, do, o, lse, core: eager.AttentionCore, *, delta, out, **needs: bool) -> tuple:
        """Returns (dq, dk, dv, dsinks): of this rank's rows, and of all heads, with zeros for other ranks' heads."""
        if not any(needs.values()):
            self.close()
            return (None,) * 4
        sent = (do, o) if self.out is None else (do,)  # o of this rank's heads is at hand if just recomputed
        arrived = self.whole(_c10d.wait_tensor(self.sent(*sent)), len(sent) * self.counts[:1])
        do, o = arrived if self.out is None else (*arrived, self.out)
        *grads, _, _, part = attention_grads(p, *self.qkv, do, o, lse, self.core(core), **needs)
        present = [grad for grad in grads if grad is not None]
        rows = iter(self.back(*present) if present else ())
        dsinks = None
        if part is not None:
            dsinks = part.new_zeros(self.context.size * part.shape[0])
            dsinks[self.context.rank * part.shape[0] :][: part.shape[0]].copy_(part)
        return *(None if grad is None else next(rows) for grad in grads), dsinks
