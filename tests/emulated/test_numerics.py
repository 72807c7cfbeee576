"""The arithmetic of PTX against torch's and Python's."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from emulator import matrices, numerics


def floats(count: int = 20000) -> np.ndarray:
    """Normal numbers of all sizes, and every pattern of the upper half of a float32."""
    random = np.random.default_rng(0)
    patterns = (np.arange(2**16, dtype=np.uint32) << 16) | random.integers(0, 2**16, 2**16, dtype=np.uint32)
    sized = random.standard_normal(count) * 2.0 ** random.integers(-140, 120, count)
    return np.concatenate([patterns.view(np.float32), sized.astype(np.float32)])


@pytest.mark.parametrize(("to", "back", "dtype"), [
    (numerics.to_bf16, numerics.from_bf16, torch.bfloat16), (numerics.to_f16, numerics.from_f16, torch.float16),
])  # fmt: skip
def test_rounding_to_16_bits_is_torchs(to, back, dtype):
    x = floats()
    with np.errstate(all="ignore"):
        ours = back(to(x))
    theirs = torch.from_numpy(x).to(dtype).float().numpy()
    number = ~np.isnan(x)
    assert (np.isnan(ours) == np.isnan(x)).all()
    assert (ours[number].view(np.uint32) == theirs[number].view(np.uint32)).all()


def rounded(value: Fraction) -> np.float32:
    """To nearest even, by comparing with the neighbours of the float64's rounding."""
    near = np.float32(float(value))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    gaps = [abs(Fraction(float(one)) - value) for one in around]
    best = [one for one, gap in zip(around, gaps, strict=True) if gap == min(gaps)]
    return best[0] if len(best) == 1 else next(one for one in best if not one.view(np.uint32) & 1)


def test_fma_is_rounded_once():
    """Among them matmuls whose rounded sum in float64 lies on a tie of float32."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(3000).astype(np.float32) for _ in range(2))
    c = (-a.astype(np.float64) * b * (1 + random.integers(-3, 4, 3000) * 2.0**-24)).astype(np.float32)
    a[:4], b[:4], c[:4] = np.float32(1 + 2**-12), np.float32(1 + 2**-12), np.float32([2**-60, -(2**-60), 1, 2**30])
    twice = np.float32(a.astype(np.float64) * b + c)
    ours = numerics.fma(a, b, c)
    exact = [
        rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)
    ]
    assert (ours.view(np.uint32) == np.array(exact, np.float32).view(np.uint32)).all()
    assert (twice != ours).any() or (a * b + c != ours).any()


def test_integers_are_those_of_c():
    a, b = np.int32([7, -7, 7, -7, 5]), np.int32([2, 2, -2, -2, 0])
    assert numerics.integer_quotient(a, b).tolist() == [3, -3, -3, 3, 0]
    assert numerics.integer_remainder(a, b).tolist() == [1, -1, 1, -1, 5]
    assert numerics.to_integer(np.float32([2.5, -2.5, 3e9, -3e9, np.nan]), np.int32, "rzi").tolist() == [
        2, -2, 2**31 - 1, -(2**31), 0,
    ]  # fmt: skip
    assert numerics.to_integer(np.float32([2.5, 3.5]), np.int32, "rni").tolist() == [2, 4]
    words = np.uint32([0x12345678])
    assert hex(numerics.permute_bytes(words, np.uint32([0x9ABCDEF0]), np.uint32([0x7610]))[0]) == "0x9abc5678"
    assert hex(numerics.permute_bytes(words, np.uint32([0x9ABCDEF0]), np.uint32([0x000F]))[0]) == "0x787878ff"
    assert hex(numerics.funnel(words, np.uint32([0x9ABCDEF0]), np.uint32([8]), "r", "wrap")[0]) == "0xf0123456"
    assert numerics.bit_field(np.int32([0b1011000]), 3, 4).tolist() == [-5]
    assert numerics.bit_field(np.uint32([0b1011000]), 3, 4).tolist() == [11]
    assert numerics.insert_bits(np.uint32([0b101]), np.uint32([0xFF]), 4, 3).tolist() == [0b11011111]
    assert numerics.shift_right(np.int32([-8]), np.uint32([40])).tolist() == [-1]
    assert numerics.shift_left(np.uint32([1]), np.uint32([32])).tolist() == [0]


def test_tf32_rounds_ties_away():
    x = np.uint32([0x3F801000, 0x3F800FFF, 0xBF801000, 0x7F800000]).view(np.float32)
    assert [hex(one) for one in numerics.to_tf32(x)] == ["0x3f802000", "0x3f800000", "0xbf802000", "0x7f800000"]


@pytest.mark.parametrize("type", ["f16", "bf16", "tf32"])
def test_fragments_of_a_product(type):
    """Registers laid out as section 9.7.14.5 of "PTX ISA" says, by lane and index."""
    depth = 8 if type == "tf32" else 16
    random = np.random.default_rng(0)
    a, b = random.integers(-4, 5, (16, depth)), random.integers(-4, 5, (depth, 8))
    c = random.integers(-4, 5, (16, 8))
    if type == "tf32":
        word = lambda *values: np.float32(values[0]).view(np.uint32)  # noqa: E731
        pairs, columns = 1, [0, 4]
    else:
        to = numerics.to_bf16 if type == "bf16" else numerics.to_f16
        word = lambda *values: int(to(np.float32(values[0]))) | int(to(np.float32(values[1]))) << 16  # noqa: E731
        pairs, columns = 2, [0, 8]
    lanes = [(lane // 4, lane % 4) for lane in range(32)]
    step = pairs
    left = [
        [word(*a[row + 8 * half, k + q * step : k + q * step + pairs]) for row, q in lanes]
        for k in columns
        for half in (0, 1)
    ]
    right = [[word(*b[k + q * step : k + q * step + pairs, row]) for row, q in lanes] for k in columns]
    third = [[c[row + 8 * half, 2 * q + n] for row, q in lanes] for half in (0, 1) for n in (0, 1)]
    found = matrices.multiply_add(
        matrices.operand(np.array(left, np.uint32), "a", type), matrices.operand(np.array(right, np.uint32), "b", type),
        np.array(third, np.float32),
    )  # fmt: skip
    wanted = a @ b + c
    assert found.tolist() == [
        [wanted[row + 8 * half, 2 * q + n] for row, q in lanes] for half in (0, 1) for n in (0, 1)
    ]
