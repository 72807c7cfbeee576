"""Describes what is read of a traced graph, and has the steps of reading that attention.py and grammar.py share.

A node is recognised by its results, not by its class. A leaf with a weight [n, k] that computes x W^T + b is a linear layer.
Results on random rows show which norm a leaf is, and whether its weight is w or 1 + w. The module's parameters must be random
meanwhile (check.random_parameters), because a zero bias does not show.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available
from torch.nn import functional as F

from ..nn.activations import recognised
from ..nn.layer import Dropout
from .check import TOLERANCE, Check, TensorFunction, in_dtype, replacing
from .trace import Node, Unreadable, is_floating, recomputed

DEFAULT_EPS = torch.finfo(torch.float32).eps
LIKE_ROUNDING = 5e-3  # relative error of a bfloat16 result that is rounded once more; int8 activations make 1e-2
_LONGEST_ACTIVATION = 20  # functions; gelu_tanh has eight. It bounds the time for longer formulas
Template = dict[str, Any]  # of an op's arguments, in which a Weight names a parameter


class Weight(NamedTuple):
    """Names a parameter or buffer by path, in a form of arguments.in_form, or one of `count` equal parts of its rows.

    Forms "a" and "b": A or B of the low-rank updates of `count` experts, which peft stores in one matrix: A [E r, d], or B [n,
    r E], with columns in the order of ranks.
    """

    path: str
    form: str = ""
    part: int = 0
    count: int = 1

    def rows(self, part: int, count: int) -> Weight:
        return self._replace(part=part, count=count)


class Norm(NamedTuple):
    kind: str
    weight: Weight | None
    bias: Weight | None
    eps: float


class Probability(NamedTuple):
    """Names the probability of a dropout: an attribute of the module at `path`, read in each call and 0 unless that module
    is in training mode; or with path and attribute "" the number `value`, by the whole module's mode."""

    path: str
    attribute: str
    value: float


def in_training(p: float) -> Probability:
    """Returns the Probability of a function's p, which the traced module passes in training mode only."""
    return Probability("", "", float(p))


def is_linear(module: nn.Module) -> bool:
    """Returns whether a call of the module runs nn.Linear's forward."""
    kind = type(module)
    return isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward and kind.__call__ is nn.Module.__call__


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def _outcome(leaf: nn.Module, x: Tensor) -> Tensor | None:
    """Returns the leaf's result; None if it raises or does not return a tensor."""
    try:
        with torch.no_grad():
            result = leaf(x)
    except Exception:  # a guess calls someone else's leaf with a tensor of our choice, which may raise anything
        return None
    return result if isinstance(result, Tensor) else None


def check_of(leaf: nn.Module, like: TensorFunction) -> Check:
    return Check(lambda flat: leaf(*flat), lambda flat: like(*flat))


def first_like(leaf: nn.Module, x: Tensor, ways: Iterable[tuple[TensorFunction, Any]]) -> Any:
    """Returns what is paired with the first function that gives the leaf's result for x, and in training and in evaluation
    the same result and gradients for the first rows of x; None if there is none."""
    y, was, parameters = _outcome(leaf, x), leaf.training, list(leaf.parameters(recurse=False))
    for like, match in ways if y is not None else ():
        if not same(y, like(x)):
            continue
        try:
            for leaf.training in (True, False):
                if check_of(leaf, like).error([x[:3]], [0], parameters) > TOLERANCE:
                    break
            else:
                return match
        except Exception:  # someone's leaf may raise anything, such as where a graph is missing
            continue
        finally:
            leaf.training = was
    return None


def agrees_in_16_bits(leaf: nn.Module, like: TensorFunction, x: Tensor) -> bool:
    """Returns whether the leaf computes like(x) up to rounding in bfloat16 and under autocast. Calls that it refuses do not
    count."""
    check, kind = check_of(leaf, like), x.device.type
    narrow = functools.partial(in_dtype, dtype=torch.bfloat16)
    try:
        with replacing(leaf, narrow):
            check.require([("", [narrow(x)])], LIKE_ROUNDING)
        with torch.autocast(kind, torch.bfloat16, enabled=is_autocast_available(kind)):
            check.require([("", [x])], LIKE_ROUNDING)
    except Unreadable:
        return False
    return True


