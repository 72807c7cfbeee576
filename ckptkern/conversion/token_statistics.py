"""What trainers read of lazy logits without their values: log_softmax followed by gather, logsumexp, gather, argmax, and the
entropy, -(p * log_p).sum(-1), or the mean logit (p * z).sum(-1), of p = softmax(z) or exp(log_softmax(z)).

Each is a linear_cross_entropy of the head's input, of which one statistic is returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..subclasses import PLAIN
from .reading import MULTIPLY

# What a tensor of the logits' shape is of them, which function leads from one to another, and what two multiply to.
LOGITS, LOG_PROBS, PROBS, P_LOG_P, P_LOGITS = "z", "log p", "p", "p log p", "p z"
AFTER = {("log_softmax", LOGITS): LOG_PROBS, ("softmax", LOGITS): PROBS, ("exp", LOG_PROBS): PROBS}
MULTIPLIED = {frozenset((PROBS, LOG_PROBS)): P_LOG_P, frozenset((PROBS, LOGITS)): P_LOGITS}
NAMES = {
    "gather": ("input", "dim", "index", "sparse_grad"),
    "sum": ("input", "dim", "keepdim"),
    "logsumexp": ("input", "dim", "keepdim"),
    "argmax": ("input", "dim", "keepdim"),
    "log_softmax": ("input", "dim", "_stacklevel", "dtype"),
    "softmax": ("input", "dim", "_stacklevel", "dtype"),
}
# What linear_cross_entropy returns for a function of each, and how it is computed of that.
STATISTICS: dict[tuple[str, str], tuple[tuple[str, ...], Callable]] = {
    ("gather", LOGITS): (("log_probs", "lse"), lambda found: found.log_probs + found.lse),
    ("gather", LOG_PROBS): (("log_probs",), lambda found: found.log_probs),
    ("logsumexp", LOGITS): (("lse",), lambda found: found.lse),
    ("sum", P_LOG_P): (("entropy",), lambda found: -found.entropy),
    ("sum", P_LOGITS): (("lse", "entropy"), lambda found: found.lse - found.entropy),
    **{("argmax", form): (("accuracy",), lambda found: found.arg_max) for form in (LOGITS, LOG_PROBS, PROBS)},
}
METHOD_ORDER = ("input", "dim", "dtype")  # of softmax and log_softmax of torch and Tensor
NEVER = -(2**62)  # an ignore_index that no index is: those out of bounds are errors, as gather's are


def given(step: Any, logits: Tensor) -> dict[str, Any] | None:
    """The arguments by name of a function over the classes, which are the last dimension; None for another call."""
    names = NAMES[step.name]
    if "_stacklevel" in names and step.function not in (torch.nn.functional.softmax, torch.nn.functional.log_softmax):
        names = METHOD_ORDER
    found = dict(zip(names, step.args, strict=False)) | {
        "input" if k == "self" else k: v for k, v in step.kwargs.items()
    }
    if step.kwargs.get("dtype") is not None and "dtype" not in names:
        return None
    dim, last = found.get("dim"), logits.dim() - 1
    over_classes = isinstance(dim, int) and dim in (-1, last) and logits.tokens.others() == list(range(last))
    return found if over_classes and found.get("input") is logits and "out" not in found else None


def form_after(step: Any, logits: Tensor) -> tuple[str, torch.dtype] | None:
    """Which function of the logits the result is, over their classes, and its dtype, under autocast too; None if it is none of
    these. In the example's call a head is to see what is no loss."""
    form = AFTER.get((step.name, logits.form))
    if form is None or logits.matmul.log is not None:
        return None
    if step.name == "exp":
        return None if len(step.args) != 1 or step.kwargs else (form, dtype_of(step.function, logits))
    arguments = given(step, logits)
    if arguments is None:
        return None
    chosen = {} if arguments.get("dtype") is None else {"dtype": arguments["dtype"]}
    return form, dtype_of(step.function, logits, dim=-1, **chosen)


def dtype_of(function: Callable, logits: Tensor, **options: Any) -> torch.dtype:
    return function(torch.zeros(1, dtype=logits.dtype, device=logits.device), **options).dtype


def product(step: Any, one: Tensor, other: Tensor) -> Tensor | None:
    """p log p, or p z, of the same logits; None for another function of two."""
    form = MULTIPLIED.get(frozenset((one.form, other.form)))
    if form is None or step.name not in MULTIPLY or len(step.args) != 2 or step.kwargs or step.is_in_place:
        return None
    same = all(getattr(one, name) is getattr(other, name) for name in ("matmul", "bias", "detached"))
    tokens = one.tokens.copied(one.shape, torch.promote_types(one.dtype, other.dtype))
    if not (
        same
        and (one.scale, one.cap) == (other.scale, other.cap)
        and tokens is not None
        and one.tokens.are(other.tokens)
    ):
        return None
    origin = next(logits for logits in one.history if any(logits is it for it in other.history))
    factors = one.steps[len(origin.steps) :], other.steps[len(origin.steps) :]

    def mul(values: Tensor) -> Tensor:
        return step.function(*(functools.reduce(lambda z, after: after(z), steps, values) for steps in factors))

    of = {name: getattr(one, name) for name in ("scale", "cap", "bias")}
    return origin.next(step._replace(function=mul, args=(origin,)), tokens, form=form, detached=one.detached, **of)


def statistic(step: Any, logits: Tensor) -> Tensor | None:
    """The function's result without logits; None if it is none of these, or not over all classes of a token."""
    if (step.name, logits.form) not in STATISTICS or (arguments := given(step, logits)) is None:
        return None
    lead, index = logits.shape[:-1], arguments.get("index")
    if step.name == "gather" and (
        type(index) not in PLAIN or index.dtype != torch.int64 or index.shape != (*lead, 1) or index.device != logits.device
        or arguments.get("sparse_grad")
    ):  # fmt: skip
        return None
    keeps = arguments.get("keepdim", False)
    target = index[..., 0] if step.name == "gather" else torch.zeros(lead, dtype=torch.int64, device=logits.device)
    returned, of = STATISTICS[step.name, logits.form]
    found = logits.cross_entropy(
        target, reduction="none", ignore_index=NEVER, **dict.fromkeys((f"return_{one}" for one in returned), True)
    )
    if found is None:
        return None
    result = of(found)
    if step.name != "argmax":
        result = result.to(logits.dtype if step.name == "gather" else dtype_of(step.function, logits, dim=-1))
    result = result.reshape(lead)
    logits.matmul.has_loss |= result.requires_grad
    return result[..., None] if keeps or step.name == "gather" else result
