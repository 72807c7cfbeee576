"""Core attention, forward and backward: the launchers of triton_kernels/attention.py in PyTorch ops.

Scores are computed for a block of queries at a time, as many queries as fit the workspace. On a CPU torch's flash attention
runs instead where it covers the core.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .attention_core import (
    ROWS,
    AttentionCore,
    Block,
    as_readable,
    attention_keep,
    attention_scores,
    block_bytes,
    by_group,
    by_rows,
    capped_scores,
    each_sequence,
    empty_heads,
    forward_by_blocks,
    is_packed,
    is_whole,
    masked_scores,
    query_blocks,
    repeated_heads,
    rows_and_columns,
    sink_share,
    sum_by_blocks,
    summed_by_group,
    weighted_sum,
    whole,
    wide,
    wide_dtype,
)
from .elementwise import where_keep
from .fused_attention import fused_attn_bwd, fused_attn_fwd

_aten = torch.ops.aten

FLOATS = 6  # floats per score that are alive at backward's peak


def _score_blocks(q: Tensor, k: Tensor, core: AttentionCore) -> list[Block]:
    """Returns one block if all scores fit the workspace, else blocks of queries."""
    (B, H, Sq, D), (_, H_kv, Sk, _) = q.shape, k.shape
    if core.workspace is None or 0 in (*q.shape, *k.shape):
        return [whole(q, k)]
    budget, size = block_bytes(q, core), wide_dtype(q).itemsize
    upcast = 0 if q.dtype == wide_dtype(q) else 4 * size  # k, v, and the sums of their gradients

    def cost(samples, heads, rows):
        return samples * heads * Sk * (H // H_kv * rows * (FLOATS * size + 2) + D * upcast)

    return [whole(q, k)] if cost(B, H_kv, Sq) <= budget else list(query_blocks(q, k, core, cost, budget, ROWS))


def attn_fwd(q, k, v, core: AttentionCore, *, do=None):
    if core.fused:
        o, lse = fused_attn_fwd(q, k, v, core)
    elif is_packed(q, core):
        return each_sequence(lambda q, do, k, v, own: attn_fwd(q, k, v, own, do=do), core, (q, do), (k, v))
    elif flash_on_cpu(q, k, core):
        o, lse = forward_by_blocks(_flash_block, _flash_blocks(q, k, core), q, k, v, core)
        lse = lse.contiguous()  # aten lays it out as [B, S, H]
    else:
        blocks = _score_blocks(q, k, core)
        several = len(blocks) > 1  # a single block's bounds are not compared, since sizes may be symbolic
        o, lse = forward_by_blocks(_block_fwd, blocks, q, k, v, core) if several else _block_fwd(q, k, v, core)
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
    """Computes softmax(s), with zeros in rows that see nothing. exp(s - lse) is less exact: a large lse rounds log(sum)
    away."""
    p = torch.softmax(s, -1)
    if core.mask is None and core.window == (None, None):
        return p
    return p.masked_fill_((s == -math.inf).all(-1, keepdim=True), 0.0)


def attn_delta(o, do, core: AttentionCore):
    parts = [(wide(o_part) * wide(do_part)).sum(-1) for o_part, do_part in by_rows(core, o, do)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _score_gradients(q, k, v, do, delta, core: AttentionCore) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for a block of scores [B, H, Sq, Sk]: dropout(p), and the gradients of the scores after and before the
    softcap."""
    s = capped_scores(q, k, core)
    slope = 1 - (s / core.softcap).square() if core.softcap else None
    s = masked_scores(s, q, k, core)
    p = _probabilities(s, core)
    if core.sinks is not None:
        p.mul_(sink_share(torch.logsumexp(s, -1), core.sinks)[..., None])
    del s
    dp = torch.matmul(by_group(wide(do), v.shape[1]), wide(v).transpose(-1, -2)).reshape(p.shape)
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
    """Returns (dq, dk, dv, dmask, dslopes) from o and lse, in one pass over the scores; None where not needed.

    outs: tensors for dq, dk and dv; torch's own kernels and packed sequences may return new tensors instead.
    dmask_shape: the shape of the trained mask; gradients are summed over dimensions of 1. core.mask may be larger if it is a
    sum of several masks.
    """
    of_scores, needs = dmask_shape is not None or need_dslopes, {"need_dq": need_dq, "need_dkv": need_dkv}
    if core.fused:
        gradients = fused_attn_bwd(q, k, v, do, o, lse, core)
    elif is_packed(q, core):
        gradients = each_sequence(
            lambda q, do, o, lse, k, v, own: attn_grads(q, k, v, do, o, lse, own, **needs)[:3],
            core,
            (q, do, o, lse),
            (k, v),
            key_results=2,
        )
    # Flash attention's backward computes probabilities from lse. A large lse has lost log(sum) to rounding, which makes them
    # wrong by a factor: with large scores, and in rows that see only columns hidden by a large finite number.
    elif not of_scores and flash_on_cpu(q, k, core) and not (lse.abs() > 2**10).any():
        gradients = flash_bwd(q, k, v, do, o, lse, core, outs)
    else:
        delta = attn_delta(o, do, core) if delta is None else delta
        return _scores_bwd(q, k, v, do, delta, core, need_dq, need_dkv, dmask_shape, need_dslopes, outs)
    dq, dk, dv = gradients if need_dkv else (gradients[0], None, None)
    return dq if need_dq else None, dk, dv, None, None


