"""Describes how a module is called: the arguments that its forward reads, in one order, and the pattern that a check covers."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import itertools
import typing
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .protection import no_trace, unmoved
from .trace import PLAIN_VALUES, Call, leaves_of, mapped, recomputed, trace


def pattern_of(values: Iterable, flat: list) -> tuple:
    """Returns what arguments must have in common with checked ones: structure, dims, dtypes and plain values.

    Appends their leaves to `flat`, in the order of trace.leaves_of. This runs in each call, so tensors come first.
    """
    key = []
    for value in values:
        kind = type(value)
        if kind is Tensor:
            flat.append(value)
            key.append(value.dtype)
            key.append(value.dim())
        elif kind in PLAIN_VALUES:
            flat.append(value)
            key.append(value)
        elif kind is tuple or kind is list:
            key.append((kind, pattern_of(value, flat)))
        elif kind is dict:
            key.append((*value, pattern_of(value.values(), flat)))
        else:
            flat.append(value)
            key.append(kind if not isinstance(value, Tensor) else (kind, value.dtype, value.dim()))
    return tuple(key)


def regardless_of_precision(pattern: tuple) -> tuple:
    """Returns the pattern with one dtype for all floating-point tensors: autocast changes dtypes, and no check depends on
    them."""
    return tuple(
        regardless_of_precision(item)
        if isinstance(item, tuple)
        else torch.float32
        if isinstance(item, torch.dtype) and item.is_floating_point
        else item
        for item in pattern
    )


def check_keywords(op: str, function: Callable, model: nn.Module, kwargs: dict) -> None:
    """Raises TypeError for a keyword of the model's call that its forward does not have, such as a misspelt option of
    `function`, the public function called `op`.

    A forward with **kwargs accepts the names in its TypedDict, in the forwards inside and in the model's config, and any name
    with a tensor.
    """
    own = parameters_of(model)
    names, rest = keywords_of(own), next((p for p in own if p.kind is p.VAR_KEYWORD), None)
    unknown = [name for name in kwargs if name not in names]
    if unknown and rest is not None:
        hint = rest.annotation
        if isinstance(hint, str):  # postponed annotations
            with contextlib.suppress(Exception):  # a name that only type checkers import raises
                hint = typing.get_type_hints(type(model).forward, include_extras=True)[rest.name]
        names |= {name for kind in typing.get_args(hint) for name in getattr(kind, "__annotations__", ())}
        for module in model.modules():
            names |= keywords_of(parameters_of(module))
        config = getattr(model, "config", None)
        unknown = [
            name
            for name in unknown
            if not (name in names or hasattr(config, name) or any(map(torch.is_tensor, leaves_of(kwargs[name]))))
        ]
    if unknown:
        options = inspect.signature(function).parameters
        meant = difflib.get_close_matches(unknown[0], [name for name in options if name not in ("model", *kwargs)], 1)
        raise TypeError(
            f"{op}: neither {op} nor the forward of {type(model).__name__} has an argument {unknown[0]!r}"
            + (f"; did you mean {meant[0]!r}?" if meant else "")
        )


def parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    """Returns the parameters of the module's forward; **kwargs for a signature that Python cannot read."""
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]


def keywords_of(parameters: Iterable[inspect.Parameter]) -> set[str]:
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


class Untouched:
    """Stands for an argument, and raises whenever it is read."""

    def _looked_at(self, *_, **__):
        raise RuntimeError("a forward looked at the argument")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("a function took the argument")

    __getattr__ = __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _looked_at
    __iter__ = __len__ = __contains__ = __getitem__ = __call__ = __int__ = __float__ = __index__ = __str__ = _looked_at
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _looked_at
    __and__ = __rand__ = __or__ = __ror__ = __invert__ = __enter__ = __exit__ = _looked_at


def log_of(module: nn.Module, call: Call) -> list[tuple] | None:
    """Returns what a training call does, as a trace's log; None if the call raises, as for an argument that it reads."""
    with unmoved(module):
        module.train()
        try:
            return trace(module, call).log
        except Exception:  # a forward may raise anything on it
            return None


def not_looked_at(module: nn.Module, call: Call, names: Iterable[str]) -> list[str]:
    """Returns the names of the keyword arguments that the call ignores: it does the same with values that raise when read."""
    (args, kwargs), usual, ignored = call, log_of(module, call), []
    for name in names if usual is not None else ():
        hidden = kwargs | {name: recomputed(kwargs.get(name), itertools.repeat(Untouched()))}
        if log_of(module, (args, hidden)) == usual:
            kwargs = hidden
            ignored.append(name)
    return ignored


def described(value) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return repr(value) if type(value) in PLAIN_VALUES else f"of class {type(value).__name__}"


