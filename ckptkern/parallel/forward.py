"""What replaces a block's forward on a shard: its own, on this rank's parts of the parameters."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as Split

from ..ops.dispatch.choices import kernels_alone
from ..ops.dispatch.shard import ACTIVE, NotSharded
from ..ops.sharded import Shard
from .roles import Place

_log = logging.getLogger("ckptkern")


class Waited(torch.autograd.Function):
    """The plain tensor of one that a collective still writes, as torch's styles hand it on."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.wait()

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return dy


class Around:
    """A forward around a block's own. An object, so that deepcopy and pickle follow it."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.inner: Callable | None = module.__dict__.get("forward")

    def call(self, *args, **kwargs):
        return (self.inner or functools.partial(type(self.module).forward, self.module))(*args, **kwargs)


class Sharded(Around):
    """A block's forward on a shard."""

    def __init__(self, module: nn.Module, places: dict[str, Place], shard: Shard):
        super().__init__(module)
        self.shard = shard
        summed = {True, "sequence"} if shard.sequence else {True}
        self.summed = {name for name, place in places.items() if place.summed in summed}

    def __call__(self, *args, **kwargs):
        args, kwargs = self.as_local(args, kwargs)
        try:
            with self.parameters(self.parts()):
                ACTIVE.shard, outer = self.shard, ACTIVE.shard
                try:
                    return self.call(*args, **kwargs)
                finally:
                    ACTIVE.shard = outer
        except NotSharded as reason:
            self.check_whole(str(reason))
        with self.parameters(self.whole()):
            ACTIVE.gathered, outer = True, ACTIVE.gathered
            try:
                return self.call(*args, **kwargs)
            finally:
                ACTIVE.gathered = outer

    def as_local(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The call with DTensors as this rank reads them: the first tensor, which is the input, in the layout of the group."""
        first = True

        def local(value: Any) -> Any:
            nonlocal first
            if type(value) in (tuple, list):
                return type(value)(map(local, value))
            if not isinstance(value, Tensor):  # a cache, say, stays the same object
                return value
            place: Placement = Split(value.dim() - 2) if first and self.shard.sequence else Replicate()
            first = False
            if isinstance(value, DTensor):
                value = value.redistribute(placements=[place]).to_local()
            return Waited.apply(value) if type(value) is AsyncCollectiveTensor else value

        return tuple(map(local, args)), {name: local(value) for name, value in kwargs.items()}

    def names(self) -> Iterator[tuple[nn.Module, str, str]]:
        """(owner, its name there, its name) of every parameter, also of one that has several."""
        for path, owner in self.module.named_modules():
            for name, value in owner._parameters.items():
                if value is not None:
                    yield owner, name, f"{path}.{name}" if path else name

    def parts(self) -> dict[int, Tensor]:
        """This rank's part of every parameter, by the parameter's id."""
        made: dict[int, Tensor] = {}
        summed: dict[int, Tensor] = {}
        for owner, key, name in self.names():
            value = owner._parameters[key]
            if id(value) not in made:
                made[id(value)] = value.to_local() if isinstance(value, DTensor) else value
            if name in self.summed:
                summed[id(value)] = made[id(value)]
        return made | dict(zip(summed, self.shard.summed(*summed.values()), strict=True))

    def whole(self) -> dict[int, Tensor]:
        values = {id(owner._parameters[key]): owner._parameters[key] for owner, key, _ in self.names()}
        return {i: value.full_tensor() if isinstance(value, DTensor) else value for i, value in values.items()}

    @contextmanager
    def parameters(self, made: dict[int, Tensor]) -> Iterator[None]:
        """Puts plain tensors in the place of the parameters."""
        were = [(owner._parameters, key, owner._parameters[key]) for owner, key, _ in self.names()]
        for parameters, key, value in were:
            parameters[key] = made[id(value)]
        try:
            yield
        finally:
            for parameters, key, value in were:
                parameters[key] = value

    def check_whole(self, reason: str) -> None:
        if self.shard.sequence:
            raise RuntimeError(f"TensorParallel: {reason}, which sequence_parallel does not support")
        if kernels_alone():
            raise RuntimeError(f"TensorParallel: backend('triton') was asked for, but {reason}")
        _log_whole(reason)


@functools.cache
def _log_whole(reason: str) -> None:
    _log.info("the parameters of a tensor-parallel block are gathered: %s", reason)
