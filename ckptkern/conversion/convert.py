"""Implements convert: fused layers in an existing model."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import parametrize

from .. import nn as drop_ins
from ..extras import progress
from ..nn.unmodified import untouched
from ..ops.dispatch.choices import Bytes, check_choice, check_count, check_mode, modes_of_sublayers, parse_bytes
from . import blocks, masks
from .binding import (
    ORIGINAL_CLASS,
    Forward,
    General,
    Own,
    Runs,
    bound,
    check_not_split,
    revert,
    without_caches,
)
from .blocks import error_of, is_layer, is_marked
from .calls import check_keywords, pattern_of
from .fuse import Checked, calls_of, fuse, runs_of
from .groups import group_layers
from .heads import NOT_RUN, Heads, Ran, scalars
from .layouts import is_experts
from .protection import no_trace, seeded, unmoved
from .quantized import not_repacked, removing_adapters, why_unreadable
from .reading import is_linear
from .recorder import check_step, saved_by, step_of_all
from .report import NOTHING, WARNED, Conversion, Row
from .selection import Which, check_names, matches, selected
from .sharding import Shards, class_of, set_class
from .tiled import Tiled, tiled, tiled_inside
from .trace import Call, Unreadable, is_floating, is_leaf, leaves_of, mapped, switched, tensors_in, upcast

DROP_INS = {
    nn.MultiheadAttention: drop_ins.MultiheadAttention,
    nn.TransformerEncoderLayer: drop_ins.TransformerEncoderLayer,
    nn.TransformerDecoderLayer: drop_ins.TransformerDecoderLayer,
}
OTHERWISE = ("leave", "checkpoint")
NO_REGIONS = (
    "forms no group of layers, because no layer takes the unchanged result of the layer before it. Leave it out"
)
PATTERNS = 4  # argument patterns of one module that are checked


# -- the probe


Probe = tuple[dict[nn.Module, list[Call]], set[nn.Module], "Heads | None"]  # calls, hooked, heads of `_Conversion`


def capture(model: nn.Module, call: Call) -> Probe:
    """Calls the model in evaluation mode. Returns its modules' calls, the modules with temporary hooks, and its heads. A
    tensor that is passed twice is two tensors in the calls, because other calls may pass two."""
    calls: dict[nn.Module, dict[tuple, Call]] = {}
    seen: list[tuple[nn.Module, nn.Module, int]] = []  # hooks that were not there before the model's call

    def before(module, args, kwargs):
        seen.extend((module, m, count_hooks(m)) for m in within[module] if count_hooks(m) != counts[m])
        with torch._C.DisableTorchFunction():  # `Ran` would note parameters whose dtype is read
            own, call = calls.setdefault(module, {}), mapped(upcast(module), (args, kwargs))
        if len(own) < PATTERNS:
            own.setdefault(pattern_of(call, []), call)

    within = {m: set(m.modules()) for m in model.modules() if not is_leaf(m) or is_experts(m)}
    hooks = [m.register_forward_pre_hook(before, with_kwargs=True) for m in within]
    counts = {m: count_hooks(m) for m in model.modules()}
    try:
        with seeded(), unmoved(model), torch.no_grad(), Ran() as ran, register_module_forward_pre_hook(ran.note):
            model.eval()
            args, kwargs = call
            returned = scalars(model(*args, **kwargs))
            hooked = {module for module, m, count in seen if count != count_hooks(m)}
    finally:
        for hook in hooks:
            hook.remove()
    heads = Heads(model, call, ran, returned)
    return {module: list(own.values()) for module, own in calls.items()}, hooked, heads


def captured(model: nn.Module, call: Call) -> Probe:
    """Captures a call, with padding masks in their original form where the model's layers accept that."""
    with not_repacked(model):
        if masks.adopt(model):
            with contextlib.suppress(Exception):  # a model that refuses these masks
                return capture(model, call)
            masks.give_back(model)
        return capture(model, call)


