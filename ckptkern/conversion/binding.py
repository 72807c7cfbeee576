"""Replaces a module's forward by the fused call, or by the original forward if the guard sees a change.

`bound` lists all that convert set in a model, and `revert` undoes it.

Hooks: some last for one call of the model, such as those of peft's `adapter_names`, and are gone when backward recomputes; the
recompute runs with the hooks of the forward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Collection
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._pytree import tree_unflatten
from torch.utils.checkpoint import noop_context_fn

from .. import ops
from ..errors import DeviceError, DtypeError, ShapeError
from ..nn.unmodified import dense, untouched
from ..ops.attention.core import in_context_parallel
from ..ops.dispatch.choices import Bytes, autocast_dtype, choose_workspace, in_region
from ..ops.dispatch.shard import ACTIVE, refuse_shard, whole_rows
from ..segments.checkpoint import checkpoint
from ..segments.decisions import decides, saved_decisions
from ..segments.parts import Parts
from ..segments.recorded import class_forward, is_traced, traced_call
from ..segments.unread import Unread, when_read
from ..state.modules import HOOKS
from ..storage import Store
from . import masks
from .alike import differing, same_inside
from .arguments import arguments_getter, live_attributes, named, values_of
from .calls import Form, pattern_of, regardless_of_precision
from .computed import Computed, Inputs, conditions, templates
from .guard import Watch, reads_of
from .protection import restorer_of, unmoved
from .quantized import read_packed
from .reading import Argument, Probability, Reading
from .report import AGAIN, RAN, warn_of, warn_once
from .sharding import holds_sharded, set_class
from .trace import Call, leaves_of, mapped, recomputed, tensors_in

ORIGINAL_CLASS = "_ckptkern_class"  # attribute with the class of a module before its drop-in replacement
OF_DROP_IN = (ORIGINAL_CLASS, "recompute", "workspace")


def _with_hooks(module: nn.Module, held: list[tuple[dict, dict]], run: Callable, *args, **kwargs):
    """Calls `run` with earlier hooks, and with the weights that bitsandbytes parametrizes read in 4 bits. held: each dict of
    hooks, with its earlier contents."""
    changed = [(own, was, dict(own)) for own, was in held if own != was]
    try:
        for own, was, _ in changed:
            own.clear()
            own.update(was)
        with read_packed(module):
            return run(*args, **kwargs)
    finally:
        for own, _, now in changed:
            own.clear()
            own.update(now)


def _in_parts(module: nn.Module, parts: Parts, workspace: int, later: bool, *args, **kwargs):
    return parts(module, workspace, args, kwargs, later)


WITH_WORKSPACE = frozenset(
    name for name, op in vars(ops).items() if inspect.isfunction(op) and "workspace" in inspect.signature(op).parameters
)
ATTENDING = ("transformer_layer", "attention_block", "latent_attention_block")  # ops
TOKEN_WISE = ("mlp_block", "linear_stack", "linear_act")
UNSEEN = object()
Why = Callable[[], str]  # says why a call does not run as planned
LEFT_EMPTY = "a converted layer does not fill a cache of keys and values in training. Pass use_cache=False"
FILLED = "its cache of keys and values is not empty. Pass use_cache=False in training"
REMEMBERED = 64  # patterns stored for a module; numbers among its arguments may differ in each call


def mode_of(op: str, activation: str | None, mode: str) -> str:
    """Returns an op's mode in a model at `mode`. "selective" saves attention's result and the bits of a relu; an MLP then
    runs at "full", because its own "selective" saves its widest tensors."""
    if mode != "selective" or op in ATTENDING:
        return mode
    return mode if (op, activation) == ("linear_act", "relu") else "full"


class Segment:
    """Runs a fused op in place of a forward, as `reading` says. template: the op's arguments; x: the index of the argument
    that is its input; caches: the arguments that collect keys and values, which a fused call leaves empty."""

    def __init__(self, module: nn.Module, reading: Reading, caches: Collection[int] = ()):
        self.module, self.reading, self.caches = module, reading, caches
        self.op = reading.op
        self.template, self.x = template, x = reading.arguments, reading.x
        self.router = module.get_submodule(reading.logits_of) if reading.logits_of else None
        self.attends = self.op in ATTENDING
        self.arguments = arguments_getter(module, template)
        self.inputs = [x, *(argument.index for argument in named(template, "key_value", "top_k_weights"))]
        indices = {argument.index for argument in templates(template, Argument)}
        self.conditions, self.computes = conditions(template), any(templates(template, Computed))
        # of two masks of an attention, the first may be trained
        masks = [value if type(value) is tuple else (value,) for value in values_of(template, "attn_mask")]
        self.biases = [first.index for first, *_ in masks if isinstance(first, Argument)]
        self.excludes = any(values_of(template, "mask_is_exclusion"))
        indices |= {i for _, *second in masks for i in conditions(second)}
        self.constants = sorted(indices.difference(self.inputs, self.biases))  # the op computes no gradient of these
        self.routes = any(values_of(template, "router_weight"))  # the op returns logits, too, and its original decides

    def op_arguments(self, flat: list) -> dict:
        """Returns the op's arguments in a call with these values."""
        return self.arguments(Inputs(flat, self.module.training, whole_rows(flat[self.x]), flat[self.x]))

    @property
    def unread(self) -> bool:
        """Returns whether the forward returns probabilities, for which placeholders stand."""
        return self.reading.result is not None and Unread in self.reading.result[1]

    def y(self, flat: list, mode: str, workspace: Bytes = None) -> Tensor:
        """Returns the op's result in a call with these values."""
        arguments = self.op_arguments(flat)
        if workspace is not None and self.op in WITH_WORKSPACE:
            arguments["workspace"] = workspace
        y = getattr(ops, self.op)(
            flat[self.x], **arguments, recompute=mode_of(self.op, self.template.get("activation"), mode)
        )
        if self.routes:
            y, logits = y
            for hook in tuple(self.router._forward_hooks.values()) if self.router is not None else ():
                hook(self.router, (), (logits,))  # transformers collects them for an auxiliary loss
        return y

    def __call__(self, flat: list, mode: str, workspace: Bytes, forward: Callable[[], object] | None = None):
        """Returns what the module's forward returns. forward: the original forward, for results that are computed when read."""
        return self.returned(self.y(flat, mode, workspace), flat, forward)

    def returned(self, y: Tensor, flat: list, forward: Callable[[], object] | None = None):
        if self.reading.result is None:
            return y
        spec, leaves, at = self.reading.result
        original = None if forward is None or not self.unread else when_read(forward, self.module, flat)
        results = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Argument):
                results.append(flat[leaf.index])
            elif leaf is Unread and original is not None:  # without a forward there is no placeholder
                results.append(Unread(original, i, y))
            else:
                results.append(y if i == at else None)
        return tree_unflatten(results, spec)


