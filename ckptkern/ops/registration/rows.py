"""Tensors as the ops read them: rows of tokens, parameters in the compute dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...frozen import Frozen, frozen_bytes


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
    """The parameter in a dtype; a Frozen one dequantised."""
    if type(parameter) is Frozen:
        return parameter.dequantize(dtype)
    return parameter if parameter is None or parameter.dtype == dtype else parameter.to(dtype)


def beside_frozen(weights: Iterable[Any], o: Any, dtype: torch.dtype) -> tuple[Any, bool]:
    """(the options, whose workspace is what the dequantised Frozen weights leave of it; are all of these held for the pass?).

    They are held if they take half the workspace at most. Otherwise each is dequantised where it is read, and dropped.
    """
    at_once, largest = frozen_bytes(weights, dtype)
    if not at_once or o.workspace is None:  # before sizes that may be symbols are compared
        return o, True
    holds = 2 * at_once <= o.workspace
    return o._replace(workspace=max(o.workspace - (at_once if holds else largest), 1)), holds
