"""Core attention, forward and backward: the reference implementations of triton_kernels/attention.py, and torch's own
kernels for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..subclasses import own_dispatch
from .elementwise import NO_DROPOUT, Dropout, where_keep

_aten = torch.ops.aten


class AttentionCore(NamedTuple):
    """All arguments of core attention except q, k and v: shared by forward, recompute and backward, on both backends.

    mask: int8 (0 = hidden) or float, [B or 1, H or 1, Sq or 1, Sk or 1]; slopes float32 [B or 1, H] (ALiBi);
    dropout = (state, threshold, scale, 0); window = (left, right), None for no bound; causal is (None, 0).
    The mask of head h of sample b is that of plane plane_base + b * planes + h; planes 0 is H, for q with all heads.
    cu_q, cu_k: int32 [B + 1], where packed sequences begin; q, k, v are then [1, H, total, D]. The window then counts rows
    from i = Sk - Sq, which aligns a sequence's last row with its last column.
    fused: torch's own kernel that computes this core on a GPU ("cudnn", "flash"), "" for none. softcap: 0 for none.
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


def empty_heads(q: Tensor) -> Tensor:
    """An empty [B, H, S, D] whose memory is [B, S, H, D], as the output projection reads it; not a view."""
    B, H, S, D = q.shape
    return q.new_empty_strided((B, H, S, D), (S * H * D, D, H * D, 1))


def heads_layout(x: Tensor) -> Tensor:
    """x in the memory layout of `empty_heads`; x itself if it has that layout."""
    _, H, S, D = x.shape
    return x if x.stride() == (S * H * D, D, H * D, 1) else empty_heads(x).copy_(x)


def as_heads(x: Tensor) -> Tensor:
    """As `heads_layout`, but never a view of another tensor: what an op returns must not depend on the backend."""
    return heads_layout(x) if x._base is None else empty_heads(x).copy_(x)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _heads(x: Tensor, H: int) -> Tensor:
    """k or v with each head repeated for the query heads that read it, H in all."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], 1)


def attention_scores(q: Tensor, k: Tensor, core: AttentionCore) -> Tensor:
    """s [B, H, Sq, Sk] in float32 (float64 for float64), -inf where row i may not see column j."""
    return masked_scores(capped_scores(q, k, core), q, k, core)


def capped_scores(q: Tensor, k: Tensor, core: AttentionCore) -> Tensor:
    """The scores that every column would have if it were seen: scale q k^T, or softcap tanh(scale q k^T / softcap)."""
    s = torch.matmul(_wide(q), _wide(_heads(k, q.shape[1])).transpose(-1, -2)) * core.scale
    return torch.tanh(s / core.softcap) * core.softcap if core.softcap else s


def masked_scores(s: Tensor, q: Tensor, k: Tensor, core: AttentionCore) -> Tensor:
    """s with slopes, mask and window."""
    i = torch.arange(q.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)[None, :]
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


def _attention_keep(q: Tensor, k: Tensor, core: AttentionCore) -> Tensor | None:
    state, threshold, *_ = core.dropout
    if state is None:
        return None
    (B, H, Sq, _), Sk = q.shape, k.shape[2]

    def planes(first: int, count: int) -> Tensor:
        return torch.ops.ckptkern.keep_mask.default(state, threshold, count, Sq, Sk, first, 0, 0, core.max_q or Sq)

    if core.planes in (0, H):
        return planes(core.plane_base, B * H).view(B, H, Sq, Sk)
    return torch.stack([planes(core.plane_base + b * core.planes, H) for b in range(B)])


def attention_weights(q: Tensor, k: Tensor, core: AttentionCore) -> Tensor:
    """p = dropout(softmax(s)) [B, H, Sq, Sk] in float32 (float64 for float64), differentiable.

    Rows that see nothing are zeros with zero gradients.
    """
    s = attention_scores(q, k, core)
    if core.mask is None and core.window == (None, None):
        p = torch.softmax(s, -1)
    else:
        hidden = s == -math.inf
        p = torch.softmax(s.masked_fill(hidden.all(-1, keepdim=True), 0.0), -1).masked_fill(hidden, 0.0)
    keep = _attention_keep(q, k, core)
    return p if keep is None else torch.where(keep, p * core.dropout[2], 0.0)


def attention_reference(q: Tensor, k: Tensor, v: Tensor, core: AttentionCore) -> Tensor:
    """o in differentiable PyTorch ops."""
    if kind := own_dispatch((q, k, v, core.mask)):
        return _attention_of(kind, q, k, v, core)
    if _is_packed(q, core):
        return _packed(lambda q, k, v, c: (attention_reference(q, k, v, c),), core, (q,), (k, v))[0]
    return torch.matmul(attention_weights(q, k, core).to(v.dtype), _heads(v, q.shape[1]))


def _attention_of(kind: type, q: Tensor, k: Tensor, v: Tensor, core: AttentionCore) -> Tensor:
    """o by torch's scaled_dot_product_attention, the only attention that a tensor subclass may implement."""
    causal = core.window == (None, 0)
    if core.slopes is not None or core.cu_q is not None or core.softcap or not (causal or core.window == (None, None)):
        raise TypeError(f"attention of a {kind.__name__} takes no window, slopes, softcap or packed sequences")
    mask = core.mask.bool() if core.mask is not None and core.mask.dtype == torch.int8 else core.mask
    if causal and mask is not None:
        raise TypeError(f"attention of a {kind.__name__} takes no mask together with is_causal")
    return F.scaled_dot_product_attention(
        q, k, v, mask, core.dropout[1] / 65536, causal, scale=core.scale, enable_gqa=k.shape[1] != q.shape[1]
    )


