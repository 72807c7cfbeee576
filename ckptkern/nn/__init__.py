"""Drop-in modules: the constructor, parameter names, layout and initialisation of their torch.nn twins.

Their state_dict is the twin's. A layer's keyword argument `recompute` is the level of the op it calls.
"""

from .attention import MultiheadAttention
from .dropout import Dropout
from .linear import Linear, LinearStack
from .llama import LlamaAttention, LlamaDecoderLayer, rotary_tables
from .mlp import MLP, GatedMLP
from .sequential import Sequential
from .transformer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "MLP", "Dropout", "GatedMLP", "Linear", "LinearStack", "LlamaAttention", "LlamaDecoderLayer", "MultiheadAttention",
    "Sequential", "TransformerDecoderLayer", "TransformerEncoderLayer", "rotary_tables",
]  # fmt: skip
