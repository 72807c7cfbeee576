"""ReLU's output as its non-zeros: the definitions of triton_kernels/packing.py.

A row of h has one bit an element, 0 where h is 0 or -0, and its non-zeros, NaN among them, lie one after another in `values`
behind those of the rows before. values has room for a part of the elements; the rows from the first on whose non-zeros do not
fit are made again by the product, where their bits are set.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from .elementwise import pack_bits, unpack_bits
from .linear import product


def _pieces(h: Tensor, start: int, stop: int) -> Iterator[slice]:
    """Those rows, so many at a time that places and masks, up to 16 bytes an element, stay in a CPU's cache, or on a GPU, where
    a launch costs more, take little beside h."""
    elements = 2**16 if h.is_cpu else min(2**24, h.numel() // 8)
    step = max(elements // max(h.shape[1], 1), 1)
    return (slice(i, min(i + step, stop)) for i in range(start, stop, step))


def _put(values: Tensor, place: Tensor, keep: Tensor, h: Tensor) -> None:
    """values[place] = h where keep. The last of values takes what does not fit."""
    values.scatter_(0, place.masked_fill_(~keep, len(values) - 1), h)


def _add(values: Tensor, place: Tensor, keep: Tensor, h: Tensor) -> None:
    """The same on zeros, since a zero is added to the number before it. On a CPU 4 to 7 times as fast as _put; atomics of a GPU
    make float32's subnormals 0."""
    values.scatter_add_(0, place, h)


def pack_nonzeros(h: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor]:
    M, N = h.shape
    bits = h.new_empty((M, -(-N // 8)), dtype=torch.uint8)
    if h.is_meta:
        return bits, h.new_empty(M + 1, dtype=torch.int64), h.new_empty(room)
    counts = h.new_empty(M, dtype=torch.int64)
    for rows in _pieces(h, 0, M):
        keep = h[rows] != 0
        bits[rows], counts[rows] = pack_bits(keep), keep.count_nonzero(1)
    offsets = F.pad(counts.cumsum(0), (1, 0))
    values, put = h.new_zeros(room + 1), _add if h.is_cpu else _put
    for rows in _pieces(h, 0, M):
        keep = h[rows] != 0
        place = keep.cumsum(1).add_(offsets[rows, None] - 1).clamp_(0, room)
        put(values, place.flatten(), keep.flatten(), h[rows].flatten())
    return bits, offsets, values[:room].clone()


def unpack_nonzeros(bits, offsets, values, x, w, b, precision, *, scale=1.0):
    return unpack_with(product, bits, offsets, values, x, w, b, precision, scale)


def unpack_with(product, bits, offsets, values, x, w, b, precision, scale) -> Tensor:
    """`unpack_nonzeros`, whose rows are made again by `product`, a function like linear.product. Reads once on the host."""
    M, N, room = x.shape[0], w.shape[0], values.numel()
    h = values.new_zeros(M, N)
    if h.is_meta:
        return h
    ends = offsets.tolist()
    fit = bisect_right(ends, room, 1) - 1
    for rows in _pieces(h, 0, fit):
        h[rows].masked_scatter_(unpack_bits(bits[rows], N), values[ends[rows.start] : ends[rows.stop]])
    if fit < M:
        product(x[fit:], w, b, out=h[fit:])  # no second [M, N], which `workspace` does not count
    for rows in _pieces(h, fit, M):
        # The mask is forward's, however this product rounds; a smaller number than tiny may count as 0 (set_flush_denormal).
        again = h[rows].mul_(scale)
        again.masked_fill_(again <= 0, torch.finfo(h.dtype).tiny)
        again.masked_fill_(unpack_bits(bits[rows], N).logical_not_(), 0)
    return h
