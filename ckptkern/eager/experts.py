"""Experts of an MoE layer: the reference implementations of triton_kernels/experts.py, one expert at a time. The host reads the
offsets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .elementwise import ACTIVATIONS, act, column_sum, wide_of
from .linear import linear, mm


class Groups(NamedTuple):
    """Token-expert pairs sorted by expert. Pair t top_k + j is token t's j-th choice. Rows are the pairs in the experts' order,
    stable within an expert; dropped pairs come last.

    order: int32 [R], the pair of each row. inv: int32 [R], the row of each pair. offs: int32 [E + 1]; rows
    offs[e]:offs[e + 1] are expert e's, and rows from offs[E] on are dropped pairs, neither written nor read.
    """

    order: Tensor
    inv: Tensor
    offs: Tensor
    top_k: int


def route(index: Tensor, experts: int) -> Groups:
    """Sorts the token-expert pairs of index [T, top_k], of any integer dtype, without a device sync. A number outside
    0..experts - 1 drops its pair."""
    ids = index.reshape(-1).to(torch.int64)  # `experts` may not fit into 8 bits
    ids = torch.where((ids < 0) | (ids >= experts), experts, ids).to(torch.int32)
    ids, order = torch.sort(ids, stable=True)
    rows = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
    inv = torch.empty_like(rows).scatter_(0, order, rows)
    offs = torch.searchsorted(ids, torch.arange(experts + 1, dtype=torch.int32, device=ids.device), out_int32=True)
    return Groups(order.to(torch.int32), inv, offs, index.shape[-1])


def _each(groups: Groups) -> Iterator[tuple[int, slice]]:
    """Yields each expert that has rows, with these rows. On meta tensors, which have no values, the first expert has all."""
    rows, experts = groups.order.numel(), groups.offs.numel() - 1
    offs = [0, *[rows] * experts] if groups.offs.is_meta else groups.offs.tolist()
    for expert, (start, stop) in enumerate(itertools.pairwise(offs)):
        if start < stop:
            yield expert, slice(start, stop)


def _tokens(groups: Groups) -> Tensor:
    return groups.order // max(groups.top_k, 1)


def gather_rows(x: Tensor, groups: Groups) -> Tensor:
    """Returns the token's row of x [T, d] for each token-expert pair, in the experts' order: [R, d]."""
    return x[_tokens(groups)]


def experts_fwd(x, w, b, groups, activation, precision, *, save_gu=False):
    R, wide, tokens = groups.order.numel(), w.shape[1], _tokens(groups)
    h, gu = x.new_zeros((R, wide // 2)), x.new_zeros((R, wide)) if save_gu else None
    for expert, rows in _each(groups):
        own = linear(x[tokens[rows]], w[expert], None if b is None else b[expert])
        g, u = own.chunk(2, 1)
        h[rows] = act(g, activation) * u
        if save_gu:
            gu[rows] = own
    return h, gu


def experts_bwd(x, w, b, dy, wd, s, groups, activation, precision, *, hs=True, dgu=True, ds=True):
    return _gradients(s, groups, activation, hs, dgu, ds, x=x, w=w, b=b, dy=dy, wd=wd)


def experts_act_grad(gu, dy, wd, s, groups, activation, precision, *, hs=True, dgu=True, ds=True, added=None):
    return _gradients(s, groups, activation, hs, dgu, ds, gu=gu, dy=dy, wd=wd, added=added)


def _gradients(s, groups, activation, hs, dgu, ds, *, dy, wd, gu=None, x=None, w=None, b=None, added=None):
    """Returns the weighted h, the gradients of gu and those of s, from gu (or x w^T + b of the rows' tokens) and dy wd of the
    rows' tokens [+ added]. One expert at a time keeps transients small."""
    R, tokens, N, wide = groups.order.numel(), _tokens(groups), wd.shape[2], wide_of(dy.dtype)
    weighted, grads = dy.new_zeros((R, N)) if hs else None, dy.new_zeros((R, 2 * N)) if dgu else None
    of_rows = dy.new_zeros(R, dtype=wide) if ds else None
    weights = s.reshape(-1)[groups.order].to(wide)[:, None]
    for expert, rows in _each(groups):
        if gu is None:
            own = linear(x[tokens[rows]], w[expert], None if b is None else b[expert])
        else:
            own = gu[rows]
        g, u = own.chunk(2, 1)
        a = act(g, activation)
        h, d = a * u, mm(dy[tokens[rows]], wd[expert])
        if added is not None:
            d.add_(added[rows])
        if ds:
            of_rows[rows] = (d.to(wide) * h.to(wide)).sum(1)
        if hs:
            weighted[rows] = (h.to(wide) * weights[rows]).to(h.dtype)
        if dgu:
            d = (d.to(wide) * weights[rows]).to(d.dtype)
            grads[rows, :N], grads[rows, N:] = ACTIVATIONS[activation].grad(d * u, g), d * a
    of_pairs = torch.where(groups.inv < groups.offs[-1], of_rows[groups.inv], 0).view(s.shape) if ds else None
    return weighted, grads, of_pairs


def experts_gemm(a, w, b, groups, precision, *, transposed):
    y = a.new_zeros((a.shape[0], w.shape[1 if transposed else 2]))
    for expert, rows in _each(groups):
        matrix = w[expert] if transposed else w[expert].t()
        y[rows] = linear(a[rows], matrix, None if b is None else b[expert])
    return y


def experts_combine(y, s, groups):
    wide = wide_of(y.dtype)
    rows = groups.inv.view(-1, groups.top_k) if s is None else groups.inv.view(s.shape)
    total = y.new_zeros((rows.shape[0], y.shape[1]), dtype=wide)
    for j in range(groups.top_k):
        part = y[rows[:, j]].to(wide)
        part = part if s is None else part * s[:, j, None].to(wide)
        total += torch.where((rows[:, j] < groups.offs[-1])[:, None], part, 0)
    return total.to(y.dtype)


def experts_dw(a, b, groups, precision, out, *, gathered):
    tokens, add = _tokens(groups), isinstance(out, Tensor)
    if not add:
        out = a.new_zeros((groups.offs.numel() - 1, a.shape[1], b.shape[1]), dtype=out)
    for expert, rows in _each(groups):
        left, right = (t[tokens[rows]] if gathered == side else t[rows] for side, t in (("a", a), ("b", b)))
        if add:  # a CPU has no matmul of 16-bit operands that adds to float32
            left, right = left.to(wide_of(a.dtype)), right.to(wide_of(a.dtype))
        if out.dtype == left.dtype:  # without a temporary
            out[expert].addmm_(left.t(), right)
        else:
            out[expert] += torch.mm(left.t(), right)
    return out


def experts_sums(a, s, groups, *, gathered):
    """Sums each expert's rows of a, weighted by s [T, top_k] unless it is None: [E, N], in the wide type."""
    tokens = _tokens(groups)
    sums = a.new_zeros((groups.offs.numel() - 1, a.shape[1]), dtype=wide_of(a.dtype))
    for expert, rows in _each(groups):
        part = a[tokens[rows]] if gathered else a[rows]
        if s is not None:
            part = part.to(sums.dtype) * s.reshape(-1)[groups.order[rows]].to(sums.dtype)[:, None]
        sums[expert] = column_sum(part)
    return sums
