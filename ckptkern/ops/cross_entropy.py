"""Defines linear_cross_entropy: the cross-entropy of softmax(x w^T + b) and target classes, which never stores the
logits."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import eager
from ..errors import DtypeError, ShapeError
from .dispatch.checks import check_choice, check_input, check_mode, check_number, check_tensor, check_weight
from .dispatch.choices import (
    WORKSPACE_OF_LOSS,
    autocast_off,
    cast_input,
    choose_backend,
    choose_mode,
    choose_workspace,
    compose,
    matmul_precision,
    primitives,
)
from .registration.functions import build
from .registration.gradients import by_chunks, main_grad_of, token_chunks
from .registration.needs import flags, needed
from .registration.op import Op
from .registration.rows import cast_parameter, rows_2d, unflattened

NAME = "linear_cross_entropy"
X, W, B, TARGET, CLASS_WEIGHT = range(5)
COLUMNS = 256  # where chunks of the vocabulary start: multiples of every tile's BLOCK_N


def vocabulary_chunks(entries: int, bytes_per_entry: int, workspace: int | None) -> list[tuple[int, int]]:
    """[start, stop) ranges of the vocabulary whose transient tensors fit `workspace`: at least COLUMNS each, and as equal as
    multiples of COLUMNS can be. Without a workspace, one range."""
    units = -(-entries // COLUMNS)
    count = min(units, 1) if workspace is None else -(-units // max(workspace // max(bytes_per_entry, 1) // COLUMNS, 1))
    bounds = [i * units // count * COLUMNS for i in range(count)]
    return list(itertools.pairwise([*bounds, entries]))


def check_targets(target: Tensor, entries: int | Tensor, ignore_index: int) -> None:
    """Checks that all targets are classes or ignored: an IndexError on a CPU, a device-side assertion on a GPU, as in
    torch."""
    bad = ((target < 0) | (target >= entries)) & (target != ignore_index)
    if target.is_cpu:
        if bool(bad.any()):
            raise IndexError(f"{NAME}: Target {target[bad][0].item()} is out of bounds.")
    else:
        torch._assert_async(~bad.any(), f"{NAME}: a target is out of bounds")


def check_equal_shards(entries: Tensor, mine: int, size: int) -> None:
    """Checks that shards have equal sizes if vocab_start is None: a ValueError on a CPU, a device-side assertion on a
    GPU."""
    message = f"{NAME}: without vocab_start all ranks have shards of equal size"
    if not entries.is_cpu:
        torch._assert_async(entries == mine * size, message)
    elif entries != mine * size:
        raise ValueError(f"{message}, but here are {mine} of {int(entries)} classes on one of {size} ranks")


class Sums:
    """What a token's loss needs besides its statistics: the weight of its class, and label smoothing's share of all classes.

    loss = weight (1 - e) (lse - z_t) + e/V (sum_v w_v lse - wz),  e = label_smoothing
    """

    def __init__(self, target: Tensor, class_weight: Tensor | None, ignore_index: int, smoothing: float, entries):
        self.ignored = target == ignore_index
        self.share = 1.0 - smoothing
        if class_weight is not None:
            self.share = class_weight[target.masked_fill(self.ignored, 0)] * self.share
        self.even = smoothing / entries if smoothing else None
        self.all = smoothing if class_weight is None or not smoothing else self.even * class_weight.sum()

    def losses(self, lse: Tensor, z_t: Tensor, wz: Tensor | None) -> Tensor:
        """y [3, M]: the loss, lse^2 and lse of every token, 0 of those that are ignored."""
        loss = self.share * (lse - z_t)
        if wz is not None:
            loss = loss + (self.all * lse - self.even * wz)
        return torch.stack((loss, lse.square(), lse)).masked_fill(self.ignored, 0)

    def gradients(self, dy: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Those of lse, z_t and wz, each [M]."""
        dloss, dsquare, dlse = dy
        dz_t = self.share * dloss
        dlse = dlse + 2 * lse * dsquare + dz_t
        if self.even is None:
            return dlse, dz_t.neg(), None
        return dlse + self.all * dloss, dz_t.neg(), -self.even * dloss


