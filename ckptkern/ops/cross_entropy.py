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
from ..results import TokenStatistics
from .dispatch.checks import (
    check_choice,
    check_flags,
    check_input,
    check_mode,
    check_number,
    check_tensor,
    check_weight,
)
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


class TokenResults(NamedTuple):
    """What the op gives of each token, [M] in the wide type; y has a row for each that was asked for, 0 of ignored tokens."""

    loss: Tensor
    lse_squared: Tensor | None = None
    lse: Tensor | None = None


DIFFERENTIABLE = ("loss", "lse_squared", "lse")  # `Sums.gradients` reads their gradients; others are detached


def as_rows(results: TokenResults, names: tuple[str, ...], ignored: Tensor) -> Tensor:
    """y [rows, M]."""
    return torch.stack([getattr(results, name) for name in names]).masked_fill(ignored, 0)


def of_rows(y: Tensor, names: tuple[str, ...]) -> TokenResults:
    """The inverse."""
    return TokenResults(**dict(zip(names, y.unbind(0), strict=True)))


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

    def results(self, s: TokenStatistics) -> TokenResults:
        loss = self.share * (s.lse - s.z_t)
        if s.wz is not None:
            loss = loss + (self.all * s.lse - self.even * s.wz)
        return TokenResults(loss=loss, lse_squared=s.lse.square(), lse=s.lse)

    def gradients(self, dy: TokenResults, lse: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Those of lse, z_t and wz, each [M]."""
        dz_t = self.share * dy.loss
        dlse = dz_t if dy.lse is None else dz_t + dy.lse
        if dy.lse_squared is not None:
            dlse = dlse + 2 * lse * dy.lse_squared
        if self.even is None:
            return dlse, dz_t.neg(), None
        return dlse + self.all * dy.loss, dz_t.neg(), -self.even * dy.loss


def gathered(mine: TokenStatistics, entries: int, group: str, size: int) -> tuple[TokenStatistics, Tensor]:
    """(those of the whole vocabulary, its entries as a scalar tensor), from those of this rank's shard.

    One collective; ranks are combined in their order, so that all of them have equal bits.
    """
    sent = {name: one for name, one in mine._asdict().items() if one is not None}
    parts = torch.cat([*sent.values(), mine.lse.new_full((1,), entries)])
    parts = torch.ops._c10d_functional.all_gather_into_tensor(parts, size, group)
    parts = torch.ops._c10d_functional.wait_tensor(parts).view(size, -1)
    ranks = dict(zip(sent, parts[:, :-1].view(size, len(sent), -1).unbind(1), strict=True))
    whole = {name: one.sum(0) for name, one in ranks.items() if name != "lse"}
    return TokenStatistics(lse=torch.logsumexp(ranks["lse"], 0), **whole), parts[:, -1].sum()


def all_reduced(x: Tensor, group: str) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", group))


class LinearCrossEntropyOptions(NamedTuple):
    """vocab_start: class of w's first row; group, size: of the ranks that share the vocabulary, "" for none; equal_shards: was
    vocab_start taken for granted? results: the names of y's rows."""

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
    results: tuple[str, ...]


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
            parts = None if made.parts is None else made.parts.t()
            named = made.statistics._asdict() | {"logits": made.logits, "parts": parts}
            return {name: one for name, one in named.items() if one is not None}

        M, eagerly = rows.shape[0], o.backend == "eager"
        per_token = 4 * p.slice_count(x, V) * (2 if o.label_smoothing else 1)  # lse and wz of slices
        if eagerly:
            per_token = V * (wide.itemsize * (3 if o.softcap else 2) + (x.dtype.itemsize if keep else 0))
        # kernels hold nothing beside what they save, and their parts of a token may be of other widths for other chunks
        chunks = [(0, M)] if keep and not eagerly else token_chunks(M, per_token, o.workspace)
        made = by_chunks(chunks, of_tokens)
        logits, parts, entries = made.pop("logits", None), made.pop("parts", None), V
        statistics = TokenStatistics(**made)
        if o.group:
            statistics, entries = gathered(statistics, V, o.group, o.size)
            check_targets(target, entries, o.ignore_index)
            if o.equal_shards:
                check_equal_shards(entries, V, o.size)
        sums = Sums(target, all_weights, o.ignore_index, o.label_smoothing, entries)
        saved = {"entries": entries, "logits": logits, "parts": None if parts is None else parts.t()}
        return as_rows(sums.results(statistics), o.results, sums.ignored), saved | statistics._asdict()

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
        dstats = sums.gradients(of_rows(dy, o.results), lse)
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
        z = reference_logits(rows_2d(x), w, b, o.logit_scale, o.softcap)
        weight = None if class_weight is None else class_weight.detach()
        results = results_of_logits(z, target, weight, o.ignore_index, o.label_smoothing)
        return as_rows(results, o.results, target.reshape(-1) == o.ignore_index)


def reference_logits(x: Tensor, w: Tensor, b: Tensor | None, scale: float, softcap: float) -> Tensor:
    """[..., V] in the wide type, differentiable, of operands that are rounded to x's type."""
    w, b = cast_parameter(w, x.dtype), cast_parameter(b, x.dtype)
    wide = eager.wide_of(x.dtype)
    return scaled_and_capped(F.linear(x.to(wide), w.to(wide), None if b is None else b.to(wide)), scale, softcap)


def scaled_and_capped(z: Tensor, scale: float, softcap: float) -> Tensor:
    z = z * scale
    return torch.tanh(z / softcap) * softcap if softcap else z


def results_of_logits(
    z: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float
) -> TokenResults:
    """Those of logits [..., V] in PyTorch ops. target: classes [...], or probabilities [..., V], none of them ignored."""
    z, weight, options = rows_2d(z), cast_parameter(weight, z.dtype), dict(reduction="none", label_smoothing=smoothing)
    if target.is_floating_point():
        loss, lse = F.cross_entropy(z, rows_2d(target.to(z.dtype)), weight, **options), torch.logsumexp(z, 1)
    else:
        target = target.reshape(-1)
        ignored = target == ignore_index
        z = z.masked_fill(ignored[:, None], 0)  # where these are infinite, derivatives would be NaN
        loss = F.cross_entropy(z, target, weight, ignore_index=ignore_index, **options)
        lse = torch.logsumexp(z, 1).masked_fill(ignored, 0)
    return TokenResults(loss=loss, lse_squared=lse.square(), lse=lse)


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
    flags = dict(return_lse=return_lse)
    check_arguments(input, linear_weight, linear_bias, reduction, recompute, flags)
    label_smoothing, logit_scale, softcap, z_loss = check_scalars(label_smoothing, logit_scale, softcap, z_loss)
    ignore_index = -100 if ignore_index is None else ignore_index
    x = cast_input(NAME, input, linear_weight)
    probabilities = isinstance(target, Tensor) and target.is_floating_point()
    check_target(input, linear_weight, target, probabilities)
    name, size, first = place_in(group, linear_weight.shape[0], vocab_start)
    check_class_weights(weight, input, first + linear_weight.shape[0], split=group is not None)
    returned = tuple(one.removeprefix("return_") for one, wanted in flags.items() if wanted)
    if probabilities:
        if group is not None:
            raise ValueError(f"{NAME}: targets that are probabilities cannot be split over a process group")
        compose(NAME, "a target of probabilities needs all logits at once")
        with autocast_off(x):
            z = reference_logits(x, linear_weight, linear_bias, logit_scale, softcap)
            results = results_of_logits(z, target, weight, ignore_index, label_smoothing)
    else:
        options = LinearCrossEntropyOptions(
            label_smoothing=label_smoothing, logit_scale=logit_scale, softcap=softcap, ignore_index=ignore_index,
            vocab_start=first, group=name, size=size, equal_shards=vocab_start is None, recompute=choose_mode(recompute),
            backend=choose_backend(NAME, x), precision=matmul_precision(x),
            workspace=choose_workspace(NAME, workspace, x, least=WORKSPACE_OF_LOSS),
            results=("loss", *(("lse_squared",) if z_loss else ()), *returned),
        )  # fmt: skip
        results = of_rows(_apply(options, x, linear_weight, linear_bias, target, weight), options.results)
    loss = reduced(results, target, weight, reduction, ignore_index, z_loss)
    found = {one: getattr(results, one).view(x.shape[:-1]) for one in returned}
    return (loss, *(t if one in DIFFERENTIABLE else t.detach() for one, t in found.items())) if found else loss


def reduced(results: TokenResults, target, weight, reduction: str, ignore_index: int, z_loss: float) -> Tensor:
    """The loss of all tokens from those of each, of which none is ignored where targets are probabilities [..., V]."""
    classes, count, total = not target.is_floating_point(), results.loss.shape[0], results.loss.shape[0]
    if classes and reduction == "mean":
        counted = target != ignore_index
        count = total = counted.sum()
        if weight is not None:
            total = (weight[target.masked_fill(~counted, 0)] * counted).sum(dtype=results.loss.dtype)

    def over_tokens(one: Tensor, divisor: Tensor | int) -> Tensor:
        if reduction == "none":
            return one.view(target.shape if classes else target.shape[:-1])
        return one.sum() / divisor if reduction == "mean" else one.sum()

    loss = over_tokens(results.loss, total)
    return loss + z_loss * over_tokens(results.lse_squared, count) if z_loss else loss


def check_arguments(x, w, b, reduction: str, recompute: str, flags: dict[str, bool]) -> None:
    check_mode(NAME, recompute)
    check_choice(NAME, "reduction", reduction, ("none", "mean", "sum"))
    check_flags(NAME, **flags)
    check_input(NAME, x)
    check_weight(NAME, "linear_weight", w, b, x, x.shape[-1], "input")


def check_class_weights(weight: Tensor | None, x: Tensor, classes: int, split: bool) -> None:
    """A shard may be followed by other ranks' classes."""
    if weight is None:
        return
    check_tensor(NAME, "weight", weight, x)
    if weight.dim() != 1 or (len(weight) < classes if split else len(weight) != classes):
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
