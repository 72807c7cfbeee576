"""ReLU's output h [M, N] as its non-zeros: 1 bit an element, prefix sums of the rows' numbers, and the non-zeros.

    pack_nonzeros    h -> bits uint8 [M, ceil(N/8)], offsets int64 [M + 1], values [room]
    unpack_nonzeros  these, and x, w, b of h = scale relu(x w^T + b) -> h

Row i has values[offsets[i] : offsets[i + 1]]. Nothing is decided on the host: shapes depend on the room alone. Offsets rise, so
the rows that do not fit are the last ones. `unpack_nonzeros` launches the product over all tiles; a tile whose last row fits
leaves at once, after one load. The others multiply, and write those of their rows that the other kernel leaves out.
A product made again has forward's bits (linear.py). Behind a library's product it may have others; so zeros come from the
stored bits there too, and what is set is positive.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .elementwise import act, load_tile, pack_bits, store_tile
from .linear import grid_of, preact_tile
from .tile import (
    INTERPRETER,
    arch_of,
    by_slices,
    cast,
    launch,
    matrix,
    multiple,
    product_tile,
    program_tile,
    rows_of,
    slice_offsets,
    tile_for,
    unit_of,
    widen,
)  # fmt: skip


@triton.jit
def load_bits(bits_rows, offs_m, n0, N, mask_m, BLOCK_N: tl.constexpr):
    """int32 [M, BLOCK_N] of 0 and 1 from column n0 on; 0 outside of mask_m. Columns beyond N have bits 0."""
    offs_byte = n0 // 8 + tl.arange(0, BLOCK_N // 8)
    byte = load_tile(bits_rows, offs_m, offs_byte, mask_m[:, None] & (offs_byte < tl.cdiv(N, 8))[None, :])
    bits = (byte.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return bits.reshape(offs_m.shape[0], BLOCK_N)


@triton.jit(do_not_specialize=["M"])
def _count_kernel(
    h_rows, bits_rows, counts_ptr, M, N, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """bits, and counts[i + 1] = the number of row i's non-zeros."""
    N = multiple(N, UNIT)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    count = tl.zeros((BLOCK_M,), dtype=tl.int32)
    for n0 in range(0, N, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        keep = widen(load_tile(h_rows, offs_m, offs_n, mask_m[:, None] & (offs_n < N)[None, :])) != 0.0
        offs_byte = n0 // 8 + tl.arange(0, BLOCK_N // 8)
        mask_byte = mask_m[:, None] & (offs_byte < tl.cdiv(N, 8))[None, :]
        store_tile(bits_rows, offs_m, offs_byte, mask_byte, pack_bits(keep, BLOCK_M, BLOCK_N))
        count += tl.sum(keep.to(tl.int32), axis=1)
    tl.store(counts_ptr + 1 + offs_m, count, mask=mask_m)


@triton.jit(do_not_specialize=["M", "room"])
def _pack_kernel(
    h_rows, offsets_ptr, values_ptr, room: tl.int64, M, N,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    N = multiple(N, UNIT)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    first = tl.load(offsets_ptr + offs_m, mask=mask_m, other=0)
    for n0 in range(0, N, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        h = load_tile(h_rows, offs_m, offs_n, mask_m[:, None] & (offs_n < N)[None, :])
        keep = (widen(h) != 0.0).to(tl.int32)
        place = first[:, None] + (tl.cumsum(keep, axis=1) - keep)
        tl.store(values_ptr + place, h, mask=(keep != 0) & (place < room))
        first += tl.sum(keep, axis=1)


@triton.jit(do_not_specialize=["M", "room"])
def _unpack_kernel(
    bits_rows, offsets_ptr, values_ptr, h_rows, room: tl.int64, M, N,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes the rows of h that fit."""
    N = multiple(N, UNIT)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    first = tl.load(offsets_ptr + offs_m, mask=mask_m, other=0)
    fits = mask_m & (tl.load(offsets_ptr + 1 + offs_m, mask=mask_m, other=0) <= room)
    for n0 in range(0, N, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        keep = load_bits(bits_rows, offs_m, n0, N, fits, BLOCK_N)
        place = first[:, None] + (tl.cumsum(keep, axis=1) - keep)
        h = tl.load(values_ptr + place, mask=keep != 0, other=0.0)
        store_tile(h_rows, offs_m, offs_n, fits[:, None] & (offs_n < N)[None, :], h)
        first += tl.sum(keep, axis=1)


@triton.jit
def _remake_store(acc, n0, b_ptr, h_rows, bits_rows, offsets_ptr, room, scale, pid_m, M, N):
    offs_m, offs_n, mask = slice_offsets(acc, pid_m, n0, M, N)
    z = preact_tile(acc, b_ptr, offs_n, N, h_rows[0].dtype.element_ty)
    h = cast(widen(cast(act(z, "relu"), z.dtype)) * scale, z.dtype)
    WORD: tl.constexpr = tl.uint32 if z.dtype.primitive_bitwidth == 32 else tl.uint16
    # The smallest number that no mode flushes to 0.
    tiny = tl.full(h.shape, 1 << z.dtype.fp_mantissa_width, dtype=WORD).to(z.dtype, bitcast=True)
    again = tl.load(offsets_ptr + 1 + offs_m, mask=offs_m < M, other=0) > room
    keep = load_bits(bits_rows, offs_m, n0, N, again, acc.shape[1]) != 0
    h = tl.where(keep, tl.where(widen(h) <= 0.0, tiny, h), cast(tl.zeros_like(acc), z.dtype))
    store_tile(h_rows, offs_m, offs_n, mask & again[:, None], h)


@triton.jit(do_not_specialize=["M", "room"])
def _remake_kernel(
    x_rows, w_rows, b_ptr, bits_rows, offsets_ptr, h_rows, room: tl.int64, scale, M, N, K,
    PRECISION: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUB: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Writes the rows of h that do not fit."""
    N, K = multiple(N, UNIT), multiple(K, UNIT)
    pid_m, pid_n = program_tile(M, N, BLOCK_M, BLOCK_N)
    if tl.load(offsets_ptr + tl.minimum((pid_m + 1) * BLOCK_M, M)) <= room:
        return
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = product_tile(x_rows, w_rows, offs_m, offs_n, M, N, K, True, BLOCK_K, EVEN_K, PRECISION)
    by_slices(
        (acc,), pid_n * BLOCK_N, _remake_store, (b_ptr, h_rows, bits_rows, offsets_ptr, room, scale, pid_m, M, N), SUB
    )  # fmt: skip


def _rows_of_blocks(h: torch.Tensor) -> tuple[tuple[int], dict]:
    """(grid, options) of programs that walk along BLOCK_M rows each. A warp has 256 columns of a row, 16 bytes a lane of 16-bit
    types, so that prefix sums stay in it."""
    M, N = h.shape
    sizes = dict(BLOCK_M=8, BLOCK_N=32 if arch_of(h) == INTERPRETER else 256)
    return (triton.cdiv(M, 8),), dict(**sizes, UNIT=unit_of(N), num_warps=4, enable_fp_fusion=False)


def pack_nonzeros(h, room: int):
    """h [M, N] -> (bits uint8 [M, ceil(N/8)], offsets int64 [M + 1], values [room] of h's dtype).

    The non-zeros of row i are values[offsets[i] : offsets[i + 1]]; what is beyond the room is left out, what stays free is 0:
    unpack_nonzeros does not read it, but a store with a scale for a block of saved numbers does.
    -0 counts as 0. Two launches, and torch's sum between them.
    """
    M, N = h.shape
    h = rows_of(h)
    bits = torch.empty((M, triton.cdiv(N, 8)), dtype=torch.uint8, device=h.device)
    counts = torch.zeros(M + 1, dtype=torch.int32, device=h.device)
    values = torch.zeros(room, dtype=h.dtype, device=h.device)
    grid, blocks = _rows_of_blocks(h)
    if M and N:
        launch(_count_kernel, grid, matrix(h), matrix(bits), counts, M, N, **blocks)
    offsets = counts.cumsum(0)
    if M and N and room:
        launch(_pack_kernel, grid, matrix(h), offsets, values, room, M, N, **blocks)
    return bits, offsets, values


def unpack_nonzeros(bits, offsets, values, x, w, b, precision: str, *, scale: float = 1.0, tile=None):
    """h [M, N] = scale relu(x w^T + b), with forward's bits in rows that fit: those with offsets[i + 1] <= len(values).

    bits, offsets: of the M rows, which may be a part of those that were packed. values: of all. x [M, K], w [N, K], b [N] or
    None, of one dtype, scale (dropout's): for the rows that do not fit, at the elements whose bit is set.
    """
    M, N = x.shape[0], w.shape[0]
    bits, offsets, values, x, w, b = (rows_of(t) for t in (bits, offsets, values, x, w, b))
    room = values.numel()
    h = torch.empty((M, N), dtype=x.dtype, device=x.device)
    tile = tile or tile_for("linear", arch_of(x), M, N, x, w, h)
    grid, blocks = _rows_of_blocks(h)
    if M and N:
        launch(
            _remake_kernel, grid_of(M, N, tile), matrix(x), matrix(w), b, matrix(bits), offsets, matrix(h), room, scale,
            M, N, x.shape[1], PRECISION=precision, EVEN_K=x.shape[1] % tile.BLOCK_K == 0, **tile.launch_options(),
        )  # fmt: skip
        launch(_unpack_kernel, grid, matrix(bits), offsets, values, matrix(h), room, M, N, **blocks)
    return h
