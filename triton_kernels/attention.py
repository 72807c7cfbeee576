"""Flash attention that can be run again: forward with LSE, and a deterministic backward from q, k, v and LSE.

    s_ij = scale q_i k_j, or c tanh(scale q_i k_j / c) with softcap c [- slope |i - j|] [+ mask_ij]
    p = softmax_j(s);  o = dropout(p) v;  lse_i = log sum_j exp(s_ij)
    dv = dropout(p)^T do;  dp = dropout'(do v^T);  ds = p (dp - delta);  delta_i = sum_d o_id do_id
    dmask = ds, summed over what the mask is broadcast to
    with softcap ds *= 1 - tanh^2;  dq = scale ds k;  dk = scale ds^T q

Row i may see column j where i - LEFT <= j <= i + RIGHT; causal is RIGHT = 0, aligned top-left as in torch's
scaled_dot_product_attention. Packed sequences align bottom-right, as in torch's varlen_attn: i + Sk - Sq for i.
A row that sees nothing gives o = 0, lse = -inf, and zero gradients.
At recompute="full" backward runs the forward kernel again, which also writes delta: the same tile function, the same
bits. No atomics: dk and dv belong to one program, dq to another, dmask to a third, so ten runs give ten times the same bits.
Sources: Dao, arXiv 2307.08691 (the algorithm); Press et al., arXiv 2108.12409 (ALiBi).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .attention_backward import _attn_dkdv_kernel, _attn_dmask_kernel, _attn_dq_kernel
from .attention_scores import (
    DYNAMIC,
    capped_tile,
    column_phases,
    first_block_of,
    load_rows,
    mask_offset_of,
    rows_at,
    score_tile,
    sequence_of,
    store_rows,
    window_of,
)
from .philox import score_values
from .tile import INTERPRETER, arch_of, cast, dot, family_of, launch, rows_of, shared_memory_of, unit_of, upcast

LN2 = tl.constexpr(0.6931471805599453)


class AttentionTile(NamedTuple):
    """A tile of BLOCK_M rows of q (a multiple of 16) by BLOCK_N rows of k and v (of 32): the blocks of the dropout mask."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int

    def launch_options(self) -> dict:
        return {**self._asdict(), "enable_fp_fusion": False}


