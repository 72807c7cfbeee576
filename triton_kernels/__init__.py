"""Triton kernels of ckptkern: the launchers of each file mirror the functions of the same name in `ckptkern.eager`.

Reading order: tile.py (tiles, dot, cast), elementwise.py (activations), philox.py (dropout masks), linear.py (Linear +
activation), mlp.py (MLP and gated MLP), stack.py (narrow chains), norm.py, rotary.py, attention.py (with attention_scores.py
and attention_backward.py), cross_entropy.py (the LM head and its loss), experts.py (with experts_tiles.py and
experts_backward.py). Kernels import nothing of ckptkern but `results`, what launchers return.
"""

from .attention import attn_bwd, attn_delta, attn_dmask, attn_fwd
from .cross_entropy import cross_entropy_bwd, cross_entropy_fwd, cross_entropy_saved_bwd, slice_count
from .elementwise import act_bwd, act_fwd, dropout, relu_bits
from .experts import (
    experts_act_grad,
    experts_bwd,
    experts_combine,
    experts_dw,
    experts_fwd,
    experts_gemm,
    experts_hidden_grad,
    experts_sums,
)
from .linear import act_grad, hidden_grad, linear_bwd, linear_fwd
from .mlp import gated_act_grad, gated_bwd, gated_fwd, gated_hidden_grad, mlp_bwd
from .norm import norm_bwd, norm_fwd
from .rotary import heads_bwd, heads_fwd
from .stack import pack_stack, stack_bwd, stack_fwd, stack_width

__all__ = [
    "act_bwd", "act_fwd", "act_grad", "attn_bwd", "attn_delta", "attn_dmask", "attn_fwd", "cross_entropy_bwd",
    "cross_entropy_fwd", "cross_entropy_saved_bwd", "dropout", "experts_act_grad", "experts_bwd", "experts_combine",
    "experts_dw", "experts_fwd", "experts_gemm", "experts_hidden_grad", "experts_sums", "gated_act_grad",
    "gated_bwd", "gated_fwd", "gated_hidden_grad", "heads_bwd", "heads_fwd", "hidden_grad", "linear_bwd",
    "linear_fwd", "mlp_bwd", "norm_bwd", "norm_fwd",
    "pack_stack", "relu_bits", "slice_count", "stack_bwd", "stack_fwd", "stack_width",
]  # fmt: skip
