"""Narrow chains of Linear + activation (every width <= 64): one kernel forward, one kernel backward.

    h_0 = x;  z_l = h_l w_l^T + b_l (rounded);  h_{l+1} = round(act(z_l)),  l = 0 .. L-1
    dz_l = dh_{l+1} act'(z_l);  dw_l = dz_l^T h_l;  db_l = sum dz_l;  dh_l = dz_l w_l

Weights come packed and zero-padded to [L, WIDTH, WIDTH]; act(0) = 0, so padding stays zero (beside an infinite h it is NaN:
inf * 0). The backward kernel saves a chain of one row tile in scratch that lives in L2 ([programs, L, BLOCK_M, WIDTH]) and
its sums of dw, db in float32 slots of its own, which are added up once at the end: no atomics, and nothing of size M between
the layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .elementwise import act, act_grad, load_tile, pack_bits, store_tile
from .linear import preact_tile
from .tile import (
    INTERPRETER,
    SMS,
    arch_of,
    cast,
    dot,
    family_of,
    launch,
    matrix,
    multiple,
    rows_of,
    stride_of,
    unit_of,
    upcast,
)

MAX_WIDTH = 64


class Tiles(NamedTuple):
    """Tiles (BLOCK_M, num_warps) of forward, of relu's backward, and of the other backwards, which hold z and act' too."""

    fwd: tuple[int, int]
    bwd_relu: tuple[int, int]
    bwd: tuple[int, int]


# (architecture, WIDTH) -> tiles of 16-bit chains and of float32 ones by precision; one stage: there is no long K to pipeline.
# sm_90 pads 32 to 64: dot dimensions below 64 have miscompiled there (triton#11366, #10486). At IEEE precision, torch's default
# for float32, no tensor core is used and a thread holds whole rows and columns of its matmuls: 64 rows would spill 7 KiB.
TILES: dict[tuple[int, int], dict[str, Tiles]] = {
    (90, 64): {
        "16": Tiles((128, 8), (128, 8), (64, 8)), "tf32": Tiles((64, 8), (64, 8), (64, 8)),
        "ieee": Tiles((64, 8), (16, 8), (16, 8)),
    },
    (80, 64): {
        "16": Tiles((64, 8), (64, 8), (32, 8)), "tf32": Tiles((64, 8), (64, 8), (32, 8)),
        "ieee": Tiles((64, 8), (16, 8), (16, 8)),
    },
    (80, 32): {
        "16": Tiles((128, 4), (128, 4), (64, 8)), "tf32": Tiles((64, 4), (64, 4), (64, 8)),
        "ieee": Tiles((64, 8), (64, 8), (64, 8)),
    },
    **{(INTERPRETER, width): dict.fromkeys(("16", "tf32", "ieee"), Tiles(*[(32, 4)] * 3)) for width in (32, 64)},
}  # fmt: skip
PROGRAMS = {**SMS}  # one per SM


@triton.jit
def layer_tile(h, w_ptr, b_ptr, layer, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """Computes z_l = round(h w_l^T + b_l) for a tile h [BLOCK_M, WIDTH] in the storage type."""
    offs_n = tl.arange(0, WIDTH)
    w = tl.load(w_ptr + layer * WIDTH * WIDTH + offs_n[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None])
    acc = dot(h, w, tl.zeros((h.shape[0], WIDTH), dtype=tl.float32), PRECISION)
    if b_ptr is not None:
        return preact_tile(acc, b_ptr + layer * WIDTH, offs_n, WIDTH, h.dtype)
    else:
        return preact_tile(acc, None, offs_n, WIDTH, h.dtype)


@triton.jit(do_not_specialize=["M", "L"])
def _stack_fwd_kernel(
    x_rows,
    w_ptr,
    b_ptr,
    y_rows,
    bits_rows,
    M,
    N,
    K,
    L,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
):
    N, K = multiple(N, UNIT), multiple(K, UNIT)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, WIDTH)
    mask_m = (offs_m < M)[:, None]
    h = load_tile(x_rows, offs_m, offs_n, mask_m & (offs_n < K)[None, :])
    for layer in range(L - 1):
        z = layer_tile(h, w_ptr, b_ptr, layer, WIDTH, PRECISION)
        h = cast(act(z, ACT), z.dtype)
    z = layer_tile(h, w_ptr, b_ptr, L - 1, WIDTH, PRECISION)
    y = cast(act(z, ACT), z.dtype)
    store_tile(y_rows, offs_m, offs_n, mask_m & (offs_n < N)[None, :], y)
    if bits_rows[0] is not None:
        offs_byte = tl.arange(0, WIDTH // 8)
        bits = pack_bits(~(upcast(z) <= 0.0), BLOCK_M, WIDTH)
        store_tile(bits_rows, offs_m, offs_byte, mask_m & (offs_byte < tl.cdiv(N, 8))[None, :], bits)


@triton.jit
def _add_to_slot(dw_ptr, db_ptr, layer, dz, h, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """Adds dz^T h to dw_l and sum dz to db_l in this program's own float32 slots."""
    offs_n = tl.arange(0, WIDTH)
    dw_ptrs = dw_ptr + layer * WIDTH * WIDTH + offs_n[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(dw_ptrs, dot(tl.trans(dz), h, tl.load(dw_ptrs), PRECISION))
    if db_ptr is not None:
        db_ptrs = db_ptr + layer * WIDTH + offs_n
        tl.store(db_ptrs, tl.load(db_ptrs) + tl.sum(upcast(dz), axis=0))


@triton.jit
def _times_weight(dz, w_ptr, layer, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """Computes dh_l = dz_l w_l, float32."""
    offs = tl.arange(0, WIDTH)
    w = tl.load(w_ptr + layer * WIDTH * WIDTH + offs[:, None] * WIDTH + offs[None, :])
    return dot(dz, w, tl.zeros((dz.shape[0], WIDTH), dtype=tl.float32), PRECISION)


@triton.jit(do_not_specialize=["M", "L"])
def _stack_bwd_kernel(
    x_rows,
    w_ptr,
    b_ptr,
    dy_rows,
    bits_rows,
    dx_rows,
    dw_ptr,
    db_ptr,
    scratch_ptr,
    M,
    N,
    K,
    L,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Computes the chain's backward. With bits, for relu alone, scratch holds h_1 .. h_{L-1}, and the last layer is not run
    again. Otherwise it holds z_0 .. z_{L-1}, and h is recomputed as act(z)."""
    N, K = multiple(N, UNIT), multiple(K, UNIT)
    bits_ptr = bits_rows[0]
    pid = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, WIDTH)
    tile_offs = tl.arange(0, BLOCK_M)[:, None] * WIDTH + offs_n[None, :]
    scratch_ptr += pid * L * BLOCK_M * WIDTH
    dw_ptr += pid * L * WIDTH * WIDTH
    if db_ptr is not None:
        db_ptr += pid * L * WIDTH
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = (offs_m < M)[:, None]
        mask_x = mask_m & (offs_n < K)[None, :]
        mask_y = mask_m & (offs_n < N)[None, :]
        h = load_tile(x_rows, offs_m, offs_n, mask_x)
        dy = upcast(load_tile(dy_rows, offs_m, offs_n, mask_y))
        tl.debug_barrier()  # the last tile's scratch has been read
        if bits_ptr is not None:
            for layer in range(L - 1):
                h = cast(act(layer_tile(h, w_ptr, b_ptr, layer, WIDTH, PRECISION), ACT), h.dtype)
                tl.store(scratch_ptr + layer * BLOCK_M * WIDTH + tile_offs, h)
            byte = tl.load(
                bits_ptr + offs_m.to(tl.int64)[:, None] * stride_of(bits_rows) + (offs_n >> 3)[None, :],
                mask=mask_y,
                other=0,
            )
            dz = cast(tl.where((byte.to(tl.int32) >> (offs_n & 7)[None, :]) & 1 != 0, dy, 0.0), h.dtype)
        else:
            for layer in range(L):
                z = layer_tile(h, w_ptr, b_ptr, layer, WIDTH, PRECISION)
                tl.store(scratch_ptr + layer * BLOCK_M * WIDTH + tile_offs, z)
                h = cast(act(z, ACT), z.dtype)
            tl.debug_barrier()
            z = tl.load(scratch_ptr + (L - 1) * BLOCK_M * WIDTH + tile_offs)
            dz = cast(tl.where(mask_m, act_grad(z, dy, ACT), 0.0), h.dtype)
        tl.debug_barrier()  # scratch was written by other threads than those that read it
        for step in range(L - 1):
            layer = L - 1 - step
            # an absent row starts at 0 and may overflow where no row does: 0 * inf would be NaN in dw
            saved = tl.load(scratch_ptr + (layer - 1) * BLOCK_M * WIDTH + tile_offs, mask=mask_m, other=0.0)
            if bits_ptr is not None:
                h = saved
            else:
                h = cast(act(saved, ACT), saved.dtype)
            _add_to_slot(dw_ptr, db_ptr, layer, dz, h, WIDTH, PRECISION)
            dh = _times_weight(dz, w_ptr, layer, WIDTH, PRECISION)
            dz = cast(tl.where(mask_m, act_grad(saved, dh, ACT), 0.0), saved.dtype)
        x = load_tile(x_rows, offs_m, offs_n, mask_x)
        _add_to_slot(dw_ptr, db_ptr, 0, dz, x, WIDTH, PRECISION)
        if dx_rows[0] is not None:
            store_tile(dx_rows, offs_m, offs_n, mask_x, cast(_times_weight(dz, w_ptr, 0, WIDTH, PRECISION), x.dtype))


def _tiles(x: torch.Tensor, width: int, precision: str) -> Tiles:
    return TILES[family_of(arch_of(x)), width]["16" if x.dtype.itemsize == 2 else precision]


def stack_width(x: torch.Tensor, widths: list[int]) -> int | None:
    """Returns the WIDTH that a chain of these feature counts is padded to, or None where it is not narrow enough."""
    widest = max(widths)
    if widest > MAX_WIDTH:
        return None
    return 32 if widest <= 32 and family_of(arch_of(x)) != 90 else 64


def pack_stack(weights, biases, width: int, dtype: torch.dtype):
    """Packs weights [n_l, k_l] and biases [n_l] into zero-padded [L, width, width] and [L, width] (or None) in `dtype`."""
    packed = weights[0].new_zeros((len(weights), width, width), dtype=dtype)
    torch._foreach_copy_([packed[i, : w.shape[0], : w.shape[1]] for i, w in enumerate(weights)], list(weights))
    if not biases:
        return packed, None
    packed_b = weights[0].new_zeros((len(weights), width), dtype=dtype)
    torch._foreach_copy_([packed_b[i, : b.shape[0]] for i, b in enumerate(biases)], list(biases))
    return packed, packed_b


def stack_fwd(
    x, packed_w, packed_b, out_features: int, activation: str, precision: str, *, save_bits=False, block_m=None
):
    """Runs x [M, K] through the packed layers; returns y [M, out_features], and relu's bits of the last layer or None."""
    M, K = x.shape
    L, width, _ = packed_w.shape
    x = rows_of(x)
    default_m, num_warps = _tiles(x, width, precision).fwd
    block_m = block_m or default_m
    y = torch.empty((M, out_features), dtype=x.dtype, device=x.device)
    bits = torch.empty((M, triton.cdiv(out_features, 8)), dtype=torch.uint8, device=x.device) if save_bits else None
    if M and out_features:
        launch(
            _stack_fwd_kernel,
            (triton.cdiv(M, block_m),),
            matrix(x),
            packed_w,
            packed_b,
            matrix(y),
            matrix(bits),
            M,
            out_features,
            K,
            L,
            ACT=activation,
            PRECISION=precision,
            UNIT=unit_of(out_features, K),
            BLOCK_M=block_m,
            WIDTH=width,
            num_warps=num_warps,
            num_stages=1,
            enable_fp_fusion=False,
        )
    return y, bits


def stack_bwd(
    x, packed_w, packed_b, dy, bits, activation: str, precision: str, *, dx=True, block_m=None, programs=None
):
    """Computes dx [M, K] or None, and float32 dw [L, width, width], db [L, width] or None. bits: relu's, from stack_fwd."""
    M, K = x.shape
    N = dy.shape[1]
    L, width, _ = packed_w.shape
    x, dy, bits = rows_of(x), rows_of(dy), rows_of(bits)
    tiles = _tiles(x, width, precision)
    default_m, num_warps = tiles.bwd if bits is None else tiles.bwd_relu
    block_m = block_m or default_m
    programs = max(min(programs or PROGRAMS[family_of(arch_of(x))], triton.cdiv(M, block_m)), 1)
    dx_out = torch.empty((M, K), dtype=x.dtype, device=x.device) if dx else None
    dw = torch.zeros((programs, L, width, width), dtype=torch.float32, device=x.device)
    db = None if packed_b is None else torch.zeros((programs, L, width), dtype=torch.float32, device=x.device)
    scratch = torch.empty((programs, L, block_m, width), dtype=x.dtype, device=x.device)
    if M and N:
        launch(
            _stack_bwd_kernel,
            (programs,),
            matrix(x),
            packed_w,
            packed_b,
            matrix(dy),
            matrix(bits),
            matrix(dx_out),
            dw,
            db,
            scratch,
            M,
            N,
            K,
            L,
            ACT=activation,
            PRECISION=precision,
            UNIT=unit_of(N, K),
            BLOCK_M=block_m,
            WIDTH=width,
            num_warps=num_warps,
            num_stages=1,
            enable_fp_fusion=False,
        )
    elif dx:
        dx_out.zero_()
    return dx_out, dw.sum(0), None if db is None else db.sum(0)
