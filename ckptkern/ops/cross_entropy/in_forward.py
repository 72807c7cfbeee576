"""The loss of all tokens with its gradients formed in forward: three matmuls, and no logits saved.

Forward takes tokens in chunks and forms, of each, the gradients of the sum of its losses. Backward scales them by the gradient
of the loss. Sums over chunks are float32, and a gradient is rounded once, when it is scaled.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ... import eager, state
from ...frozen import Frozen
from ...subclasses import PLAIN
from ..dispatch.choices import choose_mode, primitives
from ..registration.gradients import main_grad_of
from ..registration.op import cast_parameter, rows_2d, token_chunks
from .op import LinearCrossEntropy, LinearCrossEntropyOptions, apply, check_targets, operands
from .statistics import Sums, TokenResults

AS_THEY_ARE = PLAIN | {Frozen}


def forms_in_forward(o: LinearCrossEntropyOptions, x: Tensor, w: Tensor, b: Tensor | None, target: Tensor) -> bool:
    """Do gradients of the sum of all losses take less memory from forward to backward than exponentials of logits, and is it
    eager mode, in which backward may scale them in place? Inside an activation checkpoint forward runs twice: there not."""
    if (
        o.results != ("loss",)
        or o.group
        or torch.compiler.is_compiling()
        or x.is_meta
        or choose_mode("full") != "full"
        or not torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or not AS_THEY_ARE.issuperset(map(type, (x, w, b, target)))
    ):
        return False
    (V, d), M = w.shape, target.numel()
    bytes_of_gradients = x.requires_grad * M * d * x.dtype.itemsize + w.requires_grad * 4 * V * d
    return (x.requires_grad or w.requires_grad) and bytes_of_gradients < M * V * x.dtype.itemsize


class SumOfLosses(torch.autograd.Function):
    """sum of the losses of all tokens, a scalar in the wide type. tensors: x, w, b, target, class_weight."""

    @staticmethod
    def forward(ctx, o: LinearCrossEntropyOptions, *tensors: Tensor | None) -> Tensor:
        needs = ctx.needs_input_grad[1:4]
        with torch._C._DisableAutocast():
            loss, *grads = loss_and_gradients(o, tensors, needs)
        ctx.options, ctx.precision, ctx.weight = o, state.Precision(), tensors[1]
        ctx.dtypes = [None if one is None else one.dtype for one in tensors[:3]]
        x, *others = tensors
        ctx.save_for_backward(x if needs[1] else None, *others, *grads)  # a frozen weight lets go of x
        return loss

    @staticmethod
    def backward(ctx, dy: Tensor):
        tensors, grads = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        needs = ctx.needs_input_grad[1:4]
        if torch.is_grad_enabled():
            if tensors[0] is None:
                LinearCrossEntropy.missing_input(dy, tensors, ctx.options)
            wanted = [one for one, need in zip(tensors, needs, strict=False) if need]
            # those of the loss of each token, whose logits are recomputed, without a low-rank update
            with ctx.precision:
                loss = apply(ctx.options._replace(recompute="full"), *tensors, None, None, None)[0].sum()
                grads = iter(torch.autograd.grad(loss, wanted, dy, create_graph=True))
            return (None, *(next(grads) if need else None for need in needs), None, None)
        is_last = not torch._C._autograd._get_current_graph_task_keep_graph()
        scale = dy / unit_of(ctx.options, ctx.dtypes[0], tensors[4])
        main = main_grad_of(ctx.weight) if needs[1] else None
        if main is not None:
            main.addcmul_(grads[1], scale.to(grads[1].dtype))
            ctx.weight.grad_added_to_main_grad, needs = True, (needs[0], False, needs[2])
        found: list[Tensor | None] = []
        for grad, dtype, need in zip(grads, ctx.dtypes, needs, strict=True):
            found.append(cast_parameter(grad.mul_(scale) if is_last else grad * scale, dtype) if need else None)
        return (None, *found, None, None)


def unit_of(o: LinearCrossEntropyOptions, dtype: torch.dtype, class_weight: Tensor | None) -> float:
    """What gradients are formed times: in float16 up to 2^10, so that probabilities down to 6e-8 have all their digits. The
    largest is then 2^10 times the scale of logits, less than 2^11; class weights, of any size, use up that room themselves."""
    if dtype != torch.float16 or class_weight is not None:
        return 1.0
    return 2.0 ** (10 - math.ceil(math.log2(max(abs(o.logit_scale), 1.0))))


def loss_and_gradients(
    o: LinearCrossEntropyOptions, tensors, needs
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(the sum of the losses, and of its gradients times the unit: of x in its dtype, of w and b in float32)."""
    x, target, (V, d) = tensors[0], tensors[3].reshape(-1), tensors[1].shape
    p, rows, wide = primitives(o.backend), rows_2d(x), eager.wide_of(x.dtype)
    o, w, b, weights = operands(tensors, o, x.dtype)
    check_targets(target, V, o.ignore_index)
    per_class = weights if o.label_smoothing else None
    head = eager.Head(o.logit_scale, o.softcap, o.ignore_index, 0, o.precision)
    dx = torch.empty_like(rows) if needs[0] else None
    dw = torch.zeros(V, d, dtype=wide, device=x.device) if needs[1] else None
    db = torch.zeros(V, dtype=wide, device=x.device) if needs[2] else None
    losses = torch.empty(len(rows), dtype=wide, device=x.device)

    def of_tokens(start: int, stop: int) -> None:
        here, mine = rows[start:stop], target[start:stop]
        made = p.cross_entropy_fwd(here, w, b, mine, per_class, head, weighted=o.label_smoothing > 0, keep=True)
        sums, s = Sums(mine, weights, o, V), made.statistics
        losses[start:stop] = sums.results(s, o.results)[0]
        units = torch.full_like(s.lse, unit_of(o, x.dtype, weights))
        gradients = sums.gradients(TokenResults(loss=units), s.lse, None)
        given = made.logits, made.parts, s.z_t, 0, mine, per_class, s.lse, gradients, head
        part = p.cross_entropy_saved_bwd(*given, made.logits, db=needs[2])
        if needs[2]:
            db.add_(part)
        if needs[1]:
            eager.upcast_matmul(made.logits.t(), here, out=dw, add=True)
        if needs[0]:
            eager.upcast_matmul(made.logits, w, out=dx[start:stop])

    narrow = x.dtype.itemsize if x.dtype != wide else 0
    of_token = V * x.dtype.itemsize + 4 * p.slice_count(x, V) * 2  # what a token of a chunk holds at most
    if o.backend == "eager":
        of_token = V * (wide.itemsize * (3 if o.softcap else 1) + narrow) + 2 * wide.itemsize * d * bool(narrow)
    for start, stop in token_chunks(len(rows), of_token, o.workspace):
        of_tokens(start, stop)
    return losses.sum(), None if dx is None else dx.view_as(x), dw, db
