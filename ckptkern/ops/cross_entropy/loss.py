"""Defines linear_cross_entropy and selected_log_probs: the cross-entropy of softmax(x w^T + b) and target classes, and
statistics of the logits, which are never stored."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ... import eager, state
from ...errors import DtypeError, ShapeError
from ...frozen import Frozen
from ...subclasses import PLAIN
from ..dispatch.choices import (
    WORKSPACE_OF_LOSS,
    Bytes,
    autocast_off,
    cast_input,
    check_choice,
    check_flags,
    check_input,
    check_mode,
    check_number,
    check_softcap,
    check_tensor,
    check_weight,
    choose_backend,
    choose_mode,
    choose_workspace,
    compose,
    matmul_precision,
    primitives,
)
from ..registration.gradients import main_grad_of
from ..registration.op import cast_parameter, rows_2d, token_chunks
from ..sublayer.dropout import draw_state
from ..sublayer.lora import LoRA, ReplayedLoRA, check_update, update_dtype
from .op import NAME, LinearCrossEntropy, LinearCrossEntropyOptions, apply, check_targets, operands, update_of
from .statistics import CLASSES, DIFFERENTIABLE, Sums, TokenResults, of_rows, reference_logits, results_of_logits

SELECTED = "selected_log_probs"
REDUCTIONS = ("none", "mean", "sum")
TOP = 64  # log-probabilities per token at most


class TopK(NamedTuple):
    """The largest log-probabilities float32 [..., k], in descending order, and their classes int64 [..., k]."""

    log_probs: Tensor
    indices: Tensor


class CrossEntropyOutput(NamedTuple):
    """Result of linear_cross_entropy when more than the loss is requested. Results that are not requested are None.

    lse, log_probs, entropy: float32 (float64 for float64) [...]. accuracy: the share of the tokens that count whose target has
    the largest logit, a scalar; for reduction "none", [...] of 0 and 1. arg_max: int64 [...], the class of the largest logit.
    """

    loss: Tensor
    lse: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    accuracy: Tensor | None = None
    arg_max: Tensor | None = None
    top_k: TopK | None = None


class TokenLogProbs(NamedTuple):
    """Result of selected_log_probs with return_entropy: log_probs of the tokens' shape, entropy [...]."""

    log_probs: Tensor
    entropy: Tensor


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    return_lse: bool = False,
    return_log_probs: bool = False,
    return_entropy: bool = False,
    return_accuracy: bool = False,
    top_k: int | None = None,
    lora: LoRA | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    vocab_start: int | None = None,
    recompute: str = "full",
    workspace: Bytes = None,
) -> Tensor | CrossEntropyOutput:
    """Computes F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...) without storing all logits.

    input [..., d], linear_weight [V, d], linear_bias [V], target int64 [...] -> the loss in float32 (float64 for float64): a
    scalar, or [...] for reduction "none"; with a return_ argument or top_k, a CrossEntropyOutput. A floating-point target [...,
    V] holds class probabilities and runs in PyTorch ops on all logits.

    weight, reduction, ignore_index, label_smoothing: as in F.cross_entropy. weight gets no gradient.
    logit_scale, softcap: logits are multiplied by logit_scale, then become c tanh(logits / c) with c = softcap (Gemma 2).
    z_loss: adds z_loss log(Z)^2, reduced over the tokens that count (PaLM, arXiv 2204.02311).
    return_lse, return_log_probs, return_entropy: also return log(Z), z_t - log(Z) and H = -sum_v p_v log p_v, differentiable.
        return_entropy saves 4 bytes per token more.
    return_accuracy, top_k: also return accuracy and arg_max; the k <= 64 largest log-probabilities and their classes; without
        gradients.
    lora: a low-rank update of linear_weight, LoRA(a [r, d], b [V, r], scale, dropout_p); not with group. Saves what "full"
        saves. Pass dropout_p=0 in evaluation.
    group, vocab_start: a process group that splits the vocabulary. linear_weight and linear_bias are this rank's rows, from
        vocab_start on (None: equal shards in rank order); all else is equal on all ranks.
    recompute: bytes saved per token besides the arguments, and matmuls in forward + backward:

        "none", "selective"  2 V + V/16 (float32: 4 V + V/16)    3      exponentials of logits; with a softcap, logits
        "full"               4                                   4      log(Z)

    Where they take fewer bytes (4 V d and input's), "none" saves the gradients of a scalar loss, which eager forward forms.

    workspace: forward takes chunks of at least 128 tokens, backward of at least 256 classes. The float32 sum of input's
        gradient is not counted.
    Raises IndexError for a target that is not a class (on a GPU a device-side assertion); other errors: see Conventions.
    """
    flags = {"return_lse": return_lse, "return_log_probs": return_log_probs, "return_entropy": return_entropy}
    flags["return_accuracy"] = return_accuracy
    check_flags(NAME, **flags)
    check_choice(NAME, "reduction", reduction, REDUCTIONS)
    label_smoothing, logit_scale, softcap, z_loss = check_scalars(label_smoothing, logit_scale, softcap, z_loss)
    ignore_index = -100 if ignore_index is None else ignore_index
    asked = flags | {"lse_squared": z_loss, "arg_max": return_accuracy, "top_k": top_k is not None}
    results = token_results(
        NAME,
        ("input", "linear_weight", "target"),
        input,
        linear_weight,
        linear_bias,
        target,
        ("loss", *(name.removeprefix("return_") for name, wanted in asked.items() if wanted)),
        weight,
        group,
        vocab_start,
        workspace,
        recompute,
        lora,
        reduction != "none",
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        logit_scale=logit_scale,
        softcap=softcap,
        top_k=top_k,
    )
    is_alone = top_k is None and True not in flags.values()
    return reduced(results, target, weight, reduction, ignore_index, z_loss, is_alone)


