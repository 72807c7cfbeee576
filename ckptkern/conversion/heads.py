"""Finds the LM head of a model and its loss: the linear layer whose result F.cross_entropy or F.nll_loss reads, in a call that
computes the loss. Makes the norm whose result the head reads save its input alone.

A norm written in PyTorch ops, such as transformers' RMSNorm, saves its input in float32 and its quotient, of all tokens. In a
model whose layers save only their inputs these are the largest other tensors.

TRL's trainers since version 1.16 read the head's weight themselves and never call the head, so they get no lazy logits:
`patch_trl` makes their fused head run linear_cross_entropy.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from .. import ops
from ..extras import missing
from ..memory import saved_tensors
from ..nn.unmodified import dense, hooked, strided, untouched
from ..ops.dispatch.choices import Bytes, parse_bytes
from ..ops.sublayer.lora import LoRA
from ..segments.checkpoint import Patch
from .arguments import arguments_getter, live_attributes, rescaled
from .binding import Forward, mode_of, requires_grad
from .calls import described
from .check import TOLERANCE, Check, difference, random_parameters, rms, wide
from .computed import Inputs
from .guard import Watch, reads_of
from .logits import Logits, Matmul, Step, replayed
from .protection import seeded, unmoved
from .reading import Steps, is_linear
from .recorder import floating_in
from .report import AGAIN, Row
from .sharding import class_of, stays_gathered
from .tiled import kinds_of
from .tokens import NEVER, LMHead, arguments_of, is_loss
from .trace import Call, Unreadable, is_leaf, switched, tensors_in, trace, upcast
from .traced import TracedLogits

OP = "linear_cross_entropy"
NO_LABELS = (
    "no label of the example counts: all are ignore_index (-100), or its sequences are of one token, whose shifted labels are "
    "empty. Give convert an example with labels that count"
)
NOT_RUN = "the example's call did not run it. Give convert a call that does"
NO_LOSS = "the example's call has no F.cross_entropy of its logits. With labels, the head and its loss become one op"


class Ran(TorchFunctionMode):
    """Notes what the example's call runs: the modules, by `note`, the tensors that functions take, and the number of classes
    of every F.cross_entropy and F.nll_loss."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: set[nn.Module] = set()
        self.taken: set[int] = set()  # tensors by id
        self.classes: set[int] = set()
        self.counts = False  # some target of a loss is not ignored

    def note(self, module: nn.Module, args: tuple) -> None:
        is_compiled = isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules
        # inner calls of compiled modules are not seen
        self.modules.update(module.modules() if is_compiled else (module,))

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.taken.update(map(id, tensors_in((args, kwargs))))
        if is_loss(function):
            arguments = arguments_of(Step(function, args, kwargs))
            logits, target = arguments["input"], arguments["target"]
            self.classes.add(logits.shape[min(logits.dim() - 1, 1)])
            self.counts |= bool(target.is_floating_point() or (target != arguments.get("ignore_index", -100)).any())
        return function(*args, **kwargs)

    def misses(self, module: nn.Module) -> bool:
        """Returns whether a module with matrices among its parameters was not run: neither it nor a module inside was
        called, and no function took its parameters, as with a tied head. Of leaf modules, linear layers alone count."""
        parameters = list(module.parameters())
        if all(p.dim() < 2 for p in parameters) or not self.modules.isdisjoint(module.modules()):
            return False
        taken = self.taken
        if not is_leaf(module):  # may share an embedding with modules that were called
            taken = taken.difference(id(p) for m in self.modules for p in m.parameters(recurse=False))
        elif not isinstance(module, nn.Linear):
            return False
        return taken.isdisjoint(map(id, parameters))


def scalars(output) -> list[Tensor]:
    """Returns the scalars among a model's outputs, which may be a loss."""
    return [tensor for tensor in floating_in(output) if tensor.dim() == 0]


