"""Activation recomputation inside the backward kernels, for PyTorch."""

__version__ = "0.1.0"
