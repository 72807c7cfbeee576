"""Allocates as Liger's kernels do, which do not run on the meta device: the tensors that each saves, creates and overwrites,
and its matmuls. Nothing else is computed. Line numbers are those of `liger_kernel/ops` in release 0.8.5, on a GPU."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd import Function

SMS = 132  # of an H100, each with a float32 row of the gradient of RMSNorm's weight
PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}
NORMS = {"input_layernorm", "post_attention_layernorm"}  # in front of both sublayers, and none behind


class RMSNorm(Function):
    """rms_norm.py:452-720. Saves x and a float32 rstd of each row; backward writes dx over dy, if it may."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, in_place: bool) -> Tensor:
        x = x.contiguous()
        ctx.in_place = in_place
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        _, weight, _ = ctx.saved_tensors
        dx = dy.contiguous() if ctx.in_place else torch.zeros_like(dy.contiguous())
        if not ctx.needs_input_grad[1]:
            return dx, None, None
        rows = weight.new_empty(SMS, len(weight), dtype=torch.float32)
        return dx, rows.sum(0).to(weight.dtype), None


class GatedMLP(Function):
    """swiglu.py:159-315, geglu.py:81-146. Saves gate and up; backward overwrites them with their gradients."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate.view(-1, gate.shape[-1]), up.view(-1, up.shape[-1]))
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx, dh: Tensor) -> tuple[Tensor, Tensor]:
        dh = dh.contiguous()
        gate, up = ctx.saved_tensors
        return gate.view(dh.shape), up.view(dh.shape)


class Rotary(Function):
    """rope.py:117-301. Rotates q and k, which are [B, S, H, D], and their gradients in place."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return in_rows(q), in_rows(k)

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return in_rows(dq), in_rows(dk), None, None


def in_rows(q: Tensor) -> Tensor:
    """Returns q [B, H, S, D] in the memory layout of [B, S, H, D], copied if need be."""
    return q.transpose(1, 2).contiguous().transpose(1, 2)


class Loss(Function):
    """fused_linear_cross_entropy.py:46-441. Computes the gradients of x [N, d] and of a trained weight [V, d] in forward, in
    their dtypes, from logits of one chunk of tokens at a time, and saves them."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        (count, width), classes = x.shape, len(weight)
        tokens = min(1 << (-(-count // -(-classes // width)) - 1).bit_length(), count)  # of a chunk: lines 103-105
        dx = torch.zeros_like(x)
        dweight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        losses, _ = x.new_zeros(count, dtype=torch.float32), targets != -100
        logits = x.new_empty(tokens, classes)
        for rows, out in zip(x.split(tokens), dx.split(tokens), strict=True):
            chunk = logits[: len(rows)]
            torch.mm(rows, weight.t(), out=chunk)  # the loss writes their gradient over them
            torch.mm(chunk, weight, out=out)
            if dweight is not None and x.dtype.itemsize == 2:
                torch.addmm(dweight, chunk.t(), rows, out=dweight)
            elif dweight is not None:
                dweight += torch.mm(chunk.t(), rows)
        ctx.save_for_backward(dx, dweight)
        return losses.sum()

    @staticmethod
    def backward(ctx, dloss: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return *ctx.saved_tensors, None


def fits(layers: nn.ModuleList) -> bool:
    """Returns whether each layer has an MLP of gate_proj, up_proj and down_proj, and only RMSNorms: Liger patches such
    layers."""

    def fit(layer: nn.Module) -> bool:
        norms = [type(module).__name__ for module in layer.modules() if type(module).__name__.endswith("Norm")]
        return all(name.endswith("RMSNorm") for name in norms) and any(map(is_gated, layer.children()))

    return all(map(fit, layers))


def is_gated(module: nn.Module) -> bool:
    return PROJECTIONS.issubset(module._modules)


@contextlib.contextmanager
def patched(model: nn.Module, layers: nn.ModuleList) -> Iterator[None]:
    """Replaces norms, gated MLPs and the rotary embedding by Liger's functions if the layers fit."""
    with contextlib.ExitStack() as stack:
        if fits(layers):
            direct = {name for name, module in layers[0].named_children() if type(module).__name__.endswith("Norm")}
            rotary(stack, layers[0])
            for module in model.modules():
                if type(module).__name__.endswith("RMSNorm"):
                    module.forward = functools.partial(RMSNorm.apply, weight=module.weight, in_place=direct == NORMS)
                elif is_gated(module):
                    module.forward = functools.partial(gated, module)
                else:
                    continue
                stack.callback(delattr, module, "forward")
        yield


def gated(mlp: nn.Module, x: Tensor) -> Tensor:
    return mlp.down_proj(GatedMLP.apply(mlp.gate_proj(x), mlp.up_proj(x)))


def rotary(stack: contextlib.ExitStack, layer: nn.Module) -> None:
    """Replaces the rotary function that the layer's module calls, if it has one of this name."""
    module, name = sys.modules[type(layer).__module__], "apply_rotary_pos_emb"
    if (original := getattr(module, name, None)) is not None:
        setattr(module, name, lambda q, k, cos, sin, *_, **__: Rotary.apply(q, k, cos, sin))
        stack.callback(setattr, module, name, original)
