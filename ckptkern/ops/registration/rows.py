"""Tensors as the ops read them: rows of tokens, parameters in the compute dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def row_count(x: Tensor) -> int:
    """Rows of [..., K]. torch.Size.numel() would fix a symbolic batch at the size that is traced."""
    return math.prod(x.shape[:-1])


def rows_2d(x: Tensor) -> Tensor:
    """[..., K] -> [rows, K]; a view where the strides allow it."""
    return x if x.dim() == 2 else x.reshape(row_count(x), x.shape[-1])


def unflattened(rows: Tensor, like: Tensor) -> Tensor:
    """[rows, K] -> [..., K] as `like`, not a view, because autograd refuses to change a view that a Function returned in
    place."""
    return rows if like.dim() == 2 else torch.ops.aten._unsafe_view.default(rows, (*like.shape[:-1], rows.shape[1]))


def cast_parameter(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return parameter if parameter is None or parameter.dtype == dtype else parameter.to(dtype)
