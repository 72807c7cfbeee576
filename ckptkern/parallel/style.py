"""The parallel style of fused blocks."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.parallel import ParallelStyle

from ..ops.sharded import Shard
from .forward import Sharded
from .roles import Place, places_of


class TensorParallel(ParallelStyle):
    """Splits one fused block over the ranks of a one-dimensional mesh, as a style of torch's parallelize_module."""

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
        places = places_of(module, device_mesh.size())
        shard = Shard(
            device_mesh.get_group().group_name, device_mesh.get_local_rank(), device_mesh.size(), self.sequence_parallel
        )
        distribute(module, places, device_mesh)
        module.forward = Sharded(module, places, shard)  # type: ignore[method-assign]
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_parallel={self.sequence_parallel})"


def distribute(module: nn.Module, places: dict[str, Place], mesh: DeviceMesh) -> None:
    """Makes every parameter a DTensor in its place."""
    made: dict[int, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for key, value in list(owner._parameters.items()):
            if value is None:
                continue
            if id(value) not in made:
                if isinstance(value, DTensor):
                    raise ValueError(f"TensorParallel: {path}.{key} is a DTensor already: use one style for a block")
                place = places.get(f"{path}.{key}" if path else key, Place(None))
                split = Replicate() if place.dim is None else Split(place.dim)
                made[id(value)] = nn.Parameter(distribute_tensor(value, mesh, [split]), value.requires_grad)
            owner._parameters[key] = made[id(value)]
