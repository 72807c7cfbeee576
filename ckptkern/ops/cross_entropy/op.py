"""The op linear_cross_entropy: what softmax(x w^T + b) gives each token, its loss first, without logits that are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import eager
from ...results import TokenStatistics
from ..dispatch.choices import primitives
from ..registration.functions import build
from ..registration.gradients import CHUNK_ROWS, by_chunks, token_chunks
from ..registration.op import Op, beside_frozen, cast_parameter, flags, needed, rows_2d
from .checks import NAME, check_equal_shards, check_targets
from .gradients import COLUMNS, HeadGradients, vocabulary_chunks
from .logits import reference_logits, results_of_logits
from .statistics import (
    Sums,
    add_to_candidates,
    as_rows,
    combined,
    gathered,
    logits_of_candidates,
    of_rows,
    top_of,
    total,
)
from .updated import UPDATE, UpdatedHead, update_of

X, W, B, TARGET, CLASS_WEIGHT = range(5)


def statistics_of(
    inputs: Callable[[int, int], Tensor],
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    target: Tensor,
    weights: Tensor | None,
    candidates: Tensor | None,
    o: Any,
    first: int = 0,
    beside: int = 0,
) -> dict[str, Tensor]:
    """TokenStatistics of the rows w, from `first` of this rank's on, and logits and parts that are saved, by name.

    inputs: (start, stop) -> those rows of the operand x [M, d], which has `beside` transient bytes a row.
    """
    p, V, M, keep, holds = primitives(o.backend), w.shape[0], target.shape[0], o.recompute != "full", o.holds_logits
    head = eager.Head(o.logit_scale, o.softcap, o.ignore_index, o.vocab_start + first, o.precision)

    def of_tokens(start: int, stop: int) -> dict[str, Tensor]:
        made = p.cross_entropy_fwd(
            inputs(start, stop),
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
        parts = None if made.parts is None else made.parts.t()
        top_z, top_v = top_of(made.z, o.top_k, head.first) if o.top_k else (None, None)
        z_c = None if candidates is None else logits_of_candidates(made.z, candidates[start:stop], head.first)
        statistics = made.statistics._replace(top_z=top_z, top_v=top_v, z_c=z_c)
        named = statistics._asdict() | {"logits": made.logits, "parts": parts}
        return {name: one for name, one in named.items() if one is not None}

    # kernels hold nothing beside what they save, and their parts of a token may be of other widths for other chunks
    whole = keep and o.backend != "eager" and not holds
    return by_chunks([(0, M)] if whole else token_chunks(M, token_bytes(x, V, o) + beside, o.workspace), of_tokens)


def token_bytes(x: Tensor, V: int, o: Any) -> int:
    """Returns bytes of a token's transient tensors in forward, for V rows of w."""
    if o.backend == "eager":
        buffers = 1 + (o.softcap > 0) + ("entropy" in o.results) + o.holds_logits
        return V * (eager.wide_of(x.dtype).itemsize * buffers + (x.dtype.itemsize if o.recompute != "full" else 0))
    # of slices: lse, wz, entropy, the largest and its class
    of_slices = 1 + (o.label_smoothing > 0) + ("entropy" in o.results) + 2 * ("arg_max" in o.results)
    return 4 * primitives(o.backend).slice_count(x, V) * of_slices + 4 * (V + COLUMNS) * o.holds_logits


