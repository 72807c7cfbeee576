"""What the op computes of each token from the statistics of its logits, and the gradients that go back to these."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...results import TokenGradients, TokenStatistics


class TokenResults(NamedTuple):
    """What the op gives of each token, [M] in the wide type; y has a row for each that was asked for, 0 of ignored tokens.

    log_probs: of the target, or [k, M], of k candidates. entropy: of the probabilities. arg_max: the class of the largest
    logit, exact up to 2^24 classes. accuracy: is it the target? top_k: [2 k, M], the largest log-probabilities in
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


DIFFERENTIABLE = ("loss", "lse_squared", "lse", "log_probs", "entropy")  # those that `Sums.gradients` reads
CLASSES = 2**24  # a class that is a result is a number of the wide type


def as_rows(results: TokenResults, names: tuple[str, ...], ignored: Tensor) -> Tensor:
    """y [rows, M]."""
    rows = [getattr(results, name) for name in names]
    return torch.cat([one if one.dim() == 2 else one[None] for one in rows]).masked_fill(ignored, 0)


def of_rows(y: Tensor, names: tuple[str, ...]) -> TokenResults:
    """The inverse."""
    several, count = "top_k" if "top_k" in names else "log_probs", len(y) - len(names) + 1
    parts = y.split([count if name == several else 1 for name in names])
    named = zip(names, parts, strict=True)
    return TokenResults(**{name: one if name == several and count > 1 else one[0] for name, one in named})


def top_of(z: Tensor, k: int, first: int) -> tuple[Tensor, Tensor]:
    """(top_z, top_v) of logits [M, V] from class `first` on; -inf where there are fewer than k."""
    values, classes = z.topk(min(k, z.shape[1]), 1)
    beside = (0, k - values.shape[1])
    return F.pad(values, beside, value=-math.inf), F.pad((classes + first).to(z.dtype), beside)


