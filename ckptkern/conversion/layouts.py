"""Recognises the parts of an MoE layer by the shapes of their parameters: experts, and a block of a router and experts.
Names the adapters that keep a layer from being fused."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import nn

from ..frozen import packed_4bit


def base_of(module: nn.Module) -> tuple[str, nn.Module]:
    """Returns (path, module) of what is inside wrappers that each adapt one parameter, as peft's target_parameters does."""
    path = []
    while isinstance(module.__dict__.get("parameter_name"), str) and "base_layer" in module._modules:
        module = module._modules["base_layer"]
        path.append("base_layer.")
    return "".join(path), module


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters inside wrappers, by path; for bitsandbytes' parametrizations, the shapes of the
    weights."""
    path, base = base_of(module)
    shapes = {path + name: p.shape for name, p in base._parameters.items() if p is not None}
    for name, parametrization in getattr(base, "parametrizations", {}).items():
        if (packed := packed_4bit(parametrization)) is not None:
            shapes[f"{path}parametrizations.{name}.original"] = packed[1].shape
    return shapes


def experts_layout(module: nn.Module) -> dict[str, str]:
    """Returns the paths of moe_mlp's parameters, by the shapes of the experts' own: [E, 2 h, d] and [E, d, h], with or
    without biases and wrappers; {} for other modules."""
    own = shapes_of(module)
    for (up, a), (down, b) in itertools.permutations(own.items(), 2):
        if len(a) == len(b) == 3 and a[0] == b[0] and a[1] == 2 * b[2] and a[2] == b[1] > 0:
            layout = {"gate_up_weight": up, "down_weight": down}
            for name in own.keys() - {up, down}:
                kind = {a[:2]: "gate_up_bias", b[:2]: "down_bias"}.get(own[name])
                if kind is None or kind in layout:
                    return {}
                layout[kind] = name
            return layout
    return {}


def is_experts(module: nn.Module) -> bool:
    """Returns whether the module is laid out as the experts of an MoE layer, and trains nothing else but adapters of its
    parameters."""
    layout = experts_layout(module)
    return bool(layout) and len(layout) == len(list(base_of(module)[1].parameters()))


class Parts(NamedTuple):
    """Holds paths in an MoE block: of its experts, its router's tensors and its shared expert; None for an absent part.
    score_bias: a buffer with a value for each expert."""

    experts: str
    router_weight: str
    router_bias: str | None = None
    score_bias: str | None = None
    shared: str | None = None
    shared_expert_gate: str | None = None

    @property
    def router(self) -> str:
        """Returns the path of the module that has the router's weight."""
        return self.router_weight.rpartition(".")[0]


def parts_of(module: nn.Module) -> Parts | None:
    """Returns the parts of an MoE block; None for a module that has other parts, or lacks one."""
    children = dict(module.named_children())
    experts = [name for name, m in children.items() if is_experts(m)]
    if len(experts) != 1:
        return None
    inner = children[experts[0]]
    E, _, d = shapes_of(inner)[experts_layout(inner)["gate_up_weight"]]
    shared = [name for name, m in children.items() if m is not inner and sum(p.dim() == 2 for p in m.parameters()) > 1]
    taken = tuple(f"{name}." for name in (experts[0], *shared))
    kinds = {(E, d): "router_weight", (E,): "router_bias", (1, d): "shared_expert_gate"}
    paths: dict[str, str] = {}
    for path, p in module.named_parameters():
        kind = kinds.get(tuple(p.shape))
        if path.startswith(taken):
            continue
        if kind is None or kind in paths:
            return None
        paths[kind] = path
    for path, b in module.named_buffers():
        if b.is_floating_point() and not path.startswith(taken):
            if tuple(b.shape) != (E,) or "score_bias" in paths:
                return None
            paths["score_bias"] = path
    if "router_weight" not in paths or len(shared) > 1 or len(kinds) < 3:
        return None
    return Parts(experts[0], **paths, shared=next(iter(shared), None))


def why_unread(module: nn.Module) -> str | None:
    """Returns which adapter inside is not a low-rank update that a fused op supports; None if there is none."""
    for path, inner in module.named_modules():
        others = {name: m for name, m in inner.named_children() if not is_experts(m)}
        if len(others) < len(inner._modules):  # routers and gates are not parts of experts
            for name, m in others.items():
                if "base_layer" in m._modules:
                    return f"an adapter of an MoE's router or gate ({'.'.join(filter(None, (path, name)))})"
        if "base_layer" not in inner._modules:  # not an adapter around a layer, as peft's are
            continue
        if not hasattr(inner, "lora_A"):
            return f"an adapter {type(inner).__module__}.{type(inner).__name__} ({path})"
        if variants := {type(variant).__name__ for variant in getattr(inner, "lora_variant", {}).values()}:
            return f"an adapter with {', '.join(sorted(variants))} ({path})"
        if len([adapter for adapter in getattr(inner, "active_adapters", ()) if adapter in inner.lora_A]) > 1:
            return f"several active adapters at once ({path})"
    return None
