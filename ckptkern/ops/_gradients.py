"""How gradients are summed: chunks of tokens that fit the workspace, and the sums of weights and biases over them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ._rows import cast_parameter

CHUNK_ROWS = 128  # chunks start at multiples of every kernel's BLOCK_M, so that a row keeps its place in the tile


def token_chunks(rows: int, bytes_per_row: int, workspace: int) -> list[tuple[int, int]]:
    """[start, stop) row ranges whose transient tensors fit `workspace`; at least CHUNK_ROWS rows each, and as equal as
    multiples of CHUNK_ROWS can be.

    Callers handle a range in a function of its own, so that its tensors are freed before the next range's are made.
    """
    if rows * bytes_per_row <= workspace:
        return [(0, rows)]
    units = -(-rows // CHUNK_ROWS)
    count = -(-units // max(workspace // bytes_per_row // CHUNK_ROWS, 1))
    bounds = [i * units // count * CHUNK_ROWS for i in range(count)]
    return list(itertools.pairwise([*bounds, rows]))


def row_bytes(like: Tensor, tensors: int, masks: int, summed: int, beside: int) -> int:
    """Bytes of a row's transient tensors in a backward pass, in the dtype of `like`.

    tensors, masks: elements of that dtype, and bools, that are alive at the worst moment. summed: elements of the two operands
    of the largest weight gradient; beside: elements that are alive while it is formed. A CPU has no float32 product of 16-bit
    operands: it copies both to float32, and an eighth of the rows for the sums of columns. torch's float16 product was
    measured to take up to one more copy there.
    """
    size = like.element_size()
    bytes_ = tensors * size + masks
    if size >= 4 or like.is_cuda:
        return bytes_
    copies = summed * (8 if like.dtype == torch.float16 else 4)
    return max(bytes_ + summed // 2, beside * size + copies)


class WeightGrad:
    """Sum over chunks of a^T b, accumulated in float32 (float64 for float64) and rounded once to the weight's dtype."""

    def __init__(self, dtype: torch.dtype, chunks: int):
        self.dtype, self.chunks, self.total = dtype, chunks, None

    def add(self, a: Tensor, b: Tensor) -> None:
        """a [m, N], b [m, K] -> total [N, K]."""
        a = a.t()
        if a.is_cuda and a.dtype.itemsize < 4 and (self.chunks > 1 or a.dtype != self.dtype):
            if self.total is None:
                self.total = torch.mm(a, b, out_dtype=torch.float32)
            else:
                torch.addmm(self.total, a, b, out_dtype=torch.float32, out=self.total)
            return
        if self.chunks > 1 and a.dtype.itemsize < 4:  # a CPU has no such product
            a, b = a.float(), b.float()
        self.total = torch.mm(a, b) if self.total is None else self.total.addmm_(a, b)

    def result(self) -> Tensor:
        total, self.total = self.total, None  # at most one float32 sum is alive beside its result
        return cast_parameter(total, self.dtype)


class BiasGrad:
    """Sum over chunks of float32 partial sums, rounded once."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.total = dtype, None

    def add(self, part: Tensor) -> None:
        self.total = part if self.total is None else self.total.add_(part)

    def result(self) -> Tensor:
        return cast_parameter(self.total, self.dtype)


def weight_grad(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`WeightGrad` of all rows at once."""
    grad = WeightGrad(dtype, 1)
    grad.add(a, b)
    return grad.result()
