"""Splits sequences over the ranks of a device mesh: the style of attention blocks, and the rows of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ..ops.attention.context import EXCHANGES, Context
from ..ops.dispatch.choices import check_choice
from ..ops.dispatch.shard import ACTIVE
from .forward import Around, Sharded
from .roles import check_attends

ORDERS = ("contiguous", "zigzag")
_c10d = torch.ops._c10d_functional


def _context(mesh: DeviceMesh | dist.ProcessGroup, order: str, exchange: str = "gather") -> Context:
    check_choice("ContextParallel", "order", order, ORDERS)
    check_choice("ContextParallel", "exchange", exchange, EXCHANGES)
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        raise ValueError(f"ContextParallel: the mesh must have one dimension, such as mesh['cp'], but has {mesh.ndim}")
    group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
    return Context(group.group_name, dist.get_rank(group), dist.get_world_size(group), order == "zigzag", exchange)


@contextmanager
def context_parallel(
    mesh: DeviceMesh | dist.ProcessGroup, *, order: str = "contiguous", exchange: str = "gather"
) -> Iterator[None]:
    """Makes attention_block, transformer_layer, and the layers that call them take x [..., S/n, d] as this rank's rows of
    sequences that lie on the n ranks of a group. order, exchange, errors: as in ContextParallel.

    ckptkern.checkpoint's recompute in backward runs in it, too; torch.utils.checkpoint's does not: call backward inside then.
    """
    outer, ACTIVE.context = ACTIVE.context, _context(mesh, order, exchange)
    try:
        yield
    finally:
        ACTIVE.context = outer


def shard_sequence(
    x: Tensor, mesh: DeviceMesh | dist.ProcessGroup, dim: int = 1, *, order: str = "contiguous"
) -> Tensor:
    """Returns this rank's rows of x, which has those of all n ranks along dim: ids, labels, position_ids, x itself.

    order: "contiguous", the rank's n-th part, a view; or "zigzag", of 2 n parts r and 2 n - 1 - r, a copy. Differentiable.
    Raises ValueError if the number of parts does not divide the rows: pad them.
    """
    context = _context(mesh, order)
    if x.shape[dim] % context.chunks:
        raise ValueError(
            f"shard_sequence: {order} order on {context.size} ranks takes a multiple of {context.chunks} rows, not "
            f"{x.shape[dim]}; pad the sequence"
        )
    return context.own(x, dim)


def unshard_sequence(
    x: Tensor, mesh: DeviceMesh | dist.ProcessGroup, dim: int = 1, *, order: str = "contiguous"
) -> Tensor:
    """Returns all rows, of the x that each rank has of them: the opposite of shard_sequence. Without gradients."""
    context = _context(mesh, order)
    rows = x.detach().movedim(dim, 0)[None]
    if context.zigzag and rows.shape[1] % 2:
        raise ValueError(
            f"unshard_sequence: zigzag order takes an even number of rows on each rank, not {rows.shape[1]}"
        )
    parts = _c10d.wait_tensor(context.gathering(rows)).view(context.size, *rows.shape)
    return context.joined(parts)[0].movedim(0, dim)


class OnPart(Around):
    """A block's forward on a part of a sequence."""

    def __init__(self, module: nn.Module, context: Context):
        super().__init__(module)
        self.context, self.checked = context, False

    def __call__(self, *args, **kwargs):
        if not self.checked and not torch.compiler.is_compiling():
            # the ranks compare their shapes of the first call; a later call with other shapes fails in its collective
            x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            if x is not None and not x.is_meta and not isinstance(x, FakeTensor):
                self.checked = True
                shape = torch.tensor(x.shape, device=x.device)
                shapes = _c10d.wait_tensor(self.context.gathering(shape)).view(self.context.size, -1).tolist()
                if any(sizes != shapes[0] for sizes in shapes):
                    raise ValueError(
                        f"ContextParallel: all ranks must have equal parts of a sequence, but their inputs have the shapes "
                        f"{', '.join(str(tuple(sizes)) for sizes in shapes)}; pad the sequence"
                    )
        outer, ACTIVE.context = ACTIVE.context, self.context
        try:
            return self.call(*args, **kwargs)
        finally:
            ACTIVE.context = outer


class ContextParallel(ParallelStyle):
    """Splits the sequences of attention blocks over the ranks of a one-dimensional mesh: a style of torch's parallelize_module.

        parallelize_module(model, mesh["cp"], {"layers.*": ContextParallel()})

    The block is a module of ckptkern.nn with self-attention (LlamaAttention, LlamaDecoderLayer, MultiheadAttention,
    TransformerEncoderLayer) or one that ckptkern.convert fused as attention or layer. x and y are this rank's rows,
    [..., S/n, d] or [tokens/n, d], the same number on each rank. Masks, key_padding_mask and cu_seqlens are those of all rows;
    rotary tables of all or of this rank's. Parameters stay whole on each rank, and their gradients are of this rank's rows: sum
    them as those of data parallelism (DDP or fully_shard over a mesh that has the ranks of "dp" and "cp"). It composes with
    TensorParallel, in any order.

    order: "contiguous", rank r has rows [r S/n, (r + 1) S/n); or "zigzag", of 2 n parts r and 2 n - 1 - r, so that causal
    attention is as much work on each (Megatron-LM, torch's context_parallel). exchange: "gather", k and v of all ranks for this
    rank's rows (Llama 3, arXiv 2407.21783); "heads", all rows for a part of the heads, by all-to-all (Ulysses, arXiv
    2309.14509), for a number of ranks that divides num_kv_heads.

    Saved for backward: 1/n of what the block saves. Backward gathers k and v again under what it recomputes, and sums
    their gradients over ranks in float32. Dropout of attention weights samples the mask of the whole sequence, and
    drop_path the same samples everywhere, if all ranks of the group have one seed; other dropout samples each rank's own mask.
    Raises, when applied: TypeError for a module without attention of this kind; ValueError for choices and a mesh of several
    dimensions. In a call: ValueError for unequal parts (found in the first call), cross-attention, a trained attn_mask,
    cu_seqlens with dropout_p, alibi_slopes or a window of later rows ("heads" takes these), ShapeError for an odd number of
    rows in zigzag order; RuntimeError for what would run the block's own forward; NotImplementedError for second-order
    gradients.
    """

    def __init__(self, *, order: str = "contiguous", exchange: str = "gather"):
        super().__init__()
        check_choice("ContextParallel", "order", order, ORDERS)
        check_choice("ContextParallel", "exchange", exchange, EXCHANGES)
        self.order, self.exchange = order, exchange

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward = module.__dict__.get("forward")
        if isinstance(forward, OnPart) or (isinstance(forward, Sharded) and isinstance(forward.inner, OnPart)):
            raise ValueError(f"ContextParallel: the sequences of this {type(module).__name__} are split already")
        context = _context(device_mesh, self.order, self.exchange)
        check_attends(module)
        module.forward = OnPart(module, context)  # type: ignore[method-assign]
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}(order={self.order!r}, exchange={self.exchange!r})"
