"""Ops of the catalogue with some of their options, as functions of the tensors that are trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from support.cases import SEED, Tensors
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ckptkern.ops import catalog
from ckptkern.ops.catalog import Entry, Sizes

ENTRIES = {one.name: one for one in (*catalog.OPS.values(), *catalog.OTHER_OPS)}


class Call(NamedTuple):
    """An op with its arguments. Called with tensors by name it gives the op's floating-point results, several of them as one
    tensor; masks are the same in every call."""

    def __str__(self) -> str:
        return f"{self.entry.name}-{self.arguments.get('recompute', '')}"

    entry: Entry
    arguments: dict

    @property
    def op(self) -> str:
        """The name of the op, which several functions may share."""
        return self.entry.op.name

    @property
    def others(self) -> list[Tensor]:
        """The tensors among the arguments that are not trained: masks, targets, bounds."""
        return [one for one in tree_leaves(self.arguments) if isinstance(one, Tensor)]

    def make(self, dtype: torch.dtype = torch.float32, *, frozen: Iterable[str] = (), seed: int = 0) -> Tensors:
        leaves = catalog.random_leaves(self.arguments, dtype, seed=seed)
        return {name: t.requires_grad_(name not in frozen) for name, t in leaves.items()}

    def with_(self, **arguments: Any) -> Call:
        return self._replace(arguments=self.arguments | arguments)

    def unseeded(self, tensors: Tensors) -> Tensor:
        found = [one for one in tree_leaves(catalog.call(self.entry, self.arguments, tensors)) if one is not None]
        found = [one for one in found if one.is_floating_point()]
        return found[0] if len(found) == 1 else torch.cat([one.reshape(-1) for one in found])

    def __call__(self, tensors: Tensors) -> Tensor:
        torch.manual_seed(SEED)
        return self.unseeded(tensors)


def call_of(name: str, *options: str, mode: int = 0, sizes: Sizes = Sizes(), **more: Any) -> Call:  # noqa: B008
    """options: names of the catalogue, with what goes with them. mode: the place of the recompute mode, the default's first."""
    entry = ENTRIES[name]
    chosen, arguments = entry.every_option(sizes), entry.inputs(sizes)
    for option in options:
        arguments |= chosen[option]
    modes = {"recompute": entry.modes[mode]} if entry.modes else {}
    return Call(entry, arguments | modes | more)


def dropouts(name: str) -> list[str]:
    """The options of an op that drop something."""
    return [one for one in ENTRIES[name].every_option() if one == "p" or one.endswith("_p")]


def dropping(name: str, **more: Any) -> Call:
    """An op that drops what it can, which moves the generator."""
    return call_of(name, *dropouts(name), **more)
