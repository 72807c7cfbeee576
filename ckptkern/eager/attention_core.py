"""Core attention: scores, masks, dropout, a differentiable reference implementation, and the blocks of queries in which
scores are computed."""

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

LEAST_ROWS = 16  # the fewest rows of a block, whatever the workspace
ROWS = 256  # of a block when there are several: 128 and 512 take 3 % more time, 2,048 take 50 % more (one thread)
CACHE = 2**24  # bytes of a block on a CPU: larger blocks miss its cache, at twice the time (2,048 tokens, one thread)


class AttentionCore(NamedTuple):
    """Arguments of core attention other than q, k and v, shared by forward, recompute and backward on both backends.

    mask: int8 (0 = hidden, 1 = seen) or float, [B or 1, H or 1, Sq or 1, Sk or 1]. slopes: float32 [B or 1, H] (ALiBi).
    dropout = (state, threshold, scale, 0). window = (left, right), None for no bound; causal is (None, 0).
    plane_base, planes: head h of sample b has dropout mask plane_base + b * planes + h; planes 0 means H.
    sinks: [1, H] of any floating dtype, one logit per head in the softmax's denominator only. Launchers compute o and lse
    without sinks and `with_sinks` adds them; backward takes the o and lse that include sinks.
    cu_q, cu_k: int32 [B + 1], where packed sequences begin; q, k, v are then [1, H, total, D]. The window then counts rows
    from i = Sk - Sq, which aligns a sequence's last row with its last column.
    fused: the torch kernel that computes this core, a name in fused_attention.FUSED, or "". softcap: 0 for none.
    workspace: bytes for the scores of a block of queries (`query_blocks`), None for one block; kernels ignore it.
    row_base, column_base: the positions of the first row of q and of k in the sequence, for windows, slopes and dropout;
    max_q is then the number of rows of the whole sequence. Kernels need column_base = 0.
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

    def of_heads(self, first: int, count: int, H: int) -> AttentionCore:
        """Returns the core of heads [first, first + count) of H. Slopes are copied, to an address aligned as of all heads."""

        def own(tensor):
            return tensor if tensor is None or tensor.shape[1] == 1 else tensor.narrow(1, first, count)

        return self._replace(
            plane_base=self.plane_base + first,
            planes=self.planes or H,
            mask=own(self.mask),
            slopes=None if self.slopes is None else own(self.slopes).clone(),
            sinks=own(self.sinks),
        )


def empty_heads(q: Tensor) -> Tensor:
    """Returns an empty [B, H, S, D] tensor, not a view, whose memory layout is [B, S, H, D], as the output projection reads."""
    B, H, S, D = q.shape
    return q.new_empty_strided((B, H, S, D), (S * H * D, D, H * D, 1))


def heads_layout(x: Tensor) -> Tensor:
    """Returns x in the memory layout of `empty_heads`, without a copy if x has that layout."""
    _, H, S, D = x.shape
    return x if x.stride() == (S * H * D, D, H * D, 1) else empty_heads(x).copy_(x)


def as_heads(x: Tensor) -> Tensor:
    """Returns x in the memory layout of `empty_heads`, never as a view, so that an op's result is the same on each backend."""
    return heads_layout(x) if x._base is None else empty_heads(x).copy_(x)


def wide_dtype(x: Tensor) -> torch.dtype:
    return wide_of(x.dtype)


def wide(x: Tensor) -> Tensor:
    """Casts x to float32; float64 stays."""
    return x.to(wide_dtype(x))


