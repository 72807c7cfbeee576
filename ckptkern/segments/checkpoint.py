"""Activation checkpoints: `checkpoint`, with the signature and behaviour of torch.utils.checkpoint's non-reentrant variant.
`Segment` is what a call leaves for backward. `patch_torch`: torch's function runs ours, for code that already calls it."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from types import CellType
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from .decisions import COMPILED, LOOKS, saved_decisions, with_hooks
from .reachable import makes_cached
from .segment import Segment

DETERMINISM_CHECKS = ("default", "none", "values")
_torchs = inspect.unwrap(torch_checkpoint.checkpoint)  # undecorated: after `patch_torch` the decorated one runs ours
_torchs_uncompiled = torch._disable_dynamo(_torchs)


def checkpoint(
    function: Callable | None = None,
    *args,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs,
):
    """function(*args, **kwargs), saving its arguments and recomputing everything else in backward.

    A drop-in for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``. Arguments may be nested in tuples,
    named tuples, lists and dicts; anything may be returned. Saved from forward to backward: the tensors among the
    arguments (as autograd's saved tensors: saved-tensor hooks around the call see them, and a change in place is an
    error), 2.5 KiB of random state, a little more for each GPU, and the precision settings. Without a function it returns
    a decorator, ``checkpoint(debug=True)(function)``, on every torch; what it makes passes all its arguments to the function.

    preserve_rng_state: recompute samples the same random numbers, on the CPU and every device that the arguments live on. If
    false, only `ckptkern.dropout` and ckptkern's layers do, each mask from 16 bytes that are saved.
    context_fn: returns the context managers of forward and recompute; torch's `create_selective_checkpoint_contexts` works,
    and `ckptkern.saved_decisions` for a router. determinism_check: "default" compares shapes, dtypes and devices of what is
    recomputed, "none" nothing, and "values" also 64-bit checksums of every saved tensor; the device is read once at the end
    of backward. debug: errors show the operators of both runs. early_stop: end the recompute at the last tensor that
    backward needs. respect_saved_tensors_hooks: do saved-tensor hooks around the call (such as save_on_cpu) also see what
    `create_selective_checkpoint_contexts` and `saved_decisions` hold beside the graph? By default they do not, of which torch
    warns from 2.14 on; if true, they do on every torch. Nothing else depends on it: hooks always see the arguments, and a
    region without such contexts holds nothing else. A policy that returns MUST_CPU_OFFLOAD or PREFER_CPU_OFFLOAD recomputes, as
    in every torch so far; to offload, return MUST_SAVE and call under save_on_cpu with respect_saved_tensors_hooks=True.
    torch's `set_checkpoint_early_stop`, `set_checkpoint_debug_enabled` and `GraphExecGroup` apply here too.

    The recompute sees what forward saw: what the modules that it can reach held (parameters, buffers, submodules, numbers,
    `training`, hooks; also under functional_call), the closure's variables, modes, generators, and the values of buffers of
    at most 64 KiB. Afterwards all is as before, and buffers (running statistics) have been updated once. A parameter, buffer
    or captured tensor that was changed in place since is an error if the recompute reads it, as is any parameter of the module
    that `function` is, is bound to or takes as `self`. A change through ``.data`` moves no version counter and is not seen.
    In torch.func's transforms the function runs as it is. Inside a region ckptkern's own layers run at recompute="none". Under
    torch.compile, torch.utils.checkpoint runs.

    Raises ValueError for use_reentrant=True and unknown checks, ``torch.utils.checkpoint.CheckpointError`` if the
    recompute differs.
    """
    options = dict(
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
        respect_saved_tensors_hooks=respect_saved_tensors_hooks,
    )
    if function is None and not args:
        if kwargs:
            raise ValueError(f"Unexpected keyword arguments: {','.join(kwargs)}")
        return functools.partial(_decorated, options)
    return _checkpoint(function, args, kwargs, **options)


def refuse_value(name: str, call: str, value: object) -> NoReturn:
    """Raises TypeError for what stands in a function's place. call: how it is meant."""
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise TypeError(
        f"ckptkern.{name}: wanted a function, but got {kind}. Pass the layer itself, which backward calls again: {call} and "
        f"not {name}(layer(x))"
    )


