"""Defines the state of a region: 16 bytes that replay its dropout, and the precision of its forward.

`draw` takes int64[2] from torch's own generator. The op `keep_mask` turns it into a boolean mask that depends only on this
state, the probability and each element's place (plane, row, col) in the unsharded tensor, not on tiles, chunks, threads or
backend. `Precision` is the snapshot that recompute re-enters.

What runs at every call has two implementations with equal results: the C++ extension (csrc/), which `extension` finds or
builds, and `portable` in Python. Only this package imports them. csrc/philox.h defines the mask's layout, csrc/precision.h the
snapshot.
"""

from __future__ import annotations

import itertools
from enum import IntFlag
from typing import Any

import torch
from torch import Tensor

from .extension import LOADED

if LOADED.module is None:
    from . import portable as _C
    from .saved import asks_for_some

    _LIBRARY = _C.library()
else:
    _C: Any = LOADED.module

    def asks_for_some() -> bool:
        """Returns whether the running backward pass leaves gradients out."""
        return _C.asked() is not None


GradientSums = _C.GradientSums
Precision = _C.Precision
SegmentState = _C.SegmentState
# observe(tensors) -> flags of a call (`Observed`), and above NEEDS bits which of the tensors need a gradient
observe = _C.observe
# asked() -> for each edge of the running autograd node, whether this backward pass wants its gradient; None: all of them
asked = _C.asked
# layer_fits(x, weight, bias, in_features) -> whether they certainly form a linear layer on x's device
layer_fits = _C.layer_fits
NEEDS, MOST_NEEDS = 16, 48
SavedTensors, Placeholder, Recompute, unpack_saved = _C.SavedTensors, _C.Placeholder, _C.Recompute, _C.unpack_saved


class Observed(IntFlag):
    """Names the bits of `observe`, as csrc/bindings.cpp has them."""

    TRANSFORMS = 1  # of torch.func
    MODES = 2  # of torch dispatch
    PROFILER = 4
    SUBCLASS = 8  # a tensor is neither a Tensor nor a Parameter
    WRAPPED = 16  # a tensor belongs to a torch.func transform, which may have ended
    HOOKS = 32  # default hooks on saved tensors
    BACKWARD = 64  # the call is part of a backward pass
    MAIN_GRAD = 256  # a tensor has a main_grad
    AUTOCAST = 512  # autocast is on, for any device
    BATCHED = 128  # the first tensor is a batch of gradients (torch.autograd.grad's is_grads_batched)


_rng_state_op = torch.ops.ckptkern.rng_state.default
_keep_mask_op = torch.ops.ckptkern.keep_mask.default


def draw(like: Tensor) -> Tensor:
    """Creates a random state, int64[2], from torch's generator of like's device.

    Same bits as `torch.randint(-2**63, 2**63 - 1, (2,), device=like.device)`. Inside vmap each sample gets its
    own state with randomness="different", all share one with "same", and "error" raises.
    """
    if torch._C._are_functorch_transforms_active():
        return torch.randint(-(2**63), 2**63 - 1, (2,), device=like.device)
    # A separate argument for each draw: otherwise AOT's CSE merges two draws of a graph into one.
    return _rng_state_op(torch.empty(0, device=like.device))


