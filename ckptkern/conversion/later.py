"""Converts a model when its first training call begins: in a trainer, the first place that knows a batch and the precision."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .convert import convert_call
from .recorder import check_step
from .report import Conversion
from .trace import leaves_of, mapped

SAMPLES = 2  # of the batch in the example: convert measures a step of the original model, too


class ConvertLater:
    """Holds a conversion that begins with the model's first training call; see `convert_later`.

    conversion: what `ckptkern.convert` returned; None before that call.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any]):
        check_step("convert_later", model, ((), {}))
        inspect.signature(convert_call).bind(model, None, **options)
        self.options, self.conversion = options, None
        self._lost = 0
        self._register(model)

    conversion: Conversion | None

    def _register(self, model: nn.Module) -> None:
        self._handle = model.register_forward_pre_hook(self._convert, prepend=True, with_kwargs=True)

    @torch._disable_dynamo
    def _convert(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
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
        self.remove()
        call = args, kwargs
        # a checkpoint around the model must not count what convert's own steps save
        with saved_tensors_hooks(Tensor.detach, Tensor.detach):
            try:
                self.conversion = convert_call(model, first_samples(call, SAMPLES), **self.options)
            except Exception:  # a forward that needs the whole batch; convert left the model as it was
                self.conversion = convert_call(model, first_samples(call, None), **self.options)

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


def first_samples(call: tuple[tuple, dict[str, Any]], count: int | None) -> tuple[tuple, dict[str, Any]]:
    """Returns the call with the first `count` samples of its batch (None: all), whose size is that of the first tensor. Its
    tensors are detached: the example's backward ends there."""
    batch = next((leaf.size(0) for leaf in leaves_of(call) if isinstance(leaf, Tensor) and leaf.dim()), 0)

    def part(tensor: Tensor) -> Tensor:
        samples = tensor[:count] if tensor.dim() and tensor.size(0) == batch else tensor
        return samples.detach().requires_grad_(tensor.requires_grad)

    return mapped(part, call)


def convert_later(model: nn.Module, **options: Any) -> ConvertLater:
    """Converts the model when its first training call begins, in the precision and with the arguments of that call.

        model, optimizer = accelerator.prepare(model, optimizer)
        later = ckptkern.integrations.convert_later(model, recompute="full")

    The example is the batch's first two samples, or the whole batch where two do not run. A model that is itself replaced
    runs that first call as it was. If the model is sharded by fully_shard after this, the second call begins the conversion.
    options: those of ckptkern.convert.

    Returns an object with `conversion` (None before that call), `check_calls()` (its `calls`; warns of lost fusion) and
    `remove()`. Raises what convert raises, at that first call.
    """
    return ConvertLater(model, options)