def gathered(statistics: list[Tensor | None], entries: int, group: str, size: int):
    """(lse, z_t, wz or None of the whole vocabulary, its entries as a scalar tensor), from those of this rank's shard.

    One collective; ranks are combined in their order, so that all of them have equal bits.
    """
    M = statistics[0].shape[0]
    mine = [one for one in statistics if one is not None]
    sent = torch.cat([*mine, mine[0].new_full((1,), entries)])
    parts = torch.ops._c10d_functional.all_gather_into_tensor(sent, size, group)
    parts = torch.ops._c10d_functional.wait_tensor(parts).view(size, -1)
    lse, *sums = parts[:, :-1].view(size, len(mine), M).unbind(1)
    sums = [one.sum(0) for one in sums]
    return torch.logsumexp(lse, 0), sums[0], sums[1] if len(sums) > 1 else None, parts[:, -1].sum()


def all_reduced(x: Tensor, group: str) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", group))


class LinearCrossEntropyOptions(NamedTuple):
    """vocab_start: class of w's first row; group, size: of the ranks that share the vocabulary, "" for none; equal_shards: was
    vocab_start taken for granted?"""

    label_smoothing: float
    logit_scale: float
    softcap: float
    ignore_index: int
    vocab_start: int
    group: str
    size: int
    equal_shards: bool
    recompute: str
    backend: str
    precision: str
    workspace: int


