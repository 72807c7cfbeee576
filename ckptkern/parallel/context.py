"""Context parallelism: a style that splits the sequences of attention blocks over ranks, and functions for a rank's rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ..conversion.trace import tensors_in
from ..ops.attention.context import EXCHANGES, Context
from ..ops.dispatch.choices import check_choice, setting
from ..ops.dispatch.shard import ACTIVE
from .forward import Around, Sharded
from .roles import blocks_of, sublayers_of

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
    """Applies ContextParallel to attention_block, transformer_layer and layers that call them.

    ckptkern.checkpoint recomputes in the same context; with torch.utils.checkpoint call backward inside.
    """
    with setting("context", _context(mesh, order, exchange), ACTIVE):
        yield


def shard_sequence(
    x: Tensor, mesh: DeviceMesh | dist.ProcessGroup, dim: int = 1, *, order: str = "contiguous"
) -> Tensor:
    """Returns this rank's rows of x along dim, such as input ids or labels. Differentiable.

    Raises ValueError if n ("zigzag": 2 n) does not divide the rows.
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
    """Returns the rows of all ranks, without gradients; undoes shard_sequence."""
    context = _context(mesh, order)
    rows = x.detach().movedim(dim, 0)[None]
    if context.zigzag and rows.shape[1] % 2:
        raise ValueError(
            f"unshard_sequence: zigzag order takes an even number of rows on each rank, not {rows.shape[1]}"
        )
    parts = _c10d.wait_tensor(context.gathering(rows)).view(context.size, *rows.shape)
    return context.joined(parts)[0].movedim(0, dim)


class OnPart(Around):
    """Runs a block's forward on this rank's part of a sequence."""

    def __init__(self, module: nn.Module, context: Context):
        super().__init__(module)
        self.context, self.checked = context, False

    def __call__(self, *args, **kwargs):
        if not self.checked and not torch.compiler.is_compiling():
            # the ranks compare their shapes of the first call; a later call with other shapes fails in its collective
            x = next(iter(tensors_in((args, kwargs))), None)
            if x is not None and not x.is_meta and not isinstance(x, FakeTensor):
                self.checked = True
                shape = torch.tensor(x.shape, device=x.device)
                shapes = _c10d.wait_tensor(self.context.gathering(shape)).view(self.context.size, -1).tolist()
                if any(sizes != shapes[0] for sizes in shapes):
                    raise ValueError(
                        f"ContextParallel: all ranks must have equal parts of a sequence, but their inputs have the shapes "
                        f"{', '.join(str(tuple(sizes)) for sizes in shapes)}; pad the sequence"
                    )
        with setting("context", self.context, ACTIVE):
            return self.call(*args, **kwargs)


class ContextParallel(ParallelStyle):
    """A parallelize_module style that splits the sequences of attention blocks over n ranks.

        parallelize_module(model, mesh["cp"], {"layers.*": ContextParallel()})

    The blocks are self-attention and layers of ckptkern.nn or fused by ckptkern.convert. x and y, [..., S/n, d] or
    [tokens/n, d], are this rank's rows; masks and cu_seqlens are those of all rows. Parameters are replicated: sum their
    gradients over the ranks, as in data parallelism.

    order: "contiguous": rank r has rows [r S/n, (r + 1) S/n); "zigzag": rank r has parts r and 2 n - 1 - r of 2 n, which
    balances causal attention.
    exchange: "gather" collects all k and v (Llama 3, arXiv 2407.21783); "heads" gives each rank all rows of 1/n of the heads
    (Ulysses, arXiv 2309.14509).

    Saved for backward: 1/n of what the block saves. With equal seeds attention dropout equals the unsplit block's.
    Raises ValueError or ShapeError for rows or heads that n does not divide, cross-attention, a trained attn_mask and, with
    "gather", cu_seqlens with dropout_p, alibi_slopes or windows of later rows.
    """

    def __init__(self, *, order: str = "contiguous", exchange: str = "gather"):
        super().__init__()
        check_choice("ContextParallel", "order", order, ORDERS)
        check_choice("ContextParallel", "exchange", exchange, EXCHANGES)
        self.order, self.exchange = order, exchange

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward, kind = module.__dict__.get("forward"), type(module).__name__
        if isinstance(forward, OnPart) or (isinstance(forward, Sharded) and isinstance(forward.inner, OnPart)):
            raise ValueError(f"ContextParallel: the sequences of this {kind} are split already")
        context = _context(device_mesh, self.order, self.exchange)
        for block in blocks_of("ContextParallel", module):
            if block.op not in ("attention_block", "transformer_layer"):
                raise TypeError(f"ContextParallel: {kind} is a {block.op}, which has no attention and needs no style")
            for sublayer in sublayers_of(block.template):
                if "kv_a_weight" in sublayer or sublayer.get("key_value") is not None:
                    which = "latent " if "kv_a_weight" in sublayer else "cross-"
                    raise TypeError(
                        f"ContextParallel: {kind} has {which}attention, which has no split form; leave it out"
                    )
        module.forward = OnPart(module, context)  # type: ignore[method-assign]
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}(order={self.order!r}, exchange={self.exchange!r})"
