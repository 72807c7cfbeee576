"""Which scores count: masks, windows, diagonals, slopes and packed sequences, checked and brought to one form."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from ...errors import DtypeError, ShapeError
from ..dispatch.checks import check_tensor
from ..dispatch.choices import surely


def check_window(op: str, window_size: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """(left, right), None for no bound."""
    if window_size is None:
        return None, None
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or any(not isinstance(side, int) or side < -1 for side in window_size):
        raise ValueError(f"{op}: window_size must be (left, right), each -1 (no bound) or >= 0, not {window_size!r}")
    left, right = window_size
    return None if left == -1 else int(left), None if right == -1 else int(right)


def left_bound(left: int | None, rows: int) -> int | None:
    """The left bound of a window; None if it hides nothing from so many rows, for which no window is looked up."""
    return None if left is not None and surely(left >= rows - 1) else left


def diagonal_of(op: str, attn_mask: Tensor | None, Sq: int, Sk: int) -> int | None:
    """If attn_mask is torch's CausalBias, the n such that row i sees the columns up to i + n; else None.

    A CausalBias has uninitialised memory. As in torch, an upper-left or square one fits all lengths.
    """
    module = sys.modules.get("torch.nn.attention.bias")  # not imported here, because it imports torch._dynamo
    if module is None or not isinstance(attn_mask, module.CausalBias):
        return None
    if not hasattr(attn_mask, "variant"):
        raise TypeError(
            f"{op}: attn_mask is the result of an operation on a CausalBias, so its diagonal is no longer known"
        )
    shape = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if attn_mask.variant == module.CausalVariant.UPPER_LEFT or shape[0] == shape[1]:
        return 0
    if shape != (Sq, Sk):
        raise ValueError(f"{op}: attn_mask is causal_lower_right{shape}, but query has {Sq} rows and key {Sk}")
    return Sk - Sq


def within(right: int | None, diagonal: int | None) -> int | None:
    """The tighter of two right bounds; None is no bound."""
    return diagonal if right is None else right if diagonal is None else min(right, diagonal)


def as_mask(op: str, attn_mask: Tensor, q: Tensor, Sk: int) -> Tensor:
    """attn_mask as [B or 1, H or 1, Sq or 1, Sk or 1]."""
    check_tensor(op, "attn_mask", attn_mask, q, floating=False)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise DtypeError(f"{op}: attn_mask must be bool (True = keep) or floating point, not {attn_mask.dtype}")
    if attn_mask.dtype == torch.float64 != q.dtype:
        raise DtypeError(f"{op}: attn_mask is {attn_mask.dtype}, which needs inputs of that dtype, not {q.dtype}")
    wanted = (q.shape[0], q.shape[1], q.shape[2], Sk)
    shape = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    if attn_mask.dim() > 4 or any(size not in (1, want) for size, want in zip(shape, wanted, strict=True)):
        raise ShapeError(f"{op}: attn_mask of shape {tuple(attn_mask.shape)} does not broadcast to {wanted}")
    return attn_mask.reshape(shape)


def as_slopes(op: str, alibi_slopes: Tensor, x: Tensor, B: int, H: int) -> Tensor:
    """alibi_slopes as float32 [B or 1, H]."""
    check_tensor(op, "alibi_slopes", alibi_slopes, x)
    if alibi_slopes.shape not in ((H,), (1, H), (B, H)):
        raise ShapeError(
            f"{op}: alibi_slopes must be [H={H}] or [B={B}, H={H}], but has shape {tuple(alibi_slopes.shape)}"
        )
    return alibi_slopes.float().reshape(-1, H).contiguous()


def merged_mask(mask: Tensor | None, padding: Tensor | None, mask_is_exclusion: bool = False) -> Tensor | None:
    """The core's mask from attn_mask, broadcastable to [B, H, S, S], and key_padding_mask [B, S] (its True hides) or a second
    attn_mask.

    It is recomputed in backward. Saved are the masks that were given, which all layers of a model share.
    """
    pads = padding is not None and padding.dim() < 4
    padding = torch.atleast_2d(padding)[:, None, None] if pads else padding
    seen = added = None
    for one, hides in ((mask, mask_is_exclusion), (padding, pads or mask_is_exclusion)):
        if one is None:
            continue
        if one.is_floating_point():
            added = one if added is None else added + one
        else:
            one = ~one if hides else one
            seen = one if seen is None else seen & one
    if added is not None:
        return added if seen is None else added.masked_fill(~seen, -math.inf)
    return seen
