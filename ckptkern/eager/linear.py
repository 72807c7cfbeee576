"""Linear + activation [+ dropout]: the reference implementations of triton_kernels/linear.py, a matmul followed by elementwise
launchers. z = x w^T + b is rounded."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from ..results import HiddenGradient, LinearForward
from .elementwise import ACTIVATIONS, NO_DROPOUT, act_bwd, act_fwd, apply_dropout, column_sum, relu_bits


@functools.cache
def upcasts(dtype: torch.dtype) -> bool:
    """Returns whether a CPU's matmul of this 16-bit dtype is faster through float32 copies: where oneDNN does not support it.
    On a Zen 4 EPYC float16 [2048, 512] x [512, 512] takes 12 ms so, and 57 to 377 ms by torch's own matmul."""
    asked = {torch.float16: "_is_mkldnn_fp16_supported", torch.bfloat16: "_is_mkldnn_bf16_supported"}.get(dtype)
    return asked is not None and torch.backends.mkldnn.is_available() and not getattr(torch.ops.mkldnn, asked)()


def linear(x: Tensor, w: Tensor, b: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """Computes x w^T + b for x [M, K], w [N, K], b [N] or None, into `out` if passed.

    A keyword argument, even out=None, costs a tenth of a small matmul's host time.
    """
    if x.dtype is not torch.float32 and x.is_cpu and upcasts(x.dtype):
        result = linear(x.float(), w.float(), None if b is None else b.float())
        return result.to(x.dtype) if out is None else out.copy_(result)
    if out is None:
        return F.linear(x, w, b)  # addmm of w.t() without the Python object of that view
    return torch.mm(x, w.t(), out=out) if b is None else torch.addmm(b, x, w.t(), out=out)


def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None, add: bool = False) -> Tensor:
    """Computes a b, written to `out` or, if `add`, added to it."""
    if a.dtype is not torch.float32 and a.is_cpu and upcasts(a.dtype):
        result = torch.mm(a.float(), b.float())
        if out is None:
            return result.to(a.dtype)
        return out.add_(result) if add else out.copy_(result)
    if out is None:
        return torch.mm(a, b)
    return out.addmm_(a, b) if add else torch.mm(a, b, out=out)


def hidden_grad(dh, z, activation, *, save_h=False, db=False, over=False, h_over_z=False):
    function = ACTIVATIONS[activation]
    dz = function.grad_(dh, z) if over else function.grad(dh, z)
    dz = dz.clone() if dz is dh and not over else dz
    h = None if not save_h else function.act_(z) if h_over_z else function.act(z)
    return HiddenGradient(dz, h, column_sum(dz, db))


class LinearSteps:
    """Launchers with an epilogue, each as a matmul followed by elementwise launchers. Subclasses define these, in PyTorch ops
    or as kernels."""

    recomputes_relu = False  # backward reads relu(z) instead of z

    def relu(self, x, w, b):
        return self.act_fwd(self.linear(x, w, b), None, "relu")

    def linear_fwd(
        self, x, w, b, activation, precision, *, dropout=NO_DROPOUT, row_base=0, save_z=False, save_bits=False
    ):
        if activation == "relu" and not save_z:
            z, h = None, self.relu(x, w, b)
        else:
            z = self.linear(x, w, b)
            h = z if activation == "identity" else self.act_fwd(z, None, activation)
        bits = self.relu_bits(h) if save_bits else None
        h = h if dropout[0] is None else self.apply_dropout(h, dropout, row_base)
        return LinearForward(h, z if save_z else None, bits)

    def linear_bwd(self, x, w, b, dh, activation, precision, *, db=False):
        recompute = self.relu if self.recomputes_relu and activation == "relu" else self.linear
        return self.act_bwd(dh, recompute(x, w, b), activation, db=db)

    def act_grad(
        self, dy, w, z, activation, precision, *, dropout=NO_DROPOUT, row_base=0, save_h=False, h_over_z=False, db=False
    ):
        wanted = dict(save_h=save_h, h_over_z=h_over_z, db=db)
        return self.hidden_grads(self.hidden_grad, dy, w, (z, activation), dropout, row_base, **wanted)

    def hidden_grads(self, launcher, dy, w, saved, dropout, row_base, **wanted):
        """Calls an elementwise launcher on dh = dropout(dy w), which it overwrites, and applies dropout to the h it returns."""
        if dropout[0] is None:
            return launcher(self.mm(dy, w), *saved, over=True, **wanted)
        grads = launcher(self.apply_dropout(self.mm(dy, w), dropout, row_base), *saved, over=True, **wanted)
        return grads if grads.h is None else grads._replace(h=self.apply_dropout(grads.h, dropout, row_base))


class Eager(LinearSteps):
    """LinearSteps in PyTorch ops."""

    linear, mm, apply_dropout, relu_bits, act_fwd, act_bwd, hidden_grad = map(
        staticmethod, (linear, mm, apply_dropout, relu_bits, act_fwd, act_bwd, hidden_grad)
    )


_steps = Eager()
linear_fwd, linear_bwd, act_grad = _steps.linear_fwd, _steps.linear_bwd, _steps.act_grad
