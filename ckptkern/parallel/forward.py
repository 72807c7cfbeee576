"""Tensor parallelism: the style of fused blocks, and a block's forward on this rank's parts of its parameters."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.parallel import ParallelStyle

from ..conversion.check import replacing
from ..conversion.trace import mapped
from ..ops.dispatch.choices import kernels_alone, setting
from ..ops.dispatch.shard import ACTIVE, NotSharded
from ..ops.sharded import Shard
from .roles import Place, places_of

_log = logging.getLogger("ckptkern")


class Waited(torch.autograd.Function):
    """Waits for a collective's result, an AsyncCollectiveTensor as torch's styles pass it, and returns the plain tensor."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.wait()

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return dy


class Around:
    """Wraps a block's forward; an object, so that deepcopy and pickle follow it."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.inner: Callable | None = module.__dict__.get("forward")

    def call(self, *args, **kwargs):
        return (self.inner or functools.partial(type(self.module).forward, self.module))(*args, **kwargs)


class Sharded(Around):
    """Runs a block's forward on a shard."""

    def __init__(self, module: nn.Module, places: dict[str, Place], shard: Shard):
        super().__init__(module)
        self.shard = shard
        summed = {True, "sequence"} if shard.sequence else {True}
        self.summed = {name for name, place in places.items() if place.summed in summed}

    def __call__(self, *args, **kwargs):
        first = True

        def local(tensor):
            """Returns an argument as a local tensor: the first, which is the input, in the layout of the group."""
            nonlocal first
            place: Placement = Split(tensor.dim() - 2) if first and self.shard.sequence else Replicate()
            first = False
            if isinstance(tensor, DTensor):
                tensor = tensor.redistribute(placements=[place]).to_local()
            return Waited.apply(tensor) if type(tensor) is AsyncCollectiveTensor else tensor

        args, kwargs = mapped(local, (args, kwargs))
        parts = {id(p): p.to_local() if isinstance(p, DTensor) else p for p in self.module.parameters()}
        named = self.module.named_parameters(remove_duplicate=False)
        summed = {id(p): parts[id(p)] for name, p in named if name in self.summed}
        parts |= dict(zip(summed, self.shard.summed(*summed.values()), strict=True))
        try:
            with replacing(self.module, lambda p: parts[id(p)]), setting("shard", self.shard, ACTIVE):
                return self.call(*args, **kwargs)
        except NotSharded as reason:
            if self.shard.sequence:
                raise RuntimeError(f"TensorParallel: {reason}, which sequence_parallel does not support") from reason
            if kernels_alone():
                raise RuntimeError(f"TensorParallel: backend('triton') was asked for, but {reason}") from reason
            _log_whole(str(reason))
        with (
            replacing(self.module, lambda p: p.full_tensor() if isinstance(p, DTensor) else p),
            setting("gathered", True, ACTIVE),
        ):
            return self.call(*args, **kwargs)


@functools.cache
def _log_whole(reason: str) -> None:
    _log.info("the parameters of a tensor-parallel block are gathered: %s", reason)


class TensorParallel(ParallelStyle):
    """A parallelize_module style that splits a fused block over n ranks.

        parallelize_module(model, mesh["tp"], {"layers.*": TensorParallel()})

    The blocks are MLPs, attention and layers of ckptkern.nn or fused by ckptkern.convert. Each rank computes 1/n of the heads
    and hidden units; one all-reduce per sublayer and pass sums the parts. Parameters become DTensors: q, k, v, gate and up are
    split by rows, output and down projections by columns; others, also packed weights, are replicated.

    sequence_parallel: x and y [..., S/n, d] are this rank's rows, and an all-gather and a reduce-scatter replace the
    all-reduce; else both are equal on all ranks.

    Saved for backward: each sublayer's x, and 1/n of what else the mode saves. Dropout equals the unsplit block's. A call that
    the op does not cover gathers the parameters.
    Raises ValueError for heads or hidden units that n does not divide, LoRA, norms over all heads and DTensor parameters;
    RuntimeError for different seeds, and for gathering under sequence_parallel or backend("triton").
    """

    def __init__(self, *, sequence_parallel: bool = False):
        super().__init__()
        if type(sequence_parallel) is not bool:
            raise TypeError(f"TensorParallel: sequence_parallel must be a bool, not {sequence_parallel!r}")
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"TensorParallel: the mesh must have one dimension, such as mesh['tp'], but has {device_mesh.ndim}"
            )
        if isinstance(module.__dict__.get("forward"), Sharded):
            raise ValueError(f"TensorParallel: this {type(module).__name__} is split already")
        places = places_of(module, device_mesh.size(), self.sequence_parallel)
        shard = Shard(
            device_mesh.get_group().group_name, device_mesh.get_local_rank(), device_mesh.size(), self.sequence_parallel
        )
        distributed = {}
        for name, value in module.named_parameters():
            if isinstance(value, DTensor):
                raise ValueError(f"TensorParallel: {name} is a DTensor already: use one style for a block")
            dim = places[name].dim
            tensor = distribute_tensor(value, device_mesh, [Replicate() if dim is None else Split(dim)])
            distributed[id(value)] = nn.Parameter(tensor, value.requires_grad)
        module.forward = Sharded(module, places, shard)  # type: ignore[method-assign]
        for owner in module.modules():
            for key, value in owner._parameters.items():
                if value is not None:
                    owner._parameters[key] = distributed[id(value)]
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_parallel={self.sequence_parallel})"
