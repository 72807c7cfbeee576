"""Activations, dropout and sums of rows: the reference implementations of triton_kernels/elementwise.py.

act(z) and dropout(act(z)) are each rounded to the storage type.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import state as _state  # noqa: F401  (loads the extension that defines ckptkern::keep_mask)
from ..bits import pack_bits, unpack_bits
from ..subclasses import own_dispatch

_aten = torch.ops.aten

TensorFunction = Callable[[Tensor], Tensor]
# (state, threshold, scale, col_base): col_base is where column 0 lies in the unsharded tensor; state None: no dropout
Dropout = tuple[Tensor | None, int, float, int]
NO_DROPOUT: Dropout = (None, 0, 1.0, 0)


class Activation(NamedTuple):
    """An activation function. act: z -> act(z), differentiable. grad: dy, z -> dy * act'(z). act_ and grad_ overwrite z and dy.

    For relu, z may be relu's own output. temporaries: the most tensors like z that act_ or grad_ holds beside its arguments.
    torchs: torch's functions and module classes for this activation.
    """

    act: TensorFunction
    grad: Callable[[Tensor, Tensor], Tensor]
    act_: TensorFunction
    grad_: Callable[[Tensor, Tensor], Tensor]
    temporaries: int = 0
    torchs: tuple[object, ...] = ()


def _of_aten(
    act: TensorFunction,
    act_: TensorFunction,
    backward: torch._ops.OpOverloadPacket,
    *torchs,
    **options,
) -> Activation:
    """Returns an Activation with a backward op of ATen, which takes these options."""
    grad_input = backward.grad_input._op  # without OpOverload's Python frame, which costs 2 us of a tiny step
    grad = functools.partial(backward.default, **options)
    return Activation(act, grad, act_, lambda dy, z: grad_input(dy, z, grad_input=dy, **options), torchs=torchs)


def _of_slope(
    act: TensorFunction,
    act_: TensorFunction,
    slope: TensorFunction,
    temporaries: int,
) -> Activation:
    """Returns an Activation whose gradient is dy * slope(z)."""
    return Activation(act, lambda dy, z: slope(z).mul_(dy), act_, lambda dy, z: dy.mul_(slope(z)), temporaries)


def _quick_gelu_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(1.702 * z)
    return (1 - s).mul_(z).mul_(1.702).add_(1).mul_(s)


_TANH = {"approximate": "tanh"}
ACTIVATIONS = {
    "relu": _of_aten(F.relu, torch.relu_, _aten.threshold_backward, F.relu, torch.relu, torch.nn.ReLU, threshold=0),
    "relu2": _of_slope(
        lambda z: F.relu(z).square(), lambda z: torch.relu_(z).square_(), lambda z: F.relu(z).mul_(2), 1
    ),
    # nn.GELU(approximate="tanh") is gelu_tanh
    "gelu": _of_aten(F.gelu, torch._C._nn.gelu_, _aten.gelu_backward, F.gelu, torch.nn.GELU),
    "gelu_tanh": _of_aten(
        functools.partial(F.gelu, **_TANH),
        functools.partial(torch._C._nn.gelu_, **_TANH),
        _aten.gelu_backward,
        **_TANH,
    ),
    "quick_gelu": _of_slope(
        lambda z: z * torch.sigmoid(1.702 * z), lambda z: z.mul_(torch.sigmoid(1.702 * z)), _quick_gelu_slope, 2
    ),
    "silu": _of_aten(F.silu, functools.partial(F.silu, inplace=True), _aten.silu_backward, F.silu, torch.nn.SiLU),
    "identity": Activation(lambda z: z, lambda dy, z: dy, lambda z: z, lambda dy, z: dy, torchs=(torch.nn.Identity,)),
}


def act(z: Tensor, activation: str) -> Tensor:
    """Computes act(z); z itself for "identity"."""
    return ACTIVATIONS[activation].act(z)


def where_keep(x: Tensor, keep: Tensor) -> Tensor:
    """Returns x where keep, else 0. On a CPU torch.where with a bool is not vectorised; relu's gradient takes a quarter of its
    time."""
    return _aten.threshold_backward(x, keep.to(x.dtype), 0)


def dropout(x: Tensor, state: Tensor, threshold: int, scale: float, col_base: int = 0, *, row_base: int = 0) -> Tensor:
    """Computes keep * scale * x for x [..., N]. Backward is the same function of the gradient."""
    if own_dispatch((x,)):  # only the subclass knows where its elements lie
        return F.dropout(x, threshold / 65536)
    M, N = math.prod(x.shape[:-1]), x.shape[-1]
    mask = torch.ops.ckptkern.keep_mask.default(state, threshold, 1, M, N, 0, row_base, col_base, row_base + M)
    return where_keep(x, mask.view(x.shape)).mul_(scale)


def apply_dropout(h: Tensor, dropout_: Dropout, row_base: int = 0) -> Tensor:
    return h if dropout_[0] is None else dropout(h, *dropout_, row_base=row_base)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums and accumulators: float32 for 16-bit dtypes, else `dtype`."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def rounded(total: Tensor | None, wanted: bool | torch.dtype) -> Tensor | None:
    """Casts a sum to the dtype `wanted`; True: no cast."""
    return total if total is None or wanted is True or total.dtype == wanted else total.to(wanted)


def column_sum(dy: Tensor, wanted: bool | torch.dtype = True) -> Tensor | None:
    """Sums the rows, in float32 at least, and rounds once to the dtype `wanted`. True: no rounding; False: returns None."""
    if not wanted:
        return None
    if dy.dtype is wanted and wanted.itemsize >= 4:
        return dy.sum(0)
    if dy.itemsize >= 4 or (wanted == dy.dtype and not dy.is_cpu):
        total = dy.sum(0)
    elif not dy.is_cpu:  # a GPU adds 16-bit numbers in float32, but to a third dtype it would round them first
        total = dy.sum(0, dtype=torch.float32)
    else:
        (M, N), total = dy.shape, dy.new_zeros(dy.shape[1], dtype=torch.float32)
        # A CPU first copies what it sums to float32. Parts of 2^14 elements take less time than the whole; a part has at most
        # an eighth of the rows, as `row_bytes` counts it, and at least 16.
        for rows in dy.split(max(16, min(2**14 // max(N, 1), M // 8))):
            total += rows.sum(0, dtype=torch.float32)
    return rounded(total, wanted)


def act_fwd(z, u, activation):
    h = ACTIVATIONS[activation].act(z)
    return h if u is None else h * u


def relu_bits(h):
    return pack_bits(~(h <= 0))


def act_bwd(dy, saved, activation, *, bits=False, db=False):
    dz = where_keep(dy, unpack_bits(saved, dy.shape[1])) if bits else ACTIVATIONS[activation].grad(dy, saved)
    return dz, column_sum(dz, db)
