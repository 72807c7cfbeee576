"""Activation checkpoints: `checkpoint`, with the signature and behaviour of torch.utils.checkpoint's non-reentrant variant.
`Segment` is what a call leaves for backward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from .decisions import COMPILED, LOOKS, saved_decisions, with_hooks
from .reachable import makes_cached
from .segment import Segment

DETERMINISM_CHECKS = ("default", "none", "values")
# The undecorated function: after `patch_torch` the decorated one runs ours.
_torchs = torch._disable_dynamo(inspect.unwrap(torch_checkpoint.checkpoint))


class Options(NamedTuple):
    """The keywords of `checkpoint`."""

    use_reentrant: bool | None
    preserve_rng_state: bool
    context_fn: Callable
    determinism_check: str
    debug: bool
    early_stop: bool
    respect_saved_tensors_hooks: bool | None


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
    options = Options(
        use_reentrant, preserve_rng_state, context_fn, determinism_check, debug, early_stop, respect_saved_tensors_hooks
    )
    if function is None and not args:
        if kwargs:
            raise ValueError(f"Unexpected keyword arguments: {','.join(kwargs)}")
        return functools.partial(_decorated, options)
    return _checkpoint(function, args, kwargs, options)


def refuse_value(name: str, call: str, value: object) -> NoReturn:
    """Raises TypeError for what stands in a function's place. call: how it is meant."""
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise TypeError(
        f"ckptkern.{name}: wanted a function, but got {kind}. Pass the layer itself, which backward calls again: {call} and "
        f"not {name}(layer(x))"
    )


def _decorated(options: Options, function: Callable) -> Callable:
    if not callable(function):
        refuse_value("checkpointed", "checkpointed(layer)(x)", function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return _checkpoint(function, args, kwargs, options)

    return call


def _checkpoint(function: Callable, args: tuple, kwargs: dict[str, Any], options: Options):
    if not callable(function):
        refuse_value("checkpoint", "checkpoint(layer, x)", function)
    context_fn, determinism_check, early_stop = options.context_fn, options.determinism_check, options.early_stop
    if options.use_reentrant:
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
        if LOOKS and options.respect_saved_tensors_hooks is not None:
            kwargs["respect_saved_tensors_hooks"] = options.respect_saved_tensors_hooks
        torchs = torch_checkpoint.checkpoint  # Dynamo knows torch's by this name; it may have been set to ours
        if torchs is checkpoint or not torch.compiler.is_dynamo_compiling():
            torchs = _torchs
        names = ("preserve_rng_state", "determinism_check", "debug", "early_stop")
        return torchs(
            function, *args, use_reentrant=False, **{name: getattr(options, name) for name in names}, **kwargs
        )
    if determinism_check == "values" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "ckptkern.checkpoint: determinism_check='values' reads the device at the end of backward, which a CUDA "
            "graph capture does not allow"
        )
    on_error = None
    if options.debug if (wanted := torch_checkpoint._checkpoint_debug_enabled) is None else wanted:
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
        contexts = with_hooks(contexts, options.respect_saved_tensors_hooks)
    preserves = options.preserve_rng_state
    segment = Segment(function, args, kwargs, preserves, contexts, determinism_check, early_stop, on_error)
    return segment.record(contexts and contexts[0], function, args, kwargs)


def checkpointed(function: Callable | None = None, /, **options):
    """`checkpoint` as a decorator, of functions and methods: ``@checkpointed`` or ``@checkpointed(debug=True)``."""
    decorate = checkpoint(**options)
    return decorate if function is None else decorate(function)