def count_hooks(module: nn.Module) -> int:
    """Returns the number of the module's forward hooks and parametrizations."""
    parametrized = getattr(module, "parametrizations", {}).values()
    return len(module._forward_hooks) + len(module._forward_pre_hooks) + sum(map(len, parametrized))


# -- the model


class Outcome(NamedTuple):
    """Holds what convert can do with a module: the rows of the table and, if it is replaced, how to set its new forward."""

    rows: list[Row]
    put: Callable[[], None] | None = None


@dataclass
class _Conversion:
    """Performs one call of convert. shown: called with the name of each module that is tried. What the model's example call
    showed:

    calls: one of each pattern, by submodule; hooked: modules with hooks inside that last for the model's call only, so that a
    recompute in backward would run without them; heads: the LM heads of the loss.
    """

    calls: dict[nn.Module, list[Call]]
    hooked: set[nn.Module]
    heads: Heads | None
    shards: Shards
    shown: Callable[[str], None]
    recompute: str | tuple[str, str]
    workspace: Bytes
    include: Any
    exclude: Any
    otherwise: str

    def __post_init__(self) -> None:
        self.attention, self.mlp = self.recompute if isinstance(self.recompute, tuple) else (self.recompute,) * 2
        # layers may become checkpoints
        self.checkpoints = self.otherwise != "leave" and "none" not in (self.attention, self.mlp)
        self.within = False  # inside a layer that may become an activation checkpoint
        self.rows: list[Row] = []
        self.seen: set[int] = set()
        self.checked: list[Checked] = []  # modules that others may be like
        self.cut: list[tuple[str, General]] = []  # layers that run in parts

    def visit(self, name: str, module: nn.Module) -> None:
        """Converts the module, or else what is inside."""
        if id(module) in self.seen or matches(self.exclude, name, module):
            return
        self.seen.add(id(module))
        self.shown(name)
        with self.shards.whole(module):
            outcome, may_be = Outcome([]), self.include is None or matches(self.include, name, module)
            if may_be:
                outcome = self.drop_in(name, module) or self.head(name, module) or self.fused(name, module)
                if outcome.put is None and self.mlp != "none" and self.heads and module in self.heads.before_heads:
                    outcome = self.before_head(name, module) or outcome
            if not self.shards.agree(tuple((row.name, row.replaced_by) for row in outcome.rows if outcome.put)):
                outcome = Outcome([row_of(name, module, "ranks disagree on how to fuse this layer")])
            if outcome.put is not None:
                self.rows += outcome.rows
                outcome.put()
                return
            before = None  # what the layer saves now, if an activation checkpoint may stand around it
            if is_block(name, module) or is_marked(module):
                self.rows += outcome.rows
                may_be_one = outcome.rows and not self.within and self.checkpoints and module not in self.hooked
                if (
                    may_be_one
                    and module in self.calls
                    and (is_layer(name, module) or embeds(name, module, self.calls[module][0]))
                ):
                    before = saved_by(module, module.forward, without_caches(self.calls[module][0]))
            start, outer, self.within = len(self.rows), self.within, self.within or before is not None
            for child, m in module.named_children():
                self.visit(f"{name}.{child}" if name else child, m)
            self.within, inner = outer, self.rows[start:]
            put = None
            if before is not None:
                row = outcome.rows[-1]
                put = self.general(row, module, self.calls[module][0], row.reason, before)
            if self.shards.agree(put is not None) and put is not None:
                for part in inner:  # their bytes are counted in the layer's row
                    part.saved_before = part.saved_after = None
                # a part inside that is not fused belongs to the checkpoint, and has no row
                self.rows[start:] = [part for part in inner if part.replaced_by is not None]
                put()
            is_unknown = may_be and not outcome.rows and all(row.reason == NOT_RUN for row in self.rows[start:])
            if is_unknown and self.heads is not None and self.heads.ran.misses(module):
                self.rows[start:] = [row_of(name, module, NOT_RUN)]  # in place of the rows of modules inside

    def drop_in(self, name: str, module: nn.Module) -> Outcome | None:
        drop_in = DROP_INS.get(class_of(module))
        if drop_in is None:
            return None
        row = Row(name, class_of(module).__name__, f"ckptkern.nn.{drop_in.__name__}")
        call = next(iter(self.calls.get(module, ())), None)

        def put():
            forward, row.saved_before = Own(module, self.recompute), saved_by(module, module.forward, call)
            for m in module.modules():  # a layer's attention and dropouts with it
                kind = class_of(m)
                if kind in DROP_INS or kind is nn.Dropout:
                    m.__dict__[ORIGINAL_CLASS] = kind
                    set_class(m, DROP_INS.get(kind, drop_ins.Dropout))
                    if kind is not nn.Dropout:
                        m.recompute = self.attention if kind is nn.MultiheadAttention else self.recompute
                        m.workspace = self.workspace
            self.set(row, module, forward)
            row.saved_after = saved_by(module, forward, call)

        return Outcome([row], put)

    def before_head(self, name: str, module: nn.Module) -> Outcome | None:
        """Returns the outcome for a token-wise module before an LM head; None if it does not save less in chunks."""
        x, head = self.heads.before_heads[module]
        row, forward = tiled(name, module, x, self.mlp, head=head) or (None, None)

        def put():
            self.set(row, module, forward)
            if head:
                self.visit(f"{name}.{head}", module.get_submodule(head))

        return Outcome([row], put) if forward is not None else None

    def head(self, name: str, module: nn.Module) -> Outcome | None:
        """Returns the outcome for an LM head; None for other modules."""
        row, forward = self.heads.row(name, module, self.mlp) if self.heads else (None, None)
        if forward is not None:
            return Outcome([row], lambda: self.set(row, module, forward))
        return Outcome([row]) if row is not None and self.include is None else None

    def fused(self, name: str, module: nn.Module) -> Outcome:
        """Returns the outcome of reading the module as a fused op. It has no row for a module that the model did not call,
        or that has no layers in it."""
        calls, kind = self.calls.get(module, []), class_of(module)
        if kind is nn.Linear and self.include is not None:
            calls = calls_of(module)
        elif not calls and kind is nn.Sequential and len(module) and type(module[0]) is nn.Linear:
            calls = calls_of(module[0])
        if not calls or not (any(p.dim() == 2 for p in module.parameters()) or is_experts(module) or is_marked(module)):
            return Outcome([])
        if module in self.hooked:
            reason = "hooks or parametrizations inside last for one call of the model only"
            return Outcome([row_of(name, module, reason)])
        row = row_of(name, module)
        try:
            forward, row.error, call = fuse(name, module, calls, self.recompute, self.checked)
        except Unreadable as reason:
            row.reason = str(reason)
            if kind is nn.Sequential and (runs := self.runs(name, module)):
                return runs
            if is_block(name, module) and (why := why_general(module)):
                why = why if why == str(reason) else f"{why}: {reason}"
                return Outcome([row], self.general(row, module, calls[0], why))
            return Outcome([row])
        segment = forward.ops[0]
        row.replaced_by = segment.op
        if segment.op != "transformer_layer":
            forward.recompute = self.attention if segment.attends else self.mlp
        x = leaves_of(forward.form.counting(call))[segment.x]

        def put():
            row.saved_before = saved_by(module, module.forward, call, x)
            self.set(row, module, forward)
            row.saved_after = saved_by(module, forward, call, x)

        return Outcome([row], put)

    def general(
        self, row: Row, module: nn.Module, call: Call, why: str, before: int | None = None
    ) -> Callable[[], None] | None:
        """Returns how to set an activation checkpoint of the module; None if the checkpoint is wrong. before: what it saved
        before its inside was converted; the checkpoint must then save less than it does now."""
        call, is_asked, error = without_caches(call), before is None, None
        checkpoint, row.reason = General(module, self.mlp, call), why
        checkpoint.share(row.name, self.cut)
        inside, after = (saved_by(module, run, call) for run in (module.forward, checkpoint))
        try:
            if not (is_asked or inside is None or after is None or after < inside):
                raise Unreadable("an activation checkpoint does not save less")
            if (is_asked and inside is None) or not any(map(is_floating, tensors_in(call))):
                # only what was checked runs in parts; an embedding in parts would form its gradient for each
                checkpoint.parts = None
            if not is_asked or inside is not None:
                error = error_of(checkpoint, call, is_asked)
        except Unreadable as problem:
            row.reason = f"{why}; {problem}" if why else str(problem)
            return None
        checkpoint, error, chunks = self.in_chunks(row.name, checkpoint, call, error)

        def put():
            for part, forward in chunks:
                self.set(part, forward.module, forward)
                self.rows.append(part)
            row.replaced_by, row.error = "checkpoint", error
            row.saved_before, row.saved_after = inside if is_asked else before, after
            self.set(row, module, checkpoint)

        return put

    def in_chunks(
        self, name: str, checkpoint: General, call: Call, error: float | None
    ) -> tuple[General, float | None, list[tuple[Row, Tiled]]]:
        """Returns (a checkpoint of the layer, its error, rows and forwards of token-wise modules inside that run in chunks);
        what was passed, and no modules, for a layer that runs in parts, or whose numbers differ with chunks."""
        module, parts, chunks = checkpoint.module, checkpoint.parts, list[tuple[Row, Tiled]]()
        if parts is not None and parts.is_whole:
            with contextlib.suppress(Exception):
                chunks += tiled_inside(name, module, call, self.mlp, functools.partial(matches, self.exclude))
        if not chunks:
            return checkpoint, error, []
        try:
            wanted = blocks.training_step(module, module.forward, call)
            for row, forward in chunks:
                row.saved_before = row.saved_after = None  # counted in the layer's row
                forward.module.forward, forward.chunks = forward, blocks.SLICES
            other, cut = General(module, self.mlp, call), [pair for pair in self.cut if pair[1] is not checkpoint]
            other.share(name, cut)
            error, self.cut = error_of(other, call, False, wanted), cut
            return other, error, chunks
        except Unreadable:
            return checkpoint, error, []
        finally:
            for _, forward in chunks:
                forward.chunks = None
                forward.unbind()

    def set(self, row: Row, module: nn.Module, forward: Forward) -> None:
        if isinstance(forward, General) and forward.how:
            row.reason = f"{row.reason or 'its op is unknown'}; it runs {forward.how}"
        row.calls, forward.workspace, forward.name = forward.calls, self.workspace, row.name
        module.forward = forward

    def blocks(self, model: nn.Module, call: Call) -> None:
        """Adds activation checkpoints of blocks in which nothing is fused."""
        if not self.checkpoints:
            return
        before = {m: m.forward for m in model.modules() if type(m.__dict__.get("forward")) is General}
        fused = {m for m in model.modules() if blocks.is_converted(m)}.difference(before)
        # checkpoints that may become part of larger ones; those of convolutions may also be divided
        fixed = {m for m in before if not (blocks.has_convolutions(m) and fused.isdisjoint(m.modules()))}
        changed: set[nn.Module] = set()
        for forward in before.values():
            forward.unbind()
        try:
            allowed = selected(model, self.include, self.exclude).difference(self.hooked)
            record, cuts = blocks.recorded(model, call), []
            if record is not None:
                best = blocks.Cuts(record, allowed, fixed).best(self.include is not None)
                cuts = [cut for cut in best if cut.module not in fixed]
            names, calls = {m: name for name, m in model.named_modules()}, blocks.calls_of(model, call, cuts)
            for module, own in blocks.by_module(cuts):
                runs = []
                for cut in own:
                    name = names[module] + ("" if cut.layers is None else "[{}:{}]".format(*cut.layers))
                    row = row_of(name, module)
                    if (put := self.general(row, cut.part, calls[cut.begins], "")) is not None:
                        inside = set(cut.part.modules())
                        replaced = {m for m in before if m in inside or not inside.isdisjoint(m.modules())}
                        changed |= replaced
                        within = {names[module], *(names[m] for m in (*inside, *replaced) if m in names)}
                        self.rows = [other for other in self.rows if other.name not in within]
                        put()
                        runs.append((*(cut.layers or (0, 0)), cut.part.forward))
                    self.rows.append(row)
                if runs and own[0].layers is not None:
                    self.set(row_of(names[module], module), module, Runs(module, runs, self.mlp))
        finally:
            for module, forward in before.items():
                if module not in changed:
                    module.forward = forward
        places = {name: i for i, name in enumerate(names.values())}
        self.rows.sort(key=lambda row: places.get(row.name.partition("[")[0], 0))

    def runs(self, name: str, module: nn.Sequential) -> Outcome | None:
        runs, rows = runs_of(module, self.mlp), []
        for start, stop, run, error in runs:
            call, op = calls_of(module[start])[1], run.ops[0].op
            bytes_ = (saved_by(run.module, forward, call) for forward in (run.original, run))
            rows.append(Row(f"{name}[{start}:{stop}]", "Sequential", op, *bytes_, error))

        def put():
            for row, (*_, run, _) in zip(rows, runs, strict=True):
                self.set(row, run.module, run)
            self.set(row_of(name, module), module, Runs(module, [run[:3] for run in runs], self.mlp))

        return Outcome(rows, put) if runs else None


