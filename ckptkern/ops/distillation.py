"""Defines linear_distillation and linear_topk_distillation: the divergence of a student's probabilities, softmax(x w^T + b),
from a teacher's, given by its LM head or as k log-probabilities; without storing the logits."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import eager
from ..errors import DtypeError, ShapeError
from .cross_entropy.loss import REDUCTIONS, public, reduced_over, token_results
from .cross_entropy.op import head_gradients, vocabulary_chunks
from .cross_entropy.statistics import reference_logits
from .dispatch.choices import (
    WORKSPACE_OF_LOSS,
    Bytes,
    cast_input,
    check_choice,
    check_flags,
    check_input,
    check_number,
    check_positive,
    check_softcap,
    check_tensor,
    check_weight,
    choose_backend,
    choose_workspace,
)
from .registration.functions import build
from .registration.op import Op, beside_frozen, by_chunks, cast_parameter, rows_2d, token_chunks

NAME = "linear_distillation"
X, W, B, TEACHER_X, TEACHER_W, TEACHER_B, MASK = range(7)
TOKENS = 16  # least tokens of a chunk: no kernel's tile needs more


class LinearDistillationOptions(NamedTuple):
    beta: float
    temperature: float
    softcap: float
    teacher_softcap: float
    backend: str
    workspace: int


def models(tensors, o: LinearDistillationOptions) -> tuple[LinearDistillationOptions, eager.Model, eager.Model]:
    """Returns the options with the workspace that Frozen weights leave, the student's model and the teacher's.

    Each model has parameters in the dtype of its x, and z = softcap tanh(x w^T / softcap) / temperature.
    """
    o, _ = beside_frozen((tensors[W], tensors[TEACHER_W]), o, tensors[X].dtype)
    pair = []
    for cap, (x, w, b) in ((o.softcap, tensors[:3]), (o.teacher_softcap, tensors[3:6])):
        head = eager.Head(1.0 / o.temperature, cap / o.temperature)
        pair.append(eager.Model(rows_2d(x), cast_parameter(w, x.dtype), cast_parameter(b, x.dtype), head))
    return o, *pair


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

        def divergence(start, stop):
            pair = (model._replace(x=model.x[start:stop]) for model in (student, teacher))
            result = eager.divergence_fwd(*pair, o.beta)
            return {name: tensor for name, tensor in result._asdict().items() if tensor is not None}

        buffers = 4 if 0 < o.beta < 1 else 3
        per_token = buffers * eager.wide_of(student.x.dtype).itemsize * student.w.shape[0]
        results = by_chunks(token_chunks(student.x.shape[0], per_token, o.workspace, TOKENS), divergence)
        y = results.pop("value")
        return y if mask is None else y.masked_fill(~mask.reshape(-1), 0), results

    @staticmethod
    def backward(dy, tensors, saved, o, needs):
        mask, (o, student, teacher) = tensors[MASK], models(tensors, o)
        dtype, (M, d), V = student.x.dtype, student.x.shape, student.w.shape[0]
        statistics = eager.Divergence(dy, **{"likeliest": None, "student_kl": None} | saved)
        ignored = None if mask is None else ~mask.reshape(-1)
        narrow = int(dtype != dy.dtype)
        held = narrow + 1 + (o.softcap > 0) + (o.teacher_softcap > 0)
        widest = max(d, teacher.x.shape[1])
        transient = M * dtype.itemsize + dy.itemsize * (M * held + (M + 2 * widest) * narrow)

        def write(start, stop, dz, db):
            pair = of_entries(student, start, stop), of_entries(teacher, start, stop)
            return eager.divergence_bwd(*pair, o.beta, statistics, dy, ignored, dz, db=db)

        chunks, parameters = vocabulary_chunks(V, transient, o.workspace), (tensors[W], student.w, tensors[B])
        grads = head_gradients(write, tensors[X], student.x, *parameters, dy, dtype, needs, chunks)
        return *grads, None, None, None, None

    @staticmethod
    def reference(tensors, o):
        x, w, b, *teacher, mask = tensors
        counted = None if mask is None else mask.reshape(-1, 1)

        def log_probabilities(x, w, b, softcap):
            z = reference_logits(rows_2d(x), w, b, 1.0 / o.temperature, softcap / o.temperature)
            if counted is not None:
                z = z.masked_fill(~counted, 0)  # infinite logits of ignored tokens would make derivatives NaN
            log_p = torch.log_softmax(z, 1)
            return log_p if b is None else log_p.clamp_min(torch.finfo(z.dtype).min)

        log_q = log_probabilities(x, w, b, o.softcap)
        teacher_x, *parameters = (None if tensor is None else tensor.detach() for tensor in teacher)
        teacher_x = teacher_x.to(torch.promote_types(teacher_x.dtype, log_q.dtype))
        log_p = log_probabilities(teacher_x, *parameters, o.teacher_softcap).to(log_q.dtype)
        y = divergence(log_p, log_q, o.beta).sum(1)
        return y if mask is None else y.masked_fill(~mask.reshape(-1), 0)


def divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Computes each class's part of D_beta(p, q) in differentiable PyTorch ops; their sum is the divergence of
    `eager.distillation`."""
    if beta == 0:
        return log_p.exp() * (log_p - log_q)
    if beta == 1:
        return log_q.exp() * (log_q - log_p)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * log_p.exp() * (log_p - log_m) + (1 - beta) * log_q.exp() * (log_q - log_m)


