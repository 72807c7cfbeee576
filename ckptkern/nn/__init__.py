"""Defines drop-in modules with the constructor, parameter names, layout and initialisation of torch.nn's class of the same
name, and a few that have none there: MLP, GatedMLP, LinearStack, LayerStack, Experts and Llama's layers.

A layer's argument `recompute` is the recompute mode of the op that it calls.
"""

from ..ops.attention.rotary import rotary_tables
from .attention import MultiheadAttention
from .cross_entropy import LinearCrossEntropyLoss
from .layer import Dropout
from .llama import LlamaAttention, LlamaDecoderLayer
from .mlp import MLP, Experts, GatedMLP, Linear, LinearStack
from .sequential import LayerStack, Sequential
from .transformer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "MLP",
    "Dropout",
    "Experts",
    "GatedMLP",
    "LayerStack",
    "Linear",
    "LinearCrossEntropyLoss",
    "LinearStack",
    "LlamaAttention",
    "LlamaDecoderLayer",
    "MultiheadAttention",
    "Sequential",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "rotary_tables",
]
