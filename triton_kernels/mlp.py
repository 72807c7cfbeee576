"""MLP and gated MLP: the hidden layer's backward from x alone.

    MLP        z = x w1^T + b1;  h = dropout(act(z));          y = h w2^T + b2
    gated MLP  g = x wg^T + bg;  u = x wu^T + bu;  h = dropout(act(g) u);  y = h wd^T + bd
    backward   dh = dy w2;  MLP: dz = dh' act'(z)   gated: dg = dh' u act'(g), du = dh' act(g)   (dh' = dropout'(dh))

The dual-matmul kernels form z (or g, u) and dh of one tile side by side and write h and dz once; `gated_act_grad` forms dh
alone, from g and u that forward saved. The matmuls that remain (y, dW1, dW2, dx) are plain and go to cuBLAS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..results import GatedForward, GatedGradient, HiddenGradient
from .elementwise import (
    act,
    act_grad,
    block_of,
    block_sums,
    blocks_of,
    grid_of_blocks,
    load_tile,
    row_sums,
    store_column_sum,
    store_tile,
)
from .linear import (
    NO_DROPOUT,
    grid_of,
    hidden_grad_store,
    partial_rows,
    preact_tile,
)
from .philox import apply_dropout, dropout_mask, placed, times
from .tile import (
    arch_of,
    by_slices,
    cast,
    gemm_tile,
    launch,
    matrix,
    multiple,
    program_tile,
    rows_of,
    slice_offsets,
    tile_for,
    upcast,
)


@triton.jit
def _mlp_bwd_store(acc_z, acc_dh, n0, b_ptr, h_rows, dz_rows, db_ptr, dropout, pid_m, M, N, ACT: tl.constexpr):
    z = preact_tile(acc_z, b_ptr, n0 + tl.arange(0, acc_z.shape[1]), N, dz_rows[0].dtype.element_ty)
    hidden_grad_store(z, acc_dh, n0, h_rows, dz_rows, db_ptr, dropout, pid_m, M, N, ACT)


@triton.jit
def gated_tile(g, u, dropout, first_row, first_col, ACT: tl.constexpr):
    """Computes h = dropout(round(act(g) u)) in g's type."""
    h = cast(act(g, ACT) * upcast(u), g.dtype)
    if dropout[0] is not None:
        keep = dropout_mask(dropout, first_row, first_col, g.shape[0], g.shape[1])
        h = cast(apply_dropout(upcast(h), dropout, keep), g.dtype)
    return h


@triton.jit
def _gated_fwd_store(acc_g, acc_u, n0, bg_ptr, bu_ptr, h_rows, g_rows, u_rows, dropout, pid_m, M, N, ACT: tl.constexpr):
    offs_m, offs_n, mask = slice_offsets(acc_g, pid_m, n0, M, N)
    g = preact_tile(acc_g, bg_ptr, offs_n, N, h_rows[0].dtype.element_ty)
    u = preact_tile(acc_u, bu_ptr, offs_n, N, h_rows[0].dtype.element_ty)
    store_tile(h_rows, offs_m, offs_n, mask, gated_tile(g, u, dropout, pid_m * acc_g.shape[0], n0, ACT))
    if g_rows[0] is not None:
        store_tile(g_rows, offs_m, offs_n, mask, g)
        store_tile(u_rows, offs_m, offs_n, mask, u)


@triton.jit
def gated_grad_store(g, u, dh, n0, h_rows, dg_rows, du_rows, dbg_ptr, dbu_ptr, dropout, pid_m, M, N, ACT: tl.constexpr):
    """Writes h, dg, du and the bias partial rows, each once, from g, u (storage type) and dh (float32); the mask is computed
    once, as in `hidden_grad_store`."""
    offs_m, offs_n, mask = slice_offsets(dh, pid_m, n0, M, N)
    a = act(g, ACT)
    h = cast(a * upcast(u), g.dtype)
    if dropout[0] is not None:
        keep = dropout_mask(dropout, pid_m * dh.shape[0], n0, g.shape[0], g.shape[1])
        h = cast(apply_dropout(upcast(h), dropout, keep), g.dtype)
        du = cast(times(dh, apply_dropout(a, dropout, keep)), u.dtype)
        dg = cast(times(dh, act_grad(g, apply_dropout(upcast(u), dropout, keep), ACT)), g.dtype)
    else:
        du = cast(dh * a, u.dtype)
        dg = cast(act_grad(g, dh * upcast(u), ACT), g.dtype)
    if h_rows[0] is not None:
        store_tile(h_rows, offs_m, offs_n, mask, h)
    store_tile(du_rows, offs_m, offs_n, mask, du)
    if dbu_ptr is not None:
        store_column_sum(dbu_ptr, pid_m, offs_n, N, du, mask)
    store_tile(dg_rows, offs_m, offs_n, mask, dg)
    if dbg_ptr is not None:
        store_column_sum(dbg_ptr, pid_m, offs_n, N, dg, mask)


