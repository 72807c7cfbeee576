"""Defines the base class of all stores, what autograd holds in place of a saved tensor, and the end of a chain."""

from __future__ import annotations

import functools
import math
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..frozen import Frozen
from ..memory import Stays, changed_in_place, dense_parts, note_saved

MIN_BYTES = 1 << 20
Place = tuple[tuple[int, ...], tuple[int, ...]]  # size and stride of a run's elements in memory


class _Parts:
    """A wrapper subclass, saved as the tensors that it is made of.

    A change in place moves the wrapper's version and none of its parts'. So the wrapper is held without the stored parts, and
    backward raises as it does without a store.
    """

    def __init__(self, tensor: Tensor, pack: Callable):
        names, self.context = tensor.__tensor_flatten__()
        self.kind, self.size, self.stride, self.version = type(tensor), tensor.size(), tensor.stride(), tensor._version
        # a DTensor names its mesh among them
        self.parts = {name: getattr(tensor, name) for name in names}
        symbolic = any(not isinstance(n, int) for n in self.size)
        for name, part in self.parts.items():
            if isinstance(part, Tensor):
                # A symbolic size (a jagged tensor's) belongs to the identity of its offsets or lengths: with a copy of them the
                # tensor would have another shape.
                itself = symbolic and not (part.is_floating_point() or part.is_complex())
                self.parts[name] = _stay(part, itself=True) if itself else pack(part)
        self.wrapper: Tensor | None = tensor.detach()
        try:
            for name, part in self.parts.items():
                if isinstance(part, (_Parts, _View)):
                    setattr(self.wrapper, name, None)
        except AttributeError:  # the class cannot drop the part: leave it unchecked rather than hold it
            self.wrapper = None

    def unpack(self) -> Tensor:
        if self.wrapper is not None and self.wrapper._version != self.version:
            raise changed_in_place(self.wrapper, self.version, self.kind)
        parts = {name: part.unpack() if hasattr(part, "unpack") else part for name, part in self.parts.items()}
        return self.kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)


class _Run:
    """Elements in a store, for every view of them that was saved.

    They are fetched when backward unpacks the first view, and held until the last. That is not long, because two nodes that
    saved one tensor are neighbours in the graph.
    """

    def __init__(self, store: Store, flat: Tensor):
        self.store, self.saved = store, store.put(flat)
        note_saved(store.resident(self.saved))
        self.flat: Tensor | None = None
        self.views = self.left = 0

    def hold(self, flat: Tensor | None) -> None:
        self.flat = flat if self.left > 0 else None
        if self.left <= 0:
            self.left = self.views


class _View:
    """A tensor as a view of a run. place: size and stride of the run's elements, as `dense_run` returns them."""

    def __init__(self, tensor: Tensor, place: Place, run: _Run):
        self.size, self.stride, self.place, self.run = tensor.size(), tensor.stride(), place, run
        run.views += 1
        run.left += 1

    def __del__(self):
        run = self.run
        run.views -= 1
        run.left = min(run.left, run.views)
        run.hold(run.flat)

    def unpack(self) -> Tensor:
        run = self.run
        flat = run.store.get(run.saved) if run.flat is None else run.flat
        run.left -= 1
        run.hold(flat)
        if self.place[1] == (1,):
            return flat.as_strided(self.size, self.stride)
        tensor = torch.empty_strided(self.size, self.stride, dtype=flat.dtype, device=flat.device)
        tensor.as_strided(*self.place).copy_(flat.view(self.place[0]))
        return tensor


def dense_run(tensor: Tensor) -> Place:
    """Returns (size, stride) of the memory that holds a strided tensor's elements once each, in the order of their
    addresses: one dense run, or several with gaps between them."""
    axes = [(stride, size) for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if stride and size > 1]
    axes.sort(reverse=True)
    size, stride = tuple(n for _, n in axes), tuple(s for s, _ in axes)
    span = 1 + sum((n - 1) * s for s, n in axes)
    return ((span,), (1,)) if span <= math.prod(size) else (size, stride)  # a shorter span means overlapping rows


