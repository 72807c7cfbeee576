"""Defines linear_cross_entropy and selected_log_probs: the cross-entropy of softmax(x w^T + b) and target classes, and
statistics of the logits, which are never stored."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ..dispatch.checks import check_choice, check_flags, check_input, check_mode, check_number, check_weight
from ..dispatch.choices import (
    WORKSPACE_OF_LOSS,
    autocast_off,
    cast_input,
    choose_backend,
    choose_mode,
    choose_workspace,
    compose,
    matmul_precision,
)
from ..sublayer.dropout import draw_state
from ..sublayer.lora import LoRA, ReplayedLoRA, check_update, update_dtype
from .checks import NAME, check_class_weights, check_scalars, check_target, check_top_k, place_in
from .in_forward import SumOfLosses, forms_in_forward
from .logits import reference_logits, results_of_logits
from .op import LinearCrossEntropyOptions, apply
from .statistics import CLASSES, DIFFERENTIABLE, TokenResults, of_rows
from .updated import UpdateOptions, update_of

SELECTED = "selected_log_probs"


class TopK(NamedTuple):
    """The largest log-probabilities float32 [..., k], in descending order, and their classes int64 [..., k]."""

    log_probs: Tensor
    indices: Tensor


class CrossEntropyOutput(NamedTuple):
    """What linear_cross_entropy returns where more than the loss is asked for; None for what is not.

    lse, log_probs, entropy: float32 (float64 for float64) [...]. accuracy: the share of the tokens that count whose target has
    the largest logit, a scalar, or [...] of 0 and 1 for reduction "none". arg_max: int64 [...], the class of the largest logit.
    """

    loss: Tensor
    lse: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    accuracy: Tensor | None = None
    arg_max: Tensor | None = None
    top_k: TopK | None = None


class TokenLogProbs(NamedTuple):
    """What selected_log_probs returns with return_entropy: log_probs of tokens' shape, entropy [...]."""

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
    workspace: int | str | None = None,
) -> Tensor | CrossEntropyOutput:
    """Computes F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...) and never holds all logits.

    input [..., d], linear_weight [V, d], linear_bias [V], target int64 [...] -> the loss in float32 (float64 for float64): a
    scalar, or [...] for reduction "none"; with a return_ argument or top_k a CrossEntropyOutput. float16, bfloat16,
    float32, float64; autocast's type inside torch.autocast. Logits are float32 and never rounded.
    torch.nn.functional.linear_cross_entropy has these names, and weight, reduction, ignore_index and label_smoothing as here:

    weight: [V], of the classes; no gradient. reduction: "mean" divides by the sum of the targets' weights, "sum", "none".
    ignore_index: tokens with this target count nowhere. label_smoothing: share of a target that is spread over all classes.
    logit_scale: a number that logits are multiplied by. softcap: c tanh(logits / c) of that, as in Gemma 2.
    z_loss: adds z_loss log(Z)^2, averaged over the tokens that are not ignored (PaLM, arXiv 2204.02311).
    return_lse: also log(Z) = logsumexp of the logits. return_log_probs: also the targets' log-probabilities, z_t - log(Z),
        whatever weight and label_smoothing are. return_entropy: also H = -sum_v p_v log p_v of the probabilities; saves 4 bytes
        a token more. These are differentiable (dH/dz_v = -p_v (log p_v + H)), and 0 where the target is ignored.
    return_accuracy: also how often the target has the largest logit, and the class that has it, 0 where the target is ignored.
    top_k: also the k largest log-probabilities and their classes (k up to 64), without a gradient, 0 where the target is
        ignored. The logits of a chunk of tokens are held for torch.topk, also by the kernels.
    lora: a low-rank update of linear_weight (ckptkern.LoRA(a [r, d], b [V, r], scale, dropout_p)), not with a group. Saves what
        "full" saves, whatever recompute is. dropout_p is applied in every call: pass 0 in evaluation.
    group: a process group over which the vocabulary is split: linear_weight and linear_bias are this rank's rows, from
        vocab_start on (None: shards of equal size in the order of ranks); input, target and weight (of all classes) are equal
        on all ranks, and so are the results and input's gradient. One all-gather of 8 bytes a token (label_smoothing and
        return_entropy 4 more, return_accuracy 8, top_k 8 k) and one all-reduce of input's gradient in float32.
    recompute: what is saved for backward besides the arguments, bytes a token, and the matmuls run, forward + backward:

        "none", "selective"  2 V and V/16 more (float32: 4 V)    3      exponentials of logits, or with a softcap logits
        "full"               4                                   4      log(Z)

        Where they are fewer bytes (4 V d and input's), "none" saves gradients of a scalar loss that eager forward formed.

    workspace: bytes of transient memory in each pass, an int or "64MiB": forward takes tokens in equal chunks that fit, of 128
        at least, and backward the vocabulary, of 256 classes at least. Default: ckptkern.workspace. A chunk's rows of
        linear_weight's gradient are final, rounded once; the float32 sum of input's gradient is not counted.

    A floating-point target of shape [..., V] holds class probabilities; it runs in PyTorch ops on all logits, log_probs are
    expected ones, and the likeliest class is the target of accuracy. Inside torch.utils.checkpoint the mode is "none".
    Raises IndexError for a target that is no class (on a GPU: a device-side assertion, as in torch), ShapeError, DtypeError,
    DeviceError and LayoutError of ckptkern.errors, ValueError, TypeError, RuntimeError (backend).
    """
    flags = {"return_lse": return_lse, "return_log_probs": return_log_probs, "return_entropy": return_entropy}
    flags["return_accuracy"] = return_accuracy
    check_arguments(NAME, input, linear_weight, linear_bias, recompute, flags, ("linear_weight", "input"))
    check_choice(NAME, "reduction", reduction, ("none", "mean", "sum"))
    label_smoothing, logit_scale, softcap, z_loss = check_scalars(label_smoothing, logit_scale, softcap, z_loss)
    ignore_index = -100 if ignore_index is None else ignore_index
    check_top_k(top_k, None if group is not None else linear_weight.shape[0])
    returned = [one.removeprefix("return_") for one, wanted in flags.items() if wanted]
    beside = {"lse_squared": z_loss, "arg_max": return_accuracy, "top_k": top_k}
    results = token_results(
        NAME,
        "target",
        input,
        linear_weight,
        linear_bias,
        target,
        weight,
        ("loss", *returned, *(one for one, wanted in beside.items() if wanted)),
        group,
        vocab_start,
        workspace,
        recompute,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        logit_scale=logit_scale,
        softcap=softcap,
        top_k=top_k or 0,
        summed=reduction != "none",
        lora=lora,
    )
    loss = reduced(results, target, weight, reduction, ignore_index, z_loss)
    return output(loss, results, target, reduction, ignore_index) if returned or top_k else loss


