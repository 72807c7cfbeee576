"""What trainers read of lazy logits without their values: log_softmax followed by gather, logsumexp, gather and argmax.

Each is a linear_cross_entropy of the head's input, of which one statistic is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..subclasses import PLAIN

NAMES = {
    "gather": ("input", "dim", "index", "sparse_grad"),
    "logsumexp": ("input", "dim", "keepdim"),
    "argmax": ("input", "dim", "keepdim"),
    "log_softmax": ("input", "dim", "_stacklevel", "dtype"),
}
METHOD_ORDER = {"log_softmax": ("input", "dim", "dtype")}  # of torch.log_softmax and Tensor.log_softmax
NEVER = -(2**62)  # an ignore_index that no index is: those out of bounds are errors, as gather's are


def given(step: Any, logits: Tensor) -> dict[str, Any] | None:
    """The arguments by name of a function over the classes, which are the last dimension; None for another call."""
    names = NAMES[step.name]
    if step.name in METHOD_ORDER and step.function is not torch.nn.functional.log_softmax:
        names = METHOD_ORDER[step.name]
    found = dict(zip(names, step.args, strict=False)) | {
        "input" if k == "self" else k: v for k, v in step.kwargs.items()
    }
    dim, last = found.get("dim"), logits.dim() - 1
    over_classes = isinstance(dim, int) and dim in (-1, last) and logits.tokens.others() == list(range(last))
    return found if over_classes and found.get("input") is logits and "out" not in found else None


def normalized_dtype(step: Any, logits: Tensor) -> torch.dtype | None:
    """The dtype of log_softmax of these logits over their classes, under autocast too; None if it is another call."""
    return None if logits.normalized or given(step, logits) is None else dtype_of(step.function, logits, **dtype(step))


def dtype(step: Any) -> dict[str, Any]:
    return {name: one for name, one in step.kwargs.items() if name == "dtype"}


def dtype_of(function: Callable, logits: Tensor, **options: Any) -> torch.dtype:
    return function(torch.zeros(1, dtype=logits.dtype, device=logits.device), dim=-1, **options).dtype


def statistic(step: Any, logits: Tensor) -> Tensor | None:
    """The function's result without logits; None if it is none of these, or not over all classes of a token."""
    if step.name not in ("gather", "logsumexp", "argmax") or (arguments := given(step, logits)) is None:
        return None
    lead, index = logits.shape[:-1], arguments.get("index")
    if step.name == "gather":
        if (
            type(index) not in PLAIN or index.dtype != torch.int64 or index.shape != (*lead, 1) or index.device != logits.device
            or arguments.get("sparse_grad")
        ):  # fmt: skip
            return None
    elif logits.normalized and step.name == "logsumexp":
        return None
    keeps = arguments.get("keepdim", False)
    target = index[..., 0] if step.name == "gather" else torch.zeros(lead, dtype=torch.int64, device=logits.device)
    raw = not logits.normalized
    found = logits.cross_entropy(
        target, reduction="none", ignore_index=NEVER, return_lse=raw and step.name != "argmax",
        return_log_probs=step.name == "gather", return_accuracy=step.name == "argmax",
    )  # fmt: skip
    if found is None:
        return None
    if step.name == "argmax":
        result = found.arg_max
    elif step.name == "logsumexp":
        result = found.lse.to(dtype_of(step.function, logits))
    else:
        result = (found.log_probs + found.lse if raw else found.log_probs).to(logits.dtype)
    result = result.reshape(lead)
    logits.matmul.has_loss |= result.requires_grad
    return result[..., None] if keeps or step.name == "gather" else result
