"""Dropout's masks, by the op that makes them."""

from __future__ import annotations

import torch
from torch import Tensor

from ckptkern.state import threshold_scale


def keep_mask(
    state: Tensor,
    p: float,
    rows: int,
    cols: int,
    *,
    planes: int | None = None,
    plane_base: int = 0,
    row_base: int = 0,
    col_base: int = 0,
    total_rows: int | None = None,
) -> Tensor:
    """Computes the boolean mask, true = keep: [rows, cols], or [planes, rows, cols] if planes is given, on state's
    device.

    The bases place the mask inside an unsharded tensor whose planes have total_rows rows (row_base + rows if
    not given): the mask of a part is a part of the mask.
    """
    count, total = 1 if planes is None else planes, row_base + rows if total_rows is None else total_rows
    place = threshold_scale(p)[0], count, rows, cols, plane_base, row_base, col_base, total
    mask = torch.ops.ckptkern.keep_mask.default(state, *place)
    return mask[0] if planes is None else mask
