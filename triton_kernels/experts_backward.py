"""Kernels of the experts' backward: gradients of rows, and sums over the rows of each expert. The maths is in experts.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .elementwise import act, act_grad, block_of, load_tile, store_tile
from .experts_tiles import expert_tile, of_expert
from .linear import preact_tile
from .tile import by_slices, cast, dot, gemm_tile, multiple, rows_inside, upcast


@triton.jit
def experts_grad_store(g, u, dh, n0, s, hs_rows, dgu_rows, ds_ptr, rows, R, N, ACT: tl.constexpr):
    """Writes s h, dg and du, and partial sums of ds, one row a slice, from g, u (storage type) and dh (float32, not yet
    weighted)."""
    offs_n = n0 + tl.arange(0, dh.shape[1])
    mask = (rows < R)[:, None] & (offs_n < N)[None, :]
    a = act(g, ACT)
    h = upcast(cast(a * upcast(u), g.dtype))
    if ds_ptr is not None:
        part = tl.sum(tl.where(mask, dh * h, 0.0), axis=1)
        tl.store(ds_ptr + (n0 // dh.shape[1]).to(tl.int64) * R + rows, part, mask=rows < R)
    if hs_rows[0] is not None:
        store_tile(hs_rows, rows, offs_n, mask, cast(h * s[:, None], g.dtype))
    if dgu_rows[0] is not None:
        dh = dh * s[:, None]
        store_tile(dgu_rows, rows, offs_n + N, mask, cast(dh * a, g.dtype))
        store_tile(dgu_rows, rows, offs_n, mask, cast(act_grad(g, dh * upcast(u), ACT), g.dtype))


@triton.jit
def _experts_bwd_store(acc_g, acc_u, acc_dh, n0, b_ptr, s, dy_rows, results, rows, R, N, ACT: tl.constexpr):
    """Rounds g and u and calls `experts_grad_store`. results: what that writes, from hs_rows to ds_ptr."""
    offs_n = n0 + tl.arange(0, acc_g.shape[1])
    dtype: tl.constexpr = dy_rows[0].dtype.element_ty
    g = preact_tile(acc_g, b_ptr, offs_n, N, dtype)
    u = preact_tile(acc_u, b_ptr, offs_n + N, 2 * N, dtype)
    experts_grad_store(g, u, acc_dh, n0, s, *results, rows, R, N, ACT)


@triton.jit
def _experts_act_grad_store(acc, n0, s, gu_rows, added_rows, results, rows, R, N, ACT: tl.constexpr):
    offs_n = n0 + tl.arange(0, acc.shape[1])
    mask = (rows < R)[:, None] & (offs_n < N)[None, :]
    if added_rows[0] is not None:
        acc += upcast(load_tile(added_rows, rows, offs_n, mask))
    g = load_tile(gu_rows, rows, offs_n, mask)
    u = load_tile(gu_rows, rows, offs_n + N, mask)
    experts_grad_store(g, u, acc, n0, s, *results, rows, R, N, ACT)


@triton.jit
def _experts_dw_store(acc, n0, dw_rows, offs_m, M, N, ADD: tl.constexpr):
    offs_n = n0 + tl.arange(0, acc.shape[1])
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    if ADD:
        acc += load_tile(dw_rows, offs_m, offs_n, mask)
    store_tile(dw_rows, offs_m, offs_n, mask, cast(acc, dw_rows[0].dtype.element_ty))


@triton.jit(do_not_specialize=["MAX_TILES", "R", "T"])
def _experts_bwd_kernel(
    x_rows,
    w_stack,
    b_ptr,
    dy_rows,
    wd_stack,
    s_ptr,
    hs_rows,
    dgu_rows,
    ds_ptr,
    order_ptr,
    offs_ptr,
    tiles_ptr,
    MAX_TILES,
    R,
    T,
    N,
    K,
    TOP_K: tl.constexpr,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Computes s h [R, N], dgu [R, 2 N] and ds [slices, R] from x, dy [T, K], gathered, w [E, 2 N, K], wd [E, K, N].

    g, u and dh take three loops: in one, tiles of 128 columns spill on sm_90.
    """
    N, K = multiple(N, UNIT), multiple(K, UNIT)
    expert, rows, pid_n = expert_tile(tiles_ptr, offs_ptr, MAX_TILES, R, N, BLOCK_M, BLOCK_N)
    if expert < 0:
        return
    pairs = tl.load(order_ptr + rows, mask=rows < R, other=0)
    tokens = tl.where(rows < R, pairs // TOP_K, T)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    wg_ptr, stride_wn = of_expert(w_stack, expert, UNIT)
    wu_ptr = wg_ptr + tl.full((), N, tl.int64) * stride_wn
    acc_g = gemm_tile(x_rows, (wg_ptr, stride_wn), tokens, offs_n, T, N, K, True, BLOCK_K, EVEN_K, PRECISION)
    acc_u = gemm_tile(x_rows, (wu_ptr, stride_wn), tokens, offs_n, T, N, K, True, BLOCK_K, EVEN_K, PRECISION)
    wd_rows = of_expert(wd_stack, expert, UNIT)
    acc_dh = gemm_tile(dy_rows, wd_rows, tokens, offs_n, T, N, K, False, BLOCK_K, EVEN_K, PRECISION)
    if b_ptr is not None:
        b_ptr += expert.to(tl.int64) * (2 * N)
    s = tl.load(s_ptr + pairs, mask=rows < R, other=0.0).to(tl.float32)
    by_slices(
        (acc_g, acc_u, acc_dh),
        pid_n * BLOCK_N,
        _experts_bwd_store,
        (b_ptr, s, dy_rows, (hs_rows, dgu_rows, ds_ptr), rows, R, N, ACT),
        SUB,
    )


@triton.jit(do_not_specialize=["MAX_TILES", "R", "T"])
def _experts_act_grad_kernel(
    gu_rows,
    added_rows,
    dy_rows,
    wd_stack,
    s_ptr,
    hs_rows,
    dgu_rows,
    ds_ptr,
    order_ptr,
    offs_ptr,
    tiles_ptr,
    MAX_TILES,
    R,
    T,
    N,
    K,
    TOP_K: tl.constexpr,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Computes what `_experts_bwd_kernel` does, from stored gu [R, 2 N]. added_rows: [R, N], added to dh, or none."""
    N, K = multiple(N, UNIT), multiple(K, UNIT)
    expert, rows, pid_n = expert_tile(tiles_ptr, offs_ptr, MAX_TILES, R, N, BLOCK_M, BLOCK_N)
    if expert < 0:
        return
    pairs = tl.load(order_ptr + rows, mask=rows < R, other=0)
    tokens = tl.where(rows < R, pairs // TOP_K, T)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    wd_rows = of_expert(wd_stack, expert, UNIT)
    acc = gemm_tile(dy_rows, wd_rows, tokens, offs_n, T, N, K, False, BLOCK_K, EVEN_K, PRECISION)
    s = tl.load(s_ptr + pairs, mask=rows < R, other=0.0).to(tl.float32)
    by_slices(
        (acc,),
        pid_n * BLOCK_N,
        _experts_act_grad_store,
        (s, gu_rows, added_rows, (hs_rows, dgu_rows, ds_ptr), rows, R, N, ACT),
        SUB,
    )


@triton.jit(do_not_specialize=["R"])
def _experts_hidden_grad_kernel(
    gu_rows,
    dh_rows,
    s_ptr,
    hs_rows,
    dgu_rows,
    ds_ptr,
    order_ptr,
    R,
    N,
    ACT: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes s h [R, N], which may lie over dh, dgu [R, 2 N], which may lie over gu, and ds [slices, R], from gu and dh.

    A program reads all that it writes over before it writes.
    """
    N = multiple(N, UNIT)
    pid_m, pid_n = block_of(N, BLOCK_N)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < R)[:, None] & (offs_n < N)[None, :]
    g = load_tile(gu_rows, rows, offs_n, mask)
    u = load_tile(gu_rows, rows, offs_n + N, mask)
    dh = upcast(load_tile(dh_rows, rows, offs_n, mask))
    pairs = tl.load(order_ptr + rows, mask=rows < R, other=0)
    s = tl.load(s_ptr + pairs, mask=rows < R, other=0.0).to(tl.float32)
    experts_grad_store(g, u, dh, pid_n * BLOCK_N, s, hs_rows, dgu_rows, ds_ptr, rows, R, N, ACT)


@triton.jit
def _experts_dw_kernel(
    a_rows,
    b_rows,
    dw_stack,
    order_ptr,
    offs_ptr,
    M,
    N,
    TOP_K: tl.constexpr,
    GATHER_A: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Computes dw[e] [M, N] = sum over the rows of e of a^T b, of which one is gathered; added to what is there if ADD."""
    M, N = multiple(M, UNIT), multiple(N, UNIT)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    expert = tl.program_id(0) // tiles
    local = tl.program_id(0) % tiles
    offs_m = local // tl.cdiv(N, BLOCK_N) * BLOCK_M + tl.arange(0, BLOCK_M)
    n0 = local % tl.cdiv(N, BLOCK_N) * BLOCK_N
    offs_n = n0 + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    start = tl.load(offs_ptr + expert)
    stop = tl.load(offs_ptr + expert + 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(start, stop, BLOCK_K):
        rows = k + offs_k
        mask = rows < stop
        tokens = tl.load(order_ptr + rows, mask=rows_inside(k, stop, BLOCK_K), other=0) // TOP_K
        a = load_tile(a_rows, tokens if GATHER_A else rows, offs_m, mask[:, None] & (offs_m < M)[None, :])
        b = load_tile(b_rows, rows if GATHER_A else tokens, offs_n, mask[:, None] & (offs_n < N)[None, :])
        acc = dot(tl.trans(a), b, acc, PRECISION)
    by_slices((acc,), n0, _experts_dw_store, (of_expert(dw_stack, expert, UNIT), offs_m, M, N, ADD), SUB)


@triton.jit
def _experts_sums_kernel(
    a_rows,
    s_ptr,
    out_ptr,
    order_ptr,
    offs_ptr,
    N,
    TOP_K: tl.constexpr,
    GATHERED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes out[e] [N] = sum over the rows of e of a, gathered or not, each times its token-expert pair's s."""
    N = multiple(N, UNIT)
    expert = tl.program_id(0) // tl.cdiv(N, BLOCK_N)
    offs_n = tl.program_id(0) % tl.cdiv(N, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(offs_ptr + expert)
    stop = tl.load(offs_ptr + expert + 1)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for m in range(start, stop, BLOCK_M):
        rows = m + tl.arange(0, BLOCK_M)
        pairs = tl.load(order_ptr + rows, mask=rows < stop, other=0)
        mask = (rows < stop)[:, None] & (offs_n < N)[None, :]
        a = upcast(load_tile(a_rows, pairs // TOP_K if GATHERED else rows, offs_n, mask))
        if s_ptr is not None:
            a *= tl.load(s_ptr + pairs, mask=rows < stop, other=0.0).to(tl.float32)[:, None]
        acc += tl.sum(a, axis=0)
    tl.store(out_ptr + expert.to(tl.int64) * N + offs_n, acc, mask=offs_n < N)
