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
    """Splits a fused block over the ranks of a one-dimensional mesh: a style of torch's parallelize_module.

        parallelize_module(model, mesh["tp"], {"layers.*": TensorParallel()})

    The block is a module of ckptkern.nn (MLP, GatedMLP, LlamaAttention, LlamaDecoderLayer, MultiheadAttention,
    TransformerEncoderLayer, TransformerDecoderLayer) or one that ckptkern.convert fused whole as attention, MLP or
    layer. Each rank's op computes a part of the heads and of the hidden units; one all-reduce per sublayer sums the
    parts, in forward and in backward.

    Parameters become DTensors: the rows of q, k, v, gate and up are Shard(0), the columns of the output and the down projection
    Shard(1) (the other dimension in a layer that stores weights transposed), norms, the last biases and packed weights
    Replicate. Their gradients are placed alike.

    x: the block's input, [..., S, d], equal on all ranks, as is y. sequence_parallel: x and y are this rank's rows,
    [..., S/n, d], the same number on each rank, and every other argument is for all rows; an all-gather and a
    reduce-scatter replace the all-reduce. A DTensor x is redistributed; y is a local tensor. dtypes, autocast and
    recompute modes are the block's.

    Saved for backward: of each sublayer its x (this rank's rows under sequence_parallel), 1/n of what else the mode saves, 16
    bytes for each dropout, and the input of a norm after the branch. Dropout samples the masks of the unsharded block
    if all ranks of the group have the same seed; the first states are compared.

    If the op does not cover a call (need_weights=True, hooks inside, another kind of call than was checked), the ranks
    gather the parameters and run the whole block.
    Raises, when applied: TypeError for a module that is not a fused block, ValueError if the number of ranks does not
    divide num_heads, num_kv_heads or the hidden units, for LoRA, norms over all heads at once, a mesh of several
    dimensions, and parameters that are DTensors. In a call: RuntimeError for ranks with different seeds, and for a call
    that would run the whole block under sequence_parallel or backend("triton"); NotImplementedError for second-order
    gradients.
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
