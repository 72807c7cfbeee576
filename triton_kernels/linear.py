"""Linear + activation [+ dropout]: forward, backward from x alone, and the activation-gradient matmul.

    z = x w^T + b  [M, N], rounded to the storage type;  h = dropout(round(act(z)))
    linear_fwd      x -> h [, z] [, relu's 1-bit mask]
    linear_bwd      x, dh -> dz = dh * act'(z), db: z is recomputed in the tile where it is consumed
    act_grad        dy, w, (z or h) -> dz = (dy w) * act'(z), db [, h]: the step back through one layer of a chain

Forward and recompute share `preact_tile`, which ends in the cast, so a recomputed z has the bits of the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..results import HiddenGradient, LinearForward
from .elementwise import (
    act,
    block_of,
    block_sums,
    blocks_of,
    grid_of_blocks,
    load_tile,
    pack_bits,
    row_sums,
    store_column_sum,
    store_tile,
)
from .elementwise import act_grad as act_grad_of
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
def preact_tile(acc, b_ptr, offs_n, N, dtype: tl.constexpr):
    """Returns round(acc + b): the pre-activation tile, in the storage type."""
    if b_ptr is not None:
        acc += upcast(tl.load(b_ptr + offs_n, mask=offs_n < N, other=0.0))[None, :]
    return cast(acc, dtype)


@triton.jit
def hidden_tile(z, dropout, first_row, first_col, ACT: tl.constexpr):
    """Computes h = dropout(round(act(z))) in z's type."""
    h = cast(act(z, ACT), z.dtype)
    if dropout[0] is not None:
        keep = dropout_mask(dropout, first_row, first_col, z.shape[0], z.shape[1])
        h = cast(apply_dropout(upcast(h), dropout, keep), z.dtype)
    return h


@triton.jit
def _linear_fwd_store(acc, n0, b_ptr, h_rows, z_rows, bits_rows, dropout, pid_m, M, N, ACT: tl.constexpr):
    offs_m, offs_n, mask = slice_offsets(acc, pid_m, n0, M, N)
    z = preact_tile(acc, b_ptr, offs_n, N, h_rows[0].dtype.element_ty)
    if z_rows[0] is not None:
        store_tile(z_rows, offs_m, offs_n, mask, z)
    if bits_rows[0] is not None:
        offs_byte = n0 // 8 + tl.arange(0, acc.shape[1] // 8)
        mask_byte = (offs_m < M)[:, None] & (offs_byte < tl.cdiv(N, 8))[None, :]
        bits = pack_bits(~(upcast(z) <= 0.0), acc.shape[0], acc.shape[1])  # NaN counts as passed, as in torch
        store_tile(bits_rows, offs_m, offs_byte, mask_byte, bits)
    store_tile(h_rows, offs_m, offs_n, mask, hidden_tile(z, dropout, pid_m * acc.shape[0], n0, ACT))


@triton.jit
def hidden_grad_store(z, dh, n0, h_rows, dz_rows, db_ptr, dropout, pid_m, M, N, ACT: tl.constexpr):
    """Writes h, dz and the bias partial rows, each once, from z (storage type) and dh (float32).

    With dropout dz is dh times one coefficient an element, so that the mask is needed in z's layout alone. The compiler would
    compute it again for dh, which lies as matmuls leave it.
    """
    offs_m, offs_n, mask = slice_offsets(dh, pid_m, n0, M, N)
    h = cast(act(z, ACT), z.dtype)
    if dropout[0] is not None:
        keep = dropout_mask(dropout, pid_m * dh.shape[0], n0, z.shape[0], z.shape[1])
        h = cast(apply_dropout(upcast(h), dropout, keep), z.dtype)
        slope = act_grad_of(z, apply_dropout(1.0, dropout, keep), ACT)
        dz = cast(times(dh, slope), z.dtype)
    else:
        dz = cast(act_grad_of(z, dh, ACT), z.dtype)
    if h_rows[0] is not None:
        store_tile(h_rows, offs_m, offs_n, mask, h)
    store_tile(dz_rows, offs_m, offs_n, mask, dz)
    if db_ptr is not None:
        store_column_sum(db_ptr, pid_m, offs_n, N, dz, mask)


@triton.jit
def _linear_bwd_store(acc, n0, b_ptr, dh_rows, dz_rows, db_ptr, pid_m, M, N, ACT: tl.constexpr):
    offs_m, offs_n, mask = slice_offsets(acc, pid_m, n0, M, N)
    z = preact_tile(acc, b_ptr, offs_n, N, dz_rows[0].dtype.element_ty)
    dh = upcast(load_tile(dh_rows, offs_m, offs_n, mask))
    hidden_grad_store(z, dh, n0, (None, 0), dz_rows, db_ptr, (None, 0, 1.0, 0, 0), pid_m, M, N, ACT)


