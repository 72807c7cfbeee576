"""Defines drop-in modules with the constructor, parameter names, layout and initialisation of torch.nn's class of the same
name, and a few that have none there: MLP, GatedMLP, LinearStack, LayerStack, Experts and Llama's layers.

A layer's argument `recompute` is the recompute mode of the op that it calls.
"""

import torch

from .attention import MultiheadAttention
from .cross_entropy import LinearCrossEntropyLoss
from .dropout import Dropout
from .experts import Experts
from .linear import Linear, LinearStack
from .llama import LlamaAttention, LlamaDecoderLayer, rotary_tables
from .mlp import MLP, GatedMLP
from .sequential import LayerStack, Sequential
from .transformer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "MLP", "Dropout", "Experts", "GatedMLP", "LayerStack", "Linear", "LinearCrossEntropyLoss", "LinearStack",
    "LlamaAttention", "LlamaDecoderLayer",
    "MultiheadAttention", "Sequential", "TransformerDecoderLayer", "TransformerEncoderLayer", "rotary_tables",
]  # fmt: skip


def _refuse_script(module: torch.nn.Module):
    raise NotImplementedError(
        f"torch.jit.script: {type(module).__name__} is a layer of ckptkern.nn, which cannot be scripted. Use torch.compile "
        "or torch.export, or torch's own layer"
    )


for _name in __all__:
    if isinstance(globals()[_name], type):
        globals()[_name].__prepare_scriptable__ = _refuse_script  # torch.jit.script asks every module of a model
