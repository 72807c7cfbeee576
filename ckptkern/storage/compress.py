"""Compresses saved tensors: a byte per element with a scale per block, or the non-zeros and a bit per element."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ..bits import pack_bits, unpack_bits
from .offload import Flight
from .store import CHUNK, MIN_BYTES, Stays, Store, next_store

_TINY = torch.finfo(torch.float32).tiny  # a smaller scale would be subnormal
_WORD = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _FP8:
    """e4m3 with three bits of mantissa: the largest of a block becomes 416, 448 stands for infinity, NaN for NaN."""

    dtype, top, infinity, smallest = torch.float8_e4m3fn, 416.0, 448.0, 2.0**-9

    @staticmethod
    def round(scaled: Tensor) -> Tensor:
        return scaled.to(torch.float8_e4m3fn).float()


class _Int8:
    """The largest of a block becomes 125, 126 stands for infinity, -128 for NaN."""

    dtype, top, infinity, smallest = torch.int8, 125.0, 126.0, 1.0

    @staticmethod
    def round(scaled: Tensor) -> Tensor:
        return scaled.round().nan_to_num_(nan=-128.0)


class _Blocks:
    """codes [ceil(n / block), block] and one float32 scale per block: x = code * scale."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self, code: type[_FP8] | type[_Int8], block: int):
        self.code, self.block = code, block

    def encode(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        rows = -(-flat.numel() // self.block)
        codes = torch.empty(rows, self.block, dtype=self.code.dtype, device=flat.device)
        scales = torch.empty(rows, 1, dtype=torch.float32, device=flat.device)
        step = max(CHUNK // self.block, 1)
        for row in range(0, rows, step):
            piece = flat[row * self.block : (row + step) * self.block].float()
            x = torch.nn.functional.pad(piece, (0, -piece.numel() % self.block)).view(-1, self.block)
            largest = torch.where(x.isfinite(), x.abs(), 0).amax(1, keepdim=True)
            scale = torch.div(largest, self.code.top, out=scales[row : row + step]).clamp_(min=_TINY)
            code = self.code.round((x / scale).clamp_(-self.code.infinity, self.code.infinity))
            # No other element may become 0, because ReLU's backward reads the sign of its result: with round-to-nearest
            # int8 the gradient's error was 0.11 in the example of docs/concepts/storage.md
            codes[row : row + step] = torch.where(code == 0, x.sign() * self.code.smallest, code)
        return codes.view(-1), scales.view(-1)

    def decode(self, parts: tuple[Tensor, Tensor], n: int, dtype: torch.dtype) -> Tensor:
        codes, scales = parts[0].view(-1, self.block), parts[1].view(-1, 1)
        flat = torch.empty(n, dtype=dtype, device=codes.device)
        step = max(CHUNK // self.block, 1)
        for row in range(0, len(codes), step):
            code = codes[row : row + step].float()
            x = torch.where(code.abs() == self.code.infinity, code * torch.inf, code * scales[row : row + step])
            if self.code is _Int8:
                x.masked_fill_(code == -128, torch.nan)
            target = flat[row * self.block : (row + step) * self.block]
            target.copy_(x.view(-1)[: target.numel()])
        return flat


class _Zeros:
    """One bit per element, one element per bit that is set, at most `capacity * n` of them, and their number.

    Zero is the bit pattern of +0: -0, NaN and subnormals are elements like any other.
    """

    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def __init__(self, capacity: float):
        self.capacity = capacity

    def room(self, n: int) -> int:
        return math.ceil(self.capacity * n)

    def encode(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, room = flat.view(_WORD[flat.element_size()]), self.room(flat.numel())
        mask = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8, device=flat.device)
        values = x.new_empty(room + 1)  # the last one takes the zeros and what does not fit
        count = torch.zeros((), dtype=torch.int64, device=flat.device)
        for start in range(0, flat.numel(), CHUNK):
            piece = x[start : start + CHUNK]
            is_set = piece != 0
            mask[start // 8 : (start + CHUNK) // 8] = pack_bits(is_set[None])[0]
            place = is_set.cumsum(0).add_(count - 1)
            count = place[-1] + 1
            values.scatter_(0, place.masked_fill_(~is_set, room).clamp_(max=room), piece)
        return mask, values, count

    def decode(self, parts: tuple[Tensor, Tensor], n: int, dtype: torch.dtype) -> Tensor:
        mask, values = parts
        flat = torch.empty(n, dtype=dtype, device=mask.device)
        x, room = flat.view(values.dtype), values.numel() - 1
        count = torch.zeros((), dtype=torch.int64, device=mask.device)
        for start in range(0, n, CHUNK):
            target = x[start : start + CHUNK]
            is_set = unpack_bits(mask[None, start // 8 : (start + CHUNK) // 8], target.numel())[0]
            place = is_set.cumsum(0).add_(count - 1)
            count = place[-1] + 1
            target.copy_(values[place.clamp_(0, room)]).masked_fill_(~is_set, 0)
        return flat


class _Packed:
    """A run as the next store keeps it: encoded, as `parts`, or whole, as `dense`, if its non-zeros do not fit the parts.

    Until that is known both are there, and dense is a Stays.
    """

    __slots__ = ("__weakref__", "dense", "dtype", "n", "parts")


class compress(Store):
    """Stores saved floating-point tensors in fewer bits. Other tensors and parameters do not change.

    method:

    - ``"fp8"``, *lossy*: e4m3 with a float32 scale per `block` elements that are neighbours in memory. Relative error at
      most 1/16 for elements within 2^-14 of the largest of their block. 1.03 bytes per element.
    - ``"int8"``, *lossy*: absolute error at most 1/250 of the largest of the block, 1/125 for elements below that. -0
      comes back as 0. 1.03 bytes per element.
    - ``"relu"``, exact: one bit per element, and the non-zeros in a buffer for `capacity` of the elements. A tensor with
      more non-zeros is saved as it is.

    All three preserve NaN, infinities and the sign of every element, so no non-zero becomes zero. The lossy methods
    take float32, bfloat16 and float16; docs/concepts/storage.md measures the error of gradients. Around checkpointed
    regions with ReLU inside, int8's error grows from 0.01 to 0.08, because masks recomputed from a compressed input
    differ from forward's. The lossy methods also compress sensitive tensors, such as the logsumexp that attention saves
    in float32: in a model that computes in bfloat16, ``select=lambda t: t.dtype == torch.bfloat16`` leaves it out.

    Only the device knows the number of non-zeros of a tensor. The store holds the dense tensor until this number has
    been copied to the host, which does not wait; if more than `in_flight` numbers are pending, the host waits for the
    oldest.

    then: the store for the compressed tensor, such as ``offload()``; None leaves it on the device. block: elements per
    scale, at least 1. capacity: between 0 and 1. min_bytes, exclude, select: as in ``Store``.

    Raises ValueError for an unknown method and a block or capacity out of range, TypeError for a `then` that is not a store.
    """

    def __init__(
        self,
        method: str,
        *,
        block: int = 128,
        capacity: float = 0.5,
        then: Store | None = None,
        in_flight: int = 4,
        min_bytes: int = MIN_BYTES,
        exclude: Iterable[Tensor] = (),
        select: Callable[[Tensor], bool] | None = None,
    ):
        super().__init__(min_bytes, exclude, select)
        if method not in ("fp8", "int8", "relu"):
            raise ValueError(f"compress: method must be one of 'fp8', 'int8', 'relu', not {method!r}")
        if not isinstance(block, int) or block < 1:
            raise ValueError(f"compress: block must be an int of at least 1, not {block!r}")
        if not isinstance(capacity, int | float) or not 0 <= capacity <= 1:
            raise ValueError(f"compress: capacity must be a number between 0 and 1, not {capacity!r}")
        if not isinstance(in_flight, int) or in_flight < 0:
            raise ValueError(f"compress: in_flight must be an int of at least 0, not {in_flight!r}")
        self._codec = _Zeros(capacity) if method == "relu" else _Blocks(_FP8 if method == "fp8" else _Int8, block)
        self._then = next_store("compress", then)
        self._in_flight = in_flight
        self._pending: deque[tuple[Flight, weakref.ref[_Packed]]] = deque()  # numbers on their way to the host
        self._lock = threading.RLock()

    def accepts(self, tensor: Tensor) -> bool:
        return tensor.dtype in self._codec.dtypes and self._then.accepts(tensor)

    def put(self, flat: Tensor) -> _Packed:
        packed = _Packed()
        packed.n, packed.dtype, packed.dense = flat.numel(), flat.dtype, None
        parts = self._codec.encode(flat)
        packed.parts = [self._then.put(part) for part in parts[:2]]
        if isinstance(self._codec, _Zeros):
            packed.dense = Stays(flat)
            self._pending.append((self._to_host(parts[2]), weakref.ref(packed)))
            self._settle()
        return packed

    def get(self, packed: _Packed) -> Tensor:
        self._settle()
        if isinstance(packed.dense, Stays):
            return packed.dense.unpack()
        if packed.dense is not None:
            return self._then.get(packed.dense)
        return self._codec.decode([self._then.get(part) for part in packed.parts], packed.n, packed.dtype)

    def resident(self, packed: _Packed) -> Iterator[Tensor]:
        if isinstance(packed.dense, Stays):
            yield packed.dense.tensor
        else:
            for saved in packed.parts if packed.dense is None else (packed.dense,):
                yield from self._then.resident(saved)

    @staticmethod
    def _to_host(count: Tensor) -> Flight:
        if not count.is_cuda:
            return Flight(count)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "compress: method 'relu' synchronises with the host, which CUDA graph capture does not allow"
            )
        stream = torch.cuda.current_stream(count.device)
        host = torch.empty((), dtype=count.dtype, device="cpu", pin_memory=True)
        flight = Flight(host.copy_(count, non_blocking=True), stream)
        flight.event = stream.record_event()
        return flight

    def _settle(self) -> None:
        """Drops every dense tensor whose non-zeros are known to fit, and the parts of every one whose non-zeros do not."""
        with self._lock:
            while self._pending:
                flight, weak = self._pending[0]
                if not flight.landed():
                    if len(self._pending) <= self._in_flight:
                        return
                    flight.event.synchronize()
                self._pending.popleft()
                packed = weak()
                if packed is None:
                    continue
                if int(flight.resident) <= self._codec.room(packed.n):
                    packed.dense = None
                    continue
                packed.parts = None
                if not packed.dense.changed():  # else `get` raises
                    with torch.cuda.stream(flight.home):  # where dense was made; None, for a CPU, changes nothing
                        packed.dense = self._then.put(packed.dense.tensor)