apply = build(LinearDistillation)


TOPK, PADDING = "linear_topk_distillation", -100


def linear_distillation(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
    workspace: Bytes = None,
) -> Tensor:
    """Computes the divergence of a student's next-token probabilities q from a teacher's p, without storing all logits.

    student_input [..., d], student_weight [V, d], student_bias [V]; teacher_input [..., e], teacher_weight [V, e], teacher_bias
    [V] -> the loss in float32 (float64 for float64): a scalar, or [...] for reduction "none". The teacher may have another
    dtype, and gets no gradient.

    beta: 0, KL(p, q) = sum_v p_v log(p_v / q_v); 1, KL(q, p); between them beta KL(p, m) + (1 - beta) KL(q, m), m = beta p + (1
        - beta) q (GKD, arXiv 2306.13649, equation 1).
    temperature: divides both models' logits. The loss is not multiplied by its square.
    softcap, teacher_softcap: c, for c tanh(logits / c) before the temperature.
    mask: bool [...], the tokens that count, such as labels != -100; None for all.
    reduction: "mean" over the tokens that count; "sum"; "none", 0 for other tokens.
    workspace: forward takes chunks of at least 16 tokens, backward of at least 256 classes.

    Saves 16 bytes per token besides the arguments, 32 for beta > 0. Runs four matmuls of the student's weight and two of the
    teacher's, in PyTorch ops: backend("triton") raises.
    Raises: see Conventions.
    """
    check_input(NAME, student_input, "student_input")
    lead, d = student_input.shape[:-1], student_input.shape[-1]
    check_weight(NAME, "student_weight", student_weight, student_bias, student_input, d, "student_input")
    check_input(NAME, teacher_input, "teacher_input")
    check_tensor(NAME, "teacher_input", teacher_input, student_input)
    of_teacher = teacher_weight, teacher_bias, teacher_input, teacher_input.shape[-1]
    check_weight(NAME, "teacher_weight", *of_teacher, "teacher_input")
    if teacher_input.shape[:-1] != lead:
        raise ShapeError(
            f"{NAME}: teacher_input must have the student's leading shape {tuple(lead)}, but has "
            f"{tuple(teacher_input.shape[:-1])}"
        )
    if teacher_weight.shape[0] != student_weight.shape[0]:
        raise ShapeError(
            f"{NAME}: student_weight has {student_weight.shape[0]} classes but teacher_weight has {teacher_weight.shape[0]}; "
            "both models need one vocabulary: slice off rows that only pad it"
        )
    check_options(NAME, beta, temperature, mask, reduction, student_input)
    x = cast_input(NAME, student_input, student_weight)
    teacher = cast_input(NAME, teacher_input, teacher_weight)
    o = LinearDistillationOptions(
        beta=float(beta),
        temperature=float(temperature),
        softcap=check_softcap(NAME, softcap),
        teacher_softcap=check_softcap(NAME, teacher_softcap, "teacher_softcap"),
        backend=choose_backend(NAME, x, "the op has no kernel"),
        workspace=choose_workspace(NAME, workspace, x, least=WORKSPACE_OF_LOSS),
    )
    frozen = (None if tensor is None else tensor.detach() for tensor in (teacher, teacher_weight, teacher_bias))
    losses = apply(o, x, student_weight, student_bias, *frozen, mask)
    return reduced_over(losses, reduction, losses.shape[0] if mask is None else mask.sum(), lead)


