"""Linear + activation [+ dropout]: forward, backward from x alone, and the activation-gradient product.

    z = x w^T + b  [M, N], rounded to the storage type;  h = dropout(round(act(z)))
    linear_fwd      x -> h [, z] [, relu's 1-bit mask]
    linear_bwd      x, dh -> dz = dh * act'(z), db: z is rebuilt in the tile where it is consumed
    act_grad        dy, w, (z or h) -> dz = (dy w) * act'(z), db [, h]: the step back through one layer of a chain

Forward and recompute share `preact_tile`, which ends in the cast, so a rebuilt z has the bits of the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .elementwise import act, load_tile, pack_bits, store_column_sum, store_tile
from .elementwise import act_grad as act_grad_of
from .philox import checked_row_base, dropout_tile
from .tile import (
    arch_of,
    by_slices,
    cast,
    launch,
    product_tile,
    program_tile,
    rows_of,
    slice_offsets,
    tile_for,
    widen,
)  # fmt: skip


@triton.jit
def preact_tile(acc, b_ptr, offs_n, N, dtype: tl.constexpr):
    """round(acc + b): the pre-activation tile, in the storage type."""
    if b_ptr is not None:
        acc += widen(tl.load(b_ptr + offs_n, mask=offs_n < N, other=0.0))[None, :]
    return cast(acc, dtype)


@triton.jit
def hidden_tile(z, state_ptr, threshold, scale, first_row, first_col, ACT: tl.constexpr):
    """h = dropout(round(act(z))) in z's type."""
    h = cast(act(widen(z), ACT), z.dtype)
    if state_ptr is not None:
        h = cast(dropout_tile(widen(h), state_ptr, threshold, scale, first_row, first_col), z.dtype)
    return h


@triton.jit
def _linear_fwd_store(
    acc, n0, b_ptr, h_ptr, z_ptr, bits_ptr, state_ptr, threshold, scale, row_base, pid_m, M, N,
    stride_hm, stride_zm, stride_bitsm, ACT: tl.constexpr,
):  # fmt: skip
    offs_m, offs_n, mask = slice_offsets(acc, pid_m, n0, M, N)
    z = preact_tile(acc, b_ptr, offs_n, N, h_ptr.dtype.element_ty)
    if z_ptr is not None:
        store_tile(z_ptr, stride_zm, offs_m, offs_n, mask, z)
    if bits_ptr is not None:
        offs_byte = n0 // 8 + tl.arange(0, acc.shape[1] // 8)
        bits = pack_bits(~(widen(z) <= 0.0), acc.shape[0], acc.shape[1])  # NaN counts as passed, as in torch
        store_tile(
            bits_ptr,
            stride_bitsm,
            offs_m,
            offs_byte,
            (offs_m < M)[:, None] & (offs_byte < tl.cdiv(N, 8))[None, :],
            bits,
        )
    h = hidden_tile(z, state_ptr, threshold, scale, row_base + pid_m * acc.shape[0], n0, ACT)
    store_tile(h_ptr, stride_hm, offs_m, offs_n, mask, h)