def adapted(module: nn.Module, classes: set[int]) -> dict | None:
    """Returns the template {"lora"} of a linear layer with one of these numbers of classes and one low-rank update, which
    was read and checked on random numbers; None for other modules."""
    base = module._modules.get("base_layer")
    if (
        base is None
        or not (
            is_linear(base) and len(base.weight) in classes and dense(base) and all(map(untouched, module.modules()))
        )
        or base.weight.is_meta
    ):
        return None
    try:
        with unmoved(module), random_parameters(module):
            x = base.weight.new_empty(2, 3, base.in_features).normal_()
            steps, traced = Steps(module), trace(module.train(), ((x,), {}))
            layer = steps.linear_of(steps.strip(traced.node(traced.result)))
            if layer is None or layer.update is None or layer.weight.form:
                return None
            module.eval()
            template = {"lora": layer.update}
            with torch.no_grad(), rescaled(module, template):
                lora = LoRA(*arguments_getter(module, template)(Inputs([x], False, 0, x))["lora"])
                matmul = Matmul(x, LMHead(base.weight, base.bias), lora=lora)
                error = difference([matmul.values()], [type(module).forward(module, x)])
    except Unreadable:
        return None
    return template if error <= TOLERANCE else None


class Head(Forward):
    """Returns a linear layer's lazy logits in training, which become a loss or values when they are read.

    The layer's own forward runs without gradients, in torch.func's transforms, under torch.compile unless only a loss reads the
    logits, and if something has changed: its class (LoRA), hooks, a weight of another kind. template: of a layer with a
    low-rank update (`adapted`).
    """

    is_region = False
    arguments: Callable | None = None
    watch: Watch | None = None
    log: list[tuple[Step, bool]] | None = None  # during the example's call
    only_loss = False  # only F.cross_entropy took the logits in the example's call

    def __init__(self, module: nn.Module, recompute: str, template: dict | None = None):
        super().__init__(module, recompute)
        self.kind, self.linear = type(module), module
        if template is not None:
            self.linear, self.arguments = module.base_layer, arguments_getter(module, template)
            x = self.linear.weight.new_zeros(1, 2, self.linear.in_features)
            self.watch = Watch(module, reads_of(module, ((x,), {})), live_attributes(module, template))
        self.inputs: list[Tensor] = []  # of the example's call, before autocast rounds them

    def run(self, *args, **kwargs):
        compiling, trains = is_compiling(), torch.is_grad_enabled()
        trains = self.log is not None or (trains and any(map(requires_grad, (*args, *self.module.parameters()))))
        may_be_traced = self.only_loss and self.watch is None and not torch.compiler.is_exporting()
        if not trains or (compiling and not may_be_traced):
            return self.original(*args, **kwargs)
        lora = None  # the layer's low-rank update in this call, if it has one and is what was checked
        if self.watch is not None and len(args) == 1 and self.watch.unchanged():
            lora = LoRA(*self.arguments(Inputs([args[0]], self.module.training, 0, args[0]))["lora"])
        if why := self.why_not(args, kwargs, lora):
            return self.unfused(lambda: why, args, kwargs)
        weight, bias = self.linear.weight, self.linear.bias
        head = LMHead(weight, bias, mode_of(OP, None, self.recompute), self.workspace)
        if compiling:
            return TracedLogits(args[0], head, torch.ops.ckptkern.version_of(weight.detach()))
        matmul = Matmul(args[0], head, self.log, lora)
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

    def why_not(self, args: tuple, kwargs: dict, lora: LoRA | None) -> str:
        """Returns why the layer's own forward runs in a training call, with the remedy; "" if it need not."""
        if len(args) != 1 or kwargs:
            return "it is called with more than its input. Leave it out by exclude="
        if (lora is None) != (self.watch is None):
            return self.watch.difference()
        (x,), module, kind, why = args, self.linear, class_of(self.module), ""
        tensors = (x, module.weight, module.bias, *(() if lora is None else lora[:2]))
        if torch._C._are_functorch_transforms_active() or torch.jit.is_tracing():
            why = "torch.func or torch.jit transforms it"
        elif kind is not self.kind:
            why = f"it is of class {kind.__name__}, and was {self.kind.__name__}"
        elif hooked(self.module) and not stays_gathered(self.module):
            why = "it has a hook"
        elif others := kinds_of(tensors):
            why = f"its input, weight or bias is a {others}"
        elif not strided(module):
            why = "its weight is sparse"
        elif not (
            x.shape[-1:] == module.weight.shape[1:]
            and x.device == module.weight.device
            and (x.dtype == module.weight.dtype or torch.is_autocast_enabled(x.device.type))
            and x.is_floating_point()
        ):
            why = f"its input is {described(x)} and its weight {described(module.weight)}"
        return f"{why}. {AGAIN}" if why else ""


