"""Traces the dataflow of one call of a module, as a small graph of leaf modules and torch functions.

A module is checked with autocast off, whatever the model's call switches on. A forward that switches autocast off around a
matmul, as models do for scores or routers in float32, is not fused under autocast, where the op would round.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..nn import MultiheadAttention
from ..nn.unmodified import collecting_nothing
from ..segments.recorded import class_forward
from .layouts import parts_of

HALF = (torch.float16, torch.bfloat16)


def device_types(module: nn.Module) -> list[str]:
    """Returns the device types of the module's tensors that have an autocast."""
    types = {t.device.type for t in (*module.parameters(), *module.buffers())}
    return sorted(kind for kind in types if kind != "meta" and is_autocast_available(kind))


@contextlib.contextmanager
def switched(module: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Switches autocast off for the module's devices; with a dtype, switches it on, except for a module with 16-bit parameters.

    Autocast to float32 changes no number of a float32 forward, and shows where the forward switches autocast off.
    """
    is_on = dtype is not None and not any(p.dtype in HALF for p in module.parameters())
    with contextlib.ExitStack() as stack:
        if is_on:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", ".*autocast")  # a forward may ask for autocast's dtype
        for kind in device_types(module):
            on = {"dtype": torch.bfloat16, "cache_enabled": False} if is_on else {"enabled": False}
            stack.enter_context(torch.autocast(kind, **on))
            if is_on:
                torch.set_autocast_dtype(kind, dtype)
        yield


class Watched(TorchFunctionMode):
    """Notes what a forward keeps out of autocast, which is `switched` on around it.

    apart: the functions around which it switches autocast off, and whose results would have fewer bits under autocast.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.kinds, self.dtype = frozenset(device_types(module)), dtype
        self.apart: list[str] = []

    def is_apart(self, result) -> bool:
        """Returns whether autocast is off, or has another dtype, on the result's device."""
        if not isinstance(result, Tensor) or (kind := result.device.type) not in self.kinds:
            return False
        return not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) != self.dtype

    def note(self, function: Callable, args: tuple, kwargs: dict, result) -> None:
        """Notes the function if it runs outside of autocast, which would round its result."""
        if self.is_apart(result):
            # it may return something else, or take no other dtype
            with contextlib.suppress(Exception), torch.no_grad(), torch.autocast(result.device.type, torch.bfloat16):
                if function(*args, **kwargs).itemsize < result.itemsize:
                    self.apart.append(getattr(function, "__name__", "a function"))

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.note(function, args, kwargs or {}, result)
        return result


def upcast(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns a function that maps a module's inputs to inputs without autocast: unchanged, or in float32 if autocast
    rounded them."""
    is_on = any(map(torch.is_autocast_enabled, device_types(module)))
    if not is_on or any(p.dtype in HALF for p in module.parameters()):
        return Tensor.detach
    return lambda tensor: tensor.detach().float() if tensor.dtype in HALF else tensor.detach()


# Functions that bring a tensor's values to the host. A forward that branches on them has no one dataflow.
HOST_READS = frozenset(
    (
        "__bool__",
        "__contains__",
        "__float__",
        "__format__",
        "__index__",
        "__int__",
        "__repr__",
        "allclose",
        "equal",
        "is_nonzero",
        "item",
        "numpy",
        "tolist",
    )
)

ATTENTION_FORWARDS = (nn.MultiheadAttention.forward, MultiheadAttention.forward)  # they read parameters of out_proj
PLAIN_VALUES = frozenset((bool, int, float, str, type(None)))  # what a forward may branch on


class Unreadable(Exception):
    """Says why no fused op computes a module's forward."""


Call = tuple[tuple, dict[str, Any]]  # args, kwargs
# Names of functions that compute the same.
ADD = ("add", "__add__", "__radd__", "add_", "__iadd__")
MULTIPLY = ("mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply")
DIVIDE = ("div", "__truediv__", "div_", "true_divide")
SAME = {name: names[0] for names in (ADD, MULTIPLY, DIVIDE, ("cat", "concat", "concatenate")) for name in names}


@dataclass(eq=False)
class Node:
    """Describes a tensor of the call by its origin.

    kind        source
    "argument"  its index among the flattened arguments
    "parameter" its path; also a buffer's
    "constant"  None: a tensor from outside of torch functions, or from before the call
    "module"    the path of the leaf module that returned it
    "function"  the name of the torch function that returned it
    "unread"    None: a leaf module without parameters takes it for its dtype or device alone, as rotary embeddings do

    args, kwargs: those of the call that returned it, with a Node for every tensor. inputs: these Nodes in order.
    output: its place among the call's results. at: the call's place among all calls. function: what "function" names. calls:
    of modules that are not leaves and returned it too, the inner ones first. written: for a tensor that was changed through a
    view, its node before, and the view's node after. apart: the module switched autocast off around it. trained: it has a
    gradient, unlike rotary tables, which are computed from positions.
    """

    kind: str
    source: Any
    shape: torch.Size
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    output: int = 0
    at: int = -1
    function: Callable | None = None
    calls: list[Node] = field(default_factory=list)
    written: tuple[Node, Node] | None = None
    apart: bool = False
    trained: bool = False

    @property
    def leaves(self) -> list:
        """Returns the call's arguments, out of their containers."""
        return leaves_of((self.args, self.kwargs))

    @property
    def inputs(self) -> list[Node]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Node)]

    @property
    def pairs(self) -> list[list[Node]]:
        """Returns the two inputs in both orders; [] for another number of inputs."""
        return [self.inputs, self.inputs[::-1]] if len(self.inputs) == 2 else []

    @property
    def numbers(self) -> list[int | float]:
        return [argument for argument in self.args if isinstance(argument, (int, float))]

    def is_function(self, *names: str, of: int | None = None) -> bool:
        """Returns whether one of these functions returned the node, in place or not, or an operator that does the same. of:
        the number of tensors that it takes."""
        if self.kind != "function" or of not in (None, len(self.inputs)):
            return False
        return self.source in names or SAME.get(self.source, self.source.strip("_")) in names

    def called_with(self, *names: str) -> dict:
        """Returns the call's arguments by name; `names` are those of its positions."""
        return dict(zip(names, self.args, strict=False)) | self.kwargs


