"""Defines dropout, which saves 16 bytes of state and samples the same mask again in backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.types import IntLikeType

from ... import eager, state
from ..dispatch.choices import check_input, check_probability, choose_backend, primitives
from ..dispatch.shard import ACTIVE
from ..registration.functions import build
from ..registration.op import Op, rows_2d, unflattened


def dropout_arguments(rng: Tensor | None, p: float, col_base: int = 0) -> eager.Dropout:
    """Returns (state, threshold, scale, col_base) as the primitives take them. The state is contiguous, because a
    saved-tensor hook may have changed its strides."""
    return eager.NO_DROPOUT if rng is None else (rng.contiguous(), *state.threshold_scale(p), col_base)


def draw_state(x: Tensor, p: float, training: bool, *, of_sequence: bool = False) -> Tensor | None:
    """Creates the 16 bytes that dropout saves, or None if nothing is dropped. of_sequence: the mask is of a whole sequence,
    and all ranks share the state; otherwise each rank gets its own, for its rows."""
    if not training or p <= 0.0:
        return None
    rng = state.draw(x)
    return rng if of_sequence or ACTIVE.context is None else ACTIVE.context.stream(rng)


class DropoutOptions(NamedTuple):
    """Row 0 of sample i of x is row row_base + i row_step of the unsharded tensor. row_step 0: x is one sample."""

    p: float
    row_base: IntLikeType
    row_step: IntLikeType
    backend: str


class Dropout(Op):
    name = "dropout"
    Options = DropoutOptions

    @staticmethod
    def reads_x(o, needs):
        return False

    @staticmethod
    def forward(tensors, o):
        x, rng = tensors
        arguments, drop = dropout_arguments(rng, o.p), primitives(o.backend).dropout
        samples = rows_2d(x).split(x.shape[-2]) if o.row_step else (rows_2d(x),)
        parts = [drop(sample, *arguments, row_base=o.row_base + i * o.row_step) for i, sample in enumerate(samples)]
        return unflattened(parts[0] if len(parts) == 1 else torch.cat(parts), x), {}

    @staticmethod
    def backward(dy, tensors, saved, o, needs):
        return [Dropout.forward((dy, tensors[1]), o)[0], None]

    @staticmethod
    def reference(tensors, o):
        if o.row_step:
            return Dropout.forward(tensors, o._replace(backend="eager"))[0]
        return eager.apply_dropout(tensors[0], dropout_arguments(tensors[1], o.p), o.row_base)

    @classmethod
    def missing_input(cls, dy, tensors, o):
        return torch.zeros_like(dy)  # dropout is linear: its gradient does not depend on x


_apply = build(Dropout)


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Zeroes each element with probability p and scales the others by 1/(1-p), as torch.nn.functional.dropout.

    x [..., n] has any floating dtype. torch.manual_seed reproduces the mask. Returns x itself if p is 0 or training is
    False.
    Raises: see Conventions.
    """
    check_probability("dropout", p)
    if not training or p == 0.0:
        return x
    if isinstance(x, Tensor) and x.dim() == 0:
        return dropout(x[None], p)[0]
    check_input("dropout", x, jagged=True)
    return replayed_dropout(x, draw_state(x, p, training), p)


def replayed_dropout(x: Tensor, rng: Tensor | None, p: float, row_base: int = 0, row_step: int = 0) -> Tensor:
    """Applies dropout with a state that was drawn before; without a state returns x. row_base, row_step: the places of the
    samples of x [B, S, n] among the unsharded rows (`DropoutOptions`)."""
    if rng is None:
        return x
    options = DropoutOptions(p=float(p), row_base=row_base, row_step=row_step, backend=choose_backend("dropout", x))
    return _apply(options, x, rng)
