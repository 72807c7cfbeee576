"""Computes low-rank updates of a sublayer's linear layers (LoRA: Hu et al. 2021, arXiv 2106.09685).

    y = x W^T + b + u B^T,  u = scale * dropout(x) A^T          A [r, d], B [n, r]

Only x is saved: backward recomputes dropout(x) and u, and a frozen W gets no gradient. The updates of a sublayer share one
random state, with separate rows of the mask. Updates of experts (`GroupedLowRank`) have A [E, r, d] and B [E, n, r], and no
dropout."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import eager
from ...errors import ShapeError
from ..dispatch.choices import autocast_dtype, check_number, check_probability, check_tensor
from ..registration.gradients import WeightGrad
from ..registration.op import Named, Names, cast_parameter
from .dropout import dropout_arguments


class LoRA(NamedTuple):
    """Describes a low-rank update of a linear layer: y = x W^T + b + scale * dropout(x) a^T b^T.

    a, b: [r, in_features] and [out_features, r] (arXiv 2106.09685); of experts [E, r, in_features] and [E, out_features,
    r].
    scale: lora_alpha / r in peft.
    dropout_p: dropout of the update's input; 0 for experts.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0
    dropout_p: float = 0.0


class ReplayedLoRA(NamedTuple):
    """A LoRA with a random state that has been drawn, so that two calls have the same mask."""

    a: Tensor
    b: Tensor
    scale: float
    dropout_p: float
    rng: Tensor | None


class LowRank(NamedTuple):
    """The low-rank update of one layer. first_row: of its dropout, among the rows of the sublayer's state.

    u, du and the gradients' sums have the dtype of a and b (`update_dtype`); what is added to the layer's result or to its
    input's gradient has the dtype of these.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: eager.Dropout = eager.NO_DROPOUT
    first_row: int = 0

    def input(self, p: ModuleType, x: Tensor, start: int = 0) -> Tensor:
        """Returns dropout(x) for rows of x that begin at `start`."""
        return p.apply_dropout(x, self.dropout, self.first_row + start)

    def inner(self, x: Tensor) -> Tensor:
        """Returns u [rows, r] from dropout(x)."""
        return torch.mm(x, self.a.t()).mul_(self.scale)

    def add(self, p: ModuleType, y: Tensor, x: Tensor, start: int = 0) -> Tensor:
        """Adds u B^T to y in place."""
        u = self.inner(self.input(p, x.to(self.a.dtype), start))
        return y.addmm_(u.to(y.dtype), self.b.t().to(y.dtype))

    def inner_gradient(self, dy: Tensor) -> Tensor:
        """Returns du [rows, r], from which the other gradients are computed."""
        return torch.mm(dy.to(self.b.dtype), self.b).mul_(self.scale)

    def add_input_gradient(self, p: ModuleType, du: Tensor, dx: Tensor, start: int = 0) -> None:
        """Adds the input's gradient to dx in place."""
        du, a = du.to(dx.dtype), self.a.to(dx.dtype)
        if self.dropout[0] is None:
            dx.addmm_(du, a)
        else:
            dx += self.input(p, torch.mm(du, a), start)  # dropout is its own backward

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
        """Adds to the sums of A and B, of which None is skipped."""
        x = self.input(p, x.to(self.a.dtype), start)
        if db is not None:
            db.add(dy.to(self.b.dtype), self.inner(x))
        if da is not None:
            da.add(du, x)

    def reference(self, x: Tensor) -> Tensor:
        """Returns u B^T for x [..., d], computed in differentiable PyTorch ops."""
        rows = eager.apply_dropout(x.to(self.a.dtype), self.dropout, self.first_row)
        return F.linear(F.linear(rows, self.a) * self.scale, self.b).to(x.dtype)


class GroupedLowRank(NamedTuple):
    """The low-rank update of one matmul of experts, for rows in the experts' order. A and B have the rows' dtype."""

    a: Tensor
    b: Tensor
    scale: float
    precision: str

    def inner(self, p: ModuleType, rows: Tensor, groups: eager.Groups, back: bool = False) -> Tensor:
        """Returns u [rows, r] of x, or `back` du of dy."""
        matrix = self.b if back else self.a
        return p.experts_gemm(rows, matrix, None, groups, self.precision, transposed=not back).mul_(self.scale)

    def add(self, p: ModuleType, y: Tensor, x: Tensor, groups: eager.Groups) -> Tensor:
        """Adds u B^T to y in place."""
        u = self.inner(p, x, groups)
        return y.add_(p.experts_gemm(u, self.b, None, groups, self.precision, transposed=True))

    def of_expert(self, expert: int) -> LowRank:
        """Returns one expert's update."""
        return LowRank(self.a[expert], self.b[expert], self.scale)


