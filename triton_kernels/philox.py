"""Dropout masks from a segment's 16 bytes of state: Philox4x32-10 with eight 16-bit values a call.

state int64[2]; key = low, high word of state[0]. For element (row, col) of a logical tensor with `rows` rows a plane:
    c0 = 8 (col >> 5) + (col & 7)        c1 = 8 (plane ceil(rows/16) + (row >> 4)) + (row & 7)
    c2, c3 = low, high word of state[1]  word = (col >> 3) & 3, half = (row >> 3) & 1 (0 = low 16 bits)
An element is kept iff its 16-bit value >= threshold = round(65536 p), and scaled by 65536/(65536 - threshold).

The eight values one thread needs in an MMA tile come from one call, and the compiler merges the duplicate calls of
this elementwise form. Indices are those of the whole tensor: tile sizes, chunks and shards do not change the mask.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox_words(state_ptr, c0, c1):
    """The four words of each counter (c0, c1, state[1]) under the key state[0]; c0 and c1 are uint32 of one shape."""
    key = tl.load(state_ptr)
    offset = tl.load(state_ptr + 1)
    c2 = (offset & 0xFFFFFFFF).to(tl.uint32)
    c3 = ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(key, c0, c1, c2 + (c0 & 0), c3 + (c0 & 0))


@triton.jit
def keep_tile(state_ptr, threshold, first_block, rows, cols):
    """bool [len(rows), len(cols)]. first_block = plane * ceil(rows per plane / 16); 0 for activations."""
    row = rows.to(tl.uint32)[:, None]
    col = cols.to(tl.uint32)[None, :]
    c0 = ((col >> 5) << 3) + (col & 7) + (row & 0)
    c1 = ((first_block + (row >> 4)) << 3) + (row & 7) + (col & 0)
    r0, r1, r2, r3 = philox_words(state_ptr, c0, c1)
    word = (col >> 3) & 3
    value = tl.where(word < 2, tl.where(word == 0, r0, r1), tl.where(word == 2, r2, r3))
    return ((value >> (((row >> 3) & 1) << 4)) & 0xFFFF).to(tl.int32) >= threshold


@triton.jit
def dropout_tile(x, state_ptr, threshold, scale, rows, cols):
    """keep * scale * x for a float32 tile whose rows and cols count from the origin of the whole tensor."""
    return tl.where(keep_tile(state_ptr, threshold, 0, rows, cols), x * scale, 0.0)
