"""Defines dropout that saves 16 bytes for backward instead of a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from .share import check_kind, share


class Dropout(torch.nn.Dropout):
    """Replaces torch.nn.Dropout; backward samples the mask again. `inplace` copies the result back into the input."""

    @classmethod
    def from_torch(cls, module: torch.nn.Dropout) -> Dropout:
        """Returns a drop-in replacement of `module` that shares its hooks and settings."""
        check_kind(cls, module, torch.nn.Dropout)
        return share(cls, module)

    def forward(self, input: Tensor) -> Tensor:
        if self.p < 0.0 or self.p > 1.0:
            return super().forward(input)  # torch's own error
        output = ops.dropout(input, self.p, self.training)
        return input.copy_(output) if self.inplace and output is not input else output
