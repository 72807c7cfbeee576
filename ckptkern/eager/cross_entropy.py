"""Linear + cross-entropy: the reference implementations of triton_kernels/cross_entropy.py.

A chunk's logits are computed in the wide type, float32 (float64 for float64), from exact matmuls.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..results import CrossEntropyForward, TokenStatistics
from .elementwise import wide_of

HEADROOM = 2.0**15  # the largest saved exponential, so that float16 holds exponentials down to e^-27 of it


class Head(NamedTuple):
    """Options of an LM head that forward and backward share.

    u = scale (x w^T + b); the logits are z = softcap tanh(u / softcap), or u if softcap is 0. first: the vocabulary entry of
    w's first row. A token whose target is ignore_index has no gradient.
    """

    scale: float = 1.0
    softcap: float = 0.0
    ignore_index: int = -100
    first: int = 0
    precision: str = "ieee"


def upcast_matmul(a: Tensor, b: Tensor, *, out: Tensor | None = None, add: bool = False) -> Tensor:
    """Computes a b in the wide type, or in the dtype of `out`, to which the matmul is added if `add`. A CPU copies 16-bit
    operands to float32; a GPU does not, nor do meta tensors."""
    wide, options = wide_of(a.dtype), {}
    if a.dtype != wide and (a.is_cuda or a.is_meta):
        options["out_dtype"] = wide
    else:
        a, b = a.to(wide), b.to(wide)
    if add:
        return torch.addmm(out, a, b, out=out, **options)
    if out is None or out.dtype == wide:
        return torch.mm(a, b, out=out, **options)
    return torch.mm(a, b, out=out) if out.dtype == a.dtype else out.copy_(torch.mm(a, b, **options))


def head_logits(x: Tensor, w: Tensor, b: Tensor | None, head: Head, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns u = scale (x w^T + b) and z = softcap tanh(u / softcap), both [M, V] in the wide type; z is written to `out` if
    its dtype fits. Without a softcap z is u."""
    if out is not None and out.dtype != wide_of(x.dtype):
        out = None
    u = upcast_matmul(x, w.t(), out=None if head.softcap else out)
    if b is not None:
        u += b
    if head.scale != 1.0:
        u.mul_(head.scale)
    return u, torch.div(u, head.softcap, out=out).tanh_().mul_(head.softcap) if head.softcap else u


def target_columns(targets: Tensor, head: Head, width: int) -> tuple[Tensor, Tensor]:
    """Returns the columns of targets [M, k], and a mask [M, k] of those in this slice of `width` columns; others are 0."""
    columns = targets - head.first
    here = (targets != head.ignore_index) & (columns >= 0) & (columns < width)
    return columns.masked_fill(~here, 0), here


def slice_count(x: Tensor, entries: int) -> int:
    """Returns the number of vocabulary slices per token in the `parts` that `cross_entropy_fwd` saves: 1 here."""
    return 1


def cross_entropy_fwd(
    x, w, b, target, class_weight, head, *, weighted=False, keep=False, entropy=False, arg_max=False, logits=False
):
    (u, z), V = head_logits(x, w, b, head), w.shape[0]
    column, here = target_columns(target[:, None], head, V)
    wz = of_largest = largest = None
    z_t = torch.where(here, z.gather(1, column), 0).squeeze(1) if V else z.new_zeros(len(x))
    top = z.amax(1) if V else z.new_full((len(x),), -math.inf)
    if weighted:
        wz = z.sum(1) if class_weight is None else z @ class_weight
    if arg_max:
        largest, of_largest = top, ((z.argmax(1) if V else z_t) + head.first).to(z.dtype)
    saved = u.to(x.dtype, copy=logits) if keep and head.softcap else None

    # from here on logits are overwritten
    top = top.masked_fill(top == -math.inf, 0)
    log_e = z - top[:, None] if logits else z.sub_(top[:, None])
    e = log_e.exp() if entropy else log_e.exp_()
    total = e.sum(1)
    lse, of_p = top + total.log(), None
    if entropy:
        of_p = torch.where(total > 0, total.log() - times_log(e, log_e).sum(1) / total, 0)
    exponentials = keep and not head.softcap
    if exponentials:
        saved = e.mul_(HEADROOM).to(x.dtype)
    statistics = TokenStatistics(lse=lse, z_t=z_t, wz=wz, entropy=of_p, largest=largest, arg_max=of_largest)
    return CrossEntropyForward(statistics, saved, top[None] if exponentials else None, z if logits else None)


def times_log(p: Tensor, log_p: Tensor) -> Tensor:
    """Computes p log p, 0 where p is 0, in the memory of log_p."""
    return log_p.clamp_(min=torch.finfo(p.dtype).min).mul_(p)


def _write_gradient(p, log_p, u, target, class_weight, gradients, head, out, db):
    """Writes the logits' gradient dz (see `TokenGradients`) to `out`; returns its sum over rows if `db`. Overwrites p, u
    and, where the gradients need it, log_p."""
    column, here = target_columns(target[:, None], head, out.shape[1])
    if gradients.p_log_p is None:
        dz = p.mul_(gradients.p[:, None])
    else:
        dz = times_log(p, log_p).mul_(gradients.p_log_p[:, None]).addcmul_(p, gradients.p[:, None])
    if out.shape[1]:
        dz.scatter_add_(1, column, torch.where(here, gradients.z_t[:, None], 0))
    if gradients.wz is not None:
        even = gradients.wz[:, None]
        dz += even if class_weight is None else even * class_weight
    return write_gradient(dz, u, head.softcap, head.scale, target == head.ignore_index, out, db)


def write_gradient(
    dz: Tensor, u: Tensor, softcap: float, scale: float, ignored: Tensor | None, out: Tensor, db: bool
) -> Tensor | None:
    """Writes the gradient of the logits before softcap and scale to `out`, zeros for ignored tokens; returns its sum over rows
    if `db`. Overwrites u and dz, the gradient of the logits, which may be `out`."""
    if softcap:
        dz.mul_(u.div_(softcap).tanh_().square_().neg_().add_(1))
    if scale != 1.0:
        dz.mul_(scale)
    if ignored is not None:
        dz.masked_fill_(ignored[:, None], 0)
    if dz is not out:
        out.copy_(dz)
    return dz.sum(0) if db else None


def cross_entropy_bwd(x, w, b, target, class_weight, lse, gradients, head, out, *, db=False):
    u, z = head_logits(x, w, b, head, out)
    log_p = z.sub_(lse[:, None])
    p = log_p.exp_() if gradients.p_log_p is None else log_p.exp()
    return _write_gradient(p, log_p, u, target, class_weight, gradients, head, out, db)


def cross_entropy_saved_bwd(saved, parts, z_t, start, target, class_weight, lse, gradients, head, out, *, db=False):
    u = saved.to(lse.dtype, copy=saved is not out)
    if head.softcap:
        p = (u / head.softcap).tanh_().mul_(head.softcap).sub_(lse[:, None]).exp_()
    else:
        p = u.mul_((parts[0] - lse).exp_()[:, None] / HEADROOM)
    column, here = target_columns(target[:, None], head, out.shape[1])
    if out.shape[1]:
        p.scatter_(1, column, torch.where(here, (z_t - lse).exp()[:, None], p.gather(1, column)))
    log_p = None if gradients.p_log_p is None else p.clamp_min(torch.finfo(p.dtype).tiny).log_()
    return _write_gradient(p, log_p, u, target, class_weight, gradients, head, out, db)
