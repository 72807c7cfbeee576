"""Flash attention that can be run again: forward with LSE, and a deterministic backward from q, k, v and LSE.

    s_ij = scale q_i k_j [- slope |i - j|] [+ mask_ij];  p = softmax_j(s);  o = dropout(p) v;  lse_i = log sum_j exp(s_ij)
    dv = dropout(p)^T do;  dp = dropout'(do v^T);  ds = p (dp - delta);  delta_i = sum_d o_id do_id
    dq = scale ds k;  dk = scale ds^T q

Row i may see column j where i - LEFT <= j <= i + RIGHT; causal is RIGHT = 0, aligned top-left as in torch's
scaled_dot_product_attention. Packed sequences align bottom-right, as in torch's varlen_attn: i + Sk - Sq for i.
A row that sees nothing gives o = 0, lse = -inf, and zero gradients.
At recompute="full" backward runs the forward kernel again, which also writes delta: the same tile function, the same
bits. No atomics: dk and dv belong to one program, dq to another, so ten runs give ten times the same bits.
Sources: Dao, arXiv 2307.08691 (the algorithm); Press et al., arXiv 2108.12409 (ALiBi).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .philox import score_values
from .tile import INTERPRETER, arch_of, cast, dot, launch, rows_of, shared_memory_of, widen

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST_LSE = tl.constexpr(-(2.0**24))  # from here on neighbouring float32 numbers are more than 1 apart
# no length and no scalar compiles a kernel again; the strides of lse are lengths
DYNAMIC = [
    "Sq", "Sk", "H", "tiles", "threshold", "plane_base", "left", "right", "stride_lseb", "stride_lseh"
]  # fmt: skip


@triton.jit
def load_rows(ptr, stride_s, offs_s, S, D, HEAD_D: tl.constexpr):
    """[len(offs_s), HEAD_D] rows of one head, zeros outside of S rows and D columns."""
    offs_d = tl.arange(0, HEAD_D)
    mask = (offs_s < S)[:, None]
    if HEAD_D != D:
        mask = mask & (offs_d < D)[None, :]
    return tl.load(ptr + offs_s.to(tl.int64)[:, None] * stride_s + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, stride_s, offs_s, S, D, HEAD_D: tl.constexpr, value):
    offs_d = tl.arange(0, HEAD_D)
    mask = (offs_s < S)[:, None] & (offs_d < D)[None, :]
    value = cast(value, ptr.dtype.element_ty)
    tl.store(ptr + offs_s.to(tl.int64)[:, None] * stride_s + offs_d[None, :], value, mask=mask)
    return value


@triton.jit
def score_tile(
    qk, i, j, Sq, Sk, scale, slope, mask_ptr, stride_maskq, stride_maskk,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, EDGE: tl.constexpr, MASK_STEP: tl.constexpr, left, right,
):  # fmt: skip
    """s in units of log 2, -inf where i may not see j. i and j broadcast: [BM, 1] and [1, BN], or transposed.

    stride_maskq is None for a mask of columns alone. MASK_STEP, 16 or 1, divides Sk: where a mask's columns end decides
    how many bytes one load takes.
    """
    s = qk * (scale * LOG2E)
    if slope is not None:
        s -= (slope * LOG2E) * tl.abs(i - j).to(tl.float32)
    if mask_ptr is not None:
        inside = j < Sk // MASK_STEP * MASK_STEP
        offsets = j.to(tl.int64) * stride_maskk
        if stride_maskq is not None:
            inside = inside & (i < Sq)
            offsets += i.to(tl.int64) * stride_maskq
        if mask_ptr.dtype.element_ty == tl.int8:
            s = tl.where(tl.load(mask_ptr + offsets, mask=inside, other=0) != 0, s, float("-inf"))
        else:
            m = widen(tl.load(mask_ptr + offsets, mask=inside, other=0.0))
            # a mask of the dtype's lowest value stays finite in units of log 2: torch weighs a row of them evenly
            s += tl.where(m < -2.0e38, m, m * LOG2E)
    if EDGE:
        seen = j < Sk
        if LEFT:
            seen = seen & (j >= i - left)
        if RIGHT:
            seen = seen & (j <= i + right)
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def column_phases(
    m0, Sk, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """(lo, full_lo, full_hi, hi) of the column tiles that rows m0.. see: those in [full_lo, full_hi) need no edge mask."""
    lo = 0
    full_lo = 0
    hi = Sk
    full_hi = Sk
    if LEFT:
        lo = tl.maximum(m0 - left, 0) // BLOCK_N * BLOCK_N
        full_lo = tl.cdiv(tl.maximum(m0 + BLOCK_M - 1 - left, 0), BLOCK_N) * BLOCK_N
    if RIGHT:
        hi = tl.minimum(Sk, tl.maximum(m0 + BLOCK_M + right, 0))
        full_hi = tl.minimum(Sk, tl.maximum(m0 + right + 1, 0))
    full_hi = full_hi // BLOCK_N * BLOCK_N
    full_lo = tl.minimum(full_lo, tl.cdiv(hi, BLOCK_N) * BLOCK_N)
    return lo, full_lo, tl.maximum(full_hi, full_lo), hi


@triton.jit
def _fwd_steps(
    acc, total, top, q, k_ptr, v_ptr, stride_ks, stride_vs, m0, lo, hi, Sq, Sk, scale, slope,
    mask_ptr, stride_maskq, stride_maskk, left, right, state_ptr, threshold, first_block,
    D: tl.constexpr, HEAD_D: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, EDGE: tl.constexpr,
    MASK_STEP: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax over the column tiles of [lo, hi); lo is a multiple of BLOCK_N."""
    offs_m = m0 + tl.arange(0, q.shape[0])
    for start in range(lo, hi, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, stride_ks, offs_n, Sk, D, HEAD_D)
        qk = dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), dtype=tl.float32), PRECISION)
        s = score_tile(
            qk, offs_m[:, None], offs_n[None, :], Sq, Sk, scale, slope, mask_ptr, stride_maskq, stride_maskk,
            LEFT, RIGHT, EDGE, MASK_STEP, left, right,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(s, axis=1))
        # a row that has seen nothing yet has top = -inf: exp2(-inf - -inf) would be NaN
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - shift[:, None])
        correction = tl.exp2(top - shift)
        total = total * correction + tl.sum(p, axis=1)
        if state_ptr is not None:
            values = score_values(state_ptr, first_block, m0, start, q.shape[0], BLOCK_N, False)
            p = tl.where(values >= threshold, p, 0.0)
        v = load_rows(v_ptr, stride_vs, offs_n, Sk, D, HEAD_D)
        acc = dot(cast(p, v.dtype), v, acc * correction[:, None], PRECISION)
        top = new_top
    return acc, total, top


