"""LayerNorm and RMSNorm over rows [M, D]: forward, and backward from x alone.

    layer: mu = mean(x), r = rsqrt(mean((x - mu)^2) + eps), h = (x - mu) r      rms: r = rsqrt(mean(x^2) + eps), h = x r
    norm_fwd    xn = h * weight + bias
    norm_bwd    g = dxn * weight
                layer: dx = r (g - mean(g) - h mean(g h))                       rms: dx = r (g - h mean(g h))
                dweight = sum_m dxn h, dbias = sum_m dxn

All in float32 with one rounding at the end. mu and r are recomputed from x and never saved: forward and backward share
`normalized_tile` and the shape of its tile, so the recomputed h has the bits of the first. A program holds whole rows in
registers, so that x is read once. Rows of up to 16384 elements do not spill (8192 in float32, 4096 where the length is
no multiple of 16 bytes); longer ones work, slowly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .elementwise import load_tile, row_sums, store_tile
from .tile import (
    INTERPRETER,
    SMS,
    arch_of,
    cast,
    family_of,
    launch,
    matrix,
    multiple,
    rows_of,
    unit_of,
    upcast,
)


class RowTile(NamedTuple):
    """A tile of BLOCK_M whole rows, padded to BLOCK_D columns. HELD: backward sums dweight and dbias in registers."""

    BLOCK_M: int
    BLOCK_D: int
    num_warps: int
    HELD: bool
    UNIT: int

    def launch_options(self) -> dict:
        return {
            "UNIT": self.UNIT,
            "BLOCK_M": self.BLOCK_M,
            "BLOCK_D": self.BLOCK_D,
            "num_warps": self.num_warps,
            "enable_fp_fusion": False,  # as for every tile: the recomputed h has the bits of forward's
        }


def row_tile(x: torch.Tensor) -> RowTile:
    """Returns the tile for rows of x: 16 elements a thread (32 in the longest rows), 8 where short rows are float32."""
    BLOCK_D = max(16, triton.next_power_of_2(x.shape[1]))
    return RowTile(
        BLOCK_M=max(1, (2048 if x.itemsize == 4 else 4096) // BLOCK_D),
        BLOCK_D=BLOCK_D,
        num_warps=8 if BLOCK_D < 8192 else 16,
        HELD=BLOCK_D < 16384,
        UNIT=unit_of(x.shape[1]),
    )


def programs(arch: int, num_warps: int) -> int:
    """Returns the number of programs of a backward launch, each with a row of partial weight gradients: 16 warps an SM.

    It depends on the architecture and not on the device, so that sums are the same on every GPU of a kind.
    """
    return 3 if arch == INTERPRETER else SMS[family_of(arch)] * 16 // num_warps


@triton.jit
def normalized_tile(x, mask_m, mask, eps, D, KIND: tl.constexpr):
    """Computes h [M, D] and r [M] of float32 rows x whose padding is zero. Padded rows give zeros, for eps = 0 too."""
    tl.static_assert(KIND == "layer" or KIND == "rms", "unknown kind of norm")
    if KIND == "layer":
        x = tl.where(mask, x - (tl.sum(x, axis=1) / D)[:, None], 0.0)
    r = tl.where(mask_m, tl.rsqrt(tl.sum(x * x, axis=1) / D + eps), 0.0)
    return x * r[:, None], r


@triton.jit
def normalized_grad_tile(h, r, g, D, KIND: tl.constexpr):
    """Computes dx [M, D] from g, the gradient of h. g is zero in the padding."""
    dx = g - h * (tl.sum(g * h, axis=1) / D)[:, None]
    if KIND == "layer":
        dx -= (tl.sum(g, axis=1) / D)[:, None]
    return dx * r[:, None]


@triton.jit(do_not_specialize=["M"])
def _norm_fwd_kernel(
    x_rows,
    weight_ptr,
    bias_ptr,
    xn_rows,
    M,
    D,
    eps,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    D = multiple(D, UNIT)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_m = offs_m < M
    mask_d = offs_d < D
    mask = mask_m[:, None] & mask_d[None, :]
    x = load_tile(x_rows, offs_m, offs_d, mask)
    xn, _ = normalized_tile(upcast(x), mask_m, mask, eps, D, KIND)
    if weight_ptr is not None:
        xn *= upcast(tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0))[None, :]
    if bias_ptr is not None:
        xn += upcast(tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0))[None, :]
    store_tile(xn_rows, offs_m, offs_d, mask, cast(xn, xn_rows[0].dtype.element_ty))


@triton.jit
def add_rows(ptrs, mask_d, value):
    """Adds the column sums of `value` to a row that this program alone reads and writes."""
    total = tl.load(ptrs, mask=mask_d, other=0.0) + tl.sum(value, axis=0)
    tl.debug_barrier()  # the store may map columns to threads differently than the load
    tl.store(ptrs, total, mask=mask_d)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["M", "tiles"])
def _norm_bwd_kernel(
    dxn_rows,
    x_rows,
    weight_ptr,
    residual_rows,
    dx_rows,
    dweight_ptr,
    dbias_ptr,
    M,
    D,
    tiles,
    eps,
    KIND: tl.constexpr,
    HELD: tl.constexpr,
    STAGES: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Walks `tiles` tiles of rows in each program, and adds up one row of dweight_ptr and dbias_ptr [programs, D]."""
    D = multiple(D, UNIT)
    pid = tl.program_id(0)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    partial = pid.to(tl.int64) * D + offs_d
    dweight = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for tile in tl.range(pid * tiles, (pid + 1) * tiles, num_stages=STAGES):
        offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        mask = mask_m[:, None] & mask_d[None, :]
        x = upcast(load_tile(x_rows, offs_m, offs_d, mask))
        dxn = upcast(load_tile(dxn_rows, offs_m, offs_d, mask))
        h, r = normalized_tile(x, mask_m, mask, eps, D, KIND)
        if HELD:
            if dweight_ptr is not None:
                dweight += dxn * h
            if dbias_ptr is not None:
                dbias += dxn
        if weight_ptr is not None:
            dxn *= upcast(tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0))[None, :]
        dx = normalized_grad_tile(h, r, dxn, D, KIND)
        if residual_rows[0] is not None:
            dx += upcast(load_tile(residual_rows, offs_m, offs_d, mask))
        store_tile(dx_rows, offs_m, offs_d, mask, cast(dx, dx_rows[0].dtype.element_ty))
        if not HELD:
            dxn = upcast(load_tile(dxn_rows, offs_m, offs_d, mask))  # loaded again: held until here it would spill
            if dweight_ptr is not None:
                add_rows(dweight_ptr + partial, mask_d, dxn * h)
            if dbias_ptr is not None:
                add_rows(dbias_ptr + partial, mask_d, dxn)
    if HELD:
        if dweight_ptr is not None:
            tl.store(dweight_ptr + partial, tl.sum(dweight, axis=0), mask=mask_d)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + partial, tl.sum(dbias, axis=0), mask=mask_d)


