"""Experts of a mixture: grouped gated MLPs that gather their tokens in the load. No atomics, no host synchronisation.

    row r: slot order[r] = t k + j of token t, weight s[t, j]; expert e with offs[e] <= r < offs[e + 1] (`eager.Groups`)
    g, u = x[t] w[e]^T + b[e];  h = round(act(g) u);  y[r] = h wd[e]^T + bd[e];  out[t] = sum_j s[t, j] y[inv[t k + j]]
    backward  dh = dy[t] wd[e];  ds = <dh, h>;  dg, du: the gated MLP's, of s dh;  dx[t] = sum_j ([dg|du] w[e])[inv[t k + j]]
              dw[e] = [dg|du]^T x[t],  dwd[e] = dy[t]^T (s h) over the rows of e

A tile of rows is of one expert. How many tiles there are only the device knows, but never more than cdiv(R, BLOCK_M) + min(E,
R): so many programs are launched, and those that are left over leave at once. Rows beyond offs[E] are neither written nor read.
Sums over j ascend, in float32; forward and recompute add up a product in one order, so that a rebuilt g has the bits of the
first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .elementwise import store_tile
from .linear import preact_tile
from .mlp import gated_tile
from .tile import (
    INTERPRETED_TILE,
    INTERPRETER,
    Tile,
    arch_of,
    by_slices,
    cast,
    dot,
    family_of,
    launch,
    matrix,
    product_tile,
    program_tile,
    rows_of,
    widen,
)  # fmt: skip

# (kernel, architecture) -> the tile per shape class, as tile.TILES; "few": few rows for each expert.
TILES: dict[tuple[str, int], dict[str, Tile]] = {
    ("experts_fwd", 90): {
        "few": Tile(64, 128, 64, 8, 3, 4),
        "16": Tile(128, 128, 64, 8, 3, 4), "32": Tile(64, 64, 32, 8, 3), "ragged": Tile(64, 64, 64, 8, 2, 2)
    },
    ("experts_fwd", 80): {
        "few": Tile(64, 128, 32, 8, 3),
        "16": Tile(128, 64, 64, 8, 3, 2), "32": Tile(64, 64, 32, 8, 3), "ragged": Tile(64, 64, 32, 4, 2, 2)
    },
    ("experts_bwd", 90): {
        "few": Tile(64, 64, 64, 4, 4, 2),
        "16": Tile(128, 128, 64, 8, 3, 8), "32": Tile(64, 64, 32, 8, 3, 4), "ragged": Tile(64, 64, 64, 8, 2, 2)
    },
    ("experts_bwd", 80): {
        "few": Tile(64, 64, 32, 4, 3),
        "16": Tile(128, 64, 32, 8, 3, 2), "32": Tile(64, 64, 32, 8, 3, 2), "ragged": Tile(64, 64, 32, 8, 2, 2)
    },
    ("experts_act_grad", 90): {
        "few": Tile(64, 128, 64, 8, 4, 4),
        "16": Tile(128, 128, 64, 8, 4, 4), "32": Tile(64, 64, 32, 8, 3), "ragged": Tile(64, 64, 64, 8, 2, 2)
    },
    ("experts_act_grad", 80): {
        "few": Tile(64, 64, 32, 4, 4, 2),
        "16": Tile(128, 64, 64, 8, 3, 2), "32": Tile(64, 64, 32, 8, 3), "ragged": Tile(64, 64, 32, 8, 2, 2)
    },
    ("experts_product", 90): {
        "few": Tile(64, 256, 64, 8, 3, 4),
        "16": Tile(128, 256, 64, 8, 3, 4), "32": Tile(128, 64, 32, 8, 3), "ragged": Tile(64, 64, 64, 8, 2)
    },
    ("experts_product", 80): {
        "few": Tile(64, 128, 32, 8, 4),
        "16": Tile(128, 128, 32, 8, 4, 2), "32": Tile(128, 64, 32, 8, 3), "ragged": Tile(64, 64, 32, 8, 2)
    },
    ("experts_dw", 90): {
        "few": Tile(128, 128, 64, 8, 5, 2),
        "16": Tile(128, 256, 64, 8, 5, 4), "32": Tile(64, 64, 32, 8, 5), "ragged": Tile(64, 64, 64, 8, 2)
    },
    ("experts_dw", 80): {
        "few": Tile(128, 128, 32, 8, 5, 2),
        "16": Tile(128, 128, 64, 8, 5, 2), "32": Tile(64, 64, 32, 8, 5), "ragged": Tile(64, 64, 32, 8, 2)
    },
}  # fmt: skip
# An expert's last tile is half empty: at 256 rows a quarter of the products with tiles of 128, an eighth with 64. MODEL.
FEW_ROWS = 256


def tile_of(kernel: str, x: torch.Tensor, rows: int, experts: int, *operands: torch.Tensor) -> Tile:
    """As `tile.tile_for`, for matrices and stacks of them."""
    arch = arch_of(x)
    if arch == INTERPRETER:
        return INTERPRETED_TILE
    tiles = TILES[kernel, family_of(arch)]
    for one in operands:
        if one.shape[-1] % 16 or one.data_ptr() % 16 or any(stride % 16 for stride in one.stride()[:-1]):
            return tiles["ragged"]
    if x.dtype.itemsize == 4:
        return tiles["32"]
    return tiles["few" if rows < FEW_ROWS * experts else "16"]


@triton.jit(do_not_specialize=["E", "MAX_TILES"])
def _tiles_kernel(offs_ptr, tiles_ptr, E, MAX_TILES, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """tiles [2, MAX_TILES]: the expert of each tile of rows (-1: there is no such tile), and its first row.

    Program e writes expert e's, behind those of all experts before it; program E the rest.
    """
    expert = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    first = tl.full((), 0, tl.int64)  # an int32 is summed by an instruction that the emulator does not know
    for e in range(0, expert, BLOCK):
        mask = e + offs < expert
        start = tl.load(offs_ptr + e + offs, mask=mask, other=0)
        stop = tl.load(offs_ptr + e + offs + 1, mask=mask, other=0)
        first += tl.sum(((stop - start + BLOCK_M - 1) // BLOCK_M).to(tl.int64))
    row = tl.load(offs_ptr + expert)
    first = first.to(tl.int32)
    count = MAX_TILES - first
    which = -1
    if expert < E:
        count = (tl.load(offs_ptr + expert + 1) - row + BLOCK_M - 1) // BLOCK_M
        which = expert
    for i in range(0, count, BLOCK):
        tile = i + offs
        tl.store(tiles_ptr + first + tile, which + tl.zeros_like(tile), mask=tile < count)
        tl.store(tiles_ptr + MAX_TILES + first + tile, row + tile * BLOCK_M, mask=tile < count)


@triton.jit
def expert_tile(tiles_ptr, offs_ptr, MAX_TILES, R, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(expert or -1, rows [BLOCK_M], R in place of those that are not its own, tile column)."""
    tile, pid_n = program_tile(MAX_TILES * BLOCK_M, N, BLOCK_M, BLOCK_N)
    expert = tl.load(tiles_ptr + tile)
    rows = tl.load(tiles_ptr + MAX_TILES + tile) + tl.arange(0, BLOCK_M)
    return expert, tl.where(rows < tl.load(offs_ptr + expert + 1), rows, R), pid_n


