"""What is read of a traced graph, and the small steps of reading that attention.py and grammar.py share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .leaves import Leaves, Probability, Weight, live_probability
from .trace import Node, Unreadable

VIEWS = (
    "__get__", "__getitem__", "chunk", "clone", "contiguous", "expand", "expand_as", "flatten", "float", "half", "movedim",
    "moveaxis", "narrow", "permute", "reshape", "select", "split", "squeeze", "swapaxes", "swapdims", "t", "tensor_split",
    "to", "transpose", "type", "type_as", "unbind", "unflatten", "unsafe_chunk", "unsqueeze", "view", "bfloat16",
)  # fmt: skip
ADD = ("add", "__add__", "__radd__", "add_", "__iadd__")
MULTIPLY = ("mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply")
DIVIDE = ("div", "__truediv__", "div_", "true_divide")
SCALING = "scaling"  # of peft's layers: the scales of low-rank updates, by adapter
PRODUCT = ("matmul", "__matmul__", "bmm")


def is_view(node: Node) -> bool:
    """Does it show the elements of one tensor, some or all? Not if another tensor chooses them."""
    return node.is_function(*VIEWS) and (len(node.inputs) == 1 or node.is_function("type_as", "expand_as", "to"))


class Argument(NamedTuple):
    """One of the call's flattened arguments, in a form that binding.in_form names."""

    index: int
    form: str = ""


class Table(NamedTuple):
    """A buffer's first rows, as many as the input has tokens, in a form that binding.in_form names."""

    path: str
    form: str


class Rows(NamedTuple):
    """One of `count` equal parts of a parameter's rows."""

    weight: Weight
    part: int
    count: int


class OfExperts(NamedTuple):
    """A or B of low-rank updates of all experts, as peft lays them out in one matrix: A [E r, d], or B [n, r E], whose columns
    are in the order of ranks; factor: "a" or "b"."""

    weight: Weight
    factor: str
    experts: int


class Scale(NamedTuple):
    """The scale of an adapter's low-rank update: an entry of the dict `scaling` of the layer at `path`, read in each call."""

    path: str
    adapter: str


class Update(NamedTuple):
    """A low-rank update: the fields of ckptkern.LoRA."""

    a: Weight | OfExperts
    b: Weight | Rows | OfExperts
    scale: float | Scale
    dropout_p: Probability | float

    def rows(self, part: int, count: int) -> Update:
        """That of one of `count` equal parts of the layer's rows."""
        if isinstance(self.dropout_p, Probability) and self.dropout_p.value:
            raise Unreadable("a low-rank update with dropout of a weight that is split")
        return self._replace(b=Rows(self.b, part, count), dropout_p=0.0)  # the guard sees it if that changes


class Layer(NamedTuple):
    """A linear layer where it is applied: what it reads, and its low-rank update."""

    weight: Weight
    bias: Weight | None
    out_features: int
    input: Node
    update: Update | None = None


def updates(**layers: Layer | Update | None) -> dict[str, Any]:
    """The argument `lora` of an op, if any of these has an update."""
    found = {name: one.update if isinstance(one, Layer) else one for name, one in layers.items()}
    found = {name: update for name, update in found.items() if update is not None}
    return {"lora": found} if found else {}


@dataclass
class Reading:
    """A fused op with its arguments: constants, Weight, Rows, Argument, Probability; x: the argument that is its input.

    logits_of: the path of an MoE's router whose first result is the logits, "" if there is none. choices: for each open
    question the changes of `arguments` that answer it, by the path of the argument.
    """

    op: str
    arguments: dict[str, Any]
    x: int
    choices: list[list[dict[tuple[str, ...], Any]]] = field(default_factory=list)
    logits_of: str = ""

    def candidates(self) -> Iterator[dict[str, Any]]:
        for answers in itertools.product(*self.choices):
            arguments = self.arguments
            for answer in answers:
                for path, value in answer.items():
                    arguments = _changed(arguments, path, value)
            yield arguments


