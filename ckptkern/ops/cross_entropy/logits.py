"""The reference implementation: logits in differentiable PyTorch ops, and what the op gives of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import eager
from ..registration.op import cast_parameter, rows_2d
from ..sublayer.lora import LowRank
from .statistics import TokenResults


def reference_logits(
    x: Tensor, w: Tensor, b: Tensor | None, scale: float, softcap: float, update: LowRank | None = None
) -> Tensor:
    """[..., V] in the wide type, differentiable, of operands that are rounded to x's type."""
    w, b = cast_parameter(w, x.dtype), cast_parameter(b, x.dtype)
    wide = eager.wide_of(x.dtype)
    z = F.linear(x.to(wide), w.to(wide), None if b is None else b.to(wide))
    return scaled_and_capped(z if update is None else z + update.reference(x.to(wide)), scale, softcap)


def scaled_and_capped(z: Tensor, scale: float, softcap: float) -> Tensor:
    z = z * scale
    return torch.tanh(z / softcap) * softcap if softcap else z


def results_of_logits(
    z: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    names: tuple[str, ...],
    top_k: int = 0,
    candidates: Tensor | None = None,
) -> TokenResults:
    """Those of these names, of logits [..., V] in PyTorch ops. target: classes [...], or probabilities [..., V], none of them
    ignored, whose log-probability is the expected one and whose class is the likeliest. candidates: [M, k], whose
    log-probabilities [k, M] are given in place of the target's."""
    z, weight, options = rows_2d(z), cast_parameter(weight, z.dtype), dict(reduction="none", label_smoothing=smoothing)
    if target.is_floating_point():
        target = rows_2d(target.to(z.dtype))
        classes, ignored = target.argmax(1) if z.shape[1] else target.new_zeros(len(z), dtype=torch.int64), None
        loss = F.cross_entropy(z, target, weight, **options)
        log_probs = F.cross_entropy(z, target, reduction="none").neg()
    else:
        classes = target.reshape(-1)
        ignored = classes == ignore_index
        z = z.masked_fill(ignored[:, None], 0)  # where these are infinite, derivatives would be NaN
        loss = F.cross_entropy(z, classes, weight, ignore_index=ignore_index, **options)
        log_probs = F.cross_entropy(z, classes, ignore_index=ignore_index, reduction="none").neg()
    lse = torch.logsumexp(z, 1)
    if candidates is not None:
        padding = candidates == ignore_index
        log_probs = (z.gather(1, candidates.masked_fill(padding, 0)) - lse[:, None]).masked_fill(padding, 0).t()
    results = TokenResults(loss=loss, lse_squared=lse.square(), lse=lse, log_probs=log_probs)
    if "entropy" in names:
        log_p = z - lse[:, None]
        p_log_p = log_p.exp() * log_p.clamp_min(torch.finfo(z.dtype).min)  # 0 where z is -inf
        results = results._replace(entropy=p_log_p.sum(1).neg())
    if top_k:
        values, found = z.detach().topk(top_k, 1)
        results = results._replace(top_k=torch.cat([values.t() - lse.detach(), found.t().to(z.dtype)]))
    if "arg_max" in names:
        arg_max = z.argmax(1)
        results = results._replace(arg_max=arg_max.to(z.dtype), accuracy=(arg_max == classes).to(z.dtype))
    if ignored is not None:
        results = TokenResults(*(None if one is None else one.masked_fill(ignored, 0) for one in results))
    return results._replace(**dict.fromkeys(set(results._fields) - set(names)))