class Form:
    """Lists the arguments of a module that count, in one order.

    by_place: the names of its positional parameters; defaults: their default values; keywords: all names, in order; fixed:
    names that forward ignores, such as a step number that libraries pass from function to function.
    """

    def __init__(self, module: nn.Module, calls: list[Call]):
        self.module = module
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        usual = [p for p in parameters if p.name in keywords_of(parameters)]
        self.by_place = [p.name for p in usual if p.kind is p.POSITIONAL_OR_KEYWORD]
        if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
            self.by_place = []  # these stay where they are
        self.defaults = {p.name: p.default for p in usual if p.default is not p.empty}
        calls = [self.complete(call) for call in calls]
        self.keywords = list(dict.fromkeys(name for _, kwargs in calls for name in kwargs))
        self.known = frozenset((*self.keywords, *self.by_place, *self.defaults))
        self.reads = {}  # `Reads` of its modules' attributes, of forward in the calls that were checked
        self.fixed = {}  # values in place of arguments that do not count
        self.refused: set[tuple[str, Any]] = set()
        self.harmless: set[tuple[str, Any]] = set()  # values of other names that have no effect
        # without values, which would stay in memory, and be pickled
        self.example = mapped(
            lambda t: t if t.is_nested else torch.empty(t.shape, dtype=t.dtype, device="meta"), calls[0]
        )

    def complete(self, call: Call) -> Call:
        """Returns the call by keywords, with default values for absent arguments."""
        args, kwargs = call
        values = self.defaults | dict(zip(self.by_place, args, strict=False)) | kwargs
        return args[len(self.by_place) :], {name: values[name] for name in self.by_place if name in values} | values

    def counting(self, call: Call) -> list:
        """Returns the values that count, in their order, with fixed values for ignored names."""
        args, kwargs = call
        values = {**self.defaults, **dict(zip(self.by_place, args, strict=False)), **kwargs, **self.fixed}
        return [*args[len(self.by_place) :], *map(values.get, self.keywords)]

    def pattern(self, call: Call) -> tuple:
        """Returns what a call must have in common with checked calls, whatever its precision."""
        return regardless_of_precision(pattern_of(self.counting(call), []))

    def call_of(self, flat: list, call: Call) -> Call:
        """Returns a complete call with these leaves in place of the values that count."""
        values, (args, kwargs) = recomputed(self.counting(call), iter(flat)), call
        named = dict(zip(self.keywords, values[len(args) :], strict=True))
        return tuple(values[: len(args)]), kwargs | {n: v for n, v in named.items() if n not in self.fixed}

    def takes(self, kwargs: dict) -> bool:
        """Returns whether all names are known or have no effect. New names are tried once, on the example: forward ignores
        them, or does the same with these plain values."""
        new = {name: value for name, value in kwargs.items() if name not in self.known}
        if not new or torch.compiler.is_compiling():
            return not new
        kinds = {(name, value if type(value) in PLAIN_VALUES else type(value)) for name, value in new.items()}
        if not self.refused.isdisjoint(kinds):
            return False
        if not self.harmless.issuperset(kinds):
            args, example = call = self.example_call()
            with no_trace(self.module):  # in the middle of a training step
                self.known |= set(not_looked_at(self.module, call, new))
                new = {name: value for name, value in new.items() if name not in self.known}
                plain = all(type(value) in PLAIN_VALUES for value in new.values())
                usual = log_of(self.module, call) if plain else None
                if usual is None or log_of(self.module, (args, example | new)) != usual:
                    self.refused |= {kind for kind in kinds if kind[0] in new}
                    return False
            self.harmless |= new.items()
        return True

    def difference(self, call: Call) -> str:
        """Returns how this call differs from the example, with the remedy."""
        again = "Give convert a call like those of training"
        if names := ", ".join(name for name in call[1] if name not in self.known):
            return f"the example for convert had no {names}. {again}"
        ours, examples = self.counting(call), self.counting(self.example_call())
        names = [*map("argument {}".format, range(len(ours) - len(self.keywords))), *self.keywords]
        for name, argument, example in zip(names, ours, examples, strict=False):
            if len({regardless_of_precision(pattern_of([value], [])) for value in (argument, example)}) > 1:
                return (
                    f"{name} is {described(argument)}, and was {described(example)} in the example for convert. {again}"
                )
        return f"its arguments differ from those of the example for convert. {again}"

    def example_call(self) -> Call:
        """Returns a call like the example, of zeros, in the module's present dtype and on its present device."""
        parameter = next(self.module.parameters())

        def zeros(like):
            dtype = parameter.dtype if like.is_floating_point() else like.dtype
            return torch.zeros(like.shape, dtype=dtype, device=parameter.device)

        return mapped(zeros, self.example)