class Steps:
    """Reads a module's graph step by step: what its leaves compute, and what lies between them."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.kinds: dict[tuple[str, str], Any] = {}  # what leaves compute, found out once
        self.layers_read = 0  # linear layers read so far
        self.masked: dict[Node, Node] = {}  # results of low-rank updates' dropouts, with their readers

    def leaf(self, node: Node) -> nn.Module | None:
        return self.module.get_submodule(node.source) if node.kind == "module" else None

    def once(self, kind: str, node: Node, find: Callable[[str, nn.Module, Node], Any]) -> Any:
        """Returns find(path, leaf, node), found out once, for a node that a leaf with one input tensor returned; None for
        other nodes."""
        leaf = self.leaf(node)
        if leaf is None or node.output or len(node.inputs) != 1:
            return None
        key = (kind, node.source)
        if key not in self.kinds:
            self.kinds[key] = find(node.source, leaf, node)
        return self.kinds[key]

    def describe(self, node: Node) -> str:
        if (leaf := self.leaf(node)) is not None:
            return f"{type(leaf).__name__} ({node.source})"
        kinds = {"argument": "an argument", "constant": "a constant", "parameter": f"a parameter ({node.source})"}
        return kinds.get(node.kind, node.source)

    # -- linear layers

    def linear_leaf(self, node: Node) -> Layer | None:
        if not node.is_function("linear"):
            match = self.once("linear", node, _find_linear)
            return match and Layer(*match, self.input_of(node))
        call = node.called_with("input", "weight", "bias")
        weight, bias = call["weight"], call.get("bias")
        if weight.kind != "parameter" or (bias is not None and bias.kind != "parameter"):
            return None
        return Layer(Weight(weight.source), bias and Weight(bias.source), weight.shape[0], self.input_of(node))

    # -- norms

    def norm(self, node: Node) -> Norm | None:
        if node.is_function("layer_norm", "rms_norm"):
            kind = node.source.removesuffix("_norm")
            names = ("weight", "bias") if kind == "layer" else ("weight",)
            call = node.called_with("input", "normalized_shape", *names, "eps")
            parameters = [call.get("weight"), call.get("bias")]
            if len(call["normalized_shape"]) != 1 or any(p is not None and p.kind != "parameter" for p in parameters):
                return None
            eps = call.get("eps", 1e-5 if kind == "layer" else None)
            weights = (p and Weight(p.source) for p in parameters)
            return Norm(kind, *weights, DEFAULT_EPS if eps is None else eps)
        return self.once("norm", node, _find_norm)

    # -- activations

    def activation(self, node: Node) -> tuple[str, Node] | None:
        """Returns (the activation, the node that it reads) of a leaf, or of a function of one tensor that is written out;
        None for other nodes."""
        if node.kind == "function":
            behind = [node]  # nodes of its shape, through functions, the nearest first
            for z in behind:
                name = None if z is node else recognised(functools.partial(_evaluated, node, z))
                if name not in (None, "identity"):
                    return name, self.strip(z)
                if z.kind == "function" and len(behind) <= _LONGEST_ACTIVATION:
                    behind += [
                        operand
                        for operand in dict.fromkeys(z.inputs)
                        if operand.shape == node.shape and operand not in behind
                    ]
            return None
        name = self.once("activation", node, lambda _, leaf, __: recognised(leaf))
        return name and (name, self.input_of(node))

    # -- dropout

    def dropout(self, node: Node) -> Probability | None:
        leaf = self.leaf(node)
        if type(leaf) in (nn.Dropout, Dropout):
            return Probability(node.source, "p", leaf.p)
        if node.is_function("dropout"):
            call = node.called_with("input", "p", "training")
            return in_training(call.get("p", 0.5) if call.get("training", True) else 0.0)
        return None

    def drop_path(self, node: Node) -> Probability | None:
        """Returns the probability of stochastic depth, which drops whole samples of x [B, ...] and scales the others by 1/(1
        - p); None for other nodes."""
        return self.once("drop_path", node, _find_drop_path)

    # -- what lies between leaves

    def strip(self, node: Node, dropouts: list[Probability] | None = None) -> Node:
        """Returns the node behind views, casts and, if they are collected, dropouts."""
        while True:
            if dropouts is not None and (p := self.dropout(node)) is not None:
                dropouts.append(p)
            # not if another tensor chooses the elements
            elif not (node.is_function(*VIEWS, of=1) or node.is_function("type_as", "expand_as", "to")):
                return node
            node = node.inputs[0]

    def input_of(self, node: Node) -> Node:
        """Returns the node behind views and casts of the first input."""
        return self.strip(node.inputs[0])

    def refuse(self, reason: str, node: Node) -> Unreadable:
        return Unreadable(f"{reason} {self.describe(node)}")

    def linear_of(self, node: Node) -> Layer | None:
        """Returns the linear layer, with its low-rank update, whose result the node is; None for other nodes."""
        if (layer := self.linear_leaf(node)) is not None:
            return layer
        for base, update in node.pairs if node.is_function("add") else ():
            layer = self.linear_leaf(self.strip(base))
            if layer is not None and (lora := self.update(update, layer.input)) is not None:
                return layer._replace(update=lora)
        return None

    def update(self, node: Node, x: Node) -> Update | None:
        """Reads scale * b(a(dropout(x))); None for other nodes."""
        scale, node = self.scaled(self.strip(node))
        b = self.linear_leaf(node)
        a = b and self.linear_leaf(b.input)
        if a is None or any(layer.bias is not None or layer.weight.form for layer in (a, b)):
            return None
        if self.dropout(a.input) is not None and self.masked.setdefault(a.input, b.input) is not b.input:
            raise Unreadable("low-rank updates share one dropout's mask")
        dropouts: list[Probability] = []
        if self.strip(a.input, dropouts) is not x:
            return None
        return Update(a.weight, b.weight, self.scale_of(a.weight.path, scale), self.probability(dropouts))

    def scale_of(self, path: str, scale: float) -> float | Scale:
        """Returns where a layer of peft holds the scale of the update whose A is at this path; the number itself if none
        does."""
        parts = path.split(".")
        for i in range(len(parts) - 1):
            owner = ".".join(parts[:i])
            held = vars(self.module.get_submodule(owner)).get(SCALING)
            for adapter in parts[i:]:
                if type(held) is dict and held.get(adapter) == scale:
                    return Scale(owner, adapter)
        return scale

    def scaled(self, node: Node) -> tuple[float, Node]:
        """Returns (the product of the numbers by which this node, and those behind it, multiply one tensor; that tensor's
        node). A node that multiplies nothing is its own."""
        product = 1.0
        while node.is_function("mul", "div", of=1):
            if len(node.numbers) != 1:
                raise self.refuse("the factor is not one number:", node)
            (number,) = node.numbers
            product *= 1 / number if node.is_function("div") else number
            node = self.input_of(node)
        return product, node

    def linear(self, node: Node, role: str) -> Layer:
        if (layer := self.linear_of(node)) is None:
            raise self.refuse(f"{role} is not a linear layer but", node)
        self.layers_read += 1
        return layer

    def probability(self, dropouts: list[Probability]) -> Probability | float:
        """Returns the only dropout of several in a row that is not 0 now; or the first, since it may be raised later.

        Raises Unreadable for two, whose matmul has no single mask.
        """
        live = [p for p in dropouts if p.value] or dropouts[:1]
        if len(live) > 1:
            raise Unreadable("it has two dropouts in a row")
        return live[0] if live else 0.0

    def norm_arguments(self, node: Node, name: str = "norm") -> Template:
        kind, weight, bias, eps = self.norm(node)
        return {name: kind, f"{name}_weight": weight, f"{name}_bias": bias, f"{name}_eps": eps}


def _parameters(leaf: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in leaf._parameters.items() if p is not None}


def _find_linear(path: str, leaf: nn.Module, node: Node) -> tuple[Weight, Weight | None, int] | None:
    own = _parameters(leaf)
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or weight.dim() != 2 or own.keys() - {"weight", "bias"}:
        return None

    def like(x):  # uses the present `form`
        weight = leaf._parameters["weight"]
        return F.linear(x, weight.t() if form else weight, leaf._parameters.get("bias"))

    for form, (n, k) in (("", weight.shape), ("t", weight.shape[::-1])):
        match = Weight(f"{path}.weight", form), None if bias is None else Weight(f"{path}.bias"), n
        if is_linear(leaf):
            return match
        # its own forward may quantise in some modes or dtypes only
        x = weight.new_empty(3, k).normal_()
        if first_like(leaf, x, [(like, match)]) and agrees_in_16_bits(leaf, like, x):
            return match
    return None


def _find_norm(path: str, leaf: nn.Module, node: Node) -> Norm | None:
    own, features = _parameters(leaf), node.shape[-1]
    if len(own) > 2 or any(p.shape != (features,) for p in own.values()):
        return None
    epsilons = [v for v in leaf.__dict__.values() if isinstance(v, float) and 0 < v <= 1e-2]
    tensors = (*own.values(), *filter(is_floating, leaf._buffers.values()))
    tensor = next(iter(tensors), torch.zeros(()))
    # rows of about the size of sqrt(eps), too, where another eps shows
    x = tensor.new_empty(6, features).normal_() + 0.5
    x = x * torch.tensor([1.0, 1.0, 1.0, 1e-2, 3e-3, 1e-3]).to(x)[:, None]
    ways = []
    for eps, (weight, bias), kind, form in itertools.product(
        dict.fromkeys((*epsilons, 1e-5, 1e-6, 1e-12, DEFAULT_EPS)),
        itertools.permutations((*own, None, None)[:2]),
        ("layer", "rms"),
        ("", "+1"),
    ):
        like = functools.partial(_normed, kind, own.get(weight), form, own.get(bias), eps)
        named = weight and Weight(f"{path}.{weight}", form), bias and Weight(f"{path}.{bias}")
        ways.append((like, Norm(kind, *named, eps)))
    return first_like(leaf, x, ways)


def _normed(kind: str, weight: Tensor | None, form: str, bias: Tensor | None, eps: float, x: Tensor) -> Tensor:
    rows = (F.layer_norm if kind == "layer" else F.rms_norm)(x, x.shape[-1:], eps=eps)
    rows = rows if weight is None else rows * (weight + 1 if form else weight)
    return rows if bias is None else rows + bias


def _evaluated(node: Node, z: Node, values: Tensor) -> Tensor:
    """Computes the node anew, with `values` in place of the node z."""
    if node is z:
        return values.clone()  # functions in place are called as well
    if node.kind != "function" or "dropout" in node.source:  # whose probability may be 0 for now
        raise Unreadable("not a function of one tensor")
    leaves = (_evaluated(leaf, z, values) if isinstance(leaf, Node) else leaf for leaf in node.leaves)
    args, kwargs = recomputed((node.args, node.kwargs), leaves)
    return node.function(*args, **kwargs)


def find_scale(path: str, leaf: nn.Module, node: Node) -> Weight | None:
    own = _parameters(leaf)
    if len(own) != 1:
        return None
    ((name, weight),) = own.items()
    x = weight.new_empty(3, 2, node.shape[-1]).normal_()
    ways = [(lambda x: x * weight, Weight(f"{path}.{name}"))]
    return first_like(leaf, x, ways) if weight.shape == node.shape[-1:] else None


def _find_drop_path(path: str, leaf: nn.Module, node: Node) -> Probability | None:
    if _parameters(leaf) or leaf._buffers:
        return None
    x, was = torch.ones(4096, 2, 2), leaf.training
    leaf.training = False
    identity = _outcome(leaf, x)
    leaf.training = True
    dropped = _outcome(leaf, x)
    leaf.training = was
    if identity is None or dropped is None or dropped.shape != x.shape or not torch.equal(identity, x):
        return None
    passed = (dropped[:, :1, :1] != 0).to(x.dtype)
    share = 1 - float(passed.mean())  # of dropped samples
    for attribute, p in leaf.__dict__.items():
        is_near = isinstance(p, float) and 0 < p < 1 and share > 0 and abs(share - p) < 0.1
        if is_near and same(dropped, (passed / (1 - p)).expand_as(x)):
            return Probability(path, attribute, p)
    return None


VIEWS = (
    "__get__", "__getitem__", "chunk", "clone", "contiguous", "expand", "expand_as", "flatten", "float", "half", "movedim",
    "moveaxis", "narrow", "permute", "reshape", "select", "split", "squeeze", "swapaxes", "swapdims", "t", "tensor_split",
    "to", "transpose", "type", "type_as", "unbind", "unflatten", "unsafe_chunk", "unsqueeze", "view", "bfloat16",
)  # fmt: skip
SCALING = "scaling"  # of peft's layers: the scales of low-rank updates, by adapter


class Argument(NamedTuple):
    """Names one of the call's flattened arguments, in a form of arguments.in_form."""

    index: int
    form: str = ""


