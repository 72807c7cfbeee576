"""The launches of the kernels that keep ReLU's non-zeros: functions of a Case and its Inputs."""

from __future__ import annotations

from .launchers import precision_of


def _pack(case, given):
    """Half of the elements are non-zeros, of which half have room."""
    M, N = (given.sizes(case)[letter] for letter in "MN")
    return given.backend.pack_nonzeros(given(M, N, dtype=given.dtype(case.dtype)).relu(), M * (N // 4))


def _unpack(case, given):
    """Half of the rows fit."""
    (M, K, N), dtype = (given.sizes(case)[letter] for letter in "MKN"), given.dtype(case.dtype)
    x, w = given(M, K, dtype=dtype), given(N, K, dtype=dtype, scale=K**-0.5)
    b = given(N, dtype=dtype) if case.extras else None
    packed = given.packed(M, N, dtype)
    return given.backend.unpack_nonzeros(*packed, x, w, b, precision_of(case), scale=1.25)


LAUNCHES = {"pack_nonzeros": _pack, "unpack_nonzeros": _unpack}
PRODUCTS = ("unpack_nonzeros",)
VARIANTS = dict.fromkeys(LAUNCHES, ("relu",))  # no other activation has zeros
