"""Where the elements of matrices are: in the registers of a warp (mma, ldmatrix) and in shared memory (wgmma).

Layouts are those of "PTX ISA" 8.7, sections 9.7.14 (mma) and 9.7.15 (wgmma). Matmuls are exact sums in float64, rounded once
to float32; a tensor core rounds otherwise.
"""

from __future__ import annotations

import functools

import numpy as np

from .numerics import as_tf32, from_bf16

BYTES = {"f16": 2, "bf16": 2, "tf32": 4}
SWIZZLE_BITS = {0: 0, 1: 3, 2: 2, 3: 1}  # of a wgmma descriptor: none, 128, 64, 32 bytes


def numbers(raw: np.ndarray, type: str) -> np.ndarray:
    """Elements as float64."""
    if type == "tf32":
        return as_tf32(raw).astype(np.float64)
    return (from_bf16(raw) if type == "bf16" else raw.view(np.float16)).astype(np.float64)


def swizzled(address: np.ndarray, bits: int) -> np.ndarray:
    """16-byte pieces of a row, exchanged by the row's number: address bits 4.. by bits 7..."""
    return address ^ ((address >> 7) & ((1 << bits) - 1)) << 4


def operand(words: np.ndarray, side: str, type: str) -> np.ndarray:
    """[warps, 16, K] of the registers of a, or [warps, K, 8] of those of b; words [registers, threads]."""
    words = words.reshape(len(words), -1, 8, 4)  # register, warp, group of four lanes, lane of it
    raw = words[..., None] if type == "tf32" else words.view(np.uint16).reshape(*words.shape, 2)
    elements = numbers(raw, type)
    warps, pairs = words.shape[1], elements.shape[-1]
    if side == "a":  # registers: [column half, row half]
        elements = elements.reshape(-1, 2, warps, 8, 4, pairs).transpose(2, 1, 3, 0, 4, 5)
        return np.ascontiguousarray(elements).reshape(warps, 16, -1)
    return np.ascontiguousarray(elements.transpose(1, 0, 3, 4, 2)).reshape(warps, -1, 8)


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """mma's [4, threads]: the registers of a [warps, 16, K] @ b [warps, K, 8] + c [4, threads]."""
    warps = len(a)
    matmul = (a @ b).reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)  # row half, column, warp, row, lane
    return (matmul + c.reshape(2, 2, warps, 8, 4)).astype(np.float32).reshape(4, -1)


def group_gemm(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """wgmma's [columns / 2, threads]: the registers of a [groups, 64, K] @ b [groups, K, columns]."""
    groups, columns = len(a), b.shape[2]
    matmul = (a @ b).reshape(groups, 4, 2, 8, columns // 8, 4, 2)  # group, warp, row half, row, block, lane, column
    return np.ascontiguousarray(matmul.transpose(4, 2, 6, 0, 1, 3, 5)).reshape(columns // 2, -1)


def transposed(words: np.ndarray) -> np.ndarray:
    """8 x 8 matrices of 16-bit elements [..., 8, 4 words] with rows and columns exchanged."""
    elements = np.ascontiguousarray(words).view(np.uint16)
    return np.ascontiguousarray(elements.swapaxes(-1, -2)).view(np.uint32)


@functools.lru_cache(maxsize=512)
def described(descriptor: int, rows: int, depth: int, item: int, transpose: bool) -> np.ndarray:
    """[rows, depth] addresses in shared memory of the operand that a wgmma descriptor names."""
    if descriptor >> 49 & 7:
        raise NotImplementedError("a wgmma descriptor with a base offset")
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    bits = SWIZZLE_BITS[descriptor >> 62]
    width = 16 << bits  # bytes of a row of an atom
    r, k = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
    if transpose:  # rows are contiguous, in atoms of `width` bytes by 8
        per = width // item
        far, near = (leading, stride) if bits else (stride, leading)
        address = r % per * item + r // per * far + k % 8 * width + k // 8 * near
    elif bits:
        address = r % 8 * width + r // 8 * stride + k * item
    else:
        per = 16 // item
        address = r % 8 * 16 + r // 8 * stride + k % per * item + k // per * leading
    return swizzled(address + start, bits)