def threshold_scale(p: float) -> tuple[int, float]:
    """Returns (t, scale): P(drop) = t / 65536 with t = round(65536 p), and scale = 65536 / (65536 - t), or 0.0 if all is
    dropped."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability must lie in [0, 1] but is {p}")
    threshold = round(65536 * p)
    return threshold, 65536 / (65536 - threshold) if threshold < 65536 else 0.0


@torch.library.register_fake("ckptkern::rng_state")
def _rng_state_fake(nonce: Tensor) -> Tensor:
    return nonce.new_empty(2, dtype=torch.int64)


@torch.library.register_fake("ckptkern::keep_mask")
def _keep_mask_fake(state: Tensor, threshold: int, planes: int, rows: int, cols: int, *bases: int) -> Tensor:
    return state.new_empty((planes, rows, cols), dtype=torch.bool)


@torch.library.register_vmap("ckptkern::keep_mask")
def _keep_mask_vmap(info, in_dims, state: Tensor, *arguments: int) -> tuple[Tensor, int]:
    states = state.movedim(in_dims[0], 0).unbind()
    return torch.stack([_keep_mask_op(state, *arguments) for state in states]), 0


_LOW = 0xFFFFFFFF
AT_ONCE = 2**20  # elements of a mask that torch ops compute at once, in 40 bytes each


def _keep_mask_torch(
    state: Tensor,
    threshold: int,
    planes: int,
    rows: int,
    cols: int,
    plane_base: int,
    row_base: int,
    col_base: int,
    total_rows: int,
) -> Tensor:
    """Computes csrc/philox.cpp in int64 tensor operations: one Philox call per 8 elements, then a reordering, some rows at a
    time."""
    if state.dtype != torch.int64 or state.shape != (2,):
        raise RuntimeError(
            f"keep_mask: state must be an int64 tensor of shape [2] but is {state.dtype} of shape {list(state.shape)}"
        )
    if not 0 <= threshold <= 65536:
        raise RuntimeError(f"keep_mask: threshold must lie in [0, 65536] but is {threshold}")
    if min(planes, rows, cols, plane_base, row_base, col_base) < 0:
        raise RuntimeError(
            f"keep_mask: sizes and bases must not be negative but are planes={planes}, rows={rows}, cols={cols}, "
            f"plane_base={plane_base}, row_base={row_base}, col_base={col_base}"
        )
    if total_rows < row_base + rows:
        raise RuntimeError(
            f"keep_mask: total_rows={total_rows} is less than row_base + rows = {row_base + rows}: rows would share their "
            "values with the next plane"
        )
    plane = torch.arange(plane_base, plane_base + planes, device=state.device)[:, None]
    col_block, col_block_end = col_base // 32, -(-(col_base + cols) // 32)
    key, stream = [[(word & _LOW), (word >> 32) & _LOW] for word in state]

    def keep(row, end):
        row_block, row_block_end = row // 16, -(-end // 16)
        row_blocks = torch.arange(row_block, row_block_end, device=state.device)
        # c1 [planes, 8 * row blocks, 1], c0 [8 * column blocks]
        c1 = 8 * (plane * -(-total_rows // 16) + row_blocks)[:, :, None] + torch.arange(8, device=state.device)
        c1 = c1.flatten(1)[:, :, None] & _LOW
        c0 = torch.arange(8 * col_block, 8 * col_block_end, device=state.device) & _LOW
        (k0, k1), (c2, c3) = key, stream
        for _ in range(10):
            product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 wraps: all 64 bits are right
            c0, c2 = ((product1 >> 32) & _LOW) ^ c1 ^ k0, ((product0 >> 32) & _LOW) ^ c3 ^ k1
            c1, c3 = product1 & _LOW, product0 & _LOW
            k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
        halves = [((word & 0xFFFF) >= threshold, (word >> 16) >= threshold) for word in (c0, c1, c2, c3)]
        # [word, half, plane, row block, row & 7, column block, col & 7] -> [plane, row block, half, row & 7, .., word, col & 7]
        saved = torch.stack([torch.stack(pair) for pair in halves]).view(
            4, 2, planes, -1, 8, col_block_end - col_block, 8
        )
        saved = saved.permute(2, 3, 1, 4, 5, 0, 6).reshape(planes, 16 * (row_block_end - row_block), -1)
        return saved[:, row - 16 * row_block : end - 16 * row_block, col_base - 32 * col_block :][:, :, :cols]

    mask = state.new_empty((planes, rows, cols), dtype=torch.bool)
    if mask.numel():
        step = max(AT_ONCE // (planes * cols) // 16, 1) * 16
        bounds = [row_base, *range(row_base // 16 * 16 + step, row_base + rows, step), row_base + rows]
        for row, end in itertools.pairwise(bounds):
            mask[:, row - row_base : end - row_base] = keep(row, end)
    return mask


torch.library.impl("ckptkern::keep_mask", "default", _keep_mask_torch)