# (kernel, architecture) -> {(class, padded head dim): tile}; the next larger head dim is taken. Classes: 16-bit types; "16
# masked" where a mask of rows and columns needs registers too (without such a row it takes the plain one); float32 with
# TF32 matmuls, and "ieee" ones, which run on the ordinary cores. All pass the code-generation check; its few bytes of spills
# are named there. Eight warps lie along the longer side of a matmul's result, 16 rows or 8 columns each. So a tile of fewer
# than 128 rows (columns for dkdv), or of 64 columns (rows) where the head dim is the longer side, would be computed twice:
# those here are not, but for dkdv of "32" at 256 dims, whose larger one does not fit. Matmuls of HGMMA narrower than 64 have
# failed (triton#11366), which is why head dims are padded to 64 on sm_90; what has 32 columns there takes mma.sync.
TILES = {
    ("fwd", 90): {("16", 64): (128, 128, 8, 3), ("16", 128): (128, 64, 8, 3), ("16", 256): (128, 64, 8, 2),
                  ("16 masked", 64): (128, 64, 8, 3),
                  ("32", 64): (128, 64, 8, 2), ("32", 128): (128, 64, 8, 2), ("32", 256): (32, 64, 8, 1),
                  ("32 ieee", 64): (64, 32, 8, 2), ("32 ieee", 128): (32, 32, 8, 1), ("32 ieee", 256): (16, 32, 8, 1)},
    ("fwd", 80): {("16", 64): (128, 64, 8, 3), ("16", 128): (128, 32, 8, 3), ("16", 256): (64, 64, 8, 2),
                  ("32", 64): (128, 64, 8, 2), ("32", 128): (128, 32, 8, 2), ("32", 256): (32, 64, 8, 1),
                  ("32 ieee", 64): (64, 32, 8, 2), ("32 ieee", 128): (32, 32, 8, 1), ("32 ieee", 256): (16, 32, 8, 1)},
    ("dkdv", 90): {("16", 64): (64, 128, 8, 2), ("16", 128): (64, 128, 8, 2), ("16", 256): (64, 32, 8, 2),
                   ("32", 64): (64, 128, 8, 1), ("32", 128): (64, 32, 8, 1), ("32", 256): (32, 32, 8, 1),
                   ("32 ieee", 64): (32, 32, 8, 1), ("32 ieee", 128): (16, 32, 8, 1), ("32 ieee", 256): (16, 32, 8, 1)},
    ("dkdv", 80): {("16", 64): (32, 128, 8, 2), ("16", 128): (64, 64, 8, 1), ("16", 256): (64, 32, 8, 2),
                   ("16 masked", 64): (32, 128, 8, 1),
                   ("32", 64): (32, 128, 8, 1), ("32", 128): (64, 32, 8, 1), ("32", 256): (32, 32, 8, 1),
                   ("32 ieee", 64): (32, 32, 8, 1), ("32 ieee", 128): (16, 32, 8, 1), ("32 ieee", 256): (16, 32, 8, 1)},
    ("dq", 90): {("16", 64): (128, 64, 8, 2), ("16", 128): (128, 64, 8, 2), ("16", 256): (128, 64, 8, 1),
                 ("32", 64): (128, 64, 8, 1), ("32", 128): (128, 64, 8, 1), ("32", 256): (32, 64, 8, 1),
                 ("32 ieee", 64): (32, 32, 8, 1), ("32 ieee", 128): (32, 32, 8, 1), ("32 ieee", 256): (16, 32, 8, 1)},
    ("dq", 80): {("16", 64): (128, 64, 8, 2), ("16", 128): (128, 32, 8, 2), ("16", 256): (64, 64, 8, 2),
                 ("16 masked", 64): (128, 32, 8, 2), ("16 masked", 128): (64, 64, 8, 2),
                 ("32", 64): (128, 32, 8, 1), ("32", 128): (64, 64, 8, 1), ("32", 256): (16, 64, 8, 1),
                 ("32 ieee", 64): (32, 32, 8, 1), ("32 ieee", 128): (32, 32, 8, 1), ("32 ieee", 256): (16, 32, 8, 1)},
    ("dmask", 90): {("16", 64): (128, 64, 8, 3), ("16", 128): (128, 64, 8, 2), ("16", 256): (128, 64, 8, 1),
                    ("32", 64): (128, 64, 8, 2), ("32", 128): (128, 64, 8, 1), ("32", 256): (16, 32, 4, 2),
                    ("32 ieee", 64): (32, 32, 8, 1), ("32 ieee", 128): (32, 32, 8, 1), ("32 ieee", 256): (32, 32, 8, 1)},
    ("dmask", 80): {("16", 64): (128, 64, 8, 2), ("16", 128): (128, 32, 8, 2), ("16", 256): (64, 64, 4, 2),
                    ("32", 64): (128, 32, 8, 2), ("32", 128): (64, 32, 4, 2), ("32", 256): (16, 32, 4, 2),
                    ("32 ieee", 64): (32, 32, 8, 1), ("32 ieee", 128): (32, 32, 8, 1), ("32 ieee", 256): (32, 32, 8, 1)},
}  # fmt: skip
# GPUs that take the rows of sm_80 with less shared memory than its 163 KiB (99 KiB: sm_86, sm_89, sm_120):
# (kernel, class, padded head dim) -> (KiB that the row above needs, the tile instead if there is one).
LARGE_TILES = {
    ("fwd", "16", 256): (112, (64, 32, 8, 2)), ("dkdv", "16", 256): (100, (32, 32, 8, 1)),
    ("dq", "16", 256): (144, (64, 32, 8, 1)),
    ("fwd", "32", 128): (112, (64, 32, 8, 2)), ("dkdv", "32", 128): (128, (32, 32, 8, 1)),
    ("dq", "32", 128): (128, (16, 64, 8, 1)),
    ("fwd", "32", 256): (104, (32, 32, 8, 1)), ("dkdv", "32", 256): (160, None),
    ("dq", "32", 256): (160, (16, 32, 8, 1)),
    ("dmask", "16", 256): (136, (32, 32, 2, 2)), ("dmask", "32", 128): (104, (32, 32, 2, 2)),
}  # fmt: skip
# Rows of sm_80 that take one stage on sm_100 and sm_103, whose matmuls read more from shared memory: two would want up to 258
# KiB of 227.
ONE_STAGE = {("dq", "16", 256), ("dmask", "16", 256)}
INTERPRETED_TILE = AttentionTile(32, 32, 4, 1)


