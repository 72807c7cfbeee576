"""The eager backend: every launcher of `triton_kernels` again in PyTorch ops, with the same arguments and results.

It is the definition that the kernels are tested against, the CPU path, and what runs where no kernel covers a case.
Same saved sets, same dropout masks, same rounding points: z is rounded, act(z) is rounded, dropout is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import state as _state  # noqa: F401  (loads the extension that defines ckptkern::keep_mask)

_aten = torch.ops.aten

Dropout = tuple[Tensor | None, int, float]  # (state, threshold, scale); state None: no dropout
NO_DROPOUT: Dropout = (None, 0, 1.0)


class Activation(NamedTuple):
    """act: z -> act(z). grad: dy, z -> dy * act'(z). act_ and grad_ write the same over z and over dy.

    For relu, z may be relu's own output: the gradient is the same.
    """

    act: Callable[[Tensor], Tensor]
    grad: Callable[[Tensor, Tensor], Tensor]
    act_: Callable[[Tensor], Tensor]
    grad_: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS = {
    "relu": Activation(
        F.relu,
        lambda dy, z: _aten.threshold_backward.default(dy, z, 0),
        torch.relu_,
        lambda dy, z: _aten.threshold_backward.grad_input(dy, z, 0, grad_input=dy),
    ),
    "relu2": Activation(
        lambda z: F.relu(z).square(),
        lambda dy, z: dy * F.relu(z).mul_(2),
        lambda z: torch.relu_(z).square_(),
        lambda dy, z: dy.mul_(F.relu(z).mul_(2)),
    ),
    "gelu": Activation(
        F.gelu,
        _aten.gelu_backward.default,
        torch._C._nn.gelu_,
        lambda dy, z: _aten.gelu_backward.grad_input(dy, z, grad_input=dy),
    ),
    "gelu_tanh": Activation(
        lambda z: F.gelu(z, approximate="tanh"),
        lambda dy, z: _aten.gelu_backward.default(dy, z, approximate="tanh"),
        lambda z: torch._C._nn.gelu_(z, approximate="tanh"),
        lambda dy, z: _aten.gelu_backward.grad_input(dy, z, approximate="tanh", grad_input=dy),
    ),
    "silu": Activation(
        F.silu,
        _aten.silu_backward.default,
        lambda z: F.silu(z, inplace=True),
        lambda dy, z: _aten.silu_backward.grad_input(dy, z, grad_input=dy),
    ),
    "identity": Activation(lambda z: z, lambda dy, z: dy, lambda z: z, lambda dy, z: dy),
}


def act(z: Tensor, activation: str) -> Tensor:
    """act(z). May be z itself (identity)."""
    return ACTIVATIONS[activation].act(z)


def act_grad_of(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    """dy * act'(z). May be dy itself (identity)."""
    return ACTIVATIONS[activation].grad(dy, z)


def product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """x w^T + b for x [M, K], w [N, K], b [N] or None."""
    return torch.mm(x, w.t()) if b is None else torch.addmm(b, x, w.t())


