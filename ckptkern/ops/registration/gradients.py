"""Sums of weights' gradients over chunks of tokens, formed now or later; and an input's gradient that a collective still writes
(`Late`).

Zero-bubble pipelines ask a graph for the inputs' gradients first and for the weights' later. The first pass of a region then
runs its backward without the matmuls of the weights' gradients, and stashes their operands; the second pass runs these matmuls.
Together they run what one whole pass runs, with its bits. Without a stash each pass recomputes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor, nn
from torch.utils._pytree import tree_map_only

from ... import state
from ...eager import upcast_matmul, upcasts
from ..dispatch.choices import check_choice
from .op import cast_parameter

SPLITS = ("auto", "stash", "recompute")


class _Thread(threading.local):
    """State of this thread. stash: holds the operands of the running backward's `WeightGrad.add`; without one, its matmuls run
    at once."""

    stash: Stash | None = None


THREAD = _Thread()


class Process:
    """State of the process, because backward has threads of its own. mode: of `split_backward`; by_hand: the active
    `delay_weight_gradients`."""

    mode = "auto"
    by_hand: delay_weight_gradients | None = None
    held = 0  # bytes that all regions hold for a second pass


class Delayed(NamedTuple):
    """A weight's gradient whose matmuls have not run. sums: its parts, of which the last returns the whole."""

    sums: list[WeightGrad]


class Stash:
    """Holds the operands of delayed matmuls.

    limit: bytes to hold at most, besides `saved`, which is saved for backward anyway; what exceeds it is recomputed by the
    second pass. spills: what exceeds it runs at once instead.
    """

    def __init__(self, limit: float, saved: Iterable[Tensor | None], *, spills: bool = False):
        self.limit, self.bytes, self.spills = limit, 0, spills
        self.storages = {t.untyped_storage()._cdata for t in saved if t is not None}

    def holds(self, operands: Iterable) -> bool:
        """Holds these tensors from now on and returns True; returns False once they exceed the limit."""
        for t in operands:
            if isinstance(t, Tensor) and (storage := t.untyped_storage())._cdata not in self.storages:
                self.storages.add(storage._cdata)
                self.bytes += storage.nbytes()
        return self.bytes <= self.limit


class Room:
    """Bytes held for a second pass, counted as long as this object lives."""

    def __init__(self, size: int):
        self.size = size
        Process.held += size

    def __del__(self):
        Process.held -= self.size


class Left(NamedTuple):
    """Gradients, by place, that the first of two passes leaves to the second.

    upstream: the results' gradients and their versions; edges: places of the tensors that have an edge, of `count` tensors;
    room: the bytes held.
    """

    upstream: list[tuple[Tensor | None, list[int]]]
    edges: list[int]
    count: int
    grads: dict[int, Tensor | Delayed | None]
    room: Room


def versions_of(operands: Iterable) -> list[int]:
    return [t._version for t in operands if isinstance(t, Tensor) and not t.is_inference()]


def is_valid(grad: Tensor | Delayed | None) -> bool:
    """Returns whether the operands are unchanged: an input, or memory that a body used again, may have changed."""
    return not isinstance(grad, Delayed) or all(
        versions_of(operands) == before for part in grad.sums for operands, before in part.later or ()
    )


def formed(grad: Tensor | Delayed | None) -> Tensor | None:
    """Returns the gradient; runs its matmuls if they are delayed."""
    if not isinstance(grad, Delayed):
        return grad
    total = None
    for part in grad.sums:
        part.run()
        total = part.total()
    return total


def stash_limit(workspaces: Iterable[int]) -> float:
    """Returns the bytes that a region may stash: in "auto" its workspace, less what all regions hold."""
    if Process.mode == "auto":
        return max(max(workspaces, default=0) - Process.held, 0)
    return torch.inf if Process.mode == "stash" else 0


def is_first_of_several() -> bool:
    """Returns whether another backward pass over the graph may ask for what this one does not."""
    return (
        Process.mode != "recompute"
        and not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and _C._autograd._get_current_graph_task_keep_graph()
        and state.asks_for_some()
    )


class split_backward:
    """Sets what a region does when one backward pass asks for its input's gradient, and a later one for its weights'.

        ckptkern.split_backward("stash")            # from now on, in the whole process
        with ckptkern.split_backward("recompute"):  # inside

        "stash"      the first pass holds the operands of the weights' matmuls for the second: no FLOP runs twice
        "recompute"  each pass recomputes what it reads: nothing is held between them
        "auto"       the default: "stash" while what all regions hold fits one workspace, else "recompute"

    Zero-bubble schedules of torch.distributed.pipelining run backward so, from torch 2.13 on. Compiled graphs, tensor-parallel
    regions and create_graph always recompute.
    Raises ValueError for another mode.
    """

    def __init__(self, mode: str):
        check_choice("split_backward", "mode", mode, SPLITS)
        self.outer, Process.mode = Process.mode, mode

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        Process.mode = self.outer