# -- the heads of a model


class Chain:
    """Describes what a model does with a head's logits, from the linear layer to the loss, which is the last step."""

    def __init__(self, last: Step):
        self.last, logits = last, last.logits[0]
        self.matmul, steps = logits.matmul, (*logits.steps, last)
        self.kind = tuple((s.name, str([value for value in s.others if not isinstance(value, Tensor)])) for s in steps)

    def loss(self, flat: list[Tensor], mode: str | None = None) -> Tensor:
        """Returns the loss of these tensors in place of the head's. mode: by lazy logits, in this mode."""
        own = self.matmul.lora
        count = len(flat) - 2 * (own is not None)
        lora = None if own is None else LoRA(*flat[count:], own.scale)  # without dropout
        matmul = Matmul(flat[0], LMHead(*flat[1:count])._replace(mode=mode or "full"), lora=lora)
        return replayed(self.last, matmul.values() if mode is None else matmul.logits())

    def example(self, change: Callable[[Tensor], Tensor | None]) -> list[Tensor]:
        """Returns random tensors in place of the head's, whose logits are large enough for a softcap to show."""
        tensors = [torch.randn_like(change(tensor.detach())) for tensor in self.matmul.tensors]
        tensors[0] = tensors[0].to(torch.promote_types(tensors[0].dtype, tensors[1].dtype))  # autocast rounds it
        tensors[1] *= 4 * tensors[1].shape[1] ** -0.5
        for matrix in tensors[-2:] if self.matmul.lora is not None else ():
            matrix *= matrix.shape[1] ** -0.5
        return tensors

    def compared(self, mode: str) -> tuple[float, int, int]:
        """Returns (the largest relative error of the loss and its gradients, bytes saved for backward besides parameters and
        targets by the model, the same by linear_cross_entropy)."""
        flat = self.example(wide)
        error = Check(self.loss, functools.partial(self.loss, mode="full")).error(flat, [*range(len(flat))])
        flat, bytes_ = [tensor.requires_grad_() for tensor in self.example(lambda t: t)], []
        targets = [tensor for tensor in self.last.others if type(tensor) is Tensor]
        for lazy in (None, mode):
            with torch.enable_grad(), saved_tensors([*flat[1:], *targets]) as saved:
                self.loss(flat, lazy)
            bytes_.append(saved.bytes)
        return error, *bytes_


