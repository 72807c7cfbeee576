"""Lists the regions of a model: the modules that have a mode, their strategies, and their original forward."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from .. import nn as drop_ins
from ..conversion import recorder
from ..conversion.binding import ORIGINAL_CLASS, Forward, Fused, General, Own, Runs, check_not_split, forward_of
from ..conversion.selection import Which, selected
from ..conversion.sharding import holds_sharded, is_sharded
from ..conversion.trace import Call
from ..ops.dispatch.choices import MODES, Bytes, parse_bytes
from ..storage import Store

LAYERS = (drop_ins.LlamaDecoderLayer, drop_ins.TransformerEncoderLayer, drop_ins.TransformerDecoderLayer)
OURS = tuple(  # the modules with a mode
    kind
    for kind in vars(drop_ins).values()
    if isinstance(kind, type) and issubclass(kind, nn.Module) and "recompute" in inspect.signature(kind).parameters
)


class Strategy(NamedTuple):
    """A mode, or one per sublayer of a layer, and the store of saved tensors; None leaves them on the device."""

    mode: str | tuple[str, str]
    store: Store | None = None

    def __str__(self) -> str:
        mode = self.mode if isinstance(self.mode, str) else "/".join(self.mode)
        return mode if self.store is None else f"{mode} + {type(self.store).__name__}"


EAGER = "eager PyTorch"
ORIGINAL = Strategy(EAGER)  # a region's forward before convert: measured, but cannot be set


class Segment(NamedTuple):
    """A module that has a mode. replaced_by: as in a row of Conversion. is_block: the module may become an activation
    checkpoint; in mode "none" it is not one."""

    name: str
    module: nn.Module
    replaced_by: str
    is_block: bool = False

    @property
    def forward(self) -> Forward | None:
        """Returns what replaces the forward of the module's class, or None."""
        return forward_of(self.module)

    @property
    def strategy(self) -> Strategy:
        forward = self.forward
        if forward is None:
            return Strategy("none" if self.is_block else self.module.recompute)
        return Strategy((self.module if isinstance(forward, Own) else forward).recompute, forward.store)

    def set(self, strategy: Strategy) -> None:
        """Sets the strategy for later forwards; existing graphs do not change. A replaced forward that the strategy does not
        need is removed."""
        if strategy == self.strategy:
            return
        forward = self.forward
        if self.is_block or forward is None or isinstance(forward, Own):
            if self.is_block:
                needed = strategy != Strategy("none")
            else:
                needed = strategy.store is not None or ORIGINAL_CLASS in self.module.__dict__
                self.module.recompute = strategy.mode
            if forward is None and needed:
                self.module.forward = forward = (General if self.is_block else Own)(self.module, "none")
            elif forward is not None and not needed:
                forward.unbind()
                forward = None
        if forward is not None:
            forward.store, forward.recompute = strategy.store, strategy.mode

    def modes(self) -> list[str | tuple[str, str]]:
        """Returns the module's modes; for a layer also those of its two sublayers."""
        if self.replaced_by == "checkpoint":
            return ["none", "full"]
        if self.replaced_by != "transformer_layer":
            return list(MODES)
        return [*MODES, *itertools.product(MODES, MODES)]


@contextlib.contextmanager
def in_strategies(segments: Sequence[Segment], strategies: Sequence[Strategy]) -> Iterator[None]:
    """Runs the regions in these strategies inside the block, and restores theirs afterwards. ORIGINAL is allowed for a
    single region."""
    before = [segment.strategy for segment in segments]
    try:
        with original_forwards(segments[0].module) if ORIGINAL in strategies else contextlib.nullcontext():
            for segment, strategy in zip(segments, strategies, strict=True):
                if strategy != ORIGINAL:
                    segment.set(strategy)
            yield
    finally:
        for segment, strategy in zip(segments, before, strict=True):
            segment.set(strategy)


class Workspaces:
    """Sets the workspace of every op of a model: of ckptkern's modules and of replaced forwards. given: each with its own
    size."""

    def __init__(self, model: nn.Module):
        self.size: int | None = None
        self.given: list[tuple[Any, Bytes]] = []
        for module in model.modules():
            for op in (module, forward_of(module), *(run for *_, run in runs_of(module))):
                if isinstance(op, (Forward, *OURS)) and hasattr(op, "workspace"):
                    self.given.append((op, op.workspace))

    def set(self, size: int | None) -> None:
        """Limits each workspace to `size` bytes; None restores their own sizes."""
        self.size = size
        for op, own in self.given:
            is_smaller = size is None or (own is not None and parse_bytes("plan", own) <= size)
            op.workspace = own if is_smaller else size

    @contextlib.contextmanager
    def at(self, size: int | None) -> Iterator[None]:
        before = self.size
        self.set(size)
        try:
            yield
        finally:
            self.set(before)


def segments_of(
    model: nn.Module,
    include: Which = None,
    exclude: Which = None,
) -> list[Segment]:
    """Returns the outermost modules that have a mode, and runs of layers, in the model's order. include, exclude: as in
    `convert`."""
    segments: list[Segment] = []
    inside: set[nn.Module] = set()
    allowed = selected(model, include, exclude)
    for name, module in model.named_modules():
        replaced_by = server_of(module) if module in allowed and module not in inside else None
        if replaced_by is not None:
            inside.update(module.modules())
            parts = [(f"{name}[{start}:{stop}]", run.module) for start, stop, run in runs_of(module)]
            segments += [Segment(own, m, server_of(m) or replaced_by) for own, m in parts or [(name, module)]]
    return segments


def runs_of(module: nn.Module) -> list[tuple[int, int, Fused | General]]:
    """Returns (start, stop, what runs them) for each run of layers of an nn.Sequential that convert replaced."""
    forward = forward_of(module)
    return forward.runs if isinstance(forward, Runs) else []


def server_of(module: nn.Module) -> str | None:
    """Returns what replaces a module; None if the module has no mode."""
    forward = forward_of(module)
    if isinstance(forward, Fused):
        return forward.ops[0].op
    if isinstance(forward, Runs):
        return server_of(forward.runs[0][-1].module)
    if isinstance(forward, General):
        return "checkpoint"
    if isinstance(module, LAYERS):
        return "transformer_layer"
    return type(module).__name__ if isinstance(module, OURS) else None


def check_step(op: str, model: nn.Module, call: Call) -> None:
    """Raises TypeError, ValueError or RuntimeError if a step of the model cannot run by itself."""
    recorder.check_step(op, model, call)
    if not any(call):
        raise TypeError(f"{op}: example inputs are missing. Pass the inputs of a training step after the model")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"{op}: DistributedDataParallel would wait for the backward of a lone forward. Call {op} first, then wrap the model"
        )
    if holds_sharded(model) or is_sharded(model):
        raise ValueError(
            f"{op}: the model is already sharded, and a step of one part would change its state. Call {op} first, then shard"
        )
    check_not_split(op, model)


@contextlib.contextmanager
def original_forwards(model: nn.Module) -> Iterator[None]:
    """Restores the model as it was before convert inside the block."""
    modules = [m for parent in model.modules() for m in (parent, *(run.module for *_, run in runs_of(parent)))]
    before = [(module, type(module), forward_of(module)) for module in modules]
    try:
        for module, kind, forward in before:
            if forward is not None and not isinstance(forward, Runs):
                forward.unbind()
            module.__class__ = module.__dict__.get(ORIGINAL_CLASS, kind)
        yield
    finally:
        for module, kind, forward in before:
            module.__class__ = kind
            if forward is not None:
                module.forward = forward
