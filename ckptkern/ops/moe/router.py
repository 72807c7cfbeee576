"""The router of an MoE layer: scores of logits, the choice of experts, and their weights.

s = softmax(logits) or sigmoid(logits)                    [..., E]
index = top_k of s + score_bias, in the best groups       [..., k], a decision: saved, never recomputed
w = s[index] [/ sum of these] * routed_scaling_factor     [..., k]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import eager

SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("top2", "max")
SMALLEST_SUM = 1e-20  # is added to a sum of sigmoids, which may all be 0 in float32 (DeepSeek-V3)


def scores_of(logits: Tensor, o: Any) -> Tensor:
    """s in float32 at least."""
    logits = logits.to(eager.wide_of(logits.dtype))
    return torch.softmax(logits, -1) if o.scoring == "softmax" else torch.sigmoid(logits)


def chosen(scores: Tensor, score_bias: Tensor | None, o: Any) -> Tensor:
    """index int64. Groups of E / num_groups experts are ranked by the sum of their two best scores ("top2": DeepSeek-V3, arXiv
    2412.19437) or by their best one ("max": DeepSeek-V2, arXiv 2405.04434), the bias included."""
    with torch.no_grad():
        ranked = scores.detach() if score_bias is None else scores.detach() + score_bias.to(scores.dtype)
        if o.num_groups > 1:
            grouped = ranked.unflatten(-1, (o.num_groups, -1))
            best = grouped.topk(1 if o.group_score == "max" else min(2, grouped.shape[-1]), -1).values.sum(-1)
            groups = best.topk(o.top_groups, -1).indices
            hidden = torch.ones_like(best, dtype=torch.bool).scatter(-1, groups, False)
            ranked = grouped.masked_fill(hidden[..., None], -torch.inf).flatten(-2)
        return ranked.topk(o.top_k, -1).indices


def weights_of(scores: Tensor, index: Tensor, o: Any) -> Tensor:
    """w in the scores' dtype."""
    w = scores.gather(-1, index)
    w = w / (w.sum(-1, keepdim=True) + SMALLEST_SUM) if o.normalize else w
    return w if o.routed_scaling_factor == 1.0 else w * o.routed_scaling_factor


def logits_gradient(dw: Tensor, scores: Tensor, index: Tensor, o: Any) -> Tensor:
    """The gradient of the logits [T, E] from that of w [T, k], in the scores' dtype."""
    s, ds = scores.gather(-1, index), dw.to(scores.dtype) * o.routed_scaling_factor
    if o.normalize:
        total = s.sum(-1, keepdim=True) + SMALLEST_SUM
        ds = (ds - (ds * s).sum(-1, keepdim=True) / total) / total
    if o.scoring == "sigmoid":
        return torch.zeros_like(scores).scatter_(-1, index, ds * s * (1 - s))
    inner = (ds * s).sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter_(-1, index, ds).sub_(inner).mul_(scores)
