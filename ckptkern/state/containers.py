"""Takes apart containers among a region's arguments other than tuples, lists and dicts, and puts them together."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, UserList, deque
from collections.abc import Callable
from types import SimpleNamespace

CONTAINERS = (dict, list, tuple, set, frozenset, deque, UserDict, UserList, SimpleNamespace)


def take_apart(value) -> tuple[tuple, Callable] | None:
    """Returns the contents of a container, and a function that makes a container like it from such a tuple. Returns None if
    the value is not a container or its class does not allow it."""
    if isinstance(value, (tuple, set, frozenset)):
        kind = type(value)
        of_iterable = kind in (set, frozenset) or kind.__new__ is tuple.__new__ or hasattr(kind, "n_sequence_fields")
        return (tuple(value), kind) if of_iterable and not hasattr(value, "__dict__") else None
    get, put = getattr, object.__setattr__
    if isinstance(value, (dict, UserDict, list, deque, UserList)):
        names = list(value) if isinstance(value, (dict, UserDict)) else range(len(value))
        get, put = type(value).__getitem__, type(value).__setitem__
    elif isinstance(value, SimpleNamespace):
        names = list(vars(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
    else:
        return None

    def filled(like, held):
        copied = copy.copy(like)
        for name, item in zip(names, held, strict=True):
            put(copied, name, item)
        return copied

    try:
        held = tuple(get(value, name) for name in names)
        empty = filled(value, (None,) * len(names))  # holds no tensor
        filled(empty, held)
    except Exception:  # a class's own methods may raise anything; its object is then passed on unchanged
        return None
    return held, lambda held: filled(empty, held)