def candidate_columns(candidates: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """(columns [M, k], is a candidate one of these `width` columns from class `first` on? [M, k])."""
    columns = candidates - first
    here = (columns >= 0) & (columns < width)
    return columns.masked_fill(~here, 0), here


def logits_of_candidates(z: Tensor, candidates: Tensor, first: int) -> Tensor:
    """[M, k] of logits [M, V] from class `first` on; 0 of a candidate that is not among these."""
    columns, here = candidate_columns(candidates, first, z.shape[1])
    return torch.where(here, z.gather(1, columns), 0) if z.shape[1] else z.new_zeros(candidates.shape)


def add_to_candidates(dz: Tensor, candidates: Tensor, gradients: Tensor, first: int) -> None:
    """Adds the gradients [M, k] of candidates' logits to dz [M, V] of the classes from `first` on."""
    columns, here = candidate_columns(candidates, first, dz.shape[1])
    if dz.shape[1]:
        dz.scatter_add_(1, columns, torch.where(here, gradients, 0).to(dz.dtype))


class Sums:
    """What a token's loss needs besides its statistics: the weight of its class, and label smoothing's share of all classes.

    loss = weight (1 - e) (lse - z_t) + e/V (sum_v w_v lse - wz),  e = label_smoothing
    """

    def __init__(
        self,
        target: Tensor,
        class_weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        entries,
        candidates: Tensor | None = None,
    ):
        self.target, self.ignored = target, target == ignore_index
        self.padding = None if candidates is None else (candidates == ignore_index).t()
        self.share = 1.0 - smoothing
        if class_weight is not None:
            self.share = class_weight[target.masked_fill(self.ignored, 0)] * self.share
        self.even = smoothing / entries if smoothing else None
        self.all = smoothing if class_weight is None or not smoothing else self.even * class_weight.sum()

    def results(self, s: TokenStatistics) -> TokenResults:
        loss = self.share * (s.lse - s.z_t)
        if s.z_c is not None:
            s = s._replace(z_t=s.z_c.t())
        if s.wz is not None:
            loss = loss + (self.all * s.lse - self.even * s.wz)
        log_probs = s.z_t - s.lse
        log_probs = log_probs if self.padding is None else log_probs.masked_fill(self.padding, 0)
        results = TokenResults(loss, lse_squared=s.lse.square(), lse=s.lse, log_probs=log_probs, entropy=s.entropy)
        if s.top_z is not None:
            results = results._replace(top_k=torch.cat([s.top_z.t() - s.lse, s.top_v.t()]))
        if s.arg_max is None:
            return results
        return results._replace(arg_max=s.arg_max, accuracy=(s.arg_max == self.target).to(s.lse.dtype))

    def gradients(self, dy: TokenResults, lse: Tensor, entropy: Tensor | None) -> TokenGradients:
        """The coefficients of dz, of the gradients of results, by

        d lse / dz_v = p_v,  d log_prob / dz_v = [v = target] - p_v,  d entropy / dz_v = -p_v (log p_v + entropy)
        """
        of_loss = None if dy.loss is None else self.share * dy.loss
        smoothed = dy.loss is not None and self.even is not None
        of_square = None if dy.lse_squared is None else 2 * lse * dy.lse_squared
        of_entropy = None if dy.entropy is None else dy.entropy * entropy
        of_others = self.all * dy.loss if smoothed else None
        return TokenGradients(
            p=total(dy.lse, of_square, of_loss, of_others, negative(dy.log_probs), negative(of_entropy)),
            z_t=total(dy.log_probs, negative(of_loss)),
            wz=-self.even * dy.loss if smoothed else None,
            p_log_p=negative(dy.entropy),
        )


def total(*terms: Tensor | None) -> Tensor | None:
    """The sum of those that are there."""
    return functools.reduce(torch.add, [one for one in terms if one is not None])


def negative(one: Tensor | None) -> Tensor | None:
    return None if one is None else one.neg()


def gathered(mine: TokenStatistics, entries: int, group: str, size: int) -> tuple[TokenStatistics, Tensor]:
    """(those of the whole vocabulary, its entries as a scalar tensor), from those of this rank's shard.

    One collective; ranks are combined in their order, so that all of them have equal bits.
    """
    sent = {name: one for name, one in mine._asdict().items() if one is not None}
    parts = torch.cat([*(one.reshape(-1) for one in sent.values()), mine.lse.new_full((1,), entries)])
    parts = torch.ops._c10d_functional.all_gather_into_tensor(parts, size, group)
    parts = torch.ops._c10d_functional.wait_tensor(parts).view(size, -1)
    split = parts[:, :-1].split([one.numel() for one in sent.values()], 1)
    theirs = zip(sent.items(), split, strict=True)
    ranks = TokenStatistics(**{name: part.view(size, *one.shape) for (name, one), part in theirs})
    return combined(ranks), parts[:, -1].sum()


def combined(ranks: TokenStatistics) -> TokenStatistics:
    """Those of the whole vocabulary, from those of its parts, each with an axis of parts in front, in their order."""
    z_t, wz, z_c = (None if one is None else one.sum(0) for one in (ranks.z_t, ranks.wz, ranks.z_c))
    whole = TokenStatistics(lse=torch.logsumexp(ranks.lse, 0), z_t=z_t, wz=wz, z_c=z_c)
    if ranks.entropy is not None:  # of shares p of the whole: sum_ranks p (entropy - log p), 0 where p is 0
        log_p = ranks.lse - whole.lse
        parts_of_it = log_p.exp() * (ranks.entropy - log_p)
        whole = whole._replace(entropy=parts_of_it.masked_fill(log_p == -torch.inf, 0).sum(0))
    if ranks.largest is not None:
        largest, rank = ranks.largest.max(0)
        whole = whole._replace(largest=largest, arg_max=ranks.arg_max.gather(0, rank[None])[0])
    if ranks.top_z is not None:
        top_z, top_v = (one.movedim(0, 1).flatten(1) for one in (ranks.top_z, ranks.top_v))
        top_z, places = top_z.topk(ranks.top_z.shape[-1], 1)
        whole = whole._replace(top_z=top_z, top_v=top_v.gather(1, places))
    return whole