def is_leaf(module: nn.Module) -> bool:
    """Returns whether the module is read as one node."""
    return not module._modules or type(module).forward in ATTENTION_FORWARDS


def is_floating(value) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def leaves_of(values) -> list:
    """Returns the values in nested tuples, lists and dicts, in their order."""
    if type(values) in (tuple, list):
        return [leaf for value in values for leaf in leaves_of(value)]
    if type(values) is dict:
        return [leaf for value in values.values() for leaf in leaves_of(value)]
    return [values]


def tensors_in(values) -> list[Tensor]:
    return [leaf for leaf in leaves_of(values) if isinstance(leaf, Tensor)]


def recomputed(values, leaves: Iterator):
    """Returns the same nesting with other leaves."""
    if type(values) in (tuple, list):
        return type(values)([recomputed(value, leaves) for value in values])
    if type(values) is dict:
        return {name: recomputed(value, leaves) for name, value in values.items()}
    return next(leaves)


def mapped(function: Callable[[Tensor], Any], values):
    """Returns the same nesting with function(tensor) in place of each tensor."""
    return recomputed(values, (function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves_of(values)))


def plain_attributes(module: nn.Module) -> dict:
    """Returns the plain values among the module's attributes, on which its forward may branch."""
    return {name: value for name, value in module.__dict__.items() if type(value) in PLAIN_VALUES}


def settings(module: nn.Module) -> list[dict]:
    return [plain_attributes(m) for m in module.modules()]


def is_in_place(name: str) -> bool:
    """Returns whether torch's function of this name changes its first argument. __iadd__ and __setitem__ do, requires_grad_
    does not."""
    if name.endswith("__"):
        not_in_place = ("__index__", "__int__", "__invert__", "__iter__")
        return name == "__setitem__" or (name.startswith("__i") and name not in not_in_place)
    return name.endswith("_") and name != "requires_grad_"


