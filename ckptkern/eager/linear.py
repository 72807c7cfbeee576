"""Linear + activation [+ dropout]: the reference implementations of triton_kernels/linear.py. z = x w^T + b is rounded."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from ..results import HiddenGradient, LinearForward
from .elementwise import ACTIVATIONS, NO_DROPOUT, act_bwd, apply_dropout, column_sum, relu_bits


@functools.cache
def upcasts(dtype: torch.dtype) -> bool:
    """Does a CPU multiply this 16-bit type sooner through float32 copies? It does where oneDNN has no matmul of it: float16 on
    an EPYC of the Zen 4 kind takes 12 ms for [2048, 512] x [512, 512], and 57 to 377 by torch's own matmul."""
    asked = {torch.float16: "_is_mkldnn_fp16_supported", torch.bfloat16: "_is_mkldnn_bf16_supported"}.get(dtype)
    return asked is not None and torch.backends.mkldnn.is_available() and not getattr(torch.ops.mkldnn, asked)()


def linear(x: Tensor, w: Tensor, b: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """x w^T + b for x [M, K], w [N, K], b [N] or None; written to `out`, if there is one.

    A keyword costs a tenth of a small matmul's host time, out=None too.
    """
    if x.dtype is not torch.float32 and x.is_cpu and upcasts(x.dtype):
        result = linear(x.float(), w.float(), None if b is None else b.float())
        return result.to(x.dtype) if out is None else out.copy_(result)
    if out is None:
        return F.linear(x, w, b)  # addmm of w.t(), whose view costs more as an object of Python
    return torch.mm(x, w.t(), out=out) if b is None else torch.addmm(b, x, w.t(), out=out)


def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None, add: bool = False) -> Tensor:
    """a b, written to `out`, or added to what it holds."""
    if a.dtype is not torch.float32 and a.is_cpu and upcasts(a.dtype):
        result = torch.mm(a.float(), b.float())
        if out is None:
            return result.to(a.dtype)
        return out.add_(result) if add else out.copy_(result)
    if out is None:
        return torch.mm(a, b)
    return out.addmm_(a, b) if add else torch.mm(a, b, out=out)


def linear_fwd(x, w, b, activation, precision, *, dropout=NO_DROPOUT, row_base=0, save_z=False, save_bits=False):
    z = linear(x, w, b)
    h = ACTIVATIONS[activation].act(z)
    h = h if dropout[0] is None else apply_dropout(h, dropout, row_base)
    return LinearForward(h, z if save_z else None, relu_bits(z) if save_bits else None)


def linear_bwd(x, w, b, dh, activation, precision, *, db=False):
    return act_bwd(dh, linear(x, w, b), activation, db=db)


def hidden_grad(dh, z, activation, *, save_h=False, db=False, over=False, h_over_z=False):
    """The results are new tensors here, whatever a kernel may write over."""
    function = ACTIVATIONS[activation]
    dz = function.grad(dh, z)
    dz = dz.clone() if dz is dh else dz
    return HiddenGradient(dz, function.act(z) if save_h else None, column_sum(dz, db))


def act_grad(
    dy, w, z, activation, precision, *, dropout=NO_DROPOUT, row_base=0, save_h=False, h_over_z=False, db=False
):
    function, dh, h, drops = ACTIVATIONS[activation], mm(dy, w), None, dropout[0] is not None
    dz = function.grad_(apply_dropout(dh, dropout, row_base) if drops else dh, z)
    if save_h:
        h = function.act_(z) if h_over_z else function.act(z)
        h = apply_dropout(h, dropout, row_base) if drops else h
    return HiddenGradient(dz, h, column_sum(dz, db))
