"""Finds the LM head of a model and its loss: the linear layer whose result F.cross_entropy or F.nll_loss reads, in a call
that computes the loss."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..memory import saved_tensors
from ..nn.unmodified import dense, hooked, strided, untouched
from ..ops.sublayer.lora import LoRA
from ..subclasses import PLAIN
from .arguments import Call, arguments_getter, live_attributes, rescaled
from .autocast import switched_off
from .binding import Forward, mode_of, requires_grad
from .calls import described
from .check import TOLERANCE, difference, random_parameters, results, rms, wide
from .guard import Watch
from .leaves import Leaves, is_linear
from .logits import Matmul, Step, Wanted
from .norms import replaced, watching
from .protection import seeded, unmoved
from .reading import Steps
from .reads import reads_of
from .report import AGAIN, Row
from .sharding import class_of, stays_gathered
from .token_statistics import LOSSES
from .trace import Unreadable, leaves_of, trace
from .traced import TracedLogits

OP = "linear_cross_entropy"
NO_LABELS = (
    "no label of the example counts: all are ignore_index (-100), or its sequences are of one token, whose shifted labels are "
    "empty. Give convert an example with labels that count"
)
NO_LOSS = "the example's call has no F.cross_entropy of it: with labels, the head and its loss become one op"


class Losses(TorchFunctionMode):
    """Notes the numbers of classes of every F.cross_entropy and F.nll_loss inside, and the weights of every F.linear."""

    def __init__(self):
        super().__init__()
        self.classes: set[int] = set()
        self.weights: set[int] = set()  # by id
        self.counts = False  # does any of their targets?
        self.of_module = False  # does nn.CrossEntropyLoss call it? Dynamo takes that for a function of tensors

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in LOSSES:
            given = dict(zip(LOSSES[function], args, strict=False)) | kwargs
            logits, target = given["input"], given["target"]
            self.classes.add(logits.shape[min(logits.dim() - 1, 1)])
            self.counts |= bool(target.is_floating_point() or (target != given.get("ignore_index", -100)).any())
            self.of_module |= any(frame.f_code is nn.CrossEntropyLoss.forward.__code__ for frame in callers(4))
        elif function is F.linear:
            self.weights.add(id(args[1] if len(args) > 1 else kwargs["weight"]))
        return function(*args, **kwargs)


def callers(count: int) -> Iterator[FrameType]:
    """The last frames before the caller's."""
    frame = sys._getframe(2).f_back
    while frame is not None and (count := count - 1) >= 0:
        yield frame
        frame = frame.f_back


def scalars(output: Any) -> list[Tensor]:
    """What a model returns that may be a loss."""
    leaves = tree_leaves(list(output.values()) if isinstance(output, Mapping) else output)
    return [one for one in leaves if isinstance(one, Tensor) and one.dim() == 0 and one.is_floating_point()]


def base_linear(module: nn.Module) -> nn.Module | None:
    """The linear layer that an adapter is around; None for other modules."""
    base = module._modules.get("base_layer")
    return base if base is not None and is_linear(base) else None


def adapted(module: nn.Module, classes: set[int]) -> dict[str, Any] | None:
    """The template {"lora"} of a linear layer of so many classes with one low-rank update that was read and checked on random
    numbers; None for other modules."""
    base = base_linear(module)
    if base is None or len(base.weight) not in classes or base.weight.is_meta:
        return None
    if not (dense(base) and all(map(untouched, module.modules()))):
        return None
    try:
        with unmoved(module), random_parameters(module):
            x = base.weight.new_empty(2, 3, base.in_features).normal_()
            steps, traced = Steps(Leaves(module)), trace(module.train(), (x,), {})
            layer = steps.linear_of(steps.strip(traced.node(traced.result)))
            if layer is None or layer.update is None or layer.weight.form:
                return None
            module.eval()
            template = {"lora": layer.update}
            with torch.no_grad(), rescaled(module, template):
                lora = LoRA(*arguments_getter(module, template)(Call([x], False, 0, x))["lora"])
                matmul = Matmul(x, base.weight, base.bias, lora=lora)
                error = difference([matmul.values()], [type(module).forward(module, x)])
    except Unreadable:
        return None
    return template if error <= TOLERANCE else None