def statistics_with_update(
    updated: UpdatedHead, b: Tensor | None, target: Tensor, weights: Tensor | None, candidates: Tensor | None, o: Any
) -> dict[str, Tensor]:
    """`statistics_of` w with its low-rank update, of parts of the vocabulary: half of the workspace is for their weights, half
    for their logits, at least CHUNK_ROWS tokens'."""
    half = None if o.workspace is None else o.workspace // 2

    def of_entries(start: int, stop: int) -> dict[str, Tensor]:
        bias, per_class = (None if one is None else one[start:stop] for one in (b, weights))
        weight, options = updated.weights(start, stop), o._replace(workspace=half)
        given = updated.inputs, updated.rows, weight, bias, target, per_class, candidates
        return statistics_of(*given, options, start, updated.bytes_of_token)

    of_entry = max(updated.bytes_beside, CHUNK_ROWS * token_bytes(updated.rows, COLUMNS, o) // COLUMNS)
    found = [of_entries(*chunk) for chunk in vocabulary_chunks(updated.w.shape[0], of_entry, half)]
    stacked = {name: torch.stack([one[name] for one in found]) for name in found[0]}
    return {name: one for name, one in combined(TokenStatistics(**stacked))._asdict().items() if one is not None}


class LinearCrossEntropyOptions(NamedTuple):
    """vocab_start: class of w's first row; group, size: of the ranks that share the vocabulary, "" for none; equal_shards: was
    vocab_start taken for granted? results: the names of y's rows. lora, lora_dtype: as in UpdateOptions. candidates: k, if
    target is [..., k], whose log-probabilities are a result, without a softcap; 0 for one target a token."""

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

    @property
    def holds_logits(self) -> bool:
        """Does forward hold a chunk's logits after their statistics are formed?"""
        return self.top_k > 0 or self.candidates > 0

    def targets(self, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """(target [M], candidates [M, k] or None); with candidates the target is one of them, if any counts."""
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
        x, w, b, target, class_weight, *_ = tensors
        rows, V, (target, candidates) = rows_2d(x), w.shape[0], o.targets(target)
        o, _ = beside_frozen((w,), o, x.dtype)
        w, b, wide = cast_parameter(w, x.dtype), cast_parameter(b, x.dtype), eager.wide_of(x.dtype)
        all_weights = cast_parameter(class_weight, wide)
        weights = None
        if class_weight is not None and o.label_smoothing:
            weights = all_weights[o.vocab_start : o.vocab_start + V].contiguous()
        classes = target if candidates is None else candidates
        if not o.group:
            check_targets(classes, V, o.ignore_index)
        if o.lora:
            made = statistics_with_update(UpdatedHead(rows, w, tensors, o), b, target, weights, candidates, o)
        else:
            made = statistics_of(lambda start, stop: rows[start:stop], rows, w, b, target, weights, candidates, o)
        logits, parts, entries = made.pop("logits", None), made.pop("parts", None), V
        statistics = TokenStatistics(**made)
        if o.group:
            statistics, entries = gathered(statistics, V, o.group, o.size)
            check_targets(classes, entries, o.ignore_index)
            if o.equal_shards:
                check_equal_shards(entries, V, o.size)
        sums = Sums(target, all_weights, o.ignore_index, o.label_smoothing, entries, candidates)
        saved = {"entries": entries, "logits": logits, "parts": None if parts is None else parts.t()}
        return as_rows(sums.results(statistics), o.results, sums.ignored), saved | statistics._asdict()

    @staticmethod
    def backward(dy, tensors, saved, o, needs):
        x, w, b, target, class_weight, *_ = tensors
        lse, logits, parts, z_t = (saved.get(name) for name in ("lse", "logits", "parts", "z_t"))
        p, (V, d), like, (target, candidates) = primitives(o.backend), w.shape, target, o.targets(target)
        like = like if o.candidates else like[..., None]
        wanted = flags(needs, CLASS_WEIGHT + 1 + len(UPDATE))
        dtype, wide = logits.dtype if x is None else x.dtype, lse.dtype
        rows, M = None if x is None else rows_2d(x), lse.shape[0]
        o, _ = beside_frozen((w,), o, dtype)
        w_, b_, all_weights = cast_parameter(w, dtype), cast_parameter(b, dtype), cast_parameter(class_weight, wide)
        sums = Sums(target, all_weights, o.ignore_index, o.label_smoothing, saved["entries"] if o.group else V)
        dy = of_rows(dy, o.results)
        if candidates is not None:
            of_candidates = dy.log_probs.view(o.candidates, M).t().masked_fill(candidates == o.ignore_index, 0)
            dy = dy._replace(log_probs=torch.zeros_like(lse), lse=total(dy.lse, -of_candidates.sum(1)))
        gradients = sums.gradients(dy, lse, saved.get("entropy"))
        weights = all_weights if o.label_smoothing else None
        of_update = zip(("x", *UPDATE), (wanted[X], *wanted[-len(UPDATE) :]), strict=True)
        updated = UpdatedHead(rows, w_, tensors, o, {name for name, one in of_update if one}) if o.lora else None

        transient = M * dtype.itemsize
        if o.backend == "eager":  # float32 logits, what the softcap's slope takes, and what a CPU's matmuls copy
            narrow, saved_too = int(dtype != wide), int(logits is not None)  # a symbolic number takes no bool
            held = max(narrow + saved_too, 3 if o.softcap else 0) + ("entropy" in o.results)
            transient += wide.itemsize * (M * max(held, narrow) + (M + 2 * d) * narrow)
        elif candidates is not None and dtype != wide:  # what is rounded after the candidates are added
            transient += M * wide.itemsize
        workspace = o.workspace
        if updated is not None:
            transient += updated.bytes_beside
            # u and du of all tokens, and a copy of u that is joined of chunks
            of_all = M * updated.b.shape[1] * (2 * dtype.itemsize + 4 * max(1, dtype.itemsize // 4))
            workspace = None if workspace is None else workspace - workspace // 4 - of_all
        chunks = vocabulary_chunks(V, transient, workspace)
        grads = HeadGradients(rows, w, w_, b, lse, dtype, needs, chunks, o.group)

        def of_entries(start: int, stop: int) -> None:
            dz = grads.dz(start, stop)
            need_db, here = grads.needs_bias, slice(o.vocab_start + start, o.vocab_start + stop)
            given = (target, None if weights is None else weights[here], lse, gradients)
            head = eager.Head(o.logit_scale, o.softcap, o.ignore_index, here.start, o.precision)
            # p and the candidates' gradients cancel where p is near 1: they meet before they are rounded
            apart = candidates is not None and dtype != wide
            out = torch.empty_like(grads.workspace_rows, dtype=wide)[:, : stop - start] if apart else dz
            if updated is not None:
                bias = None if b_ is None else b_[start:stop]
                db = updated.write_gradient(slice(start, stop), bias, given, head, out, need_db)
            elif logits is None:
                part = w_[start:stop], None if b_ is None else b_[start:stop]
                db = p.cross_entropy_bwd(rows, *part, *given, head, out, db=need_db)
            else:
                of_chunk = logits[:, start:stop], parts, z_t, start
                db = p.cross_entropy_saved_bwd(*of_chunk, *given, head, out, db=need_db)
            if candidates is not None:
                add_to_candidates(out, candidates, of_candidates * o.logit_scale, here.start)
                db = out.sum(0) if need_db else None
            if apart:
                dz.copy_(out)
            out = None  # gone before the other gradients are formed
            if updated is not None:
                updated.add(dz, start, stop)
            grads.add(start, stop, db)

        for start, stop in chunks:
            of_entries(start, stop)
        da, dlb = (None, None) if updated is None else updated.results(grads.dx)
        return *grads.results(like), None, None, da, dlb, None

    @staticmethod
    def made_on_meta(x, made, o):
        if made["parts"] is not None:
            M, V = made["logits"].shape
            made["parts"] = made["parts"].new_empty((primitives(o.backend).slice_count(x, V), M))
        return made

    @staticmethod
    def reference(tensors, o):
        x, w, b, target, class_weight, *_ = tensors
        if o.group:
            raise NotImplementedError(f"{NAME}: no second-order gradients, no tensor subclasses over a group")
        z = reference_logits(rows_2d(x), w, b, o.logit_scale, o.softcap, update_of(tensors, o))
        weight = None if class_weight is None else class_weight.detach()
        target, candidates = o.targets(target)
        results = results_of_logits(
            z, target, weight, o.ignore_index, o.label_smoothing, o.results, o.top_k, candidates
        )
        return as_rows(results, o.results, target == o.ignore_index)


apply = build(LinearCrossEntropy)