def check_scalars(label_smoothing, logit_scale, softcap, z_loss) -> tuple[float, float, float, float]:
    for name, value in (("label_smoothing", label_smoothing), ("logit_scale", logit_scale), ("z_loss", z_loss)):
        check_number(NAME, name, value)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{NAME}: label_smoothing must be between 0 and 1, not {label_smoothing}")
    return float(label_smoothing), float(logit_scale), check_softcap(NAME, softcap), float(z_loss)


@overload
def selected_log_probs(*args: Any, return_entropy: Literal[True], **options: Any) -> TokenLogProbs: ...
@overload
def selected_log_probs(*args: Any, **options: Any) -> Tensor: ...
def selected_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    lora: LoRA | None = None,
    ignore_index: int = -100,
    group: torch.distributed.ProcessGroup | None = None,
    vocab_start: int | None = None,
    recompute: str = "full",
    workspace: Bytes = None,
) -> Tensor | TokenLogProbs:
    """Computes log-probabilities of tokens under softmax(F.linear(hidden, weight, bias) / temperature), without storing logits.

    hidden [..., d], weight [V, d], bias [V], tokens int64 [...] or k candidates [..., k] -> float32 (float64 for float64) of
    tokens' shape, 0 for tokens equal to ignore_index; differentiable to any order. Shift tokens, not hidden. Saves 4 bytes per
    token.

    return_entropy: returns a TokenLogProbs, with the softmax's entropy; saves 4 bytes per token more.
    lora, ignore_index, group, vocab_start, recompute, workspace: see linear_cross_entropy.
    Raises what linear_cross_entropy raises.
    """
    check_flags(SELECTED, return_entropy=return_entropy)
    check_number(SELECTED, "temperature", temperature)
    if not temperature > 0:
        raise ValueError(
            f"{SELECTED}: temperature must be positive, not {temperature}; "
            "for the arg max use linear_cross_entropy(..., return_accuracy=True)"
        )
    results = token_results(
        SELECTED,
        ("hidden", "weight", "tokens"),
        hidden,
        weight,
        bias,
        tokens,
        TokenLogProbs._fields[: 1 + return_entropy],
        None,
        group,
        vocab_start,
        workspace,
        recompute,
        lora,
        ignore_index=ignore_index,
        logit_scale=1.0 / temperature,
    )
    outputs = public(results, hidden.shape[:-1])
    if tokens.dim() == hidden.dim():
        outputs["log_probs"] = outputs["log_probs"].view(tokens.shape)
    return TokenLogProbs(**outputs) if return_entropy else outputs["log_probs"]


