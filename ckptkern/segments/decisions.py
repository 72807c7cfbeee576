"""Contexts of an activation checkpoint's forward and recompute, which hold tensors besides autograd's.

`saved_decisions` saves forward's choices of rows, so that the recompute chooses the same. `with_hooks` passes tensors that such
contexts and torch's policies (`create_selective_checkpoint_contexts`) hold to saved-tensor hooks. From 2.14 on, torch's forward
context does so on request: it takes hooks with an attribute `_checkpoint_internal` for a region's own and continues at their
`_user_hooks`. Before 2.14 `_packed` does so.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointError, create_selective_checkpoint_contexts

from ..ops.dispatch.choices import RECOMPUTING, setting

aten = torch.ops.aten
Hooks = tuple[Callable, Callable]
Decision = tuple[str, tuple, Callable, Any]  # name of the function, shape of the input, unpack, packed result

# functions that return (values, indices) along a dimension -> the position of the argument dim
SELECTS = {"topk": 2, "sort": 1, "max": 1, "min": 1}
INDICES = ("argsort", "argmax", "argmin", "multinomial", "bucketize", "searchsorted")
COMPARES = ("gt", "ge", "lt", "le", "eq", "ne")
ADDS = (torch.index_add, Tensor.index_add, Tensor.index_add_)
COLUMNS = 256  # columns of the widest comparison that is saved: scores of experts, not features


class _Thread(threading.local):
    """State of this thread. is_trial: decisions are not saved."""

    is_trial = False


_THREAD = _Thread()
_NAMES: dict[Callable, str] = {}
for _name in (*SELECTS, *INDICES, *COMPARES):
    for _of, _form in ((torch, _name), (Tensor, _name), (Tensor, f"__{_name}__")):
        if hasattr(_of, _form):
            _NAMES[getattr(_of, _form)] = _name

# operators that decide -> torch's function
DECIDES = {
    getattr(getattr(aten, name), overload): getattr(torch, name)
    for name in ("topk", "sort", *INDICES)
    for overload in getattr(aten, name).overloads()
}
COMPILED = functools.partial(create_selective_checkpoint_contexts, [*DECIDES, aten.max.dim, aten.min.dim])


def saved_decisions() -> tuple[Decisions, Decisions]:
    """Returns contexts of forward and recompute, for `context_fn`, that save forward's decisions, such as a router's choices.

        y = ckptkern.checkpoint(layer, x, context_fn=ckptkern.saved_decisions)

    Without them a matmul that rounds differently in the recompute may send tokens to other experts. Saved are indices of topk,
    sort, max and min along a dimension, results of argsort, argmax, argmin, multinomial, bucketize and searchsorted (8 bytes
    each), and floating-point comparisons of at most 256 columns (1 byte each; not under torch.compile). Decisions inside a
    torch function, as in F.gumbel_softmax, are not seen.

    Raises torch.utils.checkpoint.CheckpointError if the recompute calls other functions or shapes.
    """
    decisions: list[Decision] = []
    return Decisions(decisions), Decisions(decisions, replays=True)


def decides(fn: Callable, *args, **kwargs) -> bool:
    """Returns whether fn(*args, **kwargs) makes decisions that `saved_decisions` saves."""
    with Decisions([]) as saved:
        fn(*args, **kwargs)
    return bool(saved.decisions)


def deciding_nothing() -> AbstractContextManager[None]:
    """Hides the decisions of a trial run from `saved_decisions`."""
    return setting("is_trial", True, _THREAD)


class _Gather(torch.autograd.Function):
    """Computes x.gather(dim, index), for indices that differ within a row, and saves only the index; torch's gather saves x
    too."""

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


def _without_rows() -> saved_tensors_hooks:
    """Returns hooks for `ADDS`, which save the rows that they add for their shape."""
    pack, unpack = _top_hooks(True) or (_same, _same)
    return saved_tensors_hooks(lambda x: pack(x.new_empty(()).expand_as(x) if x.is_floating_point() else x), unpack)


class Decisions(TorchFunctionMode):
    """Saves every decision in forward, or replays it. Both passes gather values, so that autograd saves the same tensors in
    both. hooks: (pack, unpack) of saved-tensor hooks that see the decisions; the region sets them."""

    hooks: Hooks | None = None

    def __init__(self, decisions: list[Decision], replays: bool = False):
        super().__init__()
        self.decisions, self.replays = decisions, replays

    def __enter__(self):
        self.place = 0
        return super().__enter__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Dynamo does not trace these hooks, and torch.func's gradients allow none
        if func in ADDS and not torch.compiler.is_compiling() and are_allowed():
            with _without_rows():
                return func(*args, **kwargs)
        name = _NAMES.get(func)
        # max and min decide along a dimension, not over all elements or between two tensors
        along = name in ("topk", "sort") or "dim" in kwargs or isinstance((*args, None, None)[1], int)
        if name is None or _THREAD.is_trial or "out" in kwargs or (name in SELECTS and not along):
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        shape = tuple(x.shape) if isinstance(x, Tensor) else ()
        if name not in SELECTS:
            result = func(*args, **kwargs)  # in recompute too: multinomial advances the random state
            decides = isinstance(result, Tensor)
            if decides and name in COMPARES:
                floating = any(isinstance(arg, Tensor) and arg.is_floating_point() for arg in args)
                decides = floating and result.dim() > 0 and result.shape[-1] <= COLUMNS
            return self.decided(name, shape, result) if decides else result
        with torch.no_grad():
            selected = func(*args, **kwargs)
        place, chosen = SELECTS[name], self.decided(name, shape, selected.indices)
        dim = args[place] if len(args) > place else kwargs.get("dim", -1)
        if chosen.dim() == x.dim():
            return type(selected)((_Gather.apply(x, dim, chosen), chosen))
        return type(selected)((_Gather.apply(x, dim, chosen.unsqueeze(dim)).squeeze(dim), chosen))

    def decided(self, name: str, shape: tuple, decision: Tensor) -> Tensor:
        """Saves the decision and returns it, or returns forward's."""
        if not self.replays:
            pack, unpack = self.hooks or (_same, _same)
            self.decisions.append(
                (name, shape, unpack, pack(decision.detach().clone()))
            )  # the caller may change its own
            return decision
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


