"""nn.Sequential whose layers are run in segments."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..ops._choices import autocast_dtype
from ..segments import sequential
from .share import check_kind, share

_OPTIONS = {
    name for name, one in inspect.signature(sequential.checkpoint).parameters.items() if one.kind is one.KEYWORD_ONLY
}


class Sequential(torch.nn.Sequential):
    """torch.nn.Sequential, run in segments whose insides are rebuilt in backward.

    segments: as in `ckptkern.segments.sequential.split`: a number, "sqrt", "every 2", "2GiB", a name pattern or a callable.
    options: those of `ckptkern.checkpoint`. A bound in bytes is measured on fake tensors at the first forward pass for
    each input shape, dtype, autocast dtype and mode (training or not), and remembered. Parameters and `state_dict` are
    those of torch.nn.Sequential; without gradients forward is torch's, too.
    """

    def __init__(self, *layers, segments: sequential.Segments = "sqrt", **options):
        super().__init__(*layers)
        self._set(segments, options)

    @classmethod
    def from_torch(cls, module: torch.nn.Sequential, segments: sequential.Segments = "sqrt", **options) -> Sequential:
        """A twin of `module` that shares its layers and hooks."""
        check_kind(cls, module, torch.nn.Sequential)
        twin = share(cls, module)
        twin._set(segments, options)
        return twin

    def _set(self, segments: sequential.Segments, options: dict[str, Any]) -> None:
        if not isinstance(segments, (int, str)) and not callable(segments):
            sequential.split(self, segments)  # raises
        for name in options.keys() - _OPTIONS:
            raise TypeError(f"{type(self).__name__}: {name} is not an option of ckptkern.checkpoint")
        self.segments, self.options = segments, options
        self._parts: dict[tuple, list[sequential.Part]] = {}

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(input)
        key: tuple = (self.segments, len(self))
        if isinstance(input, Tensor):
            key += (tuple(input.shape), input.dtype, input.requires_grad, autocast_dtype(input), self.training)
        if key not in self._parts:
            self._parts[key] = sequential.split(self, self.segments, input if isinstance(input, Tensor) else None)
        return sequential.run(self, self._parts[key], input, **self.options)

    def __getitem__(self, index):
        part = super().__getitem__(index)
        if isinstance(index, slice):
            part.segments, part.options = self.segments, self.options
        return part

    def extra_repr(self) -> str:
        return f"segments={self.segments!r}"
