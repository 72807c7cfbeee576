"""Norm and rotary embedding of q and k: the reference implementations of triton_kernels/rotary.py."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from .elementwise import rounded
from .norm import rms_bwd, upcast


def _pairs(x: Tensor, R: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Returns views of the two elements of each rotated pair, each [..., R/2]."""
    return (x[..., 0:R:2], x[..., 1:R:2]) if interleaved else (x[..., : R // 2], x[..., R // 2 : R])


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Rotates the first R dimensions of x [B, S, H, D] by cos, sin [S, R] or [B, S, R]; `back`: by the opposite angles."""
    R = cos.shape[-1]
    cos, sin = (upcast(table, x).unsqueeze(-2) for table in (cos, sin))
    (a, b), (sin_a, sin_b), y = _pairs(x, R, interleaved), _pairs(sin, R, interleaved), x.clone()
    y[..., :R].mul_(cos)
    y_a, y_b = _pairs(y, R, interleaved)
    sin_a, sin_b, sign = (sin_b, sin_a, -1) if back else (sin_a, sin_b, 1)
    y_a.sub_(b * sin_a, alpha=sign)
    y_b.add_(a * sin_b, alpha=sign)
    return y


def heads_fwd(x, weight, eps, cos, sin, interleaved=False, *, bias=None, kind="rms", out=None):
    y = upcast(x, x)
    if weight is not None:
        normed, weight = F.layer_norm if kind == "layer" else F.rms_norm, upcast(weight, x)
        y = normed(y, x.shape[-1:], weight, eps=eps) if weight.dim() == 1 else normed(y, x.shape[-1:], eps=eps) * weight
        y = y if bias is None else y + upcast(bias, x)
    if cos is not None:
        y = _rotated(y, cos, sin, interleaved, back=False)
    return y.to(x.dtype, copy=y is x) if out is None else out.copy_(y)


def heads_bwd(
    dy, x, weight, eps, cos, sin, interleaved=False, *, kind="rms", out=None, need_dweight=False, need_dbias=False
):
    g, dweight, dbias = upcast(dy, dy), None, None
    if cos is not None:
        g = _rotated(g, cos, sin, interleaved, back=True)
    if weight is not None:
        dbias = g.flatten(0, -1 - weight.dim()).sum(0) if need_dbias else None
        x = upcast(x, dy)
        if kind == "layer":  # the RMS norm of x - mean(x), whose gradient has no mean
            x = x - x.mean(-1, keepdim=True)
        g, dweight = rms_bwd(g, x, upcast(weight, dy), eps, need_dweight)
        if kind == "layer":
            g = g - g.mean(-1, keepdim=True)
    dx = g.to(dy.dtype, copy=g is dy) if out is None else out.copy_(g)
    return dx, rounded(dweight, need_dweight), rounded(dbias, need_dbias)