class delay_weight_gradients:
    """Delays the matmuls of a model's weight gradients, in backward passes inside, until `flush`.

        with ckptkern.delay_weight_gradients(model) as delayed:
            loss.backward()     # inputs' gradients, and those of norms and biases
            work = torch.distributed.all_reduce(..., async_op=True)
            delayed.flush()     # weights' gradients, while the collective runs
            work.wait()

    The end of the `with` flushes, too, except after an exception. Until then the matmuls' operands are held. Weights of this
    package's regions wait, outside of activation checkpoints, in passes that accumulate into `.grad` (or `main_grad`).
    Raises ValueError for a parameter with hooks, which would not run (those of DistributedDataParallel and fully_shard cannot
    be detected); RuntimeError inside another one, and in `flush` if an operand was changed in place.
    """

    def __init__(self, model: nn.Module):
        for name, p in model.named_parameters():
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"delay_weight_gradients: {name} has hooks, which would not run when its gradient comes; remove them"
                )
        self.parameters = {id(p) for p in model.parameters() if p.requires_grad}
        self.queue: list[tuple[Tensor, Delayed, Any]] = []

    def __enter__(self) -> delay_weight_gradients:
        if Process.by_hand is not None:
            raise RuntimeError(
                "delay_weight_gradients: weights' gradients are delayed already; leave the outer `with` first"
            )
        Process.by_hand = self
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        Process.by_hand = None
        if kind is None:
            self.flush()
        self.queue.clear()

    def takes(self, weight: Tensor | None) -> bool:
        """Returns whether this weight's gradient waits for `flush`."""
        return id(weight) in self.parameters and accumulates(weight)

    def flush(self) -> None:
        """Forms the gradients that wait and adds them."""
        while self.queue:
            weight, delayed, precision = self.queue[0]
            if not is_valid(delayed):
                raise RuntimeError(
                    "delay_weight_gradients: an operand of a weight's gradient was changed in place since backward; flush "
                    "before its memory is used again"
                )
            with torch.no_grad(), precision:
                grad = formed(delayed)
                if grad is not None:
                    weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
            self.queue.pop(0)


def accumulates(weight: Tensor) -> bool:
    """Returns whether this backward pass adds to weight.grad."""
    if not weight.is_leaf or _C._current_graph_task_id() == -1:
        return False
    try:
        return _C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(weight).node)
    except RuntimeError:  # torch.autograd.grad of this weight
        return False


# -- a gradient that a collective still writes

VIEWS = frozenset((torch.ops.aten.view.default, torch.ops.aten.slice.Tensor))
Finish = Callable[[], Tensor]  # waits for a tensor and returns it


class Late(Tensor):
    """A contiguous tensor that finish() waits for and returns, once, where the tensor is first read.

    An op's backward takes it as dy, and first does what needs x alone. Views of it are late, too. Any other operation waits.
    """

    finish: Finish | None
    value: Tensor | None

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, finish: Finish) -> Late:
        late = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        late.finish, late.value = finish, None
        return late

    def arrived(self) -> Tensor:
        if self.finish is not None:
            self.value, self.finish = self.finish(), None  # frees what finish() holds
        return self.value

    def data_ptr(self) -> int:  # kernels are launched with it
        return self.arrived().data_ptr()

    __torch_function__ = _C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        late = args[0] if args else None
        if func in VIEWS and late.finish is not None and not kwargs:
            shape = func(torch.empty(late.shape, dtype=late.dtype, device="meta"), *args[1:]).shape
            return cls(shape, late.dtype, late.device, lambda: func(late.arrived(), *args[1:]))
        args, kwargs = tree_map_only(cls, cls.arrived, (args, kwargs or {}))
        return func(*args, **kwargs)


def is_late(tensor: Tensor) -> bool:
    return type(tensor) is Late and tensor.finish is not None


def arrived(tensor: Tensor) -> Tensor:
    """Returns the tensor, after waiting for it if it is late."""
    return tensor.arrived() if type(tensor) is Late else tensor


# -- sums over chunks

Place = slice | tuple[slice, ...]  # of a part of a tensor

IN_GRAD = "grad"  # a main_grad that stands for the parameter's .grad