class Store:
    """Saves tensors for backward elsewhere inside its context, in any number of steps, graphs and threads. Subclasses define
    `put(flat)` of elements [n], whose result `get` and `resident` take.

    min_bytes: smaller tensors stay. exclude: tensors that stay, with their views; parameters always do, but not
    ``parameter.detach()`` and ``.data``. select: a function of a tensor; where it returns False, the tensor stays.
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

    def put(self, flat: Tensor) -> object:
        """Stores flat [n], contiguous. Returns the argument of `get`; freeing it frees the stored elements."""
        raise NotImplementedError

    def get(self, saved: object) -> Tensor:
        """Returns [n] on its original device in its original dtype, any number of times."""
        raise NotImplementedError

    def resident(self, saved: object) -> Iterator[Tensor]:
        """Returns the tensors that `saved`, the result of `put`, holds on the original device."""
        raise NotImplementedError

    def accepts(self, tensor: Tensor) -> bool:
        """Returns whether `put` can take a tensor of this device and dtype."""
        return True

    def __enter__(self) -> Store:
        runs = weakref.WeakValueDictionary()  # per `with`: in another one an equal version may mean other values
        pack, unpack = functools.partial(self._pack, runs), operator.methodcaller("unpack")
        if "torch._dynamo" in sys.modules:  # after a graph break here Dynamo would compile the hooks
            pack, unpack = torch.compiler.disable(pack), torch.compiler.disable(unpack)
        torch.autograd.graph.saved_tensors_hooks(pack, unpack).__enter__()
        return self

    def __exit__(self, *exception) -> None:
        torch.autograd.graph.saved_tensors_hooks.__exit__(self)

    def _pack(self, runs: weakref.WeakValueDictionary, tensor: Tensor, around: tuple[int, ...] = ()):
        """Packs a saved tensor. around: versions of the wrappers that it is a part of."""
        if isinstance(tensor, (torch.nn.Parameter, Frozen)) or isinstance(tensor._base, torch.nn.Parameter):
            return _stay(tensor)
        if is_traceable_wrapper_subclass(tensor):
            return _Parts(tensor, functools.partial(self._pack, runs, around=(*around, tensor._version)))
        if (
            type(tensor) is not Tensor
            or tensor.layout != torch.strided
            or tensor.is_nested
            or tensor.numel() == 0
            or tensor.nbytes < self._min_bytes
            or tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor._is_zerotensor()
            or StorageWeakRef(tensor.untyped_storage()) in self._excluded
            or not self.accepts(tensor)
            or (self._select is not None and not self._select(tensor))
        ):
            return _stay(tensor)
        place = dense_run(tensor)
        at = tensor.storage_offset(), place, tensor.dtype
        key = StorageWeakRef(tensor.untyped_storage()), tensor._version, around if any(around) else (), *at
        run = runs.get(key)
        if run is None:
            run = runs[key] = _Run(self, tensor.detach().as_strided(*place).reshape(-1))
        return _View(tensor, place, run)


def _stay(tensor: Tensor, itself: bool = False) -> Stays:
    note_saved((tensor,))
    return Stays(tensor, itself)


class _Here(Store):
    """The end of a chain: tensors stay on their device."""

    def put(self, flat: Tensor) -> Stays:
        return Stays(flat)

    def get(self, saved: Stays) -> Tensor:
        return saved.unpack()

    def resident(self, saved: Stays) -> Iterator[Tensor]:
        yield saved.tensor


class Chained(Store):
    """Base class of stores that pass their codes or shares to another store.

    then: that store, such as ``offload()``; None leaves them on the device. The other arguments are those of ``Store``.
    """

    def __init__(self, then: Store | None = None, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if then is not None and not isinstance(then, Store):
            raise TypeError(f"{type(self).__name__}: then must be a store such as offload(), not {type(then).__name__}")
        self._then = _Here() if then is None else then

    def accepts(self, tensor: Tensor) -> bool:
        return self._then.accepts(tensor)
