"""The public functions: one file per op, with the op's description and the function that checks arguments and calls it."""

from ._checks import ACTIVATIONS
from ._choices import backend
from .attention import scaled_dot_product_attention, varlen_attn
from .attention_block import attention_block
from .cross_entropy import linear_cross_entropy
from .dropout import dropout
from .experts import grouped_gated_mlp, moe_mlp
from .gated_mlp import gated_mlp
from .linear_act import linear_act
from .linear_stack import linear_stack
from .low_rank import LoRA
from .mlp import mlp
from .mlp_block import mlp_block
from .transformer_layer import transformer_layer

__all__ = [
    "ACTIVATIONS", "LoRA", "attention_block", "backend", "dropout", "gated_mlp", "grouped_gated_mlp", "linear_act",
    "linear_cross_entropy", "linear_stack", "mlp", "mlp_block", "moe_mlp", "scaled_dot_product_attention", "transformer_layer",
    "varlen_attn",
]  # fmt: skip
