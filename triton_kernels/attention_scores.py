"""Functions that attention's forward and backward share: the rows of a head, its scores, and which of them are seen.

Kernels take tensors in tuples, whose strides count elements:
    heads   (ptr, strides of batch, head, row): [B, H, S, D]        rows    (ptr, stride of rows): [S, D], those of one head
    mask    (ptr, strides of batch, head, row, column)              slopes  (ptr, stride of batch)
The ptr of what is absent is None. Within a kernel
    window  (left, right, row_base): row i sees columns i - left <= j <= i + right, and is row i + row_base of its sequence
    dropout (state_ptr, threshold, first_block): as in philox.py
    scale   (scale, softcap): softcap None is none
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import cast, multiple, upcast

LOG2E = tl.constexpr(1.4426950408889634)
# No length and no scalar compiles a kernel again; the strides of lse are lengths. None of them is a member of a tuple, because
# Triton specialises those all the same.
DYNAMIC = [
    "Sq", "Sk", "H", "tiles", "threshold", "plane_base", "planes", "left", "right", "row_base", "plane_rows", "stride_lseb",
    "stride_lseh"
]  # fmt: skip


@triton.jit
def rows_at(heads, b, h, row0, STRIDE_STEP: tl.constexpr):
    """Returns the rows of head h of batch b from row0 on.

    All strides are multiples of STRIDE_STEP (tile.unit_of), which the compiler is told.
    """
    ptr, stride_b, stride_h, stride_s = heads
    stride_b = multiple(stride_b, STRIDE_STEP)
    stride_h = multiple(stride_h, STRIDE_STEP)
    stride_s = multiple(stride_s, STRIDE_STEP)
    return ptr + b * stride_b + h * stride_h + row0 * stride_s, stride_s


@triton.jit
def load_rows(rows, offs_s, S, D, HEAD_D: tl.constexpr):
    """Loads [len(offs_s), HEAD_D] rows of one head, zeros outside of S rows and D columns."""
    ptr, stride_s = rows
    offs_d = tl.arange(0, HEAD_D)
    mask = (offs_s < S)[:, None]
    if HEAD_D != D:
        mask = mask & (offs_d < D)[None, :]
    return tl.load(ptr + offs_s.to(tl.int64)[:, None] * stride_s + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(rows, offs_s, S, D, HEAD_D: tl.constexpr, value):
    ptr, stride_s = rows
    offs_d = tl.arange(0, HEAD_D)
    mask = (offs_s < S)[:, None] & (offs_d < D)[None, :]
    value = cast(value, ptr.dtype.element_ty)
    tl.store(ptr + offs_s.to(tl.int64)[:, None] * stride_s + offs_d[None, :], value, mask=mask)
    return value


@triton.jit
def mask_offset_of(mask, b, h):
    """Returns where the mask of head h of batch b starts."""
    _, stride_b, stride_h, _, _ = mask
    return b * stride_b + h * stride_h


@triton.jit
def tanh_tile(u):
    """Computes tanh(u) to 2 units in the last place: the polynomial of Cephes' tanhf near 0, where 1 - exp(-2u) loses its
    digits.

    The interpreter has no tanh, and the hardware's has 11 bits.
    """
    z = u * u
    near = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    near = u + u * (z * (near - 3.33332819422e-1))
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(u) * (2 * LOG2E)) + 1.0)
    return tl.where(z < 0.390625, near, tl.where(u < 0.0, -far, far))


@triton.jit
def capped_tile(qk, scale):
    """Returns (t, factor), whose product is the score before masks. t = tanh(scale qk / softcap), or qk without a softcap."""
    factor, softcap = scale
    if softcap is not None:
        return tanh_tile(qk * (factor / softcap)), softcap
    else:
        return qk, factor


@triton.jit
def score_tile(
    qk,
    i,
    j,
    Sq,
    Sk,
    scale,
    slope,
    mask,
    mask_offset,
    window,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    EDGE: tl.constexpr,
    MASK_STEP: tl.constexpr,
):
    """Computes s in units of log 2, -inf where i may not see j. i and j broadcast: [BM, 1] and [1, BN], or transposed.

    The mask's stride of rows is None for a mask of columns alone. MASK_STEP, 16 or 1, divides Sk: where a mask's columns end
    decides how many bytes one load takes.
    """
    mask_ptr, _, _, stride_maskq, stride_maskk = mask
    left, right, row_base = window
    s = qk * (scale * LOG2E)
    if slope is not None:
        s -= (slope * LOG2E) * tl.abs(i + row_base - j).to(tl.float32)
    if mask_ptr is not None:
        inside = j < Sk // MASK_STEP * MASK_STEP
        mask_ptr += mask_offset
        offsets = j.to(tl.int64) * stride_maskk
        if stride_maskq is not None:
            inside = inside & (i < Sq)
            offsets += i.to(tl.int64) * stride_maskq
        if mask_ptr.dtype.element_ty == tl.int8:
            s = tl.where(tl.load(mask_ptr + offsets, mask=inside, other=0) != 0, s, float("-inf"))
        else:
            m = upcast(tl.load(mask_ptr + offsets, mask=inside, other=0.0))
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
    m0, Sk, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """Returns lo, full_lo, full_hi, hi of the column tiles that rows m0.. see; [full_lo, full_hi) need no edge mask."""
    left, right, _ = window
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
def sequence_of(cu_ptr, b, S):
    """Returns first row and length of sequence b: packed by cu_ptr int32 [B + 1], of which S rows are seen, or (0, S)."""
    if cu_ptr is not None:
        start = tl.load(cu_ptr + b).to(tl.int64)
        return start, tl.minimum(tl.load(cu_ptr + b + 1) - start, S).to(tl.int32)
    else:
        return b * 0, S


@triton.jit
def window_of(cu_ptr, left, right, row_base, Sq, Sk):
    """Returns the window's bounds; of packed sequences the last row is aligned with the last column."""
    if cu_ptr is not None:
        return left - (Sk - Sq), right + (Sk - Sq), row_base
    else:
        return left, right, row_base


@triton.jit
def first_block_of(plane_base, b, h, planes, plane_rows, row_base):
    """Returns where row row_base of the plane of (b, h), which has `plane_rows` rows, lies among the mask's blocks of 16."""
    return ((plane_base + b * planes + h) * tl.cdiv(plane_rows, 16) + row_base // 16).to(tl.uint32)
