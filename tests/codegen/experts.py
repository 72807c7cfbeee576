"""The launches of the experts' kernels: functions of a Case and its Inputs."""

from __future__ import annotations

from .launchers import precision_of


def _given(case, inputs):
    """(groups, x [T, K], w [E, 2 N, K], b or None, wd [E, K, N], s [T, k]) of as many rows as other matmuls have."""
    M, K, N = (inputs.sizes(case)[letter] for letter in "MKN")
    T, E, dtype = M // inputs.TOP_K, inputs.EXPERTS, case.dtype
    x, w = inputs(T, K, dtype=dtype), inputs(E, 2 * N, K, dtype=dtype, scale=K**-0.5)
    b = inputs(E, 2 * N, dtype=dtype) if case.extras else None
    wd, s = inputs(E, K, N, dtype=dtype, scale=N**-0.5), inputs(T, inputs.TOP_K, dtype="float32")
    return inputs.groups(T), x, w, b, wd, s


def _fwd(case, inputs):
    groups, x, w, b, _, _ = _given(case, inputs)
    return inputs.backend.experts_fwd(x, w, b, groups, case.activation, precision_of(case), save_gu=case.extras)


def _bwd(case, inputs):
    groups, x, w, b, wd, s = _given(case, inputs)
    dy, wanted = inputs(*x.shape, dtype=x.dtype), dict.fromkeys(("hs", "ds"), case.extras)
    return inputs.backend.experts_bwd(x, w, b, dy, wd, s, groups, case.activation, precision_of(case), **wanted)


def _act_grad(case, inputs):
    groups, x, w, _, wd, s = _given(case, inputs)
    gu, wanted = inputs(groups.order.numel(), w.shape[1], dtype=x.dtype), dict.fromkeys(("hs", "ds"), case.extras)
    added = inputs(groups.order.numel(), wd.shape[2], dtype=x.dtype) if case.extras else None
    return inputs.backend.experts_act_grad(
        gu, x, wd, s, groups, case.activation, precision_of(case), **wanted, added=added
    )


def _gemm(case, inputs):
    groups, x, w, b, wd, _ = _given(case, inputs)
    if case.activation == "dx":
        a = inputs(groups.order.numel(), w.shape[1], dtype=x.dtype)
        return inputs.backend.experts_gemm(a, w, None, groups, precision_of(case), transposed=False)
    a, b = inputs(groups.order.numel(), wd.shape[2], dtype=x.dtype), None if b is None else b[:, : wd.shape[1]]
    return inputs.backend.experts_gemm(a, wd, b, groups, precision_of(case), transposed=True)


def _dw(case, inputs):
    """Of down's weight into a main_grad, or of the others'."""
    groups, x, w, _, wd, _ = _given(case, inputs)
    R, precision = groups.order.numel(), precision_of(case)
    if case.activation == "gate_up":
        dgu = inputs(R, w.shape[1], dtype=x.dtype)
        return inputs.backend.experts_dw(dgu, x, groups, precision, w.dtype, gathered="b")
    hs, out = inputs(R, wd.shape[2], dtype=x.dtype), inputs(*wd.shape, dtype="float32")
    return inputs.backend.experts_dw(x, hs, groups, precision, out, gathered="a")


def _hidden_grad(case, inputs):
    groups, _, w, _, wd, s = _given(case, inputs)
    gu, dh = (inputs(groups.order.numel(), width, dtype=w.dtype) for width in (w.shape[1], wd.shape[2]))
    wanted = dict.fromkeys(("hs", "ds"), case.extras) | {"over_gu": not case.extras}
    return inputs.backend.experts_hidden_grad(gu, dh, s, groups, case.activation, **wanted)


def _combine(case, inputs):
    groups, x, _, _, _, s = _given(case, inputs)
    y = inputs(groups.order.numel(), x.shape[1], dtype=x.dtype)
    return inputs.backend.experts_combine(y, s if case.activation == "weighted" else None, groups)


def _sums(case, inputs):
    groups, x, _, _, _, s = _given(case, inputs)
    if case.activation == "gathered":
        return inputs.backend.experts_sums(x, s, groups, gathered=True)
    return inputs.backend.experts_sums(
        inputs(groups.order.numel(), x.shape[1], dtype=x.dtype), None, groups, gathered=False
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
