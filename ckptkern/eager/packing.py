"""ReLU's output as its non-zeros: the definitions of triton_kernels/packing.py.

A row of h has one bit an element, 0 where h is 0 or -0, and its non-zeros, NaN among them, lie one after another in `values`
behind those of the rows before. values has room for a part of the elements; the rows from the first on whose non-zeros do not
fit are made again by the product, where their bits are set.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .elementwise import pack_bits, unpack_bits
from .linear import linear_fwd

PIECE = 2**16  # elements at a time, for each of which there are up to two int64


def _pieces(rows: int, columns: int) -> list[slice]:
    step = max(PIECE // max(columns, 1), 1)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def pack_nonzeros(h: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor]:
    M, N = h.shape
    pieces = _pieces(M, N)
    bits = h.new_empty((M, -(-N // 8)), dtype=torch.uint8)
    counts = h.new_empty(M, dtype=torch.int64)
    for rows in pieces:
        keep = h[rows] != 0
        bits[rows], counts[rows] = pack_bits(keep), keep.count_nonzero(1)
    offsets = F.pad(counts.cumsum(0), (1, 0))
    values = h.new_zeros(room + 1)  # the last one takes what does not fit; a zero is added to the number before it
    for rows in pieces:
        place = (h[rows] != 0).cumsum(1).add_(offsets[rows, None] - 1).clamp_(0, room)
        values.scatter_add_(0, place.flatten(), h[rows].flatten())
    return bits, offsets, values[:room].clone()


def unpack_nonzeros(bits, offsets, values, x, w, b, precision, *, scale=1.0):
    return unpack_with(linear_fwd, bits, offsets, values, x, w, b, precision, scale)


def unpack_with(linear, bits, offsets, values, x, w, b, precision, scale) -> Tensor:
    """`unpack_nonzeros`, whose product is made by `linear`, a function like linear_fwd. Reads numbers on the host."""
    M, N, room = x.shape[0], w.shape[0], values.numel()
    h = values.new_zeros(M, N)
    if h.is_meta:
        return h
    fit = int((offsets[1:] <= room).sum())
    for rows in _pieces(fit, N):
        h[rows].masked_scatter_(unpack_bits(bits[rows], N), values[offsets[rows.start] : offsets[rows.stop]])
    if fit < M:
        again = linear(x[fit:], w, b, "relu", precision)[0].mul_(scale)
        # the mask is forward's, however this product rounds
        smallest = torch.finfo(h.dtype).tiny * torch.finfo(h.dtype).eps
        h[fit:] = again.clamp_(min=smallest).masked_fill_(~unpack_bits(bits[fit:], N), 0)
    return h
