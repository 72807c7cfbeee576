"""Activations on a tile: y = act(z) and dz = dy * act'(z), computed in float32.

| name | act(z) | act'(z) |
|---|---|---|
| relu | max(z, 0), NaN stays | [not z <= 0]: 0 at 0, as torch |
| relu2 | relu(z)^2 | 2 relu(z) |
| gelu | z Phi(z), Phi(z) = (1 + erf(z/sqrt 2))/2 | Phi(z) + z phi(z) |
| gelu_tanh | z s(2u), u = sqrt(2/pi)(z + 0.044715 z^3), s = sigmoid | s + 2 z s (1 - s) u' |
| quick_gelu | z s(1.702 z) | s (1 + 1.702 z (1 - s)) |
| silu | z s(z) | s (1 + z (1 - s)) |
| identity | z | 1 |

gelu_tanh uses (1 + tanh u)/2 = s(2u): the interpreter has no tanh. Every act maps 0 to 0: padding stays zero.

The type that z is stored in decides how. float32 takes the formulas as they stand; on a GPU tl.exp(x) is 2^(x log2 e) with
that product rounded: |x|/2 ulps beside torch's exp, seen in the tails alone. 16-bit types take one ex2 and one rcp an
element, without their code for subnormals: s(x) is 0 below 2^-126. For x >= 0
    Phi(-x) = exp(-x^2/2) P(t), t = 1/(1 + 0.35 x)
whose exponential is the density's, too. P is fitted to the relative error: 5e-6 to x = 4, 9e-5 to where ex2 ends, 13.2. So
h keeps its digits in the left tail, where formula 7.1.26 of Abramowitz and Stegun, as short, is off by 5e-4 at -4 and by
4e-3 at -6: as much as half of bf16's last digit.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .philox import checked_columns, philox_words
from .tile import (
    INTERPRET,
    INTERPRETER,
    arch_of,
    cast,
    launch,
    matrix,
    multiple,
    rows_of,
    stride_of,
    unit_of,
    upcast,
)


@triton.jit
def _reciprocal(x):
    """Returns 1/x in one instruction to 1 ulp, subnormals as zeros; an IEEE division takes eight."""
    if INTERPRET:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _gate(z, ACT: tl.constexpr, EXACT: tl.constexpr):
    """Returns s(2u), s(1.702 z) or s(z): the factor of z in act."""
    SLOPE: tl.constexpr = 1.702 if ACT == "quick_gelu" else 1.0
    if EXACT:
        if ACT == "gelu_tanh":
            return _sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))  # 2 sqrt(2/pi)
        else:
            return _sigmoid(SLOPE * z)
    else:
        if ACT == "gelu_tanh":
            exponent = z * tl.fma(z * z, -0.10294324, -2.3022082)  # -2u log2 e
        else:
            exponent = z * (-1.4426950408889634 * SLOPE)
        return _reciprocal(1.0 + tl.exp2(exponent))


@triton.jit
def _gaussian(z, EXACT: tl.constexpr):
    """Returns Phi(z) and exp(-z^2/2)."""
    if EXACT:
        return 0.5 + 0.5 * tl.erf(z * 0.7071067811865476), tl.exp(-0.5 * z * z)
    else:
        t = _reciprocal(tl.fma(tl.abs(z), 0.35, 1.0))
        e = tl.exp2(z * z * -0.7213475204444817)  # the square of a 16-bit z is exact
        p = tl.fma(t, -0.10407846, 0.2964028)
        p = tl.fma(p, t, -0.00732361)
        p = tl.fma(p, t, 0.18182005)
        p = tl.fma(p, t, 0.1327354)
        tail = e * tl.fma(p, t, 0.00044159)
        return tl.where(z > 0.0, 1.0 - tail, tail), e


@triton.jit
def act(z, ACT: tl.constexpr):
    """Computes act(z) in float32, from z in its storage type."""
    EXACT: tl.constexpr = z.dtype == tl.float32
    z = upcast(z)
    if ACT == "relu":
        return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "relu2":
        r = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return r * r
    elif ACT == "gelu":
        cdf, _ = _gaussian(z, EXACT)
        return z * cdf
    elif ACT == "identity":
        return z
    else:
        tl.static_assert(ACT == "gelu_tanh" or ACT == "quick_gelu" or ACT == "silu", "unknown activation")
        return z * _gate(z, ACT, EXACT)


@triton.jit
def act_grad(z, dy, ACT: tl.constexpr):
    """Computes dy * act'(z) in float32, from z in its storage type and dy in float32."""
    EXACT: tl.constexpr = z.dtype == tl.float32
    z = upcast(z)
    if ACT == "relu":
        return tl.where(z <= 0.0, 0.0, dy)
    elif ACT == "relu2":
        return dy * 2.0 * tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "gelu":
        cdf, e = _gaussian(z, EXACT)
        if EXACT:
            return dy * (cdf + z * (0.3989422804014327 * e))  # 1/sqrt(2 pi)
        else:
            return dy * tl.fma(z * 0.3989422804014327, e, cdf)
    elif ACT == "gelu_tanh":
        s = _gate(z, ACT, EXACT)
        if EXACT:
            # 1 - s, which would lose its digits if subtracted: 4 times torch's error for z > 2
            t = _gate(-z, ACT, EXACT)
            return dy * (s + z * s * t * (1.5957691216057308 * (1.0 + 0.134145 * z * z)))
        else:
            du = tl.minimum(tl.fma(z * z, 0.21406445, 1.5957691216057308), 1e30)  # 0 times infinity would be NaN
            return dy * tl.fma(z * s * (1.0 - s), du, s)
    elif ACT == "identity":
        return dy
    else:
        tl.static_assert(ACT == "quick_gelu" or ACT == "silu", "unknown activation")
        SLOPE: tl.constexpr = 1.702 if ACT == "quick_gelu" else 1.0
        s = _gate(z, ACT, EXACT)
        if EXACT:
            return dy * s * (1.0 + SLOPE * (z * (1.0 - s)))  # 1.702 z overflows
        else:
            return dy * tl.fma(z * s, tl.fma(-SLOPE, s, SLOPE), s)