def _scores_bwd(q, k, v, do, delta, core: AttentionCore, need_dq, need_dkv, dmask_shape, need_dslopes, outs) -> tuple:
    """Computes `attn_grads` from scores, block by block."""
    dq, dk, dv = (
        (torch.empty_like(x) if out is None else out) if need else None
        for x, out, need in zip((q, k, v), outs, (need_dq, need_dkv, need_dkv), strict=True)
    )
    dmask = None if dmask_shape is None else q.new_zeros(dmask_shape, dtype=wide_dtype(q))
    dslopes = torch.zeros_like(core.slopes) if need_dslopes else None

    def of_block(block):
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


# -- torch's flash attention on a CPU: mask, slopes and window become one bias, computed for a block of queries at a time
# (`query_blocks`), so that no [Sq, Sk] is stored besides the caller's mask ------------------------------------------------


def flash_on_cpu(q: Tensor, k: Tensor, core: AttentionCore) -> bool:
    """Returns whether torch's flash attention for CPUs covers this core. It has no dropout, softcap or float16."""
    return (
        q.device.type == "cpu"
        and q.dtype != torch.float16
        and core.cu_q is None
        and core.dropout[0] is None
        and not core.softcap
        and 0 not in (*q.shape, *k.shape)
    )


def _causal(core: AttentionCore) -> bool:
    """Returns whether the kernel's is_causal is this window. The kernel masks by -inf before it scales, so scale must be >
    0."""
    return core.window == (None, 0) and core.scale > 0 and core.row_base == core.column_base


def _is_bias(mask: Tensor, q: Tensor) -> bool:
    """Returns whether the kernel reads this mask without a copy."""
    dtypes = (q.dtype, wide_dtype(q))
    return mask.dtype in dtypes and (mask.stride(-1) == 1 or mask.shape[-1] == 1)


