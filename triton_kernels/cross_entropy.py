"""Linear + cross-entropy over a vocabulary: statistics of logits that are never written, and their gradient chunk by chunk.

    u = scale (x w^T + b)  [M, V];  z = u, or c tanh(u / c) with softcap c;  float32
    cross_entropy_fwd       lse = log sum_v exp z_v,  z_t of the target t,  wz = sum_v w_v z_v    each [M], of class weights w
                            entropy = -sum_v p_v log p_v,  the largest z_v and its v;  z, if asked for, of which PyTorch
                            ops take the k largest
                            saved, if asked for: 2^15 exp(z - lse of a slice of columns), or u with a softcap, in x's type
    cross_entropy_bwd       dz = (dp p + dp_log_p p log p + dz_t [v = t] + dwz w_v) du/d(x w^T),  p = exp(z - lse); db; for
                             some rows of w
    cross_entropy_saved_bwd  the same from what was saved: no matmul

Forward writes one lse for each token and slice of columns; a second kernel combines the slices in ascending order. The target's
logit belongs to one slice, so there are no atomics. Forward and backward share `logits_tile`, which stays float32. A tile whose
tokens are all ignored runs no matmul.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..results import CrossEntropyForward, TokenStatistics
from .attention_scores import tanh_tile
from .elementwise import block_of, load_tile, store_tile
from .linear import grid_of, partial_rows
from .tile import (
    INTERPRETED_TILE,
    INTERPRETER,
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

HEADROOM = tl.constexpr(2.0**15)  # the largest saved value, so that float16 holds exponentials down to e^-27
NEG_INF = tl.constexpr(float("-inf"))
LAST = tl.constexpr(2.0**24)  # beyond the classes of an arg max
ELSEWHERE = tl.constexpr(-1)  # column of a target in another program's tile
IGNORED = tl.constexpr(-2)


@triton.jit
def logits_tile(acc, b_ptr, offs_v, V, scale):
    """Computes u [M, V] float32 from a matmul's tile."""
    if b_ptr is not None:
        acc += upcast(tl.load(b_ptr + offs_v, mask=offs_v < V, other=0.0))[None, :]
    return acc * scale


@triton.jit
def capped_logits(u, softcap):
    """Returns z and dz/du."""
    if softcap is not None:
        t = tanh_tile(u / softcap)
        return softcap * t, 1.0 - t * t
    else:
        return u, 1.0


@triton.jit
def times_log(p, log_p):
    """Returns p log p, 0 where p is 0."""
    return tl.where(p > 0.0, p * log_p, 0.0)


@triton.jit
def target_columns(targets, offs_m, M, V):
    """Returns the column of each row's target among V, ELSEWHERE or IGNORED. targets = (ptr, first, ignore_index)."""
    target_ptr, first, ignore_index = targets
    target = tl.load(target_ptr + offs_m, mask=offs_m < M, other=ignore_index)
    column = target - first
    column = tl.where((column >= 0) & (column < V), column, ELSEWHERE)
    return tl.where(target == ignore_index, IGNORED, column).to(tl.int32)


@triton.jit
def any_counts(targets, offs_m, M, V):
    """Returns 1 if a row's target counts, else 0. Reduces float32: the emulator does not know integers' redux.sync."""
    return tl.max((target_columns(targets, offs_m, M, V) != IGNORED).to(tl.float32), axis=0).to(tl.int32)