def pack_bits(bit: Tensor) -> Tensor:
    """bool [M, N] -> uint8 [M, ceil(N/8)]: bit j of byte i is column 8 i + j."""
    M, N = bit.shape
    bit = F.pad(bit.to(torch.uint8), (0, -N % 8)).view(M, -(-N // 8), 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bit.device)
    return (bit * weights).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, N: int) -> Tensor:
    """uint8 [M, ceil(N/8)] -> bool [M, N]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(-1) >> shifts & 1).flatten(1)[:, :N].to(torch.bool)


def dropout(x: Tensor, state: Tensor, threshold: int, scale: float, *, row_base: int = 0) -> Tensor:
    """keep * scale * x for x [M, N]; its own backward."""
    M, N = x.shape
    mask = torch.ops.ckptkern.keep_mask.default(state, threshold, 1, M, N, 0, row_base, 0, row_base + M)
    return torch.where(mask[0], x * scale, 0)


def _dropped(h: Tensor, dropout_: Dropout, row_base: int) -> Tensor:
    return h if dropout_[0] is None else dropout(h, *dropout_, row_base=row_base)


def column_sum(dy: Tensor) -> Tensor:
    """Sum of the rows, in float32 at least."""
    return dy.sum(0, dtype=torch.float32 if dy.dtype.itemsize < 4 else None)


def _column_sum(dz: Tensor, wanted: bool) -> Tensor | None:
    return column_sum(dz) if wanted else None


def act_fwd(z, u, activation):
    return act(z, activation) if u is None else act(z, activation) * u


def act_bwd(dy, kept, activation, *, bits=False, db=False):
    dz = torch.where(unpack_bits(kept, dy.shape[1]), dy, 0) if bits else act_grad_of(dy, kept, activation)
    return dz, _column_sum(dz, db)


def linear_fwd(x, w, b, activation, precision, *, dropout=NO_DROPOUT, row_base=0, keep_z=False, keep_bits=False):
    z = product(x, w, b)
    h = _dropped(act(z, activation), dropout, row_base)
    return h, z if keep_z else None, pack_bits(~(z <= 0)) if keep_bits else None


def linear_bwd(x, w, b, dh, activation, precision, *, db=False):
    return act_bwd(dh, product(x, w, b), activation, db=db)


def act_grad(
    dy, w, z, activation, precision, *, dropout=NO_DROPOUT, row_base=0, keep_h=False, h_over_z=False, db=False
):
    function = ACTIVATIONS[activation]
    dz = function.grad_(_dropped(torch.mm(dy, w), dropout, row_base), z)
    h = None
    if keep_h:
        h = _dropped(function.act_(z) if h_over_z else function.act(z), dropout, row_base)
    return dz, h, _column_sum(dz, db)


def mlp_bwd(x, w1, b1, dy, w2, activation, precision, *, dropout=NO_DROPOUT, row_base=0, keep_h=True, db=False):
    return act_grad(
        dy, w2, product(x, w1, b1), activation, precision, dropout=dropout, row_base=row_base, keep_h=keep_h,
        h_over_z=True, db=db,
    )  # fmt: skip


def gated_fwd(x, wg, bg, wu, bu, activation, precision, *, dropout=NO_DROPOUT, row_base=0, keep_gu=False):
    g, u = product(x, wg, bg), product(x, wu, bu)
    h = _dropped(act(g, activation) * u, dropout, row_base)
    return (h, g, u) if keep_gu else (h, None, None)


def gated_bwd(
    x, wg, bg, wu, bu, dy, wd, activation, precision, *, dropout=NO_DROPOUT, row_base=0, keep_h=True, dbg=False,
    dbu=False,
):  # fmt: skip
    return gated_act_grad(
        dy, wd, product(x, wg, bg), product(x, wu, bu), activation, precision, dropout=dropout, row_base=row_base,
        keep_h=keep_h, dbg=dbg, dbu=dbu,
    )  # fmt: skip


def gated_act_grad(
    dy, wd, g, u, activation, precision, *, dropout=NO_DROPOUT, row_base=0, keep_h=True, dbg=False, dbu=False
):
    dh = _dropped(torch.mm(dy, wd), dropout, row_base)
    a = act(g, activation)
    h = _dropped(a * u, dropout, row_base) if keep_h else None
    du = dh * a
    dg = ACTIVATIONS[activation].grad_(dh.mul_(u), g)
    return dg, du, h, _column_sum(dg, dbg), _column_sum(du, dbu)


def composite_dropout(h: Tensor, dropout_: Dropout) -> Tensor:
    """Differentiable dropout(h) for h [..., N]: the same mask, for second-order gradients."""
    state, threshold, scale = dropout_
    if state is None:
        return h
    M, N = math.prod(h.shape[:-1]), h.shape[-1]
    mask = torch.ops.ckptkern.keep_mask.default(state, threshold, 1, M, N, 0, 0, 0, M)
    return torch.where(mask.view(h.shape), h * scale, 0)

