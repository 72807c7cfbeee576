"""Records which attributes a forward reads, of its modules and of the objects that these hold, such as configurations."""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.unmodified import collecting_nothing
from .protection import seeded, unmoved
from .trace import PLAIN_VALUES

# Attributes of an object that were read, by name, with those that were read of their values. None: all, whatever they are.
Reads = dict[str, Any]

OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "forward"))  # attributes, which do not tell modules apart
CONTAINERS = (list, dict, set, tuple)
# Compared by ==.
VALUES = (*PLAIN_VALUES, bytes, complex, slice, range, torch.dtype, torch.device, torch.Size, enum.Enum)
CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type, types.ModuleType)


def is_object(value: object) -> bool:
    """Has it attributes that a forward may read, and is it no module, tensor, container or function?"""
    return not isinstance(value, (*VALUES, *CONTAINERS, *CODE, nn.Module, Tensor)) and isinstance(
        getattr(value, "__dict__", None), dict
    )


class _Recorder:
    """Notes attributes while classes have its `__getattribute__`. of: objects by id, with the names that were read of them and,
    where that is an object, the value."""

    def __init__(self, module: nn.Module):
        self.of: dict[int, tuple[object, dict[str, Any]]] = {id(m): (m, {}) for m in module.modules()}
        self.whole: set[int] = set()  # ids of objects whose __dict__ was read, or whose reads cannot be seen
        self.classes: dict[type, Callable | None] = {}  # with the __getattribute__ of their own, if they have one
        for m in list(module.modules()):
            self.observe(m)

    def observe(self, one: object) -> None:
        kind = type(one)
        if kind in self.classes:
            return
        read, own = kind.__getattribute__, vars(kind).get("__getattribute__")

        def noted(self_: object, name: str) -> Any:
            if id(self_) not in self.of:
                return read(self_, name)
            names = self.of[id(self_)][1]
            names.setdefault(name, None)
            value = read(self_, name)
            if name == "__dict__":
                # nn.Module looks there for parameters
                if sys._getframe(1).f_code.co_filename != nn.modules.module.__file__:
                    self.whole.add(id(self_))
            elif not isinstance(value, nn.Module) and (id(value) in self.of or is_object(value)):
                names[name] = value
                if id(value) not in self.of:
                    self.of[id(value)] = value, {}
                    self.observe(value)
            return value

        try:
            kind.__getattribute__ = noted  # type: ignore[method-assign, assignment]
        except TypeError:  # a class that is not written in Python
            self.whole.add(id(one))
        else:
            self.classes[kind] = own

    def stop(self) -> None:
        for kind, own in self.classes.items():
            if own is None:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = own  # type: ignore[method-assign]

    def reads(self, one: object, above: frozenset[int] = frozenset()) -> Reads | None:
        if id(one) in self.whole:
            return None
        common, above = (OF_EVERY_MODULE if isinstance(one, nn.Module) else ()), above | {id(one)}
        return {
            name: {} if value is None or id(value) in above else self.reads(value, above)
            for name, value in self.of[id(one)][1].items()
            if name not in common and not name.startswith("__") and not hasattr(nn.Module, name)
        }


@contextmanager
def recording(module: nn.Module) -> Iterator[_Recorder]:
    recorder = _Recorder(module)
    try:
        yield recorder
    finally:
        recorder.stop()


def reads_of(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Reads | None]:
    """What the class's forward reads in training and in evaluation, by the path of each module inside."""
    with seeded(), unmoved(module), torch.no_grad(), collecting_nothing():
        found: dict[str, Reads | None] = {}
        for mode in (True, False):
            module.train(mode)
            with recording(module) as recorder:
                type(module).forward(module, *args, **kwargs)
            ours = {path: recorder.reads(m) for path, m in module.named_modules()}
            found = joined(found, ours)
        return found


def joined(one: Reads | None, other: Reads | None) -> Any:
    """All that either has read."""
    if one is None or other is None:
        return None
    return {name: joined(one.get(name, {}), other.get(name, {})) for name in {**one, **other}}