class FusedAttention(NamedTuple):
    """One of torch's own attention kernels, without dropout and without a mask other than the causal one.

    forward: q, k, v, causal, scale -> o, lse. backward: do, q, k, v, o, lse [B, H, Sq], causal, scale -> dq, dk, dv.
    """

    forward: Callable[..., tuple]
    backward: Callable[..., tuple]
    grouped: bool  # takes fewer heads of k and v than of q, without repeating them


def _as_tokens(x: Tensor) -> Tensor:
    """Heads [B, H, S, D] with a token's heads adjacent in memory, as projections give them."""
    return x if x.stride(2) >= x.stride(1) else empty_heads(x).copy_(x)


def _cudnn_fwd(q, k, v, causal, scale):
    q, k, v = map(_as_tokens, (q, k, v))
    o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return o, lse.squeeze(-1)


def _cudnn_bwd(do, q, k, v, o, lse, causal, scale):
    """torch caches cuDNN's graphs by the layout of q, k and v alone. A cached graph reads do and o in the layout that they had
    in its first call, so all our calls use one layout, that of torch's own calls with such q, k and v."""
    q, k, v, o, do = *map(_as_tokens, (q, k, v)), heads_layout(o), heads_layout(do)
    no_dropout = lse.new_empty((), dtype=torch.int64)
    return _aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse.unsqueeze(-1), no_dropout, no_dropout, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale,
    )  # fmt: skip


def _flash_bwd(do, q, k, v, o, lse, causal, scale):
    no_dropout = lse.new_empty(2, dtype=torch.uint64)
    return _aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, no_dropout, no_dropout, scale=scale
    )


def _cpu_bwd(do, q, k, v, o, lse, causal, scale):
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, o, lse, 0.0, causal, scale=scale)


FUSED = {
    "cudnn": FusedAttention(
        _cudnn_fwd,
        _cudnn_bwd,
        True,
    ),
    "flash": FusedAttention(
        lambda q, k, v, causal, scale: _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2],
        _flash_bwd,
        True,
    ),
    "cpu": FusedAttention(
        lambda q, k, v, causal, scale: _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        ),
        _cpu_bwd,
        False,
    ),
}