def token_results(
    op: str,
    named: tuple[str, str, str],
    input: Tensor,
    w: Tensor,
    b: Tensor | None,
    target: Tensor,
    results: tuple[str, ...],
    weight: Tensor | None,
    group,
    vocab_start: int | None,
    workspace: Bytes,
    recompute: str,
    lora: LoRA | None = None,
    summed: bool = False,
    *,
    ignore_index: int,
    logit_scale: float,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    top_k: int | None = None,
) -> TokenResults:
    """Computes the named results, each [M].

    named: input, w and target in messages of the function `op`. summed: only the sum of the losses is read; loss may then be
    that sum, [1].
    """
    check_mode(op, recompute)
    check_input(op, input, named[0])
    check_weight(op, named[1], w, b, input, input.shape[-1], named[0])
    if top_k is not None:
        check_top_k(top_k, None if group is not None else w.shape[0])
    x = cast_input(op, input, w)
    probabilities = op == NAME and isinstance(target, Tensor) and target.is_floating_point()
    check_target(op, named[2], input, w, target, probabilities)
    name, size, first = "", 1, 0
    if group is not None:
        if lora is not None:
            raise ValueError(f"{op}: a low-rank update (lora) is not split over a process group; leave out one of both")
        name, size = group.group_name, group.size()
        first = group.rank() * w.shape[0] if vocab_start is None else vocab_start
    elif vocab_start is not None:
        raise ValueError(f"{op}: vocab_start needs a group")
    last = first + w.shape[0]
    if weight is not None:
        check_tensor(NAME, "weight", weight, input)
        # other ranks' classes may follow a shard
        if weight.dim() != 1 or (len(weight) != last if group is None else len(weight) < last):
            raise ShapeError(f"{NAME}: weight must have a value for each class, but has shape {tuple(weight.shape)}")
        if weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{NAME}: weight gets no gradient; detach it")
    if ("arg_max" in results or top_k is not None) and last > CLASSES:
        raise ValueError(f"{op}: return_accuracy and top_k take up to 2^24 classes, not {last}; leave them out")
    update, numbers, lora_dtype = (None, None, None), (), x.dtype
    if lora is not None:
        a, low_rank_b, *numbers = check_update(op, "lora", lora, w, input)
        drawn = lora.rng if isinstance(lora, ReplayedLoRA) else draw_state(x, numbers[1], True)
        update, lora_dtype = (a, low_rank_b, drawn), update_dtype(input, x.dtype, (a, low_rank_b))
    if probabilities:
        if group is not None:
            raise ValueError(f"{op}: targets that are probabilities cannot be split over a process group")
        compose(op, "a target of probabilities needs all logits at once")
    o = LinearCrossEntropyOptions(
        label_smoothing=label_smoothing,
        logit_scale=logit_scale,
        softcap=softcap,
        ignore_index=ignore_index,
        vocab_start=first,
        group=name,
        size=size,
        equal_shards=vocab_start is None,
        recompute=choose_mode(recompute) if lora is None else "full",
        backend="eager" if probabilities else choose_backend(op, x),
        precision=matmul_precision(x),
        workspace=choose_workspace(op, workspace, x, least=WORKSPACE_OF_LOSS),
        results=results,
        top_k=top_k or 0,
        lora=tuple(numbers),
        lora_dtype=lora_dtype,
        candidates=0 if target.dim() < input.dim() else target.shape[-1],
    )
    if probabilities:
        with autocast_off(x):
            z = reference_logits(x, w, b, logit_scale, softcap, update_of(update, o))
            return results_of_logits(z, target, weight, ignore_index, label_smoothing, results, o.top_k)
    if summed and o.recompute != "full" and forms_in_forward(o, x, w, b, target):
        return TokenResults(loss=SumOfLosses.apply(o, x, w, b, target, weight)[None])
    return of_rows(apply(o, x, w, b, target, weight, *update), results)


def check_top_k(k: int, classes: int | None) -> None:
    """Checks top_k. classes: the size of the vocabulary, None if other ranks have a part of it."""
    if type(k) is not int:
        raise TypeError(f"{NAME}: top_k must be an int or None, not {k!r}")
    most = TOP if classes is None else min(classes, TOP)
    if not 1 <= k <= most:
        raise ValueError(f"{NAME}: top_k must be from 1 to {most}, not {k}; for more, compute the logits")


