"""Booleans as bits: ReLU's masks, which ops save, and the places of non-zeros, which ``storage.compress`` saves."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def pack_bits(bit: Tensor) -> Tensor:
    """bool [M, N], a tensor of its own, -> uint8 [M, ceil(N/8)]: bit j of byte i is column 8 i + j."""
    M, N = bit.shape
    bit = bit if N % 8 == 0 else F.pad(bit, (0, -N % 8))
    # Eight bools as one number: the matmul has the j-th of them, its bit 8 j, at bit 56 + j. 4 times as fast as a sum.
    return (bit.flatten().view(torch.int64) * 0x0102040810204080 >> 56).to(torch.uint8).view(M, -(-N // 8))


def unpack_bits(bits: Tensor, N: int) -> Tensor:
    """uint8 [M, ceil(N/8)] -> bool [M, N]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    byte = torch.arange(256, dtype=torch.uint8, device=bits.device)
    bools = (byte.unsqueeze(-1) >> shifts & 1).view(torch.int64).flatten()  # of every byte, as one number
    return bools[bits.int()].view(torch.bool)[:, :N]