class LinearCrossEntropy(Op):
    name = NAME
    Options = LinearCrossEntropyOptions
    constants = frozenset({TARGET, CLASS_WEIGHT})

    @staticmethod
    def saves(o):
        always = ("lse", "entries") if o.group else ("lse",)
        if o.recompute == "full":
            return always
        return (*always, "z_t", "logits") if o.softcap else (*always, "z_t", "logits", "parts")

    @staticmethod
    def reads_x(o, needs):
        return o.recompute == "full" or needed(needs, W)

    @staticmethod
    def forward(tensors, o):
        x, w, b, target, class_weight = tensors
        p, rows, target, V = primitives(o.backend), rows_2d(x), target.reshape(-1), w.shape[0]
        w, b, wide = cast_parameter(w, x.dtype), cast_parameter(b, x.dtype), eager.wide_of(x.dtype)
        head = eager.Head(o.logit_scale, o.softcap, o.ignore_index, o.vocab_start, o.precision)
        all_weights = cast_parameter(class_weight, wide)
        weights = None
        if class_weight is not None and o.label_smoothing:
            weights = all_weights[o.vocab_start : o.vocab_start + V].contiguous()
        keep = o.recompute != "full"
        if not o.group:
            check_targets(target, V, o.ignore_index)

        def of_tokens(start: int, stop: int) -> dict[str, Tensor]:
            made = p.cross_entropy_fwd(
                rows[start:stop], w, b, target[start:stop], weights, head, weighted=o.label_smoothing > 0, keep=keep
            )
            named = made._asdict().items()
            return {name: one.t() if name == "parts" else one for name, one in named if one is not None}

        M, eagerly = rows.shape[0], o.backend == "eager"
        per_token = V * wide.itemsize * (3 if o.softcap else 2) if eagerly else V // 8
        if keep and eagerly:
            per_token += V * x.dtype.itemsize
        # kernels hold nothing beside what they save, and their parts of a token may be of other widths for other chunks
        chunks = [(0, M)] if keep and not eagerly else token_chunks(M, per_token, o.workspace)
        made = by_chunks(chunks, of_tokens)
        lse, z_t, wz, logits, parts = (made.get(name) for name in ("lse", "z_t", "wz", "logits", "parts"))
        entries = V
        if o.group:
            lse, z_t, wz, entries = gathered([lse, z_t, wz], V, o.group, o.size)
            check_targets(target, entries, o.ignore_index)
            if o.equal_shards:
                check_equal_shards(entries, V, o.size)
        y = Sums(target, all_weights, o.ignore_index, o.label_smoothing, entries).losses(lse, z_t, wz)
        parts = None if parts is None else parts.t()
        return y, {"lse": lse, "entries": entries, "z_t": z_t, "logits": logits, "parts": parts}

    @staticmethod
    def backward(dy, tensors, saved, o, needs):
        x, w, b, target, class_weight = tensors
        lse, logits, parts, z_t = (saved.get(name) for name in ("lse", "logits", "parts", "z_t"))
        p, (V, d), targets = primitives(o.backend), w.shape, target
        need_dx, need_dw, need_db = flags(needs, 3)
        dtype, wide = logits.dtype if x is None else x.dtype, lse.dtype
        rows, target, M = None if x is None else rows_2d(x), target.reshape(-1), lse.shape[0]
        w_, b_, all_weights = cast_parameter(w, dtype), cast_parameter(b, dtype), cast_parameter(class_weight, wide)
        sums = Sums(target, all_weights, o.ignore_index, o.label_smoothing, saved["entries"] if o.group else V)
        dstats = sums.gradients(dy, lse)
        weights = all_weights if o.label_smoothing else None

        transient = M * dtype.itemsize
        if o.backend == "eager":  # float32 logits, what the softcap's slope takes, and what a CPU's matmuls copy
            narrow, saved_too = int(dtype != wide), int(logits is not None)  # a symbolic number takes no bool
            held = max(narrow + saved_too, 3 if o.softcap else 0)
            transient += wide.itemsize * (M * max(held, narrow) + (M + 2 * d) * narrow)
        chunks = vocabulary_chunks(V, transient, o.workspace)
        widest = max((stop - start for start, stop in chunks), default=0)
        workspace_rows = lse.new_empty((M, -(-widest // COLUMNS) * COLUMNS), dtype=dtype)
        summed = len(chunks) != 1 or bool(o.group)  # then dx is a sum of several matmuls, in the wide type
        dx = lse.new_empty((M, d), dtype=wide if summed else dtype) if need_dx else None
        main = main_grad_of(w) if need_dw else None
        dw = main if main is not None else torch.empty_like(w) if need_dw else None
        db = torch.empty_like(b) if need_db else None

        def of_entries(start: int, stop: int) -> None:
            dz = workspace_rows[:, : stop - start]
            here = slice(o.vocab_start + start, o.vocab_start + stop)
            given = (target, None if weights is None else weights[here], lse, dstats)
            head = eager.Head(o.logit_scale, o.softcap, o.ignore_index, here.start, o.precision)
            if logits is None:
                part = w_[start:stop], None if b_ is None else b_[start:stop]
                total = p.cross_entropy_bwd(rows, *part, *given, head, dz, db=need_db)
            else:
                of_chunk = logits[:, start:stop], parts, z_t, start
                total = p.cross_entropy_saved_bwd(*of_chunk, *given, head, dz, db=need_db)
            if need_db:
                db[start:stop] = total
            if need_dw:
                eager.upcast_matmul(dz.t(), rows, out=dw[start:stop], add=main is not None)
            if need_dx:
                eager.upcast_matmul(dz, w_[start:stop], out=dx, add=start > 0)

        for start, stop in chunks:
            of_entries(start, stop)
        if need_dx:
            dx = dx if chunks else dx.zero_()
            dx = cast_parameter(all_reduced(dx, o.group) if o.group else dx, dtype)
        if main is not None:
            w.grad_added_to_main_grad = True
        return unflattened(dx, targets[..., None]) if need_dx else None, dw if main is None else None, db, None, None

    @staticmethod
    def made_on_meta(x, made, o):
        if made["parts"] is not None:
            M, V = made["logits"].shape
            made["parts"] = made["parts"].new_empty((primitives(o.backend).slice_count(x, V), M))
        return made

    @staticmethod
    def reference(tensors, o):
        x, w, b, target, class_weight = tensors
        if o.group:
            raise NotImplementedError(f"{NAME}: no second-order gradients, no tensor subclasses over a group")
        wide, target = eager.wide_of(x.dtype), target.reshape(-1)
        z = reference_logits(rows_2d(x), w, b, o.logit_scale, o.softcap)
        ignored, weights = (target == o.ignore_index)[:, None], cast_parameter(class_weight, wide)
        z = z.masked_fill(ignored, 0)  # where an ignored token's logits are infinite, derivatives would be NaN
        z_t = z.gather(1, target[:, None].masked_fill(ignored, 0)).squeeze(1)
        wz = None if not o.label_smoothing else z.sum(1) if weights is None else z @ weights
        return Sums(target, weights, o.ignore_index, o.label_smoothing, w.shape[0]).losses(
            torch.logsumexp(z, 1), z_t, wz
        )


def reference_logits(x: Tensor, w: Tensor, b: Tensor | None, scale: float, softcap: float) -> Tensor:
    """[..., V] in the wide type, differentiable, of operands that are rounded to x's type."""
    w, b = cast_parameter(w, x.dtype), cast_parameter(b, x.dtype)
    wide = eager.wide_of(x.dtype)
    return scaled_and_capped(F.linear(x.to(wide), w.to(wide), None if b is None else b.to(wide)), scale, softcap)


def scaled_and_capped(z: Tensor, scale: float, softcap: float) -> Tensor:
    z = z * scale
    return torch.tanh(z / softcap) * softcap if softcap else z


_apply = build(LinearCrossEntropy)


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
    group: torch.distributed.ProcessGroup | None = None,
    vocab_start: int | None = None,
    recompute: str = "full",
    workspace: int | str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...) and never holds all logits.

    input [..., d], linear_weight [V, d], linear_bias [V], target int64 [...] -> the loss in float32 (float64 for float64): a
    scalar, or [...] for reduction "none". float16, bfloat16, float32, float64; autocast's type inside torch.autocast. Logits
    are float32 and never rounded. torch.nn.functional.linear_cross_entropy has these names, and weight, reduction,
    ignore_index and label_smoothing as here:

    weight: [V], of the classes; no gradient. reduction: "mean" divides by the sum of the targets' weights, "sum", "none".
    ignore_index: tokens with this target count nowhere. label_smoothing: share of a target that is spread over all classes.
    logit_scale: a number that logits are multiplied by. softcap: c tanh(logits / c) of that, as in Gemma 2.
    z_loss: adds z_loss log(Z)^2, averaged over the tokens that are not ignored (PaLM, arXiv 2204.02311).
    return_lse: also log(Z) = logsumexp of the logits, float32 [...], differentiable; 0 where the target is ignored.
    group: a process group over which the vocabulary is split: linear_weight and linear_bias are this rank's rows, from
        vocab_start on (None: shards of equal size in the order of ranks); input, target and weight (of all classes) are equal
        on all ranks, and so are the loss and input's gradient. One all-gather of 12 bytes a token, one all-reduce of input's
        gradient in float32.
    recompute: what is saved for backward besides the arguments, bytes a token, and the matmuls run, forward + backward:

        "none", "selective"  2 V and V/16 more (float32: 4 V)    3      exponentials of logits; with a softcap logits, in
                                                                        input's type
        "full"               4                                   4      log(Z)

    workspace: bytes of transient memory in each pass, an int or "64MiB": forward takes tokens in equal chunks that fit, of 128
        at least, and backward the vocabulary, of 256 classes at least. Default: ckptkern.workspace. A chunk's rows of
        linear_weight's gradient are final, rounded once; input's gradient is summed over chunks in float32, which is not
        counted.

    A floating-point target of shape [..., V] holds class probabilities; it runs in PyTorch ops on all logits. Inside
    torch.utils.checkpoint the mode is "none": the checkpoint already recomputes the region.
    Raises IndexError for a target that is no class (on a GPU: a device-side assertion, as in torch), ShapeError, DtypeError,
    DeviceError and LayoutError of ckptkern.errors, ValueError, TypeError, RuntimeError (backend).
    """
    check_arguments(input, linear_weight, linear_bias, weight, reduction, recompute)
    label_smoothing, logit_scale, softcap, z_loss = check_scalars(label_smoothing, logit_scale, softcap, z_loss)
    ignore_index = -100 if ignore_index is None else ignore_index
    x = cast_input(NAME, input, linear_weight)
    probabilities = isinstance(target, Tensor) and target.is_floating_point()
    check_target(input, linear_weight, target, probabilities)
    V = linear_weight.shape[0]
    name, size, first = place_in(group, V, vocab_start)
    if weight is not None and len(weight) < first + V if group else weight is not None and len(weight) != V:
        raise ShapeError(f"{NAME}: weight must have a value for each class, but has shape {tuple(weight.shape)}")
    if probabilities:
        if group is not None:
            raise ValueError(f"{NAME}: targets that are probabilities cannot be split over a process group")
        compose(NAME, "a target of probabilities needs all logits at once")
        with autocast_off(x):
            z = reference_logits(x, linear_weight, linear_bias, logit_scale, softcap)
            loss, lse = loss_of_logits(z, target, weight, reduction, ignore_index, label_smoothing, z_loss)
        return (loss, lse) if return_lse else loss
    options = LinearCrossEntropyOptions(
        label_smoothing, logit_scale, softcap, ignore_index, first, name, size, vocab_start is None, choose_mode(recompute),
        choose_backend(NAME, x), matmul_precision(x), choose_workspace(NAME, workspace, x, least=WORKSPACE_OF_LOSS),
    )  # fmt: skip
    losses, squares, lse = _apply(options, x, linear_weight, linear_bias, target, weight).unbind(0)
    loss = reduced(losses, squares, target, weight, reduction, ignore_index, z_loss)
    return (loss, lse.view(target.shape)) if return_lse else loss


def reduced(losses, squares, target, weight, reduction: str, ignore_index: int, z_loss: float) -> Tensor:
    """The loss of all tokens from those of each, [M]."""
    if reduction == "none":
        return (losses + z_loss * squares if z_loss else losses).view(target.shape)
    loss, squares = losses.sum(), squares.sum()
    if reduction == "mean":
        counted = target != ignore_index
        count = counted.sum()
        total = count if weight is None else (weight[target.masked_fill(~counted, 0)] * counted).sum(dtype=loss.dtype)
        loss, squares = loss / total, squares / count
    return loss + z_loss * squares if z_loss else loss


def loss_of_logits(
    z: Tensor, target: Tensor, weight: Tensor | None, reduction: str, ignore_index: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """(loss, lse) of logits [..., V] in PyTorch ops. target: classes [...], or probabilities [..., V], none of them ignored."""
    lse, rows, weight = torch.logsumexp(z, -1), rows_2d(z), cast_parameter(weight, z.dtype)
    if target.is_floating_point():
        loss = F.cross_entropy(
            rows, rows_2d(target.to(z.dtype)), weight, reduction=reduction, label_smoothing=smoothing
        )
        counted = torch.ones_like(lse, dtype=torch.bool)
    else:
        options = dict(ignore_index=ignore_index, label_smoothing=smoothing)
        loss = F.cross_entropy(rows, target.reshape(-1), weight, reduction=reduction, **options)
        counted = target != ignore_index
        lse = lse.masked_fill(~counted, 0)
    loss = loss.view(lse.shape) if reduction == "none" else loss
    if z_loss:
        squares = lse.square()
        if reduction != "none":
            squares = squares.sum() / (counted.sum() if reduction == "mean" else 1)
        loss = loss + z_loss * squares
    return loss, lse


def check_arguments(x, w, b, weight, reduction: str, recompute: str) -> None:
    check_mode(NAME, recompute)
    check_choice(NAME, "reduction", reduction, ("none", "mean", "sum"))
    check_input(NAME, x)
    check_weight(NAME, "linear_weight", w, b, x, x.shape[-1], "input")
    if weight is not None:
        check_tensor(NAME, "weight", weight, x)
        if weight.dim() != 1:
            raise ShapeError(f"{NAME}: weight must have a value for each class, but has shape {tuple(weight.shape)}")
        if weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{NAME}: weight gets no gradient; detach it")


def check_scalars(label_smoothing, logit_scale, softcap, z_loss) -> tuple[float, float, float, float]:
    for name, value in (("label_smoothing", label_smoothing), ("logit_scale", logit_scale), ("z_loss", z_loss)):
        check_number(NAME, name, value)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{NAME}: label_smoothing must be between 0 and 1, not {label_smoothing}")
    if softcap is not None:
        check_number(NAME, "softcap", softcap)
        if not softcap > 0:
            raise ValueError(f"{NAME}: softcap must be positive or None, not {softcap}")
    return float(label_smoothing), float(logit_scale), float(softcap or 0.0), float(z_loss)


def check_target(x: Tensor, w: Tensor, target: Tensor, probabilities: bool) -> None:
    check_tensor(NAME, "target", target, x, floating=False)
    lead = tuple(x.shape[:-1])
    if probabilities:
        wanted, what = (*lead, w.shape[0]), "probabilities of classes, (..., classes)"
    else:
        wanted, what = lead, "a class for each token, as input without its features"
        if target.dtype != torch.int64:
            raise DtypeError(f"{NAME}: target must be int64, or floating point for probabilities, not {target.dtype}")
    if tuple(target.shape) != wanted:
        raise ShapeError(f"{NAME}: target must have shape {wanted}, {what}, but has {tuple(target.shape)}")


def place_in(group, entries: int, vocab_start: int | None) -> tuple[str, int, int]:
    """(name of the group, its size, this rank's first class); "", 1, 0 without a group."""
    if group is None:
        if vocab_start is not None:
            raise ValueError(f"{NAME}: vocab_start needs a group")
        return "", 1, 0
    if vocab_start is None:
        vocab_start = group.rank() * entries
    return group.group_name, group.size(), vocab_start
