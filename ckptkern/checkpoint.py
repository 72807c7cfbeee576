"""General segments: `checkpoint`, with the signature and behaviour of torch.utils.checkpoint's non-reentrant variant.

Forward runs under a pair of saved-tensor hooks that put a stand-in into the graph for every tensor that autograd wants
to save. The first stand-in that backward opens runs the segment again, under hooks that hand each saved tensor to the
stand-in of the same place, and stops at the last one. What the run needs of forward's world, its arguments, random
state and precision, is one C++ object (csrc/segment_state.h).

Saved tensors belong to the innermost segment; a segment's own arguments are saved in the segment around it. Recomputed
tensors belong to one backward pass and are let go when it reads them, with retain_graph too.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils.checkpoint import CheckpointError, noop_context_fn

from .state import SegmentState

__all__ = ["checkpoint", "checkpointed"]

DETERMINISM_CHECKS = ("default", "none", "values")
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_hash_chunk = 2**22  # elements: bounds the transient memory of a checksum


class _Stop(Exception):
    """Ends a recompute: all that was asked for is there."""


class _Saved:
    """Stands in the graph for a tensor. values: the recomputed tensor by backward pass."""

    __slots__ = ("__weakref__", "segment", "values")

    def __init__(self, segment: Segment):
        self.segment, self.values = segment, {}


class Segment:
    """One call of `checkpoint`."""

    def __init__(self, function, args, kwargs, preserve_rng_state, contexts, check, early_stop, on_error):
        self.function, self.recompute_context, self.on_error = function, contexts and contexts[1], on_error
        self.early_stop, self.check = early_stop, check
        self.device_context = _device_context() if torch._C._len_torch_function_stack() else None
        self.saved: list[weakref.ref[_Saved]] = []
        self.metadata: list[tuple] = []
        self.checksums: list[Tensor] = []
        self.watched: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # parameters and their versions
        self.modules = list(_modules_of(function))
        # dicts of buffers and the versions in them: what forward changes, recompute shall not change again
        self.buffers = [(module._buffers, _versions(module._buffers)) for module in self.modules if module._buffers]
        self.completed = self.lenient = False
        self.done: set = set()  # backward passes that the segment was recomputed for
        self.lock = threading.Lock()  # two devices' backward threads may want the same segment
        self.state = SegmentState(args, kwargs, preserve_rng_state)

    # -- forward

    def pack(self, x: Tensor) -> _Saved:
        saved = _Saved(self)
        self.saved.append(weakref.ref(saved))
        base = x._base
        leaf = x if base is None else base
        if leaf.is_leaf and id(leaf) not in self.watched and (leaf.requires_grad or isinstance(leaf, Parameter)):
            self.watched[id(leaf)] = weakref.ref(leaf), leaf._version
        if self.check != "none":
            self.metadata.append((x.shape, x.dtype, x.device))
            if self.check == "values":
                self.checksums.append(_checksum(x))
        return saved

    def complete(self) -> None:
        """After forward: what it changed itself is no error."""
        self.completed = True
        for module in self.modules:
            for parameter in module._parameters.values():
                if parameter is not None and not parameter.is_inference():
                    self.watched[id(parameter)] = weakref.ref(parameter), parameter._version
        self.buffers = [(buffers, before) for buffers, before in self.buffers if _versions(buffers) != before]

    # -- backward

    def unpack(self, saved: _Saved, key) -> Tensor:
        if key == -1:  # outside of any backward pass every read is one of its own
            key = object()
        with self.lock:
            if key not in self.done:
                self.recompute(key)
        try:
            return saved.values.pop(key)
        except KeyError:
            extra = "" if torch._C._get_graph_exec_group() is None else (
                "Performing two backward calls that overlap (i.e. require the same saved activation in order to "
                "compute gradients) is not allowed while under the torch.utils.checkpoint.GraphExecGroup context. "
            )  # fmt: skip
            raise CheckpointError(
                "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already unpacked once. "
                f"{extra}If you are calling ctx.saved_tensors in backward, make sure to do so only once. Otherwise "
                "please open an issue with details on your use case."
            ) from None

    def recompute(self, key) -> None:
        args, kwargs = self.state.arguments()
        self.refuse_changed_parameters()
        count, different, wrong = 0, [], []

        def pack(x: Tensor) -> Tensor:
            nonlocal count
            x = x.detach() if x.requires_grad else x
            place, count = count, count + 1
            if place >= len(self.saved):
                if not self.completed:  # a backward pass inside forward: what comes later is not asked for yet
                    self.lenient = True
                    return x
                raise CheckpointError(
                    "torch.utils.checkpoint: trying to save more tensors during recomputation than during the original "
                    f"forward pass.\n{_tip()}"
                )
            saved = self.saved[place]()
            if saved is not None:  # else nobody can ask for it
                saved.values[key] = x
                if self.metadata and self.metadata[place] != (x.shape, x.dtype, x.device):
                    different.append(place)
                elif self.checksums:
                    wrong.append(self.checksums[place] != _checksum(x))
                    positions.append(place)
            if self.early_stop and count == len(self.saved):
                raise _Stop
            return x

        positions: list[int] = []
        buffers = [(buffers, dict(buffers)) for buffers, _ in self.buffers]
        grad_mode = torch.is_grad_enabled()
        self.state.enter()
        try:
            torch._C._set_grad_enabled(True)
            for module_buffers, before in buffers:
                module_buffers.update({name: b if b is None else b.clone() for name, b in before.items()})
            _push_hooks(pack, _identity)
            try:
                if torch.compiler.is_compiling():  # compiled autograd: the segment ran in eager, and so it shall here
                    torch._disable_dynamo(self.run)(args, kwargs)
                else:
                    self.run(args, kwargs)
            except _Stop:
                pass
            finally:
                _pop_hooks()
            self.compare(key, count, different)
        except BaseException:
            for reference in self.saved:
                if (saved := reference()) is not None:
                    saved.values.pop(key, None)
            raise
        finally:
            for module_buffers, before in buffers:
                module_buffers.update(before)
            torch._C._set_grad_enabled(grad_mode)
            self.state.exit()
        self.done.add(key)
        self.keep_versions()
        if wrong:
            self.report_later(torch.stack([flag.to(wrong[0].device) for flag in wrong]), positions, key)

    def run(self, args, kwargs) -> None:
        if self.recompute_context is None and self.device_context is None:
            self.function(*args, **kwargs)
        else:
            with self.recompute_context or _NOTHING, self.device_context or _NOTHING:
                self.function(*args, **kwargs)

    # -- checks

    def refuse_changed_parameters(self) -> None:
        for reference, version in self.watched.values():
            parameter = reference()
            if parameter is not None and parameter._version != version:
                raise CheckpointError(
                    f"ckptkern.checkpoint: {_name_of(parameter, self.modules)} of shape {tuple(parameter.shape)} was "
                    f"changed in place between forward and backward of {_describe(self.function)}: it is at version "
                    f"{parameter._version}, forward saw version {version}. Recomputing would give the gradients of "
                    "another function. Run backward before the optimizer's step, or the segment again."
                )

    def keep_versions(self) -> None:
        """A recompute that changes a parameter as forward did (a clamp) is no error in the next one."""
        for key, (reference, version) in self.watched.items():
            parameter = reference()
            if parameter is not None and parameter._version != version:
                self.watched[key] = reference, parameter._version

    def compare(self, key, count: int, different: list[int]) -> None:
        if self.lenient:
            return
        if count != len(self.saved):
            raise CheckpointError(
                "torch.utils.checkpoint: A different number of tensors was saved during the original forward and "
                f"recomputation.\nNumber of tensors saved during forward: {len(self.saved)}\nNumber of tensors saved "
                f"during recomputation: {count}.\n{_tip()}"
            )
        if different:
            lines = []
            for place in different:
                names = ("shape", "dtype", "device")
                before = dict(zip(names, self.metadata[place], strict=True))
                x = self.saved[place]().values[key]
                after = {name: getattr(x, name) for name in names}
                lines.append(f"tensor at position {place}:\nsaved metadata: {before}\nrecomputed metadata: {after}\n")
            raise CheckpointError(
                "torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than "
                f"during the forward pass.\n{''.join(lines)}.\n{_tip()}"
            )

    def report_later(self, wrong: Tensor, positions: list[int], key) -> None:
        """Reads the flags on the device once, at the end of the backward pass."""

        def read() -> None:
            flags = wrong.tolist()
            if any(flags):
                place = positions[flags.index(True)]
                shape, dtype, device = self.metadata[place]
                raise CheckpointError(
                    f"ckptkern.checkpoint: {_describe(self.function)} recomputed other values than forward had: the "
                    f"first tensor that differs is saved tensor {place} of {len(self.saved)}, shape {tuple(shape)}, "
                    f"{dtype}, on {device}; {sum(flags)} of {len(flags)} differ."
                )

        if torch._C._current_graph_task_id() == -1:
            read()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(read)


def _unpack(saved: _Saved) -> Tensor:
    group = torch._C._get_graph_exec_group()  # backward passes of one group share a recompute
    key = torch._C._current_graph_task_id() if group is None else group
    if (value := saved.values.pop(key, None)) is not None:
        return value
    segment = saved.segment
    try:
        return segment.unpack(saved, key)
    except CheckpointError as error:
        if segment.on_error is not None:
            segment.on_error(error)  # raises, with the operators of both runs
        raise


def _identity(x: Tensor) -> Tensor:
    return x


class _Nothing:
    """contextlib.nullcontext, which may be entered again and again."""

    def __enter__(self):
        return None

    def __exit__(self, *_):
        return None


_NOTHING = _Nothing()


def _device_context():
    """The innermost `with torch.device(...)` around this call: recompute puts its tensors there too."""
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return modes[-1] if modes else None


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _walk(child)


def _modules_of(function) -> Iterator[nn.Module]:
    """The modules that a function is, is bound to, or closes over, with their children."""
    if isinstance(function, nn.Module):
        yield from _walk(function)
    elif isinstance(function, types.MethodType):
        yield from _modules_of(function.__self__)
    elif isinstance(function, functools.partial):
        for part in (function.func, *function.args, *function.keywords.values()):
            yield from _modules_of(part)
    elif isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            for part in value if type(value) in (list, tuple) else (value,):
                if isinstance(part, nn.Module):
                    yield from _walk(part)


def _versions(buffers: dict[str, Tensor | None]) -> list[int]:
    """batch_norm bumps no version of its running statistics; its counter's version tells for the whole module."""
    return [b._version for b in buffers.values() if b is not None and not b.is_inference()]