def _changed(arguments: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    name, *rest = path
    return arguments | {name: _changed(arguments[name], tuple(rest), value) if rest else value}


@dataclass
class Part:
    """What was read of a sublayer: its op's arguments, the node that it reads, and the open choices."""

    arguments: dict[str, Any]
    input: Node
    choices: list[list[dict[str, Any]]] = field(default_factory=list)
    logits_of: str = ""

    def at(self, *prefix: str) -> list[list[dict[tuple[str, ...], Any]]]:
        """The choices, with the paths of their arguments in an op."""
        return [[{(*prefix, name): value for name, value in one.items()} for one in choice] for choice in self.choices]


class Steps:
    """Steps of reading, over the leaves of one module."""

    def __init__(self, leaves: Leaves):
        self.leaves = leaves
        self.layers_read = 0  # how far it went
        self.masked: dict[Node, Node] = {}  # what a low-rank update's dropout gave, and what reads it

    def strip(self, node: Node, dropouts: list[Probability] | None = None) -> Node:
        """What a node shows through views, casts and, if they are collected, dropouts."""
        while True:
            if is_view(node):
                node = node.inputs[0]
            elif dropouts is not None and (p := self.leaves.dropout(node)) is not None:
                dropouts.append(p)
                node = node.inputs[0]
            else:
                return node

    def refuse(self, what: str, node: Node) -> Unreadable:
        return Unreadable(f"{what} {self.leaves.describe(node)}")

    def linear_of(self, node: Node) -> Layer | None:
        """The linear layer that a node is the result of."""
        linear = self.leaves.linear(node)
        if linear is not None:
            return Layer(linear.weight, linear.bias, linear.out_features, node.inputs[0])
        if not (node.is_function(*ADD) and len(node.inputs) == 2):
            return None
        for base, update in (node.inputs, node.inputs[::-1]):
            base = self.strip(base)
            if (linear := self.leaves.linear(base)) is None:
                continue
            found = self.update(update, self.strip(base.inputs[0]))
            if found is not None:
                return Layer(linear.weight, linear.bias, linear.out_features, base.inputs[0], found)
        return None

    def update(self, node: Node, x: Node) -> Update | None:
        """scale * b(a(dropout(x)))."""
        node, scale = self.strip(node), 1.0
        while node.is_function(*MULTIPLY, *DIVIDE) and len(node.inputs) == 1:
            scale, node = scale * self.number(node), self.strip(node.inputs[0])
        pair = []
        for _ in "ba":
            linear = self.leaves.linear(node)
            if linear is None or linear.bias is not None or linear.weight.form:
                return None
            dropouts: list[Probability] = []
            pair, reader, node = [linear.weight, *pair], node, self.strip(node.inputs[0])
        if self.leaves.dropout(node) is not None and self.masked.setdefault(node, reader) is not reader:
            raise Unreadable("low-rank updates that share one dropout's mask")
        node = self.strip(node, dropouts)
        return Update(*pair, self.scale_of(pair[0].path, scale), self.probability(dropouts)) if node is x else None

    def scale_of(self, path: str, scale: float) -> float | Scale:
        """Where the scale of the update whose A is at this path is held, if it is as peft's layers hold it."""
        parts = path.split(".")
        for i in range(len(parts) - 1):
            held = vars(self.leaves.module.get_submodule(".".join(parts[:i]))).get(SCALING)
            for adapter in parts[i:]:
                if type(held) is dict and held.get(adapter) == scale:
                    return Scale(".".join(parts[:i]), adapter)
        return scale

    def number(self, node: Node) -> float:
        """What a node's one tensor is multiplied by."""
        numbers = [one for one in node.args if isinstance(one, (int, float))]
        if len(numbers) != 1:
            raise self.refuse("no number scales", node)
        return 1 / numbers[0] if node.is_function(*DIVIDE) else float(numbers[0])

    def linear(self, node: Node, what: str) -> Layer:
        found = self.linear_of(node)
        if found is None:
            raise self.refuse(f"{what} is not a linear layer but", node)
        self.layers_read += 1
        return found

    def probability(self, found: list[Probability]) -> Probability | float:
        p = live_probability(found)
        return 0.0 if p is None else p

    def norm_arguments(self, node: Node | None, name: str = "norm") -> dict[str, Any]:
        if node is None:
            return {}
        kind, weight, bias, eps = self.leaves.norm(node)
        return {name: kind, f"{name}_weight": weight, f"{name}_bias": bias, f"{name}_eps": eps}
