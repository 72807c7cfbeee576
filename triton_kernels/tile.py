"""Tile choice, the tile of a matmul, and `dot` and `cast`, which are also right in the interpreter: shared by all kernels.

A matmul tile accumulates in float32 over ascending K in steps of BLOCK_K, without split-K, so that an element's bits do not
depend on BLOCK_M, BLOCK_N or the number of warps: forward and recompute may use different tiles.

Kernels take a matrix as `x_rows` = (ptr, stride of rows), whose ptr is None where there is none. The tuples are not named
tuples, which make a launch slower on the host. Arguments that must not be specialised stay outside of them, because Triton
specialises their members whatever `do_not_specialize` says. So does a local that may be None: no tuple literal can hold it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import fences

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))


class Tile(NamedTuple):
    """A launch configuration. SUB splits the epilogue into SUB column slices, which frees accumulator registers.

    maxnreg: the most registers a thread may take. At 128 two programs of eight warps share an SM, if their shared
    memory does too (2 x 113 KiB on sm_90), and the epilogue of one runs under the matmuls of the other.
    UNIT: what the compiler is told of the launch's sizes (`unit_of`).
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    SUB: int = 1
    maxnreg: int | None = None
    UNIT: int = 1

    def launch_options(self, **inner: int) -> dict:
        """Returns a launch's options. inner: lengths of the sums in matmuls; EVEN_ and the name says of each whether BLOCK_K
        divides it."""
        # a multiply-add that only one caller fuses would differ in the last bit
        options = {**self._asdict(), "enable_fp_fusion": False}
        options |= {f"EVEN_{name}": size % self.BLOCK_K == 0 for name, size in inner.items()}
        return {name: value for name, value in options.items() if value is not None}


INTERPRETER = 0  # the "architecture" of TRITON_INTERPRET=1: small tiles, so that small tests have tail tiles

# (kernel, architecture) -> the tile per shape class: 16-bit rows, few of them or few columns ("few"), float32 rows, and rows
# whose length is not a multiple of 16 bytes (no asynchronous copy there, so operands pass through registers and the tile must
# be smaller). Every entry passes the code-generation check: python -m tests.codegen
TILES: dict[tuple[str, int], dict[str, Tile]] = {
    ("linear", 90): {
        "few": Tile(64, 64, 64, 4, 4),
        "16": Tile(128, 256, 64, 8, 3, 4), "32": Tile(128, 128, 32, 8, 3, 2), "unaligned": Tile(64, 64, 64, 8, 2)
    },
    ("linear", 80): {
        "few": Tile(64, 64, 32, 4, 4),
        "16": Tile(128, 128, 32, 8, 4, 2), "32": Tile(128, 64, 32, 8, 3), "unaligned": Tile(64, 64, 32, 8, 2)
    },
    ("act_grad", 90): {
        "few": Tile(64, 64, 64, 4, 4, 2),
        "16": Tile(128, 128, 64, 8, 3, 4, 128), "32": Tile(128, 64, 32, 8, 3), "unaligned": Tile(64, 64, 64, 8, 2, 2)
    },
    ("act_grad", 80): {
        "few": Tile(64, 64, 32, 4, 4, 2),
        "16": Tile(128, 128, 64, 8, 3, 4), "32": Tile(128, 64, 32, 8, 3), "unaligned": Tile(64, 64, 32, 8, 2, 2)
    },
    ("dual", 90): {
        "few": Tile(64, 64, 64, 4, 4),
        "16": Tile(128, 128, 64, 8, 3, 4), "32": Tile(64, 64, 32, 8, 3), "unaligned": Tile(64, 64, 64, 8, 2)
    },
    ("dual", 80): {
        "few": Tile(64, 64, 32, 4, 4),
        "16": Tile(128, 64, 32, 8, 4), "32": Tile(64, 64, 32, 8, 3), "unaligned": Tile(64, 64, 32, 8, 2)
    },
    ("triple", 90): {
        "few": Tile(64, 64, 64, 4, 3),
        "16": Tile(128, 64, 64, 8, 3, 2), "32": Tile(64, 64, 32, 8, 3), "unaligned": Tile(64, 64, 64, 8, 2, 2)
    },
    ("triple", 80): {
        "few": Tile(64, 64, 32, 4, 3),
        "16": Tile(128, 64, 32, 8, 3, 2), "32": Tile(64, 64, 32, 8, 3), "unaligned": Tile(64, 64, 32, 8, 2)
    },
    ("gated_act_grad", 90): {
        "few": Tile(64, 64, 64, 4, 4, 2),
        "16": Tile(128, 128, 64, 8, 3, 4, 128), "32": Tile(64, 64, 32, 8, 3), "unaligned": Tile(64, 64, 64, 8, 2, 2)
    },
    ("gated_act_grad", 80): {
        "few": Tile(64, 64, 32, 4, 4),
        "16": Tile(128, 64, 64, 8, 3, 2), "32": Tile(64, 64, 32, 8, 3), "unaligned": Tile(64, 64, 32, 8, 2, 2)
    },
    ("cross_entropy_fwd", 90): {
        "few": Tile(64, 64, 64, 4, 4),
        "16": Tile(128, 256, 64, 8, 3, 4), "32": Tile(128, 64, 32, 8, 3), "unaligned": Tile(64, 64, 64, 8, 2)
    },
    ("cross_entropy_fwd", 80): {
        "few": Tile(64, 64, 32, 4, 4),
        "16": Tile(128, 128, 64, 8, 3, 2), "32": Tile(128, 64, 32, 8, 3), "unaligned": Tile(64, 64, 32, 8, 2)
    },
    ("cross_entropy_bwd", 90): {
        "few": Tile(64, 64, 64, 4, 4),
        "16": Tile(128, 256, 64, 8, 3, 8), "32": Tile(128, 64, 32, 8, 3), "unaligned": Tile(64, 64, 64, 8, 2)
    },
    ("cross_entropy_bwd", 80): {
        "few": Tile(64, 64, 32, 4, 4),
        "16": Tile(128, 128, 64, 8, 3, 2), "32": Tile(128, 64, 32, 8, 3), "unaligned": Tile(64, 64, 32, 8, 2)
    },
}  # fmt: skip
SMS = {90: 132, 80: 108, INTERPRETER: 3}  # H100 and H200, A100, and a number for tests
# One tile for all interpreted kernels: numpy's matmul does not promise equal bits between different block shapes.
INTERPRETED_TILE = Tile(32, 32, 32, 4, 1)


