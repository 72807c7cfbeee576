"""Blocks and converted models that several gloo processes share, and a training step on them against one on one process.

A strategy is "heads" or "rows" (TensorParallel, with all rows on each rank or its own), or an order of ContextParallel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from support.architectures import ARCHITECTURES, DropPath, ids
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import ckptkern
from ckptkern.memory import SavedTensors, saved_tensors
from ckptkern.parallel import ContextParallel, TensorParallel, shard_sequence

B, S, WIDTH, HEADS, HIDDEN, P = 3, 8, 32, 8, 128, 0.25
MODES = ("none", "selective", "full")


def llama(**options) -> nn.Module:
    return ckptkern.nn.LlamaDecoderLayer(WIDTH, HEADS, 4, HIDDEN, **options)


def _encoder(norm_first: bool, p: float = P, **options) -> nn.Module:
    return ckptkern.nn.TransformerEncoderLayer(
        WIDTH, HEADS, HIDDEN, p, batch_first=True, norm_first=norm_first, **options
    )


BLOCKS = {
    "mlp": lambda **o: ckptkern.nn.MLP(WIDTH, HIDDEN, dropout=P, **o),
    "relu mlp": lambda **o: ckptkern.nn.MLP(WIDTH, HIDDEN, WIDTH // 2, "relu", **o),
    "gated mlp": lambda **o: ckptkern.nn.GatedMLP(WIDTH, HIDDEN, dropout=P, bias=True, **o),
    "attention": lambda **o: ckptkern.nn.LlamaAttention(WIDTH, HEADS, 4, dropout=P, **o),
    "llama": llama,
    "llama with all": lambda **o: llama(
        dropout=P, resid_dropout=P, qk_norm=True, attention_bias=True, mlp_bias=True, **o
    ),
    "packed, norm before": lambda **o: _encoder(True, **o),
    "packed, norm after": lambda **o: _encoder(False, **o),
    "without dropout": lambda **o: _encoder(False, 0.0, **o),
}


def block(name: str, mode: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    block = BLOCKS[name](recompute=mode, dtype=torch.float64)
    for parameter in block.parameters():  # biases and norms are not zeros and ones
        nn.init.normal_(parameter, std=0.3)
    return block


def converted(name: str, dropout: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = ARCHITECTURES[name].model()
    for module in model.modules():
        if isinstance(module, nn.Dropout) or (name == "gpt" and hasattr(module, "p")):
            module.p = P if dropout else 0.0
        elif isinstance(module, DropPath):
            module.drop_prob = P
    assert len(ckptkern.convert(model, ids()).converted) == 2
    return model.double()


def split(model: nn.Module, mesh: DeviceMesh, strategy: str, names: str | None = None) -> nn.Module:
    """A copy whose blocks of these names, or which itself, is split over the mesh."""
    tensor = strategy in ("heads", "rows")
    style = TensorParallel(sequence_parallel=strategy == "rows") if tensor else ContextParallel(order=strategy)
    return parallelize_module(copy.deepcopy(model), mesh, {names: style} if names else style)


def mine(x: Tensor, mesh: DeviceMesh, strategy: str) -> Tensor:
    """This rank's rows."""
    order = "zigzag" if strategy == "zigzag" else "contiguous"
    return x if strategy == "heads" else shard_sequence(x, mesh, -2, order=order)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_gradients(
    unfused: nn.Module, ours: nn.Module, label: str, over: DeviceMesh | None = None, tolerance: float = 1e-10
) -> None:
    """over: the mesh whose ranks each have a part of the sum."""
    largest = max(p.grad.abs().max() for p in unfused.parameters() if p.grad is not None)
    for (name, p), q in zip(unfused.named_parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{label}: {name}"
        if p.grad is not None:
            assert isinstance(q.grad, DTensor) == isinstance(q, DTensor)
            grad = whole(q.grad)
            if over is not None:
                dist.all_reduce(grad := grad.clone(), group=over.get_group())
            error = (grad - p.grad).abs().max() / largest
            assert error < tolerance, f"{label}: {name} differs by {error:.1e}"


def step(
    model: nn.Module, x: Tensor, weight: Tensor, call: Callable | None = None
) -> tuple[Tensor, Tensor, SavedTensors]:
    """(y, dx, what was saved) of a training step."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    model.zero_grad()
    with saved_tensors(model) as saved:
        y = (model if call is None else call)(x)
    (y * weight).sum().backward()
    return y.detach(), x.grad, saved


def check_step(
    unfused: nn.Module,
    ours: nn.Module,
    mesh: DeviceMesh,
    strategy: str,
    label: str,
    *,
    length: int = S,
    calls: Sequence[Callable | None] = (None, None),
    part: Callable[[Tensor], Tensor] | None = None,
    inputs: Sequence[Tensor] | Tensor | None = None,
    tolerance: float = 1e-10,
    **close: float,
) -> tuple[SavedTensors, SavedTensors]:
    """Results and gradients of both. Returns what they have saved.

    calls: of both, if not they themselves. part: of rows, for this rank. inputs: x and what weighs the results.
    """
    drawn = torch.Generator().manual_seed(3)
    x, weight = inputs if inputs is not None else torch.randn(2, B, length, WIDTH, dtype=torch.float64, generator=drawn)
    part = part or (lambda rows: mine(rows, mesh, strategy))
    y, dx, saved_whole = step(unfused, x, weight, calls[0])
    z, dz, saved = step(ours, part(x), part(weight), calls[1])
    torch.testing.assert_close((z, dz), (part(y), part(dx)), msg=lambda text: f"{label}: {text}", **close)
    check_gradients(unfused, ours, label, mesh if strategy in ("contiguous", "zigzag") else None, tolerance)
    return saved_whole, saved