@triton.jit(do_not_specialize=["M", "threshold", "row_base"])
def _linear_fwd_kernel(
    x_ptr, w_ptr, b_ptr, h_ptr, z_ptr, bits_ptr, state_ptr, threshold, scale, row_base, M, N, K,
    stride_xm, stride_wn, stride_hm, stride_zm, stride_bitsm,
    ACT: tl.constexpr, PRECISION: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = program_tile(M, N, BLOCK_M, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = product_tile(
        x_ptr, stride_xm, w_ptr, 1, stride_wn, offs_m, offs_n, M, N, K, BLOCK_K, EVEN_K, PRECISION
    )  # fmt: skip
    by_slices(
        (acc,), pid_n * BLOCK_N, _linear_fwd_store,
        (b_ptr, h_ptr, z_ptr, bits_ptr, state_ptr, threshold, scale, row_base, pid_m, M, N,
         stride_hm, stride_zm, stride_bitsm, ACT), SUB,
    )  # fmt: skip


@triton.jit
def _linear_bwd_store(
    acc, n0, b_ptr, dh_ptr, dz_ptr, db_ptr, pid_m, M, N, stride_dhm, stride_dzm, ACT: tl.constexpr
):  # fmt: skip
    offs_m, offs_n, mask = slice_offsets(acc, pid_m, n0, M, N)
    z = preact_tile(acc, b_ptr, offs_n, N, dz_ptr.dtype.element_ty)
    dh = widen(load_tile(dh_ptr, stride_dhm, offs_m, offs_n, mask))
    dz = cast(act_grad_of(widen(z), dh, ACT), z.dtype)
    store_tile(dz_ptr, stride_dzm, offs_m, offs_n, mask, dz)
    if db_ptr is not None:
        store_column_sum(db_ptr, pid_m, offs_n, N, dz, mask)


@triton.jit(do_not_specialize=["M"])
def _linear_bwd_kernel(
    x_ptr, w_ptr, b_ptr, dh_ptr, dz_ptr, db_ptr, M, N, K, stride_xm, stride_wn, stride_dhm, stride_dzm,
    ACT: tl.constexpr, PRECISION: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = program_tile(M, N, BLOCK_M, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = product_tile(
        x_ptr, stride_xm, w_ptr, 1, stride_wn, offs_m, offs_n, M, N, K, BLOCK_K, EVEN_K, PRECISION
    )  # fmt: skip
    by_slices(
        (acc,), pid_n * BLOCK_N, _linear_bwd_store,
        (b_ptr, dh_ptr, dz_ptr, db_ptr, pid_m, M, N, stride_dhm, stride_dzm, ACT), SUB,
    )  # fmt: skip


@triton.jit
def hidden_grad_tile(z, dh, state_ptr, threshold, scale, first_row, first_col, ACT: tl.constexpr):
    """dz = dropout'(dh) * act'(z) for float32 dh: the mask of forward, drawn again."""
    if state_ptr is not None:
        dh = dropout_tile(dh, state_ptr, threshold, scale, first_row, first_col)
    return act_grad_of(widen(z), dh, ACT)


@triton.jit
def _act_grad_store(
    acc, n0, z_ptr, h_ptr, dz_ptr, db_ptr, state_ptr, threshold, scale, row_base, pid_m, M, N,
    stride_zm, stride_hm, stride_dzm, ACT: tl.constexpr,
):  # fmt: skip
    offs_m, offs_n, mask = slice_offsets(acc, pid_m, n0, M, N)
    first_row = row_base + pid_m * acc.shape[0]
    z = load_tile(z_ptr, stride_zm, offs_m, offs_n, mask)
    dz = cast(hidden_grad_tile(z, acc, state_ptr, threshold, scale, first_row, n0, ACT), z.dtype)
    store_tile(dz_ptr, stride_dzm, offs_m, offs_n, mask, dz)
    if h_ptr is not None:
        h = hidden_tile(z, state_ptr, threshold, scale, first_row, n0, ACT)
        store_tile(h_ptr, stride_hm, offs_m, offs_n, mask, h)
    if db_ptr is not None:
        store_column_sum(db_ptr, pid_m, offs_n, N, dz, mask)


@triton.jit(do_not_specialize=["M", "threshold", "row_base"])
def _act_grad_kernel(
    dy_ptr, w_ptr, z_ptr, h_ptr, dz_ptr, db_ptr, state_ptr, threshold, scale, row_base, M, N, K,
    stride_dym, stride_wk, stride_zm, stride_hm, stride_dzm,
    ACT: tl.constexpr, PRECISION: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """dh = dy w (dy [M, K], w [K, N]); dz = dropout'(dh) act'(z); h = dropout(act(z)); h may be written over z."""
    pid_m, pid_n = program_tile(M, N, BLOCK_M, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = product_tile(
        dy_ptr, stride_dym, w_ptr, stride_wk, 1, offs_m, offs_n, M, N, K, BLOCK_K, EVEN_K, PRECISION
    )  # fmt: skip
    by_slices(
        (acc,), pid_n * BLOCK_N, _act_grad_store,
        (z_ptr, h_ptr, dz_ptr, db_ptr, state_ptr, threshold, scale, row_base, pid_m, M, N,
         stride_zm, stride_hm, stride_dzm, ACT), SUB,
    )  # fmt: skip


NO_DROPOUT = (None, 0, 1.0)  # (state, threshold, scale)


def grid_of(M: int, N: int, tile) -> tuple[int]:
    return (triton.cdiv(M, tile.BLOCK_M) * triton.cdiv(N, tile.BLOCK_N),)


def partial_rows(M: int, N: int, tile, like: torch.Tensor) -> torch.Tensor:
    """Room for bias-gradient partial sums: one float32 row per tile row."""
    return torch.empty((triton.cdiv(M, tile.BLOCK_M), N), dtype=torch.float32, device=like.device)


def row_stride(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def linear_fwd(
    x,
    w,
    b,
    activation: str,
    precision: str,
    *,
    dropout=NO_DROPOUT,
    row_base=0,
    keep_z=False,
    keep_bits=False,
    tile=None,
):
    """h = dropout(act(x w^T + b)) -> (h [M, N], z [M, N] or None, bits uint8 [M, ceil(N/8)] or None).

    x [M, K], w [N, K], b [N] or None, all of one dtype. dropout = (state, threshold, scale).
    """
    M, K = x.shape
    N = w.shape[0]
    x, w, b = rows_of(x), rows_of(w), rows_of(b)
    h = torch.empty((M, N), dtype=x.dtype, device=x.device)
    tile = tile or tile_for("linear", arch_of(x), M, N, x, w, h)
    z = torch.empty_like(h) if keep_z else None
    bits = torch.empty((M, triton.cdiv(N, 8)), dtype=torch.uint8, device=x.device) if keep_bits else None
    if M and N:
        launch(
            _linear_fwd_kernel, grid_of(M, N, tile), x, w, b, h, z, bits, *dropout, checked_row_base(row_base), M, N, K,
            x.stride(0), w.stride(0), h.stride(0), row_stride(z), row_stride(bits),
            ACT=activation, PRECISION=precision, EVEN_K=K % tile.BLOCK_K == 0, **tile.launch_options(),
        )  # fmt: skip
    return h, z, bits


def linear_bwd(x, w, b, dh, activation: str, precision: str, *, db=False, tile=None):
    """dz = dh * act'(x w^T + b) [M, N], and db = sum of dz's rows (float32 [N]; None unless asked for)."""
    M, K = x.shape
    N = w.shape[0]
    x, w, b, dh = rows_of(x), rows_of(w), rows_of(b), rows_of(dh)
    tile = tile or tile_for("linear", arch_of(x), M, N, x, w, dh)
    dz = torch.empty((M, N), dtype=x.dtype, device=x.device)
    partial = partial_rows(M, N, tile, x) if db else None
    if M and N:
        launch(
            _linear_bwd_kernel, grid_of(M, N, tile), x, w, b, dh, dz, partial, M, N, K,
            x.stride(0), w.stride(0), dh.stride(0), dz.stride(0),
            ACT=activation, PRECISION=precision, EVEN_K=K % tile.BLOCK_K == 0, **tile.launch_options(),
        )  # fmt: skip
    return dz, partial.sum(0) if db else None


def act_grad(
    dy, w, z, activation: str, precision: str, *, dropout=NO_DROPOUT, row_base=0, keep_h=False, h_over_z=False,
    db=False, tile=None,
):  # fmt: skip
    """One step back through a chain: dz = dropout'(dy w) * act'(z) -> (dz [M, N], h or None, db float32 [N] or None).

    dy [M, K], w [K, N]. z [M, N] is the pre-activation, or for relu the activation itself. `h_over_z` writes
    h = dropout(act(z)) into z's own memory, for a z that is workspace.
    """
    M, K = dy.shape
    N = w.shape[1]
    dy, w, z = rows_of(dy), rows_of(w), rows_of(z)
    tile = tile or tile_for("act_grad", arch_of(dy), M, N, dy, w, z)
    dz = torch.empty((M, N), dtype=dy.dtype, device=dy.device)
    h = (z if h_over_z else torch.empty_like(dz)) if keep_h else None
    partial = partial_rows(M, N, tile, dy) if db else None
    if M and N:
        launch(
            _act_grad_kernel, grid_of(M, N, tile), dy, w, z, h, dz, partial, *dropout, checked_row_base(row_base), M, N, K,
            dy.stride(0), w.stride(0), z.stride(0), row_stride(h), dz.stride(0),
            ACT=activation, PRECISION=precision, EVEN_K=K % tile.BLOCK_K == 0, **tile.launch_options(),
        )  # fmt: skip
    return dz, h, partial.sum(0) if db else None