def _hidden(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns 0 where a mask of 0 and 1 is 1, else -inf, as 1 - 1 / mask: a tenth of the time of torch.where."""
    return seen.to(dtype).reciprocal_().neg_().add_(1)


def _bias(q: Tensor, k: Tensor, core: AttentionCore, windowed: bool) -> Tensor:
    """Returns the bias of the scores [B or 1, H or 1, Sq or 1, Sk or 1]: mask, slopes and, if `windowed`, the window."""
    mask, (left, right), (i, j), parts = core.mask, core.window, rows_and_columns(q, k, core), []
    if mask is not None:
        parts.append(_hidden(mask, q.dtype) if mask.dtype == torch.int8 else mask)
    if core.slopes is not None:
        dtype = wide_dtype(q)
        parts.append((i - j).abs().to(dtype) * -core.slopes.to(dtype)[:, :, None, None])
    if windowed:
        seen = j >= (i - left if left is not None else 0)
        parts.append(_hidden(seen if right is None else seen & (j <= i + right), q.dtype)[None, None])
    bias = functools.reduce(torch.add, parts)
    return bias if _is_bias(bias, q) else bias.to(wide_dtype(q)).contiguous()


def _flash_blocks(q: Tensor, k: Tensor, core: AttentionCore) -> list[Block]:
    """Returns one block if the kernel needs no bias or repeated heads; else blocks whose biases, repeated heads and float32
    sums fit the workspace."""
    (B, H, Sq, D), (_, H_kv, Sk, _), (left, right) = q.shape, k.shape, core.window
    group, size, mask = H // H_kv, q.itemsize, core.mask
    windowed = (left, right) != (None, None) and not _causal(core)
    if group == 1 and mask is None and core.slopes is None and not windowed:
        return [whole(q, k)]
    shapes = [] if mask is None else [mask.shape]
    shapes += [] if core.slopes is None else [(core.slopes.shape[0], H, Sq, Sk)]
    shapes += [(1, 1, Sq, Sk)] if windowed else []
    formed = len(shapes) > 1 or (bool(shapes) and (mask is None or not _is_bias(mask, q)))
    shape = torch.broadcast_shapes(*shapes)
    of_bool = core.slopes is None and (mask is None or mask.dtype == torch.int8)
    copies = 1 if len(shapes) == 1 and core.slopes is None else 3  # two parts and their sum
    element = (q.itemsize if of_bool else wide_dtype(q).itemsize) * copies + 2  # and bools
    budget = block_bytes(q, core)
    one_each = group > 1 and 4 * k.numel() * group * size > budget

    def cost(samples, heads, rows):
        of_keys, heads_q = samples * heads * Sk * D, heads * (1 if one_each else group)
        repeated = 4 * of_keys * group * size if group > 1 and not one_each else 0
        cut = one_each or rows < Sq  # dk and dv are then sums of parts, in float32
        sums = of_keys * (2 * size + (8 if size == 2 else 0)) if cut else 0
        parts = zip(shape, (samples, heads_q, rows, Sk), strict=True)
        return repeated + sums + (math.prod(part if n > 1 else 1 for n, part in parts) * element if formed else 0)

    rows = Sq
    if windowed and core.workspace is not None:  # fewer rows see fewer columns
        rows = ROWS if left is None or right is None else min(ROWS, max(64, (left + right) // 32 * 16))
    if not one_each and rows >= Sq and cost(B, H_kv, Sq) <= budget:
        return [whole(q, k)]
    return list(query_blocks(q, k, core, cost, budget, rows, one_each))


def _flash_arguments(q, k, v, core: AttentionCore) -> tuple[Iterator[Tensor], dict]:
    """Returns q, k and v as the kernel takes them, and its other arguments."""
    H, causal = q.shape[1], _causal(core)
    windowed = core.window != (None, None) and not causal
    heads = map(as_readable, (q, k, v) if k.shape[1] == H else (q, repeated_heads(k, H), repeated_heads(v, H)))
    biased = windowed or core.mask is not None or core.slopes is not None
    bias = _bias(q, k, core, windowed) if biased else None
    return heads, {"is_causal": causal, "attn_mask": bias, "scale": core.scale}


def _flash_block(q, k, v, core: AttentionCore) -> tuple[Tensor, Tensor]:
    """Computes o and lse of a block on a CPU. A row that sees nothing has o = 0 and an arbitrary lse."""
    if not k.shape[2]:
        return torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=wide_dtype(q))
    heads, options = _flash_arguments(q, k, v, core)
    return _aten._scaled_dot_product_flash_attention_for_cpu(*heads, **options)


def _flash_grads(q, k, v, do, o, lse, core: AttentionCore) -> tuple[Tensor, Tensor, Tensor]:
    heads, options = _flash_arguments(q, k, v, core)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        as_readable(do), *heads, as_readable(o), lse, 0.0, **options
    )
    return dq, summed_by_group(dk, k.shape[1]), summed_by_group(dv, k.shape[1])


def flash_bwd(q, k, v, do, o, lse, core: AttentionCore, outs: tuple[Tensor | None, ...]) -> tuple:
    """Computes dq, dk and dv on a CPU. Several blocks write to `outs` where these are tensors."""
    blocks = _flash_blocks(q, k, core)
    if is_whole(blocks, k):
        return _flash_grads(q, k, v, do, o, lse, blocks[0].core(core, q))
    dq = empty_heads(q) if outs[0] is None else outs[0]
    dk, dv = (torch.empty_like(x) if out is None else out for x, out in zip((k, v), outs[1:], strict=True))

    def of_block(block):
        q_part, *others, place = map(block.of_queries, (q, do, o, lse, dq))
        keys = block.of_keys(k)
        if not keys.shape[2]:
            place.zero_()
            return keys, keys
        part, *of_keys = _flash_grads(q_part, keys, block.of_keys(v), *others, block.core(core, q))
        place.copy_(part)
        return of_keys

    sum_by_blocks(of_block, blocks, (dk, dv))
    return dq, dk, dv