def output(
    loss: Tensor, results: TokenResults, target: Tensor, reduction: str, ignore_index: int
) -> CrossEntropyOutput:
    """What was asked for beside the loss, each of the leading shape, but for a mean of accuracies."""
    classes = not target.is_floating_point()
    found = public(results, target.shape if classes else target.shape[:-1])
    if results.accuracy is not None and reduction != "none":
        count = (target != ignore_index).sum() if classes else len(results.loss)
        found["accuracy"] = found["accuracy"].sum() / count
    return CrossEntropyOutput(loss, *(found.get(one) for one in CrossEntropyOutput._fields[1:]))


@overload
def selected_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = ...,
    temperature: float = ...,
    return_entropy: Literal[False] = ...,
    lora: LoRA | None = ...,
    ignore_index: int = ...,
    group: torch.distributed.ProcessGroup | None = ...,
    vocab_start: int | None = ...,
    recompute: str = ...,
    workspace: int | str | None = ...,
) -> Tensor: ...
@overload
def selected_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = ...,
    temperature: float = ...,
    return_entropy: Literal[True],
    lora: LoRA | None = ...,
    ignore_index: int = ...,
    group: torch.distributed.ProcessGroup | None = ...,
    vocab_start: int | None = ...,
    recompute: str = ...,
    workspace: int | str | None = ...,
) -> TokenLogProbs: ...
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
    workspace: int | str | None = None,
) -> Tensor | TokenLogProbs:
    """Computes the log-probabilities of tokens under softmax(F.linear(hidden, weight, bias) / temperature), without logits.

    hidden [..., d], weight [V, d], bias [V], tokens int64 [...] -> log_softmax(logits / temperature)[..., tokens], float32
    (float64 for float64) [...], differentiable to any order; 0 for tokens equal to ignore_index, such as those of a prompt.
    Shift tokens, not hidden. Saves 4 bytes a token for backward. Tokens [..., k] are k candidates for each place, such as a
    teacher's likeliest; log-probabilities are then [..., k].

    temperature: a positive number. return_entropy: a TokenLogProbs, with the entropy of softmax(logits / temperature), float32
        [...], differentiable too; saves 4 bytes a token more.
    lora (of weight), ignore_index, group, vocab_start, recompute, workspace: see linear_cross_entropy.
    Raises what linear_cross_entropy raises.
    """
    check_arguments(
        SELECTED, hidden, weight, bias, recompute, dict(return_entropy=return_entropy), ("weight", "hidden")
    )
    check_number(SELECTED, "temperature", temperature)
    if not temperature > 0:
        raise ValueError(
            f"{SELECTED}: temperature must be positive, not {temperature}; the arg max is return_accuracy's"
        )
    results = token_results(
        SELECTED,
        "tokens",
        hidden,
        weight,
        bias,
        tokens,
        None,
        TokenLogProbs._fields[: 1 + return_entropy],
        group,
        vocab_start,
        workspace,
        recompute,
        ignore_index=ignore_index,
        label_smoothing=0.0,
        logit_scale=1.0 / temperature,
        softcap=0.0,
        top_k=0,
        lora=lora,
    )
    found = public(results, hidden.shape[:-1])
    if tokens.dim() == hidden.dim():
        found["log_probs"] = found["log_probs"].view(tokens.shape)
    return TokenLogProbs(**found) if return_entropy else found["log_probs"]


