"""The op linear_cross_entropy: each token's loss and statistics of softmax(x w^T + b), without storing the logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import eager
from ...results import TokenStatistics
from ..dispatch.choices import primitives
from ..registration.functions import build
from ..registration.gradients import WeightGrad, main_grad_of
from ..registration.op import (
    CHUNK_ROWS,
    Chunks,
    Named,
    Op,
    OpTensors,
    beside_frozen,
    by_chunks,
    cast_parameter,
    needed,
    rows_2d,
    token_chunks,
    unflattened,
)
from ..sublayer.lora import LowRank, low_rank
from .statistics import Sums, combined, gathered, of_rows, reference_logits, results_of_logits

NAME = "linear_cross_entropy"
X, W, B, TARGET, CLASS_WEIGHT = range(5)
COLUMNS = 256  # where chunks of the vocabulary start: multiples of every tile's BLOCK_N


def check_targets(target: Tensor, entries: int | Tensor, ignore_index: int) -> None:
    """Raises IndexError on a CPU, and a device-side assertion on a GPU, for a target that is neither a class nor ignored, as
    torch does."""
    bad = ((target < 0) | (target >= entries)) & (target != ignore_index)
    if target.is_cpu:
        if bool(bad.any()):
            raise IndexError(f"{NAME}: Target {target[bad][0].item()} is out of bounds.")
    else:
        torch._assert_async(~bad.any(), f"{NAME}: a target is out of bounds")


def vocabulary_chunks(entries: int, bytes_per_entry: int, workspace: int | None) -> Chunks:
    """Returns [start, stop) ranges of the vocabulary whose transient tensors fit `workspace`: at least COLUMNS each, and as
    equal as multiples of COLUMNS can be. Without a workspace there is one range."""
    chunks = token_chunks(-(-entries // COLUMNS) * COLUMNS, max(bytes_per_entry, 1), workspace, COLUMNS)
    return [*chunks[:-1], (chunks[-1][0], entries)] if entries else []


def operands(tensors: OpTensors, o, dtype: torch.dtype) -> tuple[Any, Tensor, Tensor | None, Tensor | None]:
    """Returns the options with the workspace that a Frozen weight leaves, w and b in dtype, and class weights in the accumulate
    dtype."""
    o, _ = beside_frozen((tensors[W],), o, dtype)
    w, b = cast_parameter(tensors[W], dtype), cast_parameter(tensors[B], dtype)
    return o, w, b, cast_parameter(tensors[CLASS_WEIGHT], eager.wide_of(dtype))


# -- the low-rank update: logits of x W^T + u B^T are those of [x | u] and [W | B], u = scale dropout(x) A^T [M, r]
#
# [x | u] and [W | B] are joined chunk by chunk, so that one matmul forms the logits, by the launchers that run without an
# update. u and dropout(x) are recomputed in backward.


class UpdateTensors(NamedTuple):
    """The last of the op's tensors. All are None without an update, lora_rng also without dropout."""

    head_lora_a: Tensor | None
    head_lora_b: Tensor | None
    lora_rng: Tensor | None


def update_of(tensors: OpTensors, o) -> LowRank | None:
    """Returns the low-rank update of w, from the op's tensors and options, or None."""
    return low_rank(UpdateTensors(*tensors[-3:]), o, ("head",), "head", 0)