class Scale(NamedTuple):
    """Names the scale of an adapter's low-rank update: an entry of the dict `scaling` of the layer at `path`, read in each
    call."""

    path: str
    adapter: str


class Update(NamedTuple):
    """Describes a low-rank update, by the fields of ckptkern.LoRA."""

    a: Weight
    b: Weight
    scale: float | Scale
    dropout_p: Probability | float

    def rows(self, part: int, count: int) -> Update:
        """Returns the update of one of `count` equal parts of the layer's rows."""
        if isinstance(self.dropout_p, Probability) and self.dropout_p.value:
            raise Unreadable("a split weight has a low-rank update with dropout")
        return self._replace(b=self.b.rows(part, count), dropout_p=0.0)  # the guard sees it if that changes


class Layer(NamedTuple):
    """Describes a linear layer where it is applied: its parameters, its input without views, and its low-rank update."""

    weight: Weight
    bias: Weight | None
    out_features: int
    input: Node
    update: Update | None = None

    def rows(self, part: int, count: int) -> Layer:
        """Returns one of `count` equal parts of the layer's rows."""
        weight, bias, update = (value and value.rows(part, count) for value in (self.weight, self.bias, self.update))
        return Layer(weight, bias, self.out_features // count, self.input, update)


def layers_as(**layers: Layer) -> Template:
    """Returns weights, biases and low-rank updates of these layers as arguments of an op."""
    arguments = {}
    for name, layer in layers.items():
        arguments |= {f"{name}_weight": layer.weight, f"{name}_bias": layer.bias}
    return arguments | updates(**layers)


def updates(**layers: Layer) -> Template:
    """Returns the argument `lora` of an op; {} if no layer has an update."""
    lora = {name: layer.update for name, layer in layers.items() if layer.update is not None}
    return {"lora": lora} if lora else {}


# For each open question, alternative changes of arguments, by name: "a.b" is b of the argument a.
Choices = list[list[Template]]


@dataclass
class Reading:
    """Describes a fused op with its arguments: constants, Weight, Argument, Probability; x: the argument that is its input. For
    a sublayer that is being read, op is "", and x the node that it reads, without views.

    logits_of: the path of an MoE's router whose first result is the logits, which its hooks get; "" if there is none. result:
    the place of the output in what forward returns. apart: a function that forward keeps out of autocast, and the op would not.
    """

    arguments: Template
    x: Any
    choices: Choices = field(default_factory=list)
    logits_of: str = ""
    op: str = ""
    result: tuple | None = None
    apart: str = ""

    def candidates(self) -> Iterator[Reading]:
        """Yields the reading with each combination of answers to all open questions."""
        for answers in itertools.product(*self.choices):
            arguments = self.arguments
            for path, value in (item for answer in answers for item in answer.items()):
                arguments = _changed(arguments, path, value)
            yield replace(self, arguments=arguments, choices=[])


def _changed(arguments: Template, path: str, value: Any) -> Template:
    name, _, rest = path.partition(".")
    return arguments | {name: _changed(arguments[name], rest, value) if rest else value}


def prefixed(template: Any, path: str) -> Any:
    """Returns a template of a submodule's parameters as one of its parent's."""
    if isinstance(template, (Weight, Scale, Probability)):
        return template._replace(path=f"{path}.{template.path}" if template.path else path)
    if isinstance(template, Update):
        return Update(*(prefixed(value, path) for value in template))
    if isinstance(template, dict):
        return {name: prefixed(value, path) for name, value in template.items()}
    return template
