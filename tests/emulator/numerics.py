"""What PTX computes, on arrays with an element a thread: types, rounding to 16 bits, and integer operations of its own.

A kind names how a register's bits are read: "u4" unsigned of 4 bytes, "i8" signed of 8, "f4" float32, "p" a predicate.
"""

from __future__ import annotations

import numpy as np

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
FLOAT = {2: np.float16, 4: np.float32, 8: np.float64}
TYPES = {
    **{f"u{n}": t for n, t in UNSIGNED.items()}, **{f"i{n}": t for n, t in SIGNED.items()},
    **{f"f{n}": t for n, t in FLOAT.items()}, "p": np.bool_,
}  # fmt: skip
SMALLEST_NORMAL = np.float32(2.0**-126)


def kind_of(name: str) -> str:
    """The kind of a PTX type: "u4" of b32 and u32, "i4" of s32, "f4" of f32, "p" of pred."""
    if name == "pred":
        return "p"
    return {"u": "u", "b": "u", "s": "i", "f": "f"}[name[0]] + str(int(name[1:]) // 8)


def literal(value: int, kind: str):
    """The number whose bits, of a kind, are those of `value`."""
    if kind == "p":
        return np.bool_(value)
    size = int(kind[1])
    return np.array(value & (1 << 8 * size) - 1, UNSIGNED[size]).view(TYPES[kind])[()]


# --- formats of 16 bits, computed in float32 and rounded once


def from_bf16(bits):
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x):
    bits = np.asarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def from_f16(bits):
    return np.asarray(bits).view(np.float16).astype(np.float32)


def to_f16(x):
    return np.asarray(x).astype(np.float16).view(np.uint16)


def pair(low, high):
    """Two registers of 16 bits as one of 32."""
    return np.asarray(low).astype(np.uint32) | np.asarray(high).astype(np.uint32) << np.uint32(16)


def halves(bits):
    """[2, threads or 1]: the low and the high 16 bits."""
    bits = np.atleast_1d(bits)
    return np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)]).astype(np.uint16)


def from_bf16x2(bits):
    return from_bf16(halves(bits))


def to_bf16x2(x):
    return pair(*to_bf16(x))


def from_f16x2(bits):
    return from_f16(halves(bits))


def to_f16x2(x):
    return pair(*to_f16(x))


def to_tf32(x):
    """To nearest, ties away from zero: cvt.rna."""
    bits = np.asarray(x).view(np.uint32)
    return np.where(np.isfinite(x), (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000), bits)


def as_tf32(bits):
    """What a tensor core reads of a float32."""
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def flush(x):
    """Subnormal float32 as zeros of their sign: .ftz."""
    small = np.absolute(x) < SMALLEST_NORMAL
    return np.where(small, np.copysign(np.float32(0), x), x) if np.any(small) else x


# --- arithmetic


def fma(a, b, c):
    """float32 a b + c, rounded once: the float64 sum rounded to odd (Boldo and Melquiond 2008), then to float32."""
    matmul, c = np.asarray(a, np.float64) * b, np.asarray(c, np.float64)
    total = matmul + c
    part = total - matmul
    rest = (matmul - (total - part)) + (c - part)  # what the sum lost (Knuth's TwoSum)
    bits = np.asarray(total).view(np.int64)
    inexact = (rest != 0) & (bits & 1 == 0) & np.isfinite(total)
    if np.any(inexact):
        total = np.where(inexact, (bits + np.where((rest > 0) == (total > 0), 1, -1)).view(np.float64), total)
    return np.asarray(total).astype(np.float32)[()]


def fma_odd(a, b, c):
    """a b + c of 16-bit numbers, to odd in float32, for one rounding to 16 bits."""
    total = np.asarray(a, np.float64) * b + np.asarray(c, np.float64)
    near = np.asarray(total.astype(np.float32))
    bits = near.view(np.int32)
    inexact = (near != total) & (bits & 1 == 0) & np.isfinite(near)
    step = np.where((total > near) == (near > 0), 1, -1)
    return np.where(inexact, (bits + step).astype(np.int32).view(np.float32), near)


def integer_quotient(a, b):
    """Towards zero; 0 where b is 0."""
    a, b = np.broadcast_arrays(a, b)
    zero = b == 0
    quotient = np.where(zero, a.dtype.type(0), a // np.where(zero, a.dtype.type(1), b))
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient * b != a) & ((a < 0) != (b < 0)) & ~zero)
    return quotient.astype(a.dtype)[()]


def integer_remainder(a, b):
    return a - integer_quotient(a, b) * b


ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def to_integer(x, dtype, mode):
    """Saturates, and NaN is 0, as cvt does."""
    info = np.iinfo(dtype)
    value = ROUNDINGS[mode](np.asarray(x).astype(np.float64))
    top = float(info.max) if info.bits < 64 else np.nextafter(2.0 ** (63 + (info.min == 0)), 0)
    return np.where(np.isnan(value), 0, np.clip(np.nan_to_num(value), info.min, top)).astype(dtype)


def round_to_integer(x, mode):
    return ROUNDINGS[mode](x)


def shift_left(value, amount):
    amount, bits = np.asarray(amount), 8 * value.dtype.itemsize
    shifted = value << np.minimum(amount, bits - 1).astype(value.dtype)
    return np.where(amount < bits, shifted, value.dtype.type(0))


def shift_right(value, amount):
    """Arithmetic where the value is signed; amounts past its width take all bits out."""
    amount, bits = np.asarray(amount), 8 * value.dtype.itemsize
    shifted = value >> np.minimum(amount, bits - 1).astype(value.dtype)
    return shifted if value.dtype.kind == "i" else np.where(amount < bits, shifted, value.dtype.type(0))


def funnel(low, high, amount, side, mode):
    amount = (np.minimum(amount, 32) if mode == "clamp" else amount & np.uint32(31)).astype(np.uint64)
    both = np.asarray(low).astype(np.uint64) | np.asarray(high).astype(np.uint64) << np.uint64(32)
    return (both << amount >> np.uint64(32) if side == "l" else both >> amount).astype(np.uint32)


def permute_bytes(a, b, selectors):
    """prmt: four of the eight bytes of a and b, a nibble each; its top bit spreads the byte's sign."""
    a, b, selectors = np.broadcast_arrays(a, b, selectors)
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros(a.shape, np.uint32)
    for n in range(4):
        selector = selectors >> np.uint32(4 * n)
        byte = both >> (8 * (selector & np.uint32(7))).astype(np.uint64) & np.uint64(0xFF)
        sign = np.where(byte & np.uint64(0x80), np.uint32(0xFF), np.uint32(0))
        result |= np.where(selector & np.uint32(8), sign, byte.astype(np.uint32)) << np.uint32(8 * n)
    return result


def bit_field(value, position, length):
    """bfe: `length` bits from `position`, extended by the sign where the value is signed."""
    bits = 8 * value.dtype.itemsize
    length = min(length, bits - position)
    return value << value.dtype.type(bits - position - length) >> value.dtype.type(bits - length)


def high_half(a, b, wide):
    """The upper half of a matmul of integers."""
    half = 4 * np.dtype(wide).itemsize
    return np.asarray(np.asarray(a).astype(wide) * np.asarray(b).astype(wide) >> wide(half)).astype(a.dtype)


def both(mask, predicate):
    """Where a mask (None: everywhere) and a predicate hold."""
    return predicate if mask is None else mask & predicate