def _decorated(options: dict[str, Any], function: Callable) -> Callable:
    if not callable(function):
        refuse_value("checkpointed", "checkpointed(layer)(x)", function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return _checkpoint(function, args, kwargs, **options)

    return call


def _checkpoint(
    function: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    use_reentrant,
    preserve_rng_state,
    context_fn,
    determinism_check,
    debug,
    early_stop,
    respect_saved_tensors_hooks,
):
    """`checkpoint`, whose keywords these are."""
    if not callable(function):
        refuse_value("checkpoint", "checkpoint(layer, x)", function)
    if use_reentrant:
        raise ValueError(
            "ckptkern.checkpoint: use_reentrant=True is not supported. Leave it out: this is the non-reentrant variant, "
            "which needs no input that requires a gradient and works with torch.autograd.grad."
        )
    if determinism_check not in DETERMINISM_CHECKS:
        raise ValueError(f"determinism_check should be one of {list(DETERMINISM_CHECKS)}, but got {determinism_check}")
    if torch.compiler.is_compiling():  # Dynamo does not trace saved-tensor hooks but knows torch's checkpoint
        if determinism_check == "values":
            raise ValueError("ckptkern.checkpoint: determinism_check='values' is not supported under torch.compile")
        if context_fn is not noop_context_fn:
            kwargs["context_fn"] = (
                COMPILED if context_fn is saved_decisions else context_fn
            )  # Dynamo does not accept the default here
        if LOOKS and respect_saved_tensors_hooks is not None:
            kwargs["respect_saved_tensors_hooks"] = respect_saved_tensors_hooks
        torchs = torch_checkpoint.checkpoint  # Dynamo knows torch's by this name; it may have been set to ours
        if torchs is checkpoint or not torch.compiler.is_dynamo_compiling():
            torchs = _torchs_uncompiled
        return torchs(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            **kwargs,
        )
    if determinism_check == "values" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
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
    if (
        not torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or makes_cached(function, args, kwargs)
    ):
        return function(*args, **kwargs)
    if (stop := torch_checkpoint._enable_checkpoint_early_stop) is not None:
        early_stop = stop
    if contexts is not None or torch._C._len_torch_dispatch_stack():
        contexts = with_hooks(contexts, respect_saved_tensors_hooks)
    segment = Segment(function, args, kwargs, preserve_rng_state, contexts, determinism_check, early_stop, on_error)
    return segment.record(contexts and contexts[0], function, args, kwargs)


def checkpointed(function: Callable | None = None, /, **options):
    """`checkpoint` as a decorator, of functions and methods: ``@checkpointed`` or ``@checkpointed(debug=True)``."""
    decorate = checkpoint(**options)
    return decorate if function is None else decorate(function)


# -- in torch's place
#
# torch's `checkpoint` is a decorator's wrapper, and a cell of its closure holds the undecorated function. A patch puts ours
# into that cell. The wrapper stays the same object, so Dynamo still recognises it, and everyone who holds it runs ours:
# modules that imported it by name, partial objects, default arguments. What torch's decorator form makes, from 2.14 on,
# calls another function of torch's module by name, which a patch replaces too.

_torchs_decorated = getattr(torch_checkpoint, "_checkpoint_impl", None)  # from 2.14 on: runs decorated functions
_patches: list[Patch] = []  # not yet removed, oldest first


class Patch:
    """Returned by `patch_torch` and `patch_trl`. ``remove()``, or the end of a ``with`` block, undoes the patch; again, it does
    nothing.

    patches: those of the same function that are not yet removed, oldest first. restore: puts back what they replaced.
    """

    def __init__(self, patches: list[Patch], restore: Callable[[], None]):
        self._patches, self._restore = patches, restore
        patches.append(self)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_) -> None:
        self.remove()

    def remove(self) -> None:
        if self in self._patches:
            self._patches.remove(self)
            if not self._patches:
                self._restore()


def patch_torch() -> Patch:
    """From now on torch.utils.checkpoint.checkpoint runs `ckptkern.checkpoint`, for every caller and however imported.

        ckptkern.patch_torch()             # for good, or until ckptkern.unpatch_torch()
        with ckptkern.patch_torch():       # for a block
            model(x).sum().backward()

    Callers include torch's own `checkpoint_sequential` and `checkpoint_wrapper` and libraries such as transformers, timm
    and torchtitan. A region whose forward ran inside the block is ours also if its backward runs outside. Arguments mean
    what they mean to torch, except that use_reentrant=True runs as False, which a UserWarning says once; left out, it is
    False. What torch's decorator form has made, before or inside the block, runs ours inside it. Before torch 2.14, which has
    no such form, it is ours for good. Under torch.compile the graph is torch's. Patches nest: removing the last one restores
    torch's function.

    Raises RuntimeError if somebody else has replaced torch.utils.checkpoint.checkpoint.
    """
    torchs = torch_checkpoint.checkpoint
    for cell in getattr(torchs, "__closure__", None) or ():
        if cell.cell_contents in (_torchs, _in_torchs_place):
            _put(cell, _in_torchs_place, _in_place_of_decorated)
            return Patch(_patches, functools.partial(_put, cell, _torchs, _torchs_decorated))
    raise RuntimeError(
        "ckptkern.patch_torch: wanted torch's own function at torch.utils.checkpoint.checkpoint but got "
        f"{torchs.__module__}.{torchs.__qualname__}"
    )


def _put(cell: CellType, called: Callable, decorated: Callable | None) -> None:
    cell.cell_contents = called
    if _torchs_decorated is not None:
        torch_checkpoint._checkpoint_impl = decorated


def unpatch_torch() -> None:
    """Removes the latest patch; does nothing if there is none."""
    if _patches:
        _patches[-1].remove()


# Not __dict__: once called, torch's function keeps in it what its decorator runs instead, which would then be torch's.
@functools.wraps(_torchs, assigned=("__doc__",), updated=())
def _in_torchs_place(function=None, *args, use_reentrant: bool | None = None, **kwargs):
    if function is None and not args and _torchs_decorated is not None:
        return _torchs(use_reentrant=use_reentrant, **kwargs)  # what it makes runs ours while a patch is there
    if use_reentrant:
        _say_once()
    return checkpoint(function, *args, **kwargs)


def _in_place_of_decorated(function, args, kwargs, *, use_reentrant: bool | None = None, **options):
    if torch.compiler.is_compiling():
        return _torchs_decorated(function, args, kwargs, use_reentrant=bool(use_reentrant), **options)
    if use_reentrant:
        _say_once()
    return _checkpoint(function, args, kwargs, use_reentrant=False, **options)


@functools.cache
def _say_once() -> None:
    warnings.warn(
        "ckptkern.patch_torch: use_reentrant=True runs as use_reentrant=False, the only variant of ckptkern.checkpoint",
        stacklevel=5,  # past torch's own frames
    )
