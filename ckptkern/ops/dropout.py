"""dropout: keeps 16 bytes of state for backward, and draws the mask again there."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .. import eager, state
from ._checks import check_input, check_probability
from ._choices import choose_backend, primitives
from ._op import Op, build
from ._rows import rows_2d, unflattened


def dropout_arguments(rng: Tensor | None, p: float) -> tuple[Tensor | None, int, float]:
    """(state, threshold, scale) as the primitives take them; contiguous, as a saved-tensor hook may have changed strides."""
    return (None, 0, 1.0) if rng is None else (rng.contiguous(), *state.threshold_scale(p))


def dropped(p: ModuleType, h: Tensor, dropout: tuple[Tensor | None, int, float], row_base: int) -> Tensor:
    """dropout(h), h itself without a state; `p` is the backend's module."""
    return h if dropout[0] is None else p.dropout(h, *dropout, row_base=row_base)


def draw_state(x: Tensor, p: float, training: bool) -> Tensor | None:
    """The 16 bytes that dropout keeps, or None where nothing is dropped."""
    return state.draw(x) if training and p > 0.0 else None


class Dropout(Op):
    name = "dropout"
    inputs = "Tensor x, Tensor rng"
    kept = ""
    statics = "float p, str backend, str precision"
    results = "Tensor[]"
    grads = "Tensor[]"

    @staticmethod
    def forward(x, rng, p, backend, precision):
        rows = primitives(backend).dropout(rows_2d(x), *dropout_arguments(rng, p))
        return [unflattened(rows, x.shape[:-1])]

    @staticmethod
    def forward_fake(x, rng, p, backend, precision):
        return [x.new_empty(x.shape)]

    @staticmethod
    def saved(tensors, outputs, statics, needs):
        return [None, tensors[1]]

    @staticmethod
    def backward(dy, x, rng, p, backend, precision, needs):
        return [*Dropout.forward(dy, rng, p, backend, precision), None]

    @staticmethod
    def backward_fake(dy, x, rng, p, backend, precision, needs):
        return [dy.new_empty(dy.shape), dy.new_empty(0)]

    @staticmethod
    def composite(x, rng, p, backend, precision):
        return eager.composite_dropout(x, dropout_arguments(rng, p))

    @classmethod
    def missing_input(cls, dy, saved, statics):
        return torch.zeros_like(dy)  # dropout is linear: its gradient does not depend on x

    @staticmethod
    def forward_flops(*args, out_val=None):
        return 0

    @staticmethod
    def backward_flops(dy, *args, out_val=None):
        return 0


_apply = build(Dropout)


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Zeroes each element with probability p and scales the others by 1/(1-p), as torch.nn.functional.dropout.

    x [..., n], any floating dtype. p is rounded to k/65536. Kept for backward: 16 bytes, drawn from torch's generator
    (torch.manual_seed reproduces them). Returns x itself where p is 0 or training is false.
    Raises ValueError for p outside [0, 1], DtypeError for an input that is not floating point,
    LayoutError for one that is not dense (ckptkern.errors).
    """
    check_probability("dropout", p)
    if not training or p == 0.0:
        return x
    if isinstance(x, Tensor) and x.dim() == 0:
        return dropout(x[None], p)[0]
    check_input("dropout", x, jagged=True)
    statics = (float(p), choose_backend("dropout", x), "ieee")
    return _apply(statics, x, draw_state(x, p, training))
