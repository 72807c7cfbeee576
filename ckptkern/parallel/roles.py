"""Which parameters of a block are split over a tensor-parallel group: from the arguments of the op that replaces it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from .. import nn as ours
from ..conversion.arguments import look_up
from ..conversion.binding import Fused, Own
from ..conversion.reading import Rows, Weight

Template = dict[str, Any]  # of an op's arguments, in which a Weight names a parameter


class Place(NamedTuple):
    """Where a parameter lies. dim: along which it is split, None if every rank has all of it. summed: is its gradient the sum
    of the ranks' own? "sequence": under sequence parallelism, where each rank sees its rows alone."""

    dim: int | None
    summed: bool | str = False


ROWS, COLUMNS, INSIDE, AROUND = Place(0), Place(1), Place(None, True), Place(None, "sequence")


# -- the template of a block


def _linear(prefix: str, module: nn.Module, name: str) -> tuple[Weight, Weight | None]:
    layer = module.get_submodule(name)
    return Weight(f"{prefix}{name}.weight"), None if layer.bias is None else Weight(f"{prefix}{name}.bias")


def _pairs(prefix: str, module: nn.Module, **layers: str) -> Template:
    found = {}
    for role, name in layers.items():
        found[f"{role}_weight"], found[f"{role}_bias"] = _linear(prefix, module, name)
    return found


def _llama_attention(module: ours.LlamaAttention, prefix: str = "") -> Template:
    projections = [_linear(prefix, module, name) for name in ("q_proj", "k_proj", "v_proj")]
    norms = [Weight(f"{prefix}{name}.weight") for name in ("q_norm", "k_norm")] if module.q_norm is not None else None
    return {
        "qkv_weight": [weight for weight, _ in projections],
        "qkv_bias": [bias for _, bias in projections],
        "num_heads": module.num_heads,
        "num_kv_heads": module.num_kv_heads,
        "qk_norm": norms,
        **_pairs(prefix, module, out="o_proj"),
    }


def _gated_mlp(module: ours.GatedMLP, prefix: str = "") -> Template:
    return _pairs(prefix, module, gate="gate_proj", up="up_proj", down="down_proj")


def _llama_layer(module: ours.LlamaDecoderLayer) -> Template:
    norms = (Weight(f"{name}.weight") for name in ("input_layernorm", "post_attention_layernorm"))
    sublayers = _llama_attention(module.self_attn, "self_attn."), _gated_mlp(module.mlp, "mlp.")
    attention, mlp = (sublayer | {"norm_weight": norm} for sublayer, norm in zip(sublayers, norms, strict=True))
    return {"attention_arguments": attention, "mlp_arguments": mlp}


def _torch_attention(module: ours.MultiheadAttention, prefix: str = "") -> Template:
    names = (
        ["in_proj_weight"] if module._qkv_same_embed_dim else [f"{letter}_proj_weight" for letter in ("q", "k", "v")]
    )
    weights = [Weight(prefix + name) for name in names]
    return {
        "qkv_weight": weights[0] if len(weights) == 1 else weights,
        "qkv_bias": None if module.in_proj_bias is None else Rows(Weight(f"{prefix}in_proj_bias"), 0, 3),
        "num_heads": module.num_heads,
        **_pairs(prefix, module, out="out_proj"),
    }


def _torch_layer(module: ours.TransformerEncoderLayer | ours.TransformerDecoderLayer) -> Template:
    def normed(sublayer: Template, name: str) -> Template:
        weight, bias = _linear("", module, name)
        return sublayer | {"norm_weight": weight, "norm_bias": bias, "norm_first": module.norm_first}

    crosses = isinstance(module, ours.TransformerDecoderLayer)
    mlp = normed(_pairs("", module, up="linear1", down="linear2"), "norm3" if crosses else "norm2")
    template = {
        "attention_arguments": normed(_torch_attention(module.self_attn, "self_attn."), "norm1"),
        "mlp_arguments": mlp,
    }
    if crosses:
        cross = _torch_attention(module.multihead_attn, "multihead_attn.") | {"key_value": True}
        template["cross_attention_arguments"] = normed(cross, "norm2")
    return template


