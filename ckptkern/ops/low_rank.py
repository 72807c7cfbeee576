"""Low-rank updates of a half's linear layers (LoRA: Hu et al. 2021, arXiv 2106.09685).

    y = x W^T + b + u B^T,  u = scale * dropout(x) A^T          A [r, d], B [n, r]

Only x is kept: dropout(x) and u are made again in backward, and a frozen W gets no gradient. The updates of a half share one
random state, of which each has rows of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import eager
from ..errors import ShapeError
from ._checks import check_number, check_tensor
from ._gradients import WeightGrad
from ._rows import cast_parameter
from .dropout import dropout_arguments, dropped

Dropout = tuple[Tensor | None, int, float]  # (state, threshold, scale), as the primitives take it


class LowRank(NamedTuple):
    """One layer's update. first_row: of its dropout, in the rows that the half's state is for."""

    a: Tensor
    b: Tensor
    scale: float
    dropout: Dropout
    first_row: int

    def cast(self, dtype: torch.dtype) -> LowRank:
        return self._replace(a=cast_parameter(self.a, dtype), b=cast_parameter(self.b, dtype))

    def input(self, p: ModuleType, x: Tensor, start: int = 0) -> Tensor:
        """dropout(x) for rows of x that begin at `start`."""
        return dropped(p, x, self.dropout, self.first_row + start)

    def add(self, p: ModuleType, y: Tensor, x: Tensor, start: int = 0) -> Tensor:
        """y + u B^T, in y."""
        return y.addmm_(torch.mm(self.input(p, x, start), self.a.t()).mul_(self.scale), self.b.t())

    def inner_gradient(self, dy: Tensor) -> Tensor:
        """du [rows, r], which the other gradients are made of."""
        return torch.mm(dy, self.b).mul_(self.scale)

    def add_input_gradient(self, p: ModuleType, du: Tensor, dx: Tensor, start: int = 0) -> None:
        """Adds in dx."""
        if self.dropout[0] is None:
            dx.addmm_(du, self.a)
        else:
            dx += self.input(p, torch.mm(du, self.a), start)  # dropout is its own backward

    def add_gradients(
        self,
        p: ModuleType,
        dy: Tensor,
        du: Tensor,
        x: Tensor,
        da: WeightGrad | None,
        db: WeightGrad | None,
        start: int = 0,
    ) -> None:
        """Adds to the sums of A and B; None is not formed."""
        x = self.input(p, x, start)
        if db is not None:
            db.add(dy, torch.mm(x, self.a.t()).mul_(self.scale))
        if da is not None:
            da.add(du, x)

    def composite(self, x: Tensor) -> Tensor:
        """u B^T in differentiable PyTorch ops, of x [..., d]."""
        x = eager.composite_dropout(x, self.dropout, self.first_row)
        return F.linear(F.linear(x, cast_parameter(self.a, x.dtype)) * self.scale, cast_parameter(self.b, x.dtype))


def names_of(layer: str) -> tuple[str, str]:
    """The fields of a half's tensors that hold a layer's A and B."""
    return f"{layer}_lora_a", f"{layer}_lora_b"


def low_rank(t: Any, o: Any, layers: tuple[str, ...], layer: str, rows: int) -> LowRank | None:
    """A layer's update, among those of a half whose inputs have at most `rows` rows."""
    if not o.lora:
        return None
    a, b = (getattr(t, name) for name in names_of(layer))
    if a is None:
        return None
    p, *scales = o.lora
    place = layers.index(layer)
    return LowRank(a, b, scales[place], dropout_arguments(t.lora_rng, p), place * rows)


def lora_dropout_p(o: Any) -> float:
    return o.lora[0] if o.lora else 0.0


def lora_flops(rows: int, pair: LowRank | None, products_a: int, products_b: int) -> int:
    """Of so many products with A and with B."""
    return 0 if pair is None else 2 * rows * (products_a * pair.a.numel() + products_b * pair.b.numel())


def gradient_flops(rows: int, pair: LowRank | None, need_x: bool, need_a: bool, need_b: bool) -> int:
    """Of the gradients of x, A and B."""
    return lora_flops(rows, pair, need_x + need_a + need_b, (need_x or need_a or need_b) + need_b)


def gather_lora(
    op: str, x: Tensor, lora: Mapping[str, Any] | None, p: float, weights: Mapping[str, tuple[str, Tensor]],
    layers: tuple[str, ...],
) -> tuple[dict[str, Tensor | None], tuple[float, ...]]:  # fmt: skip
    """(tensors by field, (p, a scale for each of `layers`), empty without updates). weights: (layer, weight) by the name that
    `lora` has for it."""
    tensors: dict[str, Tensor | None] = dict.fromkeys(name for layer in layers for name in names_of(layer))
    if lora is None:
        return tensors, ()
    if not isinstance(lora, Mapping):
        raise TypeError(f"{op}: lora must be a dict of (A, B, scale) by layer, not {type(lora).__name__}")
    scales = dict.fromkeys(layers, 0.0)
    for name, given in lora.items():
        if name not in weights:
            raise ValueError(f"{op}: lora has {name!r}, but the layers are {', '.join(map(repr, weights))}")
        if not isinstance(given, Iterable) or isinstance(given, Tensor) or len(given := tuple(given)) != 3:
            raise TypeError(f"{op}: lora[{name!r}] must be (A, B, scale)")
        layer, weight = weights[name]
        (n, d), (a, b, scale) = weight.shape, given
        check_number(op, f"the scale of lora[{name!r}]", scale)
        for which, tensor in (("A", a), ("B", b)):
            check_tensor(op, f"{which} of lora[{name!r}]", tensor, x)
        r = a.shape[0] if a.dim() == 2 else 0
        if a.shape != (r, d) or b.shape != (n, r):
            raise ShapeError(
                f"{op}: A and B of lora[{name!r}] must be [r, {d}] and [{n}, r], but have shapes {tuple(a.shape)} and "
                f"{tuple(b.shape)}"
            )
        scales[layer] = float(scale)
        tensors |= zip(names_of(layer), (a, b), strict=True)
    return tensors, (float(p), *scales.values()) if lora else ()
