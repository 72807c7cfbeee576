"""What is kept from forward to backward, and where: on the host, compressed, or spread over ranks.

::

    keep = ckptkern.storage.offload()        # made once: its buffers are reused in every step
    for x, target in data:
        with keep:
            loss = criterion(model(x), target)
        loss.backward()

Every context here is a ``Store``: saved-tensor hooks that flatten what autograd saves to one run of elements, hand it to
``put`` in forward and ask ``get`` for it in backward. They work on whatever autograd saves, so on plain modules, on
ckptkern's fused segments and on the inputs of checkpointed segments alike, and they chain:
``compress("int8", then=offload())`` keeps the codes on the host. Of two nested contexts the inner one counts, as with
torch's own hooks.

What holds for all of them:

- Parameters and views of them stay where they are, and so do tensors below ``min_bytes``, tensors on other devices, and
  what is not plain strided memory (sparse, quantized, conjugated). What stays is checked for in-place changes in
  backward, with torch's RuntimeError. Of a DTensor and other wrappers, the parts are kept.
- Size, strides, dtype and ``requires_grad`` come back as they were; the values too, bit for bit, but for ``"fp8"`` and
  ``"int8"``. A tensor saved twice inside one ``with``, also as another view of the same elements, is kept once.
- ``retain_graph``, second-order gradients and unpacking twice work. A graph that is dropped frees what was kept for it.
- A model compiled by torch.compile keeps what its compiled graph saves. Entering a context *inside* a compiled function
  breaks the graph, which ``fullgraph=True`` reports as an error; ``torch.func`` transforms refuse saved-tensor hooks.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .memory import dense_parts

__all__ = ["Store", "compress", "offload", "partition"]

MIN_BYTES = 1 << 20
_CHUNK = 1 << 20  # elements that compress works on at a time, so that its scratch memory is bounded


# -- what autograd holds in place of a tensor -----------------------------------------------------------------------


def _changed(tensor: Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead."
    )


class _Stays:
    """A tensor that is kept as it is. Hooks switch off autograd's check for in-place changes; it is done here."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor):
        # the tensor itself would tie a saved output to its own grad_fn: a cycle that frees nothing
        self.tensor, self.version = tensor.detach(), tensor._version

    def changed(self) -> bool:
        return self.tensor._version != self.version

    def unpack(self) -> Tensor:
        if self.changed():
            raise _changed(self.tensor, self.version)
        return self.tensor


class _Parts:
    """A wrapper subclass by the tensors it is made of."""

    __slots__ = ("context", "kind", "parts", "size", "stride")

    def __init__(self, tensor: Tensor, pack: Callable):
        names, self.context = tensor.__tensor_flatten__()
        self.kind, self.size, self.stride = type(tensor), tensor.size(), tensor.stride()
        parts = {name: getattr(tensor, name) for name in names}
        # a DTensor names its mesh among them
        self.parts = {name: pack(part) if isinstance(part, Tensor) else part for name, part in parts.items()}

    def unpack(self) -> Tensor:
        saved = (_Stays, _Parts, _View)
        parts = {name: part.unpack() if isinstance(part, saved) else part for name, part in self.parts.items()}
        return self.kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)


class _Run:
    """Elements that a store keeps, for every view of them that was saved.

    Fetched for the first of its views that backward asks for and held until the last has asked: two nodes that saved
    one tensor are neighbours in the graph.
    """

    __slots__ = ("__weakref__", "flat", "kept", "left", "store", "views")

    def __init__(self, store: Store, flat: Tensor):
        self.store, self.kept = store, store.put(flat)
        self.flat: Tensor | None = None
        self.views = self.left = 0

    def fetch(self) -> Tensor:
        flat = self.store.get(self.kept) if self.flat is None else self.flat
        self.left -= 1
        self.hold(flat)
        return flat

    def hold(self, flat: Tensor | None) -> None:
        self.flat = flat if self.left > 0 else None
        if self.left <= 0:
            self.left = self.views


