"""Example inputs of any sizes, also nested ones, for the catalogue's ops, and calls with them.

What is saved for backward follows from the op's description, on meta tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_with_path

from ckptkern.memory import saved_tensors
from ckptkern.ops import backend, gated_mlp, linear_act, linear_stack, mlp

Arguments = dict[str, Any]


class Sizes(NamedTuple):
    """lead: of the input's shape, its features apart. heads: of attention. experts: of an
    MoE layer, each token has two."""

    lead: tuple[int, ...] = (2, 3)
    features: int = 6
    hidden: int = 5
    out: int = 7
    heads: int = 2
    experts: int = 3

    @property
    def tokens(self) -> int:
        return torch.Size(self.lead).numel()


class Normal(NamedTuple):
    """An input that is trained, of random numbers."""

    shape: tuple[int, ...]
    mean: float = 0.0


def normal(*shape: int) -> Normal:
    return Normal(shape)


# -- inputs ------------------------------------------------------------------------------------------------------------


def x_of(s: Sizes) -> Arguments:
    return {"x": normal(*s.lead, s.features)}


def layer_of(name: str, rows: int, columns: int) -> Arguments:
    return {f"{name}weight": normal(rows, columns), f"{name}bias": normal(rows)}


def stack_of(s: Sizes) -> Arguments:
    widths = s.features, s.hidden, s.hidden, s.out
    weights = [normal(n, k) for k, n in itertools.pairwise(widths)]
    return x_of(s) | dict(weights=weights, biases=[normal(n) for n in widths[1:]])


class Entry(NamedTuple):
    """function: a public one. inputs: what it must be given."""

    function: Callable[..., Any]
    inputs: Callable[[Sizes], Arguments]

    @property
    def name(self) -> str:
        return self.function.__name__


OPS = {
    entry.name: entry
    for entry in (
        Entry(linear_act, lambda s: x_of(s) | layer_of("", s.out, s.features)),
        Entry(linear_stack, stack_of),
        Entry(mlp, lambda s: x_of(s) | layer_of("fc1_", s.hidden, s.features) | layer_of("fc2_", s.out, s.hidden)),
        Entry(
            gated_mlp,
            lambda s: (
                x_of(s)
                | layer_of("gate_", s.hidden, s.features)
                | layer_of("up_", s.hidden, s.features)
                | layer_of("down_", s.out, s.hidden)
            ),
        ),
    )
}


# -- calls -------------------------------------------------------------------------------------------------------------


def _mapped(
    tree: Any, of_normal: Callable[[str, Normal], Any], of_tensor: Callable[[Tensor], Tensor] = lambda t: t
) -> Any:
    """The arguments with other leaves, by names such as "mlp_arguments.up_weight", "weights.0" or "lora.up.a"."""

    def of_leaf(path: tuple, leaf: Any) -> Any:
        if isinstance(leaf, Normal):
            return of_normal(".".join(str(key).strip("[].'") for key in path), leaf)
        return of_tensor(leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map_with_path(of_leaf, tree, is_leaf=lambda node: isinstance(node, Normal))


def input_shapes(arguments: Arguments) -> dict[str, tuple[int, ...]]:
    """The shapes of what is trained, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    _mapped(arguments, lambda path, leaf: shapes.setdefault(path, leaf.shape))
    return shapes


def call(entry: Entry, arguments: Arguments, leaves: dict[str, Tensor], **more: Any) -> Any:
    """The op's result. arguments: the entry's, whose trained inputs are `leaves`, by name; None for one that is not there."""
    inputs = _mapped(arguments, lambda path, _: leaves.get(path), lambda t: t.to(next(iter(leaves.values())).device))
    return entry.function(**inputs | more)


def random_leaves(
    arguments: Arguments, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Tensor]:
    """The trained inputs, which keep the size of what passes through them."""
    generator, leaves = torch.Generator(device).manual_seed(seed), {}
    wide = torch.promote_types(dtype, torch.float32)

    def random(path: str, leaf: Normal) -> None:
        scale = (
            0.25 if leaf.mean else max(leaf.shape[-1], 1) ** -0.5 if "weight" in path and len(leaf.shape) > 1 else 1.0
        )
        value = leaf.mean + scale * torch.randn(leaf.shape, generator=generator, dtype=wide, device=device)
        leaves[path] = value.to(dtype).requires_grad_()

    _mapped(arguments, random)
    return leaves


def saved_bytes(entry: Entry, arguments: Arguments, dtype: torch.dtype, **options: Any) -> int:
    """What `saves` declares, and x where backward reads it: bytes besides parameters."""
    shapes, of_leaf = input_shapes(arguments), dict(dtype=dtype, device="meta", requires_grad=True)
    leaves = {name: torch.empty(shape, **of_leaf) for name, shape in shapes.items()}
    first = next(iter(leaves))
    with backend("eager"), saved_tensors(exclude=[t for name, t in leaves.items() if name != first]) as saved:
        call(entry, arguments, leaves, **options)
    return saved.bytes
