"""The op linear_distillation: the divergence of softmax(x w^T + b) and the teacher's softmax, without logits that are
stored."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ... import eager
from ..cross_entropy.op import head_gradients, vocabulary_chunks
from ..cross_entropy.statistics import reference_logits
from ..registration.functions import build
from ..registration.op import Op, beside_frozen, by_chunks, cast_parameter, rows_2d, token_chunks

NAME = "linear_distillation"
X, W, B, TEACHER_X, TEACHER_W, TEACHER_B, MASK = range(7)
TOKENS = 16  # of a chunk at least: no kernel's tile asks for more


class LinearDistillationOptions(NamedTuple):
    beta: float
    temperature: float
    softcap: float
    teacher_softcap: float
    backend: str
    workspace: int


def models(tensors, o: LinearDistillationOptions) -> tuple[LinearDistillationOptions, eager.Model, eager.Model]:
    """(the options, whose workspace is what Frozen weights leave of it; the student's model and the teacher's, each with
    parameters in the dtype of its x and z = softcap tanh(x w^T / softcap) / temperature)."""
    o, _ = beside_frozen((tensors[W], tensors[TEACHER_W]), o, tensors[X].dtype)
    found = []
    for cap, (x, w, b) in ((o.softcap, tensors[:3]), (o.teacher_softcap, tensors[3:6])):
        head = eager.Head(1.0 / o.temperature, cap / o.temperature)
        found.append(eager.Model(rows_2d(x), cast_parameter(w, x.dtype), cast_parameter(b, x.dtype), head))
    return o, *found


def of_entries(model: eager.Model, start: int, stop: int) -> eager.Model:
    b = None if model.b is None else model.b[start:stop]
    return model._replace(w=model.w[start:stop], b=b, head=model.head._replace(first=start))


class LinearDistillation(Op):
    name = NAME
    Options = LinearDistillationOptions
    constants = frozenset({TEACHER_X, TEACHER_W, TEACHER_B, MASK})
    kernels = False

    @staticmethod
    def saves(o):
        return ("normalizer", "teacher_normalizer", *(("likeliest", "student_kl") if o.beta else ()))

    @staticmethod
    def forward(tensors, o):
        mask, (o, student, teacher) = tensors[MASK], models(tensors, o)

        def divergence(start: int, stop: int) -> dict[str, Tensor]:
            pair = (model._replace(x=model.x[start:stop]) for model in (student, teacher))
            found = eager.divergence_fwd(*pair, o.beta)
            return {name: one for name, one in found._asdict().items() if one is not None}

        buffers = 4 if 0 < o.beta < 1 else 3
        per_token = buffers * eager.wide_of(student.x.dtype).itemsize * student.w.shape[0]
        made = by_chunks(token_chunks(student.x.shape[0], per_token, o.workspace, TOKENS), divergence)
        y = made.pop("value")
        return y if mask is None else y.masked_fill(~mask.reshape(-1), 0), made

    @staticmethod
    def backward(dy, tensors, saved, o, needs):
        mask, (o, student, teacher) = tensors[MASK], models(tensors, o)
        dtype, (M, d), V = student.x.dtype, student.x.shape, student.w.shape[0]
        found = eager.Divergence(dy, **{"likeliest": None, "student_kl": None} | saved)
        ignored = None if mask is None else ~mask.reshape(-1)
        narrow = int(dtype != dy.dtype)
        held = 4 if o.softcap else narrow + 1 + (o.teacher_softcap > 0)
        widest = max(d, teacher.x.shape[1])
        transient = M * dtype.itemsize + dy.dtype.itemsize * (M * held + (M + 2 * widest) * narrow)

        def write(start: int, stop: int, dz: Tensor, db: bool) -> Tensor | None:
            pair = of_entries(student, start, stop), of_entries(teacher, start, stop)
            return eager.divergence_bwd(*pair, o.beta, found, dy, ignored, dz, db=db)

        chunks, given = vocabulary_chunks(V, transient, o.workspace), (tensors[W], student.w, tensors[B])
        grads = head_gradients(write, tensors[X], student.x, *given, dy, dtype, needs, chunks)
        return *grads, None, None, None, None

    @staticmethod
    def reference(tensors, o):
        x, w, b, *teacher, mask = tensors
        counted = None if mask is None else mask.reshape(-1, 1)

        def log_probabilities(x, w, b, softcap: float) -> Tensor:
            z = reference_logits(rows_2d(x), w, b, 1.0 / o.temperature, softcap / o.temperature)
            if counted is not None:
                z = z.masked_fill(~counted, 0)  # where these are infinite, derivatives would be NaN
            log_p = torch.log_softmax(z, 1)
            return log_p if b is None else log_p.clamp_min(torch.finfo(z.dtype).min)

        log_q = log_probabilities(x, w, b, o.softcap)
        teacher_x, *parameters = (None if one is None else one.detach() for one in teacher)
        teacher_x = teacher_x.to(torch.promote_types(teacher_x.dtype, log_q.dtype))
        log_p = log_probabilities(teacher_x, *parameters, o.teacher_softcap).to(log_q.dtype)
        y = divergence(log_p, log_q, o.beta).sum(1)
        return y if mask is None else y.masked_fill(~mask.reshape(-1), 0)


def divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Returns the part of D_beta(p, q) of each class, in differentiable PyTorch ops: its sum over the classes is the divergence
    of `eager.distillation`."""
    if beta == 0:
        return log_p.exp() * (log_p - log_q)
    if beta == 1:
        return log_q.exp() * (log_q - log_p)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * log_p.exp() * (log_p - log_m) + (1 - beta) * log_q.exp() * (log_q - log_m)


apply = build(LinearDistillation)
