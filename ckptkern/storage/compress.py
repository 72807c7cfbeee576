"""Compresses saved tensors to a byte per element with a scale per block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .store import MIN_BYTES, Chained, Store

CHUNK = 1 << 20  # elements that are compressed at a time, so that the scratch memory is bounded
_TINY = torch.finfo(torch.float32).tiny  # a smaller scale would be subnormal


class _Code(NamedTuple):
    """Codes of a block. top: the code of its largest element; infinity: of infinity; smallest: the least that is not 0. NaN
    is fp8's own, and -128 in int8."""

    dtype: torch.dtype
    top: float
    infinity: float
    smallest: float


_CODES = {
    "fp8": _Code(torch.float8_e4m3fn, 416.0, 448.0, 2.0**-9),  # e4m3 with three bits of mantissa
    "int8": _Code(torch.int8, 125.0, 126.0, 1.0),
}


class _Packed(NamedTuple):
    """A run of n elements: what the next store returned for the codes [ceil(n / block), block] and for one float32 scale per
    block."""

    codes: object
    scales: object
    n: int
    dtype: torch.dtype


class compress(Chained):
    """Stores saved float32, bfloat16 and float16 tensors in 1.03 bytes per element, *lossily*.

    method:

    - ``"fp8"``: e4m3 with a float32 scale per `block` neighbouring elements. Relative error at most 1/16 for elements within
      2^-14 of the block's largest.
    - ``"int8"``: absolute error at most 1/250 of the block's largest element, 1/125 for elements below that. -0 becomes 0.

    Both preserve NaN, infinities and signs; no nonzero element becomes zero. Around checkpointed regions with ReLU, int8's
    gradient error grows from 0.01 to 0.08. ``select=lambda t: t.dtype == torch.bfloat16`` leaves out float32 statistics of a
    bfloat16 model.

    block: elements per scale. then: a store of the codes. min_bytes, exclude, select: as in ``Store``.

    Raises ValueError for an unknown method or a block below 1, TypeError if `then` is not a store.
    """

    def __init__(
        self,
        method: str,
        *,
        block: int = 128,
        then: Store | None = None,
        min_bytes: int = MIN_BYTES,
        exclude: Iterable[Tensor] = (),
        select: Callable[[Tensor], bool] | None = None,
    ):
        super().__init__(then, min_bytes, exclude, select)
        if method not in _CODES:
            raise ValueError(f"compress: method must be one of 'fp8', 'int8', not {method!r}")
        if not isinstance(block, int) or block < 1:
            raise ValueError(f"compress: block must be an int of at least 1, not {block!r}")
        self._code, self._block, self._rows = _CODES[method], block, max(CHUNK // block, 1)  # rows at a time

    def accepts(self, tensor: Tensor) -> bool:
        return tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and super().accepts(tensor)

    def put(self, flat: Tensor) -> _Packed:
        code, block, step = self._code, self._block, self._rows
        rows = -(-flat.numel() // block)
        codes = torch.empty(rows, block, dtype=code.dtype, device=flat.device)
        scales = torch.empty(rows, 1, dtype=torch.float32, device=flat.device)
        for row in range(0, rows, step):
            piece = flat[row * block : (row + step) * block].float()
            x = torch.nn.functional.pad(piece, (0, -piece.numel() % block)).view(-1, block)
            largest = torch.where(x.isfinite(), x.abs(), 0).amax(1, keepdim=True)
            scale = torch.div(largest, code.top, out=scales[row : row + step]).clamp_(min=_TINY)
            scaled = (x / scale).clamp_(-code.infinity, code.infinity)
            rounded = (
                scaled.round().nan_to_num_(nan=-128.0) if code.dtype == torch.int8 else scaled.to(code.dtype).float()
            )
            # No other element may become 0, because ReLU's backward reads the sign of its result: with round-to-nearest
            # int8 the gradient's error was 0.11 in the example of docs/how-to/storage.md
            codes[row : row + step] = torch.where(rounded == 0, x.sign() * code.smallest, rounded)
        return _Packed(self._then.put(codes.view(-1)), self._then.put(scales.view(-1)), flat.numel(), flat.dtype)

    def get(self, packed: _Packed) -> Tensor:
        block, step, infinity = self._block, self._rows, self._code.infinity
        codes, scales = self._then.get(packed.codes).view(-1, block), self._then.get(packed.scales).view(-1, 1)
        flat = torch.empty(packed.n, dtype=packed.dtype, device=codes.device)
        for row in range(0, len(codes), step):
            code = codes[row : row + step].float()
            x = torch.where(code.abs() == infinity, code * torch.inf, code * scales[row : row + step])
            if codes.dtype == torch.int8:
                x.masked_fill_(code == -128, torch.nan)
            target = flat[row * block : (row + step) * block]
            target.copy_(x.view(-1)[: target.numel()])
        return flat

    def resident(self, packed: _Packed) -> Iterator[Tensor]:
        yield from self._then.resident(packed.codes)
        yield from self._then.resident(packed.scales)