@triton.jit
def of_expert(w_stack, expert):
    """(ptr, stride of rows) of one expert's matrix."""
    w_ptr, stride_we, stride_wn = w_stack
    return w_ptr + expert.to(tl.int64) * stride_we, stride_wn


@triton.jit
def dual_tile(
    a_rows, b_rows, c_rows, offs_m, offs_n, M, N, K, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """(a b^T, a c^T), each as `product_tile` forms it, in one loop: the gathered rows of a are read once."""
    a_ptr, stride_am = a_rows
    b_ptr, stride_bn = b_rows
    c_ptr, stride_cn = c_rows
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < M
    mask_n = offs_n < N
    a_ptrs = a_ptr + offs_m.to(tl.int64)[:, None] * stride_am + offs_k[None, :]
    b_ptrs = b_ptr + offs_n.to(tl.int64)[None, :] * stride_bn + offs_k[:, None]
    c_ptrs = c_ptr + offs_n.to(tl.int64)[None, :] * stride_cn + offs_k[:, None]
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
    x_rows, w_stack, b_ptr, h_rows, gu_rows, order_ptr, offs_ptr, tiles_ptr, MAX_TILES, R, T, N, K,
    TOP_K: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """x [T, K] gathered, w [E, 2 N, K] -> h [R, N], gu [R, 2 N]."""
    expert, rows, pid_n = expert_tile(tiles_ptr, offs_ptr, MAX_TILES, R, N, BLOCK_M, BLOCK_N)
    if expert < 0:
        return
    tokens = tl.load(order_ptr + rows, mask=rows < R, other=0) // TOP_K
    tokens = tl.where(rows < R, tokens, T)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    wg_ptr, stride_wn = of_expert(w_stack, expert)
    wu_ptr = wg_ptr + tl.full((), N, tl.int64) * stride_wn
    acc_g, acc_u = dual_tile(
        x_rows, (wg_ptr, stride_wn), (wu_ptr, stride_wn), tokens, offs_n, T, N, K, BLOCK_K, EVEN_K, PRECISION
    )
    if b_ptr is not None:
        b_ptr += expert.to(tl.int64) * (2 * N)
    by_slices((acc_g, acc_u), pid_n * BLOCK_N, _experts_fwd_store, (b_ptr, h_rows, gu_rows, rows, R, N, ACT), SUB)


@triton.jit(do_not_specialize=["MAX_TILES", "R"])
def _experts_product_kernel(
    a_rows, w_stack, b_ptr, y_rows, offs_ptr, tiles_ptr, MAX_TILES, R, N, K,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """y[r] = a[r] w[e]^T + b[e] (TRANSPOSED; w [E, N, K]), or a[r] w[e] (w [E, K, N])."""
    expert, rows, pid_n = expert_tile(tiles_ptr, offs_ptr, MAX_TILES, R, N, BLOCK_M, BLOCK_N)
    if expert < 0:
        return
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = of_expert(w_stack, expert)
    acc = product_tile(a_rows, w_rows, rows, offs_n, R, N, K, TRANSPOSED, BLOCK_K, EVEN_K, PRECISION)
    if b_ptr is not None:
        b_ptr += expert.to(tl.int64) * N
    by_slices((acc,), pid_n * BLOCK_N, _rows_store, (b_ptr, y_rows, rows, R, N), SUB)


@triton.jit
def _experts_combine_kernel(
    y_rows, s_ptr, inv_ptr, offs_ptr, out_rows, E, D, TOP_K: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """out[t] = sum_j s[t, j] y[inv[t, j]], j ascending, in float32, over slots that an expert has."""
    y_ptr, stride_ym = y_rows
    out_ptr, stride_om = out_rows
    token = tl.program_id(0).to(tl.int64)
    total = tl.load(offs_ptr + E)
    for d in range(0, D, BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        acc = tl.zeros((BLOCK_D,), tl.float32)
        for j in tl.static_range(TOP_K):
            row = tl.load(inv_ptr + token * TOP_K + j)
            y = widen(
                tl.load(y_ptr + row.to(tl.int64) * stride_ym + offs_d, mask=(offs_d < D) & (row < total), other=0.0)
            )
            if s_ptr is not None:
                y *= tl.load(s_ptr + token * TOP_K + j, mask=row < total, other=0.0).to(tl.float32)
            acc += y
        tl.store(out_ptr + token * stride_om + offs_d, cast(acc, out_ptr.dtype.element_ty), mask=offs_d < D)


def stacked(w: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """(ptr, stride of matrices, stride of rows)."""
    return w, w.stride(0), w.stride(1)


def dense_groups(groups):
    """Order, inverse and offsets with their elements side by side: hooks on saved tensors may give others."""
    return tuple(t.contiguous() for t in groups[:3])


def tiles_of(offs: torch.Tensor, rows: int, tile: Tile) -> torch.Tensor:
    E = offs.numel() - 1
    tiles = torch.empty((2, triton.cdiv(rows, tile.BLOCK_M) + min(E, rows)), dtype=torch.int32, device=offs.device)
    launch(_tiles_kernel, (E + 1,), offs, tiles, E, tiles.shape[1], BLOCK_M=tile.BLOCK_M, BLOCK=256, num_warps=4)
    return tiles


def grid_of_tiles(tiles: torch.Tensor, N: int, tile: Tile) -> tuple[int]:
    return (tiles.shape[1] * triton.cdiv(N, tile.BLOCK_N),)


def experts_fwd(x, w, b, groups, activation: str, precision: str, *, keep_gu=False, tile=None):
    """h = act(g) u, [g|u] = x[t] w[e]^T + b[e] -> (h [R, N], gu [R, 2 N] or None).

    x [T, K], w [E, 2 N, K], b [E, 2 N] or None; groups: `eager.Groups`.
    """
    (T, K), R, E, N = x.shape, groups.order.numel(), len(w), w.shape[1] // 2
    x, w, b = rows_of(x), rows_of(w), None if b is None else b.contiguous()
    order, _, offs = dense_groups(groups)
    h = torch.empty((R, N), dtype=x.dtype, device=x.device)
    gu = torch.empty((R, 2 * N), dtype=x.dtype, device=x.device) if keep_gu else None
    if R and N and E:
        tile = tile or tile_of("experts_fwd", x, R, E, x, w, h)
        tiles = tiles_of(offs, R, tile)
        launch(
            _experts_fwd_kernel, grid_of_tiles(tiles, N, tile), matrix(x), stacked(w), b, matrix(h), matrix(gu), order, offs,
            tiles, tiles.shape[1], R, T, N, K,
            TOP_K=groups.top_k, ACT=activation, PRECISION=precision, EVEN_K=K % tile.BLOCK_K == 0, **tile.launch_options(),
        )  # fmt: skip
    return h, gu


def experts_product(a, w, b, groups, precision: str, *, transposed: bool, tile=None):
    """y[r] = a[r] w[e]^T + b[e] (transposed; w [E, N, K], b [E, N] or None), or a[r] w[e] (w [E, K, N]), for a [R, K]."""
    (R, K), E, N = a.shape, len(w), w.shape[1 if transposed else 2]
    a, w, b = rows_of(a), rows_of(w), None if b is None else b.contiguous()
    offs = groups.offs.contiguous()
    y = torch.empty((R, N), dtype=a.dtype, device=a.device)
    if R and N and E:
        tile = tile or tile_of("experts_product", a, R, E, a, w, y)
        tiles = tiles_of(offs, R, tile)
        launch(
            _experts_product_kernel, grid_of_tiles(tiles, N, tile), matrix(a), stacked(w), b, matrix(y), offs, tiles,
            tiles.shape[1], R, N, K,
            TRANSPOSED=transposed, PRECISION=precision, EVEN_K=K % tile.BLOCK_K == 0, **tile.launch_options(),
        )  # fmt: skip
    return y


def experts_combine(y, s, groups):
    """out[t] = sum_j s[t, j] y[inv[t, j]], rounded once; y [R, D], s [T, k] or None for ones."""
    T, D, E = groups.order.numel() // groups.top_k, y.shape[1], groups.offs.numel() - 1
    _, inv, offs = dense_groups(groups)
    y, s = rows_of(y), None if s is None else s.contiguous()
    out = torch.empty((T, D), dtype=y.dtype, device=y.device)
    if T and D:
        launch(
            _experts_combine_kernel, (T,), matrix(y), s, inv, offs, matrix(out), E, D,
            TOP_K=groups.top_k, BLOCK_D=32 if arch_of(y) == INTERPRETER else 1024, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
