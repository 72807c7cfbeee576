"""What level "packed" keeps of ReLU's output: its non-zeros (`eager/packing.py`)."""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor
from torch.types import IntLikeType


class Packed:
    """Rows of a tensor [M, N]: their bits and offsets, and the values of all of its rows."""

    __slots__ = ("bits", "offsets", "values")

    def __init__(self, bits: Tensor, offsets: Tensor, values: Tensor):
        self.bits, self.offsets, self.values = bits, offsets, values

    def __getitem__(self, rows: slice) -> Packed:
        return Packed(self.bits[rows], self.offsets[rows.start : rows.stop + 1], self.values)

    def dense(
        self, p: ModuleType, x: Tensor, w: Tensor, b: Tensor | None, precision: str, scale: float = 1.0
    ) -> Tensor:
        """The rows themselves; `p` is the backend's module, x, w, b and dropout's scale are what they were made of."""
        return p.unpack_nonzeros(self.bits, self.offsets, self.values, x, w, b, precision, scale=scale)


def room_of(rows: IntLikeType, features: IntLikeType, capacity: float) -> IntLikeType:
    """Non-zeros that there is room for: as many for each row, but every row may take of it what it needs."""
    return rows * math.ceil(capacity * features)


def packed_fake(x: Tensor, rows: IntLikeType, features: IntLikeType, capacity: float) -> list[Tensor]:
    """bits, offsets and values, empty."""
    return [
        x.new_empty((rows, (features + 7) // 8), dtype=torch.uint8),
        x.new_empty(rows + 1, dtype=torch.int64),
        x.new_empty(room_of(rows, features, capacity)),
    ]
