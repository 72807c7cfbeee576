"""Defines language-model heads with their losses in eager PyTorch, and as `ours` on the same parameters by ckptkern."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .. import ops


class LMHeadLoss(nn.Module):
    """Cross-entropy of softcap tanh(linear(x) / softcap), of each row in float32 or as a mean. A row's index determines its
    target. float64 takes the rows in chunks, because logits of a large vocabulary do not fit a GPU."""

    CHUNK = 2**27  # logits of a chunk in float64: 1 GiB
    negative = False  # returns losses, or their negatives

    def __init__(
        self, width: int, classes: int, bias: bool = False, softcap: float | None = None, reduction: str = "none"
    ):
        super().__init__()
        self.linear, self.softcap, self.reduction = nn.Linear(width, classes, bias), softcap, reduction

    def targets(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[0], device=x.device) * 40503 % self.linear.out_features

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of each row."""
        z = _upcast(self.linear(x))
        z = self.softcap * torch.tanh(z / self.softcap) if self.softcap else z
        return F.cross_entropy(z, targets, reduction="none")

    def chunked(self, x: Tensor, rows: int) -> Tensor:
        """Returns the loss of each row, in checkpointed chunks of `rows`."""
        chunks = zip(x.split(rows), self.targets(x).split(rows), strict=True)
        return torch.cat([checkpoint(self.losses, *chunk, use_reentrant=False) for chunk in chunks])

    def signed(self, losses: Tensor) -> Tensor:
        return losses.neg() if self.negative else losses

    def reduced(self, losses: Tensor) -> Tensor:
        return self.signed(losses.mean() if self.reduction == "mean" else losses)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return self.reduced(self.chunked(x, max(1, self.CHUNK // self.linear.out_features)))
        return self.reduced(self.losses(x, self.targets(x)))

    def ours(self, x: Tensor, mode: str) -> Tensor:
        options = dict(softcap=self.softcap, reduction=self.reduction, recompute=mode)
        head = self.linear
        return ops.linear_cross_entropy(x, head.weight, self.targets(x), linear_bias=head.bias, **options)


def _upcast(z: Tensor) -> Tensor:
    """Returns logits in float32; float64 stays."""
    return z if z.dtype == torch.float64 else z.float()


class Distillation(LMHeadLoss):
    """KL divergence of each row's probabilities from a teacher's, or their mean. The teacher's head has its own weights and
    reads the same rows. top_k: from the teacher's k largest probabilities, and the rest as one class."""

    def __init__(self, width: int, classes: int, bias: bool = False, top_k: int = 0, reduction: str = "none"):
        super().__init__(width, classes, bias, reduction=reduction)
        self.teacher, self.top_k = nn.Linear(width, classes, bias).requires_grad_(False), top_k

    def likeliest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the teacher's k largest log-probabilities and their classes."""
        return _upcast(self.teacher(x.detach())).log_softmax(-1).topk(self.top_k)

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Returns the divergence of each row, which has no target."""
        log_q = _upcast(self.linear(x)).log_softmax(-1)
        if not self.top_k:
            t = self.teacher(x.detach())
            return F.kl_div(log_q, t.to(log_q.dtype).log_softmax(-1), reduction="none", log_target=True).sum(-1)
        log_p, tokens = self.likeliest(x)
        log_p, log_q = (
            torch.cat([log_of_top, torch.log1p(-log_of_top.exp().sum(-1, keepdim=True))], -1)
            for log_of_top in (log_p, log_q.gather(-1, tokens))
        )
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)

    def ours(self, x: Tensor, mode: str) -> Tensor:
        head, options = self.linear, dict(student_bias=self.linear.bias, reduction=self.reduction)
        if self.top_k:
            return ops.linear_topk_distillation(x, head.weight, *self.likeliest(x), **options)
        teacher = self.teacher
        return ops.linear_distillation(x, head.weight, x, teacher.weight, teacher_bias=teacher.bias, **options)


class SelectedLogProbs(LMHeadLoss):
    """Log-probability of each row's target."""

    negative = True

    def ours(self, x: Tensor, mode: str) -> Tensor:
        head = self.linear
        return ops.selected_log_probs(x, head.weight, self.targets(x), bias=head.bias, recompute=mode)