TEMPLATES: dict[type, Callable[[Any], Template]] = {
    ours.MLP: lambda module: _pairs("", module, up="fc1", down="fc2"),
    ours.GatedMLP: _gated_mlp,
    ours.LlamaAttention: _llama_attention,
    ours.LlamaDecoderLayer: _llama_layer,
    ours.MultiheadAttention: _torch_attention,
    ours.TransformerEncoderLayer: _torch_layer,
    ours.TransformerDecoderLayer: _torch_layer,
}
OPS = ("transformer_layer", "attention_block", "mlp_block")


SELF_ATTENDING = (ours.LlamaAttention, ours.LlamaDecoderLayer, ours.MultiheadAttention, ours.TransformerEncoderLayer)


def block_forward(module: nn.Module) -> Any:
    """The forward that a module has of its own, or None, under those of parallel styles. A drop-in's is its class's."""
    forward = module.__dict__.get("forward")
    while hasattr(forward, "inner"):
        forward = forward.inner
    return None if isinstance(forward, Own) else forward


def check_attends(module: nn.Module) -> None:
    """Raises TypeError unless all that the block does is the op of an attention or a layer without cross-attention."""
    forward, kind = block_forward(module), type(module).__name__
    if isinstance(forward, Fused):
        for segment in forward.segments.values():
            if segment is None:
                continue
            if segment.op not in ("attention_block", "transformer_layer"):
                raise TypeError(f"ContextParallel: {kind} is a {segment.op}, which needs no style: it has no attention")
            for sublayer in sublayers_of(segment.template):
                if "kv_a_weight" in sublayer or sublayer.get("key_value") is not None:
                    which = "latent " if "kv_a_weight" in sublayer else "cross-"
                    raise TypeError(
                        f"ContextParallel: {kind} has {which}attention, which has no split form; leave it out"
                    )
    elif type(module) not in SELF_ATTENDING or forward is not None:
        raise TypeError(
            f"ContextParallel: {kind} is not a fused block with self-attention; name blocks of ckptkern.nn ("
            f"{', '.join(one.__name__ for one in SELF_ATTENDING)}) or modules that ckptkern.convert fused as attention or layer"
        )


def templates_of(module: nn.Module) -> list[Template]:
    """The arguments of the ops that replace this block, one for each kind of call. Raises TypeError if there are none."""
    forward = block_forward(module)
    if isinstance(forward, Fused):
        segments = [segment for segment in forward.segments.values() if segment is not None]
        for segment in segments:
            if any("kv_a_weight" in sublayer for sublayer in sublayers_of(segment.template)):
                raise TypeError(
                    f"TensorParallel: {type(module).__name__} has latent attention, which has no sharded form; leave it out"
                )
            if segment.op not in OPS:
                raise TypeError(
                    f"TensorParallel: {type(module).__name__} is a {segment.op}, which has no heads or hidden units"
                )
            if segment.routes:
                raise TypeError(
                    f"TensorParallel: {type(module).__name__} has a router and experts, which are not split; convert with "
                    "exclude= for its MoE blocks, and name its attention"
                )
        return [segment.template for segment in segments]
    if type(module) in TEMPLATES and forward is None:
        return [TEMPLATES[type(module)](module)]
    raise TypeError(
        f"TensorParallel: {type(module).__name__} is not a fused block; name blocks of ckptkern.nn ("
        f"{', '.join(kind.__name__ for kind in TEMPLATES)}) or modules that ckptkern.convert fused whole"
    )


# -- the places of its parameters


