"""Tiles of an expert's rows: their sizes, the rows of each expert, and the place of its matrices."""

from __future__ import annotations

import functools
import operator

import torch
import triton
import triton.language as tl

from .tile import INTERPRETED_TILE, INTERPRETER, Tile, arch_of, family_of, launch, multiple, program_tile, unit_of

# (kernel, architecture) -> the tile per shape class, as tile.TILES; "few": few rows for each expert.
TILES: dict[tuple[str, int], dict[str, Tile]] = {
    ("experts_fwd", 90): {
        "few": Tile(64, 128, 64, 8, 3, 4),
        "16": Tile(128, 128, 64, 8, 3, 4), "32": Tile(64, 64, 32, 8, 3), "unaligned": Tile(64, 64, 64, 8, 2, 2)
    },
    ("experts_fwd", 80): {
        "few": Tile(64, 128, 32, 8, 3),
        "16": Tile(128, 64, 64, 8, 3, 2), "32": Tile(128, 64, 32, 8, 3), "unaligned": Tile(64, 64, 32, 4, 2, 2)
    },
    ("experts_bwd", 90): {
        "few": Tile(64, 64, 64, 4, 4, 2),
        "16": Tile(128, 128, 64, 8, 3, 8), "32": Tile(64, 64, 32, 8, 3, 4), "unaligned": Tile(64, 64, 64, 8, 2, 2)
    },
    ("experts_bwd", 80): {
        "few": Tile(64, 64, 32, 4, 3),
        "16": Tile(128, 64, 32, 8, 3, 2), "32": Tile(64, 64, 32, 8, 3, 2), "unaligned": Tile(64, 64, 32, 8, 2, 2)
    },
    ("experts_act_grad", 90): {
        "few": Tile(64, 128, 64, 8, 4, 4),
        "16": Tile(128, 128, 64, 8, 4, 4), "32": Tile(64, 64, 32, 8, 3), "unaligned": Tile(64, 64, 64, 8, 2, 2)
    },
    ("experts_act_grad", 80): {
        "few": Tile(64, 64, 32, 4, 4, 2),
        "16": Tile(128, 64, 64, 8, 3, 2), "32": Tile(64, 64, 32, 8, 3), "unaligned": Tile(64, 64, 32, 8, 2, 2)
    },
    ("experts_gemm", 90): {
        "few": Tile(64, 256, 64, 8, 3, 4),
        "16": Tile(128, 256, 64, 8, 3, 4), "32": Tile(128, 64, 32, 8, 3), "unaligned": Tile(64, 64, 64, 8, 2)
    },
    ("experts_gemm", 80): {
        "few": Tile(64, 128, 32, 8, 4),
        "16": Tile(128, 128, 32, 8, 4, 2), "32": Tile(128, 64, 32, 8, 3), "unaligned": Tile(64, 64, 32, 8, 2)
    },
    ("experts_dw", 90): {
        "few": Tile(128, 128, 64, 8, 5, 2),
        "16": Tile(128, 256, 64, 8, 5, 4), "32": Tile(64, 64, 32, 8, 5), "unaligned": Tile(64, 64, 64, 8, 2)
    },
    ("experts_dw", 80): {
        "few": Tile(128, 128, 32, 8, 5, 2),
        "16": Tile(128, 128, 64, 8, 5, 2), "32": Tile(64, 64, 32, 8, 5), "unaligned": Tile(64, 64, 32, 8, 2)
    },
}  # fmt: skip
# An expert's last tile is half empty on average: at 256 rows a quarter of the work with tiles of 128, an eighth with 64
# (predicted).
FEW_ROWS = 256


