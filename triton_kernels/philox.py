"""Dropout masks from a region's 16 bytes of state: Philox4x32-10 with eight 16-bit values a call.

state int64[2]; key = low, high word of state[0]. For element (row, col) of a logical tensor with `rows` rows a plane:
    c0 = 8 (col >> 5) + (col & 7)        c1 = 8 (plane ceil(rows/16) + (row >> 4)) + (row & 7)
    c2, c3 = low, high word of state[1]  word = (col >> 3) & 3, half = (row >> 3) & 1 (0 = low 16 bits)
keep = 16-bit value >= threshold = round(65536 p); what passes is scaled by 65536/(65536 - threshold).

Written elementwise, a thread that holds eight neighbouring columns (the layout of a coalesced store, which the compiler chooses
for a matmul's epilogue) makes a call an element: 62 instructions each in a matmul's epilogue on sm_90. So tiles are built
counter by counter. Indices are those of the whole tensor: tile sizes, chunks and shards do not change the mask.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import INTERPRET


def checked_columns(col_base: int) -> int:
    """Returns col_base; raises ValueError if tiles cannot start there: a Philox counter covers columns of one block of 32."""
    if col_base % 32:
        raise ValueError(f"col_base must be a multiple of 32, not {col_base}: a Philox counter covers 32 columns")
    return col_base


def placed(dropout: tuple, row_base: int) -> tuple:
    """Returns a launch's (state, threshold, scale, col_base, row_base); raises ValueError if `keep_tile` cannot start there."""
    if row_base % 16:
        raise ValueError(f"row_base must be a multiple of 16, not {row_base}: a Philox counter covers 16 rows")
    checked_columns(dropout[3])
    return *dropout, row_base


@triton.jit
def _wide_multiply(c0, c2):
    """Returns the high and low word of 0xD2511F53 c0, and of 0xCD9E8D57 c2.

    mul.wide.u32 takes one instruction for both words. tl.philox's umulhi and multiplication take two, and LLVM makes either of
    a multiplication in 64 bits: 15 and 18 instructions an element in attention's forward, 11 this way.
    """
    if INTERPRET:
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        return (a >> 32).to(tl.uint32), a.to(tl.uint32), (b >> 32).to(tl.uint32), b.to(tl.uint32)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b64 a, b;
            mul.wide.u32 a, $4, 0xD2511F53;
            mul.wide.u32 b, $5, 0xCD9E8D57;
            mov.b64 {$1, $0}, a;
            mov.b64 {$3, $2}, b;
            }""",
            "=r,=r,=r,=r,r,r",
            [c0, c2],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Computes Philox4x32-10: the four words of each counter under the key (k0, k1), all uint32; the counter's are of one
    shape."""
    for _ in tl.static_range(10):
        high0, low0, high2, low2 = _wide_multiply(c0, c2)
        c0 = high2 ^ c1 ^ k0
        c1 = low2
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _words_of(x):
    """Returns the low and high word of an int64."""
    return (x & 0xFFFFFFFF).to(tl.uint32), ((x >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def philox_words(state_ptr, c0, c1):
    """Computes the four words of each counter (c0, c1, state[1]) under the key state[0]; c0 and c1 are uint32 of one shape."""
    k0, k1 = _words_of(tl.load(state_ptr))
    c2, c3 = _words_of(tl.load(state_ptr + 1))
    return philox(c0, c1, c2 + (c0 & 0), c3 + (c0 & 0), k0, k1)


@triton.jit
def keep_tile(state_ptr, threshold, first_row, first_col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Computes a mask bool [ROWS, COLS] from row first_row (a multiple of 16) and column first_col (of 32) of the whole tensor.

    One Philox call for eight elements: the words of [ROWS/2, COLS/4] counters are joined and permuted into place.
    """
    c1 = (first_row // 2 + tl.arange(0, ROWS // 2)).to(tl.uint32)[:, None]
    c0 = (first_col // 4 + tl.arange(0, COLS // 4)).to(tl.uint32)[None, :]
    zero = tl.zeros((ROWS // 2, COLS // 4), dtype=tl.uint32)
    r0, r1, r2, r3 = philox_words(state_ptr, zero + c0, zero + c1)
    words = tl.join(tl.join(r0, r2), tl.join(r1, r3))  # [.., .., i, k]: word 2 i + k
    low = (words & 0xFFFF).to(tl.int32) >= threshold
    high = (words >> 16).to(tl.int32) >= threshold
    keep = tl.join(low.to(tl.int8), high.to(tl.int8)).reshape(ROWS // 16, 8, COLS // 32, 8, 4, 2)
    return keep.permute(0, 5, 1, 2, 4, 3).reshape(ROWS, COLS) != 0


@triton.jit
def dropout_mask(dropout, first_row, first_col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Computes `keep_tile` of a tile that starts at (first_row, first_col) of a part, whose first element is (row_base,
    col_base) of the whole tensor. dropout: (state_ptr, threshold, scale, col_base, row_base)."""
    state_ptr, threshold, _, col_base, row_base = dropout
    return keep_tile(state_ptr, threshold, row_base + first_row, col_base + first_col, ROWS, COLS)


@triton.jit
def apply_dropout(x, dropout, keep):
    """Returns keep * scale * x, float32. Dropped elements are 0, even where x is infinite or NaN."""
    return tl.where(keep, x * dropout[2], 0.0)


@triton.jit
def times(x, coefficient):
    """Returns x * coefficient; 0 where the coefficient is 0, even where x is infinite or NaN."""
    return tl.where(coefficient == 0.0, 0.0, x * coefficient)


@triton.jit
def score_values(
    state_ptr, first_block, first_row, first_col, ROWS: tl.constexpr, COLS: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Computes 16-bit values, int32 [ROWS, COLS] (or its transpose), from row first_row (a multiple of 16) and column first_col
    (of 32).

    Written elementwise: in the layout of a matmul's result the eight elements of a call lie in one thread (four of them in a
    transposed tile), and the compiler merges the equal calls, because all that varies inside the tile is built from lane
    numbers and constants. In a layout of eight neighbouring columns a thread it cannot: use `keep_tile` there. first_block =
    plane * ceil(rows per plane / 16).
    """
    row = tl.arange(0, ROWS).to(tl.uint32)
    col = tl.arange(0, COLS).to(tl.uint32)
    if TRANSPOSED:
        row = row[None, :]
        col = col[:, None]
    else:
        row = row[:, None]
        col = col[None, :]
    base0 = tl.full((), first_col // 4, tl.uint32)
    base1 = (first_block << 3) + tl.full((), first_row // 2, tl.uint32)
    c0 = ((col >> 5) << 3) + (col & 7) + (row & 0) + base0
    c1 = ((row >> 4) << 3) + (row & 7) + (col & 0) + base1
    r0, r1, r2, r3 = philox_words(state_ptr, c0, c1)
    word = ((col >> 3) & 3) + (row & 0)
    words = tl.where(word < 2, tl.where(word == 0, r0, r1), tl.where(word == 2, r2, r3))
    return ((words >> (((row >> 3) & 1) << 4)) & 0xFFFF).to(tl.int32)
