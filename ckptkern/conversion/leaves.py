"""Recognises what a node of a traced graph computes, by its results and not by its class.

A leaf with a weight [n, k] that computes x W^T + b is a linear layer. Results on random rows show which norm a leaf is,
and whether its weight is w or 1 + w. The module's parameters must be random meanwhile (check.random_parameters),
because a zero bias does not show.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available
from torch.nn import functional as F

from ..nn.activations import recognised
from ..nn.dropout import Dropout
from .trace import Node, Unreadable, leaves_of, recomputed

LIKE_ROUNDING = 5e-3  # relative error of a bfloat16 result that is rounded once more; int8 activations make 1e-2
_LONGEST_ACTIVATION = 20  # functions; gelu_tanh has eight. It bounds the time that a longer formula takes


class Weight(NamedTuple):
    """A parameter by its path, and what is taken of it: "" itself, "t" its transpose, "+1" one more."""

    path: str
    form: str = ""


class Linear(NamedTuple):
    weight: Weight
    bias: Weight | None
    out_features: int
    in_features: int


class Norm(NamedTuple):
    kind: str
    weight: Weight | None
    bias: Weight | None
    eps: float


class Probability(NamedTuple):
    """Of a dropout: an attribute of the module at `path`, read in each call and 0 unless that module is in training mode; or
    with path and attribute "" the number `value`, by the whole module's mode."""

    path: str
    attribute: str
    value: float


def in_training(p: float) -> Probability:
    """A function's p, that the traced module hands on in training mode only."""
    return Probability("", "", float(p))


def is_linear(module: nn.Module) -> bool:
    """Returns whether calling it runs nn.Linear's forward."""
    kind = type(module)
    return isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward and kind.__call__ is nn.Module.__call__


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def _outcome(function: Callable, *args: Tensor) -> Tensor | None:
    """The function's result; None if it raises or returns something else."""
    try:
        with torch.no_grad():
            result = function(*args)
    except Exception:  # a guess calls someone else's leaf with a tensor of our choice, which may raise anything
        return None
    return result if isinstance(result, Tensor) else None


def agrees(leaf: nn.Module, like: Callable[..., Tensor], x: Tensor) -> bool:
    """Returns whether a leaf computes like(x) in training and in evaluation, with the same gradients."""
    was = leaf.training
    try:
        for leaf.training in (True, False):
            ours, theirs = (_with_gradients(run, leaf, x) for run in (leaf, like))
            if not all(
                a is b or (a is not None and b is not None and same(a, b)) for a, b in zip(ours, theirs, strict=True)
            ):
                return False
    except Exception:  # someone's leaf may raise anything, such as where a graph is missing
        return False
    finally:
        leaf.training = was
    return True


def _with_gradients(run: Callable, leaf: nn.Module, x: Tensor) -> list[Tensor | None]:
    with torch.enable_grad():
        given = [x.detach().requires_grad_(), *_parameters(leaf).values()]
        y = run(given[0])
        dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
        return [y, *torch.autograd.grad(y, given, dy, allow_unused=True)]


def agrees_in_16_bits(leaf: nn.Module, like: Callable[..., Tensor], x: Tensor) -> bool:
    """Does it compute like(x) up to rounding in bfloat16, and under autocast? What it does not take does not count."""
    own, kind = _parameters(leaf), x.device.type
    narrow = {name: nn.Parameter(p.to(torch.bfloat16)) for name, p in own.items()}
    for parameters, autocast in ((narrow, False), (own, is_autocast_available(kind))):
        leaf._parameters.update(parameters)
        given = x if autocast else x.to(torch.bfloat16)
        try:
            with torch.no_grad(), torch.autocast(kind, torch.bfloat16, enabled=autocast):
                ours, theirs = _outcome(leaf, given), like(given).double()
        finally:
            leaf._parameters.update(own)
        if ours is not None and not float((ours.double() - theirs).norm() / theirs.norm()) <= LIKE_ROUNDING:
            return False
    return True


