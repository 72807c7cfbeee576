"""Defines linear_distillation: the divergence of a student's probabilities from a teacher's, from both models' LM heads."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import DtypeError, ShapeError
from ..cross_entropy.loss import reduced_over
from ..dispatch.checks import check_choice, check_input, check_number, check_tensor, check_weight
from ..dispatch.choices import WORKSPACE_OF_LOSS, cast_input, choose_backend, choose_workspace
from .op import NAME, LinearDistillationOptions, apply

REDUCTIONS = ("none", "mean", "sum")


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
    workspace: int | str | None = None,
) -> Tensor:
    """Computes the divergence of a student's next-token probabilities q from a teacher's p, and never holds all logits.

    student_input [..., d], student_weight [V, d], student_bias [V]; teacher_input [..., e], teacher_weight [V, e], teacher_bias
    [V] -> the loss in float32 (float64 for float64): a scalar, or [...] for reduction "none". float16, bfloat16, float32,
    float64, of the teacher another one if it likes; autocast's type inside torch.autocast. Logits are float32 and never
    rounded. The teacher gets no gradient.

    beta: 0, KL(p, q) = sum_v p_v log(p_v / q_v), the forward KL divergence; 1, KL(q, p), the reverse one; between them the
        generalised Jensen-Shannon divergence beta KL(p, m) + (1 - beta) KL(q, m), m = beta p + (1 - beta) q, as in GKD (arXiv
        2306.13649, equation 1), TRL and Liger.
    temperature: a positive number that both models' logits are divided by. The loss is not multiplied by its square.
    softcap, teacher_softcap: c tanh(logits / c) before that, as in Gemma 2. A scale of logits (Cohere) is one of the input.
    mask: bool [...], the tokens that count, such as labels != -100; None for all.
    reduction: "mean" divides by the number of tokens that count, "sum", "none", with 0 for tokens that do not count.
    workspace: bytes of transient memory in each pass, an int or "64MiB": forward takes tokens in equal chunks that fit, of 16 at
        least, and backward the vocabulary, of 256 classes at least. Default: ckptkern.workspace. A chunk's rows of
        student_weight's gradient are final, rounded once; the float32 sum of student_input's gradient is not counted.

    Saves for backward, besides the arguments, the logsumexp of both models' logits, 8 bytes a token, and for beta > 0 the
    student's part of the divergence, 4 more. Runs four matmuls of the student's weight and two of the teacher's. PyTorch ops on
    every device: backend("triton") is an error.
    Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError, TypeError, RuntimeError (backend).
    """
    given = student_input, student_weight, teacher_input, teacher_weight, student_bias, teacher_bias
    check_models(*given)
    check_options(NAME, beta, temperature, mask, reduction, student_input)
    for name, value in (("softcap", softcap), ("teacher_softcap", teacher_softcap)):
        if value is not None:
            check_positive(NAME, name, value, " or None")
    x = cast_input(NAME, student_input, student_weight)
    teacher = cast_input(NAME, teacher_input, teacher_weight)
    o = LinearDistillationOptions(
        beta=float(beta), temperature=float(temperature), softcap=float(softcap or 0.0),
        teacher_softcap=float(teacher_softcap or 0.0), backend=choose_backend(NAME, x, "there is no kernel of it"),
        workspace=choose_workspace(NAME, workspace, x, least=WORKSPACE_OF_LOSS),
    )  # fmt: skip
    frozen = (None if one is None else one.detach() for one in (teacher, teacher_weight, teacher_bias))
    losses = apply(o, x, student_weight, student_bias, *frozen, mask)
    return reduced_over(losses, reduction, losses.shape[0] if mask is None else mask.sum(), student_input.shape[:-1])


def check_models(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor, b: Tensor | None, teacher_b: Tensor | None):
    check_input(NAME, x, "student_input")
    check_weight(NAME, "student_weight", w, b, x, x.shape[-1], "student_input")
    check_input(NAME, teacher_x, "teacher_input")
    check_tensor(NAME, "teacher_input", teacher_x, x)
    check_weight(NAME, "teacher_weight", teacher_w, teacher_b, teacher_x, teacher_x.shape[-1], "teacher_input")
    if teacher_x.shape[:-1] != x.shape[:-1]:
        raise ShapeError(
            f"{NAME}: teacher_input must have the student's leading shape {tuple(x.shape[:-1])}, but has "
            f"{tuple(teacher_x.shape[:-1])}"
        )
    if teacher_w.shape[0] != w.shape[0]:
        raise ShapeError(
            f"{NAME}: student_weight has {w.shape[0]} classes but teacher_weight has {teacher_w.shape[0]}; both models need "
            "one vocabulary: slice off rows that only pad it"
        )


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


def check_positive(op: str, name: str, value: float, more: str = "") -> None:
    check_number(op, name, value)
    if not value > 0:
        raise ValueError(f"{op}: {name} must be positive{more}, not {value}")
