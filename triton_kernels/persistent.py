"""Matmuls whose programs stay: each takes one tile after another and loads its operands by TMA (sm_90, 16-bit rows).

An operand is a descriptor of its matrix, made on the host for each launch; it reaches the kernel by value, so a CUDA graph
keeps it. TMA fills with zeros what lies outside of the matrix, as the masks of `tile.gemm_tile` do, and sums are in the same
order: the same bits. Results are written through pointers by the epilogues of the other kernels.

A kernel's loop over tiles has disable_licm, because an epilogue's addresses, hoisted out of it, would hold registers during the
matmuls (64 bytes of spills in `gated_act_grad`). flatten=True, which would load the next tile during the epilogue, doubles the
code and compiles up to a minute. So tiles are as in the other kernels: two programs share an SM where they fit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .tile import Tile, dot, launch, matrix, sms_of


@triton.jit
def tma_gemm_tile(
    a_desc, b_desc, m0, n0, K,
    TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`gemm_tile` of descriptors, from row m0 and column n0."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = a_desc.load([m0, k])
        if TRANSPOSED:
            b = b_desc.load([n0, k]).T
        else:
            b = b_desc.load([k, n0])
        acc = dot(a, b, acc, PRECISION)
    return acc


def launch_gemm(
    kernels, tile: Tile, a: torch.Tensor, b: torch.Tensor, *rest, activation: str, precision: str, transposed: bool
) -> None:
    """Launches one of two kernels of the matmul a b (a b^T if transposed), whose epilogue takes `rest`, M, N and K.

    kernels: one with a program for each tile, and the persistent one, which a tile with `programs` asks for.
    """
    M, K = a.shape
    N = b.shape[0 if transposed else 1]
    tiles = triton.cdiv(M, tile.BLOCK_M) * triton.cdiv(N, tile.BLOCK_N)
    options = dict(ACT=activation, PRECISION=precision, **tile.launch_options())
    plain, persistent = kernels
    if not tile.programs:
        even = K % tile.BLOCK_K == 0
        launch(plain, (tiles,), matrix(a), matrix(b), *rest, M, N, K, EVEN_K=even, **options)
        return
    box = [tile.BLOCK_N, tile.BLOCK_K] if transposed else [tile.BLOCK_K, tile.BLOCK_N]
    launch(
        persistent, (min(tiles, tile.programs * sms_of(a)),),
        TensorDescriptor.from_tensor(a, [tile.BLOCK_M, tile.BLOCK_K]), TensorDescriptor.from_tensor(b, box), *rest, M, N, K,
        **options,
    )  # fmt: skip
