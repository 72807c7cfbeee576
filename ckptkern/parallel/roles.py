"""Chooses the parameters of a block to split over a tensor-parallel group, by their roles in the op that replaces the block."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import nn as ours
from ..conversion.binding import Fused, Own
from ..conversion.computed import templates
from ..conversion.reading import Template, Weight
from ..conversion.trace import mapped


class Place(NamedTuple):
    """The placement of a parameter. dim: the dimension that is split, None if replicated. summed: the gradient is the sum of
    the ranks' gradients; "sequence": only under sequence parallelism, where each rank sees its own rows."""

    dim: int | None
    summed: bool | str = False


ROWS, COLUMNS, INSIDE, AROUND = Place(0), Place(1), Place(None, True), Place(None, "sequence")


# -- the template of a block


class Block(NamedTuple):
    """An op that replaces a module, and its arguments."""

    op: str
    template: Template
    routes: bool = False


_X, _MEMORY, _NO_MASKS = torch.empty(0), torch.empty(0), (None, None, False)
BLOCKS: dict[type, tuple[str, tuple]] = {  # the op, and the arguments of the method that returns the op's arguments
    ours.MLP: ("mlp_block", ()),
    ours.GatedMLP: ("mlp_block", ()),
    ours.LlamaAttention: ("attention_block", (_X,)),
    ours.MultiheadAttention: ("attention_block", (_X, _X, *_NO_MASKS)),
    ours.LlamaDecoderLayer: ("transformer_layer", (_X,)),
    ours.TransformerEncoderLayer: ("transformer_layer", (_X, _NO_MASKS)),
    ours.TransformerDecoderLayer: ("transformer_layer", (_X, _NO_MASKS, _MEMORY, _NO_MASKS)),
}


def named(module: nn.Module, arguments: Template) -> Template:
    """Replaces parameters, and views of them, in arguments by Weights with their names."""
    names = {id(p): Weight(name) for name, p in module.named_parameters(remove_duplicate=False)}

    def name(tensor):
        base = tensor._base
        return names.get(id(tensor), tensor) if base is None else names[id(base)].rows(0, 3)

    return mapped(name, arguments)


def blocks_of(style: str, module: nn.Module) -> list:
    """Returns the ops that replace a module, one for each kind of call, also if parallel styles wrap its forward. Raises
    TypeError if there are none."""
    forward = module.__dict__.get("forward")
    while hasattr(forward, "inner"):
        forward = forward.inner
    if isinstance(forward, Fused):
        return forward.ops
    if type(module) in BLOCKS and (forward is None or isinstance(forward, Own)):  # a drop-in's is its class's
        op, inputs = BLOCKS[type(module)]
        arguments_of = module.layer_arguments if op == "transformer_layer" else module.block_arguments
        return [Block(op, named(module, arguments_of(*inputs)))]
    raise TypeError(
        f"{style}: {type(module).__name__} is not a fused block; name blocks of ckptkern.nn ("
        f"{', '.join(kind.__name__ for kind in BLOCKS)}) or modules that ckptkern.convert fused whole"
    )


# -- the places of its parameters


def sublayers_of(template: Template) -> list[Template]:
    names = ("attention_arguments", "cross_attention_arguments", "mlp_arguments")
    return [template[name] for name in names if template.get(name)] or [template]


SPLIT = {
    "qkv_weight": ROWS,
    "qkv_bias": ROWS,
    "out_weight": COLUMNS,
    "gate_weight": ROWS,
    "gate_bias": ROWS,
    "up_weight": ROWS,
    "up_bias": ROWS,
    "down_weight": COLUMNS,
    "sinks": ROWS,
}


def places_of(module: nn.Module, size: int, sequence: bool) -> dict[str, Place]:
    """Returns the places of all parameters on `size` ranks, by name; parameters without a role are replicated. Raises TypeError
    or ValueError for a block that cannot be split."""
    places: dict[int, Place] = {}
    block = type(module).__name__
    for op in blocks_of("TensorParallel", module):
        if any("kv_a_weight" in sublayer for sublayer in sublayers_of(op.template)):
            raise TypeError(f"TensorParallel: {block} has latent attention, which has no sharded form; leave it out")
        if op.op not in ("transformer_layer", "attention_block", "mlp_block"):
            raise TypeError(f"TensorParallel: {block} is a {op.op}, which has no heads or hidden units")
        if op.routes:
            raise TypeError(
                f"TensorParallel: {block} has a router and experts, which are not split; convert with exclude= for its MoE "
                "blocks, and name its attention"
            )
        for sublayer in sublayers_of(op.template):
            if sublayer.get("lora"):
                raise ValueError(
                    f"TensorParallel: {block} has low-rank updates (LoRA), which cannot be split; merge them first"
                )
            for name in ("num_heads", "num_kv_heads"):
                if (heads := sublayer.get(name) or 0) % size:
                    raise ValueError(
                        f"TensorParallel: {block} has {name}={heads}, which must be a multiple of the mesh's size, {size}: "
                        "every rank takes whole heads"
                    )
            if sequence and sublayer.get("key_value") is not None:
                raise ValueError(
                    f"TensorParallel: {block} has cross-attention, which sequence_parallel does not support"
                )
            for role, value in sublayer.items():
                for weight in templates(value, Weight):
                    place, tensor = place_of(module, sublayer, role, weight), parameter(module, weight)
                    if places.setdefault(id(tensor), place) != place:
                        raise ValueError(
                            f"TensorParallel: {weight.path} has two roles that are split along different dimensions"
                        )
                    if place.dim is not None and tensor.shape[place.dim] % size:
                        raise ValueError(
                            f"TensorParallel: {weight.path} has shape {tuple(tensor.shape)}, whose dimension {place.dim} must "
                            f"be a multiple of the mesh's size, {size}"
                        )
    named = module.named_parameters(remove_duplicate=False)
    return {name: places.get(id(tensor), Place(None)) for name, tensor in named}


def parameter(module: nn.Module, weight: Weight) -> Tensor:
    return attrgetter(weight.path)(module)


def is_transposed(module: nn.Module, weight: Weight) -> bool:
    return weight.form == "t" and parameter(module, weight).dim() == 2


def place_of(module: nn.Module, sublayer: Template, role: str, weight: Weight) -> Place:
    """Returns the place of a role's parameter."""
    if role == "qk_norm":
        tensor, out = parameter(module, weight), sublayer["out_weight"]
        if tensor.dim() == 2:  # a row for each head
            return ROWS
        width = parameter(module, out).shape[0 if is_transposed(module, out) else 1]
        if tensor.numel() != width // sublayer["num_heads"]:
            raise ValueError(
                f"TensorParallel: {weight.path} belongs to a norm over all heads at once, which cannot be split"
            )
        return INSIDE
    if role in ("norm_weight", "norm_bias"):
        return INSIDE if sublayer.get("norm_first", True) else AROUND
    if role == "attn_mask":  # the op sums its gradient
        return Place(None)
    if role not in SPLIT:
        return AROUND
    packed = (
        role.startswith("qkv")
        and isinstance(sublayer["qkv_weight"], Weight)
        and sublayer.get("qkv_layout", "qkv") == "qkv"
    )
    if weight.count > 1 or packed:  # the parameter holds several of the op's weights
        return INSIDE
    place = SPLIT[role]
    return Place(1 - place.dim) if is_transposed(module, weight) else place
