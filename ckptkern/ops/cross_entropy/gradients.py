"""The gradients of a head's input, weight and bias, from the gradients of its logits for a part of the vocabulary at a time."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ... import eager
from ..registration.gradients import main_grad_of
from ..registration.op import cast_parameter, flags, unflattened

COLUMNS = 256  # where chunks of the vocabulary start: multiples of every tile's BLOCK_N


def vocabulary_chunks(entries: int, bytes_per_entry: int, workspace: int | None) -> list[tuple[int, int]]:
    """[start, stop) ranges of the vocabulary whose transient tensors fit `workspace`: at least COLUMNS each, and as equal as
    multiples of COLUMNS can be. Without a workspace, one range."""
    units = -(-entries // COLUMNS)
    count = min(units, 1) if workspace is None else -(-units // max(workspace // max(bytes_per_entry, 1) // COLUMNS, 1))
    bounds = [i * units // count * COLUMNS for i in range(count)]
    return list(itertools.pairwise([*bounds, entries]))


class HeadGradients:
    """Of x, w and b, as `needs` asks, of logits x w^T + b, by ranges of the vocabulary.

    rows: x [M, d], None if no gradient reads it; parameter: w itself, and w: in x's dtype; lse: [M], of the device and the wide
    type; dtype: of x. A range's rows of dw and db are final, rounded once. dx is a sum over ranges in the wide type.
    """

    def __init__(
        self,
        rows: Tensor | None,
        parameter: Tensor,
        w: Tensor,
        b: Tensor | None,
        lse: Tensor,
        dtype: torch.dtype,
        needs: int,
        chunks: list[tuple[int, int]],
        group: str = "",
    ):
        (M,), d = lse.shape, w.shape[1]
        need_dx, need_dw, self.needs_bias = flags(needs, 3)
        self.rows, self.parameter, self.w, self.chunks, self.group = rows, parameter, w, chunks, group
        widest = max((stop - start for start, stop in chunks), default=0)
        self.workspace_rows = lse.new_empty((M, -(-widest // COLUMNS) * COLUMNS), dtype=dtype)
        summed = len(chunks) != 1 or bool(group)  # then dx is a sum of several matmuls, in the wide type
        self.dx = lse.new_empty((M, d), dtype=lse.dtype if summed else dtype) if need_dx else None
        self.main = main_grad_of(parameter) if need_dw else None
        self.dw = self.main if self.main is not None else torch.empty_like(parameter) if need_dw else None
        self.db = torch.empty_like(b) if self.needs_bias else None

    def dz(self, start: int, stop: int) -> Tensor:
        """Returns where the gradients of these logits are to be written: [M, stop - start] in x's dtype."""
        return self.workspace_rows[:, : stop - start]

    def add(self, start: int, stop: int, total: Tensor | None) -> None:
        """What follows from `dz(start, stop)`, whose rows have the sum `total`."""
        dz = self.dz(start, stop)
        if self.db is not None:
            self.db[start:stop] = total
        if self.dw is not None:
            eager.upcast_matmul(dz.t(), self.rows, out=self.dw[start:stop], add=self.main is not None)
        if self.dx is not None:
            eager.upcast_matmul(dz, self.w[start:stop], out=self.dx, add=start > 0)

    def results(self, like: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dx [..., d], dw, db); like: a tensor [..., anything]. dw is None if it was added to a main_grad."""
        dx = self.dx
        if dx is not None:
            dx = dx if self.chunks else dx.zero_()
            if self.group:
                dx = torch.ops._c10d_functional.all_reduce(dx, "sum", self.group)
                dx = torch.ops._c10d_functional.wait_tensor(dx)
            dx = unflattened(cast_parameter(dx, self.workspace_rows.dtype), like)
        if self.main is not None:
            self.parameter.grad_added_to_main_grad = True
        return dx, self.dw if self.main is None else None, self.db