@triton.jit
def _gated_bwd_store(acc_g, acc_u, acc_dh, n0, bg_ptr, bu_ptr, results, dropout, pid_m, M, N, ACT: tl.constexpr):
    """Rounds g and u and calls `gated_grad_store`. results: what that writes, from h_rows to dbu_ptr."""
    offs_n = n0 + tl.arange(0, acc_g.shape[1])
    dtype: tl.constexpr = results[1][0].dtype.element_ty
    g = preact_tile(acc_g, bg_ptr, offs_n, N, dtype)
    u = preact_tile(acc_u, bu_ptr, offs_n, N, dtype)
    gated_grad_store(g, u, acc_dh, n0, *results, dropout, pid_m, M, N, ACT)


@triton.jit
def _gated_act_grad_store(acc, n0, g_rows, u_rows, results, dropout, pid_m, M, N, ACT: tl.constexpr):
    offs_m, offs_n, mask = slice_offsets(acc, pid_m, n0, M, N)
    g = load_tile(g_rows, offs_m, offs_n, mask)
    u = load_tile(u_rows, offs_m, offs_n, mask)
    gated_grad_store(g, u, acc, n0, *results, dropout, pid_m, M, N, ACT)


@triton.jit(do_not_specialize=["M", "threshold", "col_base", "row_base"])
def _mlp_bwd_kernel(
    x_rows,
    w1_rows,
    b1_ptr,
    dy_rows,
    w2_rows,
    h_rows,
    dz_rows,
    db_ptr,
    state_ptr,
    threshold,
    scale,
    col_base,
    row_base,
    M,
    N,
    K,
    D,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Computes h, dz [M, N] and db partial rows from x [M, K], w1 [N, K], dy [M, D], w2 [D, N]."""
    N, K, D = multiple(N, UNIT), multiple(K, UNIT), multiple(D, UNIT)
    pid_m, pid_n = program_tile(M, N, BLOCK_M, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc_z = gemm_tile(x_rows, w1_rows, offs_m, offs_n, M, N, K, True, BLOCK_K, EVEN_K, PRECISION)
    acc_dh = gemm_tile(dy_rows, w2_rows, offs_m, offs_n, M, N, D, False, BLOCK_K, EVEN_D, PRECISION)
    by_slices(
        (acc_z, acc_dh),
        pid_n * BLOCK_N,
        _mlp_bwd_store,
        (b1_ptr, h_rows, dz_rows, db_ptr, (state_ptr, threshold, scale, col_base, row_base), pid_m, M, N, ACT),
        SUB,
    )


@triton.jit(do_not_specialize=["M", "threshold", "col_base", "row_base"])
def _gated_fwd_kernel(
    x_rows,
    wg_rows,
    bg_ptr,
    wu_rows,
    bu_ptr,
    h_rows,
    g_rows,
    u_rows,
    state_ptr,
    threshold,
    scale,
    col_base,
    row_base,
    M,
    N,
    K,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    UNIT: tl.constexpr,
):
    N, K = multiple(N, UNIT), multiple(K, UNIT)
    pid_m, pid_n = program_tile(M, N, BLOCK_M, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc_g = gemm_tile(x_rows, wg_rows, offs_m, offs_n, M, N, K, True, BLOCK_K, EVEN_K, PRECISION)
    acc_u = gemm_tile(x_rows, wu_rows, offs_m, offs_n, M, N, K, True, BLOCK_K, EVEN_K, PRECISION)
    by_slices(
        (acc_g, acc_u),
        pid_n * BLOCK_N,
        _gated_fwd_store,
        (bg_ptr, bu_ptr, h_rows, g_rows, u_rows, (state_ptr, threshold, scale, col_base, row_base), pid_m, M, N, ACT),
        SUB,
    )


@triton.jit(do_not_specialize=["M", "threshold", "col_base", "row_base"])
def _gated_bwd_kernel(
    x_rows,
    wg_rows,
    bg_ptr,
    wu_rows,
    bu_ptr,
    dy_rows,
    wd_rows,
    results,
    state_ptr,
    threshold,
    scale,
    col_base,
    row_base,
    M,
    N,
    K,
    D,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Computes h, dg, du [M, N] from x [M, K], wg and wu [N, K], dy [M, D], wd [D, N]. dh comes last: its tile is the
    shortest-lived."""
    N, K, D = multiple(N, UNIT), multiple(K, UNIT), multiple(D, UNIT)
    pid_m, pid_n = program_tile(M, N, BLOCK_M, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc_g = gemm_tile(x_rows, wg_rows, offs_m, offs_n, M, N, K, True, BLOCK_K, EVEN_K, PRECISION)
    acc_u = gemm_tile(x_rows, wu_rows, offs_m, offs_n, M, N, K, True, BLOCK_K, EVEN_K, PRECISION)
    acc_dh = gemm_tile(dy_rows, wd_rows, offs_m, offs_n, M, N, D, False, BLOCK_K, EVEN_D, PRECISION)
    by_slices(
        (acc_g, acc_u, acc_dh),
        pid_n * BLOCK_N,
        _gated_bwd_store,
        (bg_ptr, bu_ptr, results, (state_ptr, threshold, scale, col_base, row_base), pid_m, M, N, ACT),
        SUB,
    )


@triton.jit(do_not_specialize=["M", "threshold", "col_base", "row_base"])
def _gated_act_grad_kernel(
    dy_rows,
    wd_rows,
    g_rows,
    u_rows,
    results,
    state_ptr,
    threshold,
    scale,
    col_base,
    row_base,
    M,
    N,
    K,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Computes dh = dy wd (dy [M, K], wd [K, N]), then what _gated_bwd_kernel does, from stored g and u."""
    N, K = multiple(N, UNIT), multiple(K, UNIT)
    pid_m, pid_n = program_tile(M, N, BLOCK_M, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = gemm_tile(dy_rows, wd_rows, offs_m, offs_n, M, N, K, False, BLOCK_K, EVEN_K, PRECISION)
    by_slices(
        (acc,),
        pid_n * BLOCK_N,
        _gated_act_grad_store,
        (g_rows, u_rows, results, (state_ptr, threshold, scale, col_base, row_base), pid_m, M, N, ACT),
        SUB,
    )


@triton.jit(do_not_specialize=["M"])
def _gated_hidden_grad_kernel(
    dh_rows,
    g_rows,
    u_rows,
    results,
    M,
    N,
    ACT: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes what `_gated_act_grad_kernel` does, from stored dh."""
    N = multiple(N, UNIT)
    pid_m, pid_n = block_of(N, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    g = load_tile(g_rows, offs_m, offs_n, mask)
    u = load_tile(u_rows, offs_m, offs_n, mask)
    dh = upcast(load_tile(dh_rows, offs_m, offs_n, mask))
    gated_grad_store(g, u, dh, pid_n * BLOCK_N, *results, (None, 0, 1.0, 0, 0), pid_m, M, N, ACT)


def mlp_bwd(
    x,
    w1,
    b1,
    dy,
    w2,
    activation: str,
    precision: str,
    *,
    dropout=NO_DROPOUT,
    row_base=0,
    save_h=True,
    db=False,
    tile=None,
):
    """Runs the dual matmul; returns a HiddenGradient. x [M, K], w1 [N, K], b1 [N] or None, dy [M, D], w2 [D, N]."""
    M, K = x.shape
    N, D = w1.shape[0], dy.shape[1]
    x, w1, b1, dy, w2 = map(rows_of, (x, w1, b1, dy, w2))
    tile = tile or tile_for("dual", arch_of(x), M, N, x, w1, dy, w2)
    dz = torch.empty((M, N), dtype=x.dtype, device=x.device)
    h = torch.empty_like(dz) if save_h else None
    partial = partial_rows(M, N, tile, x) if db else None
    if M and N:
        launch(
            _mlp_bwd_kernel,
            grid_of(M, N, tile),
            matrix(x),
            matrix(w1),
            b1,
            matrix(dy),
            matrix(w2),
            matrix(h),
            matrix(dz),
            partial,
            *placed(dropout, row_base),
            M,
            N,
            K,
            D,
            ACT=activation,
            PRECISION=precision,
            **tile.launch_options(K=K, D=D),
        )
    return HiddenGradient(dz, h, *row_sums((partial,), (db,)))


def gated_fwd(
    x,
    wg,
    bg,
    wu,
    bu,
    activation: str,
    precision: str,
    *,
    dropout=NO_DROPOUT,
    row_base=0,
    save_gu=False,
    tile=None,
):
    """Computes h = dropout(act(x wg^T + bg) (x wu^T + bu)); returns a GatedForward."""
    M, K = x.shape
    N = wg.shape[0]
    x, wg, bg, wu, bu = map(rows_of, (x, wg, bg, wu, bu))
    h = torch.empty((M, N), dtype=x.dtype, device=x.device)
    tile = tile or tile_for("dual", arch_of(x), M, N, x, wg, wu, h)
    g, u = (torch.empty_like(h), torch.empty_like(h)) if save_gu else (None, None)
    if M and N:
        launch(
            _gated_fwd_kernel,
            grid_of(M, N, tile),
            matrix(x),
            matrix(wg),
            bg,
            matrix(wu),
            bu,
            matrix(h),
            matrix(g),
            matrix(u),
            *placed(dropout, row_base),
            M,
            N,
            K,
            ACT=activation,
            PRECISION=precision,
            **tile.launch_options(K=K),
        )
    return GatedForward(h, g, u)


def gated_bwd(
    x,
    wg,
    bg,
    wu,
    bu,
    dy,
    wd,
    activation: str,
    precision: str,
    *,
    dropout=NO_DROPOUT,
    row_base=0,
    save_h=True,
    dbg=False,
    dbu=False,
    tile=None,
):
    """Runs the triple matmul; returns a GatedGradient. x [M, K], wg and wu [N, K], dy [M, D], wd [D, N]."""
    M, K = x.shape
    N, D = wg.shape[0], dy.shape[1]
    x, wg, bg, wu, bu, dy, wd = map(rows_of, (x, wg, bg, wu, bu, dy, wd))
    tile = tile or tile_for("triple", arch_of(x), M, N, x, wg, wu, dy, wd)
    dg = torch.empty((M, N), dtype=x.dtype, device=x.device)
    du = torch.empty_like(dg)
    h = torch.empty_like(dg) if save_h else None
    partial_g = partial_rows(M, N, tile, x) if dbg else None
    partial_u = partial_rows(M, N, tile, x) if dbu else None
    if M and N:
        launch(
            _gated_bwd_kernel,
            grid_of(M, N, tile),
            matrix(x),
            matrix(wg),
            bg,
            matrix(wu),
            bu,
            matrix(dy),
            matrix(wd),
            (matrix(h), matrix(dg), matrix(du), partial_g, partial_u),
            *placed(dropout, row_base),
            M,
            N,
            K,
            D,
            ACT=activation,
            PRECISION=precision,
            **tile.launch_options(K=K, D=D),
        )
    return GatedGradient(dg, du, h, *row_sums((partial_g, partial_u), (dbg, dbu)))


def gated_act_grad(
    dy,
    wd,
    g,
    u,
    activation: str,
    precision: str,
    *,
    dropout=NO_DROPOUT,
    row_base=0,
    save_h=True,
    dbg=False,
    dbu=False,
    tile=None,
):
    """Computes the outputs of `gated_bwd` from stored g and u [M, N]: one matmul, dh = dy wd."""
    (M, K), N = dy.shape, wd.shape[1]
    dy, wd, g, u = rows_of(dy), rows_of(wd), rows_of(g), rows_of(u)
    tile = tile or tile_for("gated_act_grad", arch_of(dy), M, N, dy, wd, g, u)
    dg = torch.empty((M, N), dtype=dy.dtype, device=dy.device)
    du = torch.empty_like(dg)
    h = torch.empty_like(dg) if save_h else None
    partial_g = partial_rows(M, N, tile, dy) if dbg else None
    partial_u = partial_rows(M, N, tile, dy) if dbu else None
    if M and N:
        launch(
            _gated_act_grad_kernel,
            grid_of(M, N, tile),
            matrix(dy),
            matrix(wd),
            matrix(g),
            matrix(u),
            (matrix(h), matrix(dg), matrix(du), partial_g, partial_u),
            *placed(dropout, row_base),
            M,
            N,
            K,
            ACT=activation,
            PRECISION=precision,
            **tile.launch_options(K=K),
        )
    return GatedGradient(dg, du, h, *row_sums((partial_g, partial_u), (dbg, dbu)))


def gated_hidden_grad(dh, g, u, activation: str, *, save_h=True, dbg=False, dbu=False, over=False, over_gu=False):
    """Computes the outputs of `gated_act_grad` in one pass over stored dh, g and u [M, N]. over: h is written over dh; over_gu:
    dg over g and du over u."""
    M, N = dh.shape
    dh, g, u = rows_of(dh), rows_of(g), rows_of(u)
    dg, du = (tensor if over_gu else torch.empty((M, N), dtype=dh.dtype, device=dh.device) for tensor in (g, u))
    h = (dh if over else torch.empty_like(dg)) if save_h else None
    blocks = blocks_of(dh)
    partial_g = block_sums(M, N, blocks, dh) if dbg else None
    partial_u = block_sums(M, N, blocks, dh) if dbu else None
    if M and N:
        launch(
            _gated_hidden_grad_kernel,
            grid_of_blocks(M, N, blocks),
            matrix(dh),
            matrix(g),
            matrix(u),
            (matrix(h), matrix(dg), matrix(du), partial_g, partial_u),
            M,
            N,
            ACT=activation,
            **blocks,
        )
    return GatedGradient(dg, du, h, *row_sums((partial_g, partial_u), (dbg, dbu)))