@triton.jit
def _sequence(cu_ptr, b, S):
    """(first row, length) of sequence b: packed by cu_ptr int32 [B + 1], of which S rows are seen, or (0, S)."""
    if cu_ptr is not None:
        start = tl.load(cu_ptr + b).to(tl.int64)
        return start, tl.minimum(tl.load(cu_ptr + b + 1) - start, S).to(tl.int32)
    else:
        return b * 0, S


@triton.jit
def _bounds(cu_ptr, left, right, Sq, Sk):
    """The window's bounds; of packed sequences the last row is aligned with the last column."""
    if cu_ptr is not None:
        return left - (Sk - Sq), right + (Sk - Sq)
    else:
        return left, right


@triton.jit
def _multiples(stride_b, stride_h, stride_s, STEP: tl.constexpr):
    """The strides themselves, known to be multiples of STEP: what is no multiple of 16 the compiler takes for ragged."""
    if STEP > 1:
        return stride_b // STEP * STEP, stride_h // STEP * STEP, stride_s // STEP * STEP
    else:
        return stride_b, stride_h, stride_s


@triton.jit
def _first_block(plane_base, b, h, H, Sq):
    """Where the plane of (b, h) starts among the mask's blocks of 16 rows (philox.py)."""
    return ((plane_base + b * H + h) * tl.cdiv(Sq, 16)).to(tl.uint32)