class Forward:
    """Replaces a module's `forward`.

    It is an object, not a function or a method, so that deepcopy and pickle follow it. recompute: the mode, or one for each
    sublayer of a transformer_layer. workspace: its op's, if it has one. store: where saved tensors go; a copy of the module has
    none. calls: the number of calls with gradients that ran fused, as an activation checkpoint, and in training as the original
    forward, without those under torch.compile. name: its row's.
    """

    differs = False  # the last call did not run as the row says
    is_token_wise = False
    is_region = True  # it bounds its own memory: a layer around it that runs in parts calls it as a whole
    workspace: Bytes = None
    store: Store | None = None
    group: tuple[Any, int] | None = None  # (a Group, its place in it)

    def __init__(self, module: nn.Module, recompute: str | tuple[str, str]):
        self.module, self.recompute = module, recompute
        self.name = type(module).__name__
        self.calls = dict.fromkeys(RAN, 0)
        self.previous: Callable | None = module.__dict__.get("forward")

    def __getstate__(self) -> dict:
        return self.__dict__ | {"store": None}

    def __setstate__(self, state: dict) -> None:
        """Restores the object, and registers the attention implementation, which another process may not know yet."""
        self.__dict__.update(state)
        if "transformers.masking_utils" in sys.modules:
            masks.register()

    def __call__(self, *args, **kwargs):
        if is_traced() and self.is_region:
            return traced_call(self.module, self.traced, args, kwargs, "tokens" if self.is_token_wise else "nothing")
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
        """Restores the forward that the module had."""
        del self.module.forward
        if self.previous is not None:
            self.module.forward = self.previous

    __signature__ = property(masks.signature_of)

    def original(self, *args, **kwargs):
        refuse_shard(f"{type(self.module).__name__} was called with other arguments than convert checked")
        return class_forward(self.module, args, kwargs)

    def unfused(self, why: Why, args: tuple, kwargs: dict):
        """Runs the original forward, and counts a training call."""
        if torch.is_grad_enabled() and self.module.training and not is_compiling():
            self.count("original", why)
        return self.original(*args, **kwargs)

    def count(self, ran: str, why: Why | None = None) -> None:
        """Counts a call. why: the cause and the remedy of a call that does not run as its row says; the first such call
        warns."""
        self.calls[ran] += 1
        if why is not None and not self.differs:
            warn_of(self.name, ran, type(self.module).__name__, why())
        self.differs = why is not None

    def may_leave_empty(self, caches: list) -> bool:
        """Returns whether this is a training step with empty caches, which then stay empty, as under any activation checkpoint.
        Warns once.

        A call without gradients is excluded: a model in training mode may generate, and reads its caches.
        """
        if not (torch.is_grad_enabled() and self.module.training) or any(cache.get_seq_length() for cache in caches):
            return False
        warn_once("cache", LEFT_EMPTY, 4)
        return True

    def checkpointed(
        self,
        args: tuple,
        kwargs: dict,
        context_fn: Callable = noop_context_fn,
        why: Why | None = None,
    ):
        """Runs the original forward as an activation checkpoint. Caches stay empty, because a recompute would fill them
        twice."""
        caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
        if caches:
            if not self.may_leave_empty(caches):
                return self.unfused(lambda: FILLED, args, kwargs)
            args, kwargs = without_caches((args, kwargs))
        if is_compiling():  # Dynamo makes no bound method of a converted module
            run: Callable = functools.partial(type(self.module).forward, self.module)
        else:
            self.count("checkpointed", why)
            run = self.recomputed(args, kwargs)
            hooks = [getattr(m, name) for m in self.module.modules() if m is not self.module for name in HOOKS]
            if any(hooks):  # the recompute runs with the present hooks
                run = functools.partial(MethodType(_with_hooks, self.module), [(own, dict(own)) for own in hooks], run)
        return checkpoint(run, *args, context_fn=context_fn, **kwargs)

    def traced(self, *args, **kwargs):
        """Runs on fake tensors."""
        return class_forward(self.module, args, kwargs)

    def recomputed(self, args: tuple, kwargs: dict) -> Callable:
        """Returns the function that an activation checkpoint of this call runs."""
        return MethodType(type(self.module).forward, self.module)


