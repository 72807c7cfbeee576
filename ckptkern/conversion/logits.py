"""Defines lazy logits: the LM head's output in training, computed only when read.

`Logits` follows the operations of models between the LM head and F.cross_entropy or F.nll_loss: views and masks of tokens,
float(), a scale, an untrained bias, a softcap; and the operations of trainers between it and a statistic of each token
(`tokens.statistic`). The loss is then ckptkern.linear_cross_entropy of the head's input. Any other function gets values, which
are computed once with their graph, or without a graph for a read of detached logits.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from .. import state
from ..memory import placeholders
from ..ops.dispatch.choices import cast_input
from ..ops.sublayer.dropout import draw_state, dropout_arguments
from ..ops.sublayer.lora import LoRA, LowRank, ReplayedLoRA, update_dtype
from .sharding import announces_backward, shards_of, unshard
from .tokens import (
    COPIES,
    PARTS,
    VIEWS,
    Formula,
    LMHead,
    Tokens,
    asks_for_copy,
    formula_after,
    is_loss,
    loss,
    product,
    read_apart,
    share,
    statistic,
)
from .trace import is_in_place, leaves_of, mapped

# Attributes and methods that Logits answer without values, because these do not show them.
SHOWN = ("H", "T", "data", "imag", "mH", "mT", "real")
METHODS = (
    "__len__", "_is_view", "dim", "element_size", "get_device", "is_complex", "is_conj", "is_floating_point", "is_inference",
    "is_neg", "is_signed", "ndimension", "nelement", "numel", "size",
)  # fmt: skip
DESCRIBING = frozenset(
    (
        *(
            attribute.__get__
            for name, attribute in vars(torch._C.TensorBase).items()
            if isinstance(attribute, types.GetSetDescriptorType) and name not in SHOWN
        ),
        *(getattr(Tensor, name) for name in METHODS),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    )
)
# Views answer these without values. A copy does not: its placeholder follows tokens, not torch's memory layout.
PLACING = frozenset((Tensor.is_contiguous, Tensor.storage_offset, Tensor.stride))
# After these, and after any function whose result shares the values' memory, other code may change or hook the values.
SHOWING = frozenset(
    (
        "__array__",
        "__dlpack__",
        "__set__",
        "_typed_storage",
        "data_ptr",
        "numpy",
        "register_hook",
        "retain_grad",
        "storage",
        "untyped_storage",
    )
)
REMEDY = (
    "Read logits before the optimizer's step, or copy them there by .detach().clone(), or convert with exclude= for this "
    "layer"
)


def logits_in(values) -> list[Logits]:
    return [leaf for leaf in leaves_of(values) if isinstance(leaf, Logits)]


class Step(NamedTuple):
    """Describes a call of a function with logits among its arguments."""

    function: Callable
    args: tuple
    kwargs: dict

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "a function")

    @property
    def logits(self) -> list[Logits]:
        return logits_in(self[1:])

    @property
    def is_in_place(self) -> bool:
        return is_in_place(self.name) or self.kwargs.get("out") is not None

    @property
    def changes_logits(self) -> bool:
        """Returns whether the call may change the logits' memory, or show it to code that may."""
        changed = self.kwargs.get("out", next(iter(self.args), None))
        return self.name in SHOWING or (self.is_in_place and bool(logits_in(changed)))

    @property
    def clones(self) -> bool:
        return self.name == "clone" or bool(self.kwargs.get("copy"))

    def of(self, values: Callable[[Logits], Any]):
        """Returns the function's result with values(logits) in place of logits."""
        args, kwargs = mapped(lambda tensor: values(tensor) if isinstance(tensor, Logits) else tensor, self[1:])
        return self.function(*args, **kwargs)

    @property
    def others(self) -> list:
        """Returns the leaves of its arguments that are not logits."""
        return [leaf for leaf in leaves_of(self[1:]) if not isinstance(leaf, Logits)]


def replayed(step: Step | None, z: Tensor) -> Tensor:
    """Applies a step, and the steps before it, to the matmul's logits z."""
    return z if step is None else step.of(lambda logits: replayed(logits.step, z))