def grouped_low_rank(
    t: Mapping[str, Tensor | None],
    scales: tuple[float, ...],
    layers: Names,
    dtype: torch.dtype,
    precision: str,
) -> dict[str, GroupedLowRank]:
    """Returns the updates of experts by layer. scales: one for each of `layers`, empty without updates."""
    updates = {}
    for layer, scale in zip(layers, scales, strict=bool(scales)):
        a, b = (cast_parameter(t[name], dtype) for name in names_of(layer))
        if a is not None:
            updates[layer] = GroupedLowRank(a.contiguous(), b.contiguous(), scale, precision)
    return updates


def reference_linear(x: Tensor, weight: Tensor, bias: Tensor | None, update: LowRank | None = None) -> Tensor:
    """Computes a linear layer of x [..., d], with its update, in differentiable PyTorch ops."""
    y = F.linear(x, cast_parameter(weight, x.dtype), cast_parameter(bias, x.dtype))
    return y if update is None else y + update.reference(x)


def names_of(layer: str) -> tuple[str, str]:
    """Returns the field names of a layer's A and B."""
    return f"{layer}_lora_a", f"{layer}_lora_b"


def updates_of(layers: Iterable[str]) -> type:
    """Creates a NamedTuple with the fields of these layers' updates, None by default, for `with_fields`."""
    fields = NamedTuple("Updates", [(name, Tensor | None) for layer in layers for name in names_of(layer)])
    fields._field_defaults = dict.fromkeys(fields._fields)
    return fields


def low_rank(t, o, layers: Names, layer: str, rows: int) -> LowRank | None:
    """Returns a layer's update, or None. rows: the most rows of any input of the sublayer."""
    if not o.lora:
        return None
    a, b = (getattr(t, name) for name in names_of(layer))
    if a is None:
        return None
    place = layers.index(layer)
    scale, p = o.lora[2 * place : 2 * place + 2]
    a, b = (cast_parameter(matrix, o.lora_dtype) for matrix in (a, b))
    return LowRank(a, b, scale, dropout_arguments(t.lora_rng if p else None, p), place * rows)


def update_dtype(x: Tensor, dtype: torch.dtype, tensors: Iterable[Tensor | None]) -> torch.dtype:
    """Returns the dtype of a sublayer's updates: autocast's inside autocast, else the widest of dtype and the tensors'.

    A float32 update of a 16-bit layer, as peft creates it, so keeps its gradients' range and precision.
    """
    if dtype != x.dtype or autocast_dtype(x) is not None:
        return dtype
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors if tensor is not None), dtype)


# the result of `gather_lora` without updates
NO_UPDATES: tuple[Named, tuple[float, ...]] = {}, ()


def gather_lora(
    op: str,
    x: Tensor,
    lora: Mapping,
    weights: Mapping[str, Tensor | None],
    layers: Names = (),
    layer_of: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Named, tuple[float, ...]]:
    """Checks `lora`; returns (tensors by field, (scale, dropout_p) of each of `layers` in one tuple, empty without
    updates). weights: by their names in `lora`, None where the layer is missing. layers: names and order of the layers,
    if other than those of weights; layer_of: the layer of a name, if it differs."""
    if not isinstance(lora, Mapping):
        raise TypeError(f"{op}: lora must be a dict of ckptkern.LoRA by layer, not {type(lora).__name__}")
    tensors, numbers = {}, dict.fromkeys(layers or weights, (0.0, 0.0))
    for name, update in lora.items():
        if weights.get(name) is None:
            known = ", ".join(repr(layer) for layer, weight in weights.items() if weight is not None)
            raise ValueError(f"{op}: lora has {name!r}, but the layers are {known}")
        layer = layer_of.get(name, name)
        a, b, *numbers[layer] = check_update(op, f"lora[{name!r}]", update, weights[name], x)
        tensors |= zip(names_of(layer), (a, b), strict=True)
    return tensors, tuple(itertools.chain(*numbers.values())) if lora else ()


def check_update(op: str, name: str, update, weight: Tensor, x: Tensor) -> LoRA:
    update = update[:-1] if isinstance(update, ReplayedLoRA) else update
    if not isinstance(update, (tuple, list)) or not 2 <= len(update) <= 4:
        raise TypeError(f"{op}: {name} must be ckptkern.LoRA(a, b, scale, dropout_p), not {type(update).__name__}")
    a, b, scale, p = LoRA(*update)
    check_number(op, f"the scale of {name}", scale)
    check_probability(op, p)
    for which, tensor in (("a", a), ("b", b)):
        check_tensor(op, f"{which} of {name}", tensor, x)
    *experts, n, d = weight.shape
    r = a.shape[-2] if a.dim() > 1 else 0
    if a.shape != (*experts, r, d) or b.shape != (*experts, n, r):
        wanted = (f"[{', '.join(map(str, (*experts, *dims)))}]" for dims in (("r", d), (n, "r")))
        raise ShapeError(
            f"{op}: a and b of {name} must be {' and '.join(wanted)}, but have shapes {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if experts and p:
        raise ValueError(f"{op}: {name} updates experts, which have no dropout: dropout_p must be 0, not {p}")
    return LoRA(a, b, float(scale), float(p))