class Fused(Forward):
    """Runs the fused op for arguments of a checked pattern, and the forward of the module's class for others.

    If the inside is not as it was checked (LoRA, a hook, a quantized weight), the class's forward runs as an activation
    checkpoint, which saves its inputs alone.
    """

    def __init__(self, form: Form, segments: dict[tuple, Segment | None], recompute: str):
        super().__init__(form.module, recompute)
        self.form, self.segments = form, segments
        self.watch_anew()

    @property
    def ops(self) -> list[Segment]:
        """Returns what runs in calls of checked patterns."""
        return [segment for segment in self.segments.values() if segment is not None]

    def watch_anew(self) -> None:
        """Takes the present inside as the checked one."""
        live = live_attributes(self.module, [segment.template for segment in self.ops])
        self.watch = Watch(
            self.module, self.form.reads, live, {segment.reading.logits_of for segment in self.ops} - {""}
        )

    def segment_of(self, pattern: tuple) -> Segment | None:
        segment = self.segments.get(pattern, UNSEEN)
        if segment is UNSEEN:
            segment = self.segments.get(regardless_of_precision(pattern))
            if not is_compiling() and len(self.segments) < REMEMBERED:
                self.segments[pattern] = segment
        return segment

    def run(self, *args, **kwargs):
        # training, also without gradients: a reentrant checkpoint samples in such a forward what its recompute samples again;
        # and a call on a shard or a part of a sequence, which has no original
        several = ACTIVE.shard is not None or ACTIVE.context is not None
        trains = torch.is_grad_enabled() or self.module.training or several
        # torch.compile fuses torch's ops itself, torch.jit.trace stores them, and forward-mode AD differentiates them
        wants_torchs = is_compiling() or torch.jit.is_tracing() or forward_ad._current_level >= 0
        if not trains and wants_torchs:
            return self.original(*args, **kwargs)
        flat = []
        takes = self.form.takes(kwargs)
        segment = self.segment_of(pattern_of(self.form.counting((args, kwargs)), flat)) if takes else None
        if segment is None:
            return self.unfused(lambda: self.form.difference((args, kwargs)), args, kwargs)
        if segment.caches and not self.may_leave_empty([flat[i] for i in segment.caches]):
            return self.unfused(lambda: FILLED, args, kwargs)
        if (why := self.why_changed(segment, flat)) is not None:
            refuse_shard(f"the inside of {type(self.module).__name__} has changed since it was converted")
            if not trains:
                return self.original(*args, **kwargs)
            if is_compiling():
                self.watch.warn(self.name)
            context_fn = saved_decisions if segment.routes else noop_context_fn
            return self.checkpointed(args, kwargs, context_fn, why)
        if is_compiling():
            return segment(flat, self.recompute, self.workspace)
        try:
            y = segment(flat, self.recompute, self.workspace, functools.partial(self.original, *args, **kwargs))
        except (ShapeError, DtypeError) as refusal:  # the module treats these arguments in another way, or refuses them
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

    @property
    def is_token_wise(self) -> bool:
        # a recompute of a slice would sample another dropout mask
        return all(
            segment.op in TOKEN_WISE and not any(templates(segment.template, Probability)) for segment in self.ops
        )

    def traced(self, *args, **kwargs):
        flat = []
        pattern_of(self.form.counting((args, kwargs)), flat)
        segment = self.ops[0]
        if segment.op in ("moe_block", "moe_mlp"):  # which read the router's choice
            return segment.returned(torch.empty_like(flat[segment.x]), flat)
        return segment(flat, "none", None)

    def why_changed(self, segment: Segment, flat: list) -> Why | None:
        """Returns a function that says why the original runs as an activation checkpoint; None if the op runs."""
        if segment.attends and in_context_parallel():
            return lambda: "torch's context_parallel splits its attention. Use ckptkern.parallel.ContextParallel"
        if any(requires_grad(flat[i]) for i in segment.constants):
            return lambda: (
                f"an argument requires a gradient, which {segment.op} does not compute. Detach it, or pass exclude="
            )
        if (apart := segment.reading.apart) and autocast_dtype(flat[segment.x]) is not None:
            return lambda: (
                f"its forward keeps {apart} out of autocast, where a fused op would round. Train without autocast"
            )
        compiling = is_compiling()
        if (compiling and segment.unread) or not self.watch.unchanged(not compiling):  # a graph takes no placeholders
            return self.watch.difference
        return None