def check_arguments(
    op: str, x: Tensor, w: Tensor, b: Tensor | None, recompute: str, flags: dict[str, bool], names: tuple[str, str]
) -> None:
    """names: those of w and x."""
    check_mode(op, recompute)
    check_flags(op, **flags)
    check_input(op, x, names[1])
    check_weight(op, names[0], w, b, x, x.shape[-1], names[1])


def token_results(
    op: str,
    target_name: str,
    input: Tensor,
    w: Tensor,
    b: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    names: tuple[str, ...],
    group,
    vocab_start: int | None,
    workspace: int | str | None,
    recompute: str,
    summed: bool = False,
    lora: LoRA | None = None,
    **options,
) -> TokenResults:
    """Those of these names, [M]; of checked arguments but for target and weight. summed: is only their sum read, so that it may
    be the one value? options: fields of the op's options."""
    x = cast_input(op, input, w)
    probabilities = op == NAME and isinstance(target, Tensor) and target.is_floating_point()
    check_target(op, target_name, input, w, target, probabilities, several=op != NAME)
    if lora is not None and group is not None:
        raise ValueError(f"{op}: a low-rank update (lora) is not split over a process group; leave out one of both")
    name, size, first = place_in(op, group, w.shape[0], vocab_start)
    check_class_weights(weight, input, first + w.shape[0], split=group is not None)
    if not {"arg_max", "top_k"}.isdisjoint(names) and first + w.shape[0] > CLASSES:
        raise ValueError(
            f"{op}: return_accuracy and top_k take up to 2^24 classes, not {first + w.shape[0]}; leave them out"
        )
    update, numbers = (None, None, None), ()
    if lora is not None:
        a, low_rank_b, *numbers = check_update(op, "lora", lora, w, input)
        drawn = lora.rng if isinstance(lora, ReplayedLoRA) else draw_state(x, numbers[1], True)
        update = a, low_rank_b, drawn
    kinds = UpdateOptions(lora=tuple(numbers), lora_dtype=update_dtype(input, x.dtype, update[:2]))
    if not probabilities:
        o = LinearCrossEntropyOptions(
            **options,
            **kinds._asdict(),
            candidates=0 if target.dim() < input.dim() else target.shape[-1],
            vocab_start=first,
            group=name,
            size=size,
            equal_shards=vocab_start is None,
            recompute=choose_mode(recompute) if lora is None else "full",
            backend=choose_backend(op, x),
            precision=matmul_precision(x),
            workspace=choose_workspace(op, workspace, x, least=WORKSPACE_OF_LOSS),
            results=names,
        )
        if summed and forms_in_forward(o, x, w, b, target):
            return TokenResults(loss=SumOfLosses.apply(o, x, w, b, target, weight)[None])
        return of_rows(apply(o, x, w, b, target, weight, *update), names)
    if group is not None:
        raise ValueError(f"{op}: targets that are probabilities cannot be split over a process group")
    compose(op, "a target of probabilities needs all logits at once")
    with autocast_off(x):
        z = reference_logits(x, w, b, options["logit_scale"], options["softcap"], update_of(update, kinds))
        return results_of_logits(
            z, target, weight, options["ignore_index"], options["label_smoothing"], names, options["top_k"]
        )


def public(results: TokenResults, lead: torch.Size) -> dict[str, Any]:
    """Those that are there, by name, of the leading shape; without a graph if nothing is computed of their gradients."""
    found = {}
    for name, one in results._asdict().items():
        if name == "top_k" and one is not None:
            log_probs, indices = (part.t().reshape(*lead, len(part)) for part in one.detach().chunk(2))
            found[name] = TopK(log_probs, indices.to(torch.int64))
        elif one is not None:
            one = one if name in DIFFERENTIABLE else one.detach()
            one = one.to(torch.int64) if name == "arg_max" else one
            found[name] = one.view(lead) if one.dim() == 1 else one.t().reshape(*lead, len(one))
    return found


def reduced(results: TokenResults, target, weight, reduction: str, ignore_index: int, z_loss: float) -> Tensor:
    """The loss of all tokens from those of each, of which none is ignored where targets are probabilities [..., V]."""
    classes, count, total = not target.is_floating_point(), results.loss.shape[0], results.loss.shape[0]
    if classes and reduction == "mean":
        counted = target != ignore_index
        count = total = counted.sum()
        if weight is not None:
            total = (weight[target.masked_fill(~counted, 0)] * counted).sum(dtype=results.loss.dtype)

    lead = target.shape if classes else target.shape[:-1]
    loss = reduced_over(results.loss, reduction, total, lead)
    return loss + z_loss * reduced_over(results.lse_squared, reduction, count, lead) if z_loss else loss


def reduced_over(tokens: Tensor, reduction: str, divisor: Tensor | int, lead: torch.Size) -> Tensor:
    """The mean or the sum of a number for each token, or all of them, in the leading shape."""
    if reduction == "none":
        return tokens.view(lead)
    return tokens.sum() / divisor if reduction == "mean" else tokens.sum()