def attention_tile(
    kernel: str, arch: int, shared: int, dtype: torch.dtype, head_dim: int, precision: str, masked: bool
) -> AttentionTile:
    """Returns the tile: a pure function of the kernel, the architecture, its shared memory, the dtype, the head dim and the
    shape class."""
    if arch == INTERPRETER:
        return INTERPRETED_TILE
    if dtype.itemsize == 4:
        shape_class = "32 ieee" if precision == "ieee" else "32"
    else:
        shape_class = "16 masked" if masked else "16"
    row, table = max(padded_head_dim(head_dim, arch), 64), TILES[kernel, family_of(arch)]
    plain = shape_class.removesuffix(" masked")
    tile = table.get((shape_class, row)) or table[plain, row]
    if 100 <= arch < 110 and (kernel, plain, row) in ONE_STAGE:
        tile = (*tile[:3], 1)
    need, smaller = LARGE_TILES.get((kernel, plain, row), (0, None))
    if need > shared // 1024 and family_of(arch) != 90:
        if smaller is None:
            raise RuntimeError(
                f"attention of {dtype} heads of {head_dim}: its {kernel} kernel needs {need} KiB of shared memory, the "
                f'device has {shared // 1024}; use a 16-bit type, precision "ieee" or backend("eager")'
            )
        tile = smaller
    return AttentionTile(*tile)


def padded_head_dim(head_dim: int, arch: int = INTERPRETER) -> int:
    """Returns the power of two that a head dim is padded to in registers: >= 64 on sm_90 (see TILES), else >= 16."""
    return max(triton.next_power_of_2(head_dim), 64 if family_of(arch) == 90 else 16)


def _tile(kernel: str, q: torch.Tensor, core) -> AttentionTile:
    masked = core.mask is not None and core.mask.shape[2] > 1
    return attention_tile(kernel, arch_of(q), shared_memory_of(q), q.dtype, q.shape[-1], core.precision, masked)