def _describe(function) -> str:
    if isinstance(function, nn.Module):
        return f"the segment {type(function).__name__}"
    if isinstance(function, functools.partial):
        return _describe(function.func)
    return f"the segment {getattr(function, '__qualname__', type(function).__name__)}"


def _name_of(parameter: Tensor, modules: list[nn.Module]) -> str:
    """Looked for only when there is an error to write."""
    for module in modules:
        for name, candidate in module.named_parameters():
            if candidate is parameter:
                return f"the parameter {name!r}"
    return "a parameter"


def _tip() -> str:
    return getattr(torch_checkpoint, "_debug_tip_msg", "Tip: pass debug=True to see the operators of both runs.")


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def _checksum(x: Tensor) -> Tensor:
    """int64 scalar on x's device: sum of (element's bits + 1) * (2 place + 1) modulo 2**64, without a host read.

    Any change of one element changes it, for odd factors are invertible; so do almost all others.
    """
    if x.layout != torch.strided or type(x) not in (Tensor, Parameter):
        return torch.zeros((), dtype=torch.int64, device=x.device)  # subclasses keep their bits to themselves
    x = x.detach()
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.resolve_neg()
    flat = x.contiguous().view(-1).view(_BITS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, flat.numel(), _hash_chunk):
        bits = flat[start : start + _hash_chunk].long() + 1
        total += (bits * torch.arange(2 * start + 1, 2 * (start + bits.numel()), 2, device=x.device)).sum()
    return total


