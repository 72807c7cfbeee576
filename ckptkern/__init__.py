"""Activation recomputation inside the backward kernels, for PyTorch."""

from . import memory, nn, storage
from .checkpoint import checkpoint, checkpointed
from .ops import (
    attention_block,
    backend,
    dropout,
    gated_mlp,
    linear_act,
    linear_stack,
    mlp,
    mlp_block,
    scaled_dot_product_attention,
    transformer_layer,
    varlen_attn,
)  # fmt: skip
from .sequential import checkpoint_sequential

__version__ = "0.1.0"
__all__ = [
    "attention_block", "backend", "checkpoint", "checkpoint_sequential", "checkpointed", "dropout", "gated_mlp",
    "linear_act", "linear_stack", "memory", "mlp", "mlp_block", "nn", "scaled_dot_product_attention", "storage",
    "transformer_layer", "varlen_attn",
]  # fmt: skip