class UpdatedHead:
    """An LM head with a low-rank update: rows [M, d], w [V, d] in the compute dtype, and A and B of the update.

    needs: the op's needs_input_grad mask. du, da, db: gradients of u, A and B.
    """

    def __init__(self, rows: Tensor, w: Tensor, tensors: OpTensors, o, needs: int = 0):
        self.rows, self.w, self.o, self.p = rows, w, o, primitives(o.backend)
        self.update, self.tensors = update_of(tensors, o), UpdateTensors(*tensors[-3:])
        self.b = self.update.b.to(rows.dtype)
        # bytes of a row of [x | u] or [W | B]; of a token's [x | u] with dropout(x), x in the update's dtype, and steps between
        self.bytes_beside = (w.shape[1] + self.b.shape[1]) * w.itemsize
        self.bytes_of_token = self.bytes_beside + 3 * w.shape[1] * self.update.a.itemsize
        place = len(tensors) - len(self.tensors)
        self.needs_x, self.needs_a, needs_b = needed(needs, 0), needed(needs, place), needed(needs, place + 1)
        self.du: Tensor | None = None
        self.da: Tensor | None = None
        self.db = torch.empty_like(self.tensors.head_lora_b) if needs_b else None

    def chunks(self) -> Chunks:
        """Returns the [start, stop) ranges of tokens that backward takes at once, which fit a quarter of the workspace."""
        least = None if self.o.workspace is None else self.o.workspace // 4
        return token_chunks(self.rows.shape[0], self.bytes_of_token, least)

    def inner(self, start: int, stop: int) -> Tensor:
        """Computes u of tokens [start, stop) in the compute dtype."""
        x = self.update.input(self.p, self.rows[start:stop].to(self.update.a.dtype), start)
        return self.update.inner(x).to(self.rows.dtype)

    def inputs(self, start: int, stop: int) -> Tensor:
        """Returns [x | u] of tokens [start, stop)."""
        return torch.cat((self.rows[start:stop], self.inner(start, stop)), 1)

    def weights(self, start: int, stop: int) -> Tensor:
        """Returns [W | B] of classes [start, stop)."""
        return torch.cat((self.w[start:stop], self.b[start:stop]), 1)

    @functools.cached_property
    def u(self) -> Tensor:
        """Computes u of all tokens."""
        return torch.cat([self.inner(*chunk) for chunk in self.chunks()])

    def write_gradient(
        self, part: slice, bias: Tensor | None, arguments: Sequence, head: eager.Head, dz: Tensor, db: bool
    ):
        """Runs `cross_entropy_bwd` for the classes `part`, in chunks of tokens; returns the sum of dz's rows if `db`.

        arguments: target, class weights, lse and gradients.
        """
        target, class_weight, lse, gradients = arguments
        weights, total = self.weights(part.start, part.stop), None
        for start, stop in self.chunks():
            here = slice(start, stop)
            of_tokens = type(gradients)(*(None if gradient is None else gradient[here] for gradient in gradients))
            sums = self.p.cross_entropy_bwd(
                self.inputs(start, stop),
                weights,
                bias,
                target[here],
                class_weight,
                lse[here],
                of_tokens,
                head,
                dz[here],
                db=db,
            )
            total = sums if total is None or sums is None else total.add_(sums)
        return total

    def add(self, dz: Tensor, start: int, stop: int) -> None:
        """Forms db's rows of classes [start, stop) from the gradient dz of their logits, and adds their part of du."""
        if self.db is not None:
            eager.upcast_matmul(dz.t(), self.u, out=self.db[start:stop])
        if self.needs_x or self.needs_a:
            add = self.du is not None
            self.du = self.du if add else dz.new_empty(self.u.shape, dtype=eager.wide_of(dz.dtype))
            eager.upcast_matmul(dz, self.b[start:stop], out=self.du, add=add)

    def finish(self, dx: Tensor | None) -> None:
        """Forms da from du, and adds the update's part of x's gradient to dx."""
        if self.du is None:
            return
        chunks = self.chunks()
        da = WeightGrad(self.tensors.head_lora_a, len(chunks)) if self.needs_a else None
        for start, stop in chunks:
            du = self.du[start:stop].mul_(self.update.scale).to(self.update.a.dtype)
            if dx is not None:
                self.update.add_input_gradient(self.p, du, dx[start:stop], start)
            if da is not None:
                da.add(du, self.update.input(self.p, self.rows[start:stop].to(du.dtype), start))
        self.da = None if da is None else da.result()


# -- statistics and gradients


def statistics_of(
    rows: Tensor,
    w: Tensor,
    b: Tensor | None,
    target: Tensor,
    weights: Tensor | None,
    candidates: Tensor | None,
    o,
    first: int = 0,
    updated: UpdatedHead | None = None,
) -> Named:
    """Returns TokenStatistics over the classes w, and the logits and parts that are saved, by name.

    first: place of w's first row in this rank's vocabulary. updated: an UpdatedHead, whose [x | u] replaces rows [M, d]; w is
    then [W | B].
    """
    (M, _), V, keep, p = rows.shape, w.shape[0], o.recompute != "full", primitives(o.backend)
    holds = o.top_k + o.candidates > 0
    head = o.head(o.vocab_start + first)

    def of_tokens(start, stop):
        outputs = p.cross_entropy_fwd(
            rows[start:stop] if updated is None else updated.inputs(start, stop),
            w,
            b,
            target[start:stop],
            weights,
            head,
            weighted=o.label_smoothing > 0,
            keep=keep,
            entropy="entropy" in o.results,
            arg_max="arg_max" in o.results,
            logits=holds,
        )
        named = outputs.statistics._asdict() | {"logits": outputs.logits}
        if outputs.parts is not None:
            named["parts"] = outputs.parts.t()
        if o.top_k:
            values, classes = outputs.z.topk(min(o.top_k, V), 1)
            beside = (0, o.top_k - values.shape[1])  # padding where there are fewer than top_k classes
            named["top_z"] = F.pad(values, beside, value=-torch.inf)
            named["top_v"] = F.pad((classes + head.first).to(values.dtype), beside)
        if candidates is not None:
            columns, here = eager.target_columns(candidates[start:stop], head, V)
            named["z_c"] = (
                torch.where(here, outputs.z.gather(1, columns), 0) if V else outputs.z.new_zeros(columns.shape)
            )
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    # kernels hold only what they save, and the width of their parts may depend on the chunk
    if keep and o.backend != "eager" and not holds:
        return of_tokens(0, M)
    of_token = token_bytes(rows, V, o) + (0 if updated is None else updated.bytes_of_token)
    return by_chunks(token_chunks(M, of_token, o.workspace), of_tokens)