@triton.jit
def _act_grad_store(acc, n0, z_rows, h_rows, dz_rows, db_ptr, dropout, pid_m, M, N, ACT: tl.constexpr):
    offs_m, offs_n, mask = slice_offsets(acc, pid_m, n0, M, N)
    z = load_tile(z_rows, offs_m, offs_n, mask)
    hidden_grad_store(z, acc, n0, h_rows, dz_rows, db_ptr, dropout, pid_m, M, N, ACT)


@triton.jit(do_not_specialize=["M", "threshold", "col_base", "row_base"])
def _linear_fwd_kernel(
    x_rows,
    w_rows,
    b_ptr,
    h_rows,
    z_rows,
    bits_rows,
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
    acc = gemm_tile(x_rows, w_rows, offs_m, offs_n, M, N, K, True, BLOCK_K, EVEN_K, PRECISION)
    by_slices(
        (acc,),
        pid_n * BLOCK_N,
        _linear_fwd_store,
        (b_ptr, h_rows, z_rows, bits_rows, (state_ptr, threshold, scale, col_base, row_base), pid_m, M, N, ACT),
        SUB,
    )


@triton.jit(do_not_specialize=["M"])
def _linear_bwd_kernel(
    x_rows,
    w_rows,
    b_ptr,
    dh_rows,
    dz_rows,
    db_ptr,
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
    acc = gemm_tile(x_rows, w_rows, offs_m, offs_n, M, N, K, True, BLOCK_K, EVEN_K, PRECISION)
    by_slices((acc,), pid_n * BLOCK_N, _linear_bwd_store, (b_ptr, dh_rows, dz_rows, db_ptr, pid_m, M, N, ACT), SUB)


@triton.jit(do_not_specialize=["M", "threshold", "col_base", "row_base"])
def _act_grad_kernel(
    dy_rows,
    w_rows,
    z_rows,
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
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Computes dh = dy w (dy [M, K], w [K, N]); dz = dropout'(dh) act'(z); h = dropout(act(z)); h may be written over z."""
    N, K = multiple(N, UNIT), multiple(K, UNIT)
    pid_m, pid_n = program_tile(M, N, BLOCK_M, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = gemm_tile(dy_rows, w_rows, offs_m, offs_n, M, N, K, False, BLOCK_K, EVEN_K, PRECISION)
    by_slices(
        (acc,),
        pid_n * BLOCK_N,
        _act_grad_store,
        (z_rows, h_rows, dz_rows, db_ptr, (state_ptr, threshold, scale, col_base, row_base), pid_m, M, N, ACT),
        SUB,
    )


@triton.jit(do_not_specialize=["M"])
def _hidden_grad_kernel(
    dh_rows,
    z_rows,
    h_rows,
    dz_rows,
    db_ptr,
    M,
    N,
    ACT: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes dz = dh act'(z) and h = act(z) from stored dh and z: the epilogue of `_act_grad_kernel` after a library's
    matmul."""
    N = multiple(N, UNIT)
    pid_m, pid_n = block_of(N, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    z = load_tile(z_rows, offs_m, offs_n, mask)
    dh = upcast(load_tile(dh_rows, offs_m, offs_n, mask))
    hidden_grad_store(z, dh, pid_n * BLOCK_N, h_rows, dz_rows, db_ptr, (None, 0, 1.0, 0, 0), pid_m, M, N, ACT)


NO_DROPOUT = (None, 0, 1.0, 0)  # (state, threshold, scale, col_base)


def grid_of(M: int, N: int, tile) -> tuple[int]:
    return (triton.cdiv(M, tile.BLOCK_M) * triton.cdiv(N, tile.BLOCK_N),)


def partial_rows(M: int, N: int, tile, like: torch.Tensor) -> torch.Tensor:
    """Allocates partial sums of bias gradients: one float32 row per tile row."""
    return torch.empty((triton.cdiv(M, tile.BLOCK_M), N), dtype=torch.float32, device=like.device)


def linear_fwd(
    x,
    w,
    b,
    activation: str,
    precision: str,
    *,
    dropout=NO_DROPOUT,
    row_base=0,
    save_z=False,
    save_bits=False,
    tile=None,
):
    """Computes h = dropout(act(x w^T + b)); returns a LinearForward.

    x [M, K], w [N, K], b [N] or None, all of one dtype. dropout = (state, threshold, scale, col_base).
    """
    (M, K), N = x.shape, w.shape[0]
    x, w, b = rows_of(x), rows_of(w), rows_of(b)
    h = torch.empty((M, N), dtype=x.dtype, device=x.device)
    tile = tile or tile_for("linear", arch_of(x), M, N, x, w, h)
    z = torch.empty_like(h) if save_z else None
    bits = torch.empty((M, triton.cdiv(N, 8)), dtype=torch.uint8, device=x.device) if save_bits else None
    if M and N:
        launch(
            _linear_fwd_kernel,
            grid_of(M, N, tile),
            matrix(x),
            matrix(w),
            b,
            matrix(h),
            matrix(z),
            matrix(bits),
            *placed(dropout, row_base),
            M,
            N,
            K,
            ACT=activation,
            PRECISION=precision,
            **tile.launch_options(K=K),
        )
    return LinearForward(h, z, bits)


def linear_bwd(x, w, b, dh, activation: str, precision: str, *, db=False, tile=None):
    """Computes dz = dh * act'(x w^T + b) [M, N], and db = sum of dz's rows [N] (None unless asked for). db: its dtype, True for
    float32."""
    M, K = x.shape
    N = w.shape[0]
    x, w, b, dh = rows_of(x), rows_of(w), rows_of(b), rows_of(dh)
    tile = tile or tile_for("linear", arch_of(x), M, N, x, w, dh)
    dz = torch.empty((M, N), dtype=x.dtype, device=x.device)
    partial = partial_rows(M, N, tile, x) if db else None
    if M and N:
        launch(
            _linear_bwd_kernel,
            grid_of(M, N, tile),
            matrix(x),
            matrix(w),
            b,
            matrix(dh),
            matrix(dz),
            partial,
            M,
            N,
            K,
            ACT=activation,
            PRECISION=precision,
            **tile.launch_options(K=K),
        )
    return dz, *row_sums((partial,), (db,))


def act_grad(
    dy,
    w,
    z,
    activation: str,
    precision: str,
    *,
    dropout=NO_DROPOUT,
    row_base=0,
    save_h=False,
    h_over_z=False,
    db=False,
    tile=None,
):
    """Computes one step back through a chain, dz = dropout'(dy w) * act'(z); returns a HiddenGradient.

    dy [M, K], w [K, N]. z [M, N] is the pre-activation, or for relu the activation itself. `h_over_z` writes h =
    dropout(act(z)) into z's own memory, for a z that is workspace.
    """
    (M, K), N = dy.shape, w.shape[1]
    dy, w, z = rows_of(dy), rows_of(w), rows_of(z)
    tile = tile or tile_for("act_grad", arch_of(dy), M, N, dy, w, z)
    dz = torch.empty((M, N), dtype=dy.dtype, device=dy.device)
    h = (z if h_over_z else torch.empty_like(dz)) if save_h else None
    partial = partial_rows(M, N, tile, dy) if db else None
    if M and N:
        launch(
            _act_grad_kernel,
            grid_of(M, N, tile),
            matrix(dy),
            matrix(w),
            matrix(z),
            matrix(h),
            matrix(dz),
            partial,
            *placed(dropout, row_base),
            M,
            N,
            K,
            ACT=activation,
            PRECISION=precision,
            **tile.launch_options(K=K),
        )
    return HiddenGradient(dz, h, *row_sums((partial,), (db,)))


def hidden_grad(dh, z, activation: str, *, save_h=False, db=False, over=False, h_over_z=False):
    """Computes dz = dh * act'(z) [M, N], h = act(z) (None unless asked for), and db = sum of dz's rows ([N], likewise), in one
    pass over stored dh and z [M, N]. over: dz is written over dh; h_over_z: h over z."""
    M, N = dh.shape
    dh, z = rows_of(dh), rows_of(z)
    dz = dh if over else torch.empty((M, N), dtype=dh.dtype, device=dh.device)
    h = (z if h_over_z else torch.empty_like(dz)) if save_h else None
    blocks = blocks_of(dh)
    partial = block_sums(M, N, blocks, dh) if db else None
    if M and N:
        launch(
            _hidden_grad_kernel,
            grid_of_blocks(M, N, blocks),
            matrix(dh),
            matrix(z),
            matrix(h),
            matrix(dz),
            partial,
            M,
            N,
            ACT=activation,
            **blocks,
        )
    return HiddenGradient(dz, h, *row_sums((partial,), (db,)))
