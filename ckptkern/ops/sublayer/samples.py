"""Applies vectors of samples, such as scale, shift and gate of an adaptive norm (adaLN: DiT, arXiv 2212.09748), to the rows
of a sublayer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import ShapeError
from ..dispatch.choices import check_tensor
from ..registration.op import cast_parameter


def sample_shape(lead: Sequence[int]) -> tuple[int, ...]:
    """Returns [B, 1, ...], one value for each sample of x [*lead, d], lead [B, ...]. Without a batch dimension x is one
    sample."""
    return (lead[0] if len(lead) > 1 else 1, *(1,) * len(lead))


def check_vectors(op: str, x: Tensor, name: str, vectors: Tensor, features: int, also: str = "") -> Tensor:
    """Returns vectors [B, features] or [B, 1, ..., features] as [B, features]. also: alternatives that the message names."""
    check_tensor(op, name, vectors, x)
    shape, B = vectors.shape, sample_shape(x.shape[:-1])[0]
    if len(shape) < 2 or shape[0] != B or shape[-1] != features or any(size != 1 for size in shape[1:-1]):
        raise ShapeError(
            f"{op}: {name} must {also}have shape ({B}, {features}) or ({B}, 1, {features}), one vector for each sample of "
            f"the input {tuple(x.shape)}, but has {tuple(shape)}"
        )
    return vectors if len(shape) == 2 else vectors.reshape(B, features)


class Samples(NamedTuple):
    """Maps rows of x [*lead, d], from first_row on, to samples; all rows unless is_part."""

    lead: tuple[int, ...]
    first_row: int = 0
    is_part: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """Returns (number of samples, rows of each)."""
        return (self.lead[0], math.prod(self.lead[1:])) if len(self.lead) > 1 else (1, math.prod(self.lead))

    def parts(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields (slice of samples, their rows [samples, n, e]): all samples, or of a part the end of a sample, whole
        samples, and the beginning of a sample."""
        (B, n), done = self.size, 0
        if not self.is_part:  # its sizes may be symbols
            yield slice(0, B), rows.reshape(B, n, rows.shape[1])
            return
        while done < rows.shape[0]:
            sample, before = divmod(self.first_row + done, n)
            whole = 0 if before else (rows.shape[0] - done) // n
            stop = done + whole * n if whole else min(rows.shape[0], done + n - before)
            part = rows[done:stop]
            yield slice(sample, sample + max(whole, 1)), part.reshape(max(whole, 1), -1, rows.shape[1])
            done = stop

    def multiplied(self, rows: Tensor, vectors: Tensor) -> Tensor:
        """Returns rows * vectors [B, e], in the dtype of the rows."""
        vectors = cast_parameter(vectors, rows.dtype)
        parts = [(part * vectors[of, None]).flatten(0, 1) for of, part in self.parts(rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def sums(self, rows: Tensor) -> Tensor:
        """Returns [B, e], each sample's sum of float32 or float64 rows; zeros for samples outside of a part."""
        if not self.is_part:
            return next(self.parts(rows))[1].sum(1)
        total = rows.new_zeros(self.size[0], rows.shape[1])
        for of, part in self.parts(rows):
            total[of] += part.sum(1)
        return total