# -- saved-tensor hooks


LOOKS = hasattr(torch_checkpoint, "_current_user_saved_tensors_hooks")  # torch's own forward context knows hooks
_Caching, _Holder = torch_checkpoint._CachingTorchDispatchMode, torch_checkpoint._VersionWrapper
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
are_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled


def with_hooks(contexts: tuple | None, respect: bool | None) -> tuple | None:
    """Returns a region's contexts of forward and recompute, which pass tensors that they hold to the saved-tensor hooks around
    the region if `respect`. The region's own hooks see none of these tensors."""
    if contexts is None and not any(isinstance(mode, _Caching) for mode in _get_current_dispatch_mode_stack()):
        return None
    forward, recompute = contexts or (None, None)
    selective, hooks = isinstance(forward, _Caching), _hooks_around()
    if isinstance(forward, Decisions):
        forward.hooks = hooks if respect else None
    if LOOKS:
        if selective:
            forward.respect_saved_tensors_hooks = respect
        return _Hidden(forward), _Hidden(recompute)
    return (_packed(forward, recompute, hooks), recompute) if selective and respect and hooks else contexts


def _hooks_around() -> Hooks | None:
    """Returns the innermost saved-tensor hooks that do not belong to a region, torch's or ours."""
    regions = []
    while (hooks := _top_hooks(False)) is not None and getattr(hooks[1], "__module__", "") in RECOMPUTING:
        regions.append(hooks)
        pop_hooks()
    for pair in reversed(regions):
        push_hooks(*pair)
    return hooks


class _Hidden:
    """Wraps a context that is entered under a region's own hooks, so that torch finds the hooks around the region instead."""

    def __init__(self, context):
        self.context = nullcontext() if context is None else context
        self.entered: list[Callable] = []

    def __enter__(self) -> None:
        pack, unpack = _top_hooks(True)

        def internal(x):
            return pack(x)

        internal._checkpoint_internal, internal._user_hooks = True, _hooks_around()
        push_hooks(internal, unpack)
        self.entered.append(internal)
        try:
            self.context.__enter__()
        except BaseException:
            self.leave()
            raise

    def __exit__(self, *error) -> bool | None:
        try:
            return self.context.__exit__(*error)
        finally:
            self.leave()

    def leave(self) -> None:
        pop_hooks()
        del self.entered.pop()._user_hooks  # the graph holds `internal`, and the hooks might hold the graph


class _Packed:
    """Replaces torch's holder of a tensor; hooks have packed the tensor."""

    def __init__(self, holder, hooks: Hooks, mutable: bool):
        self.holder, self.unpack = type(holder)(hooks[0](holder.get_val(mutable))), hooks[1]

    def get_val(self, mutable: bool):
        return self.unpack(self.holder.get_val(mutable))


@contextmanager
def _packed(forward, recompute, hooks: Hooks) -> Iterator[None]:
    """Wraps the forward context of a torch before 2.14: at its end its tensors are passed to the hooks."""
    mutable = recompute.allow_cache_entry_mutation

    def pack(x):
        return _Packed(x, hooks, mutable) if isinstance(x, _Holder) and isinstance(x.val, Tensor) else x

    with forward:
        yield
    with torch.no_grad():
        for held in forward.storage.values():  # an operator's results by number, or in a list before 2.13
            for i, result in list(held.items() if isinstance(held, dict) else enumerate(held)):
                held[i] = tree_map(pack, result)
