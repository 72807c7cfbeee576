"""Makes a case of a user's module: ``python -m ckptkern bench --case FILE:FUNCTION``."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..conversion.protection import seeded, unmoved
from ..conversion.recorder import differentiated
from ..conversion.trace import leaves_of, recomputed
from ..planning.plan import found_segments
from ..planning.segments import Segment, Strategy
from ..planning.table import Example
from ..segments.checkpoint import checkpoint as ckptkern_checkpoint
from ..tools.models import load, model_and_inputs
from .cases import MODES, Case, Function, Maker


class Called(nn.Module):
    """A module as a function of one tensor among its inputs, x: the first that is floating-point, or else the first.

    The other tensors are buffers, so that they follow to a device or to float64, and none of them counts as saved.
    y is the output's `loss`, or its first scalar, or else its first floating-point tensor.
    """

    def __init__(self, module: nn.Module, call: tuple[tuple, dict[str, Any]]):
        super().__init__()
        self.module, self.call, self.replicas = module, call, {}
        leaves = leaves_of(call)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not tensors:
            raise ValueError("FUNCTION must return (model, inputs) with a tensor among the inputs, to measure with")
        self.place = next((i for i in tensors if leaves[i].is_floating_point()), tensors[0])
        for i in tensors:
            if i != self.place:
                self.register_buffer(f"input_{i}", leaves[i].detach(), persistent=False)

    @property
    def x(self) -> Tensor:
        """Returns the tensor x. A floating-point x requires a gradient, as inside a model."""
        x = leaves_of(self.call)[self.place].detach()
        return x.requires_grad_(x.is_floating_point())

    def inputs(self, x: Tensor) -> tuple[tuple, dict[str, Any]]:
        """Returns the module's (args, kwargs) with x among them."""
        leaves = enumerate(leaves_of(self.call))
        values = (x if i == self.place else getattr(self, f"input_{i}", leaf) for i, leaf in leaves)
        args, kwargs = recomputed(self.call, values)
        return tuple(args), kwargs

    def forward(self, x: Tensor) -> Tensor:
        args, kwargs = self.inputs(x)
        output = self.module(*args, **kwargs)
        tensors = differentiated(output)
        if not tensors:
            raise ValueError("bench: wanted a floating-point tensor among the model's outputs")
        return tensors[0]

    def train(self, mode: bool = True) -> Called:
        for replica in self.replicas.values():
            replica.train(mode)
        return super().train(mode)

    def replica(self) -> Called:
        """Returns a copy on the same parameters and buffers, which follows `train`."""
        shared = {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers(), *leaves_of(self.call))}
        replica = copy.deepcopy(self, {**shared, id(self.replicas): {}})
        self.replicas[len(self.replicas)] = replica
        return replica


def segments_in(replica: Called) -> list[Segment]:
    """Returns the replica's regions of ckptkern.nn, or else those that convert fuses."""
    args, kwargs = replica.inputs(replica.x)
    return [
        segment for segment in found_segments(Example("bench", replica.module, (args, kwargs))) if not segment.is_block
    ]


def in_mode(model: Called, mode: str) -> Function:
    """Returns a replica with all its regions in a mode."""
    replica = model.replica()
    for segment in segments_in(replica):
        segment.set(Strategy(mode))
    return replica


def shared(model: nn.Module) -> nn.Module:
    """Returns a copy on the same parameters and buffers."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def baseline_of(target: str) -> tuple[str, Maker]:
    """Returns a variant's name and maker from FILE:FUNCTION. FUNCTION(model) gets a copy on the same parameters, which it
    may change, and returns what is called in place of the model. Raises ValueError with the reason."""
    function = load(target)

    def make(model: nn.Module, x: Tensor) -> Function:
        replica = model.replica() if isinstance(model, Called) else shared(model)
        module = replica.module if isinstance(replica, Called) else replica
        result = function(module)
        if not callable(result):
            raise TypeError(f"FUNCTION must return what is called as the model is, not {type(result).__name__}")
        followers = [m for m in (module, result) if isinstance(m, nn.Module)]
        if isinstance(replica, Called):  # it supplies the other inputs, and picks y from the outputs
            del replica.module
            replica.module = result

        def run(x: Tensor) -> Tensor:
            for follower in followers:
                if follower.training != model.training:
                    follower.train(model.training)
            return replica(x) if isinstance(replica, Called) else result(x)

        return run

    return f"your {target.rpartition(':')[2]}", make


def has_dropout(model: Called) -> bool:
    """Returns whether two runs in training give different results."""
    x = model.x
    with seeded(), unmoved(model):
        model.train()
        first = model(x).detach()
        return not torch.equal(first, model(x).detach())


def _given(model: Called, device: torch.device, dtype: torch.dtype | None) -> tuple[nn.Module, Tensor]:
    x = model.x.detach()
    model, x = model.to(device), x.to(device)
    if dtype is not None:
        model, x = model.to(dtype), x.to(dtype) if x.is_floating_point() else x
    model.replicas.clear()
    model.call = model.inputs(x.requires_grad_(x.is_floating_point()))
    return model, x


def case_of(target: str, device: torch.device, modes: Sequence[str] | None, dtype: torch.dtype | None) -> Case:
    """Returns the case of FILE:FUNCTION. Raises ValueError with the reason."""
    module, args, kwargs = model_and_inputs(target)
    model, x = _given(Called(module, (args, kwargs)), device, dtype)
    if not segments_in(model.replica()):
        print(f"convert fuses nothing of it: python -m ckptkern convert {target} says why", file=sys.stderr)
        modes = ()
    name, _, function = target.rpartition(":")
    file = name.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    return Case(
        f"{file}.{function}/{'x'.join(map(str, x.shape)) or 'scalar'}",
        functools.partial(_given, model),
        in_mode,
        modes=MODES if modes is None else modes,
        baselines={"ckptkern checkpoint": lambda model, x: functools.partial(ckptkern_checkpoint, model)},
        drops=has_dropout(model),
        dtype=dtype,
    )
