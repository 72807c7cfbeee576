"""Follows the tokens of lazy logits through views, copies and masks that leave each token's logits whole. Computes what
trainers read of them without values: log_softmax followed by gather, sum or mean over the classes, logsumexp, gather, argmax,
the entropy -(p * log_p).sum(-1), and the mean logit (p * z).sum(-1), of p = softmax(z) or exp(log_softmax(z)), each also times
a number. Each is one statistic of a linear_cross_entropy of the head's input.

Reads without a gradient, of detached logits and of copies, get values. A copy has the values of the moment when it is
requested, and can be read after the optimizer's step. The model's loss does not depend on these values: it stays
linear_cross_entropy of the head's input.
"""

from __future__ import annotations

import itertools
import math
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from ..memory import placeholders
from ..ops.dispatch.choices import Bytes
from ..subclasses import PLAIN
from .trace import ADD, DIVIDE, MULTIPLY, is_in_place, leaves_of

# Functions that leave each token's logits whole: views of some tokens, and possible copies of all in their order.
VIEWS = frozenset(
    (
        "__getitem__",
        "detach",
        "movedim",
        "moveaxis",
        "narrow",
        "permute",
        "select",
        "squeeze",
        "swapaxes",
        "swapdims",
        "transpose",
        "unflatten",
        "unsqueeze",
        "view",
    )
)
PARTS = {"chunk": 2, "split": 2, "unbind": 1}  # the place of `dim`
CASTS = frozenset(("bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type"))  # to a dtype or a device
COPIES = frozenset(("clone", "contiguous", "flatten", "reshape", *CASTS))
NEGATE = ("neg", "__neg__", "negative")
SCALES = frozenset(name for name in (*MULTIPLY, *DIVIDE, *NEGATE) if not is_in_place(name))


