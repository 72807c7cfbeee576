"""Replaces a module's forward by the fused call, or by the original if the guard sees a change."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Collection
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import noop_context_fn

from .. import ops
from ..errors import DeviceError, DtypeError, ShapeError
from ..nn.unmodified import dense, untouched
from ..ops.attention.core import in_context_parallel
from ..ops.dispatch.choices import autocast_dtype
from ..ops.dispatch.shard import ACTIVE, refuse_shard, whole_rows
from ..segments.checkpoint import checkpoint
from ..segments.decisions import saved_decisions
from ..storage import Store
from .arguments import Call, arguments_getter, named, templates, values_of
from .calls import Form, pattern_of, regardless_of_precision
from .computed import computed_of, conditions
from .guard import Watch
from .masks import register
from .reading import Argument
from .recalled import forward_of
from .report import AGAIN, RAN, WARNED, warn_of
from .unread import Probabilities, returned

WITH_WORKSPACE = frozenset(
    name for name, op in vars(ops).items() if inspect.isfunction(op) and "workspace" in inspect.signature(op).parameters
)
ATTENDING = ("transformer_layer", "attention_block", "latent_attention_block")  # ops
UNSEEN = object()
FILLED = "it is given a cache of keys and values that is not empty. Pass use_cache=False in training"
REMEMBERED = 64  # patterns of a module; numbers among its arguments may differ in each call


def mode_of(op: str, activation: str | None, mode: str) -> str:
    """An op's mode in a model at `mode`. What "selective" spares is attention and the bits of a relu: an MLP at "selective"
    would save its widest tensors."""
    if mode != "selective" or op in ATTENDING:
        return mode
    return mode if (op, activation) == ("linear_act", "relu") else "full"


class Segment:
    """A fused op in place of a forward.

    template: its arguments; x: the argument that is its input; result: how the output lies in what forward returns; logits_of:
    the router whose hooks are given an MoE's logits; apart: a function that forward leaves out of autocast, and the op
    would not.
    """

    def __init__(
        self, module: nn.Module, op: str, template: dict[str, Any], x: int, result: tuple | None = None,
        caches: Collection[int] = (), logits_of: str = "", apart: str = "",
    ):  # fmt: skip
        self.apart = apart
        self.logits_of, self.router = logits_of, module.get_submodule(logits_of) if logits_of else None
        self.module, self.op, self.template, self.x, self.result = module, op, template, x, result
        self.attends = op in ATTENDING
        self.arguments = arguments_getter(module, template)
        self.inputs = [x, *(one.index for one in named(template, "key_value", "top_k_weights"))]
        found = {one.index for one in templates(template, Argument)}
        self.caches = list(caches)  # arguments that collect keys and values, which a fused call does not fill
        self.conditions, self.computes = conditions(template), any(computed_of(template))
        # of two masks of an attention, the first may be trained
        masks = [value if type(value) is tuple else (value,) for value in values_of(template, "attn_mask")]
        self.biases = [one.index for one, *_ in masks if isinstance(one, Argument)]
        self.excludes = any(values_of(template, "mask_is_exclusion"))
        found |= {i for _, *second in masks for i in conditions(second)}
        self.constants = sorted(found.difference(self.inputs, self.biases))  # the op forms no gradient of these
        self.routes = any(values_of(template, "router_weight"))  # the op returns logits, too, and its original decides

    def given(self, flat: list[Any]) -> dict[str, Any]:
        """The op's arguments in a call."""
        return self.arguments(Call(flat, self.module.training, whole_rows(flat[self.x]), flat[self.x]))

    @property
    def unread(self) -> bool:
        """Does the forward return probabilities, for which placeholders stand?"""
        return self.result is not None and any(isinstance(one, Probabilities) for one in self.result[1])

    def __call__(
        self, flat: list[Any], mode: str, workspace: int | str | None = None, forward: Callable[[], object] | None = None
    ) -> object:  # fmt: skip
        arguments = self.given(flat)
        if workspace is not None and self.op in WITH_WORKSPACE:
            arguments["workspace"] = workspace
        y = getattr(ops, self.op)(
            flat[self.x], **arguments, recompute=mode_of(self.op, self.template.get("activation"), mode)
        )
        if self.routes:
            y, logits = y
            for hook in tuple(self.router._forward_hooks.values()) if self.router is not None else ():
                hook(self.router, (), (logits,))  # transformers collects them for an auxiliary loss
        return y if self.result is None else returned(y, flat, *self.result, self.module, forward)


