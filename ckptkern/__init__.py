"""Activation recomputation inside the backward kernels, for PyTorch."""

from . import errors, memory, nn, storage
from .conversion import Conversion, convert, patch_trl, register_experts, revert
from .frozen import Frozen
from .ops import (
    ACTIVATIONS,
    LoRA,
    accumulate_in_place,
    attention_block,
    backend,
    delay_weight_gradients,
    dropout,
    gated_mlp,
    grouped_gated_mlp,
    latent_attention_block,
    linear_act,
    linear_cross_entropy,
    linear_distillation,
    linear_stack,
    linear_topk_distillation,
    mlp,
    mlp_block,
    moe_block,
    moe_mlp,
    scaled_dot_product_attention,
    selected_log_probs,
    split_backward,
    transformer_layer,
    varlen_attn,
    workspace,
)
from .planning import Certificate, Frontier, Plan, Report, certify, frontier, plan, report
from .segments.checkpoint import checkpoint, checkpointed, patch_torch, unpatch_torch
from .segments.decisions import saved_decisions
from .segments.sequential import checkpoint_sequential
from .segments.tiled import tiled
from .tools.warm_up import WarmUp, warm_up

__version__ = "0.1.0"
__all__ = [
    "ACTIVATIONS", "Certificate", "Conversion", "Frontier", "Frozen", "LoRA", "Plan", "Report", "WarmUp",
    "accumulate_in_place", "attention_block", "backend", "certify", "checkpoint", "checkpoint_sequential", "checkpointed",
    "convert", "delay_weight_gradients", "dropout", "errors", "frontier", "gated_mlp", "grouped_gated_mlp",
    "latent_attention_block", "linear_act", "linear_cross_entropy", "linear_distillation", "linear_stack",
    "linear_topk_distillation", "memory", "mlp", "mlp_block", "moe_block", "moe_mlp", "nn", "patch_torch", "patch_trl",
    "plan", "register_experts", "report", "revert", "saved_decisions", "scaled_dot_product_attention",
    "selected_log_probs", "split_backward", "storage", "tiled", "transformer_layer", "unpatch_torch", "varlen_attn",
    "warm_up", "workspace",
]  # fmt: skip
