"""Defines the state of a region: 16 bytes that replay its dropout, and the precision of its forward.

`draw` takes int64[2] from torch's own generator. `keep_mask` turns it into a boolean mask, which depends only on
this state, the probability and each element's place (plane, row, col) in the unsharded tensor: not on tiles,
chunks, threads or backend. `Precision` is the snapshot that recompute re-enters.

This module alone imports the C++ extension; csrc/philox.h defines the mask's layout, csrc/precision.h the
snapshot.
"""

from __future__ import annotations

from enum import IntFlag
from types import ModuleType

import torch
from torch import Tensor

BUILD_COMMAND = "pip install --no-build-isolation ."


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _load_extension() -> ModuleType:
    advice = (
        f"Install ckptkern's wheel for torch {_release(torch.__version__)}, or build it for this torch in its source tree: "
        f"{BUILD_COMMAND}"
    )
    try:
        from . import _C
    except ImportError as error:
        raise ImportError(f"ckptkern's extension ckptkern._C cannot be loaded: {error}. {advice}") from error
    if _release(_C.torch_version) != _release(torch.__version__):
        raise ImportError(f"ckptkern's extension ckptkern._C was built for torch {_C.torch_version}. {advice}")
    return _C


_C = _load_extension()

GradientSums = _C.GradientSums
Precision = _C.Precision
SegmentState = _C.SegmentState
# observe(tensors) -> what observes a call, an `Observed`, and which of the tensors need a gradient, above NEEDS bits
observe = _C.observe
# asked() -> a byte for each edge of the autograd node that runs: does this backward pass want the gradient there? None: all
asked = _C.asked
# layer_fits(x, weight, bias, in_features) -> are they surely a linear layer's, on x's device?
layer_fits = _C.layer_fits
NEEDS, MOST_NEEDS = 16, 48
SavedTensors, Placeholder, Recompute, unpack_saved = _C.SavedTensors, _C.Placeholder, _C.Recompute, _C.unpack_saved


class Observed(IntFlag):
    """The bits of `observe`, as csrc/bindings.cpp has them."""

    TRANSFORMS = 1  # of torch.func
    MODES = 2  # of torch dispatch
    PROFILER = 4
    SUBCLASS = 8  # a tensor is neither a Tensor nor a Parameter
    WRAPPED = 16  # a tensor is that of a torch.func transform, which may have ended
    HOOKS = 32  # default hooks on saved tensors
    BACKWARD = 64  # the call is part of a backward pass
    MAIN_GRAD = 256  # a tensor has a main_grad
    AUTOCAST = 512  # autocast is on, for any device
    BATCHED = 128  # the first tensor is a batch of gradients (torch.autograd.grad's is_grads_batched)


_rng_state_op = torch.ops.ckptkern.rng_state.default
_keep_mask_op = torch.ops.ckptkern.keep_mask.default


def extension_info() -> dict[str, str]:
    """Returns the path of the extension and what it was built for."""
    return {"path": str(_C.__file__), "built for torch": _C.torch_version, "running torch": torch.__version__}


def philox4x32_10(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Runs one Philox4x32-10 call: four uint32 words from a uint64 key and four uint32 counter words."""
    return tuple(_C.philox4x32_10(key, counter))


def draw(like: Tensor) -> Tensor:
    """Creates a random state, int64[2], from torch's generator of like's device.

    Same bits as `torch.randint(-2**63, 2**63 - 1, (2,), device=like.device)`. Inside vmap each sample gets its
    own state with randomness="different", all share one with "same", and "error" raises.
    """
    if torch._C._are_functorch_transforms_active():
        return torch.randint(-(2**63), 2**63 - 1, (2,), device=like.device)
    # Each draw gets an argument of its own: without it, AOT's CSE merges two draws of a graph into one.
    return _rng_state_op(torch.empty(0, device=like.device))


def threshold_scale(p: float) -> tuple[int, float]:
    """(t, scale): P(drop) = t / 65536, t = round(65536 p), and scale = 65536 / (65536 - t), or 0.0 if all is dropped."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability must lie in [0, 1] but is {p}")
    threshold = round(65536 * p)
    return threshold, 65536 / (65536 - threshold) if threshold < 65536 else 0.0


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
    not given): the mask of a part is a part of the mask. C++ on the CPU, torch ops on any other device, same bits.
    """
    mask = _keep_mask_op(
        state,
        threshold_scale(p)[0],
        1 if planes is None else planes,
        rows,
        cols,
        plane_base,
        row_base,
        col_base,
        row_base + rows if total_rows is None else total_rows,
    )
    return mask[0] if planes is None else mask


@torch.library.register_fake("ckptkern::rng_state")
def _rng_state_fake(nonce: Tensor) -> Tensor:
    return nonce.new_empty(2, dtype=torch.int64)


@torch.library.register_fake("ckptkern::keep_mask")
def _keep_mask_fake(state: Tensor, threshold: int, planes: int, rows: int, cols: int, *bases: int) -> Tensor:
    return state.new_empty((planes, rows, cols), dtype=torch.bool)


@torch.library.register_vmap("ckptkern::keep_mask")
def _keep_mask_vmap(info, in_dims, state: Tensor, *arguments: int) -> tuple[Tensor, int]:
    states = state.movedim(in_dims[0], 0).unbind()
    return torch.stack([_keep_mask_op(one, *arguments) for one in states]), 0


_LOW = 0xFFFFFFFF


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
    """csrc/philox.cpp in int64 tensor operations: one Philox call per 8 elements, then a reordering."""
    row_block, row_block_end = row_base // 16, -(-(row_base + rows) // 16)
    col_block, col_block_end = col_base // 32, -(-(col_base + cols) // 32)
    plane = torch.arange(plane_base, plane_base + planes, device=state.device)[:, None]
    row_blocks = torch.arange(row_block, row_block_end, device=state.device)
    # c1 [planes, 8 * row blocks, 1], c0 [8 * column blocks]
    c1 = 8 * (plane * -(-total_rows // 16) + row_blocks)[:, :, None] + torch.arange(8, device=state.device)
    c1 = c1.flatten(1)[:, :, None] & _LOW
    c0 = torch.arange(8 * col_block, 8 * col_block_end, device=state.device) & _LOW
    c2, c3 = state[1] & _LOW, (state[1] >> 32) & _LOW
    k0, k1 = state[0] & _LOW, (state[0] >> 32) & _LOW
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 wraps: all 64 bits are right
        c0, c2 = ((product1 >> 32) & _LOW) ^ c1 ^ k0, ((product0 >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = product1 & _LOW, product0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW

    words = torch.stack([c0, c1, c2, c3], -1)
    values = torch.stack([words & 0xFFFF, words >> 16], -1)
    values = values.reshape(planes, row_block_end - row_block, 8, col_block_end - col_block, 8, 4, 2)
    # [plane, row block, row & 7, column block, col & 7, word, half] -> [.., half, row & 7, .., word, col & 7]
    values = values.permute(0, 1, 6, 2, 3, 5, 4).reshape(
        planes, 16 * (row_block_end - row_block), 32 * (col_block_end - col_block)
    )
    first_row, first_col = row_base - 16 * row_block, col_base - 32 * col_block
    return values[:, first_row : first_row + rows, first_col : first_col + cols] >= threshold


torch.library.impl("ckptkern::keep_mask", "default", _keep_mask_torch)