def fused_kernel(q: Tensor, k: Tensor, core: AttentionCore) -> str:
    """The key in FUSED of torch's own kernel that computes this core, and its gradients from o and lse; "" for none."""
    if core.fused:
        return core.fused
    covered = (
        q.device.type == "cpu"
        and q.dtype != torch.float16 and core.cu_q is None
        and core.mask is None and core.slopes is None and core.dropout[0] is None and not core.softcap
        and core.window in ((None, None), (None, 0))
        and (core.scale > 0 or core.window == (None, None))  # torch's hides a score by -inf before it scales
        and 0 not in (*q.shape, *k.shape)
    )  # fmt: skip
    return "cpu" if covered else ""


def readable(x: Tensor) -> bool:
    """Does x have the layout that torch's kernels assume? Inner stride 1 (with another they give wrong numbers) and, on a
    GPU, rows that are not repeated and begin at multiples of 16 bytes."""
    if not x.is_cuda:
        return x.stride(-1) == 1
    step = 16 // x.element_size()
    outer = [stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size != 1]
    return x.stride(-1) == 1 and all(n and n % step == 0 for n in outer) and x.storage_offset() % step == 0


def _as_readable(x: Tensor) -> Tensor:
    return x if (readable(x) if x.is_cuda else x.stride(-1) == 1) else empty_heads(x).copy_(x)


def _is_packed(q: Tensor, core: AttentionCore) -> bool:
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


def _packed(function, core: AttentionCore, query_like: tuple, key_like: tuple, key_results: int = 0) -> tuple:
    """`function(query-like..., key-like..., core)` of each packed sequence, its results joined along the rows.

    The last `key_results` results have the rows of keys, the others those of queries. Rows in no sequence are zeros.
    """
    row_spans = _spans(core.cu_q, core.max_q, query_like[0].shape[2])
    column_spans = _spans(core.cu_k, core.max_k, key_like[0].shape[2])
    results = []
    for b, (rows, columns) in enumerate(zip(row_spans, column_spans, strict=True)):
        below = (columns.stop - columns.start) - (rows.stop - rows.start)  # the last row sees the last column
        left, right = core.window
        window = (None if left is None else left - below, None if right is None else right + below)
        own = core._replace(
            cu_q=None, cu_k=None, window=window, plane_base=core.plane_base + b * (core.planes or query_like[0].shape[1]),
            slopes=None if core.slopes is None else core.slopes[b % core.slopes.shape[0]][None],
        )  # fmt: skip
        results.append(function(*(x[:, :, rows] for x in query_like), *(x[:, :, columns] for x in key_like), own))
    by_result = list(zip(*results, strict=True))
    first_key = len(by_result) - key_results
    return tuple(
        _joined(parts, row_spans, query_like[0].shape[2])
        if i < first_key
        else _joined(parts, column_spans, key_like[0].shape[2])
        for i, parts in enumerate(by_result)
    )


def _probabilities(s: Tensor, lse: Tensor) -> Tensor:
    """softmax(s), zeros in a row that sees nothing. exp(s - lse) is worse: for large scores lse loses log(sum) to rounding."""
    return torch.softmax(s, -1).masked_fill((lse == -math.inf)[..., None], 0.0)


def attn_fwd(q, k, v, core: AttentionCore, *, do=None):
    if _is_packed(q, core):
        if do is None:
            o, lse = _packed(lambda q, k, v, c: attn_fwd(q, k, v, c)[:2], core, (q,), (k, v))
            return o, lse, None
        return _packed(lambda q, do, k, v, c: attn_fwd(q, k, v, c, do=do), core, (q, do), (k, v))
    fused = fused_kernel(q, k, core)
    if fused:
        H = k.shape[1] if FUSED[fused].grouped else q.shape[1]
        o, lse = FUSED[fused].forward(
            *map(_as_readable, (q, _heads(k, H), _heads(v, H))), core.window[1] is not None, core.scale
        )
        lse = lse.contiguous()  # aten lays it out as [B, S, H] on a CPU
    else:
        s = attention_scores(q, k, core)
        lse = torch.logsumexp(s, -1)
        p = _probabilities(s, lse)
        keep = _attention_keep(q, k, core)
        if keep is not None:
            p = where_keep(p, keep).mul_(core.dropout[2])
        o = torch.matmul(p.to(v.dtype), _heads(v, q.shape[1]))
    return o, lse, None if do is None else attn_delta(o, do, core)