def tile_of(kernel: str, x: torch.Tensor, rows: int, experts: int, *operands: torch.Tensor) -> Tile:
    """Returns the tile, as `tile.tile_for`, for matrices and stacks of them."""
    arch = arch_of(x)
    if arch == INTERPRETER:
        return INTERPRETED_TILE
    tiles, sizes, addresses = TILES[kernel, family_of(arch)], 0, 0
    for operand in operands:
        sizes |= operand.shape[-1] | functools.reduce(operator.or_, operand.stride()[:-1])
        addresses |= operand.data_ptr()
    if sizes * x.itemsize % 16 or addresses % 16:
        return tiles["unaligned"]
    tile = tiles["32" if x.itemsize == 4 else "few" if rows < FEW_ROWS * experts else "16"]
    return tile if sizes % 16 == 0 else tile._replace(UNIT=unit_of(sizes))


@triton.jit(do_not_specialize=["E", "MAX_TILES"])
def _tiles_kernel(offs_ptr, tiles_ptr, E, MAX_TILES, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """Writes tiles [2, MAX_TILES]: the expert of each tile of rows (-1: there is no such tile), and its first row.

    Program e writes expert e's, behind those of all experts before it; program E the rest.
    """
    expert = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    first = tl.full((), 0, tl.int64)  # an int32 is summed by an instruction that the emulator does not know
    for e in range(0, expert, BLOCK):
        mask = e + offs < expert
        start = tl.load(offs_ptr + e + offs, mask=mask, other=0)
        stop = tl.load(offs_ptr + e + offs + 1, mask=mask, other=0)
        first += tl.sum(((stop - start + BLOCK_M - 1) // BLOCK_M).to(tl.int64))
    row = tl.load(offs_ptr + expert)
    first = first.to(tl.int32)
    count = MAX_TILES - first
    which = -1
    if expert < E:
        count = (tl.load(offs_ptr + expert + 1) - row + BLOCK_M - 1) // BLOCK_M
        which = expert
    for i in range(0, count, BLOCK):
        tile = i + offs
        tl.store(tiles_ptr + first + tile, which + tl.zeros_like(tile), mask=tile < count)
        tl.store(tiles_ptr + MAX_TILES + first + tile, row + tile * BLOCK_M, mask=tile < count)


@triton.jit
def expert_tile(tiles_ptr, offs_ptr, MAX_TILES, R, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the expert or -1, its rows [BLOCK_M] (R in place of those that are not its own), and the tile column."""
    tile, pid_n = program_tile(MAX_TILES * BLOCK_M, N, BLOCK_M, BLOCK_N)
    expert = tl.load(tiles_ptr + tile)
    rows = tl.load(tiles_ptr + MAX_TILES + tile) + tl.arange(0, BLOCK_M)
    return expert, tl.where(rows < tl.load(offs_ptr + expert + 1), rows, R), pid_n


@triton.jit
def of_expert(w_stack, expert, UNIT: tl.constexpr):
    """Returns (ptr, stride of rows) of one expert's matrix; all strides are multiples of UNIT (tile.unit_of)."""
    w_ptr, stride_we, stride_wn = w_stack
    return w_ptr + expert.to(tl.int64) * multiple(stride_we, UNIT), multiple(stride_wn, UNIT)


def stacked(w: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Returns (ptr, stride of matrices, stride of rows)."""
    return w, w.stride(0), w.stride(1)


def dense_groups(groups):
    """Returns groups whose order, inverse and offsets are contiguous: hooks on saved tensors may return others."""
    return tuple(t.contiguous() for t in groups[:3])


def tiles_of(offs: torch.Tensor, rows: int, tile: Tile) -> torch.Tensor:
    E = offs.numel() - 1
    tiles = torch.empty((2, triton.cdiv(rows, tile.BLOCK_M) + min(E, rows)), dtype=torch.int32, device=offs.device)
    launch(
        _tiles_kernel,
        (E + 1,),
        offs,
        tiles,
        E,
        tiles.shape[1],
        BLOCK_M=tile.BLOCK_M,
        BLOCK=256,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return tiles


def grid_of_tiles(tiles: torch.Tensor, N: int, tile: Tile) -> tuple[int]:
    return (tiles.shape[1] * triton.cdiv(N, tile.BLOCK_N),)