def checkpoint(
    function: Callable,
    *args,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs,
):
    """function(*args, **kwargs), keeping its arguments and rebuilding everything else in backward.

    A drop-in for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``. Arguments may be nested in tuples,
    named tuples, lists and dicts; anything may be returned. Kept from forward to backward: the tensors among the
    arguments (as autograd's saved tensors: saved-tensor hooks around the call see them, and a change in place is an
    error), 5 KiB of random state per device, and the precision settings.

    preserve_rng_state: recompute draws the same random numbers, on the CPU and every device that the arguments live on.
    context_fn: returns the context managers of forward and recompute; torch's `create_selective_checkpoint_contexts`
    works. determinism_check: "default" compares shapes, dtypes and devices of what is recomputed, "none" nothing, and
    "values" also 64-bit checksums of every saved tensor; the device is read once at the end of backward. debug: errors
    show the operators of both runs. early_stop: end the recompute at the last tensor that backward needs.
    torch's `set_checkpoint_early_stop`, `set_checkpoint_debug_enabled` and `GraphExecGroup` apply here too.

    A parameter that was changed in place between forward and backward is an error that names it. Buffers that the
    modules in `function` change in forward (running statistics) are not changed again. Inside, ckptkern's own layers
    run at recompute="none". Under torch.compile this is torch.utils.checkpoint.

    Raises ValueError for use_reentrant=True and unknown checks, ``torch.utils.checkpoint.CheckpointError`` where the
    recompute differs.
    """
    if use_reentrant:
        raise ValueError(
            "ckptkern.checkpoint: use_reentrant=True is not supported. Leave it out: this is the non-reentrant variant, "
            "which needs no input that requires a gradient and works with torch.autograd.grad."
        )
    if determinism_check not in DETERMINISM_CHECKS:
        raise ValueError(f"determinism_check should be one of {list(DETERMINISM_CHECKS)}, but got {determinism_check}")
    if torch.compiler.is_compiling():  # Dynamo traces no saved-tensor hooks, and knows torch's checkpoint
        if determinism_check == "values":
            raise ValueError("ckptkern.checkpoint: determinism_check='values' is not supported under torch.compile")
        if context_fn is not noop_context_fn:
            kwargs["context_fn"] = context_fn  # Dynamo does not take the default here
        return torch_checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state,
            determinism_check=determinism_check, debug=debug, early_stop=early_stop, **kwargs,
        )  # fmt: skip
    return _checkpoint(function, args, kwargs, preserve_rng_state, context_fn, determinism_check, debug, early_stop)