def row_of(name: str, module: nn.Module, reason: str = "") -> Row:
    """Returns the row of a module that is left unchanged."""
    return Row(name, class_of(module).__name__, None, reason=reason)


def why_general(module: nn.Module) -> str:
    """Returns why a layer that is not one fused op runs as an activation checkpoint; "" if its op is only unknown."""
    if why := why_unreadable(module):
        return why
    if any(map(parametrize.is_parametrized, module.modules())):
        return "a weight is parametrized"
    # not vectors alone, such as a router's correction, which no gradient trains
    frozen = any(not p.requires_grad and p.numel() > max(p.shape, default=1) for p in module.parameters())
    if frozen and any(p.requires_grad for p in module.parameters()):
        return "some parameters are frozen and others are not, as with adapters"
    if not all(map(untouched, list(module.modules())[1:])):
        return "there are hooks inside"
    return ""


def is_block(name: str, module: nn.Module) -> bool:
    """Returns whether a reader expects the module in the table: a member of a list of layers, or a module made of leaves
    only."""
    return name.rpartition(".")[2].isdigit() or all(map(is_leaf, module.children()))


def embeds(name: str, module: nn.Module, call: Call) -> bool:
    """Returns whether the module inside of a model is called with ids alone, and has no matrices but those of embeddings and
    one linear layer: a checkpoint of its sums, projection and norms saves the ids. Embeddings with max_norm change their
    weights in forward, and sparse ones have other gradients."""
    tensors = tensors_in(call)
    others = (m for m in module.modules() if not isinstance(m, nn.Embedding) or m.sparse or m.max_norm is not None)
    matrices = [m for m in others if any(p.dim() > 1 for p in m.parameters(recurse=False))]
    plain = len(matrices) < 2 and all(map(is_linear, matrices))
    return name != "" and plain and bool(tensors) and not any(map(is_floating, tensors))