class Head(Forward):
    """Returns a linear layer's lazy logits in training, which become a loss or values when they are read.

    The layer's own forward runs without gradients, under torch.compile, in torch.func's transforms, and if something is not as
    before: its class (LoRA), hooks, a weight that is no plain memory. template: of a layer with a low-rank update (`adapted`).
    """

    def __init__(self, module: nn.Module, recompute: str, template: dict[str, Any] | None = None):
        super().__init__(module, recompute)
        self.kind, self.linear, self.arguments, self.watch = type(module), module, None, None
        if template is not None:
            self.linear, self.arguments = base_linear(module), arguments_getter(module, template)
            x = self.linear.weight.new_zeros(1, 2, self.linear.in_features)
            self.watch = Watch(module, reads_of(module, (x,), {}), live_attributes(module, template))
        self.log: list[Wanted] | None = None  # during the example's call
        self.inputs: list[Tensor] = []  # of that call, before autocast rounds them
        self.only_loss = False  # was nothing but F.cross_entropy taken of the logits in the example's call?

    def run(self, *args, **kwargs):
        compiling = torch.compiler.is_compiling()
        lora = self.update(args)
        if not (self.log is not None or any(requires_grad(one) for one in (*args, *self.module.parameters()))):
            return self.original(*args, **kwargs)  # which saves nothing
        if (compiling and not self.may_be_traced) or len(args) != 1 or kwargs or not self.takes(args[0], lora):
            return self.unfused(lambda: self.why_not(args, kwargs), args, kwargs)
        mode = mode_of(OP, None, self.recompute)
        if compiling:
            weight = self.linear.weight
            version = torch.ops.ckptkern.version_of(weight.detach())
            return TracedLogits(args[0], weight, self.linear.bias, version, (), mode, self.workspace)
        matmul = Matmul(args[0], self.linear.weight, self.linear.bias, mode, self.log, self.workspace, lora)
        if self.log is None:
            self.count("fused")
            matmul.on_values = self.made_for
        else:
            self.inputs.append(args[0])
        return matmul.logits()

    def made_for(self, cause: str) -> None:
        """Counts a call whose logits are computed with their graph."""
        if self.module.training:
            self.calls["fused"] -= 1
            self.count("original", lambda: cause)

    @property
    def may_be_traced(self) -> bool:
        return self.only_loss and self.watch is None and not torch.compiler.is_exporting()

    def update(self, args: tuple) -> LoRA | None:
        """The layer's low-rank update in this call, if it has one and is what was checked."""
        if self.watch is None or len(args) != 1 or torch.compiler.is_compiling() or not self.watch.unchanged():
            return None
        return LoRA(*self.arguments(Call([args[0]], self.module.training, 0, args[0]))["lora"])

    def why_not(self, args: tuple, kwargs: dict[str, Any]) -> str:
        """Why the layer's own forward runs in a training call, and the remedy."""
        if len(args) != 1 or kwargs:
            return "it is called with more than its input. Leave it out by exclude="
        if self.watch is not None and not self.watch.unchanged():
            return self.watch.difference()
        module, x = self.linear, args[0]
        others = {type(one).__name__ for one in (x, module.weight, module.bias) if type(one) not in PLAIN}
        kind, transformed = class_of(self.module), torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()
        causes = (
            (transformed, "torch.func or torch.jit transforms it"),
            (kind is not self.kind, f"it is of class {kind.__name__}, and was {self.kind.__name__}"),
            (hooked(self.module) and not stays_gathered(self.module), "it has a hook"),
            (bool(others), f"its input, weight or bias is a {' and a '.join(sorted(others))}"),
            (not strided(module), "its weight is sparse"),
            (True, f"its input is {described(x)} and its weight {described(module.weight)}"),
        )
        return f"{next(cause for holds, cause in causes if holds)}. {AGAIN}"

    def takes(self, x: Tensor, lora: LoRA | None) -> bool:
        module = self.linear
        tensors = (x, module.weight, module.bias, *(() if lora is None else lora[:2]))
        return (
            (lora is None) == (self.watch is None) and
            (torch.is_grad_enabled() or self.log is not None)
            and class_of(self.module) is self.kind
            and (not hooked(self.module) or stays_gathered(self.module))
            and PLAIN.issuperset(map(type, tensors))
            and strided(module)
            and x.shape[-1:] == module.weight.shape[1:]
            and x.device == module.weight.device
            and (x.dtype == module.weight.dtype or torch.is_autocast_enabled(x.device.type))
            and x.is_floating_point()
            and not (torch._C._are_functorch_transforms_active() or torch.jit.is_tracing())
        )  # fmt: skip


