"""Evaluates arguments of a fused op that a module computes from its parameters and its call's arguments, without its input:
scale, shift and gate of an adaptive norm (adaLN), or an attention bias.

The steps are a small part of the trace. Each call runs them on its own arguments, outside of the op and with autograd.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import ShapeError
from ..ops.dispatch.choices import autocast_off
from .guard import OF_EVERY_MODULE
from .reading import Argument, Reading, Weight
from .trace import Node, Unreadable, is_in_place, leaves_of, recomputed, tensors_in

COMPARED = frozenset((bool, float, int, slice, str, torch.dtype, torch.Size))
LARGEST = 64  # calls; a vector for each sample takes fewer


class Result(NamedTuple):
    """Names what the step of the call `at` returned; of several tensors the one at `output`."""

    at: int
    output: int


class FromInput(NamedTuple):
    """Names a value that follows the op's input: its dtype or device, the input itself for a function that reads these alone
    ("data"), or a number that is `value` for `samples` samples."""

    name: str
    value: int = 0
    samples: int = 1

    def of(self, x: Tensor) -> Any:
        if self.name != "samples":
            return getattr(x, self.name)
        if x.shape[0] * self.value % self.samples:
            raise ShapeError(f"convert: a batch of {x.shape[0]} is not a multiple of {self.samples // self.value}")
        return x.shape[0] * self.value // self.samples


Followed = dict[tuple[int, int], FromInput | None]  # by (call, argument); None: a value that changes in another way


class Step(NamedTuple):
    """Describes a call. of: the path of a submodule, or a function. Among the leaves of args and kwargs are Result,
    Argument, Weight and FromInput. apart: without autocast, as in the module."""

    of: Any
    args: tuple
    kwargs: dict[str, Any]
    apart: bool


@dataclass
class Inputs:
    """Holds what the arguments of one call are computed from: its flattened arguments, the module's mode, the number of
    tokens, the op's input, the parts of parameters (each is split once, and the gradients of its parts are joined once), and
    what each step returned."""

    flat: list[Any]
    training: bool
    length: int
    x: Tensor
    parts: dict[tuple, tuple[Tensor, ...]] = field(default_factory=dict)
    computed: dict[int, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Computed:
    """Describes a tensor that each call computes anew: a traced node and, once resolved, the steps to run in order, by the
    place of their call. of_samples: a vector for each sample, or one vector for all."""

    node: Node | None
    of_samples: bool = False
    steps: dict[int, Step] = field(default_factory=dict)
    value: Result | Argument | Weight | None = None

    def of(self, module: nn.Module, call: Inputs) -> Tensor:
        if not call.computed:
            for at, step in self.steps.items():
                function = module.get_submodule(step.of) if isinstance(step.of, str) else step.of
                leaves = [live(leaf, module, call) for leaf in leaves_of((step.args, step.kwargs))]
                args, kwargs = recomputed((step.args, step.kwargs), iter(leaves))
                with autocast_off(call.x) if step.apart else contextlib.nullcontext():
                    call.computed[at] = function(*args, **kwargs)
        value = live(self.value, module, call)
        return value.expand(call.x.shape[0], *value.shape[1:]) if self.of_samples else value


def live(value: Any, module: nn.Module, call: Inputs) -> Any:
    if isinstance(value, Result):
        result = call.computed[value.at]
        return result if isinstance(result, Tensor) else tree_leaves(result)[value.output]
    if isinstance(value, Argument):
        return call.flat[value.index]
    if isinstance(value, Weight):
        return operator.attrgetter(value.path)(module)
    return value.of(call.x) if isinstance(value, FromInput) else value


def call(function: Callable, *args: Any, shape: Iterable[int] = (), **kwargs: Any) -> Node:
    """Returns a node of a function that the trace has not seen. Numbers among its arguments keep their present values."""
    node = Node("function", function.__name__, torch.Size(shape), args, kwargs, function=function)
    node.at = -id(node)
    return node


def templates(template: Any, kind: type) -> Iterator[Any]:
    """Yields all objects of a class in a template."""
    if isinstance(template, kind):
        yield template
    elif isinstance(template, (dict, tuple, list)):
        for item in template.values() if isinstance(template, dict) else template:
            yield from templates(item, kind)


def following(before: list[list[Any]], after: list[list[Any]], B: int, times: int) -> Followed:
    """Returns the values that follow the input, from the calls of two traces: with B samples, and with `times` as many in
    float64. Raises ValueError if the traces differ otherwise."""
    follows: Followed = {}
    for at, (ours, theirs) in enumerate(zip(before, after, strict=True)):
        for i, (value, other) in enumerate(zip(ours, theirs, strict=True)):
            if type(value) in COMPARED and value != other:
                follows[at, i] = None
                if isinstance(value, torch.dtype):
                    follows[at, i] = FromInput("dtype")
                elif type(value) is type(other) is int and other == times * value:
                    follows[at, i] = FromInput("samples", value, B)
    return follows


def resolve(module: nn.Module, reading: Reading, followed: Followed | None) -> None:
    """Turns all computed nodes of the reading into steps, in one dict. followed: values that follow the input, None if
    unknown. Raises Unreadable for a node that cannot run again, such as one that reads the op's input."""
    steps: dict[int, Step] = {}

    @functools.cache
    def is_free(node: Node) -> bool:
        """Returns whether the node is computed without the input, as far as the trace shows."""
        # an unknown function has changed memory that the node shares
        is_known = node.kind != "function" or node.function is not None
        is_input = node.kind == "argument" and node.source == reading.x
        return is_known and not is_input and all(map(is_free, node.inputs))

    def value_of(node):
        if not is_free(node):
            raise Unreadable("a scale, a gate or a bias is computed from the input")
        if node.kind == "unread":
            return FromInput("data")
        if node.kind == "argument":
            return Argument(node.source)
        if node.kind == "parameter":
            return Weight(node.source)
        if node.kind == "constant":
            raise Unreadable("a scale, a gate or a bias is a tensor from outside of the call")
        for outer in reversed(node.calls):  # the largest part that does not read the input
            count = len(steps)
            try:
                return step_of(outer)
            except Unreadable:
                for at in list(steps)[count:]:
                    del steps[at]
        if node.kind == "function" and (is_in_place(node.source) or node.kwargs.get("out") is not None):
            raise Unreadable(f"a scale, a gate or a bias is computed in place ({node.source})")
        return step_of(node)

    def step_of(call):
        """Adds the step of this call, and returns its Result."""
        of = call.source if call.kind == "module" else call.function
        inner = module.get_submodule(of).modules() if of is call.source else ()
        own = [value for m in inner for name, value in m.__dict__.items() if name not in OF_EVERY_MODULE]
        if tensors_in(own):  # an earlier part of a forward may have set them
            raise Unreadable(f"a scale, a gate or a bias is computed by {of}, which holds tensors that are not buffers")
        if call.at not in steps:
            leaves = [leaf_of(leaf, (call.at, i)) for i, leaf in enumerate(call.leaves)]
            if len(steps) >= LARGEST:
                raise Unreadable("a scale, a gate or a bias takes too many calls")
            args, kwargs = recomputed((call.args, call.kwargs), iter(leaves))
            steps[call.at] = Step(of, args, kwargs, call.apart)
        return Result(call.at, call.output)

    def leaf_of(value, place):
        if isinstance(value, Node):
            return value_of(value)
        if isinstance(value, torch.device):
            return FromInput("device")
        if followed is None and type(value) in (torch.dtype, int):
            raise Unreadable(
                "a scale, a gate or a bias is computed with numbers or dtypes that may depend on the input's"
            )
        follows = (followed or {}).get(place, value)
        if follows is None and value is not None:
            raise Unreadable(f"a scale, a gate or a bias is computed with {value}, which depends on the input")
        return follows

    for computed in templates([reading.arguments, reading.choices], Computed):
        if computed.node is not None:
            computed.value, computed.steps, computed.node = value_of(computed.node), steps, None


def conditions(template: Any) -> list[int]:
    """Returns the indices of the call's arguments that computed tensors read."""
    computed = [(tensor.value, tensor.steps) for tensor in templates(template, Computed)]
    return sorted({argument.index for argument in templates(computed, Argument)})
