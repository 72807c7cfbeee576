"""The core of attention as it is defined: scores, what hides them, the dropout mask, and o in differentiable PyTorch ops; and
the blocks of queries in which scores are written out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..subclasses import own_dispatch
from .elementwise import NO_DROPOUT, Dropout, wide_of

LEAST_ROWS = 16  # of a block, whatever the workspace
ROWS = 256  # of a block where something is cut: 128 and 512 take 3 % more time, 2,048 half as much again (one thread)
CACHE = (
    2**24
)  # bytes of a block on a CPU: more do not fit its cache, and take twice the time (2,048 tokens, one thread)


class AttentionCore(NamedTuple):
    """All arguments of an attention core except q, k and v: shared by forward, recompute and backward, on both backends.

    mask: int8 (0 = hidden, 1 = seen) or float, [B or 1, H or 1, Sq or 1, Sk or 1]; slopes float32 [B or 1, H] (ALiBi);
    dropout = (state, threshold, scale, 0); window = (left, right), None for no bound; causal is (None, 0).
    The mask of head h of sample b is that of plane plane_base + b * planes + h; planes 0 is H, for q with all heads.
    sinks: [1, H] of any floating dtype, a logit of each head that takes part in the softmax's denominator alone. Launchers form
    o and lse without them, which `with_sinks` then changes; gradients are formed from the changed ones.
    cu_q, cu_k: int32 [B + 1], where packed sequences begin; q, k, v are then [1, H, total, D]. The window then counts rows
    from i = Sk - Sq, which aligns a sequence's last row with its last column.
    fused: torch's own kernel that computes this core, a name in fused_attention.FUSED, "" for none. softcap: 0 for none.
    workspace: bytes for the scores of a block of queries (`query_blocks`), None for all at once; kernels need none.
    row_base, column_base: where q and k begin among a sequence's rows, which windows, slopes and dropout count from; max_q is
    then the rows of the whole. Kernels take all columns: a column_base of 0.
    """

    scale: float
    precision: str
    window: tuple[int | None, int | None] = (None, None)
    mask: Tensor | None = None
    slopes: Tensor | None = None
    dropout: Dropout = NO_DROPOUT
    plane_base: int = 0
    planes: int = 0
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    max_q: int = 0
    max_k: int = 0
    fused: str = ""
    softcap: float = 0.0
    workspace: int | None = None
    row_base: int = 0
    column_base: int = 0
    sinks: Tensor | None = None


def empty_heads(q: Tensor) -> Tensor:
    """An empty [B, H, S, D] whose memory is [B, S, H, D], as the output projection reads it; not a view."""
    B, H, S, D = q.shape
    return q.new_empty_strided((B, H, S, D), (S * H * D, D, H * D, 1))


def heads_layout(x: Tensor) -> Tensor:
    """x in the memory layout of `empty_heads`; x itself if it has that layout."""
    _, H, S, D = x.shape
    return x if x.stride() == (S * H * D, D, H * D, 1) else empty_heads(x).copy_(x)


def as_heads(x: Tensor) -> Tensor:
    """Lays x out as `heads_layout`, but never a view of another tensor: what an op returns must not depend on the backend."""
    return heads_layout(x) if x._base is None else empty_heads(x).copy_(x)


def wide_dtype(x: Tensor) -> torch.dtype:
    return wide_of(x.dtype)


def wide(x: Tensor) -> Tensor:
    """x in float32; float64 stays."""
    return x.to(wide_dtype(x))


def by_group(x: Tensor, H_kv: int) -> Tensor:
    """[B, H, S, N] as [B, H_kv, H / H_kv S, N]: below each other the rows of all query heads that read a head of k and v."""
    B, H, S, N = x.shape
    return x if H_kv == H else x.reshape(B, H_kv, H // H_kv * S, N)


def by_head(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The opposite of `by_group`."""
    return x if x.shape == shape else x.reshape(shape)


def attention_scores(q: Tensor, k: Tensor, core: AttentionCore) -> Tensor:
    """s [B, H, Sq, Sk] in float32 (float64 for float64), -inf where row i may not see column j."""
    return masked_scores(capped_scores(q, k, core), q, k, core)


def capped_scores(q: Tensor, k: Tensor, core: AttentionCore) -> Tensor:
    """The scores that every column would have if it were seen: scale q k^T, or softcap tanh(scale q k^T / softcap)."""
    s = torch.matmul(by_group(wide(q), k.shape[1]), wide(k).transpose(-1, -2))
    s = by_head(s, (*q.shape[:3], k.shape[2])) * core.scale
    return torch.tanh(s / core.softcap) * core.softcap if core.softcap else s


def rows_and_columns(q: Tensor, k: Tensor, core: AttentionCore) -> tuple[Tensor, Tensor]:
    """(i [Sq, 1], j [1, Sk]), as windows and slopes count them."""
    i = torch.arange(core.row_base, core.row_base + q.shape[2], device=q.device)[:, None]
    return i, torch.arange(core.column_base, core.column_base + k.shape[2], device=q.device)[None, :]