class Matmul:
    """Describes one call of a linear layer: x [..., d], its parameters, and its low-rank update, if it has one.

    log: None, or a list that gets each step that needs the loss or values, and whether linear_cross_entropy covers it; logits
    are then followed without gradients, too.
    """

    lora: ReplayedLoRA | None = None
    has_loss = is_shown = False
    on_values: Callable[[str], None] | None = None  # gets the cause of the first values with a graph

    def __init__(self, x: Tensor, head: LMHead, log: list[tuple[Step, bool]] | None = None, lora: LoRA | None = None):
        self.x, self.head, self.log = cast_input("convert", x, head.weight), head, log
        if lora is not None:
            # the loss of all tokens and the values have one mask; a loss of some tokens uses their part of it
            self.lora_dtype = update_dtype(x, self.x.dtype, lora[:2])
            self.lora = ReplayedLoRA(*lora, draw_state(x, lora.dropout_p, True))
        self.precision = state.Precision()
        self.marks = [(tensor._version, tensor.data_ptr()) for tensor in self.tensors]
        self.aliases: list[Tensor] = []
        self.before_backward: list[Callable] = []  # hooks of fully_shard
        self.shards: list[tuple[Tensor, int]] = []  # its parameters, with their versions
        self.lazy_logits: weakref.WeakValueDictionary[int, Logits] = weakref.WeakValueDictionary()

    @property
    def tensors(self) -> list[Tensor]:
        update = () if self.lora is None else self.lora[:2]
        return [tensor for tensor in (self.x, *self.head[:2], *update) if tensor is not None]

    def check(self) -> None:
        """Raises RuntimeError if x or a parameter has changed."""
        same = [(tensor._version, tensor.data_ptr()) for tensor in self.tensors] == self.marks
        same &= all(shard._version == version for shard, version in self.shards)
        if not same or any(tensor.numel() and not tensor.untyped_storage().nbytes() for tensor in self.tensors):
            raise RuntimeError(
                f"ckptkern.convert: the head's input or weight changed before the logits were computed. {REMEDY}"
            )

    def hear(self, hook: Callable) -> None:
        """Stores a hook of fully_shard on its logits, for everything that is computed from them."""
        self.before_backward.append(hook)
        self.shards += [(shard, shard._version) for shard in shards_of(hook)]
        for logits in list(self.lazy_logits.values()):
            if logits.step is None and logits.computed:
                self.announced(logits.computed[0])

    def gather(self) -> None:
        """Gathers parameters that fully_shard has resharded since, as backward would, or as another head has: for a result
        with a gradient, which all ranks compute."""
        if self.before_backward:
            unshard(self.before_backward)  # does nothing if they are gathered
            pairs = list(zip(self.marks, self.tensors, strict=True))
            self.marks[1:] = [(version, tensor.data_ptr()) for (version, _), tensor in pairs[1:]]

    def announced(self, result: Tensor) -> Tensor:
        """Registers fully_shard's hooks on the result, and returns it."""
        if result.requires_grad:
            for hook in self.before_backward:
                result.register_hook(hook)
        return result

    def values(self, tensors: list[Tensor] | None = None) -> Tensor:
        """Returns the layer's result. tensors: in place of its own."""
        self.check()
        tensors, update = tensors or self.tensors, self.lora
        if update is not None:
            *tensors, a, b = tensors
        with self.precision:
            y = F.linear(*(tensor.to(self.x.dtype) for tensor in tensors))
            if update is not None:
                dropout = dropout_arguments(update.rng, update.dropout_p)
                a, b = a.to(self.lora_dtype), b.to(self.lora_dtype)
                y = y + LowRank(a, b, update.scale, dropout, 0).reference(tensors[0].to(self.x.dtype))
        return y

    def say(self, step: Step) -> None:
        """Says once why values are computed with a graph, and the remedy."""
        if self.on_values is not None:
            of = getattr(step.function, "__self__", None)
            name = of.__name__ if isinstance(of, types.GetSetDescriptorType) else step.name
            self.on_values(
                f"{name} reads its logits, which are then computed and saved for backward. Take the loss by F.cross_entropy, "
                "F.nll_loss, or log_softmax(-1) with gather, sum or mean, and metrics of logits.detach()"
            )
            self.on_values = None

    def show(self) -> None:
        """Computes the values of all its logits, which are used from now on: other code may change or hook them."""
        if not self.is_shown:
            for logits in list(self.lazy_logits.values()):
                logits.values()
            self.is_shown = True

    def logits(self) -> Logits:
        V = len(self.head.weight)
        with placeholders():
            tokens = Tokens(self.x, V, self.x.new_empty((*self.x.shape[:-1], V), device="meta"))
        return _LazyLogits.apply({"matmul": self, "tokens": tokens}, *self.tensors)


