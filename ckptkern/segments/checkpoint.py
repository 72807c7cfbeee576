"""Activation checkpoints: `checkpoint`, with the signature and behaviour of torch.utils.checkpoint's non-reentrant variant,
whose state for backward is a `Segment`; and `patch_torch`, which makes torch's function run ours."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from types import CellType
from typing import NoReturn

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
    """Returns function(*args, **kwargs), saving its arguments and recomputing everything else in backward.

    A drop-in replacement for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``. Arguments may be nested in
    tuples, lists and dicts. Without a function it returns a decorator. Saved for backward: tensors among the arguments, as
    autograd's saved tensors; 2.5 KiB of random state; precision settings.

    preserve_rng_state: the recompute samples the same random numbers. If False, only ckptkern's dropout and layers do.
    context_fn: returns the context managers of forward and recompute, such as torch's `create_selective_checkpoint_contexts` or
    `ckptkern.saved_decisions`.
    determinism_check: "default" compares shapes, dtypes and devices of recomputed tensors, "values" also 64-bit checksums,
    "none" nothing. debug: errors show the operators of both runs. early_stop: the recompute ends at the last tensor that
    backward needs. respect_saved_tensors_hooks: saved-tensor hooks around the call also see tensors that such contexts hold. A
    policy's MUST_CPU_OFFLOAD recomputes; to offload, return MUST_SAVE under save_on_cpu with
    respect_saved_tensors_hooks=True.

    The recompute sees the state of forward: attributes of reachable modules, variables of the closure, modes, generators, and
    values of buffers up to 64 KiB. Running statistics are updated once. Under torch.compile torch's checkpoint runs; in
    torch.func's transforms nothing is recomputed.

    Raises ValueError for use_reentrant=True; ``torch.utils.checkpoint.CheckpointError`` if the recompute differs, or if a
    parameter, buffer or captured tensor that it reads has been changed in place since. Changes through ``.data`` are not seen.
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


def refuse_value(name: str, call: str, value) -> NoReturn:
    """Raises TypeError for a value in place of a function. call: the intended call."""
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise TypeError(
        f"ckptkern.{name}: expected a function, but found {kind}. Pass the layer itself, which backward calls again: {call}, "
        f"not {name}(layer(x))"
    )


def _decorated(options: dict, function: Callable) -> Callable:
    if not callable(function):
        refuse_value("checkpointed", "checkpointed(layer)(x)", function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return _checkpoint(function, args, kwargs, **options)

    return call


def _checkpoint(
    function: Callable,
    args: tuple,
    kwargs: dict,
    *,
    use_reentrant,
    preserve_rng_state,
    context_fn,
    determinism_check,
    debug,
    early_stop,
    respect_saved_tensors_hooks,
):
    """Implements `checkpoint`, with its keywords."""
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
    """Decorates a function or method with `checkpoint`: ``@checkpointed`` or ``@checkpointed(debug=True)``."""
    decorate = checkpoint(**options)
    return decorate if function is None else decorate(function)


# -- in torch's place
#
# torch's `checkpoint` is a decorator's wrapper, and a cell of its closure holds the undecorated function. A patch puts our
# function into that cell. The wrapper stays the same object, so Dynamo still recognises it, and all references to it run our
# function: modules that imported it by name, partial objects, default arguments. From torch 2.14 on, functions that torch's
# decorator form returns call another function of torch's module by name, which a patch replaces too.

_torchs_decorated = getattr(torch_checkpoint, "_checkpoint_impl", None)  # from 2.14 on: runs decorated functions
_patches: list[Patch] = []  # not yet removed, oldest first


class Patch:
    """The patch that `patch_torch` or `patch_trl` returns. ``remove()``, or the end of a ``with`` block, undoes it once.

    patches: the patches of the same function that are not yet removed, oldest first. restore: undoes them all.
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
    """Makes torch.utils.checkpoint.checkpoint run `ckptkern.checkpoint` for all callers, however imported.

        ckptkern.patch_torch()             # until ckptkern.unpatch_torch()
        with ckptkern.patch_torch():       # for a block
            model(x).sum().backward()

    Callers include torch's `checkpoint_sequential` and `checkpoint_wrapper`, transformers, timm and torchtitan.
    use_reentrant=True runs as False, with a UserWarning once. Patches nest. Under torch.compile torch's checkpoint runs.

    Raises RuntimeError if other code has replaced torch.utils.checkpoint.checkpoint.
    """
    torchs = torch_checkpoint.checkpoint
    for cell in getattr(torchs, "__closure__", None) or ():
        if cell.cell_contents in (_torchs, _in_torchs_place):
            _put(cell, _in_torchs_place, _in_place_of_decorated)
            return Patch(_patches, functools.partial(_put, cell, _torchs, _torchs_decorated))
    raise RuntimeError(
        "ckptkern.patch_torch: expected torch's own function at torch.utils.checkpoint.checkpoint, but found "
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


# __dict__ is not copied: once called, torch's function stores there the function that its decorator runs instead.
@functools.wraps(_torchs, assigned=("__doc__",), updated=())
def _in_torchs_place(function=None, *args, use_reentrant: bool | None = None, **kwargs):
    if function is None and not args and _torchs_decorated is not None:
        return _torchs(use_reentrant=use_reentrant, **kwargs)  # the decorated function runs ours while patched
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
