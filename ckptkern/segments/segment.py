"""A region of `checkpoint` between forward and backward; also a span of successive calls: layers that a model calls one by one.

Forward runs under saved-tensor hooks that put a placeholder into the graph for every tensor that autograd saves. When backward
opens the first placeholder, the region runs again: the hooks then pass each saved tensor to the placeholder at the same
position, and the run stops at the last placeholder. A C++ object holds the state of forward for the recompute: arguments,
attributes of modules, variables of closures, modes, random state and precision (csrc/segment_state.h).

Saved tensors belong to the innermost region; a region's own arguments are saved in the region around it. Recomputed tensors
belong to one backward pass and are freed when it reads them, also with retain_graph; but after a pass for a part of the
gradients of a retained graph, later passes read them too (`ckptkern.split_backward`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from _thread import RLock  # threading.RLock is a Python function around it
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import _C, Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointError

from ..bits import checksum
from ..ops.dispatch.choices import choose_workspace
from ..ops.dispatch.shard import ACTIVE
from ..ops.registration.gradients import Room, is_first_of_several, stash_limit
from ..state import Placeholder, Recompute, SavedTensors, SegmentState, unpack_saved
from .decisions import pop_hooks, push_hooks, saved_decisions
from .reachable import cached_weights, caching, reachable_of

_TIP = getattr(torch_checkpoint, "_debug_tip_msg", "Tip: pass debug=True to see the operators of both runs.")
HELD = -1  # the key of a recompute that later passes read too; csrc/saved_tensors.cpp


class _Stop(Exception):
    """Ends a recompute once it has recomputed every tensor that backward needs."""


class Segment(SavedTensors):
    """A call of `checkpoint`. The base class has the hooks (csrc/saved_tensors.h)."""

    def __init__(self, function, args, kwargs, preserve_rng_state, contexts, check, early_stop, on_error):
        self.function, self.recompute_context, self.on_error = function, contexts and contexts[1], on_error
        self.compares = check != "none"
        self.checksums = _Checksums() if check == "values" else None
        self.stops_early = early_stop and self.checksums is None  # checksums need all ops to have run
        self.sequence = ACTIVE.context  # the ranks of context parallelism, for the recompute too
        self.weights = cached_weights()
        self.room = self.device = None
        self.done = {}  # keys of the backward passes that the region was recomputed for
        self.lock = RLock()  # two devices' backward threads may want the same region
        self.state = self.state_of(function, args, kwargs, preserve_rng_state)

    # -- forward

    def state_of(self, function: Callable, args: tuple, kwargs: dict, preserve_rng_state: bool) -> SegmentState:
        """Returns the state that a call of the function reads. A later change of its module's parameters is an error."""
        own, reachable = reachable_of(function, args)
        if self.weights:
            reachable += tuple(self.weights.values())
        state = SegmentState(args, kwargs, preserve_rng_state, self.checksums is not None, own, reachable)
        for parameter in state.parameters():
            self.watch(parameter)
        return state

    def record(self, context, function: Callable, args: tuple, kwargs: dict):
        """Runs the function, saving only placeholders, and returns its result. context: forward's, from `context_fn`."""
        draws = self.state.draws
        if draws:
            self.state.record()
        push_hooks(self.pack if self.checksums is None else self.checksums.hook(self.pack), unpack_saved)
        try:
            returned = False
            with _NOTHING if context is None else context:
                result = function(*args, **kwargs)
                returned = True
            if not returned:
                raise RuntimeError(
                    "torch.utils.checkpoint: the forward context provided by context_fn suppressed an exception raised "
                    "during the checkpointed forward. This is not supported because checkpoint cannot return a value "
                    "for a failed forward."
                )
        finally:
            pop_hooks()
            if draws:
                self.state.stop()
        self.completed = True
        self.forget_moved()  # changes by forward itself are not errors
        self.state.settle()
        if self.checksums is not None:
            self.checksums.all()
        return result

    # -- backward

    def unpack(self, saved: Placeholder) -> Tensor:
        try:
            with self.lock:
                if (value := self.held(saved)) is not None:
                    return value
                # passes of a group share a key; outside a pass each read has its own
                group, key = _C._get_graph_exec_group(), _C._current_graph_task_id()
                if group is not None:
                    key = next((key for key, value in self.done.items() if value is group), -1)
                key = -2 - len(self.done) if key == -1 else key
                if key not in self.done:
                    self.device = self.recompute(key)
                    self.done[key] = group
                    if is_first_of_several() and self.leaves_out():
                        # this pass computes a part of a retained graph's gradients: later passes read its recomputed tensors,
                        # if there is room (`split_backward`)
                        limit = stash_limit([choose_workspace("checkpoint", None, torch.empty(0, device=self.device))])
                        size = self.hold(key, -1 if limit == math.inf else int(limit))
                        self.room = None if size is None else Room(size)
                        if (value := self.held(saved)) is not None:
                            return value
            value = saved.take(key)
            if value is None:
                extra = (
                    "Performing two backward calls that overlap (i.e. require the same saved activation in order to "
                    "compute gradients) is not allowed while under the torch.utils.checkpoint.GraphExecGroup context. "
                )
                raise CheckpointError(
                    "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already unpacked once. "
                    f"{extra if self.done[key] else ''}If you are calling ctx.saved_tensors in backward, make sure to do so "
                    "only once. Otherwise please open an issue with details on your use case."
                )
            return value
        except CheckpointError as error:
            if self.on_error is not None:
                self.on_error(error)  # raises, with the operators of both runs
            raise

    def held(self, saved: Placeholder) -> Tensor | None:
        """Returns the tensor that an earlier pass recomputed, or None. A tensor that has changed since, as an argument or
        parameter may, is dropped; the recompute then raises."""
        if self.room is None:
            return None
        value = saved.take(HELD)
        if value is None:
            self.drop(HELD)
            self.room = None
            self.done.pop(_C._current_graph_task_id(), None)  # this pass may have recomputed the region
        return value

    def recompute(self, key: int) -> torch.device | None:
        """Runs the region again, passing each tensor to its placeholder. Returns the first tensor's device."""
        args, kwargs = self.state.arguments()
        if (now_other := self.changed()) is not None:
            parameter, *versions = now_other
            named = (pair for root in self.roots() for pair in root.named_parameters())
            name = next(
                (f"the parameter {name!r}" for name, candidate in named if candidate is parameter), "a parameter"
            )
            self.refuse(name, parameter, *versions)
        run, checksums = Recompute(self, key, _Stop), None if self.checksums is None else _Checksums()
        grad_mode = torch.is_grad_enabled()
        unreadable = self.enter(self.state)
        try:
            _C._set_grad_enabled(True)
            push_hooks(run.pack if checksums is None else checksums.hook(run.pack), _identity)
            try:
                if torch.compiler.is_compiling():  # compiled autograd: forward ran in eager mode, so recompute must too
                    torch._disable_dynamo(self.run)(args, kwargs, unreadable)
                else:
                    self.run(args, kwargs, unreadable)
            except _Stop:
                pass
            finally:
                pop_hooks()
            self.compare(run)
        except BaseException:
            self.drop(key)
            raise
        finally:
            self.state.exit()
            _C._set_grad_enabled(grad_mode)
        self.keep_versions()
        if checksums is not None:
            pairs = zip(self.checksums.all(), checksums.all(), strict=False)
            if wrong := [a != b for a, b in pairs]:
                flags = torch.stack([flag.to(wrong[0].device) for flag in wrong])
                if _C._current_graph_task_id() == -1:
                    self.compare_values(flags)
                else:  # reads the device once, at the end of the backward pass
                    callback = functools.partial(self.compare_values, flags)
                    torch.autograd.Variable._execution_engine.queue_callback(callback)
        return run.device

    def enter(self, state: SegmentState) -> contextlib.AbstractContextManager:
        """Restores the state that the call read. The context it returns raises if the recompute reads a tensor that was changed
        in place."""
        for module, then in state.reclassed():
            raise CheckpointError(
                f"ckptkern.checkpoint: {type(module).__name__} in {_describe(self.function)} was a {then.__name__} in forward: "
                "a module that has changed its class, as by a removed parametrization, cannot run again. Run backward before."
            )
        state.enter()
        try:
            changed = state.changed()
        except BaseException:
            state.exit()
            raise
        return _Unreadable(changed, self) if changed else _NOTHING

    def run(self, args, kwargs, unreadable: contextlib.AbstractContextManager) -> None:
        outer, ACTIVE.context = ACTIVE.context, self.sequence
        try:
            cached = _NOTHING if self.weights is None and not parametrize._cache_enabled else caching(self.weights)
            with _NOTHING if self.recompute_context is None else self.recompute_context, unreadable, cached:
                self.call(args, kwargs)
        finally:
            ACTIVE.context = outer

    def call(self, args, kwargs) -> None:
        self.function(*args, **kwargs)

    def roots(self) -> list[nn.Module]:
        """Returns the modules that the region can reach, without submodules."""
        return self.state.roots()

    # -- checks

    def refuse(self, name: str, tensor: Tensor, now: int, then: int) -> None:
        how = "was updated in the forward"
        remedy = "It is too large to be copied at each call: update it outside of the region, or give the region a copy of it."
        if now != then:
            how = "was changed in place between forward and backward"
            remedy = "Run backward before the optimizer's step, or run the region's forward again."
        raise CheckpointError(
            f"ckptkern.checkpoint: {name} of shape {tuple(tensor.shape)} {how} of {_describe(self.function)}: it is at version "
            f"{now}, forward saw version {then}. Recomputing would give the gradients of another function. {remedy}"
        )

    def too_many(self) -> None:
        raise CheckpointError(
            "torch.utils.checkpoint: trying to save more tensors during recomputation than during the original forward "
            f"pass.\n{_TIP}"
        )

    def compare(self, run: Recompute) -> None:
        if self.lenient:
            return
        if run.count != len(self):
            raise CheckpointError(
                "torch.utils.checkpoint: A different number of tensors was saved during the original forward and "
                f"recomputation.\nNumber of tensors saved during forward: {len(self)}\nNumber of tensors saved during "
                f"recomputation: {run.count}.\n{_TIP}"
            )
        if different := run.different:
            lines = []
            for place, x in different:
                shape, dtype, device = self.metadata(place)
                lines.append(
                    f"tensor at position {place}:\n"
                    f"saved metadata: { {'shape': torch.Size(shape), 'dtype': dtype, 'device': device} }\n"
                    f"recomputed metadata: { {'shape': x.shape, 'dtype': x.dtype, 'device': x.device} }\n"
                )
            raise CheckpointError(
                "torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than "
                f"during the forward pass.\n{''.join(lines)}.\n{_TIP}"
            )

    def compare_values(self, differ: Tensor) -> None:
        """Raises if a checksum differs. differ: a flag for each saved tensor."""
        flags = differ.tolist()
        if any(flags):
            place = flags.index(True)
            shape, dtype, device = self.metadata(place)
            raise CheckpointError(
                f"ckptkern.checkpoint: {_describe(self.function)} recomputed other values than forward had: the "
                f"first tensor that differs is saved tensor {place} of {len(self)}, shape {tuple(shape)}, {dtype}, on "
                f"{device}; {sum(flags)} of {len(flags)} differ."
            )


