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

from .. import ops
from .logits import REMEDY, Matmul
from .tokens import LOG_PROBS, LOGITS, NEVER, STATISTICS, dtype_of

IN_PLACE = (
    "ckptkern.convert: a compiled model changes its logits in place, for which they would have to be there. Convert with "
    "exclude= for this layer"
)
_library = torch.library.Library("ckptkern", "FRAGMENT")
_library.define("version_of(Tensor x) -> Tensor")
for _key in ("CPU", "CUDA"):
    _library.impl("version_of", lambda x: torch.full((), x._version, dtype=torch.int64, device=x.device), _key)
_library.impl("version_of", lambda x: torch.empty((), dtype=torch.int64, device=x.device), "Meta")


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

    def __init__(self, x, weight, bias, version, steps=(), mode="full", workspace=None):
        self.x, self.weight, self.bias, self.version = x, weight, bias, version
        self.steps, self.mode, self.workspace = steps, mode, workspace

    def of(self, x: Tensor, *steps: tuple) -> TracedLogits:
        return TracedLogits(x, self.weight, self.bias, self.version, (*self.steps, *steps), self.mode, self.workspace)

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
    def form(self) -> str:
        """Which function of the logits they are."""
        return LOG_PROBS if any(step[0] == "log_softmax" for step in self.steps) else LOGITS

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def ndim(self) -> int:
        return self.x.dim()

    @property
    def requires_grad(self) -> bool:
        return True

    def dim(self) -> int:
        return self.x.dim()

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
        one = (
            args[0] if len(args) == 1 and not kwargs else kwargs.get("dtype") if len(kwargs) == 1 and not args else None
        )
        if isinstance(one, torch.dtype) and (one == self.dtype or (self.dtype.itemsize < 4 and one == torch.float32)):
            return self if one == self.dtype else self.float()
        if isinstance(one, (torch.device, str)) and torch.device(one) == self.device:
            return self
        return self.read().to(*args, **kwargs)

    @_followed
    def view(self, *shape) -> Any:
        return self.reshape(*shape)

    @_followed
    def reshape(self, *shape) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if len(sizes) > 1 and not isinstance(sizes[-1], torch.dtype) and sizes[-1] == self.weight.shape[0]:
            return self.of(self.x.reshape(*sizes[:-1], self.x.shape[-1]))
        return self.read().reshape(*sizes)

    @_followed
    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        last = self.dim() - 1
        if end_dim % self.dim() < last:
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
        return self.of(self.x, ("mul", other)) if self.takes(other) else self.read() * other

    @_followed
    def __rmul__(self, other: Any) -> Any:
        return self * other

    @_followed
    def __truediv__(self, other: Any) -> Any:
        return self.of(self.x, ("div", other)) if self.takes(other) else self.read() / other

    def takes(self, other: Any) -> bool:
        """May they be multiplied by it?"""
        return isinstance(other, (int, float)) and self.form == LOGITS

    @_followed
    def tanh(self) -> Any:
        return self.of(self.x, ("tanh",)) if self.form == LOGITS else self.read().tanh()

    # -- statistics of their tokens

    @_followed
    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> Any:
        if self.form != LOGITS or dim not in (-1, self.dim() - 1):
            return self.read().log_softmax(dim, dtype=dtype)
        return self.of(self.x, ("log_softmax", -1, dtype or dtype_of(torch.log_softmax, self, dim=-1)))

    @_followed
    def gather(self, dim: int, index: Tensor) -> Tensor:
        tokens = index.dtype == torch.int64 and index.shape == (*self.shape[:-1], 1)
        found = self.statistic("gather", dim, index[..., 0]) if tokens else None
        return self.read().gather(dim, index) if found is None else found.to(self.dtype)[..., None]

    @_followed
    def logsumexp(self, dim: int, keepdim: bool = False) -> Tensor:
        found = self.statistic("logsumexp", dim)
        if found is None:
            return self.read().logsumexp(dim, keepdim)
        found = found.to(dtype_of(torch.logsumexp, self, dim=-1))
        return found[..., None] if keepdim else found

    @_followed
    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        found = self.statistic("argmax", dim)
        if found is None:
            return self.read().argmax(dim, keepdim)
        return found[..., None] if keepdim else found

    def statistic(self, name: str, dim: Any, target: Tensor | None = None) -> Tensor | None:
        """What this function of each token's classes returns [...]; None if linear_cross_entropy does not compute it."""
        last = self.dim() - 1
        if last < 1 or dim not in (-1, last) or (name, self.form) not in STATISTICS:
            return None
        returned, of = STATISTICS[name, self.form]
        target = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device) if target is None else target
        options = {f"return_{one}": True for one in returned}
        found = self.cross_entropy(target, reduction="none", ignore_index=NEVER, **options)
        return None if found is None else of(found)

    # -- their loss

    def cross_entropy(self, target: Tensor, **options: Any) -> Any:
        """ops.linear_cross_entropy of them: of scale z, or cap tanh(scale z); None for what it does not compute."""
        scale, cap = 1.0, None
        for name, *args in self.steps:
            if name == "tanh":
                if cap is not None:
                    return None
                cap = 1.0
            elif name in ("mul", "div"):
                factor = args[0] if name == "mul" else 1 / args[0]
                scale, cap = (scale * factor, None) if cap is None else (scale, cap * factor)
        if cap is not None and cap <= 0:
            return None
        return ops.linear_cross_entropy(
            self.x,
            self.weight,
            target,
            linear_bias=self.bias,
            logit_scale=scale if cap is None else scale * cap,
            softcap=cap,
            recompute=self.mode,
            workspace=self.workspace,
            **options,
        )

    def loss(
        self,
        input,
        target,
        weight=None,
        size_average=None,
        ignore_index=-100,
        reduce=None,
        reduction="mean",
        label_smoothing=0.0,
        function=F.cross_entropy,
    ):
        """F.cross_entropy, or F.nll_loss of log-probabilities."""
        options = dict(ignore_index=ignore_index, reduction=reduction)
        if function is F.cross_entropy:
            options["label_smoothing"] = label_smoothing
        is_covered = (
            (self.form != LOGITS or function is F.cross_entropy)
            and size_average is None
            and reduce is None
            and isinstance(target, Tensor)
            and target.dtype == torch.int64
            and target.shape == self.x.shape[:-1]
            and self.dim() == 2
            and (weight is None or (weight.dtype == self.dtype and not weight.requires_grad))
        )
        loss = self.cross_entropy(target, weight=weight, **options) if is_covered else None
        if loss is None:
            return function(self.read(), target, weight, size_average, reduce=reduce, **options)
        narrow = self.dtype.itemsize < 4 and not torch.is_autocast_enabled(self.device.type)
        return loss.to(self.dtype) if narrow else loss

    # -- everything else reads them

    def read(self) -> Tensor:
        """In the graph their values, outside of it the `Logits` of the same matmul."""
        if is_compiling():
            return self.after(F.linear(self.x, self.weight, self.bias))
        if self.__dict__.get("read_as") is None:
            if int(self.version) != self.weight._version:
                raise RuntimeError(
                    f"ckptkern.convert: the head's weight changed before the logits were computed. {REMEDY}"
                )
            logits = Matmul(self.x, self.weight, self.bias, self.mode, workspace=self.workspace).logits()
            self.__dict__["read_as"] = self.after(logits)
        return self.__dict__["read_as"]

    def after(self, z: Tensor) -> Tensor:
        for name, *args in self.steps:
            z = getattr(z, name)(*args)
        return z

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, TracedLogits) and is_compiling():
            if function is F.cross_entropy or function is F.nll_loss:
                return first.loss(*args, function=function, **kwargs)
            if args and not {"input", "out", "sparse_grad"} & set(kwargs) and (name := _method(function, len(args))):
                return getattr(first, name)(*args[1:], **kwargs)
        if kwargs.get("out") is not None or kwargs.get("inplace") or _changes(function):
            raise RuntimeError(IN_PLACE)
        args = tuple(one.read() if isinstance(one, TracedLogits) else one for one in args)
        kwargs = {name: one.read() if isinstance(one, TracedLogits) else one for name, one in kwargs.items()}
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if _is_in_place(name):
            raise RuntimeError(IN_PLACE)
        return getattr(self.read(), name)

    def __repr__(self) -> str:
        return f"TracedLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    __hash__ = object.__hash__


