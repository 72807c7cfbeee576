"""Rotary embedding: its tables and their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch.choices import check_count, check_positive


def rotary_tables(
    positions: Tensor,
    dim: int,
    theta: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns (cos, sin) [..., S, dim] of the angles a_i = positions · theta^(-2i/dim), i < dim/2, for rotary embedding.

    positions: integers [S] or [B, S].
    interleaved: columns are a_0, a_0, a_1, a_1, ... (GPT-J); otherwise a_0, a_1, ..., a_0, a_1, ... (Llama).
    Angles are formed in float32. Raises ValueError for an odd dim and theta <= 0.
    """
    if not isinstance(positions, Tensor):
        raise TypeError(f"rotary_tables: positions must be a Tensor, not {type(positions).__name__}")
    check_count("rotary_tables", "dim", dim)
    check_positive("rotary_tables", "theta", theta)
    if dim % 2:
        raise ValueError(f"rotary_tables: dim must be even, not {dim}")
    frequencies = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angles = positions.float()[..., None] * frequencies
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def positions_of(S: int, device: torch.device, cu_seqlens: Tensor | None) -> Tensor:
    """Returns positions [S]: 0, 1, ..., restarting at 0 where a packed sequence begins."""
    rows = torch.arange(S, device=device)
    if cu_seqlens is None:
        return rows
    return rows - cu_seqlens[torch.searchsorted(cu_seqlens, rows, right=True) - 1]
