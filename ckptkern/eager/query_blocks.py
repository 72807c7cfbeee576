"""Attention in blocks of queries, so that no [B, H, Sq, Sk] is ever written out: which blocks, and the core of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_core import AttentionCore, empty_heads, wide_dtype

LEAST_ROWS = 16  # of a block, whatever the workspace
ROWS = 256  # of a block where something is cut: 128 and 512 take 3 % more time, 2,048 half as much again (one thread)
CACHE = (
    2**24
)  # bytes of a block on a CPU: more do not fit its cache, and take twice the time (2,048 tokens, one thread)


class Block(NamedTuple):
    """Rows of q, of some heads of some samples, with the columns that any of them may see. heads: of q, kv_heads: theirs."""

    samples: slice
    heads: slice
    kv_heads: slice
    rows: slice
    columns: slice

    def of_queries(self, x: Tensor) -> Tensor:
        """The block's part of x [B, H, Sq, ...]."""
        return x[self.samples, self.heads, self.rows]

    def of_keys(self, x: Tensor) -> Tensor:
        """The block's part of x [B, H_kv, Sk, D]."""
        return x[self.samples, self.kv_heads, self.columns]

    def of_scores(self, x: Tensor) -> Tensor:
        """The block's part of x [B or 1, H or 1, Sq or 1, Sk or 1]; a dimension of 1 stays."""
        parts = (self.samples, self.heads, self.rows, self.columns)
        return x[tuple(slice(None) if n == 1 else part for n, part in zip(x.shape, parts, strict=True))]

    def of_slopes(self, x: Tensor) -> Tensor:
        """The block's part of x [B or 1, H]."""
        return x[slice(None) if x.shape[0] == 1 else self.samples, self.heads]

    def core(self, core: AttentionCore, q: Tensor) -> AttentionCore:
        """`core` of this part of q [B, H, Sq, D]: bounds that hide nothing in the block are left out."""
        H, Sq = q.shape[1:3]
        first, left, right = core.row_base + self.rows.start, *core.window
        columns = slice(core.column_base + self.columns.start, core.column_base + self.columns.stop)
        if left is not None and columns.start >= first + self.rows.stop - self.rows.start - 1 - left:
            left = None
        if right is not None and columns.stop - 1 <= first + right:
            right = None
        planes = core.planes or H
        return core._replace(
            window=(left, right),
            mask=None if core.mask is None else self.of_scores(core.mask),
            slopes=None if core.slopes is None else self.of_slopes(core.slopes),
            planes=planes,
            sinks=None if core.sinks is None else self.of_slopes(core.sinks),
            plane_base=core.plane_base + self.samples.start * planes + self.heads.start,
            max_q=core.max_q or Sq,
            row_base=first,
            column_base=columns.start,
        )


def block_bytes(q: Tensor, core: AttentionCore) -> float:
    """What a block may cost."""
    if core.workspace is None:
        return math.inf
    return min(core.workspace, CACHE) if q.is_cpu else core.workspace


def whole(q: Tensor, k: Tensor) -> Block:
    """Returns all rows and columns as one block."""
    (B, H, Sq, _), (_, H_kv, Sk, _) = q.shape, k.shape
    return Block(slice(0, B), slice(0, H), slice(0, H_kv), slice(0, Sq), slice(0, Sk))


def is_whole(blocks: list[Block], k: Tensor) -> bool:
    """Is it one block, of all columns?"""
    return len(blocks) == 1 and blocks[0].columns == slice(0, k.shape[2])


def query_blocks(
    q: Tensor,
    k: Tensor,
    core: AttentionCore,
    cost: Callable[[int, int, int], int],
    budget: float,
    rows: int,
    one_each: bool = False,
) -> Iterator[Block]:
    """Blocks of at most `rows` rows that cost at most `budget` bytes, or LEAST_ROWS rows of one head of k of one sample.

    cost(samples, heads of k and v, rows): the bytes of such a block. one_each: with one query head for each head of k.
    A function of shapes and of what forward saves in its options, so forward and recompute have the same blocks.
    """
    (B, H, Sq, _), (_, H_kv, Sk, _) = q.shape, k.shape
    samples, heads, rows = B, H_kv, min(rows, Sq)
    least = min(rows, ROWS)
    if cost(samples, heads, least) > max(budget, cost(1, heads, least)):
        samples = 1
    while cost(samples, heads, least) > max(budget, cost(samples, -(-heads // 2), least)):
        heads = -(-heads // 2)
    while rows > LEAST_ROWS and cost(samples, heads, rows) > budget:
        rows = max(LEAST_ROWS, -(-rows // 32) * 16)
    group, (left, right), shift = H // H_kv, core.window, core.row_base - core.column_base
    for b in range(0, B, samples):
        for h in range(0, H_kv, heads):
            last = min(h + heads, H_kv)
            for g in range(group if one_each else 1):
                of_q = slice(h * group + g, last * group, group if one_each else None)
                for first in range(0, Sq, rows):
                    end = min(first + rows, Sq)
                    # the columns that these rows may see; they begin at a multiple of 32, as dropout masks do
                    low = 0 if left is None else max(0, min(first + shift - left, Sk)) // 32 * 32
                    high = Sk if right is None else max(0, min(Sk, end + shift + right))
                    columns = slice(low, max(low, high))
                    yield Block(slice(b, min(b + samples, B)), of_q, slice(h, last), slice(first, end), columns)


def forward_by_blocks(
    function: Callable[..., tuple[Tensor, Tensor]],
    blocks: list[Block],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core: AttentionCore,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of all queries, by function(q, k, v, core) of each block's."""

    def of_block(block: Block) -> tuple[Tensor, Tensor]:
        return function(block.of_queries(q), block.of_keys(k), block.of_keys(v), block.core(core, q))

    if is_whole(blocks, k):
        return of_block(blocks[0])
    o, lse = empty_heads(q), q.new_empty(q.shape[:3], dtype=wide_dtype(q))
    for block in blocks:
        out, sums = of_block(block)
        block.of_queries(o).copy_(out)
        block.of_queries(lse).copy_(sums)
    return o, lse


def sum_by_blocks(
    function: Callable[[Block], Iterable[Tensor]], blocks: Iterable[Block], totals: tuple[Tensor, ...]
) -> None:
    """Writes to totals [B, H_kv, Sk, D] the gradients of k and v, sums over blocks of queries of function(block), in float32
    and rounded once."""
    for _, chunk in itertools.groupby(blocks, lambda block: (block.samples.start, block.kv_heads.start)):
        sums: list[Tensor] = []
        for block in chunk:
            places = [total[block.samples, block.kv_heads] for total in totals]
            sums = sums or [
                place.zero_() if place.dtype == wide_dtype(place) else torch.zeros_like(place, dtype=torch.float32)
                for place in places
            ]
            for total, part in zip(sums, function(block), strict=True):
                total[:, :, block.columns] += part
        for place, total in zip(places, sums, strict=True):
            if place is not total:
                place.copy_(total)
