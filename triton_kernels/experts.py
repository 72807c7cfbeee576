"""Experts of an MoE layer: grouped gated MLPs that gather their tokens in the load. No atomics, no host synchronisation.

    row r: token-expert pair order[r] = t k + j of token t, weight s[t, j]; expert e with offs[e] <= r < offs[e + 1]
    (`eager.Groups`)
    g, u = x[t] w[e]^T + b[e];  h = round(act(g) u);  y[r] = h wd[e]^T + bd[e];  out[t] = sum_j s[t, j] y[inv[t k + j]]
    backward  dh = dy[t] wd[e];  ds = <dh, h>;  dg, du: the gated MLP's, of s dh;  dx[t] = sum_j ([dg|du] w[e])[inv[t k + j]]
              dw[e] = [dg|du]^T x[t],  dwd[e] = dy[t]^T (s h) over the rows of e

A tile of rows is of one expert. Only the device knows how many tiles there are, but never more than cdiv(R, BLOCK_M) + min(E,
R): so many programs are launched, and programs without a tile return at once. Rows beyond offs[E] are neither written nor read,
except by elementwise passes, which write what they read of them to the same rows.
Sums over j ascend, in float32; forward and recompute accumulate a matmul in one order, so that a recomputed g has the bits of
the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .elementwise import blocks_of, grid_of_blocks, store_tile
from .experts_backward import (
    _experts_act_grad_kernel,
    _experts_bwd_kernel,
    _experts_dw_kernel,
    _experts_hidden_grad_kernel,
    _experts_sums_kernel,
)
from .experts_tiles import dense_groups, expert_tile, grid_of_tiles, of_expert, stacked, tile_of, tiles_of
from .linear import preact_tile
from .mlp import gated_tile
from .tile import (
    INTERPRETER,
    Tile,
    arch_of,
    by_slices,
    cast,
    dot,
    gemm_tile,
    launch,
    matrix,
    multiple,
    rows_of,
    stride_of,
    unit_of,
    upcast,
)


@triton.jit
def dual_tile(
    a_rows,
    b_rows,
    c_rows,
    offs_m,
    offs_n,
    M,
    N,
    K,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes a b^T and a c^T, each as `gemm_tile` does, in one loop: the gathered rows of a are read once."""
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < M
    mask_n = offs_n < N
    a_ptrs = a_rows[0] + offs_m.to(tl.int64)[:, None] * stride_of(a_rows) + offs_k[None, :]
    b_ptrs = b_rows[0] + offs_n.to(tl.int64)[None, :] * stride_of(b_rows) + offs_k[:, None]
    c_ptrs = c_rows[0] + offs_n.to(tl.int64)[None, :] * stride_of(c_rows) + offs_k[:, None]
    acc_b = tl.zeros((offs_m.shape[0], offs_n.shape[0]), dtype=tl.float32)
    acc_c = tl.zeros((offs_m.shape[0], offs_n.shape[0]), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=mask_m[:, None], other=0.0)
            b = tl.load(b_ptrs, mask=mask_n[None, :], other=0.0)
            c = tl.load(c_ptrs, mask=mask_n[None, :], other=0.0)
        else:
            mask_k = offs_k < K - k
            a = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
            c = tl.load(c_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        acc_b = dot(a, b, acc_b, PRECISION)
        acc_c = dot(a, c, acc_c, PRECISION)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
        c_ptrs += BLOCK_K
    return acc_b, acc_c


@triton.jit
def _experts_fwd_store(acc_g, acc_u, n0, b_ptr, h_rows, gu_rows, rows, R, N, ACT: tl.constexpr):
    offs_n = n0 + tl.arange(0, acc_g.shape[1])
    mask = (rows < R)[:, None] & (offs_n < N)[None, :]
    g = preact_tile(acc_g, b_ptr, offs_n, N, h_rows[0].dtype.element_ty)
    u = preact_tile(acc_u, b_ptr, offs_n + N, 2 * N, h_rows[0].dtype.element_ty)
    store_tile(h_rows, rows, offs_n, mask, gated_tile(g, u, (None, 0, 1.0, 0, 0), 0, 0, ACT))
    if gu_rows[0] is not None:
        store_tile(gu_rows, rows, offs_n, mask, g)
        store_tile(gu_rows, rows, offs_n + N, mask, u)


@triton.jit
def _rows_store(acc, n0, b_ptr, y_rows, rows, R, N):
    offs_n = n0 + tl.arange(0, acc.shape[1])
    mask = (rows < R)[:, None] & (offs_n < N)[None, :]
    store_tile(y_rows, rows, offs_n, mask, preact_tile(acc, b_ptr, offs_n, N, y_rows[0].dtype.element_ty))


@triton.jit(do_not_specialize=["MAX_TILES", "R", "T"])
def _experts_fwd_kernel(
    x_rows,
    w_stack,
    b_ptr,
    h_rows,
    gu_rows,
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
    """Computes h [R, N] and gu [R, 2 N] from x [T, K], gathered, and w [E, 2 N, K]."""
    N, K = multiple(N, UNIT), multiple(K, UNIT)
    expert, rows, pid_n = expert_tile(tiles_ptr, offs_ptr, MAX_TILES, R, N, BLOCK_M, BLOCK_N)
    if expert < 0:
        return
    tokens = tl.load(order_ptr + rows, mask=rows < R, other=0) // TOP_K
    tokens = tl.where(rows < R, tokens, T)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    wg_ptr, stride_wn = of_expert(w_stack, expert, UNIT)
    wu_ptr = wg_ptr + tl.full((), N, tl.int64) * stride_wn
    acc_g, acc_u = dual_tile(
        x_rows, (wg_ptr, stride_wn), (wu_ptr, stride_wn), tokens, offs_n, T, N, K, BLOCK_K, EVEN_K, PRECISION
    )
    if b_ptr is not None:
        b_ptr += expert.to(tl.int64) * (2 * N)
    by_slices((acc_g, acc_u), pid_n * BLOCK_N, _experts_fwd_store, (b_ptr, h_rows, gu_rows, rows, R, N, ACT), SUB)


@triton.jit(do_not_specialize=["MAX_TILES", "R"])
def _experts_gemm_kernel(
    a_rows,
    w_stack,
    b_ptr,
    y_rows,
    offs_ptr,
    tiles_ptr,
    MAX_TILES,
    R,
    N,
    K,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Computes y[r] = a[r] w[e]^T + b[e] (TRANSPOSED; w [E, N, K]), or a[r] w[e] (w [E, K, N])."""
    N, K = multiple(N, UNIT), multiple(K, UNIT)
    expert, rows, pid_n = expert_tile(tiles_ptr, offs_ptr, MAX_TILES, R, N, BLOCK_M, BLOCK_N)
    if expert < 0:
        return
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = of_expert(w_stack, expert, UNIT)
    acc = gemm_tile(a_rows, w_rows, rows, offs_n, R, N, K, TRANSPOSED, BLOCK_K, EVEN_K, PRECISION)
    if b_ptr is not None:
        b_ptr += expert.to(tl.int64) * N
    by_slices((acc,), pid_n * BLOCK_N, _rows_store, (b_ptr, y_rows, rows, R, N), SUB)


@triton.jit
def _experts_combine_kernel(
    y_rows, s_ptr, inv_ptr, offs_ptr, out_rows, E, D, TOP_K: tl.constexpr, UNIT: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Computes out[t] = sum_j s[t, j] y[inv[t, j]], j ascending, in float32, over token-expert pairs that an expert has."""
    D = multiple(D, UNIT)
    y_ptr, out_ptr = y_rows[0], out_rows[0]
    token = tl.program_id(0).to(tl.int64)
    total = tl.load(offs_ptr + E)
    for d in range(0, D, BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        acc = tl.zeros((BLOCK_D,), tl.float32)
        for j in tl.static_range(TOP_K):
            row = tl.load(inv_ptr + token * TOP_K + j)
            # A tile's comparison: of a scalar's int1 the interpreter makes an int32 tile, which 3.9 takes for no mask.
            mask = (offs_d < D) & (row + tl.zeros_like(offs_d) < total)
            y = upcast(tl.load(y_ptr + row.to(tl.int64) * stride_of(y_rows) + offs_d, mask=mask, other=0.0))
            if s_ptr is not None:
                y *= tl.load(s_ptr + token * TOP_K + j, mask=row < total, other=0.0).to(tl.float32)
            acc += y
        tl.store(out_ptr + token * stride_of(out_rows) + offs_d, cast(acc, out_ptr.dtype.element_ty), mask=offs_d < D)


def experts_fwd(x, w, b, groups, activation: str, precision: str, *, save_gu=False):
    """Computes h = act(g) u [R, N], and [g|u] = x[t] w[e]^T + b[e] [R, 2 N] or None.

    x [T, K], w [E, 2 N, K], b [E, 2 N] or None; groups: `eager.Groups`.
    """
    (T, K), R, E, N = x.shape, groups.order.numel(), len(w), w.shape[1] // 2
    x, w, b = rows_of(x), rows_of(w), None if b is None else b.contiguous()
    order, _, offs = dense_groups(groups)
    h = torch.empty((R, N), dtype=x.dtype, device=x.device)
    gu = torch.empty((R, 2 * N), dtype=x.dtype, device=x.device) if save_gu else None
    if R and N and E:
        tile = tile_of("experts_fwd", x, R, E, x, w, h)
        tiles = tiles_of(offs, R, tile)
        launch(
            _experts_fwd_kernel,
            grid_of_tiles(tiles, N, tile),
            matrix(x),
            stacked(w),
            b,
            matrix(h),
            matrix(gu),
            order,
            offs,
            tiles,
            tiles.shape[1],
            R,
            T,
            N,
            K,
            TOP_K=groups.top_k,
            ACT=activation,
            PRECISION=precision,
            **tile.launch_options(K=K),
        )
    return h, gu


def experts_gemm(a, w, b, groups, precision: str, *, transposed: bool):
    """Computes y[r] = a[r] w[e]^T + b[e] (transposed; w [E, N, K], b [E, N] or None), or a[r] w[e] (w [E, K, N]); a [R, K]."""
    (R, K), E, N = a.shape, len(w), w.shape[1 if transposed else 2]
    a, w, b = rows_of(a), rows_of(w), None if b is None else b.contiguous()
    offs = groups.offs.contiguous()
    y = torch.empty((R, N), dtype=a.dtype, device=a.device)
    if R and N and E:
        tile = tile_of("experts_gemm", a, R, E, a, w, y)
        tiles = tiles_of(offs, R, tile)
        launch(
            _experts_gemm_kernel,
            grid_of_tiles(tiles, N, tile),
            matrix(a),
            stacked(w),
            b,
            matrix(y),
            offs,
            tiles,
            tiles.shape[1],
            R,
            N,
            K,
            TRANSPOSED=transposed,
            PRECISION=precision,
            **tile.launch_options(K=K),
        )
    return y


def experts_combine(y, s, groups):
    """Computes out[t] = sum_j s[t, j] y[inv[t, j]], rounded once; y [R, D], s [T, k] or None for ones."""
    T, D, E = groups.order.numel() // groups.top_k, y.shape[1], groups.offs.numel() - 1
    _, inv, offs = dense_groups(groups)
    y, s = rows_of(y), None if s is None else s.contiguous()
    out = torch.empty((T, D), dtype=y.dtype, device=y.device)
    if T and D:
        launch(
            _experts_combine_kernel,
            (T,),
            matrix(y),
            s,
            inv,
            offs,
            matrix(out),
            E,
            D,
            TOP_K=groups.top_k,
            UNIT=unit_of(D),
            BLOCK_D=32 if arch_of(y) == INTERPRETER else 1024,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def _gradients(dy, N: int, s, groups, tile: Tile, hs: bool, dgu: bool, ds: bool):
    """Allocates s h, dgu and partial sums of ds."""
    R = groups.order.numel()
    return (
        torch.empty((R, N), dtype=dy.dtype, device=dy.device) if hs else None,
        torch.empty((R, 2 * N), dtype=dy.dtype, device=dy.device) if dgu else None,
        torch.empty((triton.cdiv(N, tile.BLOCK_N) * tile.SUB, R), dtype=torch.float32, device=dy.device)
        if ds
        else None,
    )


def _of_pairs(partial, s, groups):
    """Computes ds [T, k] float32 from partial sums [slices, R]; 0 for token-expert pairs that no expert has."""
    if partial is None:
        return None
    return torch.where(groups.inv < groups.offs[-1], partial.sum(0)[groups.inv], 0.0).view(s.shape)


def experts_bwd(x, w, b, dy, wd, s, groups, activation: str, precision: str, *, hs=True, dgu=True, ds=True):
    """Computes s h [R, N], [dg|du] [R, 2 N] and ds float32 [T, k], each None unless asked for.

    x, dy [T, K], w [E, 2 N, K], b [E, 2 N] or None, wd [E, K, N], s [T, k].
    """
    (T, K), R, E, N = x.shape, groups.order.numel(), len(w), wd.shape[2]
    x, w, dy, wd = map(rows_of, (x, w, dy, wd))
    b, s = None if b is None else b.contiguous(), s.contiguous()
    order, _, offs = dense_groups(groups)
    tile = tile_of("experts_bwd", x, R, E, x, w, dy, wd)
    h, grads, partial = _gradients(dy, N, s, groups, tile, hs, dgu, ds)
    if R and N and E:
        tiles = tiles_of(offs, R, tile)
        launch(
            _experts_bwd_kernel,
            grid_of_tiles(tiles, N, tile),
            matrix(x),
            stacked(w),
            b,
            matrix(dy),
            stacked(wd),
            s,
            matrix(h),
            matrix(grads),
            partial,
            order,
            offs,
            tiles,
            tiles.shape[1],
            R,
            T,
            N,
            K,
            TOP_K=groups.top_k,
            ACT=activation,
            PRECISION=precision,
            **tile.launch_options(K=K),
        )
    return h, grads, _of_pairs(partial, s, groups)


def experts_act_grad(gu, dy, wd, s, groups, activation: str, precision: str, *, hs=True, dgu=True, ds=True, added=None):
    """Computes the outputs of `experts_bwd` from stored gu [R, 2 N]: one matmul, dh = dy[t] wd[e] + added [R, N], if that is
    given."""
    (T, K), R, E, N = dy.shape, groups.order.numel(), len(wd), wd.shape[2]
    gu, added, dy, wd, s = *map(rows_of, (gu, added, dy, wd)), s.contiguous()
    order, _, offs = dense_groups(groups)
    tile = tile_of("experts_act_grad", dy, R, E, gu, dy, wd)
    h, grads, partial = _gradients(dy, N, s, groups, tile, hs, dgu, ds)
    if R and N and E:
        tiles = tiles_of(offs, R, tile)
        launch(
            _experts_act_grad_kernel,
            grid_of_tiles(tiles, N, tile),
            matrix(gu),
            matrix(added),
            matrix(dy),
            stacked(wd),
            s,
            matrix(h),
            matrix(grads),
            partial,
            order,
            offs,
            tiles,
            tiles.shape[1],
            R,
            T,
            N,
            K,
            TOP_K=groups.top_k,
            ACT=activation,
            PRECISION=precision,
            **tile.launch_options(K=K),
        )
    return h, grads, _of_pairs(partial, s, groups)


def experts_hidden_grad(gu, dh, s, groups, activation: str, *, hs=True, dgu=True, ds=True, over_gu=False):
    """Computes the outputs of `experts_bwd` from gu [R, 2 N] and dh [R, N], not yet weighted: one pass, after a library's
    matmuls. s h is written over dh; dgu over gu if `over_gu`."""
    R, N = dh.shape
    gu, dh, s = rows_of(gu), rows_of(dh), s.contiguous()
    blocks = blocks_of(dh) | {"BLOCK_M": 16}  # with 32 rows of three tiles, gelu spills on sm_80
    grads = None if not dgu else gu if over_gu else torch.empty_like(gu, memory_format=torch.contiguous_format)
    partial = torch.empty((triton.cdiv(N, blocks["BLOCK_N"]), R), dtype=torch.float32, device=dh.device) if ds else None
    if R and N:
        launch(
            _experts_hidden_grad_kernel,
            grid_of_blocks(R, N, blocks),
            matrix(gu),
            matrix(dh),
            s,
            matrix(dh if hs else None),
            matrix(grads),
            partial,
            groups.order.contiguous(),
            R,
            N,
            ACT=activation,
            **blocks,
        )
    return dh if hs else None, grads, _of_pairs(partial, s, groups)


def experts_dw(a, b, groups, precision: str, out, *, gathered: str):
    """Computes out[e] [M, N] = sum over the rows of e of a^T b, in float32, rounded once. An expert without rows gets zeros.

    gathered: "a" [T, M] and b [R, N], or "b" [T, N] and a [R, M]. out: the tensor [E, M, N] that it is added to, or the dtype
    of a new one.
    """
    a, b, add = rows_of(a), rows_of(b), isinstance(out, torch.Tensor)
    if not add:
        out = torch.empty((groups.offs.numel() - 1, a.shape[1], b.shape[1]), dtype=out, device=a.device)
    E, M, N = out.shape
    order, _, offs = dense_groups(groups)
    if E and M and N:
        tile = tile_of("experts_dw", a, groups.order.numel(), E, a, b, out)
        launch(
            _experts_dw_kernel,
            (E * triton.cdiv(M, tile.BLOCK_M) * triton.cdiv(N, tile.BLOCK_N),),
            matrix(a),
            matrix(b),
            stacked(out),
            order,
            offs,
            M,
            N,
            TOP_K=groups.top_k,
            GATHER_A=gathered == "a",
            ADD=add,
            PRECISION=precision,
            **tile.launch_options(),
        )
    return out


def experts_sums(a, s, groups, *, gathered: bool):
    """Computes out[e] = sum over the rows of e of a, float32 [E, N]: a [T, N] if gathered, else [R, N]; s: weights of
    token-expert pairs, or None."""
    E, N = groups.offs.numel() - 1, a.shape[1]
    a, s = rows_of(a), None if s is None else s.contiguous()
    order, _, offs = dense_groups(groups)
    out = torch.empty((E, N), dtype=torch.float32, device=a.device)
    if E and N:
        blocks = dict(BLOCK_M=32, BLOCK_N=32 if arch_of(a) == INTERPRETER else 128)
        launch(
            _experts_sums_kernel,
            (E * triton.cdiv(N, blocks["BLOCK_N"]),),
            matrix(a),
            s,
            out,
            order,
            offs,
            N,
            TOP_K=groups.top_k,
            GATHERED=gathered,
            UNIT=unit_of(N),
            num_warps=4,
            enable_fp_fusion=False,
            **blocks,
        )
    return out