def norm_fwd(x, weight, bias, eps: float, kind: str, out_dtype: torch.dtype):
    """Computes xn [M, D] in out_dtype, from x [M, D] and weight, bias [D] or None in any dtypes. kind: "layer" or "rms"."""
    M, D = x.shape
    x = rows_of(x)
    weight, bias = (None if tensor is None else tensor.contiguous() for tensor in (weight, bias))
    xn = torch.empty((M, D), dtype=out_dtype, device=x.device)
    tile = row_tile(x)
    if M and D:
        launch(
            _norm_fwd_kernel,
            (triton.cdiv(M, tile.BLOCK_M),),
            matrix(x),
            weight,
            bias,
            matrix(xn),
            M,
            D,
            eps,
            KIND=kind,
            **tile.launch_options(),
        )
    return xn


def norm_bwd(
    dxn,
    x,
    weight,
    eps: float,
    kind: str,
    *,
    residual=None,
    need_dweight: bool | torch.dtype = False,
    need_dbias: bool | torch.dtype = False,
):
    """Computes dx [M, D] in x's dtype, dweight and dbias [D] (None unless needed), from dxn and x [M, D].

    need_dweight, need_dbias: the gradient's dtype, or True for float32. residual: [M, D], a gradient that flows around the
    norm, added before dx is rounded.
    """
    M, D = x.shape
    dxn, x, residual = rows_of(dxn), rows_of(x), rows_of(residual)
    weight = None if weight is None else weight.contiguous()
    dx = torch.empty((M, D), dtype=x.dtype, device=x.device)
    tile = row_tile(x)
    tiles = triton.cdiv(M, tile.BLOCK_M)
    per_program = triton.cdiv(tiles, programs(arch_of(x), tile.num_warps))
    rows = triton.cdiv(tiles, max(per_program, 1))
    make = torch.empty if tile.HELD else torch.zeros
    dweight, dbias = (
        make((rows, D), dtype=torch.float32, device=x.device) if need else None for need in (need_dweight, need_dbias)
    )
    if M and D:
        launch(
            _norm_bwd_kernel,
            (rows,),
            matrix(dxn),
            matrix(x),
            weight,
            matrix(residual),
            matrix(dx),
            dweight,
            dbias,
            M,
            D,
            per_program,
            eps,
            KIND=kind,
            HELD=tile.HELD,
            STAGES=2,
            **tile.launch_options(),
        )
    return dx, *row_sums((dweight, dbias), (need_dweight, need_dbias))
