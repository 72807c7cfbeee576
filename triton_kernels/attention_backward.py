"""Attention's backward kernels; the mathematics, the tiles and the launcher are in attention.py.

`_attn_dkdv_kernel` walks the rows that see its columns, `_attn_dq_kernel` the columns that its rows see, `_attn_dmask_kernel`
the samples, heads, rows and columns in which the mask is broadcast. All recompute p from q, k and lse.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_scores import (
    DYNAMIC,
    LOG2E,
    capped_tile,
    column_phases,
    first_block_of,
    load_rows,
    mask_offset_of,
    rows_at,
    score_tile,
    sequence_of,
    store_rows,
    window_of,
)
from .philox import score_values
from .tile import cast, dot, rows_inside

LOWEST_LSE = tl.constexpr(-(2.0**24))  # from here on neighbouring float32 numbers are more than 1 apart


@triton.jit
def _load_delta(ptr, offs_m, inside, state_ptr, threshold):
    """Loads delta / keep_scale, so that ds / keep_scale takes no multiplication an element; dq and dk are scaled at the end."""
    delta = tl.load(ptr + offs_m, mask=inside, other=0.0)
    if state_ptr is not None:
        delta *= (65536 - threshold) * (1.0 / 65536)
    return delta


@triton.jit
def _load_lse(ptr, offs_m, inside):
    """Loads lse in units of log 2, infinite for a row that saw nothing, so that its p is 0.

    The same holds for a row that a mask hides by finite numbers, so far down that an lse has no digit for log sum.
    """
    lse = tl.load(ptr + offs_m, mask=inside, other=float("-inf"))
    return tl.where(lse < LOWEST_LSE, float("inf"), lse * LOG2E)


@triton.jit
def probability_tile(
    qk,
    lse,
    i,
    j,
    Sq,
    Sk,
    scale,
    slope,
    mask,
    mask_offset,
    window,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    EDGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASK_STEP: tl.constexpr,
):
    """Computes p = exp(s - lse); i, j and lse broadcast. EDGE: where i may not see j it is 0; COLUMNS: also where j is beyond
    Sk.

    Without masks and slopes one multiply-add an element computes the exponent.
    """
    if mask[0] is None and slope is None:
        p = tl.exp2(tl.fma(qk, scale * LOG2E, -lse))
        if EDGE and COLUMNS:
            p = tl.where(j < Sk, p, 0.0)
        if EDGE and LEFT:
            p = tl.where(j >= i - window[0], p, 0.0)
        if EDGE and RIGHT:
            p = tl.where(j <= i + window[1], p, 0.0)
        return p
    else:
        s = score_tile(qk, i, j, Sq, Sk, scale, slope, mask, mask_offset, window, LEFT, RIGHT, EDGE, MASK_STEP)
        return tl.exp2(s - lse)


@triton.jit
def _dkdv_step(
    dk,
    dv,
    k,
    v,
    q_rows,
    do_rows,
    lse_ptr,
    delta_ptr,
    n0,
    start,
    Sq,
    Sk,
    scale,
    slope,
    mask,
    mask_offset,
    window,
    dropout,
    D: tl.constexpr,
    HEAD_D: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    EDGE: tl.constexpr,
    MASK_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Adds the rows start... to dk / (scale keep_scale) and dv / keep_scale of a column tile.

    Scores are transposed: [BLOCK_N, BLOCK_M]. Matmuls and loads stand in the order that takes the fewest registers. Columns
    beyond Sk need no mask: each has a row of dk and dv to itself, which is not stored.
    """
    state_ptr, threshold, first_block = dropout
    offs_n = n0 + tl.arange(0, k.shape[0])
    offs_m = start + tl.arange(0, BLOCK_M)
    q = load_rows(q_rows, offs_m, Sq, D, HEAD_D)
    do = load_rows(do_rows, offs_m, Sq, D, HEAD_D)
    inside = rows_inside(start, Sq, BLOCK_M)
    lse = _load_lse(lse_ptr, offs_m, inside)
    qk = dot(k, tl.trans(q), tl.zeros((k.shape[0], BLOCK_M), dtype=tl.float32), PRECISION)
    qk, factor = capped_tile(qk, scale)
    p = probability_tile(
        qk,
        lse[None, :],
        offs_m[None, :],
        offs_n[:, None],
        Sq,
        Sk,
        factor,
        slope,
        mask,
        mask_offset,
        window,
        LEFT,
        RIGHT,
        EDGE,
        False,
        MASK_STEP,
    )
    dropped = p
    if state_ptr is not None:
        values = score_values(state_ptr, first_block, start, n0, BLOCK_M, k.shape[0], True)
        # p is never negative: its sign bit remembers the mask, that of values - threshold
        signed = p.to(tl.int32, bitcast=True) | ((values - threshold) & -(2**31))
        p = signed.to(tl.float32, bitcast=True)
        dropped = tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if scale[1] is not None:
        p *= 1.0 - qk * qk  # qk holds tanh here; the sign stays
    dv = dot(cast(dropped, do.dtype), do, dv, PRECISION)
    dp = dot(v, tl.trans(do), tl.zeros((k.shape[0], BLOCK_M), dtype=tl.float32), PRECISION)
    if state_ptr is not None:
        dp = tl.where(p < 0.0, 0.0, dp)
        p = tl.abs(p)
    delta = _load_delta(delta_ptr, offs_m, inside, state_ptr, threshold)
    ds = p * (dp - delta[None, :])
    return dot(cast(ds, q.dtype), q, dk, PRECISION), dv


