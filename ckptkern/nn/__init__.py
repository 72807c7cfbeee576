"""Drop-in modules with the constructor, parameter names, layout and initialisation of the torch.nn class of the same name, and
modules that torch.nn lacks: MLP, GatedMLP, LinearStack, LayerStack, Experts and Llama's layers.

`recompute` and `workspace` are arguments of the op that a module calls. If a submodule or weight is modified (another type such
as LoRA, hooks, a parametrised, quantised or sharded weight), a module calls its submodules as one activation checkpoint.
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
