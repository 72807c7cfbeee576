"""Converts a model when its first training call begins: in a trainer, the first place that knows a batch and the precision."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from .convert import convert, convert_call
from .recorder import as_input, check_step
from .report import Conversion
from .trace import Call, leaves_of, recomputed, tensors_in

# samples of the batch and tokens of each in the example, which convert also runs unconverted; the next if they do not run
EXAMPLES = ((2, 512), (2, None), (None, None))


class ConvertLater:
    """Holds a conversion that begins with the model's first training call; see `convert_later`.

    conversion: what `ckptkern.convert` returned; None before that call.
    """

    def __init__(self, model: nn.Module, options: dict):
        check_step("convert_later", model, ((), {}))
        options = convert.__kwdefaults__ | options
        inspect.signature(convert_call).bind(model, None, **options)
        for hook in [*model._forward_pre_hooks.values()]:
            if isinstance(earlier := getattr(hook, "__self__", None), ConvertLater):  # of training that was interrupted
                earlier.remove()
        self.options, self.conversion = options, None
        self._lost, self._waited = 0, False
        self._register(model)

    conversion: Conversion | None

    def _register(self, model: nn.Module) -> None:
        self._handle = model.register_forward_pre_hook(self._convert, prepend=True, with_kwargs=True)

    @torch._disable_dynamo
    def _convert(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if not torch.is_grad_enabled():  # Lightning trains what `from_pretrained` gives in evaluation mode
            return
        if next(iter(model._forward_pre_hooks)) != self._handle.id:  # fully_shard's later hook has begun the forward
            self.remove()
            self._register(model)  # as the first hook of the next call
            return
        if getattr(model, "_is_replica", False):
            raise ValueError(
                "convert_later: the model runs in nn.DataParallel, whose replicas would run the parameters of the first GPU. "
                "Start one process for each GPU, as with torchrun"
            )
        wrapper = model if isinstance(model, DistributedDataParallel) else DistributedDataParallel._active_ddp_module
        # a static graph's first step counts what the graph's hooks see
        if getattr(wrapper, "static_graph", False) and not self._waited:
            self._waited = wrapper.require_backward_grad_sync
            return
        self.remove()
        for sizes in EXAMPLES:
            try:
                # a checkpoint around the model must not count what convert's own steps save
                with saved_tensors_hooks(Tensor.detach, Tensor.detach):
                    self.conversion = convert_call(model, example_of((args, kwargs), *sizes), **self.options)
                return
            except Exception:  # a forward that needs the whole batch; convert left the model as it was
                if sizes == EXAMPLES[-1]:
                    raise

    def remove(self) -> None:
        """Cancels the conversion if it has not begun."""
        self._handle.remove()

    def check_calls(self) -> dict[str, int]:
        """Returns `Conversion.calls`, zeros before the first call. Warns where training calls since the last check did not run
        as their rows say."""
        if self.conversion is None:
            return {}
        lost = {row.name: row.lost for row in self.conversion.converted if row.lost}
        if sum(lost.values()) > self._lost:
            self._lost = sum(lost.values())
            warnings.warn(
                f"ckptkern: {self._lost} training calls of converted modules were not fused, of {', '.join(list(lost)[:3])}"
                f"{' and others' * (len(lost) > 3)}: earlier warnings say why",
                stacklevel=3,
            )
        return self.conversion.calls


class Copying(TorchFunctionMode):
    """Copies a value with part(tensor) in place of each tensor, whatever object holds it."""

    def __init__(self, part: Callable[[Tensor], Tensor]):
        super().__init__()
        self.part = part

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return self.part(args[0]) if function is Tensor.__deepcopy__ else function(*args, **(kwargs or {}))

    def __call__(self, value):
        if isinstance(value, Tensor):
            return self.part(value)
        with suppress(Exception), self:  # what cannot be copied is passed on
            return copy.deepcopy(value)
        return value


def example_of(call: Call, samples: int | None, tokens: int | None) -> Call:
    """Returns the call with so many samples of its batch, whose size is that of the first tensor, and so many tokens of each
    (None: all): those of which the fewest labels are ignored. Its tensors are detached: the example's backward ends there."""
    tensors = [tensor for tensor in tensors_in(call) if tensor.dim()]
    batch = tensors[0].size(0) if tensors else None
    ids = [t for t in tensors if t.dim() == 2 and t.size(0) == batch and t.dtype == torch.long and type(t) is Tensor]
    ignored = sum((t < 0).sum(1).cpu() for t in ids)
    rows = ignored.argsort(stable=True)[:samples] if ids and samples else slice(samples)
    length = ids[0].size(1) if ids and tokens and ids[0].size(1) > tokens else None
    counted = [(t[rows] >= 0).any(0).nonzero() for t in ids if length and (t < 0).any()]
    stop = max([tokens or 0, *(int(places.max()) + 1 for places in counted if len(places))])

    def part(tensor):
        if tensor.dim() and tensor.size(0) == batch:
            tensor = tensor[rows]
        for dim in range(1, tensor.dim()):
            if tensor.size(dim) == length:
                tensor = tensor.narrow(dim, stop - tokens, tokens)
        return as_input(tensor)

    return recomputed(call, map(Copying(part), leaves_of(call)))


def convert_later(model: nn.Module, **options: Any) -> ConvertLater:
    """Converts the model when its first training call begins, in the precision and with the arguments of that call.

        model, optimizer = accelerator.prepare(model, optimizer)
        later = ckptkern.integrations.convert_later(model, recompute="full")

    The example is two samples of the batch, with at most 512 tokens of each, or the whole batch where these do not run. A
    model that is itself replaced runs that first call as it was. If the model is sharded by fully_shard after this, or is in
    DistributedDataParallel with a static graph, the second call begins the conversion.
    options: those of ckptkern.convert.

    Returns an object with `conversion` (None before that call), `check_calls()` (its `calls`; warns of lost fusion) and
    `remove()`. Raises what convert raises, at that first call.
    """
    return ConvertLater(model, options)
