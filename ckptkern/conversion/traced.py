"""Defines the LM head's lazy logits under torch.compile, which Dynamo traces as an object of Python and not as a tensor.

`TracedLogits` follows what models do between the LM head and F.cross_entropy, as `logits.Logits` does without a compiler, and
log_softmax, gather, logsumexp and argmax; an entropy is of values. The graph holds the head's input in their place, and
linear_cross_entropy in place of the loss. Logits that a compiled model returns
are such an object too: outside of the graph it is read as the `Logits` of the same matmul.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from .logits import REMEDY, Matmul, Step
from .tokens import LOGITS, Formula, form_after, is_loss, loss, statistic
from .trace import is_in_place

IN_PLACE = (
    "ckptkern.convert: a compiled model changes its logits in place, for which they would have to be there. Convert with "
    "exclude= for this layer"
)
UNCHANGED = Formula()
_library = torch.library.Library("ckptkern", "FRAGMENT")
_library.define("version_of(Tensor x) -> Tensor")
for _key in ("CPU", "CUDA", "Meta"):
    _library.impl("version_of", lambda x: torch.full((), x._version, dtype=torch.int64, device=x.device), _key)


def _followed(method: Callable) -> Callable:
    """In the graph the method, outside of it that of the `Logits`."""
    name = method.__name__

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        if is_compiling():
            return method(self, *args, **kwargs)
        return getattr(self.read(), name)(*args, **kwargs)

    return run


class TracedLogits:
    """The logits F.linear(x, weight, bias) after `steps`, each a method with its arguments: to, mul, div, tanh, log_softmax.

    x [..., d]: the head's input, of some tokens in the order in which the model sees them. version: the weight's, when x was
    computed. mode, workspace: of the loss.
    """

    keeps_smoothed = False  # as of `Logits`
    requires_grad = True
    read_as: Tensor | None = None  # outside of the graph

    def __init__(self, x, weight, bias, version, mode, workspace, steps=(), formula=UNCHANGED):
        self.x, self.weight, self.bias, self.version = x, weight, bias, version
        self.mode, self.workspace, self.steps, self.formula = mode, workspace, steps, formula

    def of(self, x: Tensor, *steps: tuple, formula: Formula | None = None) -> TracedLogits:
        call = self.weight, self.bias, self.version, self.mode, self.workspace
        return TracedLogits(x, *call, (*self.steps, *steps), formula or self.formula)

    # -- what they are

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.x.shape[:-1], self.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        found = self.x.dtype
        for name, *args in self.steps:
            found = args[-1] if name in ("to", "log_softmax") else found
        return found

    @property
    def class_dim(self) -> int | None:
        """The dimension of the classes; None without one of tokens."""
        return self.dim() - 1 if self.dim() > 1 else None

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    # -- what is followed

    @_followed
    def float(self) -> TracedLogits:
        return self.of(self.x, ("to", torch.float32)) if self.dtype.itemsize < 4 else self

    @_followed
    def contiguous(self) -> TracedLogits:
        return self

    @_followed
    def to(self, *args, **kwargs) -> Any:
        wanted = [*args, *kwargs.values()]
        if wanted == [self.dtype] or (wanted == [torch.float32] and self.dtype.itemsize < 4):
            return self.float() if wanted == [torch.float32] else self
        if len(wanted) == 1 and isinstance(wanted[0], (torch.device, str)) and torch.device(wanted[0]) == self.device:
            return self
        return self.read().to(*args, **kwargs)

    @_followed
    def view(self, *shape) -> Any:
        return self.reshape(*shape)

    @_followed
    def reshape(self, *shape) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if len(sizes) > 1 and sizes[-1] == self.weight.shape[0]:
            return self.of(self.x.reshape(*sizes[:-1], self.x.shape[-1]))
        return self.read().reshape(*sizes)

    @_followed
    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if end_dim % self.dim() < self.dim() - 1:
            return self.of(self.x.flatten(start_dim, end_dim))
        return self.read().flatten(start_dim, end_dim)

    @_followed
    def __getitem__(self, index: Any) -> Any:
        items = index if isinstance(index, tuple) else (index,)
        plain = all(isinstance(one, (int, slice)) or one is Ellipsis for one in items)
        whole = items[-1] == slice(None) if Ellipsis in items or len(items) == self.dim() else len(items) < self.dim()
        return self.of(self.x[index]) if plain and whole else self.read()[index]

    @_followed
    def __mul__(self, other: Any) -> Any:
        return self.scaled("mul", other, other)

    __rmul__ = __mul__

    @_followed
    def __truediv__(self, other: Any) -> Any:
        return self.scaled("div", other, 1 / other if isinstance(other, (int, float)) and other else None)

    def scaled(self, name: str, other: Any, number: Any) -> Any:
        if isinstance(number, (int, float)) and self.formula.form == LOGITS:
            return self.of(self.x, (name, other), formula=self.formula.times(number))
        return getattr(self.read(), name)(other)

    # -- their loss

    def cross_entropy(self, target: Tensor, **options: Any) -> Any:
        return self.formula.cross_entropy(self, self.x, target, **options)

    def without_values(self, step: Step) -> Any:
        """The step's result without values; None if it needs them."""
        if is_loss(step.function):
            return loss(step, self)
        form, cap = self.formula.form, self.formula.cap
        if step.name == "tanh" and len(step.args) == 1 and not step.kwargs and form == LOGITS and cap is None:
            return self.of(self.x, ("tanh",), formula=self.formula._replace(cap=1.0))
        if step.name == "log_softmax" and (found := form_after(step, self)) is not None:
            form, dtype = found
            return self.of(self.x, ("log_softmax", -1, dtype), formula=self.formula._replace(form=form))
        return statistic(step, self) if step.name in TOKEN_WISE else None

    # -- everything else reads them

    def read(self) -> Tensor:
        """In the graph their values, outside of it the `Logits` of the same matmul."""
        if is_compiling():
            return self.after(F.linear(self.x, self.weight, self.bias))
        if self.read_as is None:
            if int(self.version) != self.weight._version:
                raise RuntimeError(
                    f"ckptkern.convert: the head's weight changed before the logits were computed. {REMEDY}"
                )
            logits = Matmul(self.x, self.weight, self.bias, self.mode, workspace=self.workspace).logits()
            self.read_as = self.after(logits)
        return self.read_as

    def after(self, z: Tensor) -> Tensor:
        for name, *args in self.steps:
            z = getattr(z, name)(*args)
        return z

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        step = Step(function, args, kwargs or {})
        logits = args[0] if args else step.kwargs.get("input")
        if isinstance(logits, TracedLogits) and is_compiling():
            result = logits.without_values(step)
            if result is not None:
                return result
        if step.kwargs.get("out") is not None or step.kwargs.get("inplace") or step.name in CHANGING:
            raise RuntimeError(IN_PLACE)
        args = [one.read() if isinstance(one, TracedLogits) else one for one in args]
        kwargs = {name: one.read() if isinstance(one, TracedLogits) else one for name, one in step.kwargs.items()}
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("device", "dim", "ndim"):
            return getattr(self.x, name)
        if is_in_place(name):
            raise RuntimeError(IN_PLACE)
        return getattr(self.read(), name)

    def __repr__(self) -> str:
        return f"TracedLogits(shape={tuple(self.shape)}, dtype={self.dtype})"


# Statistics of tokens that the graph has without logits.
TOKEN_WISE = frozenset(("argmax", "gather", "logsumexp"))
# Names of functions that change their first argument. Of a function's name Dynamo knows only whether it is in a set.
CHANGING = frozenset(
    name for holder in (torch, Tensor, F) for name in dir(holder) if is_in_place(name) or name == "__setitem__"
)


def _as_function(function: Callable) -> Callable:
    """The method of logits that calls this function of them."""

    def method(self, *args, **kwargs):
        return TracedLogits.__torch_function__(function, (), (self, *args), kwargs)

    return method


for _name in ("log_softmax", "tanh", *TOKEN_WISE):
    setattr(TracedLogits, _name, _as_function(getattr(torch, _name)))
for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "rtruediv",
    "pow",
    "neg",
    "abs",
    "matmul",
    "rmatmul",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "len",
    "iter",
    "array",
    "setitem",
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ipow",
):
    setattr(TracedLogits, f"__{_name}__", _as_function(getattr(Tensor, f"__{_name}__")))
