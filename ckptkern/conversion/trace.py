"""Traces the dataflow of one call of a module, as a small graph of leaf modules and torch functions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..nn import MultiheadAttention
from ..nn.unmodified import collecting_nothing
from .autocast import Watched, switched_on
from .layouts import parts_of

# Functions that bring a tensor's values to the host. A forward that branches on them has no one dataflow.
HOST_READS = frozenset((
    "__bool__", "__contains__", "__float__", "__format__", "__index__", "__int__", "__repr__", "allclose", "equal",
    "is_nonzero", "item", "numpy", "tolist",
))  # fmt: skip

ATTENTION_FORWARDS = (nn.MultiheadAttention.forward, MultiheadAttention.forward)  # they read parameters of out_proj
PLAIN_VALUES = frozenset((bool, int, float, str, type(None)))  # what a forward may branch on


class Unreadable(Exception):
    """Says why no fused op computes a module's forward."""


class Outer(NamedTuple):
    """A call of a module that is no leaf, which returned a tensor. args, kwargs, output, at, apart: as of a Node."""

    path: str
    args: tuple
    kwargs: dict[str, Any]
    output: int
    at: int
    apart: bool


@dataclass(eq=False)
class Node:
    """A tensor of the call, by what made it.

    kind        source
    "argument"  its index among the flattened arguments
    "parameter" its path; also a buffer's
    "constant"  None: a tensor that was made outside of torch functions, or before the call
    "module"    the path of the leaf module that returned it
    "function"  the name of the torch function that returned it

    args, kwargs: those of the call that made it, with a Node for every tensor. inputs: these Nodes in order.
    output: its place among the call's results. at: the call's place among all calls. function: what "function" names. calls: of
    modules that returned it too, the inner ones first. written: of a tensor that was changed through a view of it, its node
    before, and the view's after. apart: did the module switch autocast off around it?
    """

    kind: str
    source: Any
    shape: torch.Size
    args: tuple = ()
    kwargs: dict[str, Any] | None = None
    output: int = 0
    at: int = -1
    function: Callable | None = None
    calls: list[Outer] = field(default_factory=list)
    written: tuple[Node, Node] | None = None
    apart: bool = False

    @property
    def inputs(self) -> list[Node]:
        return [one for one in leaves_of((self.args, self.kwargs)) if isinstance(one, Node)]

    def is_function(self, *names: str) -> bool:
        return self.kind == "function" and self.source in names

    def called_with(self, *names: str) -> dict[str, Any]:
        """The call's arguments by name; `names` are those of its positions."""
        return dict(zip(names, self.args, strict=False)) | (self.kwargs or {})


def is_leaf(module: nn.Module) -> bool:
    """Is the module read as one node?"""
    return not module._modules or type(module).forward in ATTENTION_FORWARDS


def has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def leaves_of(values: Any) -> list[Any]:
    """The values in nested tuples, lists and dicts, in their order."""
    if type(values) in (tuple, list):
        return [leaf for one in values for leaf in leaves_of(one)]
    if type(values) is dict:
        return [leaf for one in values.values() for leaf in leaves_of(one)]
    return [values]


def recomputed(values: Any, leaves: Iterator[Any]) -> Any:
    """The same nesting with other leaves."""
    if type(values) in (tuple, list):
        return type(values)([recomputed(one, leaves) for one in values])
    if type(values) is dict:
        return {name: recomputed(one, leaves) for name, one in values.items()}
    return next(leaves)


def mapped(function: Callable[[Tensor], Any], values: Any) -> Any:
    """The same nesting with function(tensor) in place of each tensor."""
    return recomputed(values, (function(one) if isinstance(one, Tensor) else one for one in leaves_of(values)))


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Those that its forward may branch on, or change."""
    return {name: value for name, value in module.__dict__.items() if type(value) in PLAIN_VALUES}


def settings(module: nn.Module) -> list[dict[str, Any]]:
    return [plain_attributes(m) for m in module.modules()]


def is_in_place(name: str) -> bool:
    """Does torch's function of this name change its first argument? __iadd__ does, requires_grad_ does not."""
    return (name.endswith("_") and not name.endswith("__") and name != "requires_grad_") or (
        name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__", "__invert__")
    )


def _overlap(a: Tensor, b: Tensor) -> bool:
    return (
        a.layout == b.layout == torch.strided and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0
    )