class Tokens(NamedTuple):
    """Describes the tokens of logits. `placeholder`, on the meta device, is a view of a tensor [..., classes] of all rows
    [..., d], as the logits are a view of the logits of all rows."""

    rows: Tensor
    classes: int
    placeholder: Tensor

    @property
    def class_dim(self) -> int | None:
        """Returns the dimension of the classes; None unless it has all classes of a token."""
        placeholder, V = self.placeholder, self.classes
        dims = [i for i in range(placeholder.dim()) if placeholder.stride(i) == 1 and placeholder.shape[i] == V]
        starts = [
            placeholder.storage_offset(),
            *(s for i, s in enumerate(placeholder.stride()) if i not in dims and placeholder.shape[i] > 1),
        ]
        return dims[0] if V > 1 and len(dims) == 1 and all(start % V == 0 for start in starts) else None

    @placeholders()
    def shown(self) -> Tensor:
        """Returns the rows of these tokens [..., d], in their order; the leading shape may be another."""
        placeholder, (*lead, d) = self.placeholder, self.rows.shape
        others = [i for i in range(placeholder.dim()) if i != self.class_dim]
        sizes, strides = [placeholder.shape[i] for i in others], [placeholder.stride(i) // self.classes for i in others]
        first = placeholder.storage_offset() // self.classes
        tokens = placeholder.new_empty(math.prod(lead)).as_strided(sizes, strides, first)
        if tokens.is_contiguous() and tokens.numel() == math.prod(lead):
            return self.rows
        rows = self.rows.reshape(-1, d)
        offset = rows.storage_offset() + first * rows.stride(0)
        return rows.as_strided((*sizes, d), [*(s * rows.stride(0) for s in strides), rows.stride(1)], offset)

    @placeholders()
    def copied(self, shape: torch.Size, dtype: torch.dtype) -> Tokens | None:
        """Returns the tokens of a copy, whose elements have the same order; None for another shape."""
        placeholder = self.placeholder
        if placeholder.shape[-1:] == shape[-1:] == (self.classes,) and placeholder.stride(-1) == 1:
            return self._replace(rows=self.shown(), placeholder=placeholder.new_empty(shape, dtype=dtype))
        if placeholder.shape != shape:
            return None
        whole = placeholder.new_empty(math.prod(self.rows.shape[:-1]) * self.classes, dtype=dtype)
        return self._replace(placeholder=whole.as_strided(shape, placeholder.stride(), placeholder.storage_offset()))

    @placeholders()
    def after(self, step) -> Tokens | None:
        """Returns the tokens of the step's result; None if it is not followed."""
        before = self.placeholder
        if step.name == "__getitem__" and isinstance(step.args[1], Tensor):
            return self.masked(step.args[1])
        if any(hasattr(argument, "__array__") for argument in step.others):
            return None
        try:
            if step.name == "to":
                device, dtype, *_ = torch._C._nn._parse_to(*step.args[1:], **step.kwargs)
                seen = before.to(dtype or before.dtype) if device in (None, self.rows.device) else None
            else:
                seen = step.of(lambda _: before)
        except Exception:  # the function's own error, which it raises again for values
            return None
        if (
            not isinstance(seen, Tensor)
            or seen.dtype not in (before.dtype, torch.float32)
            or seen.itemsize < before.itemsize
        ):
            return None
        shown = self._replace(placeholder=seen)
        tokens = shown if share(seen, before) else self.copied(seen.shape, seen.dtype) if step.name in COPIES else None
        return tokens if tokens is not None and tokens.class_dim is not None else None

    def are(self, others: Tokens) -> bool:
        """Returns whether both are the same tokens in the same order, with the classes last."""
        placeholder, other = self.placeholder, others.placeholder
        if placeholder.shape != other.shape or not self.class_dim == others.class_dim == placeholder.dim() - 1:
            return False
        pairs = [(self.shown(), others.shown())]
        if placeholder.stride() == other.stride() and placeholder.storage_offset() == other.storage_offset():
            pairs.append((self.rows, others.rows))
        # the same elements of one memory
        return any((a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride()) for a, b in pairs)

    @placeholders()
    def masked(self, mask: Tensor) -> Tokens | None:
        """Returns the tokens that a mask of the leading dimensions selects; None for another index."""
        placeholder, lead = self.placeholder, self.placeholder.shape[:-1]
        if (
            mask.dtype != torch.bool
            or type(mask) not in PLAIN
            or mask.device != self.rows.device
            or self.class_dim != len(lead)
            or not mask.dim()
            or mask.shape != lead[: mask.dim()]
        ):
            return None
        rows = self.shown().reshape(*lead, self.rows.shape[-1])[mask]
        return self._replace(rows=rows, placeholder=placeholder.new_empty((*rows.shape[:-1], self.classes)))


def share(value, other: Tensor) -> bool:
    """Returns whether `value` is a tensor in other's memory."""
    strided = isinstance(value, Tensor) and value.layout is torch.strided
    return strided and value.untyped_storage()._cdata == other.untyped_storage()._cdata


CALLERS = 5  # frames from asks_for_copy to whoever called clone


def asks_for_copy(step, logits) -> bool:
    """Returns whether the step requests a copy of logits.

    clone() and to(copy=True) request a copy where no gradient is wanted: of detached logits, and under torch.no_grad(). So does
    detach() of a clone. After detach() a cast or a move requests a copy, too, also to the dtype or device that the logits have.
    contiguous(), reshape() and flatten() request a layout: trainers take statistics of the result.
    """
    if logits.matmul.log is not None:
        return False
    if step.name == "detach":
        return any(before.clones for before in logits.steps)
    if step.clones and (logits.detached or not torch.is_grad_enabled()):
        # with find_unused_parameters=True DistributedDataParallel's sink, an autograd.Function, clones all results of the model
        frames = itertools.islice(traceback.walk_stack(sys._getframe(1)), CALLERS)
        return all(frame.f_globals.get("__name__") != "torch.nn.parallel.distributed" for frame, _ in frames)
    return step.name in CASTS and logits.is_cut


def read_apart(step, operands: list):
    """Returns the step's result by values without a graph, for detached logits or a copy of logits.

    Returns NotImplemented for other logits, and for a result in the memory of the values, which other code may change,
    unless the step copies.
    """
    copied = len(operands) == 1 and asks_for_copy(step, operands[0])
    if not (copied or all(logits.is_cut for logits in operands)):
        return NotImplemented
    with torch.no_grad():
        values = {id(logits): logits.apart() for logits in operands}
    if step.name == "__deepcopy__":  # its memo is by id, and values computed for it may be freed before
        return values[id(step.args[0])].clone()
    result = step.of(lambda logits: values[id(logits)])
    if not any(share(leaf, of) for leaf in leaves_of(result) for of in values.values()):
        return result
    return result.clone() if copied else NotImplemented


# Forms of tensors of the logits' shape, the functions that lead from one form to another, and the forms of two multiplied.
LOGITS, LOG_PROBS, PROBS, P_LOG_P, P_LOGITS = "z", "log p", "p", "p log p", "p z"
AFTER = {("log_softmax", LOGITS): LOG_PROBS, ("softmax", LOGITS): PROBS, ("exp", LOG_PROBS): PROBS}
MULTIPLIED = {frozenset((PROBS, LOG_PROBS)): P_LOG_P, frozenset((PROBS, LOGITS)): P_LOGITS}
# The names of functions' arguments, in their order.
LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
NAMES = {
    "gather": ("input", "dim", "index", "sparse_grad"),
    **dict.fromkeys(("sum", "mean"), ("input", "dim", "keepdim", "dtype")),
    **dict.fromkeys(("logsumexp", "argmax"), ("input", "dim", "keepdim")),
    **dict.fromkeys(("log_softmax", "softmax"), ("input", "dim", "dtype", "_stacklevel")),  # F's, by keyword
    **dict.fromkeys(("cross_entropy", "nll_loss"), LOSS),
}


class LMHead(NamedTuple):
    """Holds a linear layer's parameters, and the mode and workspace of its loss."""

    weight: Tensor
    bias: Tensor | None = None
    mode: str = "full"
    workspace: Bytes = None


class Formula(NamedTuple):
    """Describes logits as a function of a head's z = x weight^T + bias: a form, times a factor, of scale (z + added), or of
    cap times the tanh of that."""

    scale: float = 1.0
    cap: float | None = None
    added: Tensor | None = None
    form: str = LOGITS
    factor: float = 1.0

    def times(self, number: float) -> Formula:
        if self.form != LOGITS:
            return self._replace(factor=self.factor * number)
        return self._replace(scale=self.scale * number) if self.cap is None else self._replace(cap=self.cap * number)

    def cross_entropy(self, head: LMHead, rows: Tensor, target: Tensor, **options):
        """Returns ops.linear_cross_entropy of these logits of rows, and targets of the same tokens in any shape; None for a
        cap that it does not support."""
        cap, bias, added = self.cap, head.bias, self.added
        if cap is not None and cap <= 0:
            return None
        rows = rows if rows.dim() > 1 else rows[None]
        return ops.linear_cross_entropy(
            rows,
            head.weight,
            target.reshape(rows.shape[:-1]),
            linear_bias=bias if added is None else added if bias is None else bias + added,
            logit_scale=self.scale if cap is None else self.scale * cap,
            softcap=cap,
            recompute=head.mode,
            workspace=head.workspace,
            **options,
        )


# By (function, form): the outputs of linear_cross_entropy that are needed, () for its loss alone, and the result from them.
STATISTICS: dict[tuple[str, str], tuple[tuple[str, ...], Callable]] = {
    ("gather", LOGITS): (("log_probs", "lse"), lambda result: result.log_probs + result.lse),
    ("gather", LOG_PROBS): (("log_probs",), lambda result: result.log_probs),
    ("logsumexp", LOGITS): (("lse",), lambda result: result.lse),
    ("sum", P_LOG_P): (("entropy",), lambda result: -result.entropy),
    ("sum", P_LOGITS): (("lse", "entropy"), lambda result: result.lse - result.entropy),
    **{("argmax", form): (("accuracy",), lambda result: result.arg_max) for form in (LOGITS, LOG_PROBS, PROBS)},
    **{(name, LOG_PROBS): ((), lambda loss: loss) for name in ("mean", "sum")},
}
NEVER = -(2**62)  # an ignore_index that never occurs: indices out of bounds raise, as in gather


def arguments_of(step) -> dict:
    """Returns the arguments of a function in `NAMES`, by name."""
    named = {"input" if name == "self" else name: value for name, value in step.kwargs.items()}
    return dict(zip(NAMES[step.name], step.args, strict=False)) | named


def class_arguments(step, logits: Tensor) -> dict | None:
    """Returns the arguments, by name, of a function over the classes; None for another call."""
    arguments = arguments_of(step)
    dim, n = arguments.get("dim"), logits.dim()
    if type(dim) in (tuple, list) and len(dim) == 1:
        (dim,) = dim
    over_classes = isinstance(dim, int) and -n <= dim < n and dim % n == logits.class_dim
    known = all(name in NAMES[step.name] for name in arguments)  # not `out`
    return arguments if over_classes and known and arguments.get("input") is logits else None


def lead_of(logits) -> tuple[int, ...]:
    """Returns the shape of a tensor with one number for each token."""
    return tuple(size for i, size in enumerate(logits.shape) if i != logits.class_dim)


def formula_after(step, logits) -> tuple[Formula, torch.dtype] | None:
    """Returns (the formula of the step's result, its dtype, under autocast too) for a function of each element or over the
    classes; None for other functions."""
    name, args, formula, n = step.name, step.args, logits.formula, logits.dim()
    if name in SCALES:
        others = [arg for arg in args if arg is not logits]
        if step.kwargs or len(others) != (name not in NEGATE):
            return None
        (number,) = others or (-1.0,)
        if type(number) not in (int, float) or not math.isfinite(number):
            return None
        if name in DIVIDE:
            return (formula.times(1 / number), logits.dtype) if number and args[0] is logits else None
        return formula.times(float(number)), logits.dtype
    if name == "tanh":
        is_capped = formula.form != LOGITS or formula.cap is not None or len(args) != 1 or step.kwargs
        return None if is_capped else (formula._replace(cap=1.0), logits.dtype)
    if name in ADD:  # of a number for each class, which gets no gradient, such as BART's buffer
        (added,) = step.others if len(step.others) == 1 else (None,)
        if not (
            isinstance(added, Tensor)
            and type(added) in PLAIN
            and not added.requires_grad
            and added.shape == (*[1] * (added.dim() - 1), logits.shape[-1])
            and added.dim() <= n
            and added.device == logits.device
            and added.dtype in (logits.dtype, torch.promote_types(logits.dtype, torch.float32))
            and logits.class_dim == n - 1
            and formula.cap is None
            and formula.form == LOGITS
            and formula.scale
            and not step.is_in_place
        ):
            return None
        values = added.detach().reshape(-1) / formula.scale
        return formula._replace(added=values if formula.added is None else formula.added + values), added.dtype
    form, options = AFTER.get((name, formula.form)), {}
    if form is None:
        return None
    if name == "exp":
        if len(args) != 1 or step.kwargs or formula.factor != 1:
            return None
    elif (arguments := class_arguments(step, logits)) is None:
        return None
    else:
        options = {"dim": -1} | ({"dtype": arguments["dtype"]} if arguments.get("dtype") is not None else {})
    return formula._replace(form=form), dtype_of(step.function, logits, **options)


def dtype_of(function: Callable, logits: Tensor, **options) -> torch.dtype:
    return function(torch.zeros(1, dtype=logits.dtype, device=logits.device), **options).dtype


def product(step, first: Tensor, second: Tensor) -> Tensor | None:
    """Returns p log p or p z, of the same logits; None for another function of two."""
    ours, theirs = first.formula, second.formula
    form = MULTIPLIED.get(frozenset((ours.form, theirs.form)))
    if form is None or step.name not in MULTIPLY or len(step.args) != 2 or step.kwargs or step.is_in_place:
        return None
    tokens = first.tokens.copied(first.shape, torch.promote_types(first.dtype, second.dtype))
    if not (
        first.matmul is second.matmul
        and first.detached == second.detached
        and ours.added is theirs.added
        and ours[:2] == theirs[:2]
        and tokens is not None
        and first.tokens.are(second.tokens)
    ):
        return None
    return first.next(step, tokens, ours._replace(form=form, factor=ours.factor * theirs.factor))


def statistic(step, logits) -> Tensor | None:
    """Returns the function's result without logits; None for other functions, or unless over all classes of a token."""
    name, (form, factor) = step.name, logits.formula[-2:]
    if (
        (name, form) not in STATISTICS
        or (arguments := class_arguments(step, logits)) is None
        or (name == "argmax" and factor != 1)
    ):
        return None
    dim, index, dtype, lead = logits.class_dim, arguments.get("index"), arguments.get("dtype"), lead_of(logits)
    if name == "gather" and (
        type(index) not in PLAIN
        or index.dtype != torch.int64
        or index.device != logits.device
        or arguments.get("sparse_grad")
        or index.shape != (*lead[:dim], 1, *lead[dim:])
    ):
        return None
    if dtype is not None and dtype not in (logits.dtype, torch.float32):  # a float64 sum of float32 would be rounded
        return None
    returned, of = STATISTICS[name, form]
    # minus the mean of log-probabilities over all classes is the loss whose target is spread over them all. A gather of them
    # computes both in one pass over the head's matmul, for a sum of the same tensor that follows, as in label smoothing
    both = name == "gather" and form == LOG_PROBS and isinstance(logits, Tensor)  # not under torch.compile
    both = both and torch.is_grad_enabled() and not logits.detached
    outputs = None if returned or not torch.is_grad_enabled() else logits.smoothed
    if outputs is None:
        outputs = logits.cross_entropy(
            index.squeeze(dim) if name == "gather" else torch.zeros(lead, dtype=torch.int64, device=logits.device),
            reduction="none",
            ignore_index=NEVER,
            label_smoothing=0.0 if returned and not both else 1.0,
            **{f"return_{output}": True for output in returned},
        )
    if outputs is None:
        return None
    if both:
        logits.smoothed = outputs.loss
    result = of(outputs)
    if name != "argmax":  # a new tensor, which may be changed in place
        factor *= 1 if returned else {"sum": -logits.tokens.classes, "mean": -1}[name]
        dtype = dtype or (logits.dtype if name == "gather" else dtype_of(step.function, logits, dim=-1))
        result = (result * factor).to(dtype)
    result = result.reshape(lead)
    return result.unsqueeze(dim) if arguments.get("keepdim", False) or name == "gather" else result


def is_loss(function: Callable) -> bool:
    """Returns whether the function takes logits and targets. Dynamo cannot look for a function in a set."""
    return function is F.cross_entropy or function is F.nll_loss


def loss(step, logits) -> Tensor | None:
    """Returns F.cross_entropy, or F.nll_loss of log-probabilities, without logits; None for what linear_cross_entropy does
    not compute."""
    arguments = arguments_of(step)
    target, weight = arguments["target"], arguments.get("weight")
    names = ("weight", "ignore_index", "reduction", "label_smoothing")
    options = {name: arguments[name] for name in names if name in arguments}
    is_nll, (form, factor) = step.function is F.nll_loss, logits.formula[-2:]
    covered = ((form == LOG_PROBS and (is_nll or factor == 1)) or (form == LOGITS and not is_nll)) and (
        isinstance(target, Tensor)
        and target.dtype == torch.int64
        and target.device == logits.device
        and PLAIN.issuperset((type(target), type(weight)))
        and (weight is None or (weight.dtype == logits.dtype and not weight.requires_grad))
        and arguments.get("size_average") is None
        and arguments.get("reduce") is None
        and logits.class_dim == min(logits.dim() - 1, 1)
        and target.shape == lead_of(logits)
    )
    result = logits.cross_entropy(target, **options) if covered else None
    if result is None:
        return None
    result = result if factor == 1 else result * factor
    if logits.dtype.itemsize < 4 and not torch.is_autocast_enabled(logits.device.type):
        result = result.to(logits.dtype)
    return result.reshape(target.shape) if result.dim() else result