def token_bytes(x: Tensor, V: int, o) -> int:
    """Returns the bytes of a token's transient tensors in forward, for V rows of w."""
    holds = o.top_k + o.candidates > 0  # logits outlive their statistics
    if o.backend == "eager":
        buffers = 1 + (o.softcap > 0) + ("entropy" in o.results) + holds
        return V * (eager.wide_of(x.dtype).itemsize * buffers + (x.itemsize if o.recompute != "full" else 0))
    # per slice: lse, wz, entropy, the largest logit and its class
    of_slices = 1 + (o.label_smoothing > 0) + ("entropy" in o.results) + 2 * ("arg_max" in o.results)
    return 4 * primitives(o.backend).slice_count(x, V) * of_slices + 4 * (V + COLUMNS) * holds


def statistics_with_update(
    updated: UpdatedHead, b: Tensor | None, target: Tensor, weights: Tensor | None, candidates: Tensor | None, o
) -> TokenStatistics:
    """Computes `statistics_of` with w's low-rank update, over parts of the vocabulary: half of the workspace holds their
    weights, half their logits, of at least CHUNK_ROWS tokens."""
    half = None if o.workspace is None else o.workspace // 2
    of_entry = max(updated.bytes_beside, CHUNK_ROWS * token_bytes(updated.rows, COLUMNS, o) // COLUMNS)
    parts, own = [], o._replace(workspace=half)
    for start, stop in vocabulary_chunks(updated.w.shape[0], of_entry, half):
        bias, per_class = (None if tensor is None else tensor[start:stop] for tensor in (b, weights))
        others = bias, target, per_class, candidates, own, start, updated
        # the weights have no name here, so that they are freed before the next range's
        parts.append(statistics_of(updated.rows, updated.weights(start, stop), *others))
    return combined(TokenStatistics(**{name: torch.stack([part[name] for part in parts]) for name in parts[0]}))


def head_gradients(
    write: Callable[[int, int, Tensor, bool], Tensor | None],
    like: Tensor,
    rows: Tensor | None,
    parameter: Tensor,
    w: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    dtype: torch.dtype,
    needs: int,
    chunks: Chunks,
    group: str = "",
    updated: UpdatedHead | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Computes dx [..., d], dw and db of logits x w^T + b, as `needs` asks, by ranges of the vocabulary; dw is None if it was
    added to a main_grad.

    A range's rows of dw and db are final, rounded once, in the parameters' dtypes. dx is a sum over ranges in the accumulate
    dtype.

    write(start, stop, dz, db): writes the gradients of a range's logits to dz [M, stop - start], and returns the sum of its
        rows if db.
    like: a tensor [..., anything]. rows: x [M, d], None if no gradient reads it. parameter, bias: as they are; w: the parameter
        in dtype, that of x. lse: [M], of the device and the accumulate dtype.
    """
    (M,), (V, d) = lse.shape, w.shape
    need_dx, need_dw, need_db = (needed(needs, place) for place in (X, W, B))
    widest = -(-V // (COLUMNS * max(len(chunks), 1))) * COLUMNS
    workspace_rows = lse.new_empty((M, widest), dtype=dtype)
    summed = len(chunks) != 1 or bool(group)  # dx is then a sum of several matmuls, in the accumulate dtype
    dx = lse.new_empty((M, d), dtype=lse.dtype if summed else dtype) if need_dx else None
    main = main_grad_of(parameter) if need_dw else None
    dw = torch.empty_like(parameter) if need_dw and main is None else main
    db = torch.empty_like(bias) if need_db else None
    for start, stop in chunks:
        dz = workspace_rows[:, : stop - start]
        if db is None:
            write(start, stop, dz, False)
        else:
            db[start:stop] = write(start, stop, dz, True)
        if updated is not None:
            updated.add(dz, start, stop)
        if dw is not None:
            eager.upcast_matmul(dz.t(), rows, out=dw[start:stop], add=main is not None)
        if dx is not None:
            eager.upcast_matmul(dz, w[start:stop], out=dx, add=start > 0)
    if updated is not None:
        updated.finish(dx)
    if dx is not None:
        dx = dx if chunks else dx.zero_()
        if group:
            dx = torch.ops._c10d_functional.all_reduce(dx, "sum", group)
            dx = torch.ops._c10d_functional.wait_tensor(dx)
        dx = unflattened(cast_parameter(dx, dtype), like)
    if main is not None:
        parameter.grad_added_to_main_grad, dw = True, None
    return dx, dw, db


class LinearCrossEntropyOptions(NamedTuple):
    """Options of the op.

    vocab_start: class of w's first row. group, size: the ranks that share the vocabulary, "" for none. equal_shards:
        vocab_start was derived from equal shards.
    results: the names of y's rows. candidates: k if target is [..., k], whose log-probabilities are a result, without a
        softcap; 0 for one target per token.
    lora: scale and dropout_p of w's update, empty without an update; lora_dtype: the dtype in which it is formed.
    """

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
    top_k: int
    lora: tuple[float, ...]
    lora_dtype: torch.dtype
    candidates: int

    def head(self, first: int) -> eager.Head:
        """Returns the options of launchers. first: the class of their first row of w."""
        return eager.Head(self.logit_scale, self.softcap, self.ignore_index, first, self.precision)

    def targets(self, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns target [M], and candidates [M, k] or None. The target is then a candidate, or ignored if all are."""
        if not self.candidates:
            return target.reshape(-1), None
        candidates = target.reshape(-1, self.candidates)
        padding = candidates == self.ignore_index
        return candidates.masked_fill(padding, 0).amax(1).masked_fill(padding.all(1), self.ignore_index), candidates


class LinearCrossEntropy(Op):
    name = NAME
    Options = LinearCrossEntropyOptions
    constants = frozenset({TARGET, CLASS_WEIGHT})

    @staticmethod
    def saves(o):
        always = ("lse", *(("entries",) if o.group else ()), *(("entropy",) if "entropy" in o.results else ()))
        if o.recompute == "full":
            return always
        return (*always, "z_t", "logits") if o.softcap else (*always, "z_t", "logits", "parts")

    @staticmethod
    def reads_x(o, needs):
        return o.recompute == "full" or needed(needs, W)

    @staticmethod
    def forward(tensors, o):
        rows, V, (target, candidates) = rows_2d(tensors[X]), tensors[W].shape[0], o.targets(tensors[TARGET])
        o, w, b, all_weights = operands(tensors, o, rows.dtype)
        weights = None
        if all_weights is not None and o.label_smoothing:
            weights = all_weights[o.vocab_start : o.vocab_start + V].contiguous()
        classes = target if candidates is None else candidates
        if not o.group:
            check_targets(classes, V, o.ignore_index)
        if o.lora:
            fields = statistics_with_update(
                UpdatedHead(rows, w, tensors, o), b, target, weights, candidates, o
            )._asdict()
        else:
            fields = statistics_of(rows, w, b, target, weights, candidates, o)
        logits, parts, entries = fields.pop("logits", None), fields.pop("parts", None), V
        statistics = TokenStatistics(**fields)
        if o.group:
            statistics, entries = gathered(statistics, V, o.group, o.size)
            check_targets(classes, entries, o.ignore_index)
            if o.equal_shards:  # a ValueError on a CPU, a device-side assertion on a GPU
                message = f"{NAME}: without vocab_start all ranks must have shards of equal size"
                if not entries.is_cpu:
                    torch._assert_async(entries == V * o.size, message)
                elif entries != V * o.size:
                    raise ValueError(f"{message}, but this rank of {o.size} has {V} of {int(entries)} classes")
        y = Sums(target, all_weights, o, entries).results(statistics, o.results, candidates)
        saved = {"entries": entries, "logits": logits, "parts": None if parts is None else parts.t()}
        return y, saved | statistics._asdict()

    @staticmethod
    def backward(dy, tensors, saved, o, needs):
        x, target = tensors[X], tensors[TARGET]
        lse, logits, parts, z_t = map(saved.get, ("lse", "logits", "parts", "z_t"))
        p, (V, d), (M,), wide = primitives(o.backend), tensors[W].shape, lse.shape, lse.dtype
        dtype, rows = (logits.dtype, None) if x is None else (x.dtype, rows_2d(x))
        like = target if o.candidates else target[..., None]
        target, candidates = o.targets(target)
        o, w, b, weights = operands(tensors, o, dtype)
        sums, dy = Sums(target, weights, o, saved["entries"] if o.group else V), of_rows(dy, o.results)
        if candidates is not None:
            of_candidates = dy.log_probs.view(o.candidates, M).t().masked_fill(candidates == o.ignore_index, 0)
            dy = dy._replace(log_probs=torch.zeros_like(lse), lse=-of_candidates.sum(1))
        gradients = sums.gradients(dy, lse, saved.get("entropy"))
        updated = UpdatedHead(rows, w, tensors, o, needs) if o.lora else None

        transient = M * dtype.itemsize
        if o.backend == "eager":  # float32 logits, tensors of the softcap's slope, and copies by a CPU's matmuls
            narrow, saved_too = int(dtype != wide), int(logits is not None)  # int: symbolic numbers do not take bools
            held = max(narrow + saved_too, 2 if o.softcap else 0) + ("entropy" in o.results)
            transient += wide.itemsize * (M * max(held, narrow) + (M + 2 * d) * narrow)
        elif candidates is not None and dtype != wide:  # gradients that are rounded after the candidates are added
            transient += M * wide.itemsize
        workspace = o.workspace
        if updated is not None:
            transient += updated.bytes_beside
            # u and du of all tokens, and a copy of u, which torch.cat joins from chunks
            of_all = M * updated.b.shape[1] * (2 * dtype.itemsize + 4 * max(1, dtype.itemsize // 4))
            workspace = None if workspace is None else workspace - workspace // 4 - of_all

        if workspace is not None and needed(needs, X):  # room for dx, which is there with each chunk
            workspace -= min(M * d * wide.itemsize, workspace // 2)

        def write(start, stop, dz, db):
            here = slice(o.vocab_start + start, o.vocab_start + stop)
            head = o.head(here.start)
            per_class = weights[here] if weights is not None and o.label_smoothing else None
            arguments = target, per_class, lse, gradients
            bias = None if b is None else b[start:stop]
            # p and the candidates' gradients cancel where p is near 1, so they are added before rounding
            apart = candidates is not None and dtype != wide
            out = lse.new_empty((M, dz.stride(0)))[:, : stop - start] if apart else dz
            if updated is not None:
                total = updated.write_gradient(slice(start, stop), bias, arguments, head, out, db)
            elif logits is None:
                total = p.cross_entropy_bwd(rows, w[start:stop], bias, *arguments, head, out, db=db)
            else:
                total = p.cross_entropy_saved_bwd(
                    logits[:, start:stop], parts, z_t, start, *arguments, head, out, db=db
                )
            if candidates is not None:
                columns, inside = eager.target_columns(candidates, head, stop - start)
                out.scatter_add_(1, columns, torch.where(inside, of_candidates * o.logit_scale, 0))
                total = out.sum(0) if db else None
                if apart:
                    dz.copy_(out)
            return total

        chunks = vocabulary_chunks(V, transient, workspace)
        parameters = tensors[W], w, tensors[B]
        grads = head_gradients(write, like, rows, *parameters, lse, dtype, needs, chunks, o.group, updated)
        of_update = (None, None) if updated is None else (updated.da, updated.db)
        return *grads, None, None, *of_update, None

    @staticmethod
    def made_on_meta(x, saved, o):
        if saved["parts"] is not None:
            M, V = saved["logits"].shape
            saved["parts"] = saved["parts"].new_empty((primitives(o.backend).slice_count(x, V), M))
        return saved

    @staticmethod
    def reference(tensors, o):
        x, w, b, target, class_weight, *_ = tensors
        if o.group:
            raise NotImplementedError(
                f"{NAME}: second-order gradients and tensor subclasses are not supported over a group"
            )
        z = reference_logits(rows_2d(x), w, b, o.logit_scale, o.softcap, update_of(tensors, o))
        weight = None if class_weight is None else class_weight.detach()
        target, candidates = o.targets(target)
        results = results_of_logits(
            z, target, weight, o.ignore_index, o.label_smoothing, o.results, o.top_k, candidates
        )
        return torch.vstack([getattr(results, name) for name in o.results])


apply = build(LinearCrossEntropy)