def _method(function: Callable, positional: int) -> str | None:
    """The name of the method above that this function is. Dynamo cannot look for a function in a dict."""
    for one, name in (
        (torch.tanh, "tanh"), (torch.log_softmax, "log_softmax"), (torch.gather, "gather"), (torch.logsumexp, "logsumexp"),
        (torch.argmax, "argmax"),
    ):  # fmt: skip
        if function is one:
            return name
    return "log_softmax" if function is F.log_softmax and positional <= 2 else None  # the third is _stacklevel


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_")


IN_PLACE_FUNCTIONS = frozenset(
    one for holder in (torch, Tensor, F) for name, one in vars(holder).items() if _is_in_place(name) and callable(one)
)
OPERATORS = Tensor.__iadd__, Tensor.__isub__, Tensor.__imul__, Tensor.__itruediv__, Tensor.__setitem__
COMMON = (
    *OPERATORS,
    Tensor.add_,
    Tensor.sub_,
    Tensor.mul_,
    Tensor.div_,
    Tensor.clamp_,
    Tensor.masked_fill_,
    Tensor.copy_,
)


def _changes(function: Callable) -> bool:
    """Is it in place? Dynamo cannot look for a function in a set: there the common ones."""
    if not is_compiling():
        return function in IN_PLACE_FUNCTIONS or function in OPERATORS
    for one in COMMON:  # noqa: SIM110
        if function is one:
            return True
    return False


def _reading(name: str) -> Callable:
    def method(self, *args):
        args = tuple(one.read() if isinstance(one, TracedLogits) else one for one in args)
        return getattr(self.read(), name)(*args)

    return method


def _refusing(self, *args):
    raise RuntimeError(IN_PLACE)


for _name in (
    "add", "radd", "sub", "rsub", "rtruediv", "pow", "neg", "abs", "matmul", "rmatmul", "eq", "ne", "lt", "le", "gt", "ge",
    "len", "iter", "array",
):  # fmt: skip
    setattr(TracedLogits, f"__{_name}__", _reading(f"__{_name}__"))
for _name in ("setitem", "iadd", "isub", "imul", "itruediv", "ipow"):
    setattr(TracedLogits, f"__{_name}__", _refusing)
