"""Sequential and LayerStack: lists of layers in checkpointed regions."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.dispatch.choices import autocast_dtype, check_count, own_modes
from ..segments import sequential
from ..segments.checkpoint import checkpoint
from .layer import Layer


class _Layers(Layer):
    """A list of layers; its slices have its options. options: those of `ckptkern.checkpoint`."""

    def set_options(self, options: dict[str, Any], **own: Any) -> None:  # type: ignore[override]
        for name in options.keys() - sequential.OPTIONS:
            raise TypeError(f"{type(self).__name__}: {name} is not an option of ckptkern.checkpoint")
        self.__dict__.update(own, options=options)

    def __getitem__(self, index):
        part = super().__getitem__(index)
        if isinstance(index, slice):
            part.__dict__.update({name: getattr(self, name) for name in self.shown})
        return part


class Sequential(_Layers, nn.Sequential):
    """Runs a torch.nn.Sequential in segments, each an activation checkpoint.

    segments: as in `ckptkern.checkpoint_sequential`. options: those of `ckptkern.checkpoint`.
    """

    torch_class = nn.Sequential
    shown = ("segments", "options")

    def __init__(self, *layers, segments: sequential.Segments = "sqrt", **options):
        super().__init__(*layers)
        self.set_options(segments, **options)

    def set_options(self, segments: sequential.Segments = "sqrt", **options: Any) -> None:  # type: ignore[override]
        if not isinstance(segments, (int, str)) and not callable(segments):
            sequential.split(self, segments)  # raises
        super().set_options(options, segments=segments)
        self._parts: dict[tuple, list[sequential.Part]] = {}

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return super().forward(input)
        key: tuple = (self.segments, len(self))
        if isinstance(input, Tensor):
            key += (tuple(input.shape), input.dtype, input.requires_grad, autocast_dtype(input), self.training)
        if key not in self._parts:
            self._parts[key] = sequential.split(self, self.segments, input if isinstance(input, Tensor) else None)
        return sequential.run(self, self._parts[key], input, **self.options)


def _through(layers: tuple[Callable, ...], kwargs: dict, x: Tensor, *args) -> Tensor:
    """Runs x through the layers, each in its own recompute mode, also inside a segment."""
    with nullcontext() if torch.compiler.is_compiling() else own_modes():  # compiled, ops keep to their modes anyway
        for layer in layers:
            x = layer(x, *args, **kwargs)
            if not isinstance(x, Tensor):
                raise TypeError(
                    f"LayerStack: a layer must return a tensor, the next layer's input, but {type(layer).__name__} returned "
                    f"{type(x).__name__}"
                )
    return x


class LayerStack(_Layers, nn.ModuleList):
    """Runs a list of layers, each group of `every` layers as one activation checkpoint.

        x = layers[0](x, *args, **kwargs); x = layers[1](x, *args, **kwargs); ...

    Saved for backward: the input of each group, and `args` and `kwargs` once. Backward recomputes one group at a time, whose
    layers save what their own modes save: one more forward of all groups but the last.
    options: those of `ckptkern.checkpoint`.

    The stack warns if a model calls its layers one by one, as in transformers: use `ckptkern.convert(model, ..., every=k)`.
    """

    shown = ("every", "options")

    def __init__(self, layers: Iterable[nn.Module] | None = None, every: int = 2, **options: Any):
        super().__init__(layers)
        check_count("LayerStack", "every", every)
        self.set_options(options, every=every)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layers = tuple(self._modules.values())
        starts = range(0, len(layers), self.every)
        for start in starts:
            group = layers[start : start + self.every]
            if start == starts[-1] or not torch.is_grad_enabled():
                x = _through(group, kwargs, x, *args)
            else:
                x = checkpoint(_through, group, kwargs, x, *args, **self.options)
        return x

    def __iter__(self) -> Iterator[nn.Module]:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            frame = sys._getframe(1)
            caller = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else self
            if isinstance(caller, nn.Module) and caller is not self:  # another module's forward
                _warn_of_iteration()
        return super().__iter__()


@functools.cache
def _warn_of_iteration() -> None:
    warnings.warn(
        "ckptkern.nn.LayerStack: a model's forward iterates over the stack and calls its layers one by one, so that they are "
        "not grouped. Call the stack, or use ckptkern.convert(model, ..., every=k)",
        stacklevel=4,
    )
