"""Layers of a kernels repository: stateless forwards for modules of transformers.

Each computes what its module's own forward computes: the first training call reads and checks that forward as
`ckptkern.convert` does. A module that is not one fused op, or that has changed since (adapters, hooks, quantised weights),
runs its own forward as an activation checkpoint.
"""

from __future__ import annotations

import functools
import warnings
from types import MethodType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers.core_model_loading import WeightRenaming

from ..conversion.calls import pattern_of
from ..conversion.fuse import Checked, fuse, reason_of
from ..conversion.moe import experts_forward
from ..conversion.protection import no_trace
from ..conversion.trace import switched
from ..nn.unmodified import composed
from .functions import causal_lm_loss

FUSED = "_ckptkern_fused"  # attribute with the fused forward of a module, or False if it is not one fused op
# modules that were checked, with which others are compared: the kinds of their calls, and their log
_checked: WeakKeyDictionary[nn.Module, tuple[list[tuple], list[tuple]]] = WeakKeyDictionary()


@functools.cache
def warn(kind: type[nn.Module], reason: str) -> None:
    warnings.warn(f"ckptkern.hub: {kind.__name__} runs as an activation checkpoint, not fused: {reason}", stacklevel=5)


def read(module: nn.Module, x: Tensor) -> object:
    """Returns the module's fused forward, checked on random parameters and a few tokens like x; False if there is none."""
    unchanged = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with _disable_current_modes(), unchanged, torch.enable_grad(), no_trace(module), switched(module):
        vars(module).pop("forward", None)  # that of the layer, which no_trace restores
        shape = (*(2,) * (x.dim() - 2), 3, x.size(-1))[-x.dim() :]
        call = (torch.randn(shape, dtype=x.dtype, device=x.device),), {}
        others = [Checked("", calls, vars(m)[FUSED], log) for m, (calls, log) in _checked.items()]
        count = len(others)
        try:
            forward, *_ = fuse("", module, [call], "full", others)
        except Exception as error:  # a forward may raise anything on random numbers
            warn(type(module), str(reason_of(error)))
            return False
    for new in others[count:]:
        _checked[module] = new.calls, new.log
    return forward


def is_readable(module: nn.Module, x: Tensor) -> bool:
    """Returns whether a check can run now: not in inference mode, under torch.func or in a CUDA graph capture, and not on
    tensors without values, of subclasses (fake, sharded) or of a flat parameter, as FullyShardedDataParallel's."""
    plain = type(x) is Tensor and not x.is_meta and all(p.is_leaf for p in module.parameters())
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return plain and not (captured or torch.is_inference_mode_enabled() or torch._C._are_functorch_transforms_active())


def run(module: nn.Module, x: Tensor) -> Tensor:
    """Computes what the class's forward does, as one fused op that saves x, or as an activation checkpoint."""
    if torch.compiler.is_compiling():
        return type(module).forward(module, x)
    forward = vars(module).get(FUSED)
    # a reentrant checkpoint trains without gradients first, and must sample the same dropout as its recompute
    if forward is None and (torch.is_grad_enabled() or module.training) and is_readable(module, x):
        forward = vars(module)[FUSED] = read(module, x)
    if (
        forward
        and forward.module is module
        and forward.watch.unchanged()
        and forward.segment_of(pattern_of((x,), [])) is not None
    ):
        return forward(x)
    return composed(MethodType(type(module).forward, module), x)


class SwiGLUMLP(nn.Module):
    """Computes a gated MLP, down_proj(act_fn(gate_proj(x)) * up_proj(x)), as one region that saves x: `ckptkern.mlp_block`."""

    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return run(self, x)


class GeGLUMLP(SwiGLUMLP):
    """Computes the same as `SwiGLUMLP`, whose activation is the module's own."""


class MLP(SwiGLUMLP):
    """Computes fc2(activation_fn(fc1(x))) as one region that saves x: `ckptkern.mlp_block`."""


class RMSNormMLP(SwiGLUMLP):
    """Computes an RMSNorm and the MLP behind it as one region that saves the norm's input: `ckptkern.mlp_block`."""


class Neighbours(nn.Module):
    """Holds the norm and the MLP of a decoder layer in the norm's place; the MLP's place is empty.

    Checkpoints keep the names of Llama's layers."""

    conversion_mapping = (
        WeightRenaming(r"post_attention_layernorm\.weight", "post_attention_layernorm.norm.weight"),
        WeightRenaming(r"(?<!layernorm)\.mlp\.", ".post_attention_layernorm.mlp."),
    )

    def __init__(self, norm: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.mlp(self.norm(hidden_states))


RMSNormMLPLayout = Neighbours  # models initialise the weight of a class that is called an RMSNorm


class Experts(nn.Module):
    """Computes the experts of an MoE layer for the token-expert pairs, saving the input: `ckptkern.moe_mlp`."""

    has_backward = True

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class ForCausalLMLoss(nn.Module):
    """Computes a language model's loss from hidden states: `causal_lm_loss`."""

    has_backward = True

    def forward(self, hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch=None, **kwargs):
        return causal_lm_loss(hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch, **kwargs)
