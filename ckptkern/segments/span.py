"""Several calls in a row as one activation checkpoint: layers that a model calls one by one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..state import SegmentState
from .decisions import saved_decisions
from .segment import Segment


class _Next(NamedTuple):
    """A call after the first. state: what it reads, without the arguments that the call before it returned; places: (leaf of
    the arguments, leaf of what that call returned) of these; spec: how the leaves lie in the arguments."""

    function: Callable
    state: SegmentState
    places: list[tuple[int, int]]
    spec: TreeSpec


class Span(Segment):
    """A region that calls are added to. Each takes results of the one before it.

    Saved for backward: the arguments of the first call, of the others what no call of the span made, decisions
    (`saved_decisions`), and 2.5 KiB of random state a call. The graph is that of the calls, so that what each returns may be
    used and differentiated as usual. Backward recomputes all calls at once, in their order, each from its own state.
    """

    __slots__ = ("__weakref__", "context", "first_call", "later", "returned")

    def __init__(self, module: nn.Module, function: Callable, args: tuple, kwargs: dict[str, Any]):
        """function: what a call of the module runs, in forward and in recompute."""
        contexts = saved_decisions()
        super().__init__(module, args, kwargs, True, contexts, "default", True, None)
        self.first_call, self.context = function, contexts[0]
        self.later: list[_Next] = []
        self.returned: list[tuple[weakref.ref, int]] = []  # tensors that the last call returned, and their versions

    def first(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of the first call."""
        return self.noted(self.record(self.context, self.first_call, args, kwargs))

    def noted(self, result: Any) -> Any:
        leaves = tree_leaves(result)
        self.returned = [(weakref.ref(t), t._version) if isinstance(t, Tensor) else None for t in leaves]
        return result

    def takes(self, args: tuple, kwargs: dict[str, Any]) -> list[tuple[int, int]]:
        """The places in such a call of what the last call returned; [] if there are none, or one was changed since."""
        if self.changed() is not None:  # a parameter, since the last call: this region is to say so in backward
            return []
        found = {}
        for i, one in enumerate(self.returned):
            if one is not None and (tensor := one[0]()) is not None and tensor.requires_grad:
                found[id(tensor)] = i, tensor._version == one[1]
        at = [(j, *found[id(leaf)]) for j, leaf in enumerate(tree_leaves((args, kwargs))) if id(leaf) in found]
        return [(j, i) for j, i, _ in at] if all(same for *_, same in at) else []

    def next(
        self, module: nn.Module, function: Callable, args: tuple, kwargs: dict[str, Any], places: list[tuple[int, int]]
    ) -> Any:
        """The result of another call, which `takes` found these places in."""
        leaves, spec = tree_flatten((args, kwargs))
        for j, _ in places:
            leaves[j] = None
        state = self.state_of(module, *tree_unflatten(leaves, spec), True)
        self.later.append(_Next(function, state, places, spec))
        result = self.noted(self.record(self.context, function, args, kwargs))
        state.settle()
        return result

    def roots(self) -> list[nn.Module]:
        return [root for state in (self.state, *(one.state for one in self.later)) for root in state.roots()]

    def call(self, args: tuple, kwargs: dict[str, Any]) -> None:
        result = self.first_call(*args, **kwargs)
        for function, state, places, spec in self.later:
            made = tree_leaves(result)
            leaves = tree_leaves(state.arguments())
            for j, i in places:
                leaves[j] = made[i]
            args, kwargs = tree_unflatten(leaves, spec)
            unreadable = self.enter(state)
            torch._C._push_on_torch_function_stack(self.recompute_context)  # above the modes of this call
            try:
                with unreadable:
                    result = function(*args, **kwargs)
            finally:
                torch._C._pop_torch_function_stack()
                state.exit()
