"""Computes what trainers read of lazy logits without their values: log_softmax followed by gather, sum or mean over the
classes, logsumexp, gather, argmax, and the entropy, -(p * log_p).sum(-1), or the mean logit (p * z).sum(-1), of p = softmax(z)
or exp(log_softmax(z)); each also times a number.

Each is a linear_cross_entropy of the head's input, of which one statistic is returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..subclasses import PLAIN
from .reading import MULTIPLY

# What a tensor of the logits' shape is of them, which function leads from one to another, and what two multiply to.
LOGITS, LOG_PROBS, PROBS, P_LOG_P, P_LOGITS = "z", "log p", "p", "p log p", "p z"
AFTER = {("log_softmax", LOGITS): LOG_PROBS, ("softmax", LOGITS): PROBS, ("exp", LOG_PROBS): PROBS}
MULTIPLIED = {frozenset((PROBS, LOG_PROBS)): P_LOG_P, frozenset((PROBS, LOGITS)): P_LOGITS}
NAMES = {
    "gather": ("input", "dim", "index", "sparse_grad"),
    "sum": ("input", "dim", "keepdim", "dtype"),
    "mean": ("input", "dim", "keepdim", "dtype"),
    "logsumexp": ("input", "dim", "keepdim"),
    "argmax": ("input", "dim", "keepdim"),
    "log_softmax": ("input", "dim", "_stacklevel", "dtype"),
    "softmax": ("input", "dim", "_stacklevel", "dtype"),
}
# The arguments of the losses of logits, in their order.
LOSSES = {
    F.cross_entropy: (
        "input",
        "target",
        "weight",
        "size_average",
        "ignore_index",
        "reduce",
        "reduction",
        "label_smoothing",
    ),
    F.nll_loss: ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
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
# Of log-probabilities over all classes: minus their mean is the loss whose target is spread over them all, times:
SPREAD = {"sum": lambda classes: -classes, "mean": lambda classes: -1}
METHOD_ORDER = ("input", "dim", "dtype")  # of softmax and log_softmax of torch and Tensor
NEVER = -(2**62)  # an ignore_index that no index is: those out of bounds are errors, as gather's are


def given(step: Any, logits: Tensor) -> dict[str, Any] | None:
    """The arguments by name of a function over the classes; None for another call."""
    names = NAMES[step.name]
    if "_stacklevel" in names and step.function not in (torch.nn.functional.softmax, torch.nn.functional.log_softmax):
        names = METHOD_ORDER
    found = dict(zip(names, step.args, strict=False)) | {
        "input" if k == "self" else k: v for k, v in step.kwargs.items()
    }
    if step.kwargs.get("dtype") is not None and "dtype" not in names:
        return None
    dim, n = found.get("dim"), logits.dim()
    if type(dim) in (tuple, list) and len(dim) == 1:
        (dim,) = dim
    over_classes = isinstance(dim, int) and -n <= dim < n and dim % n == class_dim(logits)
    return found if over_classes and found.get("input") is logits and "out" not in found else None


def class_dim(logits: Tensor) -> int | None:
    """The dimension of the classes; None if a token's are in several."""
    others = logits.tokens.others()
    return None if others is None else next(i for i in range(logits.dim()) if i not in others)


def form_after(step: Any, logits: Tensor) -> tuple[str, torch.dtype] | None:
    """Which function of the logits the result is, over their classes, and its dtype, under autocast too; None if it is none of
    these. In the example's call a head is to see what is no loss: there log_softmax alone."""
    form = AFTER.get((step.name, logits.form))
    if form is None or (logits.matmul.log is not None and form != LOG_PROBS):
        return None
    if step.name == "exp":
        whole = len(step.args) == 1 and not step.kwargs and logits.factor == 1
        return (form, dtype_of(step.function, logits)) if whole else None
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

    of = {name: getattr(one, name) for name in ("scale", "cap", "bias")} | {"factor": one.factor * other.factor}
    return origin.next(step._replace(function=mul, args=(origin,)), tokens, form=form, detached=one.detached, **of)


