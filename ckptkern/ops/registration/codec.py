"""Options of an op as arguments of a library op: a NamedTuple becomes four lists, because a schema has at most 64 arguments."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.types import IntLikeType

SCHEMA = "int[] ints, float[] floats, str[] strings, SymInt[] sizes"
_LISTS = {bool: 0, int: 0, float: 1, str: 2, torch.dtype: 2, IntLikeType: 3}
_DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}"
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Layout(NamedTuple):
    """How values of a type lie in the lists; plain data, which torch.compile can trace.

    kind: "value", "dtype", "bool", "fields" of a NamedTuple, "many" of one type, or "optional". place: of the list. type: the
    NamedTuple, None for others.
    """

    kind: str
    place: int
    type: type | None
    inner: tuple[Layout, ...]


def layout_of(hint: Any) -> Layout:
    """hint: a NamedTuple of bool, int, float, str, torch.dtype and IntLikeType, of such NamedTuples, of tuple[X, ...] of any of
    these, or of any of these or None."""
    if hint in _LISTS:
        kind = {bool: "bool", torch.dtype: "dtype"}.get(hint, "value")
        return Layout(kind, _LISTS[hint], None, ())
    if hasattr(hint, "_fields"):
        return Layout("fields", 0, hint, tuple(map(layout_of, typing.get_type_hints(hint).values())))
    if typing.get_origin(hint) is tuple:
        return Layout("many", 0, None, (layout_of(typing.get_args(hint)[0]),))
    others = tuple(one for one in typing.get_args(hint) if one is not types.NoneType)  # IntLikeType is a union, too
    if len(others) == len(typing.get_args(hint)):
        raise TypeError(f"no list of a schema holds options of type {hint!r}; see layout_of")
    return Layout("optional", 0, None, (layout_of(typing.Union[others]),))  # noqa: UP007 (of a tuple)


def _write(layout: Layout, value: Any, lists: tuple[list, ...]) -> None:
    kind, place, _, inner = layout
    if kind == "fields":
        for one, part in zip(inner, value, strict=True):
            _write(one, part, lists)
    elif kind in ("many", "optional"):
        parts = value if kind == "many" else () if value is None else (value,)
        lists[0].append(len(parts))
        for part in parts:
            _write(inner[0], part, lists)
    elif kind == "dtype":
        lists[place].append(_NAMES[value])
    else:
        lists[place].append((1 if value else 0) if kind == "bool" else value)


def _read(layout: Layout, lists: tuple[Iterator, ...]) -> Any:
    kind, place, type_, inner = layout
    if kind == "fields":
        return type_(*(_read(one, lists) for one in inner))
    if kind == "many":
        return tuple(_read(inner[0], lists) for _ in range(next(lists[0])))
    if kind == "optional":
        return _read(inner[0], lists) if next(lists[0]) else None
    value = next(lists[place])
    return _DTYPES[value] if kind == "dtype" else bool(value) if kind == "bool" else value


def pack(layout: Layout, options: Any) -> tuple[list, list, list, list]:
    """The four lists of SCHEMA."""
    lists: tuple[list, list, list, list] = ([], [], [], [])
    _write(layout, options, lists)
    return lists


def unpack(layout: Layout, lists: Sequence) -> Any:
    """The inverse of `pack`."""
    return _read(layout, tuple(map(iter, lists)))


def replaced(options: Any, **values: Any) -> Any:
    """options with new values of the fields of these names, its own and those of the NamedTuples in it."""
    if not hasattr(options, "_fields"):
        return tuple(replaced(one, **values) for one in options) if isinstance(options, tuple) else options
    fields = zip(options._fields, options, strict=True)
    inner = {name: replaced(one, **values) for name, one in fields if isinstance(one, tuple)}
    return options._replace(**inner | {name: value for name, value in values.items() if name in options._fields})


def values_of(options: Any, name: str) -> list:
    """The values of the fields of this name, likewise."""
    if not isinstance(options, tuple):
        return []
    own = [getattr(options, name)] if name in getattr(options, "_fields", ()) else []
    return own + [value for one in options for value in values_of(one, name)]
