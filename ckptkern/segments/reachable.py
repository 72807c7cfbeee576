"""Which modules a function runs or can reach."""

from __future__ import annotations

import functools
import types

from torch import Tensor, nn
from torch.nn.parameter import Parameter


def _walk(module: nn.Module, found: dict[int, nn.Module]) -> None:
    pending: list[nn.Module | None] = [module]
    for one in pending:
        if one is not None and id(one) not in found:
            found[id(one)] = one
            if children := one._modules:
                pending += children.values()


_NO_MODULES = frozenset((Tensor, Parameter, type(None), bool, int, float, str))


def modules_of(function, args: tuple, kwargs: dict) -> tuple[list[nn.Module], list[nn.Module]]:
    """(the modules that a call runs for sure, others that it can reach), with their children.

    The first are the function itself, what it is bound to, or the `self` of a decorated method; their parameters are
    watched for changes. The others are among its arguments, defaults and closure, and the globals that its code names.
    """
    own: dict[int, nn.Module] = {}
    others: dict[int, nn.Module] = {}
    reachable = [*args, *kwargs.values()]
    while isinstance(function, functools.partial):
        reachable += (*function.args, *function.keywords.values())
        function = function.func
    if isinstance(function, nn.Module):
        _walk(function, own)
    elif isinstance(function, types.MethodType):
        if isinstance(function.__self__, nn.Module):
            _walk(function.__self__, own)
    elif isinstance(function, types.FunctionType):
        if args and isinstance(args[0], nn.Module):
            _walk(args[0], own)
        reachable += function.__defaults__ or ()
        for cell in function.__closure__ or ():
            try:
                reachable.append(cell.cell_contents)
            except ValueError:  # not filled yet
                continue
        names = function.__globals__
        reachable += [names[name] for name in function.__code__.co_names if name in names]
    for value in reachable:
        if type(value) in _NO_MODULES:
            continue
        for part in value if type(value) in (list, tuple) else (value,):
            if isinstance(part, nn.Module) and id(part) not in own:
                _walk(part, others)
    return list(own.values()), list(others.values())