class Chain(NamedTuple):
    """What a model does with a head's logits, from the linear layer to the loss."""

    matmul: Matmul
    steps: tuple[Step, ...]

    @property
    def kind(self) -> tuple:
        return tuple((step.name, str([a for a in leaves_of((step.args, step.kwargs)) if not isinstance(a, Tensor)]))
                     for step in self.steps)  # fmt: skip

    def unfused(self, flat: list[Tensor]) -> Tensor:
        return self.after(self.matmul.of(flat).values())

    def fused(self, flat: list[Tensor], mode: str = "full") -> Tensor:
        return self.after(self.matmul.of(flat, mode).logits())

    def after(self, values: Tensor) -> Tensor:
        for step in self.steps:
            values = step(values)
        return values

    def example(self, change: Callable[[Tensor], Tensor | None]) -> list[Tensor]:
        """Random tensors in place of the head's, whose logits are large enough for a softcap to show."""
        made = [torch.randn_like(change(one.detach())) for one in self.matmul.tensors]
        made[0] = made[0].to(torch.promote_types(made[0].dtype, made[1].dtype))  # autocast rounds it
        made[1] *= 4 * made[1].shape[1] ** -0.5
        for one in made[len(made) - 2 * (self.matmul.lora is not None) :]:
            one *= one.shape[1] ** -0.5
        return made

    def error(self) -> float:
        """The largest relative error of the loss and its gradients."""
        flat = self.example(wide)
        theirs, ours = (results(run, flat, list(range(len(flat))), []) for run in (self.unfused, self.fused))
        return difference(ours, theirs)

    def saved(self, mode: str) -> tuple[int, int]:
        """Bytes that are saved for backward besides parameters and targets: without us, and with us."""
        flat, found, loss = [one.requires_grad_() for one in self.example(lambda t: t)], [], self.steps[-1]
        given = [one for one in leaves_of((loss.args, loss.kwargs)) if type(one) is Tensor]
        for run in (self.unfused, lambda flat: self.fused(flat, mode)):
            with torch.enable_grad(), saved_tensors([*flat[1:], *given]) as saved:
                run(flat)
            found.append(saved.bytes)
        return found[0], found[1]


