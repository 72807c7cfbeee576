"""The glue of a block in PyTorch ops: the launchers of `triton_kernels.norm` and `.rotary` again.

Same arguments and results; any device, float64 too. Everything is computed in float32 (float64 for float64) and rounded
once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten


def _wide(x: Tensor | None, like: Tensor) -> Tensor | None:
    """x in the dtype that `like` is computed in."""
    return None if x is None else x.to(torch.promote_types(like.dtype, torch.float32))


def norm_fwd(x, weight, bias, eps, kind, out_dtype, *, addend=None, keep_sum=False):
    if addend is not None:
        x = (_wide(x, x) + _wide(addend, x)).to(x.dtype)
    wide = _wide(x, x)
    weight, bias = _wide(weight, x), _wide(bias, x)
    if kind == "layer":
        xn = F.layer_norm(wide, x.shape[-1:], weight, bias, eps)
    else:
        xn = F.rms_norm(wide, x.shape[-1:], weight, eps)
        xn = xn if bias is None else xn + bias
    xn = xn.to(out_dtype)
    return (xn, x) if keep_sum else xn


def norm_bwd(dxn, x, weight, eps, kind, *, residual=None, need_dweight=False, need_dbias=False):
    g, wide, weight = _wide(dxn, x), _wide(x, x), _wide(weight, x)
    dweight = dbias = None
    if kind == "layer":
        shape = x.shape[-1:]
        _, mean, rstd = _aten.native_layer_norm(wide, shape, None, None, eps)
        unit = weight if weight is not None or not need_dweight else torch.ones_like(wide[0])
        dx, dweight, dbias = _aten.native_layer_norm_backward(
            g, wide, shape, mean, rstd, unit, unit, [True, need_dweight, need_dbias and unit is not None]
        )
    else:
        dx, dweight = _rms_bwd(g, wide, weight, eps, need_dweight)
    ...
