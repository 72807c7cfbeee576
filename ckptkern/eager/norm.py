"""Layer norm and RMS norm: the reference implementations of triton_kernels/norm.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .elementwise import rounded

_aten = torch.ops.aten


def upcast(x: Tensor | None, like: Tensor) -> Tensor | None:
    """Casts x to the dtype in which `like` is computed: float32, or float64 for float64."""
    return None if x is None else x.to(torch.promote_types(like.dtype, torch.float32))


def rms_bwd(g: Tensor, x: Tensor, weight: Tensor | None, eps: float, need_dweight: bool):
    """Computes dx and dweight of x rsqrt(mean(x^2) + eps) weight over the last dimension, all in one wide dtype.

    weight has the shape of the last dimension or of the last two.
    """
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    h = x * r
    dweight = (g * h).flatten(0, -1 - weight.dim()).sum(0) if need_dweight else None
    g = g if weight is None else g * weight
    return (g - h * (g * h).mean(-1, keepdim=True)) * r, dweight


def norm_fwd(x, weight, bias, eps, kind, out_dtype):
    wide, weight, bias = upcast(x, x), upcast(weight, x), upcast(bias, x)
    if kind == "layer":
        # torch's second derivative of layer_norm with a bias and no weight is None
        within, bias = (None, bias) if weight is None else (bias, None)
        xn = F.layer_norm(wide, x.shape[-1:], weight, within, eps)
    else:
        xn = F.rms_norm(wide, x.shape[-1:], weight, eps)
    xn = xn if bias is None else xn + bias
    return xn.to(out_dtype)


def norm_bwd(dxn, x, weight, eps, kind, *, residual=None, need_dweight=False, need_dbias=False):
    g, wide, weight = upcast(dxn, x), upcast(x, x), upcast(weight, x)
    if kind == "layer":
        _, mean, rstd = _aten.native_layer_norm(wide, x.shape[-1:], None, None, eps)
        weight = wide.new_ones(x.shape[-1:]) if weight is None else weight  # aten sums no gradient of a missing weight
        dx, dweight, dbias = _aten.native_layer_norm_backward(
            g, wide, x.shape[-1:], mean, rstd, weight, weight, [True, bool(need_dweight), bool(need_dbias)]
        )
        dweight, dbias = dweight if need_dweight else None, dbias if need_dbias else None
    else:
        dx, dweight = rms_bwd(g, wide, weight, eps, need_dweight)
        dbias = g.sum(0) if need_dbias else None
    return (
        (dx if residual is None else dx + residual).to(x.dtype),
        rounded(dweight, need_dweight),
        rounded(dbias, need_dbias),
    )