class _Tracer(Watched):
    def __init__(self, module: nn.Module, flat: list[Any], autocast: torch.dtype):
        super().__init__(module, autocast)
        self.module = module
        self.paths = {id(m): path for path, m in module.named_modules()}
        self.alive: list[object] = []  # so that no id is given twice
        self.inside: list[nn.Module] = []  # leaf modules that are running
        self.opaque = (
            0  # of these, MoE blocks: their values on the host choose rows, and are no dataflow of this module
        )
        self.nodes: dict[int, Node] = {}
        self.log: list[tuple] = []  # what was called, in order, with the plain values among its arguments
        self.calls: list[list[Any]] = []  # of each call the leaves of its arguments that are no tensors
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for path, tensor in reversed(named):  # a shared tensor goes by its first path
            self.nodes[id(tensor)] = Node("parameter", path, tensor.shape)
        for index, value in enumerate(flat):
            if isinstance(value, Tensor):
                self.nodes[id(value)] = Node("argument", index, value.shape)
                self.alive.append(value)
        # nodes of what has a gradient, by id: rotary tables, which are computed of positions, have none
        given = [*module.parameters(), *(one for one in flat if isinstance(one, Tensor) and one.is_floating_point())]
        self.trained = {id(self.nodes[id(one)]) for one in given}

    def node(self, tensor: Tensor) -> Node:
        if id(tensor) not in self.nodes:
            self.nodes[id(tensor)] = Node("constant", None, tensor.shape)
            self.alive.append(tensor)
        return self.nodes[id(tensor)]

    def counted(self, args: tuple, kwargs: dict[str, Any]) -> tuple[int, tuple, dict[str, Any]]:
        """(the place of a call among all, its args and kwargs with Nodes)."""
        self.calls.append([None if isinstance(one, Tensor) else one for one in leaves_of((args, kwargs))])
        return len(self.calls) - 1, *mapped(self.node, (args, kwargs))

    def record(
        self, kind: str, source: str, args: tuple, kwargs: dict[str, Any], results: object, function: Callable | None = None
    ) -> None:  # fmt: skip
        trained = self.is_trained(args, kwargs) or (
            kind == "module" and has_parameters(self.module.get_submodule(source))
        )
        at, args, kwargs = self.counted(args, kwargs)
        given = [(one.kind, one.source) if isinstance(one, Node) else str(one) for one in leaves_of((args, kwargs))]
        self.log.append((kind, source, *given))
        for i, result in enumerate(tree_leaves(results)):
            if isinstance(result, Tensor):
                made = Node(kind, source, result.shape, args, kwargs, i, at, function, apart=self.is_apart(result))
                self.nodes[id(result)] = made
                self.alive.append(result)
                if trained:
                    self.trained.add(id(made))

    def is_trained(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        return any(id(self.node(one)) in self.trained for one in leaves_of((args, kwargs)) if isinstance(one, Tensor))

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in HOST_READS and not self.opaque:
            raise Unreadable(f"forward reads a tensor's values on the host ({name})")
        result = function(*args, **kwargs)
        trained = has_parameters(self.inside[-1]) if self.inside else self.is_trained(args, kwargs)
        if trained and self.is_apart(result) and self.would_round(function, args, kwargs, result):
            self.apart.append(name)
        if not self.inside:
            changed = args[0] if name == "__setitem__" or is_in_place(name) else kwargs.get("out")
            forgotten = self.forget_views(changed, name) if isinstance(changed, Tensor) else []
            self.record("function", name, args, kwargs, changed if isinstance(changed, Tensor) else result, function)
            for before, now in forgotten:
                now.written = before, self.nodes[id(changed)]
        return result

    def forget_views(self, changed: Tensor, name: str) -> list[tuple[Node, Node]]:
        """Other tensors of the memory that was changed are not what made them any more; returns their nodes before and now."""
        found = []
        for other in self.alive:
            if isinstance(other, Tensor) and other is not changed and _overlap(other, changed):
                now = Node("function", f"{name} of a view", other.shape)
                found.append((self.node(other), now))
                self.trained.add(id(now))
                self.nodes[id(other)] = now
        return found

    def before(self, leaf: nn.Module, args: tuple) -> None:
        self.inside.append(leaf)
        self.opaque += not is_leaf(leaf)

    def after(self, leaf: nn.Module, args: tuple, kwargs: dict[str, Any], result: object) -> None:
        self.inside.pop()
        self.opaque -= not is_leaf(leaf)
        given = {id(value) for value in leaves_of((args, kwargs))}
        if not self.inside and id(result) not in given:  # an identity leaves no node
            self.record("module", self.paths[id(leaf)], args, kwargs, result)

    def after_outer(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], result: object) -> None:
        if self.inside:
            return
        given, (at, args, kwargs) = {id(value) for value in leaves_of((args, kwargs))}, self.counted(args, kwargs)
        for i, one in enumerate(tree_leaves(result)):
            if isinstance(one, Tensor) and id(one) not in given:
                self.node(one).calls.append(Outer(self.paths[id(module)], args, kwargs, i, at, self.is_apart(one)))


@dataclass
class Trace:
    """One call of a module: what it returned, the node of every tensor in it, what was called, each call's arguments that are
    no tensors, and the functions that it keeps out of autocast, besides those of what has no gradient."""

    result: object
    node: Callable[[Tensor], Node]
    log: list[tuple]
    calls: list[list[Any]]
    apart: list[str]


def trace(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], flat: list[Any] | None = None,
    autocast: torch.dtype = torch.float32,
) -> Trace:  # fmt: skip
    """Calls module.forward without gradients, in the module's present mode. flat: the values that "argument" nodes count.
    autocast: its dtype meanwhile, of a float32 module.

    Raises Unreadable for a forward that reads tensors on the host, or changes its arguments or plain attributes of its modules.
    """
    flat = leaves_of((args, kwargs)) if flat is None else flat
    tracer, before, drawn = _Tracer(module, flat, autocast), settings(module), random.getstate()  # of Python's own
    versions = [value._version for value in flat if isinstance(value, Tensor) and not value.is_inference()]
    hooks = []
    for inner in {m for m in module.modules() if m is not module}:
        if not (is_leaf(inner) or parts_of(inner) is not None):
            hooks.append(inner.register_forward_hook(tracer.after_outer, with_kwargs=True))
            continue
        hooks.append(inner.register_forward_pre_hook(tracer.before))
        hooks.append(inner.register_forward_hook(tracer.after, with_kwargs=True))
    try:
        with switched_on(module, autocast), tracer, torch.no_grad(), collecting_nothing():
            result = type(module).forward(module, *args, **kwargs)  # not one that convert has set
    finally:
        for hook in hooks:
            hook.remove()
    if versions != [value._version for value in flat if isinstance(value, Tensor) and not value.is_inference()]:
        raise Unreadable("forward changes its arguments in place")
    if settings(module) != before:
        raise Unreadable("forward changes attributes of its modules")
    if random.getstate() != drawn:
        raise Unreadable("forward samples Python's random numbers")
    return Trace(result, tracer.node, tracer.log, tracer.calls, tracer.apart)