def attn_delta(o, do, core: AttentionCore):
    return (_wide(o) * _wide(do)).sum(-1)


def _summed_by_group(x: Tensor, H_kv: int) -> Tensor:
    """[B, H, S, D] -> [B, H_kv, S, D]: gradients of a key's or value's head from those of the query heads that share it."""
    return x if x.shape[1] == H_kv else x.unflatten(1, (H_kv, x.shape[1] // H_kv)).sum(2)


def fused_attn_bwd(q, k, v, do, o, lse, core: AttentionCore, fused: str, *, need_dq=True, need_dkv=True):
    """(dq, dk, dv) by torch's own kernel `fused`, which reads o instead of delta."""
    H_kv = k.shape[1]
    heads = H_kv if FUSED[fused].grouped else q.shape[1]
    dq, dk, dv = FUSED[fused].backward(
        *map(_as_readable, (do, q, _heads(k, heads), _heads(v, heads), o)), lse, core.window[1] is not None, core.scale
    )
    dkv = (_summed_by_group(dk, H_kv), _summed_by_group(dv, H_kv)) if need_dkv else (None, None)
    return (dq if need_dq else None), *dkv


def _score_gradients(q, k, v, do, lse, delta, core: AttentionCore) -> tuple[Tensor, Tensor, Tensor]:
    """(scores before masks, dropout(p), ds) [B, H, Sq, Sk]; ds is the gradient of the scores after softcap and masks."""
    s = capped_scores(q, k, core)
    p = _probabilities(masked_scores(s, q, k, core), lse)
    dp = torch.matmul(_wide(do), _wide(_heads(v, q.shape[1])).transpose(-1, -2))
    keep = _attention_keep(q, k, core)
    dropped = p
    if keep is not None:
        dropped, dp = (where_keep(t, keep).mul_(core.dropout[2]) for t in (p, dp))
    return s, dropped, p * (dp - delta[..., None])


def attn_bwd(q, k, v, do, lse, delta, core: AttentionCore, *, need_dq=True, need_dkv=True, dq=None, dk=None, dv=None):
    """(dq, dk, dv) from lse and delta, written into the given tensors or into new ones."""

    def written(value: Tensor, like: Tensor, out: Tensor | None) -> Tensor:
        return value.to(like.dtype) if out is None else out.copy_(value)

    if _is_packed(q, core):

        def one(q, do, lse, delta, k, v, own):
            return attn_bwd(q, k, v, do, lse, delta, own, need_dq=need_dq, need_dkv=need_dkv)

        made = _packed(one, core, (q, do, lse, delta), (k, v), key_results=2)
        outs = zip(made, (q, k, v), (dq, dk, dv), strict=True)
        return tuple(None if value is None else written(value, like, out) for value, like, out in outs)
    H, H_kv = q.shape[1], k.shape[1]
    s, dropped, ds = _score_gradients(q, k, v, do, lse, delta, core)
    if core.softcap:
        ds = ds * (1 - (s / core.softcap).square())
    if need_dq:
        dq = written(torch.matmul(ds, _wide(_heads(k, H))) * core.scale, q, dq)
    if need_dkv:
        dk = written(_summed_by_group(torch.matmul(ds.transpose(-1, -2), _wide(q)) * core.scale, H_kv), k, dk)
        dv = written(_summed_by_group(torch.matmul(dropped.transpose(-1, -2), _wide(do)), H_kv), v, dv)
    return (dq if need_dq else None), *((dk, dv) if need_dkv else (None, None))


def attn_dmask(q, k, v, do, lse, delta, core: AttentionCore, shape):
    """The gradient [B or 1, H or 1, Sq or 1, Sk or 1] of what was added to the scores, in float32 (float64 for float64).

    shape: its own; dimensions of 1 are summed over. core.mask may be larger: that of a sum of several masks.
    """
    return _score_gradients(q, k, v, do, lse, delta, core)[2].sum_to_size(shape)