@triton.jit(do_not_specialize=DYNAMIC)
def _attn_fwd_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, slopes_ptr, state_ptr, cuq_ptr, cuk_ptr, do_ptr, o_ptr, lse_ptr, delta_ptr,
    Sq, Sk, H, tiles, scale, threshold, keep_scale, plane_base, left, right,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_maskb, stride_maskh, stride_maskq, stride_maskk, stride_slopeb,
    stride_dob, stride_doh, stride_dos, stride_ob, stride_oh, stride_os, stride_lseb, stride_lseh,
    D: tl.constexpr, HEAD_D: tl.constexpr, GROUP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    STRIDE_STEP: tl.constexpr, MASK_STEP: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """o and lse; with do_ptr also delta = rowsum(o do). Tiles of a head are neighbours, the longest causal ones first."""
    stride_qb, stride_qh, stride_qs = _multiples(stride_qb, stride_qh, stride_qs, STRIDE_STEP)
    stride_kb, stride_kh, stride_ks = _multiples(stride_kb, stride_kh, stride_ks, STRIDE_STEP)
    stride_vb, stride_vh, stride_vs = _multiples(stride_vb, stride_vh, stride_vs, STRIDE_STEP)
    stride_dob, stride_doh, stride_dos = _multiples(stride_dob, stride_doh, stride_dos, STRIDE_STEP)
    stride_ob, stride_oh, stride_os = _multiples(stride_ob, stride_oh, stride_os, STRIDE_STEP)
    pid = tl.program_id(0)
    m0 = (tiles - 1 - pid % tiles) * BLOCK_M
    b = (pid // tiles // H).to(tl.int64)
    h = (pid // tiles % H).to(tl.int64)
    row0, Sq_b = _sequence(cuq_ptr, b, Sq)
    col0, Sk_b = _sequence(cuk_ptr, b, Sk)
    left, right = _bounds(cuq_ptr, left, right, Sq_b, Sk_b)
    if m0 < Sq_b:
        k_head_ptr = k_ptr + b * stride_kb + h // GROUP * stride_kh + col0 * stride_ks
        v_head_ptr = v_ptr + b * stride_vb + h // GROUP * stride_vh + col0 * stride_vs
        slope = slopes_ptr
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + b * stride_slopeb + h)
        head_mask_ptr = mask_ptr
        if mask_ptr is not None:
            head_mask_ptr = mask_ptr + b * stride_maskb + h * stride_maskh
        first_block = _first_block(plane_base, b, h, H, Sq)
        offs_m = m0 + tl.arange(0, BLOCK_M)
        q = load_rows(q_ptr + b * stride_qb + h * stride_qh + row0 * stride_qs, stride_qs, offs_m, Sq_b, D, HEAD_D)
        acc = tl.zeros((BLOCK_M, HEAD_D), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        lo, full_lo, full_hi, hi = column_phases(m0, Sk_b, left, right, BLOCK_M, BLOCK_N, LEFT, RIGHT)
        ONE_PHASE: tl.constexpr = LEFT and HEAD_D > 128  # three do not fit into the registers
        if ONE_PHASE:
            full_hi = lo
        elif LEFT:
            acc, total, top = _fwd_steps(
                acc, total, top, q, k_head_ptr, v_head_ptr, stride_ks, stride_vs, m0, lo, full_lo, Sq_b, Sk_b,
                scale, slope, head_mask_ptr, stride_maskq, stride_maskk, left, right, state_ptr, threshold, first_block,
                D, HEAD_D, LEFT, RIGHT, True, MASK_STEP, PRECISION, BLOCK_N,
            )  # fmt: skip
        if not ONE_PHASE:
            acc, total, top = _fwd_steps(
                acc, total, top, q, k_head_ptr, v_head_ptr, stride_ks, stride_vs, m0, full_lo, full_hi, Sq_b, Sk_b,
                scale, slope, head_mask_ptr, stride_maskq, stride_maskk, left, right, state_ptr, threshold, first_block,
                D, HEAD_D, LEFT, RIGHT, False, MASK_STEP, PRECISION, BLOCK_N,
            )  # fmt: skip
        acc, total, top = _fwd_steps(
            acc, total, top, q, k_head_ptr, v_head_ptr, stride_ks, stride_vs, m0, full_hi, hi, Sq_b, Sk_b,
            scale, slope, head_mask_ptr, stride_maskq, stride_maskk, left, right, state_ptr, threshold, first_block,
            D, HEAD_D, LEFT, RIGHT, True, MASK_STEP, PRECISION, BLOCK_N,
        )  # fmt: skip
        empty = total == 0.0
        acc *= (keep_scale / tl.where(empty, 1.0, total))[:, None]
        lse = tl.where(empty, float("-inf"), top * LN2 + tl.log(tl.where(empty, 1.0, total)))
        o = store_rows(
            o_ptr + b * stride_ob + h * stride_oh + row0 * stride_os, stride_os, offs_m, Sq_b, D, HEAD_D, acc
        )
        row_ptrs = b * stride_lseb + h * stride_lseh + row0 + offs_m
        tl.store(lse_ptr + row_ptrs, lse, mask=offs_m < Sq_b)
        if do_ptr is not None:
            do = load_rows(
                do_ptr + b * stride_dob + h * stride_doh + row0 * stride_dos, stride_dos, offs_m, Sq_b, D, HEAD_D
            )
            tl.store(delta_ptr + row_ptrs, tl.sum(widen(o) * widen(do), axis=1), mask=offs_m < Sq_b)


@triton.jit(do_not_specialize=["Sq", "H", "tiles", "stride_lseb", "stride_lseh"])
def _delta_kernel(
    o_ptr, do_ptr, cuq_ptr, delta_ptr, Sq, H, tiles, stride_ob, stride_oh, stride_os,
    stride_dob, stride_doh, stride_dos, stride_lseb, stride_lseh,
    D: tl.constexpr, HEAD_D: tl.constexpr, STRIDE_STEP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(o do), from a stored o."""
    stride_ob, stride_oh, stride_os = _multiples(stride_ob, stride_oh, stride_os, STRIDE_STEP)
    stride_dob, stride_doh, stride_dos = _multiples(stride_dob, stride_doh, stride_dos, STRIDE_STEP)
    pid = tl.program_id(0)
    b = (pid // tiles // H).to(tl.int64)
    h = (pid // tiles % H).to(tl.int64)
    row0, Sq_b = _sequence(cuq_ptr, b, Sq)
    offs_m = pid % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    o = load_rows(o_ptr + b * stride_ob + h * stride_oh + row0 * stride_os, stride_os, offs_m, Sq_b, D, HEAD_D)
    do = load_rows(do_ptr + b * stride_dob + h * stride_doh + row0 * stride_dos, stride_dos, offs_m, Sq_b, D, HEAD_D)
    tl.store(
        delta_ptr + b * stride_lseb + h * stride_lseh + row0 + offs_m, tl.sum(widen(o) * widen(do), axis=1),
        mask=offs_m < Sq_b,
    )  # fmt: skip


@triton.jit
def _load_row_values(ptr, offs_m, S, other):
    return tl.load(ptr + offs_m, mask=offs_m < S, other=other)


@triton.jit
def _load_delta(ptr, offs_m, S, state_ptr, threshold):
    """delta / keep_scale, so that ds / keep_scale takes no product an element; dq and dk are scaled at the end."""
    delta = _load_row_values(ptr, offs_m, S, 0.0)
    if state_ptr is not None:
        delta *= (65536 - threshold) * (1.0 / 65536)
    return delta


@triton.jit
def probability_tile(s, lse):
    """p = exp(s - lse) for s in units of log 2; lse broadcasts. A row that saw nothing has p = 0.

    So has one of which a mask hides everything by finite numbers, so far down that an lse has no digit for log sum.
    """
    return tl.exp2(s - tl.where(lse < LOWEST_LSE, float("inf"), lse * LOG2E))


@triton.jit
def _dkdv_step(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qs, stride_dos, n0, start, Sq, Sk,
    scale, slope, mask_ptr, stride_maskq, stride_maskk, left, right, state_ptr, threshold, first_block,
    D: tl.constexpr, HEAD_D: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK_STEP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dk / (scale keep_scale) and dv / keep_scale of a column tile and the rows start...

    Scores are transposed: [BLOCK_N, BLOCK_M]. Products and loads stand in the order that keeps the fewest registers alive.
    """
    offs_n = n0 + tl.arange(0, k.shape[0])
    offs_m = start + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr, stride_qs, offs_m, Sq, D, HEAD_D)
    do = load_rows(do_ptr, stride_dos, offs_m, Sq, D, HEAD_D)
    lse = _load_row_values(lse_ptr, offs_m, Sq, float("-inf"))
    qk = dot(k, tl.trans(q), tl.zeros((k.shape[0], BLOCK_M), dtype=tl.float32), PRECISION)
    s = score_tile(
        qk, offs_m[None, :], offs_n[:, None], Sq, Sk, scale, slope, mask_ptr, stride_maskq, stride_maskk,
        LEFT, RIGHT, True, MASK_STEP, left, right,
    )  # fmt: skip
    p = probability_tile(s, lse[None, :])
    dropped = p
    if state_ptr is not None:
        values = score_values(state_ptr, first_block, start, n0, BLOCK_M, k.shape[0], True)
        # p is never negative: its sign bit remembers the mask, that of values - threshold
        signed = p.to(tl.int32, bitcast=True) | ((values - threshold) & -(2**31))
        p = signed.to(tl.float32, bitcast=True)
        dropped = tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL)
    dv = dot(cast(dropped, do.dtype), do, dv, PRECISION)
    dp = dot(v, tl.trans(do), tl.zeros((k.shape[0], BLOCK_M), dtype=tl.float32), PRECISION)
    if state_ptr is not None:
        dp = tl.where(p < 0.0, 0.0, dp)
        p = tl.abs(p)
    delta = _load_delta(delta_ptr, offs_m, Sq, state_ptr, threshold)
    ds = p * (dp - delta[None, :])
    return dot(cast(ds, q.dtype), q, dk, PRECISION), dv


@triton.jit
def row_range(
    n0, Sq, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """[lo, hi) of the rows that see any of the columns n0.., lo a multiple of BLOCK_M."""
    lo = 0
    hi = Sq
    if RIGHT:
        lo = tl.maximum(n0 - right, 0) // BLOCK_M * BLOCK_M
    if LEFT:
        hi = tl.minimum(Sq, tl.maximum(n0 + BLOCK_N + left, 0))
    return lo, hi


@triton.jit(do_not_specialize=DYNAMIC)
def _attn_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, slopes_ptr, state_ptr, cuq_ptr, cuk_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    Sq, Sk, H, tiles, scale, threshold, keep_scale, plane_base, left, right,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_maskb, stride_maskh, stride_maskq, stride_maskk, stride_slopeb,
    stride_dob, stride_doh, stride_dos, stride_lseb, stride_lseh,
    stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
    D: tl.constexpr, HEAD_D: tl.constexpr, GROUP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    STRIDE_STEP: tl.constexpr, MASK_STEP: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One column tile of one k/v head: it owns dk and dv, and sums over the GROUP query heads that read it."""
    stride_qb, stride_qh, stride_qs = _multiples(stride_qb, stride_qh, stride_qs, STRIDE_STEP)
    stride_kb, stride_kh, stride_ks = _multiples(stride_kb, stride_kh, stride_ks, STRIDE_STEP)
    stride_vb, stride_vh, stride_vs = _multiples(stride_vb, stride_vh, stride_vs, STRIDE_STEP)
    stride_dob, stride_doh, stride_dos = _multiples(stride_dob, stride_doh, stride_dos, STRIDE_STEP)
    stride_dkb, stride_dkh, stride_dks = _multiples(stride_dkb, stride_dkh, stride_dks, STRIDE_STEP)
    stride_dvb, stride_dvh, stride_dvs = _multiples(stride_dvb, stride_dvh, stride_dvs, STRIDE_STEP)
    pid = tl.program_id(0)
    n0 = pid % tiles * BLOCK_N
    H_kv = H // GROUP
    b = (pid // tiles // H_kv).to(tl.int64)
    h_kv = (pid // tiles % H_kv).to(tl.int64)
    row0, Sq_b = _sequence(cuq_ptr, b, Sq)
    col0, Sk_b = _sequence(cuk_ptr, b, Sk)
    left, right = _bounds(cuq_ptr, left, right, Sq_b, Sk_b)
    if n0 < Sk_b:
        offs_n = n0 + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr + b * stride_kb + h_kv * stride_kh + col0 * stride_ks, stride_ks, offs_n, Sk_b, D, HEAD_D)
        v = load_rows(v_ptr + b * stride_vb + h_kv * stride_vh + col0 * stride_vs, stride_vs, offs_n, Sk_b, D, HEAD_D)
        dk = tl.zeros((BLOCK_N, HEAD_D), dtype=tl.float32)
        dv = tl.zeros((BLOCK_N, HEAD_D), dtype=tl.float32)
        lo, hi = row_range(n0, Sq_b, left, right, BLOCK_M, BLOCK_N, LEFT, RIGHT)
        # One loop over all heads, which begins again for each: a loop inside a loop needs more registers.
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
            head_mask_ptr = mask_ptr
            if mask_ptr is not None:
                head_mask_ptr = mask_ptr + b * stride_maskb + h * stride_maskh
            row_values = b * stride_lseb + h * stride_lseh + row0
            dk, dv = _dkdv_step(
                dk, dv, k, v, q_ptr + b * stride_qb + h * stride_qh + row0 * stride_qs,
                do_ptr + b * stride_dob + h * stride_doh + row0 * stride_dos, lse_ptr + row_values,
                delta_ptr + row_values, stride_qs, stride_dos, n0, start, Sq_b, Sk_b, scale,
                slope, head_mask_ptr, stride_maskq, stride_maskk, left, right, state_ptr, threshold,
                _first_block(plane_base, b, h, H, Sq), D, HEAD_D, LEFT, RIGHT, MASK_STEP, PRECISION, BLOCK_M,
            )  # fmt: skip
        if state_ptr is not None:
            scale *= keep_scale
            dv *= keep_scale
        store_rows(
            dk_ptr + b * stride_dkb + h_kv * stride_dkh + col0 * stride_dks,
            stride_dks,
            offs_n,
            Sk_b,
            D,
            HEAD_D,
            dk * scale,
        )
        store_rows(
            dv_ptr + b * stride_dvb + h_kv * stride_dvh + col0 * stride_dvs, stride_dvs, offs_n, Sk_b, D, HEAD_D, dv
        )


@triton.jit
def _dq_steps(
    dq, q, do, lse, delta, k_ptr, v_ptr, stride_ks, stride_vs, m0, lo, hi, Sq, Sk,
    scale, slope, mask_ptr, stride_maskq, stride_maskk, left, right, state_ptr, threshold, first_block,
    D: tl.constexpr, HEAD_D: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK_STEP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq / (scale keep_scale) of a row tile from the column tiles in [lo, hi)."""
    offs_m = m0 + tl.arange(0, q.shape[0])
    for start in range(lo, hi, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, stride_ks, offs_n, Sk, D, HEAD_D)
        v = load_rows(v_ptr, stride_vs, offs_n, Sk, D, HEAD_D)
        qk = dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), dtype=tl.float32), PRECISION)
        s = score_tile(
            qk, offs_m[:, None], offs_n[None, :], Sq, Sk, scale, slope, mask_ptr, stride_maskq, stride_maskk,
            LEFT, RIGHT, True, MASK_STEP, left, right,
        )  # fmt: skip
        p = probability_tile(s, lse[:, None])
        dp = dot(do, tl.trans(v), tl.zeros((q.shape[0], BLOCK_N), dtype=tl.float32), PRECISION)
        if state_ptr is not None:
            values = score_values(state_ptr, first_block, m0, start, q.shape[0], BLOCK_N, False)
            dp = tl.where(values >= threshold, dp, 0.0)
        ds = p * (dp - delta[:, None])
        dq = dot(cast(ds, k.dtype), k, dq, PRECISION)
    return dq