def weights_in(value: Any) -> Iterator[tuple[Weight, bool]]:
    """(parameter, is it one of several in one) in a template's value."""
    if isinstance(value, Rows):
        yield value.weight, True
    elif isinstance(value, Weight):
        yield value, False
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from weights_in(one)


def sublayers_of(template: Template) -> Iterator[Template]:
    inner = [template.get(name) for name in ("attention_arguments", "cross_attention_arguments", "mlp_arguments")]
    yield from (sublayer for sublayer in inner if sublayer is not None) if any(inner) else (template,)


SPLIT = {
    "qkv_weight": ROWS, "qkv_bias": ROWS, "out_weight": COLUMNS, "gate_weight": ROWS, "gate_bias": ROWS, "up_weight": ROWS,
    "up_bias": ROWS, "down_weight": COLUMNS, "sinks": ROWS,
}  # fmt: skip


def places_of(module: nn.Module, size: int, sequence: bool) -> dict[str, Place]:
    """By name, the places of all parameters on `size` ranks. What no role names is on every rank."""
    found: dict[int, Place] = {}
    for template in templates_of(module):
        for sublayer in sublayers_of(template):
            check_sublayer(type(module).__name__, sublayer, size)
            if sequence and sublayer.get("key_value") is not None:
                raise ValueError(
                    f"TensorParallel: {type(module).__name__} has cross-attention, which sequence_parallel does not support"
                )
            for role, value in sublayer.items():
                for weight, in_one in weights_in(value):
                    place, tensor = place_of(module, sublayer, role, weight, in_one), parameter(module, weight)
                    if found.setdefault(id(tensor), place) != place:
                        raise ValueError(
                            f"TensorParallel: {weight.path} has two roles that are split along different dimensions"
                        )
                    check_divides(weight.path, tensor, place, size)
    named = module.named_parameters(remove_duplicate=False)
    return {name: found.get(id(tensor), Place(None)) for name, tensor in named}


def parameter(module: nn.Module, weight: Weight) -> Tensor:
    owner, name = look_up(module, weight.path)
    return getattr(owner, name)


def is_transposed(module: nn.Module, weight: Weight) -> bool:
    return weight.form == "t" and parameter(module, weight).dim() == 2


def place_of(module: nn.Module, sublayer: Template, role: str, weight: Weight, in_one: bool) -> Place:
    """in_one: the parameter holds several of the op's weights."""
    if role == "qk_norm":
        return place_of_qk_norm(module, sublayer, weight)
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
    if in_one or packed:
        return INSIDE
    place = SPLIT[role]
    return Place(1 - place.dim) if is_transposed(module, weight) else place


def place_of_qk_norm(module: nn.Module, sublayer: Template, weight: Weight) -> Place:
    tensor, out = parameter(module, weight), sublayer["out_weight"]
    if tensor.dim() == 2:  # a row for each head
        return ROWS
    if tensor.numel() != parameter(module, out).shape[0 if is_transposed(module, out) else 1] // sublayer["num_heads"]:
        raise ValueError(
            f"TensorParallel: {weight.path} belongs to a norm over all heads at once, which cannot be split"
        )
    return INSIDE


def check_sublayer(block: str, sublayer: Template, size: int) -> None:
    if sublayer.get("lora"):
        raise ValueError(
            f"TensorParallel: {block} has low-rank updates (LoRA), which cannot be split; merge them first"
        )
    for name in ("num_heads", "num_kv_heads"):
        heads = sublayer.get(name)
        if heads is not None and heads % size:
            raise ValueError(
                f"TensorParallel: {block} has {name}={heads}, which must be a multiple of the mesh's size, {size}: every rank "
                f"takes whole heads"
            )


def check_divides(path: str, tensor: Tensor, place: Place, size: int) -> None:
    if place.dim is not None and tensor.shape[place.dim] % size:
        raise ValueError(
            f"TensorParallel: {path} has shape {tuple(tensor.shape)}, whose dimension {place.dim} must be a multiple of the "
            f"mesh's size, {size}"
        )
