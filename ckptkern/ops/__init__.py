"""The public functions: one file per op, with the op's description and the function that checks arguments and calls it."""

from .attention.block import attention_block
from .attention.latent import latent_attention_block
from .attention.sdpa import scaled_dot_product_attention, varlen_attn
from .cross_entropy.loss import linear_cross_entropy, selected_log_probs
from .dispatch.choices import ACTIVATIONS, backend, workspace
from .distillation import linear_distillation, linear_topk_distillation
from .experts import grouped_gated_mlp, moe_mlp
from .mlp.linear import linear_act, linear_stack
from .mlp.mlp import gated_mlp, mlp, mlp_block
from .moe import moe_block
from .registration.gradients import accumulate_in_place, delay_weight_gradients, split_backward
from .sublayer.dropout import dropout
from .sublayer.lora import LoRA
from .transformer_layer import transformer_layer