@triton.jit
def _fwd_store(acc, n0, b_ptr, cw_ptr, targets, statistics, saved_rows, logits_rows, scale, softcap, pid_m, M, V):
    parts_ptr, zt_ptr, wz_ptr, entropy_ptr, largest_ptr, class_ptr = statistics
    offs_m, offs_v, mask = slice_offsets(acc, pid_m, n0, M, V)
    column = target_columns(targets, offs_m, M, V)
    u = logits_tile(acc, b_ptr, offs_v, V, scale)
    z, _ = capped_logits(u, softcap)
    if saved_rows[0] is not None and softcap is not None:  # here, so that no register holds u beside z
        store_tile(saved_rows, offs_m, offs_v, mask, cast(u, saved_rows[0].dtype.element_ty))
    inside = (offs_v < V)[None, :]
    z = tl.where(inside, z, NEG_INF)
    top = tl.max(z, axis=1)
    at = (n0 // acc.shape[1]).to(tl.int64) * M + offs_m
    mask_m = (offs_m < M) & (n0 + tl.zeros_like(offs_m) < V)  # a tile's comparison, as in `_experts_combine_kernel`
    if largest_ptr is not None:
        largest = (z == top[:, None]) & inside
        first = tl.min(tl.where(largest, offs_v.to(tl.float32)[None, :], LAST), axis=1)  # float32, as in `any_counts`
        tl.store(largest_ptr + at, top, mask=mask_m)
        tl.store(class_ptr + at, first, mask=mask_m)
    top = tl.where(top == NEG_INF, 0.0, top)
    lse = top + tl.log(tl.sum(tl.exp(z - top[:, None]), axis=1))
    tl.store(parts_ptr + at, lse, mask=mask_m)
    if wz_ptr is not None:
        weighted = tl.where(inside, z, 0.0)
        if cw_ptr is not None:
            weighted *= tl.load(cw_ptr + offs_v, mask=offs_v < V, other=0.0)[None, :]
        tl.store(wz_ptr + at, tl.sum(weighted, axis=1), mask=mask_m)
    z_t = tl.sum(tl.where(column[:, None] == offs_v[None, :], z, 0.0), axis=1)
    tl.store(zt_ptr + offs_m, z_t, mask=(column >= n0) & (column < n0 + acc.shape[1]))  # only one slice has the target
    log_p = z - tl.where(lse == NEG_INF, 0.0, lse)[:, None]
    p = tl.exp(log_p)
    if entropy_ptr is not None:  # formed of lse, after all else: 256 bytes of spills less than beside it
        tl.store(entropy_ptr + at, -tl.sum(times_log(p, log_p), axis=1), mask=mask_m)
    if saved_rows[0] is not None and softcap is None:
        store_tile(saved_rows, offs_m, offs_v, mask, cast(p * HEADROOM, saved_rows[0].dtype.element_ty))
    if logits_rows[0] is not None:
        store_tile(logits_rows, offs_m, offs_v, mask, z)


@triton.jit(do_not_specialize=["M", "first", "ignore_index"])
def _cross_entropy_fwd_kernel(
    x_rows,
    w_rows,
    b_ptr,
    cw_ptr,
    target_ptr,
    statistics,
    saved_rows,
    logits_rows,
    first,
    ignore_index,
    M,
    V,
    K,
    scale,
    softcap,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Writes statistics float32, in `_fwd_store`'s order; all but z_t are [slices, M], a slice being BLOCK_N / SUB columns."""
    pid_m, pid_n = program_tile(M, V, BLOCK_M, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    targets = (target_ptr, first, ignore_index)
    K = multiple(K, UNIT) * any_counts(targets, offs_m, M, V)
    acc = gemm_tile(x_rows, w_rows, offs_m, offs_n, M, V, K, True, BLOCK_K, EVEN_K, PRECISION)
    by_slices(
        (acc,),
        pid_n * BLOCK_N,
        _fwd_store,
        (b_ptr, cw_ptr, targets, statistics, saved_rows, logits_rows, scale, softcap, pid_m, M, V),
        SUB,
    )


@triton.jit(do_not_specialize=["M", "slices"])
def _combine_kernel(
    parts_ptr,
    out_ptr,
    entropy_ptr,
    whole_entropy_ptr,
    M,
    slices,
    LOG: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Computes log sum exp (LOG), or the sum, over the slices of each token, in ascending order. Slices have shares p of all
    probabilities; the entropy is sum p (entropy of a slice - log p), with shares of the largest slice's until all are seen."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    top = tl.full((BLOCK_M,), NEG_INF, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    spread = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, slices, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        mask = (offs_s < slices)[:, None] & (offs_m < M)[None, :]
        ptrs = parts_ptr + offs_s.to(tl.int64)[:, None] * M + offs_m[None, :]
        part = tl.load(ptrs, mask=mask, other=NEG_INF if LOG else 0.0)
        if LOG:
            new = tl.maximum(top, tl.max(part, axis=0))
            shift = tl.where(new == NEG_INF, 0.0, new)
            before, share = tl.exp(top - shift), tl.exp(part - shift[None, :])
            if entropy_ptr is not None:
                entropy = tl.load(
                    entropy_ptr + offs_s.to(tl.int64)[:, None] * M + offs_m[None, :], mask=mask, other=0.0
                )
                below = tl.where(part == NEG_INF, 0.0, shift[None, :] - part)
                rise = tl.where(top == NEG_INF, 0.0, shift - top)
                spread = (spread + total * rise) * before + tl.sum(share * (entropy + below), axis=0)
            total = total * before + tl.sum(share, axis=0)
            top = new
        else:
            total += tl.sum(part, axis=0)
    if entropy_ptr is not None:
        spread = tl.where(total > 0.0, spread / total + tl.log(total), 0.0)
        tl.store(whole_entropy_ptr + offs_m, spread, mask=offs_m < M)
    if LOG:
        total = tl.where(top == NEG_INF, 0.0, top) + tl.log(total)
    tl.store(out_ptr + offs_m, total, mask=offs_m < M)


@triton.jit
def write_gradient(
    p, log_p, slope, column, offs_m, offs_v, mask, cw_ptr, gradients, dz_rows, db_ptr, scale, pid_m, M, V
):
    """Writes dz of probabilities p, and its column sums. gradients: `TokenGradients`."""
    dp_ptr, dzt_ptr, dwz_ptr, dplogp_ptr = gradients
    mask_m = offs_m < M
    dz = p * tl.load(dp_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
    if dplogp_ptr is not None:
        dz += times_log(p, log_p) * tl.load(dplogp_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
    dz_t = tl.load(dzt_ptr + offs_m, mask=mask_m, other=0.0)
    dz += tl.where(column[:, None] == offs_v[None, :], dz_t[:, None], 0.0)
    if dwz_ptr is not None:
        even = tl.load(dwz_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        if cw_ptr is not None:
            even *= tl.load(cw_ptr + offs_v, mask=offs_v < V, other=0.0)[None, :]
        dz += even
    dz = tl.where((column != IGNORED)[:, None] & mask, dz * slope * scale, 0.0)  # even if an ignored token's x is NaN
    store_tile(dz_rows, offs_m, offs_v, mask, cast(dz, dz_rows[0].dtype.element_ty))
    if db_ptr is not None:
        tl.store(db_ptr + pid_m.to(tl.int64) * V + offs_v, tl.sum(dz, axis=0), mask=offs_v < V)


@triton.jit
def _bwd_store(acc, n0, b_ptr, cw_ptr, targets, lse_ptr, gradients, dz_rows, db_ptr, scale, softcap, pid_m, M, V):
    offs_m, offs_v, mask = slice_offsets(acc, pid_m, n0, M, V)
    z, slope = capped_logits(logits_tile(acc, b_ptr, offs_v, V, scale), softcap)
    log_p = z - tl.load(lse_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
    column = target_columns(targets, offs_m, M, V)
    write_gradient(
        tl.exp(log_p),
        log_p,
        slope,
        column,
        offs_m,
        offs_v,
        mask,
        cw_ptr,
        gradients,
        dz_rows,
        db_ptr,
        scale,
        pid_m,
        M,
        V,
    )


@triton.jit(do_not_specialize=["M", "first", "ignore_index"])
def _cross_entropy_bwd_kernel(
    x_rows,
    w_rows,
    b_ptr,
    cw_ptr,
    target_ptr,
    lse_ptr,
    gradients,
    dz_rows,
    db_ptr,
    first,
    ignore_index,
    M,
    V,
    K,
    scale,
    softcap,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    UNIT: tl.constexpr,
):
    pid_m, pid_n = program_tile(M, V, BLOCK_M, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    targets = (target_ptr, first, ignore_index)
    K = multiple(K, UNIT) * any_counts(targets, offs_m, M, V)
    acc = gemm_tile(x_rows, w_rows, offs_m, offs_n, M, V, K, True, BLOCK_K, EVEN_K, PRECISION)
    by_slices(
        (acc,),
        pid_n * BLOCK_N,
        _bwd_store,
        (b_ptr, cw_ptr, targets, lse_ptr, gradients, dz_rows, db_ptr, scale, softcap, pid_m, M, V),
        SUB,
    )


@triton.jit(do_not_specialize=["M", "first", "ignore_index", "first_slice"])
def _cross_entropy_saved_bwd_kernel(
    saved_rows,
    parts_ptr,
    zt_ptr,
    cw_ptr,
    target_ptr,
    lse_ptr,
    gradients,
    dz_rows,
    db_ptr,
    first,
    ignore_index,
    first_slice,
    M,
    V,
    scale,
    softcap,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes dz from saved logits. BLOCK_N is forward's slice of columns, whose lse is in parts_ptr [slices, M]. The target's
    p is exact: it comes from z_t."""
    pid_m, pid_n = block_of(V, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_v = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = offs_m < M
    mask = mask_m[:, None] & (offs_v < V)[None, :]
    column = target_columns((target_ptr, first, ignore_index), offs_m, M, V)
    lse = tl.load(lse_ptr + offs_m, mask=mask_m, other=0.0)
    u = upcast(load_tile(saved_rows, offs_m, offs_v, mask))
    z, slope = capped_logits(u, softcap)
    if softcap is None:
        part = tl.load(parts_ptr + (first_slice + pid_n).to(tl.int64) * M + offs_m, mask=mask_m, other=0.0)
        p = u * (tl.exp(part - lse) / HEADROOM)[:, None]
        log_p = tl.log(p)
    else:
        log_p = z - lse[:, None]
        p = tl.exp(log_p)
    log_t = tl.load(zt_ptr + offs_m, mask=mask_m, other=0.0) - lse
    is_target = column[:, None] == offs_v[None, :]
    log_p = tl.where(is_target, log_t[:, None], log_p)
    p = tl.where(is_target, tl.exp(log_t)[:, None], p)
    write_gradient(
        p, log_p, slope, column, offs_m, offs_v, mask, cw_ptr, gradients, dz_rows, db_ptr, scale, pid_m, M, V
    )


def slice_columns(x: torch.Tensor) -> int:
    """Returns the columns of a slice: BLOCK_N / SUB of every tile of cross_entropy_fwd."""
    return INTERPRETED_TILE.BLOCK_N if arch_of(x) == INTERPRETER else 64


def slice_count(x: torch.Tensor, entries: int) -> int:
    """Returns the number of rows of the parts that `cross_entropy_fwd` saves."""
    return -(-entries // slice_columns(x))


def combine(
    parts: torch.Tensor, log: bool, entropy: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Combines [slices, M] to [M], and the slices' entropies to the whole entropy."""
    slices, M = parts.shape
    out = torch.empty(M, dtype=parts.dtype, device=parts.device)
    whole = None if entropy is None else torch.empty_like(out)
    if M:
        launch(
            _combine_kernel,
            (triton.cdiv(M, 32),),
            parts,
            out,
            entropy,
            whole,
            M,
            slices,
            LOG=log,
            BLOCK_M=32,
            BLOCK_S=32,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out, whole


def of_largest(largest: torch.Tensor, classes: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the largest logits [M] and their classes [M], from those of slices [slices, M], where w's first row is class
    `first`."""
    if not len(largest):
        return largest.new_full(largest.shape[1:], float("-inf")), largest.new_full(largest.shape[1:], first)
    largest, index = largest.max(0)
    return largest, classes.gather(0, index[None])[0] + first


def cross_entropy_fwd(
    x,
    w,
    b,
    target,
    class_weight,
    head,
    *,
    weighted=False,
    keep=False,
    entropy=False,
    arg_max=False,
    logits=False,
    tile=None,
):
    """Computes a CrossEntropyForward.

    x [M, K], w [V, K], b [V] or None, all of one dtype; target int64 [M]; class_weight float32 [V] or None; head:
    `ckptkern.eager.Head`. z_t is 0 where the target is not among w's rows. The statistics of ignored tokens are undefined.
    """
    M, K = x.shape
    V = w.shape[0]
    x, w, b, class_weight, target = (rows_of(tensor) for tensor in (x, w, b, class_weight, target))
    tile = tile or tile_for("cross_entropy_fwd", arch_of(x), M, V, x, w)
    options = dict(dtype=torch.float32, device=x.device)
    slices = triton.cdiv(V, tile.BLOCK_N // tile.SUB)
    parts = torch.empty((slices, M), **options)
    wz, entropies, largest, classes = (
        torch.empty((slices, M), **options) if wanted else None for wanted in (weighted, entropy, arg_max, arg_max)
    )
    z_t = torch.zeros(M, **options)
    saved = torch.empty((M, V), dtype=x.dtype, device=x.device) if keep else None
    z = torch.empty((M, -(-V // 256) * 256), **options)[:, :V] if logits else None
    if M and V:
        launch(
            _cross_entropy_fwd_kernel,
            grid_of(M, V, tile),
            matrix(x),
            matrix(w),
            b,
            class_weight,
            target,
            (parts, z_t, wz, entropies, largest, classes),
            matrix(saved),
            matrix(z),
            head.first,
            head.ignore_index,
            M,
            V,
            K,
            head.scale,
            head.softcap or None,
            PRECISION=head.precision,
            **tile.launch_options(K=K),
        )
    lse, whole_entropy = combine(parts, True, entropies)
    wz, _ = combine(wz, False) if weighted else (None, None)
    largest, classes = of_largest(largest, classes, head.first) if arg_max else (None, None)
    statistics = TokenStatistics(lse, z_t, wz, entropy=whole_entropy, largest=largest, arg_max=classes)
    return CrossEntropyForward(statistics, saved, parts if keep and not head.softcap else None, z)


def cross_entropy_bwd(x, w, b, target, class_weight, lse, gradients, head, out, *, db=False, tile=None):
    """Writes dz to out [M, V] for the rows w [V, K] of a chunk; returns the sum of its rows, float32 [V], if `db`.

    The other arguments are those of `cross_entropy_fwd`, for the same rows; gradients: `TokenGradients`.
    """
    M, K = x.shape
    V = w.shape[0]
    x, w, b, class_weight, target, lse = (rows_of(tensor) for tensor in (x, w, b, class_weight, target, lse))
    tile = tile or tile_for("cross_entropy_bwd", arch_of(x), M, V, x, w)
    partial = partial_rows(M, V, tile, x) if db else None
    if M and V:
        launch(
            _cross_entropy_bwd_kernel,
            grid_of(M, V, tile),
            matrix(x),
            matrix(w),
            b,
            class_weight,
            target,
            lse,
            tuple(gradients),
            matrix(out),
            partial,
            head.first,
            head.ignore_index,
            M,
            V,
            K,
            head.scale,
            head.softcap or None,
            PRECISION=head.precision,
            **tile.launch_options(K=K),
        )
    return partial.sum(0) if db else None


def cross_entropy_saved_bwd(saved, parts, z_t, start, target, class_weight, lse, gradients, head, out, *, db=False):
    """Computes `cross_entropy_bwd` from forward's z_t and what it saved: saved [M, V] of a chunk that begins at its column
    `start`."""
    M, V = saved.shape
    saved, z_t, class_weight, target, lse = (rows_of(tensor) for tensor in (saved, z_t, class_weight, target, lse))
    parts = None if parts is None else parts.contiguous()
    width = slice_columns(saved)
    blocks = dict(BLOCK_M=32, BLOCK_N=width)
    partial = torch.empty((triton.cdiv(M, 32), V), dtype=torch.float32, device=saved.device) if db else None
    if M and V:
        launch(
            _cross_entropy_saved_bwd_kernel,
            (triton.cdiv(M, 32) * triton.cdiv(V, width),),
            matrix(saved),
            parts,
            z_t,
            class_weight,
            target,
            lse,
            tuple(gradients),
            matrix(out),
            partial,
            head.first,
            head.ignore_index,
            start // width,
            M,
            V,
            head.scale,
            head.softcap or None,
            **blocks,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return partial.sum(0) if db else None