class Forward:
    """What convert sets as a module's `forward`.

    It is an object, not a function or a method, so that deepcopy and pickle follow it. recompute: the mode, or one for each
    sublayer of a transformer_layer. workspace: of its op, if it has one. store: where what is saved goes; a copy of the module
    has none. calls: how many calls with gradients ran fused, as an activation checkpoint, and in training as the original
    forward, without those under torch.compile. name: of its row.
    """

    def __init__(self, module: nn.Module, recompute: str | tuple[str, str]):
        self.module, self.recompute = module, recompute
        self.name = type(module).__name__
        self.calls = dict.fromkeys(RAN, 0)
        self.differs = False  # did the last call run otherwise than the row says?
        self.previous: Callable | None = module.__dict__.get("forward")
        self.workspace: int | str | None = None
        self.store: Store | None = None
        self.group: tuple[Any, int] | None = None  # (groups.Group, its place there)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"store": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process the attention implementation that the configuration names may not be known yet."""
        self.__dict__.update(state)
        if "transformers.masking_utils" in sys.modules:
            register()

    def __call__(self, *args, **kwargs):
        if self.group is not None:
            group, place = self.group
            return group.call(self, place, args, kwargs)
        if self.store is None:
            return self.run(*args, **kwargs)
        with self.store:
            return self.run(*args, **kwargs)

    def run(self, *args, **kwargs):
        raise NotImplementedError

    def unbind(self) -> None:
        """Gives its module back the forward that it had."""
        del self.module.forward
        if self.previous is not None:
            self.module.forward = self.previous

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(MethodType(type(self.module).forward, self.module))

    def original(self, *args, **kwargs):
        refuse_shard(f"{type(self.module).__name__} was called with other arguments than convert checked")
        return type(self.module).forward(self.module, *args, **kwargs)

    def unfused(self, why: Callable[[], str], args: tuple, kwargs: dict[str, Any]):
        """The original forward, of which a training call is counted."""
        if torch.is_grad_enabled() and self.module.training and not torch.compiler.is_compiling():
            self.count("original", why)
        return self.original(*args, **kwargs)

    def count(self, ran: str, why: Callable[[], str] | None = None) -> None:
        """Counts a call. why: the cause and the remedy, if it runs otherwise than the row says, of which it warns once."""
        self.calls[ran] += 1
        if why is not None and not self.differs:
            warn_of(self.name, ran, type(self.module).__name__, why())
        self.differs = why is not None

    def may_leave_empty(self, caches: list[Any]) -> bool:
        """Is this a training step, with caches that nothing is in? They stay empty then, as under any checkpointing.

        Not without gradients: a model in training mode may generate, and reads its caches.
        """
        if not (torch.is_grad_enabled() and self.module.training) or any(one.get_seq_length() for one in caches):
            return False
        _warn_of_cache()
        return True

    def checkpointed(
        self, args: tuple, kwargs: dict[str, Any], context_fn: Callable = noop_context_fn, why: Callable[[], str] | None = None
    ):  # fmt: skip
        """The original forward as an activation checkpoint, in which caches stay empty: a recompute would fill them twice."""
        caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
        if caches:
            if not self.may_leave_empty(caches):
                return self.unfused(lambda: FILLED, args, kwargs)
            args, kwargs = without_caches(args, kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(
                MethodType(type(self.module).forward, self.module), *args, context_fn=context_fn, **kwargs
            )
        self.count("checkpointed", why)
        return checkpoint(forward_of(self.module), *args, context_fn=context_fn, **kwargs)


class Fused(Forward):
    """The fused call for arguments of a checked pattern, else the forward of the module's class.

    What is not as it was checked (LoRA or a hook inside, a quantized weight) runs the class's forward as an activation
    checkpoint, which saves its inputs alone.
    """

    def __init__(self, form: Form, segments: dict[tuple, Segment | None], watch: Watch, recompute: str):
        super().__init__(form.module, recompute)
        self.form, self.segments, self.watch = form, segments, watch

    def segment_of(self, pattern: tuple) -> Segment | None:
        segment = self.segments.get(pattern, UNSEEN)
        if segment is UNSEEN:
            segment = self.segments.get(regardless_of_precision(pattern))
            if not torch.compiler.is_compiling() and len(self.segments) < REMEMBERED:
                self.segments[pattern] = segment
        return segment

    def run(self, *args, **kwargs):
        # training, also without gradients: a reentrant checkpoint samples in such a forward what its recompute samples again;
        # and a call on a shard or a part of a sequence, which has no original
        several = ACTIVE.shard is not None or ACTIVE.context is not None
        trains = torch.is_grad_enabled() or self.module.training or several
        if not trains and _wants_torchs_ops():
            return self.original(*args, **kwargs)
        if not self.form.takes(kwargs):
            return self.unfused(lambda: self.form.unknown(kwargs), args, kwargs)
        flat: list[Any] = []
        segment = self.segment_of(pattern_of(self.form.counting(args, kwargs), flat))
        if segment is None:
            return self.unfused(lambda: self.form.difference(args, kwargs), args, kwargs)
        if segment.caches and not self.may_leave_empty([flat[i] for i in segment.caches]):
            return self.unfused(lambda: FILLED, args, kwargs)
        if (
            not self.watch.unchanged(not torch.compiler.is_compiling())
            or (segment.attends and in_context_parallel())
            or (torch.compiler.is_compiling() and segment.unread)  # which takes no placeholders
            or any(requires_grad(flat[i]) for i in segment.constants)
            or (segment.apart and autocast_dtype(flat[segment.x]) is not None)
        ):
            refuse_shard(f"the inside of {type(self.module).__name__} has changed since it was converted")
            if not trains:
                return self.original(*args, **kwargs)
            if torch.compiler.is_compiling():
                self.watch.warn(self.name)
            context_fn = saved_decisions if segment.routes else noop_context_fn
            return self.checkpointed(args, kwargs, context_fn, lambda: self.why_changed(segment, flat))
        if torch.compiler.is_compiling():
            return segment(flat, self.recompute, self.workspace)
        try:
            y = segment(flat, self.recompute, self.workspace, functools.partial(self.original, *args, **kwargs))
        except (ShapeError, DtypeError) as refusal:  # what the module takes in another way than the op, or not at all
            why = str(refusal)
            return self.unfused(lambda: why, args, kwargs)
        except DeviceError as refusal:
            raise DeviceError(
                f"{refusal}. Move the model and its inputs to one device. Replicas of nn.DataParallel share what convert set: "
                "train with torch.nn.parallel.DistributedDataParallel"
            ) from None
        if trains:
            self.count("fused")
        return y

    def why_changed(self, segment: Segment, flat: list[Any]) -> str:
        """Why the original runs as an activation checkpoint."""
        if segment.attends and in_context_parallel():
            return "torch's context_parallel splits its attention. Use ckptkern.parallel.ContextParallel"
        if any(requires_grad(flat[i]) for i in segment.constants):
            return f"an argument requires a gradient, which {segment.op} does not form. Detach it, or pass exclude="
        if segment.apart and autocast_dtype(flat[segment.x]) is not None:
            return f"its forward keeps {segment.apart} out of autocast, where a fused op would round. Train without autocast"
        return self.watch.difference()


def is_cache(value: object) -> bool:
    """Does it collect keys and values, as transformers' caches do?"""
    return hasattr(value, "get_seq_length")


def without_caches(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A call with None in place of caches."""
    return tuple(None if is_cache(v) else v for v in args), {k: None if is_cache(v) else v for k, v in kwargs.items()}


class General(Forward):
    """The class's forward as an activation checkpoint, or as it is at recompute="none". decides: what its forward decides is
    saved (`saved_decisions`), if it decides anything."""

    def __init__(self, module: nn.Module, recompute: str, decides: bool = True):
        super().__init__(module, recompute)
        self.context_fn = saved_decisions if decides else noop_context_fn

    def run(self, *args, **kwargs):
        if not torch.is_grad_enabled() or self.recompute == "none":
            return self.original(*args, **kwargs)
        return self.checkpointed(args, kwargs, context_fn=self.context_fn)


class Own(Forward):
    """The forward of a drop-in replacement, which reads its module's own mode. is_composed: did the last call run as a
    checkpoint of its submodules, which `nn.unmodified.composed` notes?"""

    is_composed = False

    def run(self, *args, **kwargs):
        forward = MethodType(type(self.module).forward, self.module)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self.is_composed = False
        y = forward(*args, **kwargs)
        self.count("checkpointed" if self.is_composed else "fused", self.why_composed if self.is_composed else None)
        return y

    def why_composed(self) -> str:
        """What inside it no op stands for, or that its call is the cause, and the remedy."""
        for path, m in list(self.module.named_modules())[1:]:
            if not (untouched(m) and dense(m)):
                return f"{path} has a hook, a forward of its own, or a weight that is no plain memory. {AGAIN}"
        return (
            f"no op takes its arguments, or what is inside. See the limits of ckptkern.nn.{type(self.module).__name__}"
        )


class Runs(Forward):
    """nn.Sequential, in which runs of layers are fused or activation checkpoints. runs: (start, stop, what runs them), which is
    the forward of an nn.Sequential of these layers."""

    def __init__(self, module: nn.Sequential, runs: list[tuple[int, int, Fused | General]], recompute: str):
        super().__init__(module, recompute)
        self.runs, self.layers = runs, tuple(module)
        for *_, run in runs:
            run.module.forward = run

    def run(self, input: Tensor) -> Tensor:
        if tuple(self.module._modules.values()) != self.layers:
            return self.unfused(lambda: f"its layers are others than those that were checked. {AGAIN}", (input,), {})
        done = 0
        for start, stop, run in self.runs:
            for layer in self.layers[done:start]:
                input = layer(input)
            run.module.training = self.module.training
            input, done = run.module(input), stop
        for layer in self.layers[done:]:
            input = layer(input)
        return input


def _wants_torchs_ops() -> bool:
    """Does torch.compile fuse them itself, or torch.jit.trace store them, or forward-mode AD differentiate them?"""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or forward_ad._current_level >= 0


def requires_grad(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@functools.cache
def _warn_of_cache() -> None:
    warnings.warn(
        "ckptkern.convert: a converted layer does not fill a cache of keys and values in training. Pass use_cache=False",
        stacklevel=4,
    )


def warn_again() -> None:
    """Of what a model did that was converted before."""
    WARNED.clear()
    _warn_of_cache.cache_clear()


_warn_of_cache._dynamo_marked_constant = True