@triton.jit(do_not_specialize=DYNAMIC)
def _attn_dq_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, slopes_ptr, state_ptr, cuq_ptr, cuk_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    Sq, Sk, H, tiles, scale, threshold, keep_scale, plane_base, left, right,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_maskb, stride_maskh, stride_maskq, stride_maskk, stride_slopeb,
    stride_dob, stride_doh, stride_dos, stride_lseb, stride_lseh, stride_dqb, stride_dqh, stride_dqs,
    D: tl.constexpr, HEAD_D: tl.constexpr, GROUP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    STRIDE_STEP: tl.constexpr, MASK_STEP: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row tile of one query head: it owns dq."""
    stride_qb, stride_qh, stride_qs = _multiples(stride_qb, stride_qh, stride_qs, STRIDE_STEP)
    stride_kb, stride_kh, stride_ks = _multiples(stride_kb, stride_kh, stride_ks, STRIDE_STEP)
    stride_vb, stride_vh, stride_vs = _multiples(stride_vb, stride_vh, stride_vs, STRIDE_STEP)
    stride_dob, stride_doh, stride_dos = _multiples(stride_dob, stride_doh, stride_dos, STRIDE_STEP)
    stride_dqb, stride_dqh, stride_dqs = _multiples(stride_dqb, stride_dqh, stride_dqs, STRIDE_STEP)
    pid = tl.program_id(0)
    m0 = (tiles - 1 - pid % tiles) * BLOCK_M
    b = (pid // tiles // H).to(tl.int64)
    h = (pid // tiles % H).to(tl.int64)
    row0, Sq_b = _sequence(cuq_ptr, b, Sq)
    col0, Sk_b = _sequence(cuk_ptr, b, Sk)
    left, right = _bounds(cuq_ptr, left, right, Sq_b, Sk_b)
    if m0 < Sq_b:
        k_head_ptr = k_ptr + b * stride_kb + h // GROUP * stride_kh + col0 * stride_ks
        v_head_ptr = v_ptr + b * stride_vb + h // GROUP * stride_vh + col0 * stride_vs
        slope = slopes_ptr
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + b * stride_slopeb + h)
        head_mask_ptr = mask_ptr
        if mask_ptr is not None:
            head_mask_ptr = mask_ptr + b * stride_maskb + h * stride_maskh
        first_block = _first_block(plane_base, b, h, H, Sq)
        offs_m = m0 + tl.arange(0, BLOCK_M)
        q = load_rows(q_ptr + b * stride_qb + h * stride_qh + row0 * stride_qs, stride_qs, offs_m, Sq_b, D, HEAD_D)
        do = load_rows(
            do_ptr + b * stride_dob + h * stride_doh + row0 * stride_dos, stride_dos, offs_m, Sq_b, D, HEAD_D
        )
        row_ptrs = b * stride_lseb + h * stride_lseh + row0
        lse = _load_row_values(lse_ptr + row_ptrs, offs_m, Sq_b, float("-inf"))
        delta = _load_delta(delta_ptr + row_ptrs, offs_m, Sq_b, state_ptr, threshold)
        dq = tl.zeros((BLOCK_M, HEAD_D), dtype=tl.float32)
        lo, _, _, hi = column_phases(m0, Sk_b, left, right, BLOCK_M, BLOCK_N, LEFT, RIGHT)
        dq = _dq_steps(
            dq, q, do, lse, delta, k_head_ptr, v_head_ptr, stride_ks, stride_vs, m0, lo, hi, Sq_b, Sk_b,
            scale, slope, head_mask_ptr, stride_maskq, stride_maskk, left, right, state_ptr, threshold,
            first_block, D, HEAD_D, LEFT, RIGHT, MASK_STEP, PRECISION, BLOCK_N,
        )  # fmt: skip
        if state_ptr is not None:
            scale *= keep_scale
        store_rows(
            dq_ptr + b * stride_dqb + h * stride_dqh + row0 * stride_dqs,
            stride_dqs,
            offs_m,
            Sq_b,
            D,
            HEAD_D,
            dq * scale,
        )


class AttentionTile(NamedTuple):
    """BLOCK_M rows of q (a multiple of 16) by BLOCK_N rows of k and v (of 32): the blocks of the dropout mask."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int

    def launch_options(self) -> dict:
        return dict(
            BLOCK_M=self.BLOCK_M, BLOCK_N=self.BLOCK_N, num_warps=self.num_warps, num_stages=self.num_stages,
            enable_fp_fusion=False,
        )  # fmt: skip