def masked_scores(s: Tensor, q: Tensor, k: Tensor, core: AttentionCore) -> Tensor:
    """s with slopes, mask and window."""
    i, j = rows_and_columns(q, k, core)
    if core.slopes is not None:
        s = s - core.slopes.to(s.dtype)[:, :, None, None] * (i - j).abs()
    if core.mask is not None:
        s = s.masked_fill(core.mask == 0, -math.inf) if core.mask.dtype == torch.int8 else s + core.mask.to(s.dtype)
    left, right = core.window
    if left is not None:
        s = s.masked_fill(j < i - left, -math.inf)
    if right is not None:
        s = s.masked_fill(j > i + right, -math.inf)
    return s


def by_rows(core: AttentionCore, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Parts of tensors [B, H, S, ...] along S, of which float32 copies of the first two fit the workspace; 16 rows at least."""
    if core.workspace is None or 0 in tensors[0].shape:
        return [tensors]
    B, H, S, D = tensors[0].shape
    rows = max(16, core.workspace // (12 * B * H * D))
    return [tensors] if rows >= S else zip(*(one.split(rows, 2) for one in tensors), strict=True)


def sink_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """exp(lse - logaddexp(lse, sink)) [B, H, S]: what a softmax's weights are multiplied by beside the sinks [1, H]; 0 in a row
    that sees nothing."""
    return torch.sigmoid(lse - sinks.to(lse.dtype)[..., None])


def with_sinks(o: Tensor, lse: Tensor, core: AttentionCore) -> tuple[Tensor, Tensor]:
    """(o, lse) of a softmax whose denominator has the sinks, too, from those without. o [B, H, S, D] is overwritten."""
    for part, share in by_rows(core, o, sink_share(lse, core.sinks)):
        part.mul_(share[..., None])
    return o, torch.logaddexp(lse, core.sinks.to(lse.dtype)[..., None])


def sink_gradient(lse: Tensor, delta: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of sinks [1, H], -sum exp(sink - lse) delta over samples and rows, from the lse that has them."""
    return -(torch.exp(sinks.to(lse.dtype)[..., None] - lse) * delta).sum((0, 2))


def attention_keep(q: Tensor, k: Tensor, core: AttentionCore) -> Tensor | None:
    state, threshold, *_ = core.dropout
    if state is None:
        return None
    (B, H, Sq, _), Sk = q.shape, k.shape[2]

    def planes(first: int, count: int) -> Tensor:
        return torch.ops.ckptkern.keep_mask.default(
            state, threshold, count, Sq, Sk, first, core.row_base, core.column_base, core.max_q or Sq
        )

    if B <= 1 or core.planes in (0, H):
        return planes(core.plane_base, B * H).view(B, H, Sq, Sk)
    return torch.stack([planes(core.plane_base + b * core.planes, H) for b in range(B)])


def _softmax(s: Tensor, core: AttentionCore) -> Tensor:
    """softmax(s) [B, H, Sq, Sk], in whose denominator the sinks take part, as in GPT-OSS: a column that is left out again."""
    if core.sinks is None:
        return torch.softmax(s, -1)
    sinks = core.sinks.to(s.dtype)[..., None, None].expand(*s.shape[:3], 1)
    return torch.softmax(torch.cat((s, sinks), -1), -1)[..., :-1]


def attention_reference(q: Tensor, k: Tensor, v: Tensor, core: AttentionCore) -> Tensor:
    """o in differentiable PyTorch ops. Rows that see nothing are zeros with zero gradients."""
    if kind := own_dispatch((q, k, v, core.mask)):
        return _attention_of(kind, q, k, v, core)
    if is_packed(q, core):
        return each_sequence(lambda q, k, v, own: (attention_reference(q, k, v, own),), core, (q,), (k, v))[0]
    s = attention_scores(q, k, core)
    if core.mask is None and core.window == (None, None):
        p = _softmax(s, core)
    else:
        hidden = s == -math.inf
        p = _softmax(s.masked_fill(hidden.all(-1, keepdim=True), 0.0), core).masked_fill(hidden, 0.0)
    keep = attention_keep(q, k, core)
    p = p if keep is None else torch.where(keep, p * core.dropout[2], 0.0)
    return weighted_sum(p.to(v.dtype), v)


def weighted_sum(p: Tensor, v: Tensor) -> Tensor:
    """p v [B, H, Sq, D] of p [B, H, Sq, Sk]."""
    return by_head(torch.matmul(by_group(p, v.shape[1]), v), (*p.shape[:3], v.shape[3]))


def _attention_of(kind: type, q: Tensor, k: Tensor, v: Tensor, core: AttentionCore) -> Tensor:
    """o by torch's scaled_dot_product_attention, the only attention that a tensor subclass may implement."""
    causal = core.window == (None, 0)
    unusual = core.slopes is not None or core.sinks is not None or core.cu_q is not None or core.softcap
    if unusual or not (causal or core.window == (None, None)):
        raise TypeError(f"attention of a {kind.__name__} takes no window, slopes, sinks, softcap or packed sequences")
    mask = core.mask.bool() if core.mask is not None and core.mask.dtype == torch.int8 else core.mask
    if causal and mask is not None:
        raise TypeError(f"attention of a {kind.__name__} takes no mask together with is_causal")
    return F.scaled_dot_product_attention(
        q, k, v, mask, core.dropout[1] / 65536, causal, scale=core.scale, enable_gqa=k.shape[1] != q.shape[1]
    )


def is_packed(q: Tensor, core: AttentionCore) -> bool:
    """Do q, k, v hold several sequences? On meta tensors nobody knows where they begin, and the results' shape is the same."""
    return core.cu_q is not None and not q.is_meta


def _spans(cu: Tensor, longest: int, rows: int) -> list[slice]:
    """The rows of each packed sequence, at most `longest`; one empty slice if there is no sequence."""
    bounds = cu.tolist()
    if bounds != sorted(bounds) or bounds[0] < 0 or bounds[-1] > rows:
        raise ValueError(f"packed sequences must begin in order and within 0..{rows}, but cu_seqlens is {bounds}")
    return [slice(a, min(b, a + longest)) for a, b in itertools.pairwise(bounds)] or [slice(0, 0)]


def _joined(parts: tuple, spans: list[slice], rows: int) -> Tensor | None:
    """parts [1, H, length, ...] at their spans of `rows` rows, zeros between and after them."""
    if parts[0] is None:
        return None
    pieces, at = [], 0
    for part, span in zip(parts, spans, strict=True):
        pieces += [part.new_zeros((*part.shape[:2], span.start - at, *part.shape[3:])), part]
        at = span.stop
    pieces.append(part.new_zeros((*part.shape[:2], rows - at, *part.shape[3:])))
    return torch.cat(pieces, 2)


def each_sequence(function, core: AttentionCore, query_like: tuple, key_like: tuple, key_results: int = 0) -> tuple:
    """`function(query-like..., key-like..., core)` of each packed sequence, its results joined along the rows.

    The last `key_results` results have the rows of keys, the others those of queries. Rows in no sequence are zeros. What is
    like a query, and a result, may be None.
    """
    rows_q, rows_k = query_like[0].shape[2], key_like[0].shape[2]
    of_q, of_k = _spans(core.cu_q, core.max_q, rows_q), _spans(core.cu_k, core.max_k, rows_k)
    results = []
    for b, (rows, columns) in enumerate(zip(of_q, of_k, strict=True)):
        below = (columns.stop - columns.start) - (rows.stop - rows.start)  # the last row sees the last column
        left, right = core.window
        own = core._replace(
            cu_q=None,
            cu_k=None,
            window=(None if left is None else left - below, None if right is None else right + below),
            plane_base=core.plane_base + b * (core.planes or query_like[0].shape[1]),
            slopes=None if core.slopes is None else core.slopes[b % core.slopes.shape[0]][None],
        )
        queries = (None if x is None else x[:, :, rows] for x in query_like)
        results.append(function(*queries, *(x[:, :, columns] for x in key_like), own))
    of_keys = len(results[0]) - key_results
    return tuple(
        _joined(parts, of_q, rows_q) if i < of_keys else _joined(parts, of_k, rows_k)
        for i, parts in enumerate(zip(*results, strict=True))
    )


def readable(x: Tensor) -> bool:
    """Does x have the layout that torch's kernels assume? Inner stride 1 (with another they give wrong numbers) and, on a
    GPU, rows that are not repeated and begin at multiples of 16 bytes."""
    if not x.is_cuda:
        return x.stride(-1) == 1
    step = 16 // x.element_size()
    outer = [stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size != 1]
    return x.stride(-1) == 1 and all(n and n % step == 0 for n in outer) and x.storage_offset() % step == 0


def as_readable(x: Tensor) -> Tensor:
    return x if readable(x) else empty_heads(x).copy_(x)


def repeated_heads(x: Tensor, H: int) -> Tensor:
    """k or v with each head repeated for the query heads that read it, H in all."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], 1)


def summed_by_group(x: Tensor, H_kv: int) -> Tensor:
    """[B, H, S, D] -> [B, H_kv, S, D]: gradients of a key's or value's head from those of the query heads that share it."""
    return x if x.shape[1] == H_kv else x.unflatten(1, (H_kv, x.shape[1] // H_kv)).sum(2)


# -- blocks of queries: no [B, H, Sq, Sk] is ever written out ----------------------------------------------------------


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
    if is_whole(blocks, k):
        return function(q, k, v, blocks[0].core(core, q))
    o, lse = empty_heads(q), q.new_empty(q.shape[:3], dtype=wide_dtype(q))
    for block in blocks:
        out, sums = function(block.of_queries(q), block.of_keys(k), block.of_keys(v), block.core(core, q))
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
            part = None  # freed before the next block's gradients are made
        for place, total in zip(places, sums, strict=True):
            if place is not total:
                place.copy_(total)
