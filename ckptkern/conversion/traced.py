"""Defines the LM head's lazy logits under torch.compile, which Dynamo traces as a Python object and not as a tensor.

`TracedLogits` follows what models do between the LM head and F.cross_entropy, as `logits.Logits` does without a compiler, and
log_softmax, gather, logsumexp and argmax, by the same rules (`tokens.formula_after`, `loss`, `statistic`); an entropy needs
values. The graph has the head's input in place of the logits, and linear_cross_entropy in place of the loss. A compiled model
may return such an object: outside of the graph it is read as the `Logits` of the same matmul.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from .logits import REMEDY, Matmul, Step
from .tokens import SCALES, Formula, formula_after, is_loss, loss, statistic
from .trace import is_in_place, leaves_of, recomputed

IN_PLACE = (
    "ckptkern.convert: a compiled model changes its logits in place, which needs their values. Convert with exclude= for "
    "this layer"
)
_library = torch.library.Library("ckptkern", "FRAGMENT")
_library.define("version_of(Tensor x) -> Tensor")
for _key in ("CPU", "CUDA", "Meta"):
    _library.impl("version_of", lambda x: torch.full((), x._version, dtype=torch.int64, device=x.device), _key)


class TracedLogits:
    """Lazy logits F.linear(x, *head[:2]) after `steps`, each a method with its arguments: to, mul, div, tanh, log_softmax.

    x [..., d]: the head's input, of some tokens in the order in which the model sees them. version: the weight's, when x was
    computed. formula, dtype: of the logits after these steps.
    """

    requires_grad = True
    read_as: Tensor | None = None  # outside of the graph

    def __init__(self, x, head, version, steps=(), formula=None, dtype=None):
        self.x, self.head, self.version, self.steps = x, head, version, steps
        self.formula, self.dtype = formula or Formula(), dtype or x.dtype

    def of(self, x: Tensor, *steps: tuple, formula: Formula | None = None, dtype: torch.dtype | None = None):
        steps = (*self.steps, *steps)
        return TracedLogits(x, self.head, self.version, steps, formula or self.formula, dtype or self.dtype)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.x.shape[:-1], self.head.weight.shape[0]))

    @property
    def class_dim(self) -> int:
        return self.dim() - 1

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def cross_entropy(self, target: Tensor, **options):
        return self.formula.cross_entropy(self.head, self.x, target, **options)

    def without_values(self, step: Step):
        """Returns the step's result without values; None if it needs them."""
        x, name, args, kwargs = self.x, step.name, step.args[1:], step.kwargs
        if is_loss(step.function):
            return loss(step, self)
        if name in TOKEN_WISE:
            return statistic(step, self)
        if name in ELEMENTWISE:
            if (match := formula_after(step, self)) is None:
                return None
            formula, dtype = match
            return self.of(x, (name, *((-1, dtype) if name == "log_softmax" else args)), formula=formula, dtype=dtype)
        if not step.args:
            return None
        if name == "contiguous":
            return self
        if name == "float" or name == "to":
            wanted = [*args, *kwargs.values()] if name == "to" else [torch.float32]
            target = wanted[0] if len(wanted) == 1 else None
            there = isinstance(target, (torch.device, str)) and torch.device(target) == x.device
            if there or target == self.dtype:
                return self
            if target == torch.float32 and self.dtype.itemsize < 4:
                return self.of(x, ("to", target), dtype=target)
        elif name == "view" or name == "reshape":
            sizes = tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
            if len(sizes) > 1 and sizes[-1] == self.shape[-1]:
                return self.of(x.reshape(*sizes[:-1], x.shape[-1]))
        elif name == "flatten":
            last = kwargs.get("end_dim", args[1] if len(args) > 1 else -1)
            if last % self.dim() < self.dim() - 1:
                return self.of(x.flatten(*args, **kwargs))
        elif name == "__getitem__":
            items = args[0] if isinstance(args[0], tuple) else (args[0],)
            plain = all(isinstance(item, (int, slice)) or item is Ellipsis for item in items)
            n = self.dim()
            whole = items[-1] == slice(None) if Ellipsis in items or len(items) == n else len(items) < n
            return self.of(x[args[0]]) if plain and whole else None
        return None

    def read(self) -> Tensor:
        """Returns values in the graph; outside of it, the `Logits` of the same matmul."""
        if is_compiling():
            return self.after(F.linear(self.x, self.head.weight, self.head.bias))
        if self.read_as is None:
            if int(self.version) != self.head.weight._version:
                raise RuntimeError(
                    f"ckptkern.convert: the head's weight changed before the logits were computed. {REMEDY}"
                )
            self.read_as = self.after(Matmul(self.x, self.head).logits())
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
        leaves = [leaf.read() if isinstance(leaf, TracedLogits) else leaf for leaf in leaves_of(step[1:])]
        args, kwargs = recomputed(step[1:], iter(leaves))
        return function(*args, **kwargs)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("device", "dim", "ndim"):
            return getattr(self.x, name)
        if is_in_place(name):
            raise RuntimeError(IN_PLACE)
        return getattr(self.read(), name)

    def __repr__(self) -> str:
        return f"TracedLogits(shape={tuple(self.shape)}, dtype={self.dtype})"


# Statistics of tokens that the graph computes without logits, and elementwise functions that it follows.
TOKEN_WISE = frozenset(("argmax", "gather", "logsumexp"))
ELEMENTWISE = frozenset(("log_softmax", "tanh", *SCALES))
# Names of functions that change their first argument. Dynamo looks a function's name up in a set, but not into it.
CHANGING = frozenset(name for holder in (torch, Tensor, F) for name in dir(holder) if is_in_place(name))
METHODS = (
    "contiguous", "flatten", "float", "log_softmax", "reshape", "tanh", "to", "view", *TOKEN_WISE,
    "__array__", "__iter__", "__len__",
)  # fmt: skip
# Operators of Python, also reflected, such as __rpow__.
OPERATORS = [
    name
    for name in dir(Tensor)
    if callable(getattr(Tensor, name)) and {name, name.replace("__r", "__", 1)} & vars(operator).keys()
]


def _as_method(function: Callable) -> Callable:
    """Returns the method of logits that calls this function."""

    def method(self, *args, **kwargs):
        return TracedLogits.__torch_function__(function, (), (self, *args), kwargs)

    return method


for _name in (*METHODS, *OPERATORS):
    setattr(TracedLogits, _name, _as_method(getattr(Tensor, _name)))
