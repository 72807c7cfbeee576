"""The attention sublayers that a transformer layer may have, by the type of their options: multi-head attention, and multi-head
latent attention."""

from __future__ import annotations

from torch import Tensor

from .backward import AttentionSublayer, attention_sublayer_backward
from .latent_sublayer import LatentSublayer, latent_reference, latent_saves, latent_sublayer, latent_sublayer_backward
from .latent_tensors import LatentOptions, LatentTensors
from .reference import attention_reference
from .sublayer import attention_sublayer, saves
from .tensors import AttentionOptions, AttentionTensors

AnyOptions = AttentionOptions | LatentOptions
AnyTensors = AttentionTensors | LatentTensors
AnySublayer = AttentionSublayer | LatentSublayer


def tensors_kind(o: AnyOptions) -> type[AttentionTensors] | type[LatentTensors]:
    return LatentTensors if isinstance(o, LatentOptions) else AttentionTensors


def saves_of(o: AnyOptions) -> tuple[str, ...]:
    return latent_saves(o) if isinstance(o, LatentOptions) else saves(o)


def sublayer_of(x: Tensor, t: AnyTensors, o: AnyOptions, *, shares: bool = False) -> AnySublayer:
    return (LatentSublayer if isinstance(o, LatentOptions) else AttentionSublayer)(x, t, o, shares=shares)


def any_sublayer(x: Tensor, t: AnyTensors, o: AnyOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """(y [tokens, d], what `saves_of` names)."""
    return (latent_sublayer if isinstance(o, LatentOptions) else attention_sublayer)(x, t, o)


def any_sublayer_backward(
    dy: Tensor, sublayer: AnySublayer, saved: dict[str, Tensor], needs: int, f: Tensor | None = None
) -> dict[str, Tensor | None]:
    """Gradients by name ("x" and the fields of the sublayer's tensors)."""
    backward = latent_sublayer_backward if isinstance(sublayer, LatentSublayer) else attention_sublayer_backward
    return backward(dy, sublayer, saved, needs, f)


def any_reference(x: Tensor, t: AnyTensors, o: AnyOptions) -> Tensor:
    """The sublayer in differentiable PyTorch ops."""
    return (latent_reference if isinstance(o, LatentOptions) else attention_reference)(x, t, o)