def convert(
    model: nn.Module,
    *example_inputs: Any,
    recompute: str | tuple[str, str] = "selective",
    workspace: Bytes = None,
    include: Which = None,
    exclude: Which = None,
    otherwise: str = "checkpoint",
    every: int = 1,
    **example_kwargs: Any,
) -> Conversion:
    """Replaces layers of an existing model by fused ops that save less for backward.

        conversion = ckptkern.convert(model, input_ids)
        print(conversion)

    The model runs once on the example inputs. Each submodule, the outermost first, is read as one fused op and checked on
    random parameters. If the output or a gradient differs by more than rounding, the module stays as it is. torch's attention
    and transformer layers become those of ckptkern.nn. A linear layer whose logits go to F.cross_entropy becomes
    linear_cross_entropy, if the example has labels.

    Parameters, state_dict, submodules, hooks and optimizers stay the same: convert sets only `forward`, and the attention
    implementation of transformers models. A call unlike the checked ones (other arguments, a cache) runs the original forward.
    If a module's inside has changed (LoRA, hooks, quantized weights), its original forward runs as an activation checkpoint.

    example_inputs, example_kwargs: a call of the model as in training, with at least two tokens.
    recompute: what a region saves: "full" its input, "selective" also attention's result, "none" everything. A pair is for
    attention and the rest. A layer that is not one op is an activation checkpoint, unless the pair contains "none".
    workspace: transient bytes of a region in each pass, such as "64MiB". None: see Conventions.
    include, exclude: modules to convert, and modules to leave with all that is inside: names with wildcards ("model.layers.*"),
    classes, functions of (name, module), or several of these.
    otherwise: "checkpoint" runs layers that are not one op, and blocks of convolutions, as activation checkpoints where that
    saves less, in parts if their inside exceeds the workspace. "leave" leaves them. What is fused inside stays fused.
    every: the number of layers in a row that form one region, which saves the first input and costs one more forward
    pass. A layer whose input is not the previous layer's result begins a region. Layers run one by one under torch.compile,
    TensorParallel and fully_shard.

    Under fully_shard, all ranks call convert with examples of the same kind.

    Raises: see Conventions. Also TypeError for a keyword of neither convert nor forward; ValueError for a name of no module,
    and for a compiled or lazy model, or one in DataParallel or FullyShardedDataParallel. After an error nothing is converted.
    """
    call = example_inputs, example_kwargs
    check_step("convert", model, call)
    check_keywords("convert", convert, model, example_kwargs)
    return convert_call(model, call, recompute, workspace, include, exclude, otherwise, every)