class Trace(Watched):
    """Records one call of a module: its result, the node of every tensor, the log of calls, each call's arguments that are
    not tensors, and the functions with a gradient that the module keeps out of autocast."""

    def __init__(self, module: nn.Module, flat: list, autocast: torch.dtype):
        super().__init__(module, autocast)
        self.module, self.result = module, None
        self.paths = {id(m): path for path, m in module.named_modules()}
        self.inner = {m for m in module.modules() if m is not module}
        self.leaves = {m for m in self.inner if is_leaf(m) or parts_of(m) is not None}
        self.alive: list[object] = []  # so that no id is reused
        self.inside: list[nn.Module] = []  # leaf modules that are running
        self.taken: dict[int, bool] = {}  # id of what their functions take -> whether for its dtype or device alone
        self.nodes: dict[int, Node] = {}
        self.log: list[tuple] = []  # what was called, in order, with the plain values among its arguments
        self.calls: list[list] = []  # for each call, the leaves of its arguments that are not tensors
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for path, tensor in reversed(named):  # a shared tensor goes by its first path
            self.nodes[id(tensor)] = Node("parameter", path, tensor.shape, trained=isinstance(tensor, nn.Parameter))
        for index, value in enumerate(flat):
            if isinstance(value, Tensor):
                self.nodes[id(value)] = Node("argument", index, value.shape, trained=value.is_floating_point())
                self.alive.append(value)

    def node(self, tensor: Tensor) -> Node:
        if id(tensor) not in self.nodes:
            self.nodes[id(tensor)] = Node("constant", None, tensor.shape)
            self.alive.append(tensor)
        return self.nodes[id(tensor)]

    def counted(self, call: Call, of_leaf: bool = False) -> tuple[int, Call]:
        """Returns (the place of the call among all, the call with Nodes)."""
        self.calls.append([None if isinstance(leaf, Tensor) else leaf for leaf in leaves_of(call)])

        def node(tensor):
            is_unread = of_leaf and self.taken.get(id(tensor), False)
            return Node("unread", None, tensor.shape) if is_unread else self.node(tensor)

        return len(self.calls) - 1, mapped(node, call)

    def record(self, kind: str, source: str, call: Call, results, function: Callable | None = None) -> None:
        at, call = self.counted(call, kind == "module")
        leaves = leaves_of(call)
        self.log.append((kind, source, *((x.kind, x.source) if isinstance(x, Node) else str(x) for x in leaves)))
        trained = any(isinstance(leaf, Node) and leaf.trained for leaf in leaves) or (
            kind == "module" and bool(list(self.module.get_submodule(source).parameters()))
        )
        for i, result in enumerate(tree_leaves(results)):
            if isinstance(result, Tensor):
                self.nodes[id(result)] = node = Node(kind, source, result.shape, *call, i, at, function)
                node.apart, node.trained = self.is_apart(result), trained
                self.alive.append(result)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        # inside MoE blocks, values on the host choose rows, and are not this module's dataflow
        if name in HOST_READS and all(map(is_leaf, self.inside)):
            raise Unreadable(f"forward reads a tensor's values on the host ({name})")
        result = function(*args, **kwargs)
        if self.inside:
            trained = bool(list(self.inside[-1].parameters()))
            alone = not trained and isinstance(result, (torch.dtype, torch.device))  # a kernel may read a norm's input
            for tensor in tensors_in((args, kwargs)):
                self.taken[id(tensor)] = alone and self.taken.get(id(tensor), True)
        else:
            trained = any(self.node(tensor).trained for tensor in tensors_in((args, kwargs)))
        if trained:
            self.note(function, args, kwargs, result)
        if not self.inside:
            changed = args[0] if is_in_place(name) else kwargs.get("out")
            forgotten = self.forget_views(changed, name) if isinstance(changed, Tensor) else []
            self.record("function", name, (args, kwargs), changed if isinstance(changed, Tensor) else result, function)
            for before, now in forgotten:
                now.written = before, self.nodes[id(changed)]
        return result

    def forget_views(self, changed: Tensor, name: str) -> list[tuple[Node, Node]]:
        """Gives new nodes to other tensors in the changed memory. Returns (the node before, the node now) of each."""
        pairs, strided = [], changed.layout == torch.strided
        memory = changed.untyped_storage().data_ptr() if strided else 0
        for other in self.alive if memory else ():
            if not isinstance(other, Tensor) or other is changed or other.layout != torch.strided:
                continue
            if other.untyped_storage().data_ptr() == memory:
                now = Node("function", f"{name} of a view", other.shape, trained=True)
                pairs.append((self.node(other), now))
                self.nodes[id(other)] = now
        return pairs

    def after(self, module: nn.Module, args: tuple, kwargs: dict, result) -> None:
        """Notes what a module returned: a leaf's result becomes a node, unless the leaf is an identity; other modules' nodes
        exist."""
        of_leaf = module in self.leaves
        if of_leaf:
            self.inside.pop()
        if self.inside:
            return
        path, arguments = self.paths[id(module)], {id(value) for value in leaves_of((args, kwargs))}
        if of_leaf:
            if id(result) not in arguments:
                self.record("module", path, (args, kwargs), result)
            self.taken.clear()
            return
        at, call = self.counted((args, kwargs))
        for i, output in enumerate(tree_leaves(result)):
            if isinstance(output, Tensor) and id(output) not in arguments:
                outer = Node("module", path, output.shape, *call, i, at, apart=self.is_apart(output))
                self.node(output).calls.append(outer)


def trace(module: nn.Module, call: Call, flat: list | None = None, autocast: torch.dtype = torch.float32) -> Trace:
    """Traces module.forward without gradients, in the module's present mode. flat: the values that "argument" nodes count.
    autocast: its dtype meanwhile, for a float32 module.

    Raises Unreadable for a forward that reads tensors on the host, or changes its arguments or plain attributes of its modules.
    """
    (args, kwargs), flat = call, leaves_of(call) if flat is None else flat
    tracer, before, drawn = Trace(module, flat, autocast), settings(module), random.getstate()
    versions = [
        (tensor, tensor._version) for tensor in flat if isinstance(tensor, Tensor) and not tensor.is_inference()
    ]
    hooks = [m.register_forward_pre_hook(lambda leaf, _: tracer.inside.append(leaf)) for m in tracer.leaves]
    hooks += [m.register_forward_hook(tracer.after, with_kwargs=True) for m in tracer.inner]
    try:
        with switched(module, autocast), tracer, torch.no_grad(), collecting_nothing():
            tracer.result = class_forward(module, args, kwargs)  # not a forward that convert has set
    finally:
        for hook in hooks:
            hook.remove()
    if any(tensor._version != version for tensor, version in versions):
        raise Unreadable("forward changes its arguments in place")
    if settings(module) != before:
        raise Unreadable("forward changes attributes of its modules")
    if random.getstate() != drawn:
        raise Unreadable("forward samples Python's random numbers")
    return tracer