class _View:
    """A tensor as a view of a run."""

    __slots__ = ("geometry", "run", "size", "stride")

    def __init__(self, tensor: Tensor, geometry: _Geometry, run: _Run):
        self.size, self.stride, self.geometry, self.run = tensor.size(), tensor.stride(), geometry, run
        run.views += 1
        run.left += 1

    def __del__(self):
        run = self.run
        run.views -= 1
        run.left = min(run.left, run.views)
        run.hold(run.flat)

    def unpack(self) -> Tensor:
        return self.geometry.restore(self.run.fetch(), self.size, self.stride)


class _Geometry:
    """Where the elements of a strided tensor lie: a dense run of memory, or `size` and `stride` with gaps between."""

    __slots__ = ("size", "stride")

    def __init__(self, tensor: Tensor):
        axes = [
            (stride, size) for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if stride and size > 1
        ]
        axes.sort(reverse=True)
        size, stride = tuple(n for _, n in axes), tuple(s for s, _ in axes)
        span = 1 + sum((n - 1) * s for s, n in axes)
        dense = span <= math.prod(size)  # less: the rows overlap
        self.size, self.stride = ((span,), (1,)) if dense else (size, stride)

    def flatten(self, tensor: Tensor) -> Tensor:
        """The elements in the order of their addresses, contiguous [n]: a view of the memory where it is dense."""
        return tensor.detach().as_strided(self.size, self.stride).reshape(-1)

    def restore(self, flat: Tensor, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
        if self.stride == (1,):
            return flat.as_strided(size, stride)
        tensor = torch.empty_strided(size, stride, dtype=flat.dtype, device=flat.device)
        tensor.as_strided(self.size, self.stride).copy_(flat.view(self.size))
        return tensor


# -- stores ---------------------------------------------------------------------------------------------------------


class Store:
    """A place for saved tensors, and the context that sends them there. Subclasses define `put` and `get`.

    One store serves any number of steps, graphs and threads, and may be entered again while it is entered.

    min_bytes: smaller tensors stay. exclude: tensors whose storages, and so all views of them, stay; parameters are
    found without it, except through ``parameter.detach()`` and ``.data``. select: called with each tensor that would
    go, on which only metadata may be read; False lets it stay.
    """

    def __init__(
        self,
        min_bytes: int = MIN_BYTES,
        exclude: Iterable[Tensor] = (),
        select: Callable[[Tensor], bool] | None = None,
    ):
        name = type(self).__name__
        if not isinstance(min_bytes, int) or min_bytes < 0:
            raise ValueError(f"{name}: min_bytes must be an int of at least 0, not {min_bytes!r}")
        if select is not None and not callable(select):
            raise TypeError(f"{name}: select must be a function of a tensor, not {type(select).__name__}")
        self._min_bytes, self._select = min_bytes, select
        self._excluded: set[StorageWeakRef] = set()
        for tensor in exclude:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: exclude must hold tensors, not {type(tensor).__name__}")
            self._excluded.update(StorageWeakRef(part.untyped_storage()) for part in dense_parts(tensor))
        self._entered = threading.local()

    def put(self, flat: Tensor) -> object:
        """Keep flat [n], contiguous; the result is what `get` takes, and what keeps it: dropped, it is forgotten."""
        raise NotImplementedError

    def get(self, kept: object) -> Tensor:
        """[n] on the device and of the dtype it was put with. Any number of times."""
        raise NotImplementedError

    def accepts(self, tensor: Tensor) -> bool:
        """Can `put` take such a tensor? Decided from device and dtype."""
        return True

    def __enter__(self) -> Store:
        runs = weakref.WeakValueDictionary()  # of this block: in another one, an equal version may mean other values
        pack, unpack = functools.partial(self._pack, runs), _unpack
        if "torch._dynamo" in sys.modules:  # where it has broken a graph here, it would compile the hooks
            pack, unpack = torch.compiler.disable(pack), torch.compiler.disable(unpack)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        hooks.__enter__()
        self._entered.__dict__.setdefault("hooks", []).append(hooks)
        return self

    def __exit__(self, *exception) -> None:
        self._entered.hooks.pop().__exit__(*exception)

    def _stays(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is not Tensor
            or tensor.layout != torch.strided
            or tensor.numel() == 0
            or tensor.nbytes < self._min_bytes
            or tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor._is_zerotensor()
            or StorageWeakRef(tensor.untyped_storage()) in self._excluded
            or not self.accepts(tensor)
            or (self._select is not None and not self._select(tensor))
        )

    def _pack(self, runs: weakref.WeakValueDictionary, tensor: Tensor):
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return _Stays(tensor)
        if is_traceable_wrapper_subclass(tensor):
            return _Parts(tensor, functools.partial(self._pack, runs))
        if self._stays(tensor):
            return _Stays(tensor)
        geometry = _Geometry(tensor)
        place = tensor.storage_offset(), geometry.size, geometry.stride, tensor.dtype
        key = StorageWeakRef(tensor.untyped_storage()), tensor._version, *place
        run = runs.get(key)
        if run is None:
            run = runs[key] = _Run(self, geometry.flatten(tensor))
        return _View(tensor, geometry, run)


def _unpack(saved: _Stays | _Parts | _View) -> Tensor:
    return saved.unpack()


class _Here(Store):
    """The end of a chain that goes nowhere: tensors stay on their device."""

    def put(self, flat: Tensor) -> _Stays:
        return _Stays(flat)

    def get(self, kept: _Stays) -> Tensor:
        return kept.unpack()


def _next(name: str, then: Store | None) -> Store:
    if then is not None and not isinstance(then, Store):
        raise TypeError(f"{name}: then must be a store such as offload(), not {type(then).__name__}")
    return _Here() if then is None else then


# -- on the host ----------------------------------------------------------------------------------------------------


class _Flight:
    """A copy that was started. `resident`, its end on the device, lives on stream `home`, which waits when it is dropped."""

    __slots__ = ("event", "home", "resident")

    def __init__(self, resident: Tensor, home=None):
        self.resident, self.home, self.event = resident, home, None

    def landed(self) -> bool:
        return self.event is None or self.event.query()

    def join(self, stream) -> None:
        """From here on `stream` may read, overwrite and free resident. The host does not wait."""
        if self.event is not None:
            stream.wait_event(self.event)
            self.resident.record_stream(stream)  # nothing, where resident was allocated on that stream
            self.event = None

    def __del__(self):
        if not self.landed():
            self.join(self.home)


class _Copy:
    """A run in a host buffer. `out` is the flight there until it was seen to land, `back` the one ahead of its use."""

    __slots__ = ("__weakref__", "back", "buffer", "dtype", "error", "lane", "number", "out", "version")

    def __init__(self, lane: _Lane, buffer: Tensor, flat: Tensor, number: int):
        self.lane, self.buffer, self.number = lane, buffer, number
        self.dtype, self.version = flat.dtype, flat._version
        self.out = self.back = self.error = None

    def __del__(self):
        self.lane.give(self.buffer)


class _Lane:
    """Copies between a CPU and a memory-mapped file, in order; `_CudaLane` overrides the four methods that differ."""

    def __init__(self, device: torch.device, directory: str, prefetch: int, in_flight: int):
        self.device, self.directory, self.prefetch, self.in_flight = device, directory, prefetch, in_flight
        self.free: dict[int, list[Tensor]] = {}
        self.bytes = 0
        self.pending: deque[tuple[_Flight, weakref.ref[_Copy]]] = deque()  # flights out whose sources are still held
        self.copies: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()
        self.count = 0
        self.ahead: list[weakref.ref[_Copy]] = []
        self.lock = threading.RLock()  # a graph's destructors may run in the middle of anything

    # -- what a device defines

    def allocate(self, nbytes: int) -> Tensor:
        """A new host buffer, uint8 [nbytes]. Its file has no name by the time this returns: nothing to clean up."""
        try:
            descriptor, path = tempfile.mkstemp(prefix="ckptkern-", dir=self.directory)
            try:
                os.posix_fallocate(descriptor, 0, nbytes)  # a sparse file on a full disk kills the process when written
                return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
            finally:
                os.close(descriptor)
                os.unlink(path)
        except OSError as error:
            raise OSError(
                error.errno, f"offload: no room for {nbytes} bytes: {error.strerror}", self.directory
            ) from error

    def stream(self):
        """The current stream."""

    def send(self, source: Tensor, buffer: Tensor) -> _Flight:
        buffer.copy_(source)
        return _Flight(source)

    def bring(self, buffer: Tensor, home) -> _Flight:
        return _Flight(buffer.clone())

    # -- what all share

    def take(self, nbytes: int) -> Tensor:
        size = 1 << (max(nbytes, 4096) - 1).bit_length()
        try:
            return self.free[size].pop()
        except (KeyError, IndexError):
            buffer = self.allocate(size)
            self.bytes += size
            return buffer

    def give(self, buffer: Tensor) -> None:
        # all copies of a lane run in order, so a copy that is still using the buffer comes before the next one into it
        buffer = buffer._base
        self.free.setdefault(buffer.numel(), []).append(buffer)

    def put(self, flat: Tensor) -> _Copy:
        source = flat.view(torch.uint8)
        with self.lock:
            copy = _Copy(self, self.take(source.numel())[: source.numel()], flat, self.count)
            copy.out = self.send(source, copy.buffer)
            self.copies[copy.number] = copy
            self.count += 1
            self.pending.append((copy.out, weakref.ref(copy)))
            self.settle()
        return copy

    def settle(self) -> None:
        """Let go of the sources whose copies have landed, and of the oldest beyond `in_flight` in any case."""
        while self.pending:
            flight, weak = self.pending[0]
            if not flight.landed() and len(self.pending) <= self.in_flight:
                return
            copy = weak()
            if copy is not None:
                copy.out = None
                if flight.resident._version != copy.version:  # before the copy or after it: the host cannot tell
                    copy.error = _changed(flight.resident, copy.version)
            self.pending.popleft()

    def get(self, copy: _Copy) -> Tensor:
        with self.lock:
            self.settle()
            if copy.error is not None:
                raise copy.error
            if copy.out is not None:  # it never left
                if copy.out.resident._version != copy.version:
                    raise _changed(copy.out.resident, copy.version)
                found = copy.out.resident
            else:
                flight, copy.back = copy.back or self.bring(copy.buffer, self.stream()), None
                flight.join(self.stream())
                found = flight.resident
            self.fetch_ahead(copy.number)
        return found.view(copy.dtype)

    def fetch_ahead(self, number: int) -> None:
        """Start the copies that backward wants next: those put before this one, latest first."""
        window = []
        for before in range(number - 1, max(number - 65, -1), -1):
            if len(window) == self.prefetch:
                break
            copy = self.copies.get(before)
            if copy is not None and copy.out is None:
                window.append(copy)
        for copy in filter(None, (weak() for weak in self.ahead)):
            if copy not in window:  # backward went elsewhere
                copy.back = None
        for copy in window:
            if copy.back is None:
                copy.back = self.bring(copy.buffer, self.stream())
        self.ahead = [weakref.ref(copy) for copy in window]


class _CudaLane(_Lane):
    """Copies between a GPU and pinned memory on one side stream, so in order and beside the computation."""

    def __init__(self, *args):
        super().__init__(*args)
        self.side = torch.cuda.Stream(self.device)

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def stream(self):
        return torch.cuda.current_stream(self.device)

    def send(self, source: Tensor, buffer: Tensor) -> _Flight:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("offload: a forward pass under CUDA graph capture cannot keep its tensors on the host")
        return self._start(buffer, source, _Flight(source, self.stream()))

    def bring(self, buffer: Tensor, home) -> _Flight:
        with torch.cuda.stream(home):  # allocated where it is used: no other stream has to give it back
            resident = torch.empty(buffer.numel(), dtype=torch.uint8, device=self.device)
        return self._start(resident, buffer, _Flight(resident, home))

    def _start(self, target: Tensor, source: Tensor, flight: _Flight) -> _Flight:
        self.side.wait_stream(flight.home)
        with torch.cuda.stream(self.side):
            target.copy_(source, non_blocking=True)
            flight.event = self.side.record_event()
        return flight


class offload(Store):
    """Keeps saved tensors on the host, bit for bit, and brings them back before backward needs them.

    CUDA tensors are copied on a side stream into pinned buffers; memory on the device is given back when the copy has
    landed. CPU tensors take the same way into memory-mapped files without a name. Tensors on other devices stay.

    directory: of those files, by default ``tempfile.gettempdir()``; mind that this may be held in memory.
    prefetch: so many tensors are brought back ahead of the one that backward is at, in reverse order of saving.
    in_flight: so many tensors may wait for their copies; for the oldest beyond, the stream that saved it waits (the host
    never does). min_bytes, exclude, select: as in ``Store``.

    Buffers come in powers of two, go back to the store when their tensor was used or dropped, and are freed with the
    store: make one and enter it in every step. ``host_bytes`` is what they add up to.

    A tensor changed in place after it was saved comes back as it was saved; if its copy was not known to have landed
    then, backward raises the RuntimeError that it raises without the store.

    Raises NotADirectoryError for a directory that is none, ValueError for negative counts; inside the block, OSError
    with the directory's name if the file system is full, RuntimeError under CUDA graph capture.
    """

    def __init__(
        self,
        *,
        directory: str | os.PathLike | None = None,
        prefetch: int = 2,
        in_flight: int = 4,
        min_bytes: int = MIN_BYTES,
        exclude: Iterable[Tensor] = (),
        select: Callable[[Tensor], bool] | None = None,
    ):
        super().__init__(min_bytes, exclude, select)
        for name, value in (("prefetch", prefetch), ("in_flight", in_flight)):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"offload: {name} must be an int of at least 0, not {value!r}")
        directory = os.fspath(tempfile.gettempdir() if directory is None else directory)
        if not os.path.isdir(directory):
            raise NotADirectoryError(f"offload: {directory!r} is not a directory")
        self._settings = directory, prefetch, in_flight
        self._lanes: dict[torch.device, _Lane] = {}
        self._lock = threading.Lock()

    @property
    def host_bytes(self) -> int:
        """Bytes of all host buffers, in use and free."""
        return sum(lane.bytes for lane in list(self._lanes.values()))

    def accepts(self, tensor: Tensor) -> bool:
        return tensor.device.type in ("cpu", "cuda")

    def put(self, flat: Tensor) -> _Copy:
        lane = self._lanes.get(flat.device)
        if lane is None:
            with self._lock:
                lane = self._lanes.get(flat.device)
                if lane is None:
                    kind = _CudaLane if flat.is_cuda else _Lane
                    lane = self._lanes[flat.device] = kind(flat.device, *self._settings)
        return lane.put(flat)

    def get(self, kept: _Copy) -> Tensor:
        return kept.lane.get(kept)