class Heads:
    """Finds the heads of a model, in a call that computes a loss."""

    def __init__(self, model: nn.Module, call: Call, ran: Ran, before: list[Tensor]):
        """Reads the heads. ran: what such a call ran; before: the scalars that it returned."""
        self.model, self.ran, self.before = model, ran, before
        self.embedded = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
        # layers with a low-rank update, with their templates
        with switched(model):
            self.adapted = {m: template for m in model.modules() if (template := adapted(m, ran.classes)) is not None}
        inside = {inner for m in self.adapted for inner in m.modules() if inner is not m}
        linears = (m for m in model.modules() if is_linear(m) and len(m.weight) in ran.classes and m not in inside)
        candidates = [m for m in linears if untouched(m) and dense(m) and not m.weight.is_meta] + list(self.adapted)
        self.logs: dict[nn.Module, list[tuple[Step, bool]]] = {m: [] for m in candidates}
        # modules whose results are read by heads that become one op with their loss, or are those of a head inside, with their
        # inputs and the name of the head inside
        self.before_heads: dict[nn.Module, tuple[Tensor, str]] = {}
        self.refused = "" if ran.counts else NO_LABELS
        if candidates and not self.refused:
            try:
                self.logs = self.logged(candidates, call)
            except Exception as error:  # a forward may do with logits what needs values
                is_ours = isinstance(error, Unreadable)
                self.refused = str(error) if is_ours else f"{type(error).__name__} without its values: {error}"

    def logged(self, candidates: list[nn.Module], call: Call) -> dict[nn.Module, list[tuple[Step, bool]]]:
        """Calls the model with these layers as heads, and returns the log of each. Raises Unreadable if the model returns
        another loss."""
        (args, kwargs), heads = call, {m: Head(m, "full", self.adapted.get(m)) for m in candidates}
        # each call's module, input, result, and "", or the input and name of the head inside whose result it is
        noted: list[tuple[nn.Module, Tensor, Tensor, str]] = []

        def note(module, args, kwargs, y):
            log = y.matmul.log if isinstance(y, Logits) else None
            if name := next((n for n, m in module.named_modules() if m in heads and heads[m].log is log), ""):
                y = y.matmul.x
            is_one = len(args) == 1 and not kwargs and type(args[0]) is Tensor and type(y) is Tensor
            if is_one and args[0].dim() > 1 and args[0].is_floating_point():  # ids would be cut along the batch
                noted.append((module, upcast(module)(args[0]), y.detach(), name))

        with seeded(), unmoved(self.model), torch.no_grad():  # `unmoved` also restores hooks and forwards
            of_heads = {inner for head in heads for inner in head.modules()}
            for name, m in list(self.model.named_modules()):
                parts, dims = [*m.modules()], {p.dim() for p in m.parameters()}
                in_no_layer = 1 < len(parts) < 9 and not any(map(str.isdigit, name.split(".")))
                may_be = dims == {1} if len(parts) == 1 else dims and in_no_layer
                if (
                    may_be
                    and m not in of_heads
                    and not [*m.buffers()]
                    and all(untouched(p) and dense(p) for p in parts)
                ):
                    m.register_forward_hook(note, with_kwargs=True)
            for module, head in heads.items():
                head.log, module.forward = [], head
            self.model.eval()
            returned = scalars(self.model(*args, **kwargs))
        read = [step.logits[0].matmul.x for head in heads.values() for step, _ in head.log]  # autocast rounds it
        wide = all(tensor.dtype.itemsize >= 4 for tensor in (*read, *(p for m in candidates for p in m.parameters())))
        tolerance = TOLERANCE if wide else 0.05
        for ours, theirs in zip(returned, self.before, strict=True):
            if not rms(ours - theirs) <= tolerance * max(rms(theirs), 1e-3):
                raise Unreadable(f"the loss is {float(ours)}, not {float(theirs)}")
        fused = [head for head in heads.values() if any(covered for _, covered in head.log)]
        inputs = {x.untyped_storage()._cdata for head in fused for x in head.inputs}
        self.before_heads = {m: (x, name) for m, x, y, name in noted if y.untyped_storage()._cdata in inputs}
        return {module: head.log for module, head in heads.items()}

    def row(self, name: str, module: nn.Module, recompute: str) -> tuple[Row | None, Forward | None]:
        """Returns the module's row in the table, and its new forward if it is replaced. The row is None for a layer that is
        not a head."""
        row = Row(name, type(module).__name__, None)
        if module not in self.logs:
            row.reason = NO_LOSS
            likely = (
                not self.ran.classes
                and is_linear(module)
                and module in self.ran.modules
                and len(module.weight) in self.embedded
                and not any(map(str.isdigit, name.split(".")))  # in no layer
            )
            return row if likely else None, None
        log = self.logs[module]
        chains = {chain.kind: chain for chain in (Chain(step) for step, covered in log if covered)}
        if not chains:
            passed = next((step.name for step, _ in log), "nothing")
            row.reason = self.refused or f"its result goes through {passed} before F.cross_entropy"
            any_replaced = any(covered for log in self.logs.values() for _, covered in log)
            return None if any_replaced else row, None
        mode = mode_of(OP, None, recompute)
        errors, before, after = zip(*(chain.compared(mode) for chain in chains.values()), strict=True)
        row.error = max(errors)
        if row.error > TOLERANCE:
            row.reason = f"the numbers of {OP} differ by {row.error:.1e}"
            return row, None
        row.saved_before, row.saved_after = sum(before), sum(after)
        if row.saved_after >= row.saved_before:
            row.reason = f"{OP} does not save less"
            return row, None
        others = sorted({step.name for step, covered in log if not covered})
        if others:
            warnings.warn(
                f"ckptkern.convert: forward also passes the logits of {name} to {', '.join(others)}, which needs their values",
                stacklevel=7,
            )
        row.replaced_by = OP
        forward = Head(module, recompute, self.adapted.get(module))
        # Dynamo treats nn.CrossEntropyLoss as a function of tensors
        forward.only_loss = not others and not any(isinstance(m, nn.CrossEntropyLoss) for m in self.ran.modules)
        return row, forward