@triton.jit
def _fwd_steps(
    acc,
    total,
    top,
    lo,
    hi,
    slope,
    q,
    k_rows,
    v_rows,
    m0,
    Sq,
    Sk,
    scale,
    mask,
    mask_offset,
    window,
    dropout,
    EDGE: tl.constexpr,
    D: tl.constexpr,
    HEAD_D: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    MASK_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes the online softmax over the column tiles of [lo, hi); lo is a multiple of BLOCK_N."""
    state_ptr, threshold, first_block = dropout
    offs_m = m0 + tl.arange(0, q.shape[0])
    for start in range(lo, hi, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_rows, offs_n, Sk, D, HEAD_D)
        qk = dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), dtype=tl.float32), PRECISION)
        qk, factor = capped_tile(qk, scale)
        s = score_tile(
            qk,
            offs_m[:, None],
            offs_n[None, :],
            Sq,
            Sk,
            factor,
            slope,
            mask,
            mask_offset,
            window,
            LEFT,
            RIGHT,
            EDGE,
            MASK_STEP,
        )
        new_top = tl.maximum(top, tl.max(s, axis=1))
        # a row that has seen nothing yet has top = -inf: exp2(-inf - -inf) would be NaN
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - shift[:, None])
        correction = tl.exp2(top - shift)
        total = total * correction + tl.sum(p, axis=1)
        if state_ptr is not None:
            values = score_values(state_ptr, first_block, m0, start, q.shape[0], BLOCK_N, False)
            p = tl.where(values >= threshold, p, 0.0)
        v = load_rows(v_rows, offs_n, Sk, D, HEAD_D)
        acc = dot(cast(p, v.dtype), v, acc * correction[:, None], PRECISION)
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=DYNAMIC)
def _attn_fwd_kernel(
    q_heads,
    k_heads,
    v_heads,
    mask,
    slopes,
    state_ptr,
    cuq_ptr,
    cuk_ptr,
    do_heads,
    o_heads,
    lse_ptr,
    delta_ptr,
    Sq,
    Sk,
    H,
    tiles,
    scale,
    threshold,
    keep_scale,
    plane_base,
    planes,
    left,
    right,
    row_base,
    plane_rows,
    stride_lseb,
    stride_lseh,
    D: tl.constexpr,
    HEAD_D: tl.constexpr,
    GROUP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    STRIDE_STEP: tl.constexpr,
    MASK_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes o and lse; with do also delta = rowsum(o do). Tiles of a head are neighbours, the longest causal ones first."""
    slopes_ptr, stride_slopeb = slopes
    pid = tl.program_id(0)
    m0 = (tiles - 1 - pid % tiles) * BLOCK_M
    b = (pid // tiles // H).to(tl.int64)
    h = (pid // tiles % H).to(tl.int64)
    row0, Sq_b = sequence_of(cuq_ptr, b, Sq)
    col0, Sk_b = sequence_of(cuk_ptr, b, Sk)
    window = window_of(cuq_ptr, left, right, row_base, Sq_b, Sk_b)
    if m0 < Sq_b:
        k_rows = rows_at(k_heads, b, h // GROUP, col0, STRIDE_STEP)
        v_rows = rows_at(v_heads, b, h // GROUP, col0, STRIDE_STEP)
        slope = slopes_ptr
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + b * stride_slopeb + h)
        mask_offset = mask_offset_of(mask, b, h)
        dropout = (state_ptr, threshold, first_block_of(plane_base, b, h, planes, plane_rows, row_base))
        offs_m = m0 + tl.arange(0, BLOCK_M)
        q = load_rows(rows_at(q_heads, b, h, row0, STRIDE_STEP), offs_m, Sq_b, D, HEAD_D)
        head = (q, k_rows, v_rows, m0, Sq_b, Sk_b, scale, mask, mask_offset, window, dropout)
        acc = tl.zeros((BLOCK_M, HEAD_D), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        lo, full_lo, full_hi, hi = column_phases(m0, Sk_b, window, BLOCK_M, BLOCK_N, LEFT, RIGHT)
        ONE_PHASE: tl.constexpr = LEFT and HEAD_D > 128  # three phases do not fit into the registers
        if ONE_PHASE:
            full_hi = lo
        elif LEFT:
            acc, total, top = _fwd_steps(
                acc, total, top, lo, full_lo, slope, *head, True, D, HEAD_D, LEFT, RIGHT, MASK_STEP, PRECISION, BLOCK_N
            )
        if not ONE_PHASE:
            acc, total, top = _fwd_steps(
                acc,
                total,
                top,
                full_lo,
                full_hi,
                slope,
                *head,
                False,
                D,
                HEAD_D,
                LEFT,
                RIGHT,
                MASK_STEP,
                PRECISION,
                BLOCK_N,
            )
        acc, total, top = _fwd_steps(
            acc, total, top, full_hi, hi, slope, *head, True, D, HEAD_D, LEFT, RIGHT, MASK_STEP, PRECISION, BLOCK_N
        )
        empty = total == 0.0
        acc *= (keep_scale / tl.where(empty, 1.0, total))[:, None]
        lse = tl.where(empty, float("-inf"), top * LN2 + tl.log(tl.where(empty, 1.0, total)))
        o = store_rows(rows_at(o_heads, b, h, row0, STRIDE_STEP), offs_m, Sq_b, D, HEAD_D, acc)
        row_values = b * stride_lseb + h * stride_lseh + row0 + offs_m
        tl.store(lse_ptr + row_values, lse, mask=offs_m < Sq_b)
        if do_heads[0] is not None:
            do = load_rows(rows_at(do_heads, b, h, row0, STRIDE_STEP), offs_m, Sq_b, D, HEAD_D)
            tl.store(delta_ptr + row_values, tl.sum(upcast(o) * upcast(do), axis=1), mask=offs_m < Sq_b)


@triton.jit(do_not_specialize=["Sq", "H", "tiles", "stride_lseb", "stride_lseh"])
def _delta_kernel(
    o_heads,
    do_heads,
    cuq_ptr,
    delta_ptr,
    Sq,
    H,
    tiles,
    stride_lseb,
    stride_lseh,
    D: tl.constexpr,
    HEAD_D: tl.constexpr,
    STRIDE_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Computes delta = rowsum(o do), from a stored o."""
    pid = tl.program_id(0)
    b = (pid // tiles // H).to(tl.int64)
    h = (pid // tiles % H).to(tl.int64)
    row0, Sq_b = sequence_of(cuq_ptr, b, Sq)
    offs_m = pid % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    o = load_rows(rows_at(o_heads, b, h, row0, STRIDE_STEP), offs_m, Sq_b, D, HEAD_D)
    do = load_rows(rows_at(do_heads, b, h, row0, STRIDE_STEP), offs_m, Sq_b, D, HEAD_D)
    delta_ptr += b * stride_lseb + h * stride_lseh + row0
    tl.store(delta_ptr + offs_m, tl.sum(upcast(o) * upcast(do), axis=1), mask=offs_m < Sq_b)


def _geometry(q, k, core):
    """Returns B, H, Sq, Sk and GROUP; lengths are maxima when sequences are packed. core: ckptkern.eager.AttentionCore."""
    H, H_kv = q.shape[1], k.shape[1]
    if core.cu_q is not None:
        return core.cu_q.shape[0] - 1, H, core.max_q, core.max_k, H // H_kv
    return q.shape[0], H, q.shape[2], k.shape[2], H // H_kv


def _heads(x, packed: bool) -> tuple:
    """Returns x [B, H, S, D] and its strides; packed sequences share one batch."""
    if x is None:
        return None, 0, 0, 0
    return x, (0 if packed else x.stride(0)), x.stride(1), x.stride(2)


def _mask(mask) -> tuple:
    """Returns mask and its strides, 0 where it broadcasts; None for the stride of rows, of which the kernel then loads one."""
    if mask is None:
        return None, 0, 0, None, 0
    b, h, row, col = (0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    return mask, b, h, row or None, col


def _scale(core) -> tuple:
    return core.scale, core.softcap or None


def _slopes(slopes) -> tuple:
    return slopes, 0 if slopes is None or slopes.shape[0] == 1 else slopes.stride(0)


def empty_heads(q: torch.Tensor) -> torch.Tensor:
    """Allocates o [B, H, S, D] whose memory is [B, S, H, D], as the output projection reads it; not a view."""
    B, H, S, D = q.shape
    return torch.empty_strided((B, H, S, D), (S * H * D, D, H * D, 1), dtype=q.dtype, device=q.device)


def _zero(*results: torch.Tensor | None) -> None:
    """Zeroes the results: rows of packed tokens that are in no sequence stay zero, because the kernels visit none of them."""
    for result in results:
        if result is not None:
            result.zero_()


def _with_plain_vectors(core):
    """Returns core with slopes and bounds that lie as the kernels read them: a slice of a table has other strides."""
    if core.slopes is None and core.cu_q is None:
        return core
    return core._replace(slopes=rows_of(core.slopes), cu_q=rows_of(core.cu_q), cu_k=rows_of(core.cu_k))


def _stride_step(*tensors) -> int:
    return unit_of(*(stride for x in tensors if x is not None for stride in x.stride()[:3]))


def _common(q, k, core, *others):
    B, H, Sq, Sk, group = _geometry(q, k, core)
    row_base, shifts = core.row_base, (-core.row_base, core.row_base)
    if core.dropout[0] is not None and row_base % 16:
        raise ValueError(f"row_base must be a multiple of 16, not {row_base}: a Philox counter covers 16 rows")
    # bounds in q's own rows; further than the scores there is nothing to see, and a row plus a bound near 2**31 would overflow
    left, right = (min((side or 0) + shift, max(Sq, Sk)) for side, shift in zip(core.window, shifts, strict=True))
    D = q.shape[-1]
    flags = dict(
        D=D,
        HEAD_D=padded_head_dim(D, arch_of(q)),
        GROUP=group,
        LEFT=core.window[0] is not None,
        RIGHT=core.window[1] is not None,
        MASK_STEP=16 if core.mask is not None and Sk % 16 == 0 else 1,
        STRIDE_STEP=_stride_step(q, k, *others),
        PRECISION=core.precision,
    )
    plane_rows = core.max_q or Sq
    return B, H, Sq, Sk, (left, right, row_base, plane_rows), flags


def attn_fwd(q, k, v, core, *, do=None, tile: AttentionTile | None = None):
    """Computes o like q, lse float32 [B, H, Sq] ([1, H, total] when packed), and delta like lse or None.

    q [B, H, Sq, D], k, v [B, H_kv, Sk, D], any strides with an inner stride of 1. With `do` (recompute) also delta = rowsum(o
    do).
    """
    q, k, v, do, core = rows_of(q), rows_of(k), rows_of(v), rows_of(do), _with_plain_vectors(core)
    o = empty_heads(q)
    B, H, Sq, Sk, window, flags = _common(q, k, core, v, o, do)
    packed = core.cu_q is not None
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    delta = None if do is None else torch.empty_like(lse)
    if packed:
        _zero(o, lse, delta)
    tile = tile or _tile("fwd", q, core)
    tiles = triton.cdiv(Sq, tile.BLOCK_M)
    if B * H * tiles:  # without dimensions, too: lse is that of the mask
        launch(
            _attn_fwd_kernel,
            (B * H * tiles,),
            _heads(q, packed),
            _heads(k, packed),
            _heads(v, packed),
            _mask(core.mask),
            _slopes(core.slopes),
            core.dropout[0],
            core.cu_q,
            core.cu_k,
            _heads(do, packed),
            _heads(o, packed),
            lse,
            delta,
            Sq,
            Sk,
            H,
            tiles,
            _scale(core),
            core.dropout[1],
            core.dropout[2],
            core.plane_base,
            core.planes or H,
            *window,
            0 if packed else lse.stride(0),
            lse.stride(1),
            **flags,
            **tile.launch_options(),
        )
    return o, lse, delta


def attn_delta(o, do, core):
    """Computes delta = rowsum(o do), float32 [B, H, Sq], from a stored o."""
    o, do, core = rows_of(o), rows_of(do), _with_plain_vectors(core)
    B, H, Sq, *_ = _geometry(o, o, core)
    packed = core.cu_q is not None
    delta = torch.empty(o.shape[:3], dtype=torch.float32, device=o.device)
    if packed:
        _zero(delta)
    D = o.shape[-1]
    BLOCK_M = 32
    tiles = triton.cdiv(Sq, BLOCK_M)
    if B * H * tiles:
        launch(
            _delta_kernel,
            (B * H * tiles,),
            _heads(o, packed),
            _heads(do, packed),
            core.cu_q,
            delta,
            Sq,
            H,
            tiles,
            0 if packed else delta.stride(0),
            delta.stride(1),
            D=D,
            HEAD_D=padded_head_dim(D, arch_of(o)),
            STRIDE_STEP=_stride_step(o, do),
            BLOCK_M=BLOCK_M,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return delta


def attn_bwd(
    q, k, v, do, lse, delta, core, *, need_dq=True, need_dkv=True, dq=None, dk=None, dv=None, tiles: tuple | None = None
):
    """Computes dq, dk and dv, in the given tensors (such as views of a packed dqkv) or in new ones.

    need_dq, need_dkv: what is not needed is None and its kernel does not run. tiles: (dkdv tile, dq tile).
    """
    q, k, v, do, core = rows_of(q), rows_of(k), rows_of(v), rows_of(do), _with_plain_vectors(core)
    lse, delta = lse.contiguous(), delta.contiguous()  # both are read with lse's strides
    packed = core.cu_q is not None
    dq = (empty_heads(q) if dq is None else dq) if need_dq else None
    dk = (empty_heads(k) if dk is None else dk) if need_dkv else None
    dv = (empty_heads(v) if dv is None else dv) if need_dkv else None
    for out in (dq, dk, dv):
        if out is not None and out.stride(-1) != 1 and out.shape[-1] > 1:
            raise ValueError(f"dq, dk and dv must have an inner stride of 1, but one has strides {out.stride()}")
    B, H, Sq, Sk, window, flags = _common(q, k, core, v, do, dq, dk, dv)
    # fully visible tiles get a loop of their own without masks, where two loops fit into the registers
    plain = core.mask is None and core.slopes is None and core.window[0] is None and not core.softcap
    flags["PHASED"] = plain and q.shape[-1] <= 128
    if packed:
        _zero(dq, dk, dv)
    tile_kv, tile_q = tiles or (_tile("dkdv", q, core) if need_dkv else None, _tile("dq", q, core) if need_dq else None)
    inputs = (
        _heads(q, packed), _heads(k, packed), _heads(v, packed), _mask(core.mask), _slopes(core.slopes), core.dropout[0],
        core.cu_q, core.cu_k, _heads(do, packed), lse, delta,
    )  # fmt: skip

    def scalars(count):
        return (
            Sq,
            Sk,
            H,
            count,
            _scale(core),
            core.dropout[1],
            core.dropout[2],
            core.plane_base,
            core.planes or H,
            *window,
            0 if packed else lse.stride(0),
            lse.stride(1),
        )

    if need_dkv and B * k.shape[1] * Sk and q.shape[-1]:
        count = triton.cdiv(Sk, tile_kv.BLOCK_N)
        launch(
            _attn_dkdv_kernel,
            (B * k.shape[1] * count,),
            *inputs,
            _heads(dk, packed),
            _heads(dv, packed),
            *scalars(count),
            **flags,
            **tile_kv.launch_options(),
        )
    if need_dq and B * H * Sq and q.shape[-1]:
        count = triton.cdiv(Sq, tile_q.BLOCK_M)
        launch(
            _attn_dq_kernel,
            (B * H * count,),
            *inputs,
            _heads(dq, packed),
            *scalars(count),
            **flags,
            **tile_q.launch_options(),
        )
    return dq, dk, dv


def attn_dmask(q, k, v, do, lse, delta, core, shape, *, tile: AttentionTile | None = None):
    """Computes the gradient float32 [B or 1, H or 1, Sq or 1, Sk or 1] of what was added to the scores.

    shape: the gradient's; dimensions of 1 are summed over. core.mask may be larger: that of a sum of several masks. q has all
    rows.
    """
    if core.row_base:
        raise ValueError(f"attn_dmask: q must have all rows of a sequence, not those from {core.row_base} on")
    q, k, v, do, core = rows_of(q), rows_of(k), rows_of(v), rows_of(do), _with_plain_vectors(core)
    lse, delta = lse.contiguous(), delta.contiguous()  # both are read with lse's strides
    dmask = torch.empty(shape, dtype=torch.float32, device=q.device)
    B, H, Sq, Sk, window, flags = _common(q, k, core, v, do)
    tile = tile or _tile("dmask", q, core)
    rows, columns = (size > 1 for size in shape[2:])
    tiles = (triton.cdiv(Sq, tile.BLOCK_M) if rows else 1) * (triton.cdiv(Sk, tile.BLOCK_N) if columns else 1)
    if dmask.numel():
        launch(
            _attn_dmask_kernel,
            (shape[0] * shape[1] * tiles,),
            _heads(q, False),
            _heads(k, False),
            _heads(v, False),
            _mask(core.mask),
            _slopes(core.slopes),
            core.dropout[0],
            _heads(do, False),
            lse,
            delta,
            dmask,
            Sq,
            Sk,
            H,
            tiles,
            _scale(core),
            core.dropout[1],
            core.dropout[2],
            core.plane_base,
            core.planes or H,
            *window[:2],
            lse.stride(0),
            lse.stride(1),
            B // shape[0],
            H // shape[1],
            **flags,
            ROWS=rows,
            COLUMNS=columns,
            **tile.launch_options(),
        )
    return dmask
