"""The divergence of a teacher's and a student's probabilities, from their heads: PyTorch ops, on any device.

Of logits z and t, with log q = z - lse(z) of the student, log p = t - lse(t) of the teacher and m = beta p + (1 - beta) q,

    beta = 0        D = KL(p, q) = sum_v p (log p - log q)                  dD/dz = q - p
    0 < beta < 1    D = beta KL(p, m) + (1 - beta) KL(q, m)                 dD/dz = (1 - beta) q (log q - log m - KL(q, m))
    beta = 1        D = KL(q, p)                                            dD/dz = q (log q - log p - KL(q, p))

the generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649, equation 1), with the two divergences that its quotients
by beta and 1 - beta tend to at its ends.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .cross_entropy import Head, capped, uncapped_logits
from .elementwise import wide_of


class Model(NamedTuple):
    """x [M, d], w [V, d] and b [V] or None, and what makes logits of them."""

    x: Tensor
    w: Tensor
    b: Tensor | None
    head: Head


class Divergence(NamedTuple):
    """Of each token, [M] in the wide type: D, lse of both models' logits, and for beta > 0 the student's KL(q, m); m = p at
    beta = 1."""

    value: Tensor
    lse: Tensor
    teacher_lse: Tensor
    student_kl: Tensor | None


def log_probabilities(z: Tensor, model: Model, lse: Tensor) -> Tensor:
    """z - lse, in the memory of z; the least number where a bias says -inf, so that 0 times it is 0."""
    log_p = z.sub_(lse[:, None])
    return log_p if model.b is None else log_p.clamp_(min=torch.finfo(z.dtype).min)


def teachers_logits(teacher: Model, dtype: torch.dtype) -> Tensor:
    """In the student's wide type."""
    if wide_of(teacher.x.dtype) != dtype:  # one of the two is float64
        teacher = teacher._replace(x=teacher.x.to(dtype), w=teacher.w.to(dtype))
    return capped(uncapped_logits(*teacher), teacher.head)


def log_mixture(log_p: Tensor, log_q: Tensor, beta: float, out: Tensor | None = None) -> Tensor:
    """log m; log p itself for beta = 1."""
    if beta == 1:
        return log_p
    odds = torch.add(log_p, math.log(beta / (1 - beta)), out=out)
    return torch.logaddexp(odds, log_q, out=odds).add_(math.log1p(-beta))


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p, q) of each token, in the memory of log_p and of another buffer."""
    p = log_p.exp()
    return p.mul_(log_p.sub_(log_q)).sum(1)


def divergence_fwd(student: Model, teacher: Model, beta: float) -> Divergence:
    z = capped(uncapped_logits(*student), student.head)
    lse = torch.logsumexp(z, 1)
    log_q = log_probabilities(z, student, lse)
    t = teachers_logits(teacher, z.dtype)
    teacher_lse = torch.logsumexp(t, 1)
    log_p = log_probabilities(t, teacher, teacher_lse)
    if beta == 0:
        return Divergence(kl(log_p, log_q), lse, teacher_lse, None)
    log_m = log_mixture(log_p, log_q, beta)
    student_kl = kl(log_q, log_m)
    if beta == 1:
        return Divergence(student_kl.clone(), lse, teacher_lse, student_kl)  # two results of an op are two tensors
    return Divergence(kl(log_p, log_m).mul_(beta).add_(student_kl, alpha=1 - beta), lse, teacher_lse, student_kl)


def divergence_bwd(
    student: Model, teacher: Model, beta: float, of: Divergence, dy: Tensor, ignored: Tensor | None, out: Tensor, *, db: bool
) -> Tensor | None:  # fmt: skip
    """out = the gradient of D times dy [M] for the logits before scale and softcap; returns the sum of its rows, if `db`."""
    head = student.head
    u = uncapped_logits(*student, None if head.softcap else out)
    log_q = log_probabilities(capped(u, head), student, of.lse)
    log_p = log_probabilities(teachers_logits(teacher, u.dtype), teacher, of.teacher_lse)
    if beta == 0:
        dz = log_q.exp_().sub_(log_p.exp_())
    else:
        log_m = log_mixture(log_p, log_q, beta, out=log_p)
        of_q = torch.sub(log_q, log_m, out=log_m).sub_(of.student_kl[:, None])
        dz = log_q.exp_().mul_(of_q)
    share = 1 - beta if 0 < beta < 1 else 1.0
    dz.mul_((dy * (share * head.scale))[:, None])
    if head.softcap:
        dz.mul_((u / head.softcap).tanh_().square_().neg_().add_(1))
    if ignored is not None:
        dz.masked_fill_(ignored[:, None], 0)
    if dz is not out:
        out.copy_(dz)
    return dz.sum(0) if db else None
