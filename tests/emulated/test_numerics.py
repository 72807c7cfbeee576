"""The arithmetic of PTX against torch's and Python's."""

import ctypes

import numpy as np
import pytest
import torch
from emulator import numerics


def floats(count: int = 20000) -> np.ndarray:
    """Normal numbers of all sizes, and every pattern of the upper half of a float32."""
    random = np.random.default_rng(0)
    patterns = (np.arange(2**16, dtype=np.uint32) << 16) | random.integers(0, 2**16, 2**16, dtype=np.uint32)
    sized = random.standard_normal(count) * 2.0 ** random.integers(-140, 120, count)
    return np.concatenate([patterns.view(np.float32), sized.astype(np.float32)])


@pytest.mark.parametrize(
    ("to", "back", "dtype"),
    [
        (numerics.to_bf16, numerics.from_bf16, torch.bfloat16),
        (numerics.to_f16, numerics.from_f16, torch.float16),
    ],
)
def test_rounding_to_16_bits_is_torchs(to, back, dtype):
    x = floats()
    with np.errstate(all="ignore"):
        ours = back(to(x))
    theirs = torch.from_numpy(x).to(dtype).float().numpy()
    number = ~np.isnan(x)
    assert (np.isnan(ours) == np.isnan(x)).all()
    assert (ours[number].view(np.uint32) == theirs[number].view(np.uint32)).all()


def test_fma_is_rounded_once():
    """As by the C library. Among them matmuls whose rounded sum in float64 lies on a tie of float32."""
    fmaf = ctypes.CDLL(None).fmaf
    fmaf.argtypes, fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(3000).astype(np.float32) for _ in range(2))
    c = (-a.astype(np.float64) * b * (1 + random.integers(-3, 4, 3000) * 2.0**-24)).astype(np.float32)
    a[:4], b[:4], c[:4] = np.float32(1 + 2**-12), np.float32(1 + 2**-12), np.float32([2**-60, -(2**-60), 1, 2**30])
    exact = np.array(list(map(fmaf, a.tolist(), b.tolist(), c.tolist())), np.float32)
    assert (numerics.fma(a, b, c).view(np.uint32) == exact.view(np.uint32)).all()
    assert (a * b + c != exact).any()


def test_integers_are_those_of_c():
    a, b = np.int32([7, -7, 7, -7, 5]), np.int32([2, 2, -2, -2, 0])
    assert numerics.integer_quotient(a, b).tolist() == [3, -3, -3, 3, 0]
    assert numerics.integer_remainder(a, b).tolist() == [1, -1, 1, -1, 5]
    assert numerics.to_integer(np.float32([2.5, -2.5, 3e9, -3e9, np.nan]), np.int32, "rzi").tolist() == [
        2,
        -2,
        2**31 - 1,
        -(2**31),
        0,
    ]
    assert numerics.to_integer(np.float32([2.5, 3.5]), np.int32, "rni").tolist() == [2, 4]
    words = np.uint32([0x12345678])
    assert hex(numerics.permute_bytes(words, np.uint32([0x9ABCDEF0]), np.uint32([0x7610]))[0]) == "0x9abc5678"
    assert hex(numerics.permute_bytes(words, np.uint32([0x9ABCDEF0]), np.uint32([0x000F]))[0]) == "0x787878ff"
    assert hex(numerics.funnel(words, np.uint32([0x9ABCDEF0]), np.uint32([8]), "r", "wrap")[0]) == "0xf0123456"
    assert numerics.bit_field(np.int32([0b1011000]), 3, 4).tolist() == [-5]
    assert numerics.bit_field(np.uint32([0b1011000]), 3, 4).tolist() == [11]
    assert numerics.shift_right(np.int32([-8]), np.uint32([40])).tolist() == [-1]
    assert numerics.shift_left(np.uint32([1]), np.uint32([32])).tolist() == [0]


def test_tf32_rounds_ties_away():
    x = np.uint32([0x3F801000, 0x3F800FFF, 0xBF801000, 0x7F800000]).view(np.float32)
    assert [hex(bits) for bits in numerics.to_tf32(x)] == ["0x3f802000", "0x3f800000", "0xbf802000", "0x7f800000"]
