"""Decisions of an activation checkpoint: what chooses rows comes from forward, so that recompute chooses the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError, create_selective_checkpoint_contexts

# Returns (values, indices) of elements along a dimension -> the dimension's place among its arguments.
SELECTS = {"topk": 2, "sort": 1, "max": 1, "min": 1}
INDICES = ("argsort", "argmax", "argmin", "multinomial", "bucketize", "searchsorted")
COMPARES = ("gt", "ge", "lt", "le", "eq", "ne")
COLUMNS = 256  # of the widest comparison that is saved: a row of scores, not one of features

_NAMES: dict[Callable, str] = {}
for _name in (*SELECTS, *INDICES, *COMPARES):
    for _of, _form in ((torch, _name), (Tensor, _name), (Tensor, f"__{_name}__")):
        if hasattr(_of, _form):
            _NAMES[getattr(_of, _form)] = _name

_aten = torch.ops.aten
_COMPILED = functools.partial(
    create_selective_checkpoint_contexts,
    [
        _aten.topk.default,
        _aten.sort.default,
        _aten.sort.stable,
        _aten.max.dim,
        _aten.min.dim,
        _aten.argmax.default,
        _aten.argmin.default,
        _aten.multinomial.default,
        _aten.bucketize.Tensor,
        _aten.searchsorted.Tensor,
    ],
)


def saved_decisions() -> tuple[Save, _Replay]:
    """Returns contexts of forward and recompute, for `context_fn`, that save which rows forward chose.

        y = ckptkern.checkpoint(layer, x, context_fn=ckptkern.saved_decisions)

    A matmul that rounds otherwise in recompute, by another kernel or another chunk, can turn a router's choice: tokens then
    go to other experts than in forward, and gradients are those of another function, or of other shapes. Inside, recompute
    takes from forward the indices of topk, sort, and of max and min along a dimension, whose values are gathered by them;
    the results of argsort, argmax, argmin, multinomial, bucketize and searchsorted; and comparisons of floating-point
    tensors of at most 256 columns. That is 8 bytes for an index and 1 for a comparison, held until backward's graph is freed.

    Seen are calls of torch functions and Tensor methods in Python; a decision inside of one, as in F.gumbel_softmax, is
    not. Under torch.compile the same operators are saved with their values, and no comparisons.

    Raises torch.utils.checkpoint.CheckpointError if recompute decides by another function, or of a tensor of another shape.
    """
    decisions: list[tuple[str, tuple, Callable, Any]] = []
    return Save(decisions), _Replay(decisions)


def decides(fn: Callable, *args, **kwargs) -> bool:
    """Does a call of it make decisions that `saved_decisions` saves?"""
    with (saved := saved_decisions()[0]):
        fn(*args, **kwargs)
    return bool(saved.decisions)


def contexts_of(context_fn: Callable) -> Callable:
    """context_fn as compiled graphs take it."""
    return _COMPILED if context_fn is saved_decisions else context_fn


def _is_decision(name: str, args: tuple, result: Any) -> bool:
    if not isinstance(result, Tensor):
        return False
    if name not in COMPARES:
        return True
    floating = any(isinstance(one, Tensor) and one.is_floating_point() for one in args)
    return floating and result.dim() > 0 and result.shape[-1] <= COLUMNS


class _Gather(torch.autograd.Function):
    """x.gather(dim, index) of different places in each row. It saves the index alone; torch's gather saves x, too: scores."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int, index: Tensor) -> Tensor:
        return x.gather(dim, index)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.dim, index = inputs
        ctx.shape = x.shape
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (index,) = ctx.saved_tensors
        return dy.new_zeros(ctx.shape).scatter(ctx.dim, index, dy), None, None


def _same(x: Tensor) -> Tensor:
    return x


class _Decisions(TorchFunctionMode):
    """Calls `decided` with every decision; it returns what stands for it. Values are gathered in both passes, because autograd
    has to save the same tensors in both."""

    def __init__(self, decisions: list[tuple[str, tuple, Callable, Any]]):
        super().__init__()
        self.decisions = decisions

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = _NAMES.get(func)
        # max and min choose along a dimension, not of all elements or of two tensors
        along = name in ("topk", "sort") or "dim" in kwargs or isinstance((*args, None, None)[1], int)
        if name is None or "out" in kwargs or (name in SELECTS and not along):
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        shape = tuple(x.shape) if isinstance(x, Tensor) else ()
        if name not in SELECTS:
            result = func(*args, **kwargs)  # in recompute too: multinomial moves the random state
            return self.decided(name, shape, result) if _is_decision(name, args, result) else result
        with torch.no_grad():
            found = func(*args, **kwargs)
        place, chosen = SELECTS[name], self.decided(name, shape, found.indices)
        dim = args[place] if len(args) > place else kwargs.get("dim", -1)
        if chosen.dim() == x.dim():
            return type(found)((_Gather.apply(x, dim, chosen), chosen))
        return type(found)((_Gather.apply(x, dim, chosen.unsqueeze(dim)).squeeze(dim), chosen))

    def decided(self, name: str, shape: tuple, decision: Tensor) -> Tensor:
        raise NotImplementedError


class Save(_Decisions):
    """Forward's. hooks: (pack, unpack) of saved-tensor hooks, which see the decisions; set by the region."""

    hooks: tuple[Callable, Callable] | None = None

    def decided(self, name, shape, decision):
        pack, unpack = self.hooks or (_same, _same)
        self.decisions.append((name, shape, unpack, pack(decision.detach().clone())))  # the caller may change its own
        return decision


class _Replay(_Decisions):
    def __enter__(self):
        self.place = 0
        return super().__enter__()

    def decided(self, name, shape, decision):
        if self.place == len(self.decisions):
            raise CheckpointError(
                f"ckptkern.saved_decisions: recompute decides by {name} of a tensor of shape {list(shape)}, after the last "
                f"of forward's {len(self.decisions)} decisions: the region must call the same functions each time"
            )
        was, was_shape, unpack, taken = self.decisions[self.place]
        if (was, was_shape) != (name, shape):
            raise CheckpointError(
                f"ckptkern.saved_decisions: decision {self.place} of {len(self.decisions)} was {was} of a tensor of shape "
                f"{list(was_shape)} in forward, but is {name} of {list(shape)} in recompute: the region must call the same "
                "functions each time"
            )
        self.place += 1
        return unpack(taken).clone()
