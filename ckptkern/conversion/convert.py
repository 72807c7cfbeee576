"""convert and revert: fused segments in a model that exists."""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten

from .. import memory
from .. import nn as twins
from ..nn.plain import runs_class_forward, untouched
from ..ops._checks import check_level
from ..subclasses import foreign
from .binding import Forward, Fused, General, Runs, Segment, Watch, pattern_of, regardless_of_precision, templates
from .grammar import Reading, read
from .leaves import Probability
from .proof import TOLERANCE, difference, random_parameters, results, unmoved, varied, wide_arguments
from .reading import Argument
from .report import Conversion, Row
from .trace import Unreadable, is_leaf, leaves_of, trace

TWINS = {
    nn.MultiheadAttention: twins.MultiheadAttention,
    nn.TransformerEncoderLayer: twins.TransformerEncoderLayer,
    nn.TransformerDecoderLayer: twins.TransformerDecoderLayer,
}
TWINNED = "_ckptkern_class"  # where a module that became its twin keeps the class that it had
PATTERNS = 4  # kinds of arguments that are proven of one module

Which = str | type | Callable[[str, nn.Module], bool]


# -- the probe


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(map(_detached, value))
    return {name: _detached(one) for name, one in value.items()} if type(value) is dict else value


def capture(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[nn.Module, dict[Any, tuple]]:
    """The arguments (args, kwargs) of each pattern with which the model's call called each submodule."""
    calls: dict[nn.Module, dict[Any, tuple]] = {}

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        own = calls.setdefault(module, {})
        pattern = regardless_of_precision(pattern_of(args, kwargs, []))
        if len(own) < PATTERNS and pattern not in own:
            own[pattern] = _detached((args, kwargs))

    hooks = [m.register_forward_pre_hook(before, with_kwargs=True) for m in model.modules() if not is_leaf(m)]
    try:
        with unmoved(model), torch.no_grad():
            model.eval()
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


# -- one module


def check_candidate(module: nn.Module) -> None:
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
        raise Unreadable("it contains a BatchNorm, whose buffers a second forward would move")
    inner = list(module.modules())[1:]
    if not (runs_class_forward(module) and all(map(untouched, inner))):
        raise Unreadable("there are hooks inside, or a forward that is not its class's")
    kind = foreign(list(module.parameters()))
    if kind is not None:
        raise Unreadable(f"a parameter is a {kind.__name__}")


def result_of(output: object, arguments: list[Any]) -> tuple[Tensor, tuple | None]:
    """(the one tensor that a forward returns, how it lies in what is returned)."""
    if isinstance(output, Tensor):
        return output, None
    leaves, spec = tree_flatten(output)
    given = {id(value): i for i, value in enumerate(arguments) if isinstance(value, Tensor)}
    leaves = [Argument(given[id(one)]) if id(one) in given else one for one in leaves]
    tensors = [i for i, one in enumerate(leaves) if isinstance(one, Tensor)]
    others = [one for one in leaves if not isinstance(one, (Tensor, Argument, type(None)))]
    if len(tensors) != 1 or others:
        raise Unreadable(
            f"forward returns {len(tensors)} tensors" if len(tensors) != 1 else "forward returns an object"
        )
    at = tensors[0]
    return leaves[at], (spec, [None if i == at else one for i, one in enumerate(leaves)], at)


def attempt(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[Segment, float]:
    """(the segment that was proven for these arguments, its error). Raises Unreadable."""
    if any(t.is_meta for t in module.parameters()):
        raise Unreadable("its parameters are on the meta device, where nothing can be proven")
    with unmoved(module), random_parameters(module):
        args, kwargs = wide_arguments(args, kwargs)
        module.train()  # shows where dropout is
        output, node = trace(module, args, kwargs)
        flat = leaves_of((args, kwargs))
        y, result = result_of(output, flat)
        reading = read(module, node(y))
        module.eval()
        return prove(module, reading, result, args, kwargs)


def prove(module: nn.Module, reading: Reading, result, args: tuple, kwargs: dict[str, Any]) -> tuple[Segment, float]:
    flat = leaves_of((args, kwargs))
    masks = {one.index for one in _arguments_named(reading.arguments, ("attn_mask", "key_padding_mask"))}
    flat = [varied(value) if i in masks else value for i, value in enumerate(flat)]
    x = torch.randn_like(flat[reading.x])
    parameters = [p for p in module.parameters() if p.requires_grad]

    def original(x: Tensor) -> Tensor:
        values = iter([x if i == reading.x else value for i, value in enumerate(flat)])
        args_, kwargs_ = _rebuilt((args, kwargs), values)
        return result_of(type(module).forward(module, *args_, **kwargs_), [])[0]

    theirs, best = results(original, x, parameters), math.inf
    for arguments in reading.candidates():
        segment = Segment(module, reading.op, arguments, reading.x)

        def fused(x: Tensor, segment: Segment = segment) -> Tensor:
            return segment([x if i == reading.x else value for i, value in enumerate(flat)], "full")

        try:
            error = difference(results(fused, x, parameters), theirs)
        except (ValueError, TypeError, RuntimeError) as refusal:
            reason = f"ckptkern.{reading.op} refuses it: {refusal}"
            continue
        if error <= TOLERANCE:
            segment.result = result
            return segment, error
        best = min(best, error)
    raise Unreadable(reason if best == math.inf else f"the numbers of {reading.op} differ by {best:.1e}")


def _arguments_named(template: dict[str, Any], names: tuple[str, ...]) -> Iterator[Argument]:
    for name, value in template.items():
        if isinstance(value, dict):
            yield from _arguments_named(value, names)
        elif name in names and isinstance(value, Argument):
            yield value


def _rebuilt(values: Any, leaves: Iterator[Any]) -> Any:
    """The same nesting with other leaves."""
    if type(values) in (tuple, list):
        return type(values)(_rebuilt(one, leaves) for one in values)
    if type(values) is dict:
        return {name: _rebuilt(one, leaves) for name, one in values.items()}
    return next(leaves)


def mask_variants(module: nn.Module, args: tuple, kwargs: dict[str, Any], x: Tensor) -> Iterator[tuple]:
    """The same call without a mask, with a bool one and with an added one: libraries decide from call to call which they
    hand on."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    places = {name: i for i, name in enumerate(names) if "mask" in name}
    B, S = (x.shape[0], x.shape[1]) if x.dim() == 3 else (1, x.shape[0])
    seen = torch.ones(B, 1, S, S, dtype=torch.bool, device=x.device).tril()
    added = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill(~seen, torch.finfo(x.dtype).min)
    for mask in (None, seen, added):
        for name, i in places.items():
            if i < len(args):
                yield (*args[:i], mask, *args[i + 1 :]), kwargs
            elif name in kwargs or mask is not None:
                yield args, kwargs | {name: mask}


def is_cache(value: object) -> bool:
    """Does it collect keys and values from call to call?"""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def without_caches(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], list[int]]:
    """(args and kwargs with None in place of caches, the places of these)."""
    flat = leaves_of((args, kwargs))
    caches = [i for i, value in enumerate(flat) if is_cache(value)]
    args, kwargs = _rebuilt((args, kwargs), iter([None if i in caches else value for i, value in enumerate(flat)]))
    return args, kwargs | {"use_cache": False} if caches and "use_cache" in kwargs else kwargs, caches


def fuse(module: nn.Module, calls: dict[Any, tuple], recompute: str) -> tuple[Fused, float]:
    """(the module's new forward, the largest error of its proofs). Raises Unreadable if no call of it can be read."""
    check_candidate(module)
    segments, worst = {}, 0.0

    def add(pattern: tuple, args: tuple, kwargs: dict[str, Any]) -> None:
        nonlocal worst
        args, kwargs, caches = without_caches(args, kwargs)
        segments[pattern], error = attempt(module, args, kwargs)
        segments[pattern].caches = caches
        worst = max(worst, error)

    for pattern, call in calls.items():
        try:
            add(pattern, *call)
        except Unreadable as why:
            reason = why
        except Exception as error:  # on random parameters a forward may raise anything
            reason = Unreadable(f"{type(error).__name__} in the probe: {error}")
    if not segments:
        raise reason
    first, segment = next(iter(segments.items()))
    if segment.op in ("attention_block", "transformer_layer"):
        for call in mask_variants(module, *calls[first], leaves_of(calls[first])[segment.x]):
            pattern = regardless_of_precision(pattern_of(*call, []))
            if pattern not in segments:
                with contextlib.suppress(Exception):  # a mask that this module does not take
                    add(pattern, *call)
    live = {(p.path, p.attribute) for s in segments.values() for p in templates(s.template, Probability)}
    return Fused(module, segments, Watch(module, live), recompute), worst


def runs_of(module: nn.Sequential, recompute: str) -> list[tuple[int, int, Fused, float]]:
    """(start, stop, what runs them, error) of the layers that are fused, the longest runs first."""
    layers, found, start = list(module), [], 0
    while start < len(layers):
        stop = next((n for n in range(len(layers), start + 1, -1) if all(map(is_leaf, layers[start:n]))), start)
        while stop > start + 1 and isinstance(layers[start], nn.Linear):
            part = nn.Sequential(*layers[start:stop]).train(module.training)
            with contextlib.suppress(Unreadable):
                found.append((start, stop, *fuse(part, calls_of(layers[start]), recompute)))
                break
            stop -= 1
        start = max(found[-1][1], start + 1) if found else start + 1
    return found


def calls_of(linear: nn.Linear) -> dict[Any, tuple]:
    """Calls that a linear layer takes, of tokens with and without a batch."""
    weight = linear.weight
    if weight.is_meta or not weight.is_floating_point():
        return {}
    shapes = ((3, linear.in_features), (2, 3, linear.in_features))
    calls = [((torch.randn(shape, dtype=weight.dtype, device=weight.device),), {}) for shape in shapes]
    return {regardless_of_precision(pattern_of(*call, [])): call for call in calls}


def kept_bytes(module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any], x: int) -> int:
    """What one training call keeps, besides parameters and the arguments that it only reads."""
    flat = leaves_of((args, kwargs))
    flat = [v.detach().requires_grad_() if i == x else v for i, v in enumerate(flat)]
    shared = [v for i, v in enumerate(flat) if isinstance(v, Tensor) and i != x]
    args, kwargs = _rebuilt((args, kwargs), iter(flat))
    with unmoved(module), torch.enable_grad():
        module.train()
        exclude = [*module.parameters(), *module.buffers(), *shared]
        with memory.kept_tensors(exclude) as kept:
            forward(*args, **kwargs)
    return kept.bytes


# -- the model


def matches(which: Which | Iterable[Which] | None, name: str, module: nn.Module) -> bool:
    """Is the module one of these: names with wildcards, classes, or functions of (name, module)?"""
    if isinstance(which, (str, type)) or callable(which):
        which = (which,)
    for one in which or ():
        if isinstance(one, type):
            found = isinstance(module, one)
        else:
            found = fnmatch.fnmatchcase(name, one) if isinstance(one, str) else one(name, module)
        if found:
            return True
    return False


class _Conversion:
    """One call of convert."""

    def __init__(self, recompute: str, include, exclude, calls: dict[nn.Module, dict]):
        self.recompute, self.include, self.exclude, self.calls = recompute, include, exclude, calls
        self.rows: list[Row] = []
        self.seen: set[int] = set()

    def visit(self, name: str, module: nn.Module) -> None:
        """Converts the module, or else what is inside."""
        if id(module) in self.seen or matches(self.exclude, name, module):
            return
        self.seen.add(id(module))
        row = None
        if self.include is None or matches(self.include, name, module):
            row = self.twin(name, module) or self.fused(name, module)
        if row is not None and row.served_by != "runs" and (row.served_by is not None or is_block(name, module)):
            self.rows.append(row)
        if row is None or row.served_by is None:
            for child, m in module.named_children():
                self.visit(f"{name}.{child}" if name else child, m)

    def twin(self, name: str, module: nn.Module) -> Row | None:
        twin = TWINS.get(type(module))
        if twin is None:
            return None
        row = Row(name, type(module).__name__, f"ckptkern.nn.{twin.__name__}")
        for m in module.modules():  # a layer's attention and dropouts with it
            if type(m) in TWINS or type(m) is nn.Dropout:
                m.__dict__[TWINNED] = type(m)
                m.__class__ = TWINS.get(type(m), twins.Dropout)
                if type(m) is not twins.Dropout:
                    m.recompute = self.recompute
        return row

    def fused(self, name: str, module: nn.Module) -> Row | None:
        """A row of what was done; None for a module that the model did not call, or that has no layers in it."""
        calls = self.calls.get(module, {})
        if type(module) is nn.Linear and self.include is not None:
            calls = calls_of(module)
        elif not calls and type(module) is nn.Sequential and len(module) and type(module[0]) is nn.Linear:
            calls = calls_of(module[0])
        if not calls or not any(p.dim() == 2 for p in module.parameters()):
            return None
        row = Row(name, type(module).__name__, None)
        try:
            forward, row.error = fuse(module, calls, self.recompute)
        except Unreadable as reason:
            row.reason = str(reason)
            if type(module) is nn.Sequential and (rows := self.runs(name, module)):
                self.rows += rows
                return Row(name, row.kind, "runs")
            if is_block(name, module) and (why := why_general(module)):
                return self.general(row, module, calls, why)
            return row
        pattern, segment = next(iter(forward.segments.items()))
        self.bind(row, module, forward, calls[pattern], segment.x)
        row.served_by = segment.op
        return row

    def bind(self, row: Row, module: nn.Module, forward: Forward, call: tuple, x: int) -> None:
        args, kwargs, _ = without_caches(*call)
        with contextlib.suppress(Exception):  # what convert proves does not hang on this measurement
            row.kept_before = kept_bytes(module, module.forward, args, kwargs, x)
        module.forward = forward
        with contextlib.suppress(Exception):
            row.kept_after = kept_bytes(module, forward, args, kwargs, x)

    def general(self, row: Row, module: nn.Module, calls: dict, why: str) -> Row:
        args, kwargs = next(iter(calls.values()))
        tensors = [
            i for i, v in enumerate(leaves_of((args, kwargs))) if isinstance(v, Tensor) and v.is_floating_point()
        ]
        self.bind(row, module, General(module, self.recompute), (args, kwargs), tensors[0] if tensors else -1)
        row.served_by, row.reason = "checkpoint", why
        return row

    def runs(self, name: str, module: nn.Sequential) -> list[Row]:
        found = runs_of(module, self.recompute)
        rows = []
        for start, stop, run, error in found:
            segment = next(iter(run.segments.values()))
            row = Row(f"{name}[{start}:{stop}]", "Sequential", segment.op, error=error)
            call = list(calls_of(module[start]).values())[1]
            row.kept_before = kept_bytes(run.module, run.original, *call, 0)
            row.kept_after = kept_bytes(run.module, run, *call, 0)
            rows.append(row)
        if found:
            module.forward = Runs(module, [one[:3] for one in found], self.recompute)
        return rows


def why_general(module: nn.Module) -> str:
    """Why a layer that is no fused op is run as a general segment; "" for one that is only unknown."""
    kind = foreign(list(module.parameters()))
    if kind is not None:
        return f"a parameter is a {kind.__name__}"
    if any(parametrize.is_parametrized(m) for m in module.modules()):
        return "a weight is parametrized"
    if len({p.requires_grad for p in module.parameters()}) > 1:
        return "some parameters are frozen and others are not, as with adapters"
    if not all(map(untouched, list(module.modules())[1:])):
        return "there are hooks inside"
    return ""


def is_block(name: str, module: nn.Module) -> bool:
    """Would a reader look for it in the table: a member of a list of layers, or a module made of leaves only?"""
    return name.rpartition(".")[2].isdigit() or all(map(is_leaf, module.children()))


def convert(
    model: nn.Module,
    *example_inputs: Any,
    recompute: str = "selective",
    include: Which | Iterable[Which] | None = None,
    exclude: Which | Iterable[Which] | None = None,
    **example_kwargs: Any,
) -> Conversion:
    """Puts ckptkern's segments into a model that exists, whatever its architecture, and says what it did.

        conversion = ckptkern.convert(model, input_ids)
        print(conversion)

    The model runs once on the example inputs. Then the forward of each submodule, the outermost first, is traced, read as one
    of the fused ops (transformer_layer, attention_block, mlp_block, linear_stack, linear_act), and compared with it on random
    parameters: output, input gradient and the gradient of every parameter agree to rounding, or the module is left as it is.
    torch's own MultiheadAttention, TransformerEncoderLayer and TransformerDecoderLayer become their twins in ckptkern.nn.

    Parameters, their names, state_dict, submodules, hooks and optimizers stay as they are: only `forward` of the converted
    modules is set. A call without gradients, or of another kind than those that were proven (other arguments, a cache), runs
    the original forward. If the inside of a converted module is no longer what was proven (LoRA, hooks, quantized weights), its
    original forward runs as a general segment (ckptkern.checkpoint).

    example_inputs, example_kwargs: a call of the model, as small as it may be, with at least two tokens and of the same kind as
    in training. The model's random state, buffers and modes are afterwards as before.
    recompute: what the segments keep: "full" their input; "selective" also attention's result; "none" everything.
    include, exclude: names with wildcards ("model.layers.*"), classes, functions of (name, module), or several of these: what
    may be converted, and what may not, with all that is inside.

    Raises TypeError if model is no nn.Module, ValueError for a model that fully_shard already took (convert first) and unknown
    levels. An error of the model's own call is its own.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be a torch.nn.Module, not {type(model).__name__}")
    check_level("convert", recompute)
    check_not_sharded(model)
    revert(model)
    calls = capture(model, example_inputs, example_kwargs) if example_inputs or example_kwargs else {}
    conversion = _Conversion(recompute, include, exclude, calls)
    training = [(m, m.training) for m in model.modules()]
    try:
        conversion.visit("", model)
    finally:
        for m, was in training:
            m.training = was
    return Conversion(conversion.rows)


def check_not_sharded(model: nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported here, because it takes a second
    if fsdp is not None and any(
        isinstance(m, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)) for m in model.modules()
    ):
        raise ValueError(
            "convert: the model is already sharded, and a probe would move its state: convert first, then shard"
        )


def revert(model: nn.Module) -> nn.Module:
    """Undoes convert: every module runs the forward that it had. Returns the model."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, Forward):
            del module.forward
            if forward.previous is not None:
                module.forward = forward.previous
        if TWINNED in module.__dict__:
            module.__class__ = module.__dict__.pop(TWINNED)
            module.__dict__.pop("recompute", None)
    return model