@triton.jit
def _dkdv_steps(
    dk,
    dv,
    lo,
    hi,
    k,
    v,
    tensors,
    place,
    scale,
    window,
    dropout,
    EDGE: tl.constexpr,
    D: tl.constexpr,
    HEAD_D: tl.constexpr,
    GROUP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    STRIDE_STEP: tl.constexpr,
    MASK_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Runs `_dkdv_step` for rows [lo, hi) of all heads, lo a multiple of BLOCK_M.

    One loop runs over all heads and begins again for each: a loop inside a loop needs more registers.
    """
    q_heads, do_heads, lse_ptr, delta_ptr, slopes, mask = tensors
    b, h_kv, row0, n0, Sq_b, Sk_b, plane_rows, stride_lseb, stride_lseh = place
    state_ptr, threshold, plane_base, planes = dropout
    slopes_ptr, stride_slopeb = slopes
    rows = hi - lo if GROUP == 1 else tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_M) * BLOCK_M
    for start in range(lo, lo + GROUP * rows, BLOCK_M):
        h = h_kv * GROUP
        if GROUP > 1:
            member = (start - lo) // rows
            h += member
            start -= member * rows
        slope = slopes_ptr
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + b * stride_slopeb + h)
        mask_offset = mask_offset_of(mask, b, h)
        row_values = b * stride_lseb + h * stride_lseh + row0
        dk, dv = _dkdv_step(
            dk,
            dv,
            k,
            v,
            rows_at(q_heads, b, h, row0, STRIDE_STEP),
            rows_at(do_heads, b, h, row0, STRIDE_STEP),
            lse_ptr + row_values,
            delta_ptr + row_values,
            n0,
            start,
            Sq_b,
            Sk_b,
            scale,
            slope,
            mask,
            mask_offset,
            window,
            (state_ptr, threshold, first_block_of(plane_base, b, h, planes, plane_rows, window[2])),
            D,
            HEAD_D,
            LEFT,
            RIGHT,
            EDGE,
            MASK_STEP,
            PRECISION,
            BLOCK_M,
        )
    return dk, dv


@triton.jit
def row_range(n0, Sq, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Returns [lo, hi) of the rows that see any of the columns n0.., lo a multiple of BLOCK_M."""
    left, right, _ = window
    lo = 0
    hi = Sq
    if RIGHT:
        lo = tl.maximum(n0 - right, 0) // BLOCK_M * BLOCK_M
    if LEFT:
        hi = tl.minimum(Sq, tl.maximum(n0 + BLOCK_N + left, 0))
    return lo, hi


@triton.jit
def _dq_steps(
    dq,
    lo,
    hi,
    slope,
    q,
    do,
    lse,
    delta,
    k_rows,
    v_rows,
    m0,
    Sq,
    Sk,
    scale,
    mask,
    mask_offset,
    window,
    dropout,
    EDGE: tl.constexpr,
    D: tl.constexpr,
    HEAD_D: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    MASK_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes dq / (scale keep_scale) of a row tile from the column tiles in [lo, hi)."""
    state_ptr, threshold, first_block = dropout
    offs_m = m0 + tl.arange(0, q.shape[0])
    for start in range(lo, hi, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_rows, offs_n, Sk, D, HEAD_D)
        v = load_rows(v_rows, offs_n, Sk, D, HEAD_D)
        qk = dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), dtype=tl.float32), PRECISION)
        qk, factor = capped_tile(qk, scale)
        p = probability_tile(
            qk,
            lse[:, None],
            offs_m[:, None],
            offs_n[None, :],
            Sq,
            Sk,
            factor,
            slope,
            mask,
            mask_offset,
            window,
            LEFT,
            RIGHT,
            EDGE,
            True,
            MASK_STEP,
        )
        if scale[1] is not None:
            p *= 1.0 - qk * qk
        dp = dot(do, tl.trans(v), tl.zeros((q.shape[0], BLOCK_N), dtype=tl.float32), PRECISION)
        if state_ptr is not None:
            values = score_values(state_ptr, first_block, m0, start, q.shape[0], BLOCK_N, False)
            dp = tl.where(values >= threshold, dp, 0.0)
        ds = p * (dp - delta[:, None])
        dq = dot(cast(ds, k.dtype), k, dq, PRECISION)
    return dq


@triton.jit
def _ds_tile(
    q_rows,
    k_rows,
    v_rows,
    do_rows,
    lse_ptr,
    delta_ptr,
    m0,
    n0,
    Sq,
    Sk,
    scale,
    slope,
    mask,
    mask_offset,
    window,
    dropout,
    D: tl.constexpr,
    HEAD_D: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    MASK_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes ds / keep_scale [BLOCK_M, BLOCK_N] behind the softcap, where the mask is added; 0 outside of [Sq, Sk]."""
    state_ptr, threshold, first_block = dropout
    offs_m = m0 + tl.arange(0, BLOCK_M)
    offs_n = n0 + tl.arange(0, BLOCK_N)
    inside = offs_m < Sq
    q = load_rows(q_rows, offs_m, Sq, D, HEAD_D)
    k = load_rows(k_rows, offs_n, Sk, D, HEAD_D)
    qk = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), PRECISION)
    qk, factor = capped_tile(qk, scale)
    p = probability_tile(
        qk,
        _load_lse(lse_ptr, offs_m, inside)[:, None],
        offs_m[:, None],
        offs_n[None, :],
        Sq,
        Sk,
        factor,
        slope,
        mask,
        mask_offset,
        window,
        LEFT,
        RIGHT,
        True,
        True,
        MASK_STEP,
    )
    do = load_rows(do_rows, offs_m, Sq, D, HEAD_D)
    v = load_rows(v_rows, offs_n, Sk, D, HEAD_D)
    dp = dot(do, tl.trans(v), tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), PRECISION)
    if state_ptr is not None:
        values = score_values(state_ptr, first_block, m0, n0, BLOCK_M, BLOCK_N, False)
        dp = tl.where(values >= threshold, dp, 0.0)
    return p * (dp - _load_delta(delta_ptr, offs_m, inside, state_ptr, threshold)[:, None])