def check_options(op: str, beta: float, temperature: float, mask: Tensor | None, reduction: str, x: Tensor) -> None:
    check_number(op, "beta", beta)
    if not 0 <= beta <= 1:
        raise ValueError(f"{op}: beta must be between 0 (forward KL) and 1 (reverse KL), not {beta}")
    check_positive(op, "temperature", temperature)
    check_choice(op, "reduction", reduction, REDUCTIONS)
    if mask is None:
        return
    check_tensor(op, "mask", mask, x, floating=False)
    if mask.dtype != torch.bool:
        raise DtypeError(f"{op}: mask must be bool, True for tokens that count, not {mask.dtype}")
    if mask.shape != x.shape[:-1]:
        raise ShapeError(f"{op}: mask must have shape {tuple(x.shape[:-1])}, but has {tuple(mask.shape)}")


def linear_topk_distillation(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_log_probs: Tensor,
    teacher_tokens: Tensor,
    *,
    student_bias: Tensor | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    add_tail_bucket: bool = True,
    mask: Tensor | None = None,
    reduction: str = "mean",
    group: torch.distributed.ProcessGroup | None = None,
    vocab_start: int | None = None,
    workspace: Bytes = None,
) -> Tensor:
    """Computes the divergence of a student from a teacher's k log-probabilities per token, such as vLLM's prompt_logprobs.

    student_input [..., d], student_weight [V, d], student_bias [V]; teacher_log_probs [..., k], teacher_tokens int64 [..., k],
    distinct classes -> the loss, as from linear_distillation. A log-probability of -inf or a token of -100 is padding. The
    teacher gets no gradient.

    add_tail_bucket: True compares p_1 ... p_k, 1 - sum_i p_i with the same of q: all other tokens are one class. False compares
        p_i / sum_j p_j with q_i / sum_j q_j, blind to the student's other tokens. As in TRL.
    beta, mask, reduction: see linear_distillation. The teacher's k tokens tell little for the reverse KL.
    temperature: divides the student's logits; the teacher's log-probabilities should have been computed with it.
    group, vocab_start, workspace: see linear_cross_entropy.

    Saves what selected_log_probs saves, and some numbers for each of k.
    Raises what linear_cross_entropy raises.
    """
    check_flags(TOPK, add_tail_bucket=add_tail_bucket)
    check_input(TOPK, student_input, "student_input")
    check_options(TOPK, beta, temperature, mask, reduction, student_input)
    check_tensor(TOPK, "teacher_log_probs", teacher_log_probs, student_input)
    lead = student_input.shape[:-1]
    shape = tuple(teacher_log_probs.shape)
    if len(shape) != student_input.dim() or shape[:-1] != lead or shape[-1] == 0:
        raise ShapeError(f"{TOPK}: teacher_log_probs must have shape {(*lead, 'k')} with k > 0, but has {shape}")
    check_tensor(TOPK, "teacher_tokens", teacher_tokens, student_input, floating=False)
    if teacher_tokens.shape != teacher_log_probs.shape:
        raise ShapeError(
            f"{TOPK}: teacher_tokens must have the shape of teacher_log_probs, {tuple(teacher_log_probs.shape)}, but has "
            f"{tuple(teacher_tokens.shape)}"
        )
    padding = (teacher_log_probs == -torch.inf) | (teacher_tokens == PADDING)
    if mask is not None:
        padding = padding | ~mask[..., None]
    results = token_results(
        TOPK,
        ("student_input", "student_weight", "teacher_tokens"),
        student_input,
        student_weight,
        student_bias,
        teacher_tokens.masked_fill(padding, PADDING),
        ("log_probs",),
        None,
        group,
        vocab_start,
        workspace,
        "full",
        ignore_index=PADDING,
        logit_scale=1.0 / temperature,
    )
    log_q = public(results, lead)["log_probs"].view(padding.shape)
    both = teacher_log_probs.detach().to(log_q.dtype), log_q
    log_p, log_q = (distribution(log_probs, padding, add_tail_bucket) for log_probs in both)
    losses = divergence(log_p, log_q, beta).sum(-1).view(-1)
    return reduced_over(losses, reduction, losses.shape[0] if mask is None else mask.sum(), lead)


def distribution(log_probs: Tensor, padding: Tensor, add_tail_bucket: bool) -> Tensor:
    """Returns normalised log-probabilities [..., k + 1] or [..., k]; equal ones where all are padding."""
    least = torch.finfo(log_probs.dtype).min / 2  # acts as -inf, but differences stay finite
    log_probs = log_probs.masked_fill(padding, least).clamp_min(least)
    if not add_tail_bucket:
        return log_probs.log_softmax(-1)
    inside = log_probs.exp().sum(-1, keepdim=True).clamp_max(1 - torch.finfo(log_probs.dtype).eps)
    return torch.cat([log_probs, torch.log1p(-inside)], -1)