def _checkpoint(function, args, kwargs, preserve_rng_state, context_fn, check, debug, early_stop):
    if check == "values" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "ckptkern.checkpoint: determinism_check='values' reads the device at the end of backward, which a CUDA "
            "graph capture does not allow"
        )
    on_error = None
    if debug if (wanted := torch_checkpoint._checkpoint_debug_enabled) is None else wanted:
        if context_fn is not noop_context_fn:
            raise ValueError("debug=True is incompatible with non-default context_fn")
        context_fn, on_error = torch_checkpoint._get_debug_context_and_cb()
    contexts = None if context_fn is noop_context_fn else context_fn()
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if (stop := torch_checkpoint._enable_checkpoint_early_stop) is not None:
        early_stop = stop
    segment = Segment(function, args, kwargs, preserve_rng_state, contexts, check, early_stop, on_error)
    _push_hooks(segment.pack, _unpack)
    try:
        if contexts is None:
            result = function(*args, **kwargs)
        else:
            returned = False
            with contexts[0]:
                result = function(*args, **kwargs)
                returned = True
            if not returned:
                raise RuntimeError(
                    "torch.utils.checkpoint: the forward context provided by context_fn suppressed an exception raised "
                    "during the checkpointed forward. This is not supported because checkpoint cannot return a value "
                    "for a failed forward."
                )
    finally:
        _pop_hooks()
    segment.complete()
    return result


def checkpointed(function: Callable | None = None, /, **options):
    """`checkpoint` as a decorator, of functions and methods: ``@checkpointed`` or ``@checkpointed(debug=True)``."""
    if function is None:
        return functools.partial(checkpointed, **options)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return checkpoint(function, *args, **options, **kwargs)

    return call