class Heads:
    """The heads of a model, by a call of it that computes a loss."""

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], losses: Losses, before: list[Tensor]):
        """losses: of such a call; before: the scalars that it returned."""
        self.model, self.losses, self.before = model, losses, before
        self.embedded = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
        # those with a low-rank update, and what they are read as
        with switched_off(model):
            self.adapted = {m: found for m in model.modules() if (found := adapted(m, losses.classes)) is not None}
        inside = {inner for m in self.adapted for inner in m.modules() if inner is not m}
        candidates = [
            m for m in model.modules() if is_linear(m) and len(m.weight) in losses.classes and m not in inside
        ]
        self.logs: dict[nn.Module, list[Wanted]] = {}
        # inputs of the norms whose results such heads read that become one op with their loss
        self.norms: dict[nn.Module, Tensor] = {}
        self.refused = "" if losses.counts else NO_LABELS
        candidates = [m for m in candidates if untouched(m) and dense(m) and not m.weight.is_meta]
        candidates = [*candidates, *self.adapted]
        if self.refused:
            self.logs = {m: [] for m in candidates}
        elif candidates:
            try:
                self.logs = self.logged(candidates, args, kwargs)
            except Exception as error:  # someone's forward may do with logits what only values bear
                is_ours = isinstance(error, Unreadable)
                self.refused = str(error) if is_ours else f"{type(error).__name__} without its values: {error}"
                self.logs = {m: [] for m in candidates}
        self.any_replaced = any(one.covered for log in self.logs.values() for one in log)

    def logged(self, candidates: list[nn.Module], args: tuple, kwargs: dict[str, Any]) -> dict[nn.Module, list[Wanted]]:
        """Calls the model with these as heads. Raises Unreadable if it then returns another loss."""
        heads = {module: Head(module, "full", self.adapted.get(module)) for module in candidates}
        try:
            for module, head in heads.items():
                head.log, module.forward = [], head
            with seeded(), unmoved(self.model), torch.no_grad(), watching(self.model) as results:
                self.model.eval()
                after = scalars(self.model(*args, **kwargs))
        finally:
            for head in heads.values():
                head.unbind()
        read = [one.logits.matmul.x for head in heads.values() for one in head.log]  # autocast rounds it
        wide = all(one.dtype.itemsize >= 4 for one in (*read, *(p for m in candidates for p in m.parameters())))
        tolerance = TOLERANCE if wide else 0.05
        for ours, theirs in zip(after, self.before, strict=True):
            if not rms(ours - theirs) <= tolerance * max(rms(theirs), 1e-3):
                raise Unreadable(f"the loss is {float(ours)}, not {float(theirs)}")
        fused = [head for head in heads.values() if any(one.covered for one in head.log)]
        self.norms = results.behind(x for head in fused for x in head.inputs)
        return {module: head.log for module, head in heads.items()}

    def norm(self, name: str, module: nn.Module, recompute: str) -> tuple[Row, Forward] | None:
        """The row of a norm before a head in the table, and its new forward, if that saves less."""
        return replaced(name, module, self.norms[module], recompute) if module in self.norms else None

    def row(self, name: str, module: nn.Module, recompute: str) -> tuple[Row | None, Head | None]:
        """Its row in the table, and its new forward if it is replaced; no row for a layer that is no head."""
        row = Row(name, type(module).__name__, None)
        if module not in self.logs:
            row.reason = NO_LOSS
            likely = (
                not self.losses.classes and is_linear(module) and id(module.weight) in self.losses.weights
                and len(module.weight) in self.embedded and not any(map(str.isdigit, name.split(".")))  # in no layer
            )  # fmt: skip
            return row if likely else None, None
        log = self.logs[module]
        chains = {
            one.kind: one for one in (Chain(w.logits.matmul, (*w.logits.steps, w.step)) for w in log if w.covered)
        }
        if not chains:
            passed = next((w.step.name for w in log), "nothing")
            row.reason = self.refused or f"its result goes through {passed} before F.cross_entropy"
            return None if self.any_replaced else row, None
        mode = mode_of(OP, None, recompute)
        row.error = max(chain.error() for chain in chains.values())
        saved = [chain.saved(mode) for chain in chains.values()]
        if row.error > TOLERANCE:
            row.reason = f"the numbers of {OP} differ by {row.error:.1e}"
            return row, None
        row.saved_before, row.saved_after = (sum(one) for one in zip(*saved, strict=True))
        if row.saved_after >= row.saved_before:
            row.reason = f"{OP} saves no less"
            return row, None
        others = sorted({one.step.name for one in log if not one.covered})
        if others:
            warnings.warn(
                f"ckptkern.convert: forward also hands the logits of {name} to {', '.join(others)}, for which they are made",
                stacklevel=6,
            )
        row.replaced_by = OP
        forward = Head(module, recompute, self.adapted.get(module))
        forward.only_loss = not others and not self.losses.of_module
        return row, forward