# (kernel, architecture) -> {(class, padded head dim): tile}; the next larger head dim serves. Classes: 16-bit types; "16
# masked" where a mask of rows and columns needs registers too (without such a row it takes the plain one); float32 with
# TF32 products, and "ieee" ones, which run on the ordinary cores. All pass the compile gate; its few bytes of spills are
# named there. Eight warps lie along the longer side of a product's result, 16 rows or 8 columns each. So a tile of fewer than
# 128 rows (columns for dkdv), or of 64 columns (rows) where the head dim is the longer side, would be computed twice: those
# here are not, but for dkdv of "32" at 256 dims, whose larger one does not fit. Products of HGMMA narrower than 64 have failed
# (triton#11366), which is why head dims are padded to 64 on sm_90; what has 32 columns there takes mma.sync.
TILES = {
    ("fwd", 90): {("16", 64): (128, 128, 8, 3), ("16", 128): (128, 64, 8, 3), ("16", 256): (128, 64, 8, 2),
                  ("16 masked", 64): (128, 64, 8, 3),
                  ("32", 64): (128, 64, 8, 2), ("32", 128): (128, 64, 8, 2), ("32", 256): (32, 64, 8, 1),
                  ("32 ieee", 64): (64, 32, 8, 2), ("32 ieee", 128): (32, 32, 8, 1), ("32 ieee", 256): (16, 32, 8, 1)},
    ("fwd", 80): {("16", 64): (128, 64, 8, 3), ("16", 128): (128, 32, 8, 3), ("16", 256): (64, 64, 8, 2),
                  ("32", 64): (128, 64, 8, 2), ("32", 128): (128, 32, 8, 2), ("32", 256): (32, 64, 8, 1),
                  ("32 ieee", 64): (64, 32, 8, 2), ("32 ieee", 128): (32, 32, 8, 1), ("32 ieee", 256): (16, 32, 8, 1)},
    ("dkdv", 90): {("16", 64): (64, 128, 8, 2), ("16", 128): (64, 128, 8, 2), ("16", 256): (64, 32, 8, 2),
                   ("32", 64): (64, 128, 8, 1), ("32", 128): (64, 32, 8, 1), ("32", 256): (32, 32, 8, 1),
                   ("32 ieee", 64): (32, 32, 8, 1), ("32 ieee", 128): (16, 32, 8, 1), ("32 ieee", 256): (16, 32, 8, 1)},
    ("dkdv", 80): {("16", 64): (32, 128, 8, 2), ("16", 128): (64, 64, 8, 1), ("16", 256): (64, 32, 8, 2),
                   ("16 masked", 64): (32, 128, 8, 1),
                   ("32", 64): (32, 128, 8, 1), ("32", 128): (64, 32, 8, 1), ("32", 256): (32, 32, 8, 1),
                   ("32 ieee", 64): (32, 32, 8, 1), ("32 ieee", 128): (16, 32, 8, 1), ("32 ieee", 256): (16, 32, 8, 1)},
    ("dq", 90): {("16", 64): (128, 64, 8, 2), ("16", 128): (128, 64, 8, 2), ("16", 256): (128, 64, 8, 1),
                 ("32", 64): (128, 64, 8, 1), ("32", 128): (128, 64, 8, 1), ("32", 256): (32, 64, 8, 1),
                 ("32 ieee", 64): (32, 32, 8, 1), ("32 ieee", 128): (32, 32, 8, 1), ("32 ieee", 256): (16, 32, 8, 1)},
    ("dq", 80): {("16", 64): (128, 64, 8, 2), ("16", 128): (128, 32, 8, 2), ("16", 256): (64, 64, 8, 2),
                 ("16 masked", 64): (128, 32, 8, 2), ("16 masked", 128): (64, 64, 8, 2),
                 ("32", 64): (128, 32, 8, 1), ("32", 128): (64, 64, 8, 1), ("32", 256): (16, 64, 8, 1),
                 ("32 ieee", 64): (32, 32, 8, 1), ("32 ieee", 128): (32, 32, 8, 1), ("32 ieee", 256): (16, 32, 8, 1)},
}  # fmt: skip
# Cards that take the rows of sm_80 with less shared memory than its 163 KiB (99 KiB: sm_86, sm_89, sm_120):
# (kernel, class, padded head dim) -> (KiB that the row above needs, the tile instead if there is one).
LARGE_TILES = {
    ("fwd", "16", 256): (112, (64, 32, 8, 2)), ("dkdv", "16", 256): (100, (32, 32, 8, 1)),
    ("dq", "16", 256): (144, (64, 32, 8, 1)),
    ("fwd", "32", 128): (112, (64, 32, 8, 2)), ("dkdv", "32", 128): (128, (32, 32, 8, 1)),
    ("dq", "32", 128): (128, (16, 64, 8, 1)),
    ("fwd", "32", 256): (104, (32, 32, 8, 1)), ("dkdv", "32", 256): (160, None),
    ("dq", "32", 256): (160, (16, 32, 8, 1)),
}  # fmt: skip
INTERPRETED_TILE = AttentionTile(32, 32, 4, 1)


