"""Norm and rotary embedding of every head's row [D]: forward, and backward from the raw rows alone.

    rms: h = x rsqrt(mean(x^2) + eps)       layer: h = (x - mean(x)) rsqrt(mean((x - mean(x))^2) + eps)
    z = h * weight + bias, both [D], or [H, D] for heads with a row of their own       (without weight z = x)
    y = z, of which the first R elements are rotated in pairs (a, b):
        y_a = z_a cos_a - z_b sin_a,  y_b = z_b cos_b + z_a sin_b
    b = a + R/2 (Llama, GPT-NeoX), or b = a + 1 for even a (interleaved: GPT-J)
    heads_fwd   x [B, S, H, D] -> y
    heads_bwd   dy, x -> dx, dweight, dbias: dz_a = dy_a cos_a + dy_b sin_b, dz_b = dy_b cos_b - dy_a sin_a, then the norm's
                backward

All in float32 with one rounding at the end. A program rotates up to HEADS heads of BLOCK_S tokens and reads their cos and sin
once. It reads a row before it writes it, so results may replace inputs. Heads of at most 256 elements do not spill.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .elementwise import row_sums
from .norm import programs
from .tile import arch_of, cast, launch, rows_of, upcast

HEADS, WARPS = 8, 4  # per program


class HeadTile(NamedTuple):
    """A tile of BLOCK_S tokens of one head at a time: BLOCK_HALF for each half that is rotated, BLOCK_REST for the rest."""

    BLOCK_S: int
    BLOCK_HALF: int
    BLOCK_REST: int

    def launch_options(self) -> dict:
        return {**self._asdict(), "HEADS": HEADS, "num_warps": WARPS, "enable_fp_fusion": False}


def head_tile(D: int, R: int) -> HeadTile:
    """Returns the tile: eight elements of each half for each of 128 threads (16-byte loads), and at most 2048 elements in all.

    Where only a part of a row is rotated its halves are read 8 bytes at a time or less: twice the tokens take 254 registers.
    """
    half = triton.next_power_of_2(R // 2) if R else 0
    rest = triton.next_power_of_2(D - R) if D > R else 0
    tokens = min(1024 // min(half or rest, rest or half), 2048 // (2 * half + rest))
    return HeadTile(1 << max(tokens, 1).bit_length() - 1, half, rest)


@triton.jit
def load_parts(
    ptr,
    rows,
    mask_rows,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Loads parts a, b and rest of the rows that begin `rows` elements after ptr, float32; zeros [M, 1] for a part that is
    empty."""
    a = tl.zeros((rows.shape[0], 1), dtype=tl.float32)
    b = a
    rest = a
    if R > 0:
        if INTERLEAVED:
            offs = tl.arange(0, 2 * BLOCK_HALF)
            mask = mask_rows[:, None] & (offs < R)[None, :]
            pairs = upcast(tl.load(ptr + rows[:, None] + offs[None, :], mask=mask, other=0.0))
            a, b = pairs.reshape(rows.shape[0], BLOCK_HALF, 2).split()
        else:
            offs = tl.arange(0, BLOCK_HALF)
            mask = mask_rows[:, None] & (offs < R // 2)[None, :]
            a = upcast(tl.load(ptr + rows[:, None] + offs[None, :], mask=mask, other=0.0))
            b = upcast(tl.load(ptr + R // 2 + rows[:, None] + offs[None, :], mask=mask, other=0.0))
    if R < D:
        offs = tl.arange(0, BLOCK_REST)
        mask = mask_rows[:, None] & (offs < D - R)[None, :]
        rest = upcast(tl.load(ptr + R + rows[:, None] + offs[None, :], mask=mask, other=0.0))
    return a, b, rest


@triton.jit
def store_parts(
    ptr,
    rows,
    mask_rows,
    a,
    b,
    rest,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rounds (a, b, rest) and stores them where `load_parts` finds them."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    if R > 0:
        if INTERLEAVED:
            offs = tl.arange(0, 2 * BLOCK_HALF)
            mask = mask_rows[:, None] & (offs < R)[None, :]
            pairs = tl.join(cast(a, dtype), cast(b, dtype)).reshape(rows.shape[0], 2 * BLOCK_HALF)
            tl.store(ptr + rows[:, None] + offs[None, :], pairs, mask=mask)
        else:
            offs = tl.arange(0, BLOCK_HALF)
            mask = mask_rows[:, None] & (offs < R // 2)[None, :]
            tl.store(ptr + rows[:, None] + offs[None, :], cast(a, dtype), mask=mask)
            tl.store(ptr + R // 2 + rows[:, None] + offs[None, :], cast(b, dtype), mask=mask)
    if R < D:
        offs = tl.arange(0, BLOCK_REST)
        mask = mask_rows[:, None] & (offs < D - R)[None, :]
        tl.store(ptr + R + rows[:, None] + offs[None, :], cast(rest, dtype), mask=mask)


@triton.jit
def store_sums(
    ptr,
    start,
    a,
    b,
    rest,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Stores the sums of columns as the row that begins `start` elements after ptr."""
    row = tl.zeros((1,), dtype=tl.int64) + start
    a, b, rest = tl.sum(a, axis=0)[None, :], tl.sum(b, axis=0)[None, :], tl.sum(rest, axis=0)[None, :]
    store_parts(ptr, row, row >= 0, a, b, rest, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)


@triton.jit
def centered_part(part, mask_rows, mean, size):
    """Returns part - mean in the first `size` columns, zero in the padding."""
    mask = mask_rows[:, None] & (tl.arange(0, part.shape[1]) < size)[None, :]
    return tl.where(mask, part - mean, 0.0)


@triton.jit
def normalized_parts(a, b, rest, mask_rows, eps, D: tl.constexpr, R: tl.constexpr, KIND: tl.constexpr):
    """Computes h_a, h_b, h_rest and r of rows whose padding is zero. Padded rows give zeros, for eps = 0 too."""
    tl.static_assert(KIND == "layer" or KIND == "rms", "unknown kind of norm")
    if KIND == "layer":
        mean = ((tl.sum(a, axis=1) + tl.sum(b, axis=1) + tl.sum(rest, axis=1)) / D)[:, None]
        a = centered_part(a, mask_rows, mean, R // 2)
        b = centered_part(b, mask_rows, mean, R // 2)
        rest = centered_part(rest, mask_rows, mean, D - R)
    squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(rest * rest, axis=1)
    r = tl.where(mask_rows, tl.rsqrt(squares / D + eps), 0.0)[:, None]
    return a * r, b * r, rest * r, r


@triton.jit
def token_rows(t, S, stride_b, stride_s):
    """Returns the element offset of token t = batch * S + s."""
    return (t // S).to(tl.int64) * stride_b + (t % S).to(tl.int64) * stride_s


@triton.jit(do_not_specialize=["tokens", "S", "H"])
def _heads_fwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    tokens,
    S,
    H,
    stride_xb,
    stride_xs,
    stride_xh,
    stride_cosb,
    stride_coss,
    stride_sinb,
    stride_sins,
    stride_yb,
    stride_ys,
    stride_yh,
    eps,
    KIND: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    mask_t = t < tokens
    x_rows = token_rows(t, S, stride_xb, stride_xs)
    y_rows = token_rows(t, S, stride_yb, stride_ys)
    if R > 0:
        cos_rows = token_rows(t, S, stride_cosb, stride_coss)
        sin_rows = token_rows(t, S, stride_sinb, stride_sins)
        cos_a, cos_b, _ = load_parts(cos_ptr, cos_rows, mask_t, R, R, INTERLEAVED, BLOCK_HALF, 0)
        sin_a, sin_b, _ = load_parts(sin_ptr, sin_rows, mask_t, R, R, INTERLEAVED, BLOCK_HALF, 0)
    same_row = tl.zeros((BLOCK_S,), dtype=tl.int64)  # the weight once a token: a row alone is read 2 bytes at a time
    first = tl.program_id(1) * HEADS
    x_rows += first.to(tl.int64) * stride_xh
    y_rows += first.to(tl.int64) * stride_yh
    for head in range(first, tl.minimum(first + HEADS, H)):
        a, b, rest = load_parts(x_ptr, x_rows, mask_t, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
        if weight_ptr is not None:
            row = same_row
            if OWN_ROWS:
                row += head * D
            a, b, rest, _ = normalized_parts(a, b, rest, mask_t, eps, D, R, KIND)
            weight_a, weight_b, weight_rest = load_parts(
                weight_ptr, row, mask_t, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST
            )
            a, b, rest = a * weight_a, b * weight_b, rest * weight_rest
            if bias_ptr is not None:
                bias_a, bias_b, bias_rest = load_parts(bias_ptr, row, mask_t, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
                a, b, rest = a + bias_a, b + bias_b, rest + bias_rest
        if R > 0:
            a, b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
        store_parts(y_ptr, y_rows, mask_t, a, b, rest, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
        x_rows += stride_xh
        y_rows += stride_yh


@triton.jit(do_not_specialize=["tokens", "S", "H", "tiles"])
def _heads_bwd_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    tokens,
    S,
    H,
    tiles,
    stride_dyb,
    stride_dys,
    stride_dyh,
    stride_xb,
    stride_xs,
    stride_xh,
    stride_cosb,
    stride_coss,
    stride_sinb,
    stride_sins,
    stride_dxb,
    stride_dxs,
    stride_dxh,
    eps,
    KIND: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Walks `tiles` tiles of tokens in each program, and writes one row of dweight_ptr and dbias_ptr [programs, D]; with
    OWN_ROWS, where it has one tile, a row for each of its heads, of [programs along tokens, H, D]."""
    dweight_a = tl.zeros((BLOCK_S, BLOCK_HALF if R > 0 else 1), dtype=tl.float32)
    dweight_rest = tl.zeros((BLOCK_S, BLOCK_REST if R < D else 1), dtype=tl.float32)
    dweight_b, dbias_a, dbias_b, dbias_rest = dweight_a, dweight_a, dweight_a, dweight_rest
    same_row = tl.zeros((BLOCK_S,), dtype=tl.int64)  # the weight once a token: a row alone is read 2 bytes at a time
    first = tl.program_id(1) * HEADS
    for tile in range(tl.program_id(0) * tiles, (tl.program_id(0) + 1) * tiles):
        t = tile * BLOCK_S + tl.arange(0, BLOCK_S)
        mask_t = t < tokens
        dy_rows = token_rows(t, S, stride_dyb, stride_dys) + first.to(tl.int64) * stride_dyh
        x_rows = token_rows(t, S, stride_xb, stride_xs) + first.to(tl.int64) * stride_xh
        dx_rows = token_rows(t, S, stride_dxb, stride_dxs) + first.to(tl.int64) * stride_dxh
        if R > 0:
            cos_rows = token_rows(t, S, stride_cosb, stride_coss)
            sin_rows = token_rows(t, S, stride_sinb, stride_sins)
            cos_a, cos_b, _ = load_parts(cos_ptr, cos_rows, mask_t, R, R, INTERLEAVED, BLOCK_HALF, 0)
            sin_a, sin_b, _ = load_parts(sin_ptr, sin_rows, mask_t, R, R, INTERLEAVED, BLOCK_HALF, 0)
        for head in range(first, tl.minimum(first + HEADS, H)):
            a, b, rest = load_parts(dy_ptr, dy_rows, mask_t, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
            if R > 0:
                a, b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
            if weight_ptr is not None:
                x_a, x_b, x_rest = load_parts(x_ptr, x_rows, mask_t, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
                h_a, h_b, h_rest, r = normalized_parts(x_a, x_b, x_rest, mask_t, eps, D, R, KIND)
                row = same_row + (head * D if OWN_ROWS else 0)
                if OWN_ROWS:
                    partial = (tl.program_id(0).to(tl.int64) * H + head) * D
                    if dweight_ptr is not None:
                        store_sums(
                            dweight_ptr,
                            partial,
                            a * h_a,
                            b * h_b,
                            rest * h_rest,
                            D,
                            R,
                            INTERLEAVED,
                            BLOCK_HALF,
                            BLOCK_REST,
                        )
                    if dbias_ptr is not None:
                        store_sums(dbias_ptr, partial, a, b, rest, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
                else:
                    if dweight_ptr is not None:
                        dweight_a += a * h_a
                        dweight_b += b * h_b
                        dweight_rest += rest * h_rest
                    if dbias_ptr is not None:
                        dbias_a += a
                        dbias_b += b
                        dbias_rest += rest
                weight_a, weight_b, weight_rest = load_parts(
                    weight_ptr, row, mask_t, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST
                )
                a, b, rest = a * weight_a, b * weight_b, rest * weight_rest
                along = ((tl.sum(a * h_a, axis=1) + tl.sum(b * h_b, axis=1) + tl.sum(rest * h_rest, axis=1)) / D)[
                    :, None
                ]
                if KIND == "layer":
                    mean = ((tl.sum(a, axis=1) + tl.sum(b, axis=1) + tl.sum(rest, axis=1)) / D)[:, None]
                    a, b, rest = a - mean, b - mean, rest - mean
                a, b, rest = (a - h_a * along) * r, (b - h_b * along) * r, (rest - h_rest * along) * r
            store_parts(dx_ptr, dx_rows, mask_t, a, b, rest, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
            dy_rows, x_rows, dx_rows = dy_rows + stride_dyh, x_rows + stride_xh, dx_rows + stride_dxh
    if not OWN_ROWS:
        partial = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * D
        if dweight_ptr is not None:
            store_sums(
                dweight_ptr, partial, dweight_a, dweight_b, dweight_rest, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST
            )
        if dbias_ptr is not None:
            store_sums(dbias_ptr, partial, dbias_a, dbias_b, dbias_rest, D, R, INTERLEAVED, BLOCK_HALF, BLOCK_REST)


def _angles(cos, sin, B: int, S: int):
    """Returns cos and sin as [B, S, R] with inner stride 1, their strides, and R."""
    if cos is None:
        return None, None, (0, 0, 0, 0), 0
    cos, sin = (rows_of(table).expand(B, S, -1) for table in (cos, sin))
    return cos, sin, (*cos.stride()[:2], *sin.stride()[:2]), cos.shape[-1]


def _result(out, shape, dtype: torch.dtype, device):
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if out.shape != shape or (out.stride(-1) != 1 and shape[-1] > 1):
        raise ValueError(
            f"out must have shape {tuple(shape)} and inner stride 1, not {tuple(out.shape)}, {out.stride()}"
        )
    return out


def has_own_rows(weight) -> bool:
    return weight is not None and weight.dim() == 2


def heads_fwd(x, weight, eps: float, cos, sin, interleaved: bool = False, *, bias=None, kind: str = "rms", out=None):
    """Computes y [B, S, H, D] from x [B, S, H, D], weight [D] or [H, D] or None (no norm), cos and sin [S, R] or [B, S, R], or
    None.

    bias: as weight. kind: "rms" or "layer".
    out: where to write y, in out's dtype; may be x itself, may share no other memory with it.
    """
    B, S, H, D = x.shape
    y, x = _result(out, x.shape, x.dtype, x.device), rows_of(x)
    weight, bias = (None if tensor is None else tensor.contiguous() for tensor in (weight, bias))
    cos, sin, angle_strides, R = _angles(cos, sin, B, S)
    if x.numel():
        tile = head_tile(D, R)
        launch(
            _heads_fwd_kernel,
            (triton.cdiv(B * S, tile.BLOCK_S), triton.cdiv(H, HEADS)),
            x,
            weight,
            bias,
            cos,
            sin,
            y,
            B * S,
            S,
            H,
            *x.stride()[:3],
            *angle_strides,
            *y.stride()[:3],
            eps,
            KIND=kind,
            OWN_ROWS=has_own_rows(weight),
            D=D,
            R=R,
            INTERLEAVED=interleaved,
            **tile.launch_options(),
        )
    return y


def heads_bwd(
    dy,
    x,
    weight,
    eps: float,
    cos,
    sin,
    interleaved: bool = False,
    *,
    kind: str = "rms",
    out=None,
    need_dweight: bool | torch.dtype = False,
    need_dbias: bool | torch.dtype = False,
):
    """Computes dx [B, S, H, D] in dy's dtype; dweight and dbias as weight (None unless needed). Without weight x is not read.

    need_dweight, need_dbias: the gradient's dtype, or True for float32.
    out: where to write dx, in out's dtype; may be dy or x itself, may share no other memory with them.
    """
    B, S, H, D = dy.shape
    dx, dy = _result(out, dy.shape, dy.dtype, dy.device), rows_of(dy)
    x, weight = (None, None) if weight is None else (rows_of(x), weight.contiguous())
    cos, sin, angle_strides, R = _angles(cos, sin, B, S)
    tile = head_tile(D, R) if D else None
    tiles = triton.cdiv(B * S, tile.BLOCK_S) if D else 0
    along_heads, per_program = triton.cdiv(H, HEADS), 1
    if (need_dweight or need_dbias) and not has_own_rows(weight):  # else more columns are summed, or none
        per_program = max(triton.cdiv(tiles * along_heads, programs(arch_of(dy), WARPS)), 1)
    grid = triton.cdiv(tiles, per_program), along_heads
    shape = (grid[0], H, D) if has_own_rows(weight) else (grid[0] * grid[1], D)
    dweight, dbias = (
        torch.empty(shape, dtype=torch.float32, device=dy.device) if need else None
        for need in (need_dweight, need_dbias)
    )
    if dy.numel():
        launch(
            _heads_bwd_kernel,
            grid,
            dy,
            x,
            weight,
            cos,
            sin,
            dx,
            dweight,
            dbias,
            B * S,
            S,
            H,
            per_program,
            *dy.stride()[:3],
            *((0, 0, 0) if x is None else x.stride()[:3]),
            *angle_strides,
            *dx.stride()[:3],
            eps,
            KIND=kind,
            OWN_ROWS=has_own_rows(weight),
            D=D,
            R=R,
            INTERLEAVED=interleaved,
            maxnreg=128,
            **tile.launch_options(),
        )
    return dx, *row_sums((dweight, dbias), (need_dweight, need_dbias))
