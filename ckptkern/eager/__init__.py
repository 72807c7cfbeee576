"""The eager backend: every launcher of `triton_kernels` again in PyTorch ops, in the file of the same name.

It has the kernels' arguments, results, saved sets, dropout masks and rounding points. It is the definition that the kernels
are tested against, the CPU path, and what runs where no kernel covers a case.
"""

from .attention import (
    AttentionCore,
    as_heads,
    attention_composite,
    attention_weights,
    attn_bwd,
    attn_delta,
    attn_dmask,
    attn_fwd,
    empty_heads,
    fused_attn_bwd,
    fused_kernel,
    readable,
)
from .elementwise import (
    ACTIVATIONS,
    NO_DROPOUT,
    Dropout,
    act,
    act_bwd,
    act_fwd,
    act_grad_of,
    column_sum,
    composite_dropout,
    dropout,
    pack_bits,
    unpack_bits,
)
from .experts import (
    Groups,
    experts_act_grad,
    experts_bwd,
    experts_combine,
    experts_dw,
    experts_fwd,
    experts_product,
    experts_sums,
    route,
    wide_of,
)
from .linear import act_grad, hidden_grad, linear_bwd, linear_fwd, mm, product
from .mlp import gated_act_grad, gated_bwd, gated_fwd, gated_hidden_grad, mlp_bwd
from .norm import norm_bwd, norm_fwd
from .rotary import heads_bwd, heads_fwd
from .stack import pack_stack, stack_bwd, stack_fwd, stack_width

__all__ = [
    "ACTIVATIONS",
    "NO_DROPOUT",
    "AttentionCore",
    "Dropout",
    "Groups",
    "act",
    "act_bwd",
    "act_fwd",
    "act_grad",
    "act_grad_of",
    "as_heads",
    "attention_composite",
    "attention_weights",
    "attn_bwd",
    "attn_delta",
    "attn_dmask",
    "attn_fwd",
    "column_sum",
    "composite_dropout",
    "dropout",
    "empty_heads",
    "experts_act_grad", "experts_bwd", "experts_combine", "experts_dw", "experts_fwd", "experts_product", "experts_sums",
    "fused_attn_bwd", "fused_kernel",
    "gated_act_grad",
    "gated_bwd",
    "gated_fwd",
    "gated_hidden_grad",
    "heads_bwd",
    "heads_fwd",
    "hidden_grad",
    "linear_bwd",
    "linear_fwd",
    "mlp_bwd",
    "mm",
    "norm_bwd",
    "norm_fwd",
    "pack_bits",
    "pack_stack",
    "product",
    "readable",
    "route",
    "stack_bwd",
    "stack_fwd",
    "stack_width",
    "unpack_bits",
    "wide_of",
]  # fmt: skip