@triton.jit
def pack_bits(bit, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Packs bool [M, N] into uint8 [M, N/8]: bit j of byte i is column 8 i + j."""
    weights = (1 << tl.arange(0, 8)).to(tl.int32)
    bits = bit.to(tl.int32).reshape(BLOCK_M, BLOCK_N // 8, 8)
    return tl.sum(bits * weights[None, None, :], axis=2).to(tl.uint8)


@triton.jit
def load_tile(rows, offs_m, offs_n, mask):
    return tl.load(rows[0] + offs_m.to(tl.int64)[:, None] * stride_of(rows) + offs_n[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(rows, offs_m, offs_n, mask, value):
    """Stores a tile that is already in the matrix's type."""
    tl.static_assert(value.dtype == rows[0].dtype.element_ty, "cast before storing: sums are taken of what is stored")
    tl.store(rows[0] + offs_m.to(tl.int64)[:, None] * stride_of(rows) + offs_n[None, :], value, mask=mask)


@triton.jit
def store_column_sum(ptr, pid_m, offs_n, N, value, mask):
    """Stores one row of bias-gradient partial sums, [tile rows, N] float32. The caller adds the rows up: no atomics."""
    total = tl.sum(tl.where(mask, upcast(value), 0.0), axis=0)
    tl.store(ptr + pid_m.to(tl.int64) * N + offs_n, total, mask=offs_n < N)


@triton.jit
def block_of(N, BLOCK_N: tl.constexpr):
    """Returns row and column of this program's block, from one dimension of programs: a second ends at 65535."""
    pid = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    return pid // columns, pid % columns


@triton.jit(do_not_specialize=["M"])
def _act_fwd_kernel(
    z_rows, u_rows, h_rows, M, N, ACT: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Computes h = round(act(z)), or round(act(z) u): the bits of forward's epilogue before its dropout."""
    N = multiple(N, UNIT)
    pid_m, pid_n = block_of(N, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    h = act(load_tile(z_rows, offs_m, offs_n, mask), ACT)
    if u_rows[0] is not None:
        h *= upcast(load_tile(u_rows, offs_m, offs_n, mask))
    store_tile(h_rows, offs_m, offs_n, mask, cast(h, h_rows[0].dtype.element_ty))


@triton.jit(do_not_specialize=["M"])
def _relu_bits_kernel(h_rows, bits_rows, M, N, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Packs h[m, 8 i + j] != 0 into bit j of byte i. NaN counts as passed, as in torch."""
    N = multiple(N, UNIT)
    pid_m, pid_n = block_of(N, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    h = upcast(load_tile(h_rows, offs_m, offs_n, (offs_m < M)[:, None] & (offs_n < N)[None, :]))
    offs_byte = pid_n * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
    mask_byte = (offs_m < M)[:, None] & (offs_byte < tl.cdiv(N, 8))[None, :]
    store_tile(bits_rows, offs_m, offs_byte, mask_byte, pack_bits(~(h <= 0.0), BLOCK_M, BLOCK_N))


@triton.jit(do_not_specialize=["M"])
def _act_bwd_kernel(
    dy_rows,
    saved_rows,
    dz_rows,
    db_ptr,
    M,
    N,
    ACT: tl.constexpr,
    BITS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes dz = dy * act'(z), db partial rows. saved is z, or relu's y, or (BITS) relu's 1-bit mask [M, ceil(N/8)]."""
    N = multiple(N, UNIT)
    pid_m, pid_n = block_of(N, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    dy = upcast(load_tile(dy_rows, offs_m, offs_n, mask))
    if BITS:
        byte = tl.load(
            saved_rows[0] + offs_m.to(tl.int64)[:, None] * stride_of(saved_rows) + (offs_n >> 3)[None, :],
            mask=mask,
            other=0,
        )
        dz = tl.where((byte.to(tl.int32) >> (offs_n & 7)[None, :]) & 1 != 0, dy, 0.0)
    else:
        dz = act_grad(load_tile(saved_rows, offs_m, offs_n, mask), dy, ACT)
    dz = cast(dz, dz_rows[0].dtype.element_ty)
    store_tile(dz_rows, offs_m, offs_n, mask, dz)
    if db_ptr is not None:
        store_column_sum(db_ptr, pid_m, offs_n, N, dz, mask)


@triton.jit(do_not_specialize=["M"])
def _sum_rows_kernel(partials, sums, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Computes sums[i] [N] = the sum of the rows of partials[i] [M, N] float32, rounded once."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    for i in tl.static_range(len(sums)):
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, M, BLOCK_M):
            offs_m = start + tl.arange(0, BLOCK_M)
            total += load_tile((partials[i], N), offs_m, offs_n, (offs_m < M)[:, None] & mask_n[None, :])
        tl.store(sums[i] + offs_n, cast(tl.sum(total, axis=0), sums[i].dtype.element_ty), mask=mask_n)


@triton.jit(do_not_specialize=["threshold", "col_base", "row_base", "M"])
def _dropout_kernel(
    x_rows,
    y_rows,
    state_ptr,
    threshold,
    scale,
    col_base,
    row_base,
    M,
    N,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes y = keep * scale * x. It is its own backward: dx = keep * scale * dy.

    A thread that holds eight neighbouring columns would need eight Philox calls for them in `keep_tile`'s form. So the tile is
    walked counter by counter: c1 runs over half of its rows, c0 over a quarter of its columns, and each of the eight values of
    a call belongs to an element 8 rows or 8, 16, 24 columns on. Eight loads of 16 bytes, one call an element and eighth.
    """
    N = multiple(N, UNIT)
    pid_m, pid_n = block_of(N, BLOCK_N)
    c1 = row_base // 16 * 8 + pid_m * (BLOCK_M // 2) + tl.arange(0, BLOCK_M // 2)
    c0 = pid_n * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    zero = tl.zeros((BLOCK_M // 2, BLOCK_N // 4), dtype=tl.uint32)
    words = philox_words(
        state_ptr, zero + (col_base // 4 + c0).to(tl.uint32)[None, :], zero + c1.to(tl.uint32)[:, None]
    )
    for word in tl.static_range(4):
        for half in tl.static_range(2):
            offs_m = c1 // 8 * 16 + half * 8 + c1 % 8 - row_base
            offs_n = c0 // 8 * 32 + word * 8 + c0 % 8
            mask = ((offs_m >= 0) & (offs_m < M))[:, None] & (offs_n < N)[None, :]
            keep = ((words[word] >> (16 * half)) & 0xFFFF).to(tl.int32) >= threshold
            x = upcast(load_tile(x_rows, offs_m, offs_n, mask))
            y = cast(tl.where(keep, x * scale, 0.0), y_rows[0].dtype.element_ty)
            store_tile(y_rows, offs_m, offs_n, mask, y)


def blocks_of(x: torch.Tensor) -> dict:
    options = dict(UNIT=unit_of(x.shape[1]), enable_fp_fusion=False)
    if arch_of(x) == INTERPRETER:
        return dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, **options)
    return dict(BLOCK_M=32, BLOCK_N=128, num_warps=8, **options)


def grid_of_blocks(M: int, N: int, blocks: dict) -> tuple[int]:
    return (triton.cdiv(M, blocks["BLOCK_M"]) * triton.cdiv(N, blocks["BLOCK_N"]),)


def block_sums(M: int, N: int, blocks: dict, like: torch.Tensor) -> torch.Tensor:
    """Allocates sums of columns: one float32 row for each row of blocks."""
    return torch.empty((triton.cdiv(M, blocks["BLOCK_M"]), N), dtype=torch.float32, device=like.device)


def row_sums(partials, wanted):
    """Sums the rows of partial sums float32 [M, ...], all of one shape or None: returns [...], each in the dtype that is wanted
    (True: float32), rounded once.

    One launch runs for all. torch.sum(dtype=) of float32 would round every partial sum first; and torch's own sum, in another
    order, would make the bits of one sum depend on whether the other is wanted.
    """
    pairs = [
        (partial, torch.float32 if dtype is True else dtype) for partial, dtype in zip(partials, wanted, strict=True)
    ]
    some = [(partial, dtype) for partial, dtype in pairs if partial is not None]
    if not some:
        return list(partials)
    sums = [None if partial is None else partial.new_empty(partial.shape[1:], dtype=dtype) for partial, dtype in pairs]
    M, N = some[0][0].shape[0], math.prod(some[0][0].shape[1:])
    if N:
        launch(
            _sum_rows_kernel,
            (triton.cdiv(N, 32),),
            tuple(partial for partial, _ in some),
            tuple(total for total in sums if total is not None),
            M,
            N,
            BLOCK_M=64,
            BLOCK_N=32,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return sums


def act_fwd(z, u, activation: str):
    """Computes h [M, N] = act(z), or act(z) * u, rounded once, from stored z (and u) where no gradient of z is needed."""
    M, N = z.shape
    z, u = rows_of(z), rows_of(u)
    h = torch.empty((M, N), dtype=z.dtype, device=z.device)
    blocks = blocks_of(z)
    if M and N:
        launch(
            _act_fwd_kernel,
            grid_of_blocks(M, N, blocks),
            matrix(z),
            matrix(u),
            matrix(h),
            M,
            N,
            ACT=activation,
            **blocks,
        )
    return h


def relu_bits(h):
    """Computes relu's mask as `act_bwd` takes it, uint8 [M, ceil(N/8)], from z or h = relu(z) [M, N]."""
    M, N = h.shape
    h, blocks = rows_of(h), blocks_of(h)
    bits = torch.empty((M, triton.cdiv(N, 8)), dtype=torch.uint8, device=h.device)
    if M and N:
        launch(_relu_bits_kernel, grid_of_blocks(M, N, blocks), matrix(h), matrix(bits), M, N, **blocks)
    return bits


def act_bwd(dy, saved, activation: str, *, bits: bool = False, db: bool = False):
    """Computes dz = dy * act'(saved) [M, N] and db = sum of dz's rows [N] (None unless asked for).

    db: the sum's dtype, or True for float32. saved: z [M, N], relu's y, or with `bits` relu's mask uint8 [M, ceil(N/8)].
    """
    M, N = dy.shape
    dy, saved = rows_of(dy), rows_of(saved)
    dz = torch.empty((M, N), dtype=dy.dtype, device=dy.device)
    blocks = blocks_of(dy)
    partial = block_sums(M, N, blocks, dy) if db else None
    if M and N:
        launch(
            _act_bwd_kernel,
            grid_of_blocks(M, N, blocks),
            matrix(dy),
            matrix(saved),
            matrix(dz),
            partial,
            M,
            N,
            ACT=activation,
            BITS=bits,
            **blocks,
        )
    return dz, *row_sums((partial,), (db,))


def dropout(
    x, state, threshold: int, scale: float, col_base: int = 0, *, row_base: int = 0, blocks: dict | None = None
):
    """Computes keep * scale * x for x [M, N], with the mask of rows row_base.. and columns col_base.. (a multiple of 32) of the
    logical tensor (philox.py).

    blocks: BLOCK_M (a multiple of 16) and BLOCK_N (of 32), to show that the mask does not depend on them.
    """
    M, N = x.shape
    x = rows_of(x)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    blocks = blocks or dict(BLOCK_M=64, BLOCK_N=128)
    if M and N:
        whole_rows = M + row_base % 16  # counters start at a multiple of 16 rows
        grid = triton.cdiv(whole_rows, blocks["BLOCK_M"]) * triton.cdiv(N, blocks["BLOCK_N"])
        launch(
            _dropout_kernel,
            (grid,),
            matrix(x),
            matrix(y),
            state,
            threshold,
            scale,
            checked_columns(col_base),
            row_base,
            M,
            N,
            **blocks,
            UNIT=unit_of(N),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return y