class Leaves:
    """The leaves of one module's graph."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.kinds: dict[tuple[str, str], Any] = {}  # leaves are called several times, and found out once

    def leaf(self, node: Node) -> nn.Module | None:
        return self.module.get_submodule(node.source) if node.kind == "module" else None

    def once(self, what: str, node: Node, find: Callable[[str, nn.Module, Node], Any]) -> Any:
        """find(path, leaf, node) for a node that a leaf with one input tensor returned; None for others."""
        leaf = self.leaf(node)
        if leaf is None or node.output or len(node.inputs) != 1:
            return None
        key = (what, node.source)
        if key not in self.kinds:
            self.kinds[key] = find(node.source, leaf, node)
        return self.kinds[key]

    def describe(self, node: Node) -> str:
        if node.kind == "module":
            return f"{type(self.leaf(node)).__name__} ({node.source})"
        return (
            node.source
            if node.kind == "function"
            else f"a {node.kind}" + (f" ({node.source})" if node.kind == "parameter" else "")
        )

    # -- linear layers

    def linear(self, node: Node) -> Linear | None:
        if node.is_function("linear"):
            call = node.called_with("input", "weight", "bias")
            weight, bias = call["weight"], call.get("bias")
            if weight.kind == "parameter" and (bias is None or bias.kind == "parameter"):
                return Linear(Weight(weight.source), bias and Weight(bias.source), *weight.shape)
            return None
        return self.once("linear", node, _find_linear)

    # -- norms

    def norm(self, node: Node) -> Norm | None:
        if node.is_function("layer_norm", "rms_norm"):
            names = ("input", "normalized_shape", "weight", "bias", "eps")
            if node.source == "rms_norm":
                names = ("input", "normalized_shape", "weight", "eps")
            call = node.called_with(*names)
            given = [call.get("weight"), call.get("bias")]
            if len(call["normalized_shape"]) != 1 or any(p is not None and p.kind != "parameter" for p in given):
                return None
            eps = call.get("eps", 1e-5 if node.source == "layer_norm" else None)
            weight, bias = (None if p is None else Weight(p.source) for p in given)
            return Norm("layer" if node.source == "layer_norm" else "rms", weight, bias, _default_eps(eps))
        return self.once("norm", node, _find_norm)

    # -- activations

    def activation(self, node: Node) -> tuple[str, Node] | None:
        """The activation that a leaf, or a function of one tensor that is written out, computes, and the node that it reads."""
        if node.kind == "function":
            for z in _elementwise_inputs(node):
                name = recognised(functools.partial(_evaluated, node, z))
                if name not in (None, "identity"):
                    return name, z
            return None
        name = self.once("activation", node, lambda _, leaf, __: recognised(leaf))
        return None if name is None else (name, node.inputs[0])

    # -- dropout

    def dropout(self, node: Node) -> Probability | None:
        leaf = self.leaf(node)
        if type(leaf) in (nn.Dropout, Dropout):
            return Probability(node.source, "p", leaf.p)
        if node.is_function("dropout", "dropout_"):
            call = node.called_with("input", "p", "training")
            return in_training(call.get("p", 0.5) if call.get("training", True) else 0.0)
        return None

    def drop_path(self, node: Node) -> Probability | None:
        """Stochastic depth: whole samples of x [B, ...] dropped, the others scaled by 1/(1 - p)."""
        return self.once("drop_path", node, _find_drop_path)

    def scale(self, node: Node) -> Weight | float | None:
        """The factor of x * factor: a vector of the features, or a number."""
        if node.is_function("mul", "__mul__", "__rmul__", "mul_", "__imul__"):
            if len(node.inputs) == 1:
                numbers = [one for one in node.args if isinstance(one, (int, float))]
                return float(numbers[0]) if len(numbers) == 1 else None
            vectors = [one for one in node.inputs if one.kind == "parameter" and len(one.shape) == 1]
            return Weight(vectors[0].source) if len(vectors) == 1 else None
        return self.once("scale", node, _find_scale)


def _parameters(leaf: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in leaf._parameters.items() if p is not None}


def _find_linear(path: str, leaf: nn.Module, node: Node) -> Linear | None:
    own = _parameters(leaf)
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or weight.dim() != 2 or own.keys() - {"weight", "bias"}:
        return None
    for form, w in (("", weight), ("t", weight.t())):
        x = torch.randn(3, w.shape[1], dtype=w.dtype, device=w.device)
        y = _outcome(leaf, x)
        if y is not None and same(y, F.linear(x, w, bias)) and (is_linear(leaf) or _acts_linear(leaf, form, x)):
            return Linear(Weight(f"{path}.weight", form), None if bias is None else Weight(f"{path}.bias"), *w.shape)
    return None


def _acts_linear(leaf: nn.Module, form: str, x: Tensor) -> bool:
    """Is a forward of its own that of a linear layer in each mode and dtype? One may quantise in some of these alone."""

    def like(x: Tensor) -> Tensor:
        weight = leaf._parameters["weight"]
        return F.linear(x, weight.t() if form else weight, leaf._parameters.get("bias"))

    return agrees(leaf, like, x) and agrees_in_16_bits(leaf, like, x)


def _default_eps(eps: float | None) -> float:
    return torch.finfo(torch.float32).eps if eps is None else eps


def _find_norm(path: str, leaf: nn.Module, node: Node) -> Norm | None:
    own, features = _parameters(leaf), node.shape[-1]
    if len(own) > 2 or any(p.shape != (features,) for p in own.values()):
        return None
    values = leaf.__dict__.values()
    epsilons = dict.fromkeys(v for v in values if isinstance(v, float) and 0 < v <= 1e-2)
    tensor = next(iter(own.values()), node_tensor(leaf))
    # rows of about the size of sqrt(eps), too, where another eps shows
    x = torch.randn(6, features, dtype=tensor.dtype, device=tensor.device) + 0.5
    x = x * torch.tensor([1.0, 1.0, 1.0, 1e-2, 3e-3, 1e-3]).to(x)[:, None]
    y = _outcome(leaf, x)
    if y is None or y.shape != x.shape:
        return None
    for eps in dict.fromkeys((*epsilons, 1e-5, 1e-6, 1e-12, _default_eps(None))):
        layer = F.layer_norm(x, (features,), eps=eps)
        rms = F.rms_norm(x, (features,), eps=eps)
        for names in itertools.permutations((None, None, *own), 2):
            weight, bias = (own.get(name) for name in names)
            if len(own) != (weight is not None) + (bias is not None):
                continue
            added = 0.0 if bias is None else bias
            for kind, rows in (("layer", layer), ("rms", rms)):
                for form in ("", "+1") if weight is not None else ("",):
                    factor = 1.0 if weight is None else weight + 1 if form else weight
                    like = functools.partial(_normed, kind, weight, form, bias, eps)
                    if same(y, rows * factor + added) and agrees(leaf, like, x[:3]):
                        names = [name and f"{path}.{name}" for name in names]
                        return Norm(kind, names[0] and Weight(names[0], form), names[1] and Weight(names[1]), eps)
    return None


def _normed(kind: str, weight: Tensor | None, form: str, bias: Tensor | None, eps: float, x: Tensor) -> Tensor:
    rows = (F.layer_norm if kind == "layer" else F.rms_norm)(x, x.shape[-1:], eps=eps)
    rows = rows if weight is None else rows * (weight + 1 if form else weight)
    return rows if bias is None else rows + bias


def node_tensor(leaf: nn.Module) -> Tensor:
    """Any tensor of the leaf, for its dtype and device."""
    return next((b for b in leaf._buffers.values() if b is not None and b.is_floating_point()), torch.zeros(()))


def _elementwise_inputs(node: Node) -> list[Node]:
    """What a function's result may be an activation of: nodes of its shape behind it, through functions, the nearest first."""
    found = [node]
    for one in found:
        if one.kind == "function" and len(found) <= _LONGEST_ACTIVATION:
            found += [z for z in dict.fromkeys(one.inputs) if z.shape == node.shape and z not in found]
    return found[1:]


