"""The divergence of a teacher's and a student's probabilities, from their LM heads: PyTorch ops, on any device.

With log q = z - lse(z) of the student's logits z, log p = t - lse(t) of the teacher's t, and m = beta p + (1 - beta) q,

    beta = 0        D = KL(p, q) = sum_v p (log p - log q)                  dD/dz = q - p
    0 < beta < 1    D = beta KL(p, m) + (1 - beta) KL(q, m)                 dD/dz = (1 - beta) q (log q - log m - KL(q, m))
    beta = 1        D = KL(q, p)                                            dD/dz = q (log q - log p - KL(q, p))

the generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649, equation 1); at beta = 0 and 1 the limits of the
divergence divided by beta and by 1 - beta.

For a class that a model is almost certain of, log q and log q - log m - KL are far smaller than their terms. So the largest
logit is subtracted first, then the logarithm of the sum; and KL is stored as two parts: log q - log m of the likeliest class
of q, and the contribution of all other classes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .cross_entropy import Head, head_logits, target_columns, write_gradient
from .elementwise import wide_of


class Model(NamedTuple):
    """An LM head and its input: x [M, d], w [V, d], b [V] or None, and the head's options."""

    x: Tensor
    w: Tensor
    b: Tensor | None
    head: Head


class Divergence(NamedTuple):
    """The divergence D of each token [M] and what backward needs: both models' normalizers [M, 2] and, for beta > 0, the class
    of the largest q, int64 [M], and the two parts of KL(q, m) [M, 2]; m = p at beta = 1."""

    value: Tensor
    normalizer: Tensor
    teacher_normalizer: Tensor
    likeliest: Tensor | None
    student_kl: Tensor | None


def log_probabilities(z: Tensor, model: Model, normalizer: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns z - logsumexp(z), in place, and logsumexp's two parts [M, 2]: the largest logit and log sum exp(z - largest). A
    bias of -inf gives a large negative finite number, so that 0 times it is 0."""
    if normalizer is None:
        largest = z.amax(1, keepdim=True)
        normalizer = torch.cat([largest, (z - largest).exp_().sum(1, keepdim=True).log_()], 1)
    log_p = z.sub_(normalizer[:, :1]).sub_(normalizer[:, 1:])
    return log_p if model.b is None else log_p.clamp_(min=torch.finfo(z.dtype).min / 4), normalizer


def teachers_logits(teacher: Model, dtype: torch.dtype) -> Tensor:
    """Returns the teacher's logits in the student's wide type."""
    if wide_of(teacher.x.dtype) != dtype:  # one of the two is float64
        teacher = teacher._replace(x=teacher.x.to(dtype), w=teacher.w.to(dtype))
    return head_logits(*teacher)[1]


def above_mixture(ratio: Tensor, share: float, other: float) -> Tensor:
    """Computes log q - log m for m = share q + other p, in the memory of ratio = log q - log p. With p and q exchanged it is
    log p - log m. Where p and q agree the ratio is small, unlike log q and log m, and so is its rounding error."""
    if share == 0:
        return ratio  # m = p
    of_other = ratio.neg_().add_(math.log(other))
    return torch.logaddexp(of_other, of_other.new_full((), math.log(share)), out=of_other).neg_()


def divergence_fwd(student: Model, teacher: Model, beta: float) -> Divergence:
    z = head_logits(*student)[1]
    if not z.shape[1]:
        nothing, two = z.new_zeros(len(z)), z.new_zeros(len(z), 2)
        return Divergence(nothing, two, two.clone(), *((nothing.long(), two.clone()) if beta else (None, None)))
    log_q, normalizer = log_probabilities(z, student)
    log_p, teacher_normalizer = log_probabilities(teachers_logits(teacher, z.dtype), teacher)
    if beta == 0:
        p = log_p.exp()
        return Divergence(p.mul_(log_p.sub_(log_q)).sum(1), normalizer, teacher_normalizer, None, None)
    likeliest = log_q.argmax(1)
    ratio = log_q - log_p
    value = 0.0 if beta == 1 else log_p.exp_().mul_(above_mixture(-ratio, beta, 1 - beta)).sum(1).mul_(beta)
    of_q = above_mixture(ratio, 1 - beta, beta)
    of_likeliest = of_q.gather(1, likeliest[:, None])
    others = log_q.exp_().mul_(of_q.sub_(of_likeliest)).sum(1, keepdim=True)
    student_kl = torch.cat([of_likeliest, others], 1)
    value = student_kl.sum(1).mul_(share_of_student(beta)).add_(value)
    return Divergence(value, normalizer, teacher_normalizer, likeliest, student_kl)


def share_of_student(beta: float) -> float:
    return 1 - beta if 0 < beta < 1 else 1.0


def divergence_bwd(
    student: Model,
    teacher: Model,
    beta: float,
    of: Divergence,
    dy: Tensor,
    ignored: Tensor | None,
    out: Tensor,
    *,
    db: bool,
) -> Tensor | None:
    """Writes the gradient of sum(dy D), dy [M], for the logits before scale and softcap to `out`; returns its sum over rows if
    `db`."""
    head = student.head
    u, z = head_logits(*student, out)
    log_q, _ = log_probabilities(z, student, of.normalizer)
    log_p, _ = log_probabilities(teachers_logits(teacher, u.dtype), teacher, of.teacher_normalizer)
    if beta == 0:
        dz = log_q.exp_().sub_(log_p.exp_())
    else:
        of_q = above_mixture(torch.sub(log_q, log_p, out=log_p), 1 - beta, beta)
        above_likeliest = of_q.sub_(of.student_kl[:, :1])
        # exactly 0 for that class: a matmul of other shapes than forward's may have rounded its logit differently
        column, here = target_columns(of.likeliest[:, None], head, out.shape[1])
        above_likeliest.scatter_(1, column, torch.where(here, 0, above_likeliest.gather(1, column)))
        dz = log_q.exp_().mul_(above_likeliest.sub_(of.student_kl[:, 1:]))
    dz.mul_((dy * (share_of_student(beta) * head.scale))[:, None])
    return write_gradient(dz, u, head.softcap, 1.0, ignored, out, db)