def by_group(x: Tensor, H_kv: int) -> Tensor:
    """Reshapes [B, H, S, N] to [B, H_kv, (H / H_kv) S, N]: stacks the rows of the query heads that share a head of k and v."""
    B, H, S, N = x.shape
    return x if H_kv == H else x.reshape(B, H_kv, H // H_kv * S, N)


def attention_scores(q: Tensor, k: Tensor, core: AttentionCore) -> Tensor:
    """Returns the scores s [B, H, Sq, Sk] in float32 (float64 for float64), -inf where row i may not see column j."""
    return masked_scores(capped_scores(q, k, core), q, k, core)


def capped_scores(q: Tensor, k: Tensor, core: AttentionCore) -> Tensor:
    """Returns the scores before masks: scale q k^T, or softcap tanh(scale q k^T / softcap)."""
    s = torch.matmul(by_group(wide(q), k.shape[1]), wide(k).transpose(-1, -2))
    s = s.reshape(*q.shape[:3], k.shape[2]) * core.scale
    return torch.tanh(s / core.softcap) * core.softcap if core.softcap else s


def rows_and_columns(q: Tensor, k: Tensor, core: AttentionCore) -> tuple[Tensor, Tensor]:
    """Returns the positions i [Sq, 1] of rows and j [1, Sk] of columns, which windows and slopes use."""
    i = torch.arange(core.row_base, core.row_base + q.shape[2], device=q.device)[:, None]
    return i, torch.arange(core.column_base, core.column_base + k.shape[2], device=q.device)[None, :]


def masked_scores(s: Tensor, q: Tensor, k: Tensor, core: AttentionCore) -> Tensor:
    """Applies slopes, mask and window to the scores s."""
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
    """Splits tensors [B, H, S, ...] along S into parts of at least 16 rows. float32 copies of two tensors' parts fit the
    workspace."""
    if core.workspace is None or 0 in tensors[0].shape:
        return [tensors]
    B, H, S, D = tensors[0].shape
    rows = max(16, core.workspace // (12 * B * H * D))
    return [tensors] if rows >= S else zip(*(tensor.split(rows, 2) for tensor in tensors), strict=True)


def sink_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns exp(lse - logaddexp(lse, sink)) [B, H, S], the factor of a row's softmax weights once the sinks [1, H] are in its
    denominator; 0 in a row that sees nothing."""
    return torch.sigmoid(lse - sinks.to(lse.dtype)[..., None])


def with_sinks(o: Tensor, lse: Tensor, core: AttentionCore) -> tuple[Tensor, Tensor]:
    """Adds the sinks to the softmax's denominator: returns the new o [B, H, S, D], in place, and lse."""
    for part, share in by_rows(core, o, sink_share(lse, core.sinks)):
        part.mul_(share[..., None])
    return o, torch.logaddexp(lse, core.sinks.to(lse.dtype)[..., None])


def sink_gradient(lse: Tensor, delta: Tensor, sinks: Tensor) -> Tensor:
    """Returns the gradient of the sinks [1, H], -sum exp(sink - lse) delta over samples and rows; lse includes the sinks."""
    return -(torch.exp(sinks.to(lse.dtype)[..., None] - lse) * delta).sum((0, 2))


def attention_keep(q: Tensor, k: Tensor, core: AttentionCore) -> Tensor | None:
    state, threshold, *_ = core.dropout
    if state is None:
        return None
    (B, H, Sq, _), Sk = q.shape, k.shape[2]

    def planes(first, count):
        return torch.ops.ckptkern.keep_mask.default(
            state, threshold, count, Sq, Sk, first, core.row_base, core.column_base, core.max_q or Sq
        )

    if B <= 1 or core.planes in (0, H):
        return planes(core.plane_base, B * H).view(B, H, Sq, Sk)
    return torch.stack([planes(core.plane_base + b * core.planes, H) for b in range(B)])


def _softmax(s: Tensor, core: AttentionCore) -> Tensor:
    """Returns softmax(s) [B, H, Sq, Sk] with the sinks in the denominator, as GPT-OSS does: a column that is then dropped."""
    if core.sinks is None:
        return torch.softmax(s, -1)
    sinks = core.sinks.to(s.dtype)[..., None, None].expand(*s.shape[:3], 1)
    return torch.softmax(torch.cat((s, sinks), -1), -1)[..., :-1]


def attention_reference(q: Tensor, k: Tensor, v: Tensor, core: AttentionCore) -> Tensor:
    """Computes o in differentiable PyTorch ops. Rows that see nothing are zeros with zero gradients."""
    if kind := own_dispatch(
        (q, k, v, core.mask)
    ):  # torch's is the only attention op that a tensor subclass may implement
        causal, mask = core.window == (None, 0), core.mask
        unusual = core.slopes is not None or core.sinks is not None or core.cu_q is not None or core.softcap
        if unusual or not (causal or core.window == (None, None)):
            raise TypeError(
                f"attention of a {kind.__name__} takes no window, slopes, sinks, softcap or packed sequences"
            )
        mask = mask.bool() if mask is not None and mask.dtype == torch.int8 else mask
        if causal and mask is not None:
            raise TypeError(f"attention of a {kind.__name__} takes no mask together with is_causal")
        return F.scaled_dot_product_attention(
            q, k, v, mask, core.dropout[1] / 65536, causal, scale=core.scale, enable_gqa=k.shape[1] != q.shape[1]
        )
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
    """Computes p v [B, H, Sq, D] for p [B, H, Sq, Sk]."""
    return torch.matmul(by_group(p, v.shape[1]), v).reshape(*p.shape[:3], v.shape[3])


def is_packed(q: Tensor, core: AttentionCore) -> bool:
    """Returns whether q, k, v hold packed sequences. Meta tensors have no cu_seqlens to read, and results' shapes are equal."""
    return core.cu_q is not None and not q.is_meta


def _spans(cu: Tensor, longest: int, rows: int) -> list[slice]:
    """Returns the rows of each packed sequence, at most `longest`; one empty slice if there is no sequence."""
    bounds = cu.tolist()
    if bounds != sorted(bounds) or bounds[0] < 0 or bounds[-1] > rows:
        raise ValueError(f"packed sequences must begin in order and within 0..{rows}, but cu_seqlens is {bounds}")
    return [slice(a, min(b, a + longest)) for a, b in itertools.pairwise(bounds)] or [slice(0, 0)]


def each_sequence(function, core: AttentionCore, query_like: tuple, key_like: tuple, key_results: int = 0) -> tuple:
    """Calls `function(*query_like, *key_like, core)` for each packed sequence and joins the results along the rows.

    The last `key_results` results have the keys' rows, the others the queries'. Rows in no sequence are zeros. Query-like
    arguments and results may be None.
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
    joined = []
    for i, parts in enumerate(zip(*results, strict=True)):
        spans, total = (of_q, rows_q) if i < len(results[0]) - key_results else (of_k, rows_k)
        if parts[0] is None:
            joined.append(None)
            continue
        pieces, at = [], 0
        for part, span in zip((*parts, parts[0][:, :, :0]), (*spans, slice(total, total)), strict=True):
            pieces += [part.new_zeros((*part.shape[:2], span.start - at, *part.shape[3:])), part]
            at = span.stop
        joined.append(torch.cat(pieces, 2))
    return tuple(joined)


def readable(x: Tensor) -> bool:
    """Returns whether x has the layout that torch's kernels assume: inner stride 1 (other strides give wrong numbers) and, on a
    GPU, rows that do not overlap and begin at multiples of 16 bytes."""
    if not x.is_cuda:
        return x.stride(-1) == 1
    step = 16 // x.itemsize
    outer = [stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size != 1]
    return x.stride(-1) == 1 and all(n and n % step == 0 for n in outer) and x.storage_offset() % step == 0


def as_readable(x: Tensor) -> Tensor:
    return x if readable(x) else empty_heads(x).copy_(x)


def repeated_heads(x: Tensor, H: int) -> Tensor:
    """Repeats each head of k or v for the query heads that share it, to H heads."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], 1)


def summed_by_group(x: Tensor, H_kv: int) -> Tensor:
    """Sums gradients over the query heads that share a head of k or v: [B, H, S, D] -> [B, H_kv, S, D]."""
    return x if x.shape[1] == H_kv else x.unflatten(1, (H_kv, x.shape[1] // H_kv)).sum(2)


# -- blocks of queries, so that no [B, H, Sq, Sk] is stored ------------------------------------------------------------


class Block(NamedTuple):
    """A block of queries: rows of some heads (kv_heads of k and v) of some samples, and the columns that they may see."""

    samples: slice
    heads: slice
    kv_heads: slice
    rows: slice
    columns: slice

    def of_queries(self, x: Tensor) -> Tensor:
        """Returns the block's part of x [B, H, Sq, ...]."""
        return x[self.samples, self.heads, self.rows]

    def of_keys(self, x: Tensor) -> Tensor:
        """Returns the block's part of x [B, H_kv, Sk, D]."""
        return x[self.samples, self.kv_heads, self.columns]

    def of_scores(self, x: Tensor) -> Tensor:
        """Returns the block's part of x [B or 1, H or 1, Sq or 1, Sk or 1]; a dimension of 1 stays."""
        parts = (self.samples, self.heads, self.rows, self.columns)
        return x[tuple(slice(None) if n == 1 else part for n, part in zip(x.shape, parts, strict=True))]

    def of_slopes(self, x: Tensor) -> Tensor:
        """Returns the block's part of x [B or 1, H]."""
        return x[slice(None) if x.shape[0] == 1 else self.samples, self.heads]

    def core(self, core: AttentionCore, q: Tensor) -> AttentionCore:
        """Returns `core` for this part of q [B, H, Sq, D]; window bounds that hide nothing in the block are None."""
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
    """Returns the most transient bytes of a block."""
    if core.workspace is None:
        return math.inf
    return min(core.workspace, CACHE) if q.is_cpu else core.workspace


def whole(q: Tensor, k: Tensor) -> Block:
    """Returns one block of all rows and columns."""
    (B, H, Sq, _), (_, H_kv, Sk, _) = q.shape, k.shape
    return Block(slice(0, B), slice(0, H), slice(0, H_kv), slice(0, Sq), slice(0, Sk))


def is_whole(blocks: list[Block], k: Tensor) -> bool:
    """Returns whether there is a single block, of all columns."""
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
    """Yields blocks of at most `rows` rows and `budget` bytes, but at least LEAST_ROWS rows of one k head of one sample.

    cost(samples, heads of k and v, rows): the bytes of such a block. one_each: a block has one query head per head of k.
    The blocks depend on shapes and options only, so forward and recompute have the same blocks.
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
    """Computes o and lse of all queries: function(q, k, v, core) for each block."""
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
    """Sums function(block), the gradients of k and v, over blocks in float32, and writes them, rounded once, to `totals`
    [B, H_kv, Sk, D]."""
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
            part = None  # frees it before the next block's gradients are computed
        for place, total in zip(places, sums, strict=True):
            if place is not total:
                place.copy_(total)