def _evaluated(node: Node, z: Node, values: Tensor) -> Tensor:
    """The node computed anew, with `values` in place of the node z."""
    if node is z:
        return values.clone()  # functions in place are called as well
    if node.kind != "function" or "dropout" in node.source:  # whose probability may be 0 for now
        raise Unreadable("not a function of one tensor")
    function = getattr(F, node.source, None) or getattr(torch, node.source, None) or getattr(Tensor, node.source)
    given = (
        _evaluated(one, z, values) if isinstance(one, Node) else one for one in leaves_of((node.args, node.kwargs))
    )
    args, kwargs = recomputed((node.args, node.kwargs), given)
    return function(*args, **kwargs or {})


def _find_scale(path: str, leaf: nn.Module, node: Node) -> Weight | None:
    own = _parameters(leaf)
    if len(own) != 1:
        return None
    ((name, weight),) = own.items()
    x = torch.randn(3, 2, node.shape[-1], dtype=weight.dtype, device=weight.device)
    y = _outcome(leaf, x) if weight.shape == node.shape[-1:] else None
    found = y is not None and same(y, x * weight) and agrees(leaf, lambda x: x * weight, x)
    return Weight(f"{path}.{name}") if found else None


def _find_drop_path(path: str, leaf: nn.Module, node: Node) -> Probability | None:
    if _parameters(leaf) or leaf._buffers:
        return None
    x = torch.ones(4096, 2, 2)
    was = leaf.training
    try:
        leaf.training = False
        identity = _outcome(leaf, x)
        leaf.training = True
        dropped = _outcome(leaf, x)
    finally:
        leaf.training = was
    if identity is None or dropped is None or dropped.shape != x.shape or not torch.equal(identity, x):
        return None
    for attribute, p in leaf.__dict__.items():
        if isinstance(p, float) and 0 < p < 1:
            samples = dropped[:, :1, :1]
            is_zero = samples == 0
            scaled = torch.where(is_zero, 0.0, 1 / (1 - p))
            share = float(is_zero.float().mean())
            if (
                torch.equal(dropped, samples.expand_as(dropped))
                and same(samples, scaled)
                and 0 < share < 1
                and abs(share - p) < 0.1
            ):
                return Probability(path, attribute, p)
    return None


def live_probability(found: list[Probability]) -> Probability | None:
    """The dropout among those in a row; one that is 0 now counts if it is alone, since it may be raised later.

    Raises Unreadable for two, whose matmul has no single mask.
    """
    live = [p for p in found if p.value] or found[:1]
    if len(live) > 1:
        raise Unreadable("two dropouts in a row")
    return live[0] if live else None