def check_target(op: str, name: str, x: Tensor, w: Tensor, target: Tensor, probabilities: bool) -> None:
    """Checks the target's dtype and shape. All functions but linear_cross_entropy also take k targets per token."""
    check_tensor(op, name, target, x, floating=False)
    wanted, meaning = tuple(x.shape[:-1]), "a class for each token, as input without its features"
    if probabilities:
        wanted, meaning = (*wanted, w.shape[0]), "probabilities of classes, (..., classes)"
    elif target.dtype != torch.int64:
        either = ", or floating point for probabilities" if op == NAME else ""
        raise DtypeError(f"{op}: {name} must be int64{either}, not {target.dtype}")
    elif op != NAME and target.dim() == x.dim() and target.shape[-1]:
        wanted = (*wanted, target.shape[-1])
    if tuple(target.shape) != wanted:
        raise ShapeError(f"{op}: {name} must have shape {wanted}, {meaning}, but has {tuple(target.shape)}")


def reduced(
    results: TokenResults,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    z_loss: float,
    is_alone: bool,
) -> Tensor | CrossEntropyOutput:
    """Reduces the results of each token to the loss; returns it alone if is_alone, else a CrossEntropyOutput.

    No token is ignored where targets are probabilities [..., V]. Other results have the leading shape; accuracy is averaged
    unless reduction is "none".
    """
    classes = not target.is_floating_point()
    count = total = results.loss.shape[0]
    if classes and (reduction == "mean" or results.accuracy is not None):
        counted = target != ignore_index
        count = total = counted.sum()
        if weight is not None:
            total = (weight[target.masked_fill(~counted, 0)] * counted).sum(dtype=results.loss.dtype)

    lead = target.shape if classes else target.shape[:-1]
    loss = reduced_over(results.loss, reduction, total, lead)
    if z_loss:
        loss = loss + z_loss * reduced_over(results.lse_squared, reduction, count, lead)
    if is_alone:
        return loss
    outputs = public(results, lead)
    if results.accuracy is not None and reduction != "none":
        outputs["accuracy"] = outputs["accuracy"].sum() / count
    return CrossEntropyOutput(loss, *map(outputs.get, CrossEntropyOutput._fields[1:]))


def reduced_over(tokens: Tensor, reduction: str, divisor: Tensor | int, lead: torch.Size) -> Tensor:
    """Returns the mean or the sum over tokens; for reduction "none" each token's number, in the leading shape."""
    if reduction == "none":
        return tokens.view(lead)
    return tokens.sum() / divisor if reduction == "mean" else tokens.sum()


def public(results: TokenResults, lead: torch.Size) -> dict[str, Any]:
    """Returns the results that are present, by name, in the leading shape; those without a gradient are detached."""
    outputs = {}
    for name, tensor in results._asdict().items():
        if tensor is None:
            continue
        tensor = tensor if name in DIFFERENTIABLE else tensor.detach()
        if name == "top_k":
            log_probs, indices = (part.t().reshape(*lead, len(part)) for part in tensor.chunk(2))
            outputs[name] = TopK(log_probs, indices.to(torch.int64))
        else:
            tensor = tensor.to(torch.int64) if name == "arg_max" else tensor
            outputs[name] = tensor.t().reshape(*lead, *tensor.shape[:-1])
    return outputs


# -- the loss of all tokens with its gradients formed in forward: three matmuls, and no logits saved
#
# Forward forms, chunk by chunk, the gradients of the summed losses. Backward scales them by the loss's gradient. Sums over
# chunks are float32, and a gradient is rounded once, when it is scaled.


def forms_in_forward(o: LinearCrossEntropyOptions, x: Tensor, w: Tensor, b: Tensor | None, target: Tensor) -> bool:
    """Returns whether forward forms the gradients of the summed loss: if they take less memory than exponentials of logits, in
    eager mode, where backward may scale them in place, and outside activation checkpoints, whose forward runs twice."""
    if (
        o.results != ("loss",)
        or o.group
        or torch.compiler.is_compiling()
        or x.is_meta
        or choose_mode("full") != "full"
        or not torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or not (PLAIN | {Frozen}).issuperset(map(type, (x, w, b, target)))
    ):
        return False
    (V, d), M = w.shape, target.numel()
    bytes_of_gradients = x.requires_grad * M * d * x.itemsize + w.requires_grad * 4 * V * d
    return (x.requires_grad or w.requires_grad) and bytes_of_gradients < M * V * x.itemsize