def forward_of(module: nn.Module) -> Forward | None:
    """Returns the Forward that convert set in the module, if it did."""
    own = module.__dict__.get("forward")
    return own if isinstance(own, Forward) else None


def is_cache(value) -> bool:
    """Returns whether the value collects keys and values, as transformers' caches do."""
    return hasattr(value, "get_seq_length")


def without_caches(call: Call) -> Call:
    """Returns the call with None in place of caches. An argument without caches stays the same object: a layer may append to
    a list."""

    def emptied(value):
        leaves = leaves_of(value)
        return recomputed(value, (None if is_cache(v) else v for v in leaves)) if any(map(is_cache, leaves)) else value

    args, kwargs = call
    return tuple(map(emptied, args)), {name: emptied(value) for name, value in kwargs.items()}


class General(Forward):
    """Runs the class's forward as an activation checkpoint, or unchanged at recompute="none". It saves forward's decisions if
    there are any, or if that cannot be tested, and runs in parts if its inside can be watched."""

    parts: Parts | None = None
    how = ""  # the forward runs, if in parts
    watches: list[Watch]

    def __init__(self, module: nn.Module, recompute: str, call: Call | None = None):
        super().__init__(module, recompute)
        self.context_fn = saved_decisions
        if call is None or holds_sharded(module):  # a forward without a backward would leave fully_shard's state open
            return
        args, kwargs = without_caches(mapped(lambda tensor: tensor, call))  # forward may empty a list that it gets
        # a forward may raise anything in training
        with contextlib.suppress(Exception), unmoved(module), torch.no_grad():
            module.train()
            if not decides(module.forward, *args, **kwargs):
                self.context_fn = noop_context_fn
            # and attributes that other calls may read
            whole = dict.fromkeys(path for path, _ in module.named_modules())
            self.watches = [Watch(module, reads) for reads in (reads_of(module, (args, kwargs)), whole)]
            self.parts = Parts()
            if any(restorer_of(value) for m in module.modules() for value in vars(m).values()):
                self.parts.is_whole, self.parts.why = True, "it holds a generator of random numbers"

    def run(self, *args, **kwargs):
        if not torch.is_grad_enabled() or self.recompute == "none":
            return self.original(*args, **kwargs)
        return self.checkpointed(args, kwargs, context_fn=self.context_fn)

    def share(self, name: str, others: list[tuple[str, General]]) -> None:
        """Takes the plans of one of `others` whose module is like this one; otherwise adds this one to them."""
        if self.parts is None:
            return
        for other_name, other in others:
            with contextlib.suppress(Exception):  # of objects in modules that do not compare
                if (
                    other.parts
                    and same_inside(name, self.module, other_name, other.module)
                    and kinds_inside(self) == kinds_inside(other)
                ):
                    other.parts.share(differing(self.module, other.module))
                    self.parts = other.parts
                    return
        others.append((name, self))

    def recomputed(self, args: tuple, kwargs: dict) -> Callable:
        whole, x = super().recomputed(args, kwargs), next(iter(tensors_in((args, kwargs))), None)
        if self.parts is None or x is None:
            return whole
        workspace = choose_workspace("convert", self.workspace, x)
        hooks = nn.modules.module  # of all modules; a recompute does as forward, whichever there are then
        if (
            self.parts.fits(workspace, args, kwargs)
            or hooks._global_forward_hooks
            or hooks._global_forward_pre_hooks
            or not all(watch.unchanged() for watch in self.watches)
        ):
            return whole
        # a reentrant checkpoint recomputes in a backward pass: a result that is read later would have no gradient
        later = torch._C._current_graph_task_id() == -1 or in_region()
        return functools.partial(MethodType(_in_parts, self.module), self.parts, workspace, later)