def convert_call(
    model: nn.Module, call: Call, recompute, workspace, include, exclude, otherwise: str, every: int
) -> Conversion:
    """Converts the model by an example call that it is known to accept, with the options of `convert`."""
    if isinstance(recompute, (tuple, list)):
        attention, other = modes_of_sublayers("convert", recompute)
        recompute = attention if attention == other else (attention, other)
    else:
        check_mode("convert", recompute)
    check_choice("convert", "otherwise", otherwise, OTHERWISE)
    check_count("convert", "every", every)
    parse_bytes("convert", workspace)
    check_not_split("convert", model)
    check_names(model, include, exclude)
    revert(model)
    there = [p for p in model.parameters() if p.grad is not None]
    with no_trace(model, call), removing_adapters():
        try:
            before, peak_before = step_of_all(model, call, there)
            probe = captured(model, call) if any(call) else ({}, set(), None)
            places = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
            with not_repacked(model), switched(model), progress("convert", len(places)) as shown:
                conversion = _Conversion(
                    *probe,
                    Shards(model),
                    lambda name: shown(name, places[name]),
                    recompute,
                    workspace,
                    include,
                    exclude,
                    otherwise,
                )
                conversion.visit("", model)
            masks.open_up(model)
            if before is not None and blocks.may_be_found(model):
                conversion.blocks(model, call)
            rows = conversion.rows
            if not rows and before is not None:
                rows.append(row_of("", model, NOTHING))
            groups = group_layers(model, rows, every) if every > 1 else []
            after, peak_after = step_of_all(model, call, there) if before is not None else (None, None)
            for row in rows:
                row.calls.update(dict.fromkeys(row.calls, 0))  # count training only, not convert's own calls
            WARNED.clear()  # warnings about a model that was converted before
            if not (any(call) or rows):
                warnings.warn("ckptkern.convert: without example inputs it found nothing to convert", stacklevel=3)
            regions = [names for group in groups for names in group.regions(ran=after is not None)]
            if groups and not regions:
                warnings.warn(f"ckptkern.convert: every={every} {NO_REGIONS}", stacklevel=3)
            stays = bound(model)
        except BaseException:
            revert(model)
            raise
    for attributes, own in stays:
        attributes.update(own)
    return Conversion(rows, before, after, peak_before, peak_after, regions)
