"""Activation recomputation inside the backward kernels, for PyTorch."""

from . import nn
from .ops import backend, dropout, gated_mlp, linear_act, linear_stack, mlp

__version__ = "0.1.0"
__all__ = ["backend", "dropout", "gated_mlp", "linear_act", "linear_stack", "mlp", "nn"]
