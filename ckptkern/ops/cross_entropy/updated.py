"""The low-rank update of an LM head: logits of x W^T + u B^T are those of [x | u] and [W | B].

u = scale dropout(x) A^T [M, r]. Rows of x and of W stand beside theirs in chunks, so that one matmul forms the logits of both,
by the launchers that form them without an update. u and dropout(x) are recomputed in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import eager
from ..dispatch.choices import primitives
from ..registration.gradients import WeightGrad
from ..registration.op import needed, token_chunks
from ..sublayer.lora import LowRank, low_rank

LAYER = "head"


class UpdateTensors(NamedTuple):
    """The last of the op's tensors; None without an update, lora_rng without dropout."""

    head_lora_a: Tensor | None
    head_lora_b: Tensor | None
    lora_rng: Tensor | None


def update_of(tensors: Sequence[Tensor | None], o: Any) -> LowRank | None:
    """tensors: the op's. o: its options."""
    return low_rank(UpdateTensors(*tensors[-3:]), o, (LAYER,), LAYER, 0)


class UpdatedHead:
    """rows [M, d], and w [V, d] in the compute dtype; needs: of the op's gradients. `finish` forms da and db."""

    def __init__(self, rows: Tensor, w: Tensor, tensors: Sequence[Tensor | None], o: Any, needs: int = 0):
        self.rows, self.w, self.o, self.p = rows, w, o, primitives(o.backend)
        self.update, self.given = update_of(tensors, o), UpdateTensors(*tensors[-3:])
        self.b = self.update.b.to(rows.dtype)
        place = len(tensors) - len(self.given)
        self.needs_x, self.needs_a, needs_b = needed(needs, 0), needed(needs, place), needed(needs, place + 1)
        self.du: Tensor | None = None
        self.da: Tensor | None = None
        self.db = torch.empty_like(self.given.head_lora_b) if needs_b else None

    @property
    def bytes_beside(self) -> int:
        """Returns the bytes of a row of [x | u], or of [W | B]."""
        return (self.w.shape[1] + self.b.shape[1]) * self.w.dtype.itemsize

    @property
    def bytes_of_token(self) -> int:
        """Returns the bytes of [x | u] and what makes it: x in the update's dtype, dropped, and steps between."""
        return self.bytes_beside + 3 * self.w.shape[1] * self.update.a.dtype.itemsize

    def chunks(self) -> list[tuple[int, int]]:
        """[start, stop) of the tokens that backward takes at once: they have a quarter of the workspace."""
        least = None if self.o.workspace is None else self.o.workspace // 4
        return token_chunks(self.rows.shape[0], self.bytes_of_token, least)

    def inner(self, start: int, stop: int) -> Tensor:
        """u in the compute dtype."""
        x = self.update.input(self.p, self.rows[start:stop].to(self.update.a.dtype), start)
        return self.update.inner(x).to(self.rows.dtype)

    def inputs(self, start: int, stop: int) -> Tensor:
        """[x | u]."""
        return torch.cat((self.rows[start:stop], self.inner(start, stop)), 1)

    def weights(self, start: int, stop: int) -> Tensor:
        """[W | B]."""
        return torch.cat((self.w[start:stop], self.b[start:stop]), 1)

    @functools.cached_property
    def u(self) -> Tensor:
        """Returns u of all tokens."""
        return torch.cat([self.inner(*chunk) for chunk in self.chunks()])

    def write_gradient(
        self, part: slice, bias: Tensor | None, given: Sequence[Any], head: eager.Head, dz: Tensor, db: bool
    ):
        """`cross_entropy_bwd` of some rows of w, in chunks of tokens; given: target, class weights, lse and gradients."""
        target, class_weight, lse, gradients = given
        weights, total = self.weights(part.start, part.stop), None
        for start, stop in self.chunks():
            here = slice(start, stop)
            of_tokens = type(gradients)(*(None if one is None else one[here] for one in gradients))
            sums = self.p.cross_entropy_bwd(
                self.inputs(start, stop),
                weights,
                bias,
                target[here],
                class_weight,
                lse[here],
                of_tokens,
                head,
                dz[here],
                db=db,
            )
            total = sums if total is None or sums is None else total.add_(sums)
        return total

    def add(self, dz: Tensor, start: int, stop: int) -> None:
        """Takes the gradient of some rows' logits."""
        if self.db is not None:
            eager.upcast_matmul(dz.t(), self.u, out=self.db[start:stop])
        if self.needs_x or self.needs_a:
            add = self.du is not None
            self.du = self.du if add else dz.new_empty(self.u.shape, dtype=eager.wide_of(dz.dtype))
            eager.upcast_matmul(dz, self.b[start:stop], out=self.du, add=add)

    def finish(self, dx: Tensor | None) -> None:
        """Forms what all rows' logits gave: the gradient of A, and what is added to x's."""
        if self.du is None:
            return
        chunks = self.chunks()
        da = WeightGrad(self.given.head_lora_a, len(chunks)) if self.needs_a else None
        for start, stop in chunks:
            du = self.du[start:stop].mul_(self.update.scale).to(self.update.a.dtype)
            if dx is not None:
                self.update.add_input_gradient(self.p, du, dx[start:stop], start)
            if da is not None:
                da.add(du, self.update.input(self.p, self.rows[start:stop].to(du.dtype), start))
        self.da = None if da is None else da.result()
