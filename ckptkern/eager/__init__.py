"""The eager backend: the launchers of `triton_kernels` in PyTorch ops, each in the file of the same name.

Arguments, results, saved tensors, dropout masks and rounding points equal the kernels'. The kernels are tested against this
backend; it also runs on CPUs and wherever no kernel covers a case.
"""

from ..bits import pack_bits, unpack_bits
from .attention import attn_delta, attn_fwd, attn_grads, flash_on_cpu
from .attention_core import (
    AttentionCore,
    as_heads,
    attention_reference,
    empty_heads,
    readable,
    sink_gradient,
    with_sinks,
)
from .cross_entropy import (
    Head,
    cross_entropy_bwd,
    cross_entropy_fwd,
    cross_entropy_saved_bwd,
    slice_count,
    target_columns,
    upcast_matmul,
)
from .distillation import Divergence, Model, divergence_bwd, divergence_fwd
from .elementwise import (
    ACTIVATIONS,
    NO_DROPOUT,
    Dropout,
    TensorFunction,
    act,
    act_bwd,
    act_fwd,
    apply_dropout,
    column_sum,
    dropout,
    relu_bits,
    wide_of,
)
from .experts import (
    Groups,
    experts_act_grad,
    experts_bwd,
    experts_combine,
    experts_dw,
    experts_fwd,
    experts_gemm,
    experts_sums,
    gather_rows,
    route,
)
from .linear import act_grad, hidden_grad, linear, linear_bwd, linear_fwd, mm, upcasts
from .mlp import gated_act_grad, gated_bwd, gated_fwd, gated_hidden_grad, mlp_bwd
from .norm import norm_bwd, norm_fwd
from .rotary import heads_bwd, heads_fwd
