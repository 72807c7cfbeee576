"""The core of attention, forward and backward: the launchers of triton_kernels/attention.py in PyTorch ops.

Scores, and all that is made of them, are written out for a block of queries at a time, as many as fit the workspace.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .attention_core import (
    ROWS,
    AttentionCore,
    Block,
    attention_keep,
    attention_scores,
    block_bytes,
    by_group,
    by_head,
    by_rows,
    capped_scores,
    each_sequence,
    forward_by_blocks,
    is_packed,
    masked_scores,
    query_blocks,
    rows_and_columns,
    sink_share,
    sum_by_blocks,
    weighted_sum,
    whole,
    wide,
    wide_dtype,
)
from .elementwise import where_keep
from .fused_attention import flash_bwd, flash_fwd, flash_on_cpu, fused_attn_bwd, fused_attn_fwd

FLOATS = 6  # that are alive for each score in backward, the most


def _score_blocks(q: Tensor, k: Tensor, core: AttentionCore) -> list[Block]:
    """All at once where scores fit, else blocks of queries."""
    (B, H, Sq, D), (_, H_kv, Sk, _) = q.shape, k.shape
    if 0 in (*q.shape, *k.shape):
        return [whole(q, k)]
    budget, size = block_bytes(q, core), wide_dtype(q).itemsize
    upcast = 0 if q.dtype == wide_dtype(q) else 4 * size  # k, v, and the sums of their gradients

    def cost(samples: int, heads: int, rows: int) -> int:
        return samples * heads * Sk * (H // H_kv * rows * (FLOATS * size + 2) + D * upcast)

    return [whole(q, k)] if cost(B, H_kv, Sq) <= budget else list(query_blocks(q, k, core, cost, budget, ROWS))


def attn_fwd(q, k, v, core: AttentionCore, *, do=None):
    if core.fused:
        o, lse = fused_attn_fwd(q, k, v, core)
    elif is_packed(q, core):
        return each_sequence(lambda q, do, k, v, own: attn_fwd(q, k, v, own, do=do), core, (q, do), (k, v))
    elif flash_on_cpu(q, k, core):
        o, lse = flash_fwd(q, k, v, core)
    else:
        o, lse = forward_by_blocks(_block_fwd, _score_blocks(q, k, core), q, k, v, core)
    return o, lse, None if do is None else attn_delta(o, do, core)


def _block_fwd(q, k, v, core: AttentionCore) -> tuple[Tensor, Tensor]:
    s = attention_scores(q, k, core)
    lse = torch.logsumexp(s, -1)
    p = _probabilities(s, core)
    del s
    keep = attention_keep(q, k, core)
    if keep is not None:
        p = where_keep(p, keep).mul_(core.dropout[2])
    return weighted_sum(p.to(v.dtype), v), lse


def _probabilities(s: Tensor, core: AttentionCore) -> Tensor:
    """softmax(s), zeros in a row that sees nothing. exp(s - lse) is worse: for large scores lse loses log(sum) to rounding."""
    p = torch.softmax(s, -1)
    if core.mask is None and core.window == (None, None):
        return p
    return p.masked_fill_((s == -math.inf).all(-1, keepdim=True), 0.0)


def attn_delta(o, do, core: AttentionCore):
    parts = [(wide(one) * wide(other)).sum(-1) for one, other in by_rows(core, o, do)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _score_gradients(q, k, v, do, delta, core: AttentionCore) -> tuple[Tensor, Tensor, Tensor]:
    """What a block of scores gives [B, H, Sq, Sk]: dropout(p), the gradient ds of the scores after softcap and masks, and that
    of the scores before the softcap."""
    s = capped_scores(q, k, core)
    slope = 1 - (s / core.softcap).square() if core.softcap else None
    s = masked_scores(s, q, k, core)
    p = _probabilities(s, core)
    if core.sinks is not None:
        p.mul_(sink_share(torch.logsumexp(s, -1), core.sinks)[..., None])
    del s
    dp = by_head(torch.matmul(by_group(wide(do), v.shape[1]), wide(v).transpose(-1, -2)), p.shape)
    keep = attention_keep(q, k, core)
    dropped = p
    if keep is not None:
        dropped, dp = (where_keep(t, keep).mul_(core.dropout[2]) for t in (p, dp))
    ds = dp.sub_(delta[..., None]).mul_(p)
    return dropped, ds, ds if slope is None else slope.mul_(ds)


def attn_grads(
    q,
    k,
    v,
    do,
    o,
    lse,
    core: AttentionCore,
    *,
    delta=None,
    need_dq=True,
    need_dkv=True,
    dmask_shape=None,
    need_dslopes=False,
    outs=(None, None, None),
) -> tuple:
    """(dq, dk, dv, dmask, dslopes): all gradients from o and lse in one pass over the scores; None for what is not needed.

    outs: tensors that dq, dk and dv are written to; torch's own kernels may make new ones instead. dmask_shape: of the mask
    that trains; dimensions of 1 are summed over, and core.mask may be larger: that of a sum of several masks.
    """
    of_scores, needs = dmask_shape is not None or need_dslopes, {"need_dq": need_dq, "need_dkv": need_dkv}
    if core.fused:
        made = fused_attn_bwd(q, k, v, do, o, lse, core)
    elif is_packed(q, core):
        made = each_sequence(
            lambda q, do, o, lse, k, v, own: attn_grads(q, k, v, do, o, lse, own, **needs)[:3],
            core,
            (q, do, o, lse),
            (k, v),
            key_results=2,
        )
    # Where lse has lost log(sum) to rounding, probabilities, which flash attention's backward takes from it, are wrong by a
    # factor: with large scores, and in a row that sees nothing but columns that a large finite number hides.
    elif not of_scores and flash_on_cpu(q, k, core) and not (lse.abs() > 2**10).any():
        made = flash_bwd(q, k, v, do, o, lse, core, outs)
    else:
        delta = attn_delta(o, do, core) if delta is None else delta
        return _scores_bwd(q, k, v, do, delta, core, need_dq, need_dkv, dmask_shape, need_dslopes, outs)
    dq, dk, dv = made if need_dkv else (made[0], None, None)
    return dq if need_dq else None, dk, dv, None, None


def _scores_bwd(q, k, v, do, delta, core: AttentionCore, need_dq, need_dkv, dmask_shape, need_dslopes, outs) -> tuple:
    """`attn_grads` by scores, block by block."""
    dq, dk, dv = (
        (torch.empty_like(x) if out is None else out) if need else None
        for x, out, need in zip((q, k, v), outs, (need_dq, need_dkv, need_dkv), strict=True)
    )
    dmask = None if dmask_shape is None else q.new_zeros(dmask_shape, dtype=wide_dtype(q))
    dslopes = torch.zeros_like(core.slopes) if need_dslopes else None

    def of_block(block: Block) -> tuple[Tensor, ...]:
        of_block, q_part, do_part = block.core(core, q), block.of_queries(q), block.of_queries(do)
        k_part, v_part = block.of_keys(k), block.of_keys(v)
        dropped, ds, uncapped = _score_gradients(q_part, k_part, v_part, do_part, block.of_queries(delta), of_block)
        if dmask is not None:
            place = block.of_scores(dmask)
            place += ds.sum_to_size(place.shape)
        if dslopes is not None:
            i, j = rows_and_columns(q_part, k_part, of_block)
            place = block.of_slopes(dslopes)
            place -= (ds * (i - j).abs()).sum((-1, -2)).sum_to_size(place.shape)
        if need_dq:
            block.of_queries(dq).copy_(weighted_sum(uncapped, wide(k_part)).mul_(core.scale))
        if not need_dkv:
            return ()
        H_kv = k_part.shape[1]
        of_k = torch.matmul(by_group(uncapped, H_kv).transpose(-1, -2), by_group(wide(q_part), H_kv))
        of_v = torch.matmul(by_group(dropped, H_kv).transpose(-1, -2), by_group(wide(do_part), H_kv))
        return of_k.mul_(core.scale), of_v

    sum_by_blocks(of_block, _score_blocks(q, k, core), (dk, dv) if need_dkv else ())
    return dq, dk, dv, dmask, dslopes


def attn_bwd(q, k, v, do, lse, delta, core: AttentionCore, *, need_dq=True, need_dkv=True, dq=None, dk=None, dv=None):
    """(dq, dk, dv) from lse and delta, written into the given tensors or into new ones."""
    if is_packed(q, core):
        needs = {"need_dq": need_dq, "need_dkv": need_dkv}
        made = each_sequence(
            lambda q, do, lse, delta, k, v, own: attn_bwd(q, k, v, do, lse, delta, own, **needs),
            core,
            (q, do, lse, delta),
            (k, v),
            key_results=2,
        )
        outs = zip(made, (dq, dk, dv), strict=True)
        return tuple(value if value is None or out is None else out.copy_(value) for value, out in outs)
    return _scores_bwd(q, k, v, do, delta, core, need_dq, need_dkv, None, False, (dq, dk, dv))[:3]


def attn_dmask(q, k, v, do, lse, delta, core: AttentionCore, shape):
    """The gradient [B or 1, H or 1, Sq or 1, Sk or 1] of what was added to the scores, in float32 (float64 for float64).

    shape: its own; dimensions of 1 are summed over. core.mask may be larger: that of a sum of several masks.
    """
    return _scores_bwd(q, k, v, do, delta, core, False, False, shape, False, (None,) * 3)[3]
