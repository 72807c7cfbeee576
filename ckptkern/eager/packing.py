"""ReLU's output as its non-zeros: the definitions of triton_kernels/packing.py.

A row of h has one bit an element, 0 where h is 0 or -0, and its non-zeros, NaN among them, lie one after another in `values`
behind those of the rows before. values has room for a part of the elements; the rows from the first on whose non-zeros do not
fit are made again by the product, where their bits are set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .elementwise import kept_alone, pack_bits, unpack_bits
from .linear import linear_fwd

PIECE = 2**18  # elements that are packed at a time, for which torch's own functions take up to 16 bytes each


def _pieces(rows: int, columns: int) -> list[slice]:
    step = max(PIECE // max(columns, 1), 1)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def pack_nonzeros(h: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """h [M, N] -> (bits uint8 [M, ceil(N/8)], offsets int64 [M + 1], values [room] of h's dtype).

    The non-zeros of row i are values[offsets[i] : offsets[i + 1]]; what is beyond the room is left out, what stays free is 0.
    """
    M, N = h.shape
    bits, values = h.new_empty((M, -(-N // 8)), dtype=torch.uint8), h.new_zeros(room)
    counts, used = h.new_zeros(M + 1, dtype=torch.int64), 0
    for rows in _pieces(M, N):
        keep = h[rows] != 0
        bits[rows], counts[rows.start + 1 : rows.stop + 1] = pack_bits(keep), keep.count_nonzero(1)
        found = h[rows].masked_select(keep)[: room - used]
        values[used : used + len(found)] = found
        used += len(found)
    return bits, counts.cumsum(0), values


def unpack_nonzeros(bits, offsets, values, x, w, b, precision, *, scale=1.0):
    return unpack_with(linear_fwd, bits, offsets, values, x, w, b, precision, scale)


def unpack_with(linear, bits, offsets, values, x, w, b, precision, scale) -> Tensor:
    """`unpack_nonzeros`, whose product is made by `linear`, a function like linear_fwd. Reads offsets on the host."""
    (M, _), N = bits.shape, w.shape[0]
    h = values.new_zeros(M, N)
    fit = int((offsets[1:] <= len(values)).sum())
    for rows in _pieces(fit, N):
        h[rows].masked_scatter_(unpack_bits(bits[rows], N), values[offsets[rows.start] : offsets[rows.stop]])
    if fit < M:
        again = linear(x[fit:], w, b, "relu", precision)[0].mul_(scale)
        smallest = (
            torch.finfo(h.dtype).tiny * torch.finfo(h.dtype).eps
        )  # the mask is forward's, whatever rounding does now
        h[fit:] = kept_alone(again.clamp_(min=smallest), unpack_bits(bits[fit:], N))
    return h
