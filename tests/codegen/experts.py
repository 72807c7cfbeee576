"""The launches of the experts' kernels: functions of a Case and its Inputs."""

from __future__ import annotations

from .launchers import precision_of


def _given(case, given):
    """(groups, x [T, K], w [E, 2 N, K], b or None, wd [E, K, N], s [T, k]) of as many rows as other matmuls have."""
    M, K, N = (given.sizes(case)[letter] for letter in "MKN")
    T, E, dtype = M // given.TOP_K, given.EXPERTS, case.dtype
    x, w = given(T, K, dtype=dtype), given(E, 2 * N, K, dtype=dtype, scale=K**-0.5)
    b = given(E, 2 * N, dtype=dtype) if case.extras else None
    wd, s = given(E, K, N, dtype=dtype, scale=N**-0.5), given(T, given.TOP_K, dtype="float32")
    return given.groups(T), x, w, b, wd, s


def _fwd(case, given):
    groups, x, w, b, _, _ = _given(case, given)
    return given.backend.experts_fwd(x, w, b, groups, case.activation, precision_of(case), save_gu=case.extras)


def _bwd(case, given):
    groups, x, w, b, wd, s = _given(case, given)
    dy, wanted = given(*x.shape, dtype=x.dtype), dict.fromkeys(("hs", "ds"), case.extras)
    return given.backend.experts_bwd(x, w, b, dy, wd, s, groups, case.activation, precision_of(case), **wanted)


def _act_grad(case, given):
    groups, x, w, _, wd, s = _given(case, given)
    gu, wanted = given(groups.order.numel(), w.shape[1], dtype=x.dtype), dict.fromkeys(("hs", "ds"), case.extras)
    added = given(groups.order.numel(), wd.shape[2], dtype=x.dtype) if case.extras else None
    return given.backend.experts_act_grad(
        gu, x, wd, s, groups, case.activation, precision_of(case), **wanted, added=added
    )


def _gemm(case, given):
    groups, x, w, b, wd, _ = _given(case, given)
    if case.activation == "dx":
        a = given(groups.order.numel(), w.shape[1], dtype=x.dtype)
        return given.backend.experts_gemm(a, w, None, groups, precision_of(case), transposed=False)
    a, b = given(groups.order.numel(), wd.shape[2], dtype=x.dtype), None if b is None else b[:, : wd.shape[1]]
    return given.backend.experts_gemm(a, wd, b, groups, precision_of(case), transposed=True)


def _dw(case, given):
    """Of down's weight into a main_grad, or of the others'."""
    groups, x, w, _, wd, _ = _given(case, given)
    R, precision = groups.order.numel(), precision_of(case)
    if case.activation == "gate_up":
        dgu = given(R, w.shape[1], dtype=x.dtype)
        return given.backend.experts_dw(dgu, x, groups, precision, w.dtype, gathered="b")
    hs, out = given(R, wd.shape[2], dtype=x.dtype), given(*wd.shape, dtype="float32")
    return given.backend.experts_dw(x, hs, groups, precision, out, gathered="a")


def _hidden_grad(case, given):
    groups, _, w, _, wd, s = _given(case, given)
    gu, dh = (given(groups.order.numel(), width, dtype=w.dtype) for width in (w.shape[1], wd.shape[2]))
    wanted = dict.fromkeys(("hs", "ds"), case.extras) | {"over_gu": not case.extras}
    return given.backend.experts_hidden_grad(gu, dh, s, groups, case.activation, **wanted)


def _combine(case, given):
    groups, x, _, _, _, s = _given(case, given)
    y = given(groups.order.numel(), x.shape[1], dtype=x.dtype)
    return given.backend.experts_combine(y, s if case.activation == "weighted" else None, groups)


def _sums(case, given):
    groups, x, _, _, _, s = _given(case, given)
    if case.activation == "gathered":
        return given.backend.experts_sums(x, s, groups, gathered=True)
    return given.backend.experts_sums(
        given(groups.order.numel(), x.shape[1], dtype=x.dtype), None, groups, gathered=False
    )


LAUNCHES = {
    "experts_fwd": _fwd,
    "experts_bwd": _bwd,
    "experts_act_grad": _act_grad,
    "experts_gemm": _gemm,
    "experts_dw": _dw,
    "experts_hidden_grad": _hidden_grad,
    "experts_combine": _combine,
    "experts_sums": _sums,
}
MATMULS = ("experts_fwd", "experts_bwd", "experts_act_grad", "experts_gemm", "experts_dw")
# What takes an activation's place in launchers without one, the heaviest first.
VARIANTS = {
    "experts_gemm": ("down", "dx"),
    "experts_dw": ("down", "gate_up"),
    "experts_combine": ("weighted", "plain"),
    "experts_sums": ("gathered", "rows"),
}
