"""Per-token results of linear_cross_entropy: from statistics of the logits, with their gradients, or from the logits themselves
in differentiable PyTorch ops, which is the reference implementation."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import eager
from ...results import TokenGradients, TokenStatistics
from ..registration.op import Names, cast_parameter, rows_2d
from ..sublayer.lora import LowRank


class TokenResults(NamedTuple):
    """Per-token results, each [M] in the accumulate dtype, 0 for ignored tokens; y has a row for each requested result.

    log_probs: of the target, or [k, M] of k candidates. entropy: of the probabilities. arg_max: the class of the largest logit,
    exact up to 2^24 classes. accuracy: 1 where arg_max is the target. top_k: [2 k, M], the largest log-probabilities in
    descending order, then their classes.
    """

    loss: Tensor | None = None
    lse_squared: Tensor | None = None
    lse: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    accuracy: Tensor | None = None
    arg_max: Tensor | None = None
    top_k: Tensor | None = None


DIFFERENTIABLE = ("loss", "lse_squared", "lse", "log_probs", "entropy")  # read by `Sums.gradients`
CLASSES = 2**24  # y holds classes in the accumulate dtype, exact up to here


def of_rows(y: Tensor, names: Names) -> TokenResults:
    """Splits y [rows, M] into the named results; top_k and log_probs may have several rows."""
    several, more = "top_k" if "top_k" in names else "log_probs", len(y) - len(names)
    results, row = {}, 0
    for name in names:
        if name == several and more:
            results[name] = y[row : row + more + 1]
            row += more
        else:
            results[name] = y[row]
        row += 1
    return TokenResults(**results)


class Sums:
    """The terms of a token's loss besides its statistics: the class weight, and label smoothing over all classes.

    loss = weight (1 - e) (lse - z_t) + e/V (sum_v w_v lse - wz),  e = label_smoothing
    """

    def __init__(self, target: Tensor, class_weight: Tensor | None, o, entries):
        smoothing = o.label_smoothing
        self.target, self.ignore_index, self.share = target, o.ignore_index, 1.0 - smoothing
        if class_weight is not None:
            self.share = class_weight[target.masked_fill(target == o.ignore_index, 0)] * self.share
        self.even = smoothing / entries if smoothing else None
        self.all = smoothing if class_weight is None or not smoothing else self.even * class_weight.sum()

    def results(self, s: TokenStatistics, names: Names, candidates: Tensor | None = None) -> Tensor:
        """Returns y [rows, M], 0 for ignored tokens and candidates."""
        results = {"lse": s.lse, "entropy": s.entropy, "arg_max": s.arg_max}
        if "loss" in names:
            loss = self.share * (s.lse - s.z_t)
            results["loss"] = loss if s.wz is None else loss + (self.all * s.lse - self.even * s.wz)
        if "lse_squared" in names:
            results["lse_squared"] = s.lse.square()
        if candidates is not None:
            results["log_probs"] = (s.z_c - s.lse[:, None]).masked_fill(candidates == self.ignore_index, 0).t()
        elif "log_probs" in names:
            results["log_probs"] = s.z_t - s.lse
        if "top_k" in names:
            results["top_k"] = torch.cat([s.top_z.t() - s.lse, s.top_v.t()])
        if "accuracy" in names:
            results["accuracy"] = (s.arg_max == self.target).to(s.lse.dtype)
        return torch.vstack([results[name] for name in names]).masked_fill(self.target == self.ignore_index, 0)

    def gradients(self, dy: TokenResults, lse: Tensor, entropy: Tensor | None) -> TokenGradients:
        """Returns the coefficients of dz, from the gradients dy of the results, by

        d lse / dz_v = p_v,  d log_prob / dz_v = [v = target] - p_v,  d entropy / dz_v = -p_v (log p_v + entropy)
        """
        of_p, of_target, wz = [], [], None  # terms of the sums
        if dy.lse is not None:
            of_p.append(dy.lse)
        if dy.lse_squared is not None:
            of_p.append(2 * lse * dy.lse_squared)
        if dy.loss is not None:
            of_loss = self.share * dy.loss
            of_p.append(of_loss)
            of_target.append(-of_loss)
            if self.even is not None:
                of_p.append(self.all * dy.loss)
                wz = -self.even * dy.loss
        if dy.log_probs is not None:
            of_p.append(-dy.log_probs)
            of_target.append(dy.log_probs)
        if dy.entropy is not None:
            of_p.append(-(dy.entropy * entropy))
        return TokenGradients(
            p=functools.reduce(torch.add, of_p),
            z_t=functools.reduce(torch.add, of_target),
            wz=wz,
            p_log_p=None if dy.entropy is None else -dy.entropy,
        )


def gathered(mine: TokenStatistics, entries: int, group: str, size: int) -> tuple[TokenStatistics, Tensor]:
    """Returns the statistics of the whole vocabulary and its size, a scalar tensor, from this rank's shard.

    Runs one all-gather. Ranks are combined in order, so that all of them get equal bits.
    """
    sent = {name: tensor for name, tensor in mine._asdict().items() if tensor is not None}
    parts = torch.cat([*(tensor.reshape(-1) for tensor in sent.values()), mine.lse.new_full((1,), entries)])
    parts = torch.ops._c10d_functional.all_gather_into_tensor(parts, size, group)
    parts = torch.ops._c10d_functional.wait_tensor(parts).view(size, -1)
    split = parts[:, :-1].split([tensor.numel() for tensor in sent.values()], 1)
    theirs = zip(sent.items(), split, strict=True)
    ranks = TokenStatistics(**{name: part.view(size, *tensor.shape) for (name, tensor), part in theirs})
    return combined(ranks), parts[:, -1].sum()


def combined(ranks: TokenStatistics) -> TokenStatistics:
    """Combines the statistics of parts of the vocabulary, stacked in order along dimension 0, into those of the whole."""
    z_t, wz, z_c = (None if tensor is None else tensor.sum(0) for tensor in (ranks.z_t, ranks.wz, ranks.z_c))
    whole = TokenStatistics(lse=torch.logsumexp(ranks.lse, 0), z_t=z_t, wz=wz, z_c=z_c)
    if ranks.entropy is not None:  # sum_ranks p (entropy - log p) of the ranks' shares p, 0 where p is 0
        log_p = ranks.lse - whole.lse
        parts_of_it = log_p.exp() * (ranks.entropy - log_p)
        whole = whole._replace(entropy=parts_of_it.masked_fill(log_p == -torch.inf, 0).sum(0))
    if ranks.largest is not None:
        largest, rank = ranks.largest.max(0)
        whole = whole._replace(largest=largest, arg_max=ranks.arg_max.gather(0, rank[None])[0])
    if ranks.top_z is not None:
        top_z, top_v = (tensor.movedim(0, 1).flatten(1) for tensor in (ranks.top_z, ranks.top_v))
        top_z, places = top_z.topk(ranks.top_z.shape[-1], 1)
        whole = whole._replace(top_z=top_z, top_v=top_v.gather(1, places))
    return whole


def reference_logits(
    x: Tensor, w: Tensor, b: Tensor | None, scale: float, softcap: float, update: LowRank | None = None
) -> Tensor:
    """Computes logits [..., V] in the accumulate dtype, differentiably, from operands rounded to x's dtype."""
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
    names: Names,
    top_k: int = 0,
    candidates: Tensor | None = None,
) -> TokenResults:
    """Computes the named results from logits [..., V] in PyTorch ops.

    target: classes [...], or probabilities [..., V]: then no token is ignored, log_probs are expected ones, and the likeliest
    class is the target of accuracy. candidates: [M, k], which make log_probs [k, M] theirs.
    """
    z, weight, ignored, options = rows_2d(z), cast_parameter(weight, z.dtype), None, {"reduction": "none"}
    if target.is_floating_point():
        target = rows_2d(target.to(z.dtype))
        classes = target.argmax(1) if z.shape[1] else target.new_zeros(len(z), dtype=torch.int64)
    else:
        target = classes = target.reshape(-1)
        ignored, options = target == ignore_index, options | {"ignore_index": ignore_index}
        z = z.masked_fill(ignored[:, None], 0)  # infinite logits of ignored tokens would make derivatives NaN
    loss = F.cross_entropy(z, target, weight, label_smoothing=smoothing, **options)
    log_probs = F.cross_entropy(z, target, **options).neg()
    lse = torch.logsumexp(z, 1)
    if candidates is not None:
        padding = candidates == ignore_index
        log_probs = (z.gather(1, candidates.masked_fill(padding, 0)) - lse[:, None]).masked_fill(padding, 0).t()
    results = {"loss": loss, "lse_squared": lse.square(), "lse": lse, "log_probs": log_probs}
    if "entropy" in names:
        log_p = z - lse[:, None]
        p_log_p = log_p.exp() * log_p.clamp_min(torch.finfo(z.dtype).min)  # 0 where z is -inf
        results["entropy"] = p_log_p.sum(1).neg()
    if top_k:
        values, indices = z.detach().topk(top_k, 1)
        results["top_k"] = torch.cat([values.t() - lse.detach(), indices.t().to(z.dtype)])
    if "arg_max" in names:
        arg_max = z.argmax(1)
        results |= {"arg_max": arg_max.to(z.dtype), "accuracy": (arg_max == classes).to(z.dtype)}
    asked = {name: results[name] for name in names}
    if ignored is not None:
        asked = {name: result.masked_fill(ignored, 0) for name, result in asked.items()}
    return TokenResults(**asked)