# The outputs after the log-probabilities of trl.kernels.ChunkedLogProbFunction.forward of TRL 1.16.
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

_patches: list[Patch] = []  # not yet removed, oldest first


def patch_trl(workspace: Bytes = None) -> Patch:
    """Makes the fused LM head of TRL's trainers run `ckptkern.linear_cross_entropy`, until the result's ``remove()`` or the
    end of a ``with`` block.

        ckptkern.convert(model, input_ids=ids, labels=ids)
        ckptkern.patch_trl()
        trl.SFTTrainer(model, ...).train()

    The patch covers SFT, DPO, KTO, GRPO and RLOO of TRL 1.16. `workspace` bounds its memory. It saves 8 bytes a token for
    backward.

    Raises ImportError without TRL, RuntimeError for another version of TRL's function. A call raises RuntimeError for a weight
    that ZeRO-3 has split.
    """
    size = parse_bytes("patch_trl", workspace)
    if hint := missing("trl"):
        raise ImportError(hint)
    try:
        from trl.kernels import ChunkedLogProbFunction as function
    except ImportError:
        function = None
    forwards = None if function is None else (function.forward, token_log_probs)
    if forwards is None or len({tuple(inspect.signature(forward).parameters)[1:] for forward in forwards}) > 1:
        raise RuntimeError(
            "ckptkern.patch_trl: this version of TRL has no trl.kernels.ChunkedLogProbFunction with the arguments of TRL 1.16. "
            "Leave the patch out: where TRL reads logits, those of a converted model are lazy"
        )
    function.apply = functools.partial(token_log_probs, size)
    return Patch(_patches, functools.partial(delattr, function, "apply"))


def token_log_probs(
    workspace: int | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = OUTPUTS,
) -> tuple[Tensor | None, ...]:
    """Computes what TRL's function returns: log-probabilities of targets [N], and of the requested outputs, else None:
    entropy [N], log(sum p^2) [N], mean logit [N], whether the target is the arg max [N]. Logits are softcap tanh(logit_scale
    (hidden weight^T + bias) / softcap) / temperature. hidden [N, d], weight [V, d], bias [V]."""
    if hasattr(weight, "ds_id"):
        raise RuntimeError(
            "ckptkern.patch_trl: DeepSpeed's ZeRO-3 has split the head's weight, which backward would not gather. Leave the "
            "patch out"
        )
    if not torch.is_autocast_enabled(hidden.device.type):  # TRL computes in the hidden states' dtype
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    cap = None if final_logit_softcapping is None else final_logit_softcapping / temperature
    scale = logit_scale / temperature
    statistics = functools.partial(
        ops.linear_cross_entropy,
        hidden,
        weight,
        targets,
        linear_bias=bias,
        reduction="none",
        ignore_index=NEVER,
        workspace=workspace,
    )
    wants_squares, wants_mean = "log_sum_sq_probs" in outputs, "mean_logits" in outputs
    result = statistics(
        logit_scale=scale,
        softcap=cap,
        return_log_probs=True,
        return_entropy="entropy" in outputs,
        return_accuracy="is_top1" in outputs,
        return_lse=wants_squares or wants_mean,
        label_smoothing=float(wants_mean),  # the loss is then lse - the mean logit
    )
    with torch.no_grad():  # sum p^2 = sum exp(2 z - 2 lse)
        squared = None
        if wants_squares:
            twice = statistics(logit_scale=2 * scale, softcap=None if cap is None else 2 * cap, return_lse=True)
            squared = twice.lse - 2 * result.lse
        mean = result.lse - result.loss if wants_mean else None
    top = result.accuracy.bool() if result.accuracy is not None else None
    return result.log_probs, result.entropy, squared, mean, top
