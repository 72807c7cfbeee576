"""The glue of a block in PyTorch ops: the launchers of `triton_kernels.norm` and `.rotary` again.

Same arguments and results, on any device, float64 too. Everything is computed in float32 (float64 for float64) and
rounded once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten


def _wide(x: Tensor | None, like: Tensor) -> Tensor | None:
    """x in the dtype that `like` is computed in."""
    return None if x is None else x.to(torch.promote_types(like.dtype, torch.float32))


def _rms_bwd(g: Tensor, x: Tensor, weight: Tensor | None, eps: float, need_dweight: bool):
    """dx and dweight of x rsqrt(mean(x^2) + eps) weight over the last dimension, all in one wide dtype."""
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    h = x * r
    dweight = (g * h).flatten(0, -2).sum(0) if need_dweight else None
    g = g if weight is None else g * weight
    return (g - h * (g * h).mean(-1, keepdim=True)) * r, dweight


def norm_fwd(x, weight, bias, eps, kind, out_dtype, *, addend=None, keep_sum=False):
    if addend is not None:
        x = (_wide(x, x) + _wide(addend, x)).to(x.dtype)
    wide, weight, bias = _wide(x, x), _wide(weight, x), _wide(bias, x)
    if kind == "layer":
        xn = F.layer_norm(wide, x.shape[-1:], weight, bias, eps)
    else:
        xn = F.rms_norm(wide, x.shape[-1:], weight, eps)
        xn = xn if bias is None else xn + bias
    xn = xn.to(out_dtype)
    return (xn, x) if keep_sum else xn


def norm_bwd(dxn, x, weight, eps, kind, *, residual=None, need_dweight=False, need_dbias=False):
    g, wide, weight = _wide(dxn, x), _wide(x, x), _wide(weight, x)
    if kind == "layer":
        _, mean, rstd = _aten.native_layer_norm(wide, x.shape[-1:], None, None, eps)
        weight = wide.new_ones(x.shape[-1:]) if weight is None else weight  # aten sums no gradient of a missing weight
        dx, dweight, dbias = _aten.native_layer_norm_backward(
            g, wide, x.shape[-1:], mean, rstd, weight, weight, [True, need_dweight, need_dbias]
        )
        dweight, dbias = dweight if need_dweight else None, dbias if need_dbias else None
    else:
        dx, dweight = _rms_bwd(g, wide, weight, eps, need_dweight)
        dbias = g.sum(0) if need_dbias else None
    return (dx if residual is None else dx + residual).to(x.dtype), dweight, dbias


def _pairs(x: Tensor, R: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the two elements that turn together, each [..., R/2]."""
    return (x[..., 0:R:2], x[..., 1:R:2]) if interleaved else (x[..., : R // 2], x[..., R // 2 : R])


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """x [B, S, H, D], the first R dimensions turned by the angles cos, sin [S, R] or [B, S, R], or turned back."""
    R = cos.shape[-1]
    (a, b), (cos_a, cos_b), (sin_a, sin_b) = (
        _pairs(one, R, interleaved) for one in (x, _wide(cos, x).unsqueeze(-2), _wide(sin, x).unsqueeze(-2))
    )
    y = x.clone()
    y_a, y_b = _pairs(y, R, interleaved)
    if back:
        torch.add(a * cos_a, b * sin_b, out=y_a)
        torch.sub(b * cos_b, a * sin_a, out=y_b)
    else:
        torch.sub(a * cos_a, b * sin_a, out=y_a)
        torch.add(b * cos_b, a * sin_b, out=y_b)
    return y


def heads_fwd(x, weight, eps, cos, sin, interleaved=False, *, out=None):
    y = _wide(x, x)
    if weight is not None:
        y = F.rms_norm(y, x.shape[-1:], _wide(weight, x), eps)
    if cos is not None:
        y = _turned(y, cos, sin, interleaved, back=False)
    return y.to(x.dtype, copy=y is x) if out is None else out.copy_(y)


def heads_bwd(dy, x, weight, eps, cos, sin, interleaved=False, *, out=None, need_dweight=False):
    g, dweight = _wide(dy, dy), None
    if cos is not None:
        g = _turned(g, cos, sin, interleaved, back=True)
    if weight is not None:
        g, dweight = _rms_bwd(g, _wide(x, dy), _wide(weight, dy), eps, need_dweight)
    return g.to(dy.dtype, copy=g is dy) if out is None else out.copy_(g), dweight