# -- compressed -----------------------------------------------------------------------------------------------------

_TINY = torch.finfo(torch.float32).tiny  # a smaller scale would be no normal number
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
        step = max(_CHUNK // self.block, 1)
        for row in range(0, rows, step):
            piece = flat[row * self.block : (row + step) * self.block].float()
            x = torch.nn.functional.pad(piece, (0, -piece.numel() % self.block)).view(-1, self.block)
            largest = torch.where(x.isfinite(), x.abs(), 0).amax(1, keepdim=True)
            scale = torch.div(largest, self.code.top, out=scales[row : row + step]).clamp_(min=_TINY)
            code = self.code.round((x / scale).clamp_(-self.code.infinity, self.code.infinity))
            # nothing becomes 0 that was not: ReLU's backward reads the sign of its result, and with round-to-nearest
            # int8 the gradient's error was 0.11 in the example of docs/concepts/storage.md
            codes[row : row + step] = torch.where(code == 0, x.sign() * self.code.smallest, code)
        return codes.view(-1), scales.view(-1)

    def decode(self, parts: tuple[Tensor, Tensor], n: int, dtype: torch.dtype) -> Tensor:
        codes, scales = parts[0].view(-1, self.block), parts[1].view(-1, 1)
        flat = torch.empty(n, dtype=dtype, device=codes.device)
        step = max(_CHUNK // self.block, 1)
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

    @staticmethod
    def _bits(device: torch.device) -> Tensor:
        return torch.arange(8, dtype=torch.uint8, device=device)

    def encode(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, room, bits = flat.view(_WORD[flat.element_size()]), self.room(flat.numel()), self._bits(flat.device)
        mask = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8, device=flat.device)
        values = x.new_empty(room + 1)  # the last takes the zeros, and what does not fit
        count = torch.zeros((), dtype=torch.int64, device=flat.device)
        for start in range(0, flat.numel(), _CHUNK):
            piece = x[start : start + _CHUNK]
            is_set = piece != 0
            rows = torch.nn.functional.pad(is_set.view(torch.uint8), (0, -piece.numel() % 8)).view(-1, 8)
            mask[start // 8 : start // 8 + len(rows)] = (rows << bits).sum(1, dtype=torch.uint8)
            place = is_set.cumsum(0).add_(count - 1)
            count = place[-1] + 1
            values.scatter_(0, place.masked_fill_(~is_set, room).clamp_(max=room), piece)
        return mask, values, count

    def decode(self, parts: tuple[Tensor, Tensor], n: int, dtype: torch.dtype) -> Tensor:
        mask, values = parts
        flat = torch.empty(n, dtype=dtype, device=mask.device)
        x, room, bits = flat.view(values.dtype), values.numel() - 1, self._bits(mask.device)
        count = torch.zeros((), dtype=torch.int64, device=mask.device)
        for start in range(0, n, _CHUNK):
            target = x[start : start + _CHUNK]
            is_set = (mask[start // 8 : (start + _CHUNK) // 8, None] >> bits & 1).view(-1)[: target.numel()].bool()
            place = is_set.cumsum(0).add_(count - 1)
            count = place[-1] + 1
            target.copy_(values[place.clamp_(0, room)]).masked_fill_(~is_set, 0)
        return flat


class _Packed:
    """A run as the parts that the next store keeps, or, where they hold too little, as that keeps it `dense`.

    While that is not known both are there, and dense is a _Stays.
    """

    __slots__ = ("__weakref__", "dense", "dtype", "n", "parts")


class compress(Store):
    """Keeps saved floating-point tensors in fewer bits. Others stay, and so do parameters.

    method:

    - ``"fp8"``, *lossy*: e4m3 with a float32 scale per `block` elements that are neighbours in memory. Relative error at
      most 1/16 for elements within 2^-14 of the largest of their block. 1.03 bytes an element.
    - ``"int8"``, *lossy*: absolute error at most 1/250 of the largest of the block, 1/125 for elements below that. -0
      comes back as 0. 1.03 bytes an element.
    - ``"relu"``, exact: one bit an element and the non-zeros, in a buffer for `capacity` of the elements. A tensor with
      more of them is kept as it is.

    NaN and infinities come back as such from all three, and so does the sign of every element, so that none becomes
    zero. The lossy two take float32, bfloat16 and float16; docs/concepts/storage.md measures what they do to gradients. Around
    checkpointed segments with ReLU inside, int8's error grows from 0.01 to 0.08, because masks rebuilt from a compressed
    input are not those of forward. They also take what is sensitive, such as the logsumexp that attention
    saves in float32: in a model that computes in bfloat16, ``select=lambda t: t.dtype == torch.bfloat16`` leaves it out.

    Whether a tensor has too many non-zeros is known on the device only. So the dense tensor is held until their number
    has reached the host by itself; where more than `in_flight` tensors wait for that, the host waits for the oldest.

    then: the store for what is left of a tensor, such as ``offload()``; None keeps it on the device. block: elements per
    scale, from 1 on. capacity: between 0 and 1. min_bytes, exclude, select: as in ``Store``.

    Raises ValueError for another method, block or capacity, TypeError for a `then` that is no store.
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
        self._then = _next("compress", then)
        self._in_flight = in_flight
        self._pending: deque[tuple[_Flight, weakref.ref[_Packed]]] = deque()  # numbers on their way to the host
        self._lock = threading.RLock()

    def accepts(self, tensor: Tensor) -> bool:
        return tensor.dtype in self._codec.dtypes and self._then.accepts(tensor)

    def put(self, flat: Tensor) -> _Packed:
        packed = _Packed()
        packed.n, packed.dtype, packed.dense = flat.numel(), flat.dtype, None
        parts = self._codec.encode(flat)
        packed.parts = [self._then.put(part) for part in parts[:2]]
        if isinstance(self._codec, _Zeros):
            packed.dense = _Stays(flat)
            self._pending.append((self._to_host(parts[2]), weakref.ref(packed)))
            self._settle()
        return packed

    def get(self, packed: _Packed) -> Tensor:
        self._settle()
        if isinstance(packed.dense, _Stays):
            return packed.dense.unpack()
        if packed.dense is not None:
            return self._then.get(packed.dense)
        return self._codec.decode([self._then.get(part) for part in packed.parts], packed.n, packed.dtype)

    @staticmethod
    def _to_host(count: Tensor) -> _Flight:
        if not count.is_cuda:
            return _Flight(count)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("compress: 'relu' decides on the host, which CUDA graph capture does not allow")
        stream = torch.cuda.current_stream(count.device)
        host = torch.empty((), dtype=count.dtype, device="cpu", pin_memory=True)
        flight = _Flight(host.copy_(count, non_blocking=True), stream)
        flight.event = stream.record_event()
        return flight

    def _settle(self) -> None:
        """Drop the dense tensors whose non-zeros are known to have found room, and the parts of those that had none."""
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


# -- over ranks -----------------------------------------------------------------------------------------------------


class partition(Store):
    """Keeps 1/n of each saved tensor on each of the n ranks of a group; backward gathers it.

    Only for tensors that are *equal on all ranks*: what tensor parallelism replicates, such as the input of a layer norm
    or of a column-parallel linear layer. Enter it around those, or around segments that keep only their inputs, or name
    them with `select`. Each rank keeps a checksum of its whole tensor, and backward compares them: RuntimeError on a
    CPU, a device-side assertion on a GPU, where reading the result would make the host wait.

    Forward communicates nothing. Backward runs one ``all_gather_into_tensor`` per saved tensor (per tensor, not per view
    of it), when the first node that saved it runs. So all ranks have to save equal shapes in one order and run the same
    backward, which they do when they run the same model with the same `select`; a rank that stops elsewhere leaves the
    others waiting until the group's timeout. Sizes need not divide by n: the last shares are padded with zeros.

    group: a ProcessGroup of which this rank is a member; None is the default group. then: the store for this rank's
    share, such as ``offload()``. min_bytes, exclude, select: as in ``Store``; sizes are those of the whole tensor.

    Raises RuntimeError if torch.distributed is not initialized, ValueError if this rank is not in the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        then: Store | None = None,
        min_bytes: int = MIN_BYTES,
        exclude: Iterable[Tensor] = (),
        select: Callable[[Tensor], bool] | None = None,
    ):
        super().__init__(min_bytes, exclude, select)
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("partition: torch.distributed is not initialized; call init_process_group first")
        self._group = dist.group.WORLD if group is None else group
        self._rank = dist.get_rank(self._group)
        if self._rank < 0:
            raise ValueError("partition: this rank is not a member of the group")
        self._ranks = dist.get_world_size(self._group)
        self._then = _next("partition", then)

    def accepts(self, tensor: Tensor) -> bool:
        return self._then.accepts(tensor)

    def put(self, flat: Tensor) -> tuple[object, int, torch.dtype]:
        whole = flat.view(torch.uint8)
        size = -(-whole.numel() // (8 * self._ranks)) * 8  # bytes: not every backend knows every dtype
        share = whole.new_zeros(size + 8)  # the last eight are the checksum
        mine = whole[self._rank * size : (self._rank + 1) * size]
        share[: mine.numel()] = mine
        share[size:].view(torch.int64).copy_(_checksum(whole))
        return self._then.put(share), whole.numel(), flat.dtype

    def get(self, kept: tuple[object, int, torch.dtype]) -> Tensor:
        share, n, dtype = self._then.get(kept[0]), *kept[1:]
        shares = share.new_empty(self._ranks, share.numel())
        dist.all_gather_into_tensor(shares.view(-1), share, group=self._group)
        sums = shares[:, -8:].contiguous().view(torch.int64)
        torch._assert_async((sums == sums[0]).all(), "partition: a saved tensor is not equal on all ranks")
        return shares[:, :-8].reshape(-1)[:n].view(dtype)


def _checksum(data: Tensor) -> Tensor:
    """int64 [1] of bytes [n]: the sum of its words, each multiplied with an odd number that its position gives."""
    total = torch.zeros(1, dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), _CHUNK):
        piece = data[start : start + _CHUNK]
        words = torch.nn.functional.pad(piece, (0, -piece.numel() % 4)).view(torch.int32)
        weights = torch.arange(start + 1, start + 2 * len(words), 2, device=data.device)
        total += (words * weights).sum()
    return total