def accumulate_in_place(model: torch.nn.Module, enabled: bool = True) -> None:
    """Lets fused ops add weights' gradients to an existing `.grad`, without memory for a second gradient.

        ckptkern.accumulate_in_place(model)
        for micro_batch in micro_batches:       # from the second on
            model(micro_batch).backward()

    It applies to an eager `backward()` and a dense float32 or float64 `.grad` without hooks of `register_hook`; elsewhere
    gradients go as in torch. Hooks after accumulation find the sum. Sums differ from torch's by rounding.

    enabled: False undoes it. Parameters that have a `main_grad` keep it.
    """
    for parameter in model.parameters():
        if enabled and getattr(parameter, "main_grad", None) is None:
            parameter.main_grad = IN_GRAD
        elif not enabled and isinstance(getattr(parameter, "main_grad", None), str):
            del parameter.main_grad


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Returns the float32 buffer in which Megatron-LM sums a parameter's gradients over micro-batches, or its `.grad`
    (`accumulate_in_place`); None if it has neither.

    Only a Parameter that is passed to the op itself has it: a view, a cast copy, or a tensor of a compiled graph or a transform
    does not.
    """
    main = getattr(weight, "main_grad", None)
    if isinstance(main, str):  # weight.grad, if this backward accumulates there and nothing else sees the gradient
        grad = weight.grad
        if (
            type(grad) is not Tensor
            or grad.layout is not torch.strided
            or grad.dtype != weight.dtype
            or grad.itemsize < 4
            or grad.requires_grad
            or weight._backward_hooks
            or torch.is_grad_enabled()
        ):
            return None
        return grad if accumulates(weight) else None
    if main is not None and (main.dtype != torch.float32 or main.shape != weight.shape or weight.itemsize > 4):
        raise TypeError(
            f"main_grad must be float32 and of its parameter's shape {tuple(weight.shape)}, but is {main.dtype} of shape "
            f"{tuple(main.shape)} for a parameter in {weight.dtype}"
        )
    return main


def into_main_grad(weight: Tensor | None, grad: Tensor) -> Tensor | None:
    """Adds the gradient that a library op returned to the weight's main_grad and returns None; without one returns the
    gradient."""
    main = None if weight is None else main_grad_of(weight)
    if main is None:
        return grad
    main.add_(grad)
    weight.grad_added_to_main_grad = True
    return None


def add_matmul(total: Tensor | None, a: Tensor, b: Tensor, *, wide: bool) -> Tensor:
    """Returns total + a b, in total's memory if there is one. wide: in float32, where operands of 16 bits would give their own
    dtype."""
    if wide:
        return upcast_matmul(a, b, out=total, add=total is not None)
    return torch.mm(a, b) if total is None else total.addmm_(a, b)


class WeightGrad:
    """Sum over chunks of a^T b, accumulated in float32 (float64 for float64) and rounded once to the weight's dtype.

    place: index of the part of the weight whose gradient this is; whole: returns the tensor of the whole weight's gradient, at
    whose `place` this part is written. If the weight has a main_grad, that is the sum, and the result is None. Subclasses may
    have another `matmul`, whose operands `add` takes.
    """

    later: list[tuple[tuple, list[int]]] | None = None  # operands, and the versions of those that are tensors

    def __init__(
        self, weight: Tensor, chunks: int, *, place: Place | None = None, whole: Callable[[], Tensor] | None = None
    ):
        self.weight, self.dtype, self.chunks, self.place, self.whole = weight, weight.dtype, chunks, place, whole
        self.into: Tensor | None = None
        main = main_grad_of(weight)
        self.main = self.sum = main if main is None or place is None else main[place]

    def add(self, *operands) -> None:
        """Adds the matmul of these operands, now or when the sum is asked for."""
        stash = THREAD.stash
        if stash is None:
            self.matmul(*operands)
            return
        self.later = self.later or []
        if stash.holds(operands):
            self.later.append((operands, versions_of(operands)))
        elif stash.spills:
            self.run()
            self.matmul(*operands)

    def run(self) -> None:
        """Adds what waits, as the body of an op does: without autocast."""
        with _C._DisableAutocast():
            while self.later:
                self.matmul(*self.later.pop(0)[0])
        self.later = None

    def result(self) -> Tensor | Delayed | None:
        return self.total() if self.later is None else Delayed([self])

    def matmul(self, a: Tensor, b: Tensor) -> None:
        """Adds a^T b, of a [m, N] and b [m, K], to the sum [N, K]."""
        sums = self.chunks > 1 or self.main is not None
        wide = sums or (a.dtype != self.dtype if a.is_cuda else a.is_cpu and upcasts(a.dtype))
        if self.sum is None and self.whole is not None and not wide and a.dtype == self.dtype:
            self.sum = torch.mm(a.t(), b, out=self.part())
        else:
            self.sum = add_matmul(self.sum, a.t(), b, wide=wide)

    def total(self) -> Tensor | None:
        total, self.sum = self.sum, None  # at most one float32 sum is alive beside its result
        if self.main is not None:
            self.weight.grad_added_to_main_grad = True
            return None
        if self.whole is None:
            return cast_parameter(total, self.dtype)
        if total is not self.part():
            self.part().copy_(total)
        return self.whole()

    def part(self) -> Tensor:
        """Returns this part of the whole weight's gradient."""
        if self.into is None:
            self.into = self.whole()[self.place]
        return self.into


class BiasGrad:
    """Sum over chunks, rounded once. part: the dtype of a chunk's sums; True, float32, if there are several chunks."""

    def __init__(self, bias: Tensor, chunks: int):
        self.dtype, self.total = bias.dtype, None
        self.part = bias.dtype if chunks == 1 else True

    def add(self, part: Tensor) -> None:
        self.total = part if self.total is None else self.total.add_(part)

    def result(self) -> Tensor:
        return cast_parameter(self.total, self.dtype)
