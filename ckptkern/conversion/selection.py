"""Selects modules of a model: by name with wildcards, by class, or by a function of (name, module)."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable

from torch import nn

LISTS = (nn.ModuleList, nn.ModuleDict)
SHOWN = 4  # lists that a message names

Selector = str | type | Callable[[str, nn.Module], bool]
Which = Selector | Iterable[Selector] | None


def several(which: Which) -> Iterable[Selector]:
    return (which,) if isinstance(which, (str, type)) or callable(which) else which or ()


def matches(which: Which, name: str, module: nn.Module) -> bool:
    """Returns whether the module matches one of these: names with wildcards, classes, or functions of (name, module)."""
    for selector in several(which):
        if isinstance(selector, type):
            matched = isinstance(module, selector)
        else:
            matched = fnmatch.fnmatchcase(name, selector) if isinstance(selector, str) else selector(name, module)
        if matched:
            return True
    return False


def check_names(model: nn.Module, include, exclude) -> None:
    """Raises ValueError for a name that matches no module, and for a name to include that matches only lists of modules."""
    modules = dict(model.named_modules(remove_duplicate=False))
    lists = [f"{name}.*" for name, module in modules.items() if name and isinstance(module, LISTS) and len(module)]
    where = f"; its lists of layers are {', '.join(map(repr, lists[:SHOWN]))}" if lists else ""
    for option, which in (("include", include), ("exclude", exclude)):
        for pattern in several(which):
            if not isinstance(pattern, str):
                continue
            names = fnmatch.filter(modules, pattern)
            if not names:
                close = difflib.get_close_matches(pattern, modules, 1, 0.0)
                raise ValueError(
                    f"convert: {option}={pattern!r} matches no module of {type(model).__name__}{where}"
                    + (f"; the closest name is {close[0]!r}" if close and close[0] else "")
                )
            if option == "include" and all(isinstance(modules[name], LISTS) for name in names):
                raise ValueError(
                    f"convert: include={pattern!r} names a list, which has no forward. Its members are {names[0] + '.*'!r}"
                )


def selected(model: nn.Module, include, exclude) -> set[nn.Module]:
    """Returns the modules that are included, all by default, and neither excluded nor inside an excluded one."""
    excluded = {inner for name, m in model.named_modules() if matches(exclude, name, m) for inner in m.modules()}
    return {
        m for name, m in model.named_modules() if m not in excluded and (include is None or matches(include, name, m))
    }