class _LazyLogits(torch.autograd.Function):
    """Gives logits a node in the graph, for code that differentiates them past __torch_function__: another
    autograd.Function, or DistributedDataParallel's search for unused parameters. A loss of linear_cross_entropy does not go
    through it."""

    @staticmethod
    def forward(ctx, fields: dict, *tensors: Tensor) -> Logits:
        placeholder, matmul = fields["tokens"].placeholder, fields["matmul"]
        logits = Tensor._make_wrapper_subclass(
            Logits,
            placeholder.shape,
            strides=placeholder.stride(),
            storage_offset=placeholder.storage_offset(),
            dtype=placeholder.dtype,
            device=matmul.x.device,
        )
        vars(logits).update(fields, computed=[])
        matmul.lazy_logits[id(logits)] = logits
        ctx.matmul, ctx.step, ctx.computed = matmul, logits.step, logits.computed
        ctx.set_materialize_grads(False)  # DistributedDataParallel's sink passes None on
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor | None):
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        matmul, wanted = ctx.matmul, ctx.needs_input_grad[1:]
        for hook in matmul.before_backward:
            hook(dy)
        if ctx.computed:  # they may have been changed in place since
            (y,), tensors = ctx.computed, matmul.aliases
        else:
            tensors = [t.detach().requires_grad_(need) for t, need in zip(matmul.tensors, wanted, strict=True)]
            with torch.enable_grad():
                y = replayed(ctx.step, matmul.values(tensors))
        needed = [t for t, need in zip(tensors, wanted, strict=True) if need]
        gradients = torch.autograd.grad(y, needed, dy, retain_graph=True) if y.requires_grad else [None] * len(needed)
        grads = iter(gradients)
        return None, *(next(grads) if need else None for need in wanted)


def is_result(logits: Logits) -> bool:
    """Returns whether an autograd.Function returned the logits, and made them in its forward. Their graph is then the
    Function's."""
    with torch._C.DisableTorchFunctionSubclass():
        return logits.detached and logits.requires_grad