def kinds_inside(forward: Forward) -> list[tuple]:
    """Returns the path and class of the Forward of each converted module inside, and whether it is token-wise."""
    inside = [(path, forward_of(m)) for path, m in forward.module.named_modules() if m is not forward.module]
    return [(path, type(inner), inner.is_token_wise) for path, inner in inside if inner is not None]


class Own(Forward):
    """Runs the forward of a drop-in replacement, which reads its module's own mode. is_composed: the last call ran as a
    checkpoint of its submodules, as `nn.unmodified.composed` notes."""

    is_composed = False

    def run(self, *args, **kwargs):
        if is_compiling() or not torch.is_grad_enabled():
            return class_forward(self.module, args, kwargs)
        self.is_composed = False
        y = class_forward(self.module, args, kwargs)
        self.count("checkpointed" if self.is_composed else "fused", self.why_composed if self.is_composed else None)
        return y

    def why_composed(self) -> str:
        """Returns what inside the module no op supports, or else that its arguments are the cause, with the remedy."""
        for path, m in list(self.module.named_modules())[1:]:
            if not (untouched(m) and dense(m)):
                return f"{path} has a hook, a forward of its own, or a weight that is not a plain tensor. {AGAIN}"
        return f"no op supports its arguments or its submodules. See the limits of ckptkern.nn.{type(self.module).__name__}"


class Runs(Forward):
    """Runs an nn.Sequential in which runs of layers are fused or activation checkpoints. runs: (start, stop, the forward of
    an nn.Sequential of these layers)."""

    def __init__(self, module: nn.Sequential, runs: list[tuple[int, int, Fused | General]], recompute: str):
        super().__init__(module, recompute)
        self.runs, self.layers = runs, tuple(module)

    def run(self, input: Tensor) -> Tensor:
        if tuple(self.module._modules.values()) != self.layers:
            return self.unfused(lambda: f"its layers have changed since the check. {AGAIN}", (input,), {})
        done = 0
        for start, stop, run in self.runs:
            for layer in self.layers[done:start]:
                input = layer(input)
            run.module.training = self.module.training
            input, done = run.module(input), stop
        for layer in self.layers[done:]:
            input = layer(input)
        return input


def requires_grad(value) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


# -- what convert set in a model


def bound(model: nn.Module) -> list[tuple[dict, dict]]:
    """Returns (the attributes of a module or a configuration, the ones that convert set) for each."""
    pairs = [(vars(config), (masks.ATTRIBUTE,)) for _, config in masks.configurations(model) if masks.has_ours(config)]
    for module in model.modules():
        attributes = vars(module)
        names = OF_DROP_IN if ORIGINAL_CLASS in attributes else ()
        if isinstance(attributes.get("forward"), (Forward, masks.Unpacked)):
            names = (*names, "forward")
        pairs.append((attributes, names))
    return [
        (attributes, {name: attributes[name] for name in names if name in attributes}) for attributes, names in pairs
    ]


def check_not_split(op: str, model: nn.Module) -> None:
    """Raises ValueError if ckptkern.parallel has split a block: its forward wraps the one that convert would set."""
    for module in model.modules():
        for name, style in (("shard", "TensorParallel"), ("context", "ContextParallel")):
            if hasattr(module.__dict__.get("forward"), name):
                raise ValueError(f"{op}: the model is already sharded by {style}: convert first, then shard")


def revert(model: nn.Module) -> nn.Module:
    """Undoes convert: restores every original forward. Returns the model.

    Raises ValueError if ckptkern.parallel has split a block.
    """
    check_not_split("revert", model)
    masks.give_back(model)
    for module in model.modules():
        if forward := forward_of(module):
            forward.unbind()
        if ORIGINAL_CLASS in module.__dict__:
            set_class(module, module.__dict__.pop(ORIGINAL_CLASS))
            for name in OF_DROP_IN[1:]:
                module.__dict__.pop(name, None)
    return model
