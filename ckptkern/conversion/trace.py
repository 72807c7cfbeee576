"""The dataflow of one call of a module, as a small graph of leaf modules and torch functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

# Functions that bring a tensor's values to the host. A forward that branches on them has no one dataflow.
HOST_READS = frozenset((
    "__bool__", "__contains__", "__float__", "__format__", "__index__", "__int__", "__repr__", "allclose", "equal",
    "is_nonzero", "item", "numpy", "tolist",
))  # fmt: skip

PLAIN_VALUES = frozenset((bool, int, float, str, type(None)))  # what a forward may branch on


class Unreadable(Exception):
    """Why a module's forward is not one of those that a fused op computes."""


@dataclass(eq=False)
class Node:
    """A tensor of the call, by what made it.

    kind        source
    "argument"  its index among leaves_of((args, kwargs))
    "parameter" its path; also a buffer's
    "constant"  None: a tensor that was made outside of torch functions, or before the call
    "module"    the path of the leaf module that returned it
    "function"  the name of the torch function that returned it

    args, kwargs: those of the call that made it, with a Node for every tensor. inputs: these Nodes in order.
    output: its place among the call's results.
    """

    kind: str
    source: Any
    shape: torch.Size
    args: tuple = ()
    kwargs: dict[str, Any] | None = None
    output: int = 0

    @property
    def inputs(self) -> list[Node]:
        return [one for one in tree_leaves((self.args, self.kwargs)) if isinstance(one, Node)]

    def is_function(self, *names: str) -> bool:
        return self.kind == "function" and self.source in names

    def called_with(self, *names: str) -> dict[str, Any]:
        """The call's arguments by name; `names` are those of its positions."""
        return dict(zip(names, self.args, strict=False)) | (self.kwargs or {})


def is_leaf(module: nn.Module) -> bool:
    """Is the module read as one node?"""
    return not module._modules or isinstance(module, nn.MultiheadAttention)


def leaves_of(values: Any) -> list[Any]:
    """The values in nested tuples, lists and dicts, in their order."""
    if type(values) in (tuple, list):
        return [leaf for one in values for leaf in leaves_of(one)]
    if type(values) is dict:
        return [leaf for one in values.values() for leaf in leaves_of(one)]
    return [values]


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Those that its forward may branch on, or change."""
    return {name: value for name, value in module.__dict__.items() if type(value) in PLAIN_VALUES}


def settings(module: nn.Module) -> list[dict[str, Any]]:
    return [plain_attributes(m) for m in module.modules()]


class _Tracer(TorchFunctionMode):
    def __init__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        super().__init__()
        self.module = module
        self.paths = {id(m): path for path, m in module.named_modules()}
        self.alive: list[object] = []  # so that no id is given twice
        self.inside = 0  # leaf modules that are running
        self.nodes: dict[int, Node] = {}
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for path, tensor in reversed(named):  # a shared tensor goes by its first path
            self.nodes[id(tensor)] = Node("parameter", path, tensor.shape)
        for index, value in enumerate(leaves_of((args, kwargs))):
            if isinstance(value, Tensor):
                self.nodes[id(value)] = Node("argument", index, value.shape)

    def node(self, tensor: Tensor) -> Node:
        if id(tensor) not in self.nodes:
            self.nodes[id(tensor)] = Node("constant", None, tensor.shape)
            self.alive.append(tensor)
        return self.nodes[id(tensor)]

    def with_nodes(self, values: Any) -> Any:
        return tree_map(lambda value: self.node(value) if isinstance(value, Tensor) else value, values)

    def record(self, kind: str, source: str, args: tuple, kwargs: dict[str, Any], results: object) -> None:
        args, kwargs = self.with_nodes(args), self.with_nodes(kwargs)
        for i, result in enumerate(tree_leaves(results)):
            if isinstance(result, Tensor):
                self.nodes[id(result)] = Node(kind, source, result.shape, args, kwargs, i)
                self.alive.append(result)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in HOST_READS:
            raise Unreadable(f"forward reads a tensor's values on the host ({name})")
        result = function(*args, **kwargs)
        if self.inside == 0:
            if name == "__setitem__":
                self.record("function", name, args, kwargs, args[0])
            else:
                self.record("function", name, args, kwargs, result)
        return result

    def _is_inner_leaf(self, module: nn.Module) -> bool:
        return module is not self.module and id(module) in self.paths and is_leaf(module)

    def before(self, module: nn.Module, args: tuple) -> None:
        self.inside += self._is_inner_leaf(module)

    def after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], result: object) -> None:
        if not self._is_inner_leaf(module):
            return
        self.inside -= 1
        given = {id(value) for value in tree_leaves((args, kwargs))}
        if self.inside == 0 and id(result) not in given:  # an identity leaves no node
            self.record("module", self.paths[id(module)], args, kwargs, result)


def trace(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[object, Callable[[Tensor], Node]]:
    """(what module.forward(*args, **kwargs) returns, the Node of any tensor in it).

    The call runs without gradients in the module's present mode. Raises Unreadable for a forward that reads tensors on the
    host or changes plain attributes of its modules.
    """
    tracer, before = _Tracer(module, args, kwargs), settings(module)
    hooks = [nn.modules.module.register_module_forward_pre_hook(tracer.before)]
    hooks.append(nn.modules.module.register_module_forward_hook(tracer.after, with_kwargs=True))
    try:
        with tracer, torch.no_grad():
            result = module.forward(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    if settings(module) != before:
        raise Unreadable("forward changes attributes of its modules")
    return result, tracer.node