def attention_tile(
    kernel: str, arch: int, shared: int, dtype: torch.dtype, head_dim: int, precision: str, masked: bool
) -> AttentionTile:
    """A pure function of the kernel, the architecture, its shared memory, the dtype, the head dim and the shape class."""
    if arch == INTERPRETER:
        return INTERPRETED_TILE
    if dtype.itemsize == 4:
        shape_class = "32 ieee" if precision == "ieee" else "32"
    else:
        shape_class = "16 masked" if masked else "16"
    row, table = max(padded_head_dim(head_dim, arch), 64), TILES[kernel, 90 if 90 <= arch < 100 else 80]
    tile = table.get((shape_class, row)) or table[shape_class.removesuffix(" masked"), row]
    need, smaller = LARGE_TILES.get((kernel, shape_class.removesuffix(" masked"), row), (0, None))
    if need > shared // 1024 and not 90 <= arch < 100:
        if smaller is None:
            raise RuntimeError(
                f"attention of {dtype} heads of {head_dim}: its {kernel} kernel needs {need} KiB of shared memory, the "
                f'device has {shared // 1024}; use a 16-bit type, precision "ieee" or backend("eager")'
            )
        tile = smaller
    return AttentionTile(*tile)


def padded_head_dim(head_dim: int, arch: int = INTERPRETER) -> int:
    """The power of two that a head dim is padded to in registers: >= 64 on sm_90 (see TILES), else >= 16."""
    return max(triton.next_power_of_2(head_dim), 64 if 90 <= arch < 100 else 16)