@triton.jit(do_not_specialize=DYNAMIC)
def _attn_dkdv_kernel(
    q_heads,
    k_heads,
    v_heads,
    mask,
    slopes,
    state_ptr,
    cuq_ptr,
    cuk_ptr,
    do_heads,
    lse_ptr,
    delta_ptr,
    dk_heads,
    dv_heads,
    Sq,
    Sk,
    H,
    tiles,
    scale,
    threshold,
    keep_scale,
    plane_base,
    planes,
    left,
    right,
    row_base,
    plane_rows,
    stride_lseb,
    stride_lseh,
    D: tl.constexpr,
    HEAD_D: tl.constexpr,
    GROUP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PHASED: tl.constexpr,
    STRIDE_STEP: tl.constexpr,
    MASK_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes one column tile of dk and dv of one k/v head, summed over the GROUP query heads that read it."""
    pid = tl.program_id(0)
    n0 = pid % tiles * BLOCK_N
    H_kv = H // GROUP
    b = (pid // tiles // H_kv).to(tl.int64)
    h_kv = (pid // tiles % H_kv).to(tl.int64)
    row0, Sq_b = sequence_of(cuq_ptr, b, Sq)
    col0, Sk_b = sequence_of(cuk_ptr, b, Sk)
    window = window_of(cuq_ptr, left, right, row_base, Sq_b, Sk_b)
    if n0 < Sk_b:
        offs_n = n0 + tl.arange(0, BLOCK_N)
        k = load_rows(rows_at(k_heads, b, h_kv, col0, STRIDE_STEP), offs_n, Sk_b, D, HEAD_D)
        v = load_rows(rows_at(v_heads, b, h_kv, col0, STRIDE_STEP), offs_n, Sk_b, D, HEAD_D)
        dk = tl.zeros((BLOCK_N, HEAD_D), dtype=tl.float32)
        dv = tl.zeros((BLOCK_N, HEAD_D), dtype=tl.float32)
        lo, hi = row_range(n0, Sq_b, window, BLOCK_M, BLOCK_N, LEFT, RIGHT)
        tensors = (q_heads, do_heads, lse_ptr, delta_ptr, slopes, mask)
        place = (b, h_kv, row0, n0, Sq_b, Sk_b, plane_rows, stride_lseb, stride_lseh)
        dropout = (state_ptr, threshold, plane_base, planes)
        EDGE: tl.constexpr = LEFT or RIGHT
        if PHASED and RIGHT:
            full = tl.cdiv(tl.maximum(n0 + BLOCK_N - 1 - window[1], 0), BLOCK_M) * BLOCK_M  # these rows see all columns
            dk, dv = _dkdv_steps(
                dk,
                dv,
                lo,
                tl.minimum(full, hi),
                k,
                v,
                tensors,
                place,
                scale,
                window,
                dropout,
                True,
                D,
                HEAD_D,
                GROUP,
                LEFT,
                RIGHT,
                STRIDE_STEP,
                MASK_STEP,
                PRECISION,
                BLOCK_M,
            )
            dk, dv = _dkdv_steps(
                dk,
                dv,
                full,
                hi,
                k,
                v,
                tensors,
                place,
                scale,
                window,
                dropout,
                False,
                D,
                HEAD_D,
                GROUP,
                LEFT,
                RIGHT,
                STRIDE_STEP,
                MASK_STEP,
                PRECISION,
                BLOCK_M,
            )
        else:
            dk, dv = _dkdv_steps(
                dk,
                dv,
                lo,
                hi,
                k,
                v,
                tensors,
                place,
                scale,
                window,
                dropout,
                EDGE,
                D,
                HEAD_D,
                GROUP,
                LEFT,
                RIGHT,
                STRIDE_STEP,
                MASK_STEP,
                PRECISION,
                BLOCK_M,
            )
        factor = scale[0]
        if state_ptr is not None:
            factor *= keep_scale
            dv *= keep_scale
        store_rows(rows_at(dk_heads, b, h_kv, col0, STRIDE_STEP), offs_n, Sk_b, D, HEAD_D, dk * factor)
        store_rows(rows_at(dv_heads, b, h_kv, col0, STRIDE_STEP), offs_n, Sk_b, D, HEAD_D, dv)


@triton.jit(do_not_specialize=DYNAMIC)
def _attn_dq_kernel(
    q_heads,
    k_heads,
    v_heads,
    mask,
    slopes,
    state_ptr,
    cuq_ptr,
    cuk_ptr,
    do_heads,
    lse_ptr,
    delta_ptr,
    dq_heads,
    Sq,
    Sk,
    H,
    tiles,
    scale,
    threshold,
    keep_scale,
    plane_base,
    planes,
    left,
    right,
    row_base,
    plane_rows,
    stride_lseb,
    stride_lseh,
    D: tl.constexpr,
    HEAD_D: tl.constexpr,
    GROUP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PHASED: tl.constexpr,
    STRIDE_STEP: tl.constexpr,
    MASK_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes one row tile of dq of one query head."""
    slopes_ptr, stride_slopeb = slopes
    pid = tl.program_id(0)
    m0 = (tiles - 1 - pid % tiles) * BLOCK_M
    b = (pid // tiles // H).to(tl.int64)
    h = (pid // tiles % H).to(tl.int64)
    row0, Sq_b = sequence_of(cuq_ptr, b, Sq)
    col0, Sk_b = sequence_of(cuk_ptr, b, Sk)
    window = window_of(cuq_ptr, left, right, row_base, Sq_b, Sk_b)
    if m0 < Sq_b:
        k_rows = rows_at(k_heads, b, h // GROUP, col0, STRIDE_STEP)
        v_rows = rows_at(v_heads, b, h // GROUP, col0, STRIDE_STEP)
        slope = slopes_ptr
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + b * stride_slopeb + h)
        mask_offset = mask_offset_of(mask, b, h)
        dropout = (state_ptr, threshold, first_block_of(plane_base, b, h, planes, plane_rows, row_base))
        offs_m = m0 + tl.arange(0, BLOCK_M)
        q = load_rows(rows_at(q_heads, b, h, row0, STRIDE_STEP), offs_m, Sq_b, D, HEAD_D)
        do = load_rows(rows_at(do_heads, b, h, row0, STRIDE_STEP), offs_m, Sq_b, D, HEAD_D)
        row_values = b * stride_lseb + h * stride_lseh + row0
        lse = _load_lse(lse_ptr + row_values, offs_m, offs_m < Sq_b)
        delta = _load_delta(delta_ptr + row_values, offs_m, offs_m < Sq_b, state_ptr, threshold)
        dq = tl.zeros((BLOCK_M, HEAD_D), dtype=tl.float32)
        lo, _, full, hi = column_phases(m0, Sk_b, window, BLOCK_M, BLOCK_N, LEFT, RIGHT)
        head = (q, do, lse, delta, k_rows, v_rows, m0, Sq_b, Sk_b, scale, mask, mask_offset, window, dropout)
        if PHASED:
            dq = _dq_steps(dq, lo, full, slope, *head, False, D, HEAD_D, LEFT, RIGHT, MASK_STEP, PRECISION, BLOCK_N)
            lo = full
        dq = _dq_steps(dq, lo, hi, slope, *head, True, D, HEAD_D, LEFT, RIGHT, MASK_STEP, PRECISION, BLOCK_N)
        factor = scale[0]
        if state_ptr is not None:
            factor *= keep_scale
        store_rows(rows_at(dq_heads, b, h, row0, STRIDE_STEP), offs_m, Sq_b, D, HEAD_D, dq * factor)


@triton.jit(do_not_specialize=[*DYNAMIC, "samples", "heads"])
def _attn_dmask_kernel(
    q_heads,
    k_heads,
    v_heads,
    mask,
    slopes,
    state_ptr,
    do_heads,
    lse_ptr,
    delta_ptr,
    dmask_ptr,
    Sq,
    Sk,
    H,
    tiles,
    scale,
    threshold,
    keep_scale,
    plane_base,
    planes,
    left,
    right,
    stride_lseb,
    stride_lseh,
    samples,
    heads,
    D: tl.constexpr,
    HEAD_D: tl.constexpr,
    GROUP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    STRIDE_STEP: tl.constexpr,
    MASK_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes one tile of dmask [B / samples, H / heads, Sq or 1, Sk or 1]: the sum of ds over what the mask is broadcast to.

    ROWS, COLUMNS: the mask has rows and columns of its own; if not, a program visits all, adds their tiles and sums these last.
    tiles: those of a plane of dmask.
    """
    slopes_ptr, stride_slopeb = slopes
    window = (left, right, 0)  # a mask with a gradient has all rows
    pid = tl.program_id(0)
    plane = pid // tiles
    tile = pid % tiles
    across = tl.cdiv(Sk, BLOCK_N) if COLUMNS else 1
    m0 = tile // across * BLOCK_M
    n0 = tile % across * BLOCK_N
    lo = 0
    hi = Sq
    first = 0
    last = Sk
    if COLUMNS:
        lo, hi = row_range(n0, Sq, window, BLOCK_M, BLOCK_N, LEFT, RIGHT)
    if ROWS:
        first, _, _, last = column_phases(m0, Sk, window, BLOCK_M, BLOCK_N, LEFT, RIGHT)
        lo = tl.maximum(lo, m0)
        hi = tl.minimum(hi, m0 + BLOCK_M)
    if COLUMNS:
        first = tl.maximum(first, n0)
        last = tl.minimum(last, n0 + BLOCK_N)
    down = tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_M)
    along = tl.cdiv(tl.maximum(last - first, 0), BLOCK_N)
    dmask = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # One loop over all that is summed: a loop inside a loop needs more registers. So would a tile's place that the compiler
    # knew to be the same in every step: it would compute the addresses and masks once, and keep them.
    for step in range(samples * heads * down * along):
        n = (first // BLOCK_N + step % along) * BLOCK_N
        m = (lo // BLOCK_M + step // along % down) * BLOCK_M
        member = step // (down * along)
        # where samples (or heads) are summed, the plane's own is the only one: 0
        b = (plane // (H // heads) + member // heads).to(tl.int64)
        h = (plane % (H // heads) + member % heads).to(tl.int64)
        dmask += _ds_tile(
            rows_at(q_heads, b, h, 0, STRIDE_STEP),
            rows_at(k_heads, b, h // GROUP, 0, STRIDE_STEP),
            rows_at(v_heads, b, h // GROUP, 0, STRIDE_STEP),
            rows_at(do_heads, b, h, 0, STRIDE_STEP),
            lse_ptr + b * stride_lseb + h * stride_lseh,
            delta_ptr + b * stride_lseb + h * stride_lseh,
            m,
            n,
            Sq,
            Sk,
            scale,
            slopes_ptr if slopes_ptr is None else tl.load(slopes_ptr + b * stride_slopeb + h),
            mask,
            mask_offset_of(mask, b, h),
            window,
            (state_ptr, threshold, first_block_of(plane_base, b, h, planes, Sq, 0)),
            D,
            HEAD_D,
            LEFT,
            RIGHT,
            MASK_STEP,
            PRECISION,
            BLOCK_M,
            BLOCK_N,
        )
    if state_ptr is not None:
        dmask *= keep_scale
    if not ROWS:
        dmask = tl.sum(dmask, axis=0, keep_dims=True)
    if not COLUMNS:
        dmask = tl.sum(dmask, axis=1, keep_dims=True)
    i = m0 + tl.arange(0, dmask.shape[0])[:, None]
    j = n0 + tl.arange(0, dmask.shape[1])[None, :]
    rows = Sq if ROWS else 1
    columns = Sk if COLUMNS else 1
    offsets = (plane.to(tl.int64) * rows + i) * columns + j
    tl.store(dmask_ptr + offsets, dmask, mask=(i < rows) & (j < columns))