def statistic(step: Any, logits: Tensor) -> Tensor | None:
    """The function's result without logits; None if it is none of these, or not over all classes of a token."""
    spread = SPREAD.get(step.name) if logits.form == LOG_PROBS else None
    if spread is None and (step.name, logits.form) not in STATISTICS:
        return None
    arguments = given(step, logits)
    if arguments is None or (step.name == "argmax" and logits.factor != 1):
        return None
    dim, index, dtype = class_dim(logits), arguments.get("index"), arguments.get("dtype")
    lead = torch.Size(size for i, size in enumerate(logits.shape) if i != dim)
    if step.name == "gather" and (
        type(index) not in PLAIN or index.dtype != torch.int64 or index.device != logits.device or arguments.get("sparse_grad")
        or index.shape != (*lead[:dim], 1, *lead[dim:])
    ):  # fmt: skip
        return None
    if dtype is not None and dtype not in (logits.dtype, torch.float32):  # a float64 sum of float32 would be rounded
        return None
    target = index.squeeze(dim) if step.name == "gather" else torch.zeros(lead, dtype=torch.int64, device=logits.device)
    result = computed(step, logits, target, spread)
    if result is None:
        return None
    if step.name != "argmax":  # a new tensor, which may be changed in place
        factor = logits.factor if spread is None else logits.factor * spread(logits.tokens.classes)
        dtype = dtype or (logits.dtype if step.name == "gather" else dtype_of(step.function, logits, dim=-1))
        result = (result * factor).to(dtype)
    result = result.reshape(lead)
    logits.matmul.has_loss |= result.requires_grad
    keeps = arguments.get("keepdim", False) or step.name == "gather"
    return logits.matmul.announced(result.unsqueeze(dim) if keeps else result)


def computed(step: Any, logits: Tensor, target: Tensor, spread: Callable | None) -> Tensor | None:
    """The statistic of each token [...]; with `spread` the loss of a target that is spread over all classes.

    gather of log-probabilities computes both in one pass over the head's matmul, for a sum of the same tensor that follows, as
    in label smoothing.
    """
    options: dict[str, Any] = {"reduction": "none", "ignore_index": NEVER}
    if spread is not None:
        if logits.smoothed is not None and torch.is_grad_enabled():
            return logits.smoothed
        return logits.cross_entropy(target, label_smoothing=1.0, **options)
    returned, of = STATISTICS[step.name, logits.form]
    both = step.name == "gather" and logits.form == LOG_PROBS and torch.is_grad_enabled() and not logits.detached
    options |= dict.fromkeys((f"return_{one}" for one in returned), True) | ({"label_smoothing": 1.0} if both else {})
    found = logits.cross_entropy(target, **options)
    if found is None:
        return None
    if both:
        logits.smoothed = found.loss
    return of(found)


def loss(step: Any, logits: Tensor) -> Tensor | None:
    """F.cross_entropy, or F.nll_loss of log-probabilities, without logits; None for what linear_cross_entropy does not
    compute."""
    arguments = dict(zip(LOSSES[step.function], step.args, strict=False)) | step.kwargs
    target, weight, others = arguments["target"], arguments.get("weight"), logits.tokens.others()
    options = {name: arguments[name] for name in ("ignore_index", "reduction", "label_smoothing") if name in arguments}
    is_nll, are_log_probs = step.function is F.nll_loss, logits.form == LOG_PROBS
    covered = (
        (are_log_probs and (is_nll or logits.factor == 1)) or (logits.form == LOGITS and not is_nll)
    ) and (
        isinstance(target, Tensor) and target.dtype == torch.int64 and target.device == logits.device
        and PLAIN.issuperset((type(target), type(weight)))
        and (weight is None or (weight.dtype == logits.dtype and not weight.requires_grad))
        and arguments.get("size_average") is None and arguments.get("reduce") is None
        and others == [i for i in range(logits.dim()) if i != min(logits.dim() - 1, 1)]
        and target.shape == torch.Size(logits.shape[i] for i in others)
    )  # fmt: skip
    if not covered:
        return None
    result = logits.cross_entropy(target, weight=weight, **options)
    if result is None:
        return None
    logits.matmul.has_loss |= not logits.detached
    result = result if logits.factor == 1 else result * logits.factor
    narrow = logits.dtype.itemsize < 4 and not torch.is_autocast_enabled(logits.device.type)
    result = result.to(logits.dtype) if narrow else result
    return logits.matmul.announced(result.reshape(target.shape) if result.dim() else result)