def _tile(kernel: str, q: torch.Tensor, core) -> AttentionTile:
    masked = core.mask is not None and core.mask.shape[2] > 1
    return attention_tile(kernel, arch_of(q), shared_memory_of(q), q.dtype, q.shape[-1], core.precision, masked)


def _geometry(q, k, core):
    """(B, H, Sq, Sk, GROUP): lengths are maxima when sequences are packed. core: ckptkern.eager.AttentionCore."""
    H, H_kv = q.shape[1], k.shape[1]
    if core.cu_q is not None:
        return core.cu_q.shape[0] - 1, H, core.max_q, core.max_k, H // H_kv
    return q.shape[0], H, q.shape[2], k.shape[2], H // H_kv


def _strides(x, packed: bool) -> tuple[int, int, int]:
    """(batch, head, row) strides; packed sequences share one batch."""
    return (0 if packed else x.stride(0)), x.stride(1), x.stride(2)


def _mask_strides(mask) -> tuple[int, int, int | None, int]:
    """(batch, head, row, column) strides, 0 where it broadcasts; None for rows, of which the kernel then loads one."""
    if mask is None:
        return 0, 0, None, 0
    b, h, row, col = (0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    return b, h, row or None, col


def _slope_stride(slopes) -> int:
    return 0 if slopes is None or slopes.shape[0] == 1 else slopes.stride(0)


def empty_heads(q: torch.Tensor) -> torch.Tensor:
    """Room for o [B, H, S, D] whose memory is [B, S, H, D], as the output projection reads it; no view of anything."""
    B, H, S, D = q.shape
    return torch.empty_strided((B, H, S, D), (S * H * D, D, H * D, 1), dtype=q.dtype, device=q.device)


def _zero(*results: torch.Tensor | None) -> None:
    """What rows of packed tokens hold that are in no sequence: the kernels visit none of them."""
    for result in results:
        if result is not None:
            result.zero_()


def _with_plain_vectors(core):
    """The same with slopes and bounds that lie as the kernels read them: a slice of a table has other strides."""
    if core.slopes is None and core.cu_q is None:
        return core
    return core._replace(slopes=rows_of(core.slopes), cu_q=rows_of(core.cu_q), cu_k=rows_of(core.cu_k))


def _stride_step(*tensors) -> int:
    """What divides all their strides and the compiler does not see: 8. Multiples of 16 it knows by itself."""
    strides = {stride % 16 for x in tensors if x is not None for stride in x.stride()[:3]}
    return 8 if strides - {0} == {8} else 1


def _common(q, k, core, *others):
    B, H, Sq, Sk, group = _geometry(q, k, core)
    # further than the scores there is nothing to see, and a row plus a bound near 2**31 would overflow
    left, right = (min(side or 0, max(Sq, Sk)) for side in core.window)
    D = q.shape[-1]
    flags = dict(
        D=D, HEAD_D=padded_head_dim(D, arch_of(q)), GROUP=group, LEFT=core.window[0] is not None,
        RIGHT=core.window[1] is not None, MASK_STEP=16 if core.mask is not None and Sk % 16 == 0 else 1,
        STRIDE_STEP=_stride_step(q, k, *others), PRECISION=core.precision,
    )  # fmt: skip
    return B, H, Sq, Sk, left, right, flags


def attn_fwd(q, k, v, core, *, do=None, tile: AttentionTile | None = None):
    """(o like q, lse float32 [B, H, Sq] ([1, H, total] when packed), delta like lse or None).

    q [B, H, Sq, D], k, v [B, H_kv, Sk, D], any strides with an inner stride of 1. With `do` (recompute) also
    delta = rowsum(o do).
    """
    q, k, v, do, core = rows_of(q), rows_of(k), rows_of(v), rows_of(do), _with_plain_vectors(core)
    o = empty_heads(q)
    B, H, Sq, Sk, left, right, flags = _common(q, k, core, v, o, do)
    packed = core.cu_q is not None
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    delta = None if do is None else torch.empty_like(lse)
    if packed:
        _zero(o, lse, delta)
    tile = tile or _tile("fwd", q, core)
    tiles = triton.cdiv(Sq, tile.BLOCK_M)
    if B * H * tiles:  # without dimensions, too: lse is that of the mask
        launch(
            _attn_fwd_kernel, (B * H * tiles,), q, k, v, core.mask, core.slopes, core.dropout[0], core.cu_q, core.cu_k,
            do, o, lse, delta, Sq, Sk, H, tiles, core.scale, core.dropout[1], core.dropout[2], core.plane_base,
            left, right, *_strides(q, packed), *_strides(k, packed), *_strides(v, packed), *_mask_strides(core.mask),
            _slope_stride(core.slopes), *((0, 0, 0) if do is None else _strides(do, packed)), *_strides(o, packed),
            0 if packed else lse.stride(0), lse.stride(1), **flags, **tile.launch_options(),
        )  # fmt: skip
    return o, lse, delta


def attn_delta(o, do, core):
    """delta = rowsum(o do), float32 [B, H, Sq], from a stored o."""
    o, do, core = rows_of(o), rows_of(do), _with_plain_vectors(core)
    B, H, Sq, *_ = _geometry(o, o, core)
    packed = core.cu_q is not None
    delta = torch.empty(o.shape[:3], dtype=torch.float32, device=o.device)
    if packed:
        _zero(delta)
    D = o.shape[-1]
    BLOCK_M = 32
    tiles = triton.cdiv(Sq, BLOCK_M)
    if B * H * tiles:
        launch(
            _delta_kernel, (B * H * tiles,), o, do, core.cu_q, delta, Sq, H, tiles, *_strides(o, packed),
            *_strides(do, packed), 0 if packed else delta.stride(0), delta.stride(1),
            D=D, HEAD_D=padded_head_dim(D, arch_of(o)), STRIDE_STEP=_stride_step(o, do), BLOCK_M=BLOCK_M, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return delta


def attn_bwd(
    q, k, v, do, lse, delta, core, *, need_dq=True, need_dkv=True, dq=None, dk=None, dv=None, tiles: tuple | None = None
):  # fmt: skip
    """(dq, dk, dv), written into the given tensors (views of a packed dqkv, say) or into new ones.

    need_dq, need_dkv: what is not needed is None and its kernel does not run. tiles: (dkdv tile, dq tile).
    """
    q, k, v, do, core = rows_of(q), rows_of(k), rows_of(v), rows_of(do), _with_plain_vectors(core)
    lse, delta = lse.contiguous(), delta.contiguous()  # both are read with lse's strides
    packed = core.cu_q is not None
    dq = (empty_heads(q) if dq is None else dq) if need_dq else None
    dk = (empty_heads(k) if dk is None else dk) if need_dkv else None
    dv = (empty_heads(v) if dv is None else dv) if need_dkv else None
    for out in (dq, dk, dv):
        if out is not None and out.stride(-1) != 1 and out.shape[-1] > 1:
            raise ValueError(f"dq, dk and dv must have an inner stride of 1, but one has strides {out.stride()}")
    B, H, Sq, Sk, left, right, flags = _common(q, k, core, v, do, dq, dk, dv)
    if packed:
        _zero(dq, dk, dv)
    tile_kv, tile_q = tiles or (_tile("dkdv", q, core) if need_dkv else None, _tile("dq", q, core) if need_dq else None)
    inputs = (q, k, v, core.mask, core.slopes, core.dropout[0], core.cu_q, core.cu_k, do, lse, delta)
    strides = (
        *_strides(q, packed), *_strides(k, packed), *_strides(v, packed), *_mask_strides(core.mask),
        _slope_stride(core.slopes), *_strides(do, packed), 0 if packed else lse.stride(0), lse.stride(1),
    )  # fmt: skip

    def scalars(count):
        return (
            Sq, Sk, H, count, core.scale, core.dropout[1], core.dropout[2], core.plane_base, left, right
        )  # fmt: skip

    if need_dkv and B * k.shape[1] * Sk and q.shape[-1]:
        count = triton.cdiv(Sk, tile_kv.BLOCK_N)
        launch(
            _attn_dkdv_kernel, (B * k.shape[1] * count,), *inputs, dk, dv, *scalars(count), *strides,
            *_strides(dk, packed), *_strides(dv, packed), **flags, **tile_kv.launch_options(),
        )  # fmt: skip
    if need_dq and B * H * Sq and q.shape[-1]:
        count = triton.cdiv(Sq, tile_q.BLOCK_M)
        launch(
            _attn_dq_kernel, (B * H * count,), *inputs, dq, *scalars(count), *strides, *_strides(dq, packed),
            **flags, **tile_q.launch_options(),
        )  # fmt: skip
    return dq, dk, dv