class SumOfLosses(torch.autograd.Function):
    """Computes the sum of all tokens' losses, a scalar in the accumulate dtype. tensors: x, w, b, target, class_weight."""

    @staticmethod
    def forward(ctx, o: LinearCrossEntropyOptions, *tensors: Tensor | None) -> Tensor:
        needs = ctx.needs_input_grad[1:4]
        with torch._C._DisableAutocast():
            loss, *grads = loss_and_gradients(o, tensors, needs)
        ctx.options, ctx.precision, ctx.weight = o, state.Precision(), tensors[1]
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors[:3]]
        x, *others = tensors
        ctx.save_for_backward(x if needs[1] else None, *others, *grads)  # x is not saved for a frozen weight
        return loss

    @staticmethod
    def backward(ctx, dy: Tensor):
        tensors, grads = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        needs = ctx.needs_input_grad[1:4]
        if torch.is_grad_enabled():
            if tensors[0] is None:
                LinearCrossEntropy.missing_input(dy, tensors, ctx.options)
            wanted = [tensor for tensor, need in zip(tensors, needs, strict=False) if need]
            # gradients of each token's loss, with recomputed logits and without a low-rank update
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
        scaled = (
            cast_parameter(grad.mul_(scale) if is_last else grad * scale, dtype) if need else None
            for grad, dtype, need in zip(grads, ctx.dtypes, needs, strict=True)
        )
        return (None, *scaled, None, None)


def unit_of(o: LinearCrossEntropyOptions, dtype: torch.dtype, class_weight: Tensor | None) -> float:
    """Returns the factor of the gradients that forward forms: in float16 up to 2^10, so that probabilities down to 6e-8 have
    all their digits. The largest gradient is then 2^10. With class weights, of any size, the factor is 1."""
    if dtype != torch.float16 or class_weight is not None:
        return 1.0
    return 2.0 ** (10 - math.ceil(math.log2(max(abs(o.logit_scale), 1.0))))


def loss_and_gradients(
    o: LinearCrossEntropyOptions, tensors, needs
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Computes the sum of the losses, and its gradients times the unit: dx in x's dtype, dw and db in the accumulate dtype."""
    x, target, (V, d) = tensors[0], tensors[3].reshape(-1), tensors[1].shape
    p, rows, wide = primitives(o.backend), rows_2d(x), eager.wide_of(x.dtype)
    o, w, b, weights = operands(tensors, o, x.dtype)
    check_targets(target, V, o.ignore_index)
    per_class = weights if o.label_smoothing else None
    head = o.head(0)
    dx = torch.empty_like(rows) if needs[0] else None
    dw = torch.zeros(V, d, dtype=wide, device=x.device) if needs[1] else None
    db = torch.zeros(V, dtype=wide, device=x.device) if needs[2] else None
    losses = torch.empty(len(rows), dtype=wide, device=x.device)

    def of_tokens(start, stop):
        here, mine = rows[start:stop], target[start:stop]
        outputs = p.cross_entropy_fwd(here, w, b, mine, per_class, head, weighted=o.label_smoothing > 0, keep=True)
        sums, s = Sums(mine, weights, o, V), outputs.statistics
        losses[start:stop] = sums.results(s, o.results)[0]
        units = torch.full_like(s.lse, unit_of(o, x.dtype, weights))
        gradients = sums.gradients(TokenResults(loss=units), s.lse, None)
        arguments = outputs.logits, outputs.parts, s.z_t, 0, mine, per_class, s.lse, gradients, head
        part = p.cross_entropy_saved_bwd(*arguments, outputs.logits, db=needs[2])
        if needs[2]:
            db.add_(part)
        if needs[1]:
            eager.upcast_matmul(outputs.logits.t(), here, out=dw, add=True)
        if needs[0]:
            eager.upcast_matmul(outputs.logits, w, out=dx[start:stop])

    narrow = x.itemsize if x.dtype != wide else 0
    of_token = V * x.itemsize + 4 * p.slice_count(x, V) * 2  # most bytes that a token of a chunk holds
    if o.backend == "eager":
        of_token = V * (wide.itemsize * (3 if o.softcap else 1) + narrow) + 2 * wide.itemsize * d * bool(narrow)
    for start, stop in token_chunks(len(rows), of_token, o.workspace):
        of_tokens(start, stop)
    return losses.sum(), None if dx is None else dx.view_as(x), dw, db
