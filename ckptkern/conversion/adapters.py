"""Names the adapters for which a layer is no fused op: what their wrappers say of themselves."""

from __future__ import annotations

from torch import nn

from .layouts import is_experts


def is_wrapper(module: nn.Module) -> bool:
    """Is it an adapter around a layer, as peft's are?"""
    return "base_layer" in module._modules


def why_unread(module: nn.Module) -> str | None:
    """Which adapter inside is no plain low-rank update of a layer that a fused op has; None if all seem to be."""
    for path, inner in module.named_modules():
        others = {name: m for name, m in inner.named_children() if not is_experts(m)}
        if len(others) < len(inner._modules):  # what chooses or weights experts is no part of them
            for name, m in others.items():
                if is_wrapper(m):
                    return f"an adapter of an MoE's router or gate ({'.'.join(filter(None, (path, name)))})"
        if is_wrapper(inner) and (kind := kind_of(inner)):
            return f"{kind} ({path})"
    return None


def kind_of(wrapper: nn.Module) -> str:
    """What it has that a low-rank update has not; "" for one update."""
    if not hasattr(wrapper, "lora_A"):
        return f"an adapter {type(wrapper).__module__}.{type(wrapper).__name__}"
    variants = {type(one).__name__ for one in getattr(wrapper, "lora_variant", {}).values()}
    if variants:
        return f"an adapter with {', '.join(sorted(variants))}"
    active = [one for one in getattr(wrapper, "active_adapters", ()) if one in wrapper.lora_A]
    return "several active adapters at once" if len(active) > 1 else ""