def _identity(x: Tensor) -> Tensor:
    return x  # a function of this module, by which RECOMPUTING recognises a recompute's hooks


_NOTHING = contextlib.nullcontext()  # reusable


class _Unreadable(TorchDispatchMode):
    """Raises where the recompute reads a tensor that was changed in place. changed: those of the region's state."""

    def __init__(self, changed: list[tuple], segment: Segment):
        super().__init__()
        self.segment, self.changed = segment, {id(x): (x, *row) for tensors, *row in changed for x in tensors}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled functions run compiled: uncompiled, autograd saves other tensors."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, views = kwargs or {}, []
        for value in tree_leaves((args, kwargs)):
            if (entry := self.changed.get(id(value))) is not None:
                arguments = (
                    dict(zip((parameter.name for parameter in func._schema.arguments), args, strict=False)) | kwargs
                )
                # an op that only writes or views the tensor does not read it; a later op may, also through the view
                reads = (parameter.name for parameter in func._schema.arguments if parameter.alias_info is None)
                if any(arguments.get(name) is value for name in reads):
                    tensor, module, name, now, then = entry
                    described = "a tensor that the function captures"
                    if module is not None:
                        paths = [
                            path for root in self.segment.roots() for path, m in root.named_modules() if m is module
                        ]
                        path, *_ = (*paths, type(module).__name__)
                        kind = next(
                            (kind for kind in ("parameter", "buffer") if name in getattr(module, f"_{kind}s")),
                            "attribute",
                        )
                        described = f"the {kind} {f'{path}.{name}'.lstrip('.')!r}"
                    self.segment.refuse(described, tensor, now, then)
                views.append(entry[1:])
        result = func(*args, **kwargs)
        for row in views:
            self.changed |= {id(x): (x, *row) for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result


def _describe(function: Callable) -> str:
    own, _ = reachable_of(function, ())
    while isinstance(function, functools.partial):
        function = function.func
    return f"the region {getattr(function, '__qualname__', type(function).__name__) if own is None else type(own).__name__}"


class _Checksums:
    """Checksums of saved tensors, computed once their ops have run: an op may save a tensor before its kernel fills it, as
    rrelu does with its noise."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.waiting: list[Tensor] = []
        self.op = -1  # the op of the waiting tensors

    def hook(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Returns a hook that packs, and adds each tensor."""

        def add_and_pack(x):
            op = _C._autograd._get_sequence_nr()
            if op != self.op:
                self.all()
            self.waiting.append(x)
            self.op = op
            return pack(x)

        return add_and_pack

    def all(self) -> list[Tensor]:
        with _disable_current_modes():  # a selective policy would record these ops
            self.values += map(checksum, self.waiting)
        self.waiting = []
        return self.values


# -- several calls in a row


Places = list[tuple[int, int]]  # of `_Next`


class _Next(NamedTuple):
    """A call after the first. state: without the arguments that the previous call returned. places: (index of such an argument,
    index of the previous result), among leaves. spec: the TreeSpec of the arguments."""

    function: Callable
    state: SegmentState
    places: Places
    spec: TreeSpec


class Span(Segment):
    """A region of successive calls, each of which takes results of the previous one.

    Saved for backward: the arguments of the first call, other calls' arguments that are not results of the span, decisions
    (`saved_decisions`), and 2.5 KiB of random state a call. Results of each call may be used and differentiated as usual.
    Backward recomputes all calls at once, in order, each from its own state.
    """

    def __init__(self, module: nn.Module, function: Callable, args: tuple, kwargs: dict):
        """Opens a span for a module. function: runs the module's call, in forward and in recompute."""
        contexts = saved_decisions()
        super().__init__(module, args, kwargs, True, contexts, "default", True, None)
        self.first_call, self.context = function, contexts[0]
        self.later: list[_Next] = []
        self.returned: list[tuple[weakref.ref, int]] = []  # tensors that the last call returned, and their versions

    def first(self, args: tuple, kwargs: dict):
        """Runs the first call and returns its result."""
        return self.noted(self.record(self.context, self.first_call, args, kwargs))

    def noted(self, result):
        leaves = tree_leaves(result)
        self.returned = [(weakref.ref(t), t._version) if isinstance(t, Tensor) else None for t in leaves]
        return result

    def takes(self, args: tuple, kwargs: dict) -> Places:
        """Returns the `places` of a next call; [] if it takes no result of the last call, or a result was changed since."""
        if self.changed() is not None:  # a parameter was changed since the last call: backward is to raise
            return []
        places = {}
        for i, entry in enumerate(self.returned):
            if entry is not None and (tensor := entry[0]()) is not None and tensor.requires_grad:
                places[id(tensor)] = i, tensor._version == entry[1]
        at = [(j, *places[id(leaf)]) for j, leaf in enumerate(tree_leaves((args, kwargs))) if id(leaf) in places]
        return [(j, i) for j, i, _ in at] if all(same for *_, same in at) else []

    def next(self, module: nn.Module, function: Callable, args: tuple, kwargs: dict, places: Places):
        """Runs another call, with the places that `takes` returned, and returns its result."""
        leaves, spec = tree_flatten((args, kwargs))
        for j, _ in places:
            leaves[j] = None
        state = self.state_of(module, *tree_unflatten(leaves, spec), True)
        self.later.append(_Next(function, state, places, spec))
        result = self.noted(self.record(self.context, function, args, kwargs))
        state.settle()
        return result

    def roots(self) -> list[nn.Module]:
        return [root for state in (self.state, *(call.state for call in self.later)) for root in state.roots()]

    def call(self, args: tuple, kwargs: dict) -> None:
        result = self.first_call(*args, **kwargs)
        for function, state, places, spec in self.later:
            returned = tree_leaves(result)
            leaves = tree_leaves(state.arguments())
            for j, i in places:
                leaves[j] = returned[i]
            args, kwargs = tree_unflatten(leaves, spec)
            unreadable = self.enter(state)
            _C._push_on_torch_function_stack(self.recompute_context)  # above this call's modes
            try:
                with unreadable:
                    result = function(*args, **kwargs)
            finally:
                _C._pop_torch_function_stack()
                state.exit()