def family_of(arch: int) -> int:
    """Returns the family of tiles for an architecture: 90, 80 for all other GPUs, or INTERPRETER."""
    if arch == INTERPRETER:
        return INTERPRETER
    return 90 if 90 <= arch < 100 else 80


def unit_of(*sizes: int) -> int:
    """Returns 8 or 4, if that is the largest power of two that divides all sizes, else 1; kernels tell the compiler of it.

    The compiler itself sees only multiples of 16, and does not load 16 bytes at once of rows that may end elsewhere
    (`multiple`).
    """
    together = 0
    for size in sizes:
        together |= size
    return together & -together if together % 16 in (4, 8, 12) else 1


def tile_for(kernel: str, arch: int, M: int, N: int, *operands: torch.Tensor) -> Tile:
    """Returns the tile of `kernel` on `arch` (80, 90, or INTERPRETER) for results [M, N]: a pure function of these sizes and of
    the operands' dtype, shapes and alignment.

    operands: all matrices that the kernel reads or writes row by row. An address, a row length or a stride that is not a
    multiple of 16 bytes makes the launch unaligned: no asynchronous copy fits its rows. "few" is for results whose tiles would
    leave half of the SMs idle, or fill half of their columns.
    """
    family, itemsize = family_of(arch), operands[0].dtype.itemsize
    sizes = addresses = 0  # a power of two that divides them all divides this
    for x in operands:
        sizes |= x.stride(0) | x.shape[1]
        addresses |= x.data_ptr()
    if arch == INTERPRETER:
        tile = INTERPRETED_TILE
    elif sizes * itemsize % 16 or addresses % 16:
        return TILES[kernel, family]["unaligned"]
    elif itemsize == 4:
        tile = TILES[kernel, family]["32"]
    else:
        tiles = TILES[kernel, family]
        tile = tiles["16"]
        count = -(-M // tile.BLOCK_M) * -(-N // tile.BLOCK_N)
        if 2 * count <= SMS[family] or 2 * N <= tile.BLOCK_N:
            tile = tiles["few"]
    return tile if sizes % 16 == 0 else tile._replace(UNIT=unit_of(sizes))


@functools.cache
def device_arch(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def arch_of(x: torch.Tensor) -> int:
    """Returns the architecture that runs tensor `x`: its CUDA device's capability, or INTERPRETER for a CPU tensor."""
    return device_arch(x.device.index) if x.is_cuda else INTERPRETER


def rows_of(x: torch.Tensor | None) -> torch.Tensor | None:
    """Returns `x` itself when its rows are contiguous, else a contiguous copy; None stays None. Kernels need an inner stride of
    1."""
    return x if x is None or x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()


def matrix(x: torch.Tensor | None) -> tuple:
    """Returns (ptr, stride of rows), as kernels take a matrix of inner stride 1; the ptr of None is None.

    Rows that are a multiple of 16 bytes apart, but not of 16 elements, give (ptr, stride, 1): `stride_of` tells the compiler.
    """
    if x is None:
        return None, 0
    stride = x.stride(0)
    return (x, stride) if stride % 16 == 0 or stride * x.itemsize % 16 else (x, stride, 1)


def launch(kernel, grid, *args, **kwargs) -> None:
    """Launches on the device of the first argument: a tensor, or a tuple that begins with one.

    Triton itself launches on the current device (triton#2441). `run` is what kernel[grid] calls with all arguments packed and
    unpacked once more, a fifteenth of the host's time.
    """
    if fences.MISSING:
        fences.fence_launches_of(kernel)
    device = (args[0][0] if isinstance(args[0], tuple) else args[0]).device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel.run(*args, grid=grid, warmup=False, **kwargs)
    else:
        kernel.run(*args, grid=grid, warmup=False, **kwargs)


@triton.jit
def upcast(x):
    """Returns x as float32. The interpreter's own bf16 conversion is wrong for subnormals, so there it shifts the bits."""
    if INTERPRET and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Rounds float32 to a storage type, to nearest even. The interpreter's fp32 -> bf16 truncates, so there it rounds bits."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Returns acc + a @ b in float32. The interpreter multiplies raw bf16 bit patterns, so there both operands are upcast."""
    if INTERPRET:
        a = upcast(a)
        b = upcast(b)
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def multiple(n, UNIT: tl.constexpr):
    """Returns n and tells the compiler that it is a multiple of UNIT."""
    if UNIT == 1:
        return n
    else:
        return n // UNIT * UNIT


@triton.jit
def rows_inside(start, stop, BLOCK: tl.constexpr):
    """Returns a mask [BLOCK], start + i < stop, for loads of one number a row in a loop over matmuls.

    Its scan keeps such a load in a layout of one row a thread. Without it Triton 3.6 moves the load into the layout of its
    user, in which a row is in many threads and 16 rows may be in one: 16 asynchronous copies of 4 bytes instead of one.
    """
    return tl.cumsum(tl.full((BLOCK,), 1, tl.int32), axis=0) <= stop - start


@triton.jit
def stride_of(rows):
    """Returns the stride of a `matrix`'s rows."""
    if len(rows) == 3:
        return multiple(rows[1], 128 // rows[0].dtype.element_ty.primitive_bitwidth)
    else:
        return rows[1]


@triton.jit
def gemm_tile(
    a_rows,
    b_rows,
    offs_m,
    offs_n,
    M,
    N,
    K,
    TRANSPOSED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes sum_k a[m, k] b[k, n], or b[n, k] if TRANSPOSED, for rows offs_m and columns offs_n, float32."""
    stride_bk = stride_of(b_rows)
    stride_bn = 1
    if TRANSPOSED:
        stride_bn = stride_bk
        stride_bk = 1
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < M
    mask_n = offs_n < N
    a_ptrs = a_rows[0] + offs_m.to(tl.int64)[:, None] * stride_of(a_rows) + offs_k[None, :]
    b_ptrs = b_rows[0] + offs_k.to(tl.int64)[:, None] * stride_bk + offs_n.to(tl.int64)[None, :] * stride_bn
    step_b = tl.full((), BLOCK_K, dtype=tl.int64) * stride_bk
    acc = tl.zeros((offs_m.shape[0], offs_n.shape[0]), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=mask_m[:, None], other=0.0)
            b = tl.load(b_ptrs, mask=mask_n[None, :], other=0.0)
        else:
            mask_k = offs_k < K - k
            a = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        acc = dot(a, b, acc, PRECISION)
        a_ptrs += BLOCK_K
        b_ptrs += step_b
    return acc


@triton.jit
def program_tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns this program's tile row and tile column, in groups of 8 tile rows so that neighbours share operands in L2."""
    GROUP_M: tl.constexpr = 8
    tile = tl.program_id(0)
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    first = tile // (GROUP_M * num_n) * GROUP_M
    size = tl.minimum(num_m - first, GROUP_M)
    in_group = tile % (GROUP_M * num_n)
    return first + in_group % size, in_group // size


@triton.jit
def halves(acc):
    """Splits [M, N] into its left and right [M, N/2]."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    return acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()


@triton.jit
def by_slices(accs, n0, EPILOGUE: tl.constexpr, args, SUB: tl.constexpr):
    """Runs EPILOGUE(*accs, n0, *args) on SUB column slices, one after the other: the epilogue of a whole tile would spill."""
    if SUB > 1:
        first = halves(accs[0])
        if len(accs) == 1:
            left = (first[0],)
            right = (first[1],)
        elif len(accs) == 2:
            second = halves(accs[1])
            left = (first[0], second[0])
            right = (first[1], second[1])
        else:
            second = halves(accs[1])
            third = halves(accs[2])
            left = (first[0], second[0], third[0])
            right = (first[1], second[1], third[1])
        by_slices(left, n0, EPILOGUE, args, SUB // 2)
        by_slices(right, n0 + accs[0].shape[1] // 2, EPILOGUE, args, SUB // 2)
    else:
        EPILOGUE(*accs, n0, *args)


@triton.jit
def slice_offsets(acc, pid_m, n0, M, N):
    """Returns row and column offsets of an epilogue's slice, and its mask."""
    offs_m = pid_m * acc.shape[0] + tl.arange(0, acc.shape[0])
    offs_n = n0 + tl.arange(0, acc.shape[1])
    return offs_m, offs_n, (offs_m < M)[:, None] & (offs_n < N)[None, :]


@functools.cache
def device_shared_memory(index: int) -> int:
    return torch.cuda.get_device_properties(index).shared_memory_per_block_optin


def shared_memory_of(x: torch.Tensor) -> int:
    """Returns the bytes of shared memory that a block may use on the device of `x`; on a CPU there is no known bound."""
    return device_shared_memory(x.device.index) if x.is_cuda else 2**31