class Logits(Tensor):
    """Lazy logits: a Matmul's logits z after steps, the last of which is `step`, by a formula, of some tokens.

    Logits may have values, too. Once other code holds these and may change them in place, the logits are these values, and
    nothing is followed.
    """

    matmul: Matmul
    tokens: Tokens
    formula: Formula = Formula()
    step: Step | None = None
    detached: bool = False  # from the graph, by detach() or torch.no_grad()
    computed: list[Tensor]  # its values, if there are any; shared with its node
    known: Tensor | None = None  # of detached logits: values without a graph, once read
    smoothed: Tensor | None = None  # of log-probabilities: minus their mean over the classes [...], with its graph

    def values(self) -> Tensor:
        """Returns the values, which are computed once, from the matmul through the steps."""
        if not self.computed:
            with torch.inference_mode(False), torch.enable_grad():
                if self.step is None:
                    # a gradient for aliases of the tensors ends there: one for a tied weight itself would go on through x to
                    # the embedding, which the outer backward does once more
                    matmul = self.matmul
                    matmul.aliases = [tensor.view_as(tensor) for tensor in matmul.tensors]
                    result = matmul.announced(matmul.values(matmul.aliases))
                else:
                    result = self.step.of(Logits.values)
                self.computed.append(result.detach() if self.detached else result)
        return self.computed[0]

    def apart(self) -> Tensor:
        """Returns values without a graph. After detach() they are computed once, and stored."""
        if self.computed:
            return self.computed[0].detach()
        if self.known is not None:
            return self.known
        values = self.matmul.values() if self.step is None else self.step.of(Logits.apart)
        if self.step is not None and self.step.name == "detach":
            self.known = values
        return values

    @property
    def steps(self) -> tuple[Step, ...]:
        """Returns the steps from the matmul to these logits, through the first of two factors."""
        return () if self.step is None else (*self.step.logits[0].steps, self.step)

    @property
    def is_cut(self) -> bool:
        """Returns whether detach() is among the steps."""
        return any(step.name == "detach" for step in self.steps)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        step = Step(function, args, kwargs or {})
        logits = step.logits
        self, matmul = logits[0], logits[0].matmul
        if function is Tensor.register_hook and not matmul.is_shown and announces_backward(args[1]):
            matmul.hear(args[1])
            return RemovableHandle(OrderedDict())
        describes = function in DESCRIBING or (
            function in PLACING and all(before.name in VIEWS for before in self.steps)
        )
        if (
            (describes and not matmul.is_shown)
            or (function is Tensor.register_hook and matmul.has_loss)
            or any(map(is_result, logits))
        ):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **step.kwargs)
        wants_gradient = function is Tensor.retain_grad or (
            function is torch.autograd.grad and bool(logits_in(step.kwargs.get("inputs", args[1:2])))
        )
        if matmul.has_loss and wants_gradient:
            raise RuntimeError(
                f"ckptkern.convert: {step.name} needs the gradient of logits whose loss was taken, which is not computed. "
                "Convert with exclude= for this layer"
            )
        if not (matmul.is_shown or torch.is_inference_mode_enabled()):
            fused = self.without_values(step, logits)
            if fused is not None:
                return fused
            if matmul.log is None and not step.changes_logits:
                result = read_apart(step, logits)
                if result is not NotImplemented:
                    return result
        if matmul.log is not None:
            matmul.log.append((step, False))
        if torch.is_grad_enabled() or step.changes_logits:
            matmul.say(step)
        if step.changes_logits:  # pending copies must have the values of before
            matmul.show()
        result = step.of(Logits.values)
        if any(share(leaf, values) for leaf in leaves_of(result) for z in logits for values in z.computed):
            matmul.show()
        return result

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function._schema.is_mutable:
            raise RuntimeError(f"ckptkern.convert: lazy logits cannot be changed in place by {function}")
        step = Step(function, args, kwargs or {})

        def values(logits):
            if not logits.detached or is_result(logits):
                logits.matmul.say(step)
            return logits.computed[0].detach() if logits.computed else replayed(logits.step, logits.matmul.values())

        return step.of(values)

    def without_values(self, step: Step, logits: list[Logits]):
        """Returns the step's result without values; None if it needs them."""
        if len(logits) == 2:
            return product(step, *logits)
        if len(logits) > 1:
            return None
        matmul = self.matmul
        if is_loss(step.function):
            result = loss(step, self)
            if matmul.log is not None and result is not None:
                matmul.log.append((step, True))
        else:
            followed = self.parts(step) if step.name in PARTS else self.followed(step)
            if followed is not None or matmul.log is not None:
                return followed
            result = statistic(step, self)
        if result is None:
            return None
        matmul.has_loss |= result.requires_grad
        return matmul.announced(result)

    def followed(self, step: Step) -> Logits | None:
        """Returns the logits after a step of views, of each element, or over the classes; None for other steps."""
        # in the example's call the log must show reads other than a loss: only log_softmax is followed over the classes
        if (self.matmul.log is not None and step.name in ("detach", "exp", "softmax")) or asks_for_copy(step, self):
            return None
        formula, tokens = self.formula, self.tokens.after(step) if step.name in VIEWS | COPIES else None
        if tokens is None and (match := formula_after(step, self)) is not None:
            formula, dtype = match
            tokens = self.tokens.copied(self.shape, dtype)
        return None if tokens is None else self.next(step, tokens, formula)

    def next(self, step: Step, tokens: Tokens, formula: Formula) -> Logits:
        """Returns the logits after this step."""
        detached = self.detached or step.name == "detach" or not torch.is_grad_enabled()
        fields = {
            "matmul": self.matmul,
            "tokens": tokens,
            "formula": formula,
            "detached": detached,
            "step": step,
        }
        return _LazyLogits.apply(fields, *(tensor.detach() if detached else tensor for tensor in self.matmul.tensors))

    def parts(self, step: Step) -> tuple[Logits, ...] | None:
        """Returns the logits after unbind, which __iter__ calls, split or chunk; None if the parts are not of whole tokens."""
        dim = step.kwargs.get("dim", next(iter(step.args[PARTS[step.name] :]), 0))
        if not isinstance(dim, int) or self.class_dim in (None, dim % self.dim()):
            return None
        try:
            parts = step.of(lambda _: self.tokens.placeholder)
        except Exception:  # the function's own error, which it raises again for values
            return None
        if step.name == "unbind":
            return tuple(self.select(dim, i) for i in range(len(parts)))
        ends = itertools.accumulate(part.shape[dim] for part in parts)
        return tuple(
            self.narrow(dim, end - part.shape[dim], part.shape[dim]) for end, part in zip(ends, parts, strict=True)
        )

    @property
    def class_dim(self) -> int | None:
        return self.tokens.class_dim

    def cross_entropy(self, target: Tensor, **options):
        matmul, wants_gradient = self.matmul, torch.is_grad_enabled() and not self.detached
        if wants_gradient and not options.get("return_accuracy"):
            matmul.gather()
        matmul.check()
        with matmul.precision, torch.set_grad_enabled(wants_gradient):
            return self.formula.cross_entropy(matmul.head, self.tokens.shown(), target, lora=matmul.lora, **options)
