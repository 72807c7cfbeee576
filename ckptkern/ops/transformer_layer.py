"""transformer_layer: attention_block [+ cross-attention] + mlp_block as ONE segment; what passes between them is rebuilt, not
kept."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.types import IntLikeType

from ..errors import ShapeError
from ._checks import check_flags, levels_of_halves
from ._half import drawn, reads_branch
from ._needs import fake_gradients, in_order, needed_names
from ._op import Op, build, schema_of
from ._rows import rows_2d, unflattened
from ._shard import ACTIVE
from .attention_arguments import gather as gather_attention
from .attention_block import attention_block
from .attention_half import (
    AttentionHalf,
    attention_composite,
    attention_half,
    attention_half_backward,
    attention_half_backward_flops,
    attention_half_fake,
    attention_half_flops,
    products_flops,
)
from .attention_tensors import CONSTANTS, AttentionOptions, AttentionTensors, out_projection
from .mlp_block import gather as gather_mlp
from .mlp_block import mlp_block
from .mlp_half import (
    MLPOptions,
    MLPTensors,
    mlp_composite,
    mlp_half,
    mlp_half_backward,
    mlp_half_backward_flops,
    mlp_half_fake,
    mlp_half_flops,
    present,
)

A, M = len(AttentionTensors._fields), len(MLPTensors._fields)
assert min(CONSTANTS) > M  # so that no place of a cross-attention's constants is one of the MLP's in a call without it
KEPT = 4  # of an attention half: o, lse, its projections, and its output where that is kept

# A schema has at most 64 arguments, so the options of cross-attention are lists, one for each type; those are the layer's own.
SHARED = ("recompute", "backend", "precision", "dtype", "lora_dtype")


def _names_of(*hints: Any) -> tuple[str, ...]:
    return tuple(
        name for name, hint in typing.get_type_hints(AttentionOptions).items() if hint in hints and name not in SHARED
    )


INTS, FLOATS, NAMES, ROWS = (
    _names_of(bool, int), _names_of(float), _names_of(str), _names_of(IntLikeType, IntLikeType | None)
)  # fmt: skip


def _as_lists(o: AttentionOptions | None) -> tuple[tuple, tuple, tuple, tuple]:
    """(ints and which rows are given, floats and what `lora` has, names, the given rows); all empty for None."""
    if o is None:
        return (), (), (), ()
    ints, floats, names, rows = (tuple(getattr(o, name) for name in kind) for kind in (INTS, FLOATS, NAMES, ROWS))
    given = tuple(row is not None for row in rows)
    return tuple(map(int, ints + given)), (*floats, *o.lora), names, tuple(row for row in rows if row is not None)


def _from_lists(ints, floats, names, rows, layer: AttentionOptions) -> AttentionOptions:
    """The inverse of `_as_lists`."""
    values = iter(rows)
    bounds = [next(values) if given else None for given in ints[len(INTS) :]]
    return layer._replace(
        lora=tuple(floats[len(FLOATS) :]), **dict(zip(FLOATS, floats[: len(FLOATS)], strict=True)),
        **dict(zip(INTS, ints[: len(INTS)], strict=True)),
        **dict(zip(NAMES, names, strict=True)), **dict(zip(ROWS, bounds, strict=True)),
    )  # fmt: skip


class Layer(NamedTuple):
    """A call: the attention halves in their order, (tensors, options) each, the MLP half, and whether they are parallel."""

    attention: list[tuple[AttentionTensors, AttentionOptions]]
    mlp: tuple[MLPTensors, MLPOptions]
    parallel: bool

    def keeps_middle(self) -> bool:
        """Is what passes between the halves kept?"""
        return self.attention[0][1].recompute == "none" and not self.parallel

    def needs(self, needs: int) -> tuple[list[int], int]:
        """(needs of each attention half, of the MLP half). A half whose input is not x returns that input's gradient if
        anything before it needs one."""
        of_attention, before = [], needs & 1
        for i in range(len(self.attention)):
            own = needs >> 1 + i * A & (1 << A) - 1
            of_attention.append(own << 1 | before)
            before |= own != 0
        return of_attention, needs >> 1 + len(of_attention) * A << 1 | (needs & 1 if self.parallel else int(before))


def _layer(ta, tc, tm, statics: tuple) -> Layer:
    oa, om = AttentionOptions(*statics[: len(AttentionOptions._fields)]), _mlp_options(statics)
    *lists, parallel = statics[len(oa) + len(om) :]
    halves = [(AttentionTensors(*ta), oa)]
    if tc:
        halves.append((AttentionTensors(*tc), _from_lists(*lists, oa)))
    return Layer(halves, (MLPTensors(*tm), om), parallel)


class TransformerLayer(Op):
    name = "transformer_layer"
    inputs = "Tensor x, Tensor?[] attention, Tensor?[] cross, Tensor?[] mlp"  # a schema has at most 64 arguments
    kept = "Tensor?[] kept, Tensor?[] hidden"
    statics = (
        f"{schema_of(AttentionOptions)}, {schema_of(MLPOptions, 'mlp_')}, "
        "int[] cross_ints, float[] cross_floats, str[] cross_names, SymInt[] cross_rows, bool parallel"
    )
    results = "(Tensor y, Tensor[] kept, Tensor[] hidden)"
    grads = "Tensor[]"
    constants = frozenset((*CONSTANTS, *(A + i for i in CONSTANTS)))

    @classmethod
    def arguments(cls, tensors):
        x, *others = tensors
        return x, others[:A], others[A:-M], others[-M:]

    @classmethod
    def tensors(cls, inputs):
        x, attention, cross, mlp = inputs
        return x, *attention, *cross, *mlp

    @classmethod
    def input_count(cls, saved, statics):
        return 1 + A + M + A * bool(statics[-3])

    @classmethod
    def backward_arguments(cls, saved, statics):
        count = cls.input_count(saved, statics)
        kept = count + KEPT * (1 + bool(statics[-3]))
        return *cls.arguments(saved[:count]), list(saved[count:kept]), list(saved[kept:])

    @classmethod
    def flat(cls, results):
        if isinstance(results, tuple):
            y, kept, hidden = results
            return y, *kept, *hidden
        return tuple(results)

    @staticmethod
    def forward(x, ta, tc, tm, *statics):
        layer = _layer(ta, tc, tm, statics)
        mid, kept = x, []
        for t, o in layer.attention:
            mid, out, lse, qkv = attention_half(mid, t, o)
            mid = unflattened(mid, x.shape[:-1])
            keeps_core, keeps_all = o.recompute != "full", o.recompute == "none"
            kept += [out if keeps_core else None, lse if keeps_core else None, qkv if keeps_all else None]
            kept.append(mid if layer.keeps_middle() else None)
        y, hidden = mlp_half(x if layer.parallel else mid, *layer.mlp)
        y = rows_2d(mid) + y if layer.parallel else y
        return unflattened(y, x.shape[:-1]), kept, hidden

    @staticmethod
    def forward_fake(x, ta, tc, tm, *statics):
        layer = _layer(ta, tc, tm, statics)
        mid, kept = x, []
        for t, o in layer.attention:
            mid, *core = attention_half_fake(mid, t, o)
            kept += [*core, mid.new_empty(mid.shape) if layer.keeps_middle() else x.new_empty(0)]
        y, hidden = mlp_half_fake(x if layer.parallel else mid, *layer.mlp)
        return y.to(torch.promote_types(mid.dtype, y.dtype)) if layer.parallel else y, kept, hidden

    @staticmethod
    def saved(tensors, outputs, statics, needs):
        count = KEPT * (1 + bool(statics[-3]))
        oa, om = AttentionOptions(*statics[: len(AttentionOptions._fields)]), _mlp_options(statics)
        places = {"full": (), "selective": (0, 1), "none": (0, 1, 2) if statics[-1] else (0, 1, 2, 3)}[oa.recompute]
        kept = [one if i % KEPT in places else None for i, one in enumerate(outputs[1 : 1 + count])]
        return [*tensors, *kept, *present(outputs[1 + count :], om)]

    @staticmethod
    def backward(dy, x, ta, tc, tm, kept, hidden, *statics_and_needs):
        layer = _layer(ta, tc, tm, statics_and_needs[:-1])
        needs, mlp_needs = layer.needs(statics_and_needs[-1])
        mid, cores = _rebuilt(x, layer, kept, needs)
        grads = mlp_half_backward(rows_2d(dy), mid, *layer.mlp, hidden, mlp_needs) if mlp_needs else {}
        mid = None
        results = in_order(grads, MLPTensors, mlp_needs)[1:]
        of_mlp = grads.get("x")
        d = dy if layer.parallel else of_mlp
        while cores:
            (*core, f), own = cores.pop(), needs.pop()
            grads = attention_half_backward(rows_2d(d), *core, own, f) if own else {}
            d = grads.get("x")
            results = in_order(grads, AttentionTensors, own)[1:] + results
        if layer.parallel and statics_and_needs[-1] & 1:
            d = d + of_mlp
        return [d, *results]

    @staticmethod
    def backward_fake(dy, x, ta, tc, tm, *others):
        return fake_gradients(dy, (x, *ta, *tc, *tm), others[-1])

    @staticmethod
    def composite(x, ta, tc, tm, *statics):
        layer = _layer(ta, tc, tm, statics)
        mid = x
        for t, o in layer.attention:
            mid = attention_composite(mid, t, o)
        return mid + mlp_composite(x, *layer.mlp) if layer.parallel else mlp_composite(mid, *layer.mlp)

    @staticmethod
    def forward_flops(x, ta, tc, tm, *statics, out_val=None):
        layer = _layer(ta, tc, tm, statics)
        return sum(attention_half_flops(x, t, o) for t, o in layer.attention) + mlp_half_flops(x, layer.mlp[0])

    @staticmethod
    def backward_flops(dy, x, ta, tc, tm, kept, hidden, *statics_and_needs, out_val=None):
        layer = _layer(ta, tc, tm, statics_and_needs[:-1])
        needs, mlp_needs = layer.needs(statics_and_needs[-1])
        flops = mlp_half_backward_flops(dy, x, *layer.mlp, hidden, mlp_needs) if mlp_needs else 0
        for i, (t, o) in enumerate(layer.attention):
            out, _, qkv, mid = kept[KEPT * i : KEPT * (i + 1)]
            rebuilds = mid is None and not layer.parallel
            if rebuilds and out is None:
                flops += attention_half_flops(x, t, o)
                out = qkv = x
            elif rebuilds:
                flops += products_flops(x, t, o, [out_projection(t)])
            if needs[i]:
                flops += attention_half_backward_flops(x, t, o, out, qkv, needs[i], x if rebuilds else None)
        return flops


def _mlp_options(statics: tuple) -> MLPOptions:
    start = len(AttentionOptions._fields)
    return MLPOptions(*statics[start : start + len(MLPOptions._fields)])


def _rebuilt(x: Tensor, layer: Layer, kept: Sequence[Tensor | None], needs: Sequence[int]) -> tuple[Tensor, list]:
    """(the MLP half's input; of each attention half itself, o, lse, the projections and what its branch gave, with None for
    what its backward rebuilds or does not read)."""
    mid, cores = x, []
    for i, (t, o) in enumerate(layer.attention):
        half, f = AttentionHalf(mid, t, o, shares=True), None
        out, lse, qkv, mid = kept[KEPT * i : KEPT * (i + 1)]
        if layer.parallel:
            mid = x
        elif mid is None:
            if out is None:
                out, lse, qkv = half.attend(keep_raw=True)  # as the attention half's backward reads them
            f = half.branch(out)
            mid = unflattened(half.output(f), x.shape[:-1])
            f = f if reads_branch(o, needed_names(AttentionTensors, needs[i])) else None
        cores.append((half, out, lse, qkv, f))
    return mid, cores


_apply = build(TransformerLayer)

OWN_ARGUMENTS = ("x", "training", "recompute", "workspace")


def _arguments_of(block) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a block's arguments that the layer hands on, and of those that it must have."""
    handed = [p for p in inspect.signature(block).parameters.values() if p.name not in OWN_ARGUMENTS]
    return tuple(p.name for p in handed), tuple(p.name for p in handed if p.default is p.empty)


ATTENTION_ARGUMENTS, MLP_ARGUMENTS = _arguments_of(attention_block), _arguments_of(mlp_block)


def check_arguments(
    op: str, name: str, given: Mapping[str, Any], known: tuple[str, ...], required: tuple[str, ...]
) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{op}: {name} must be a dict of arguments by name, not {type(given).__name__}")
    for key in given:
        if key in OWN_ARGUMENTS:
            raise ValueError(f"{op}: {key} is an argument of {op}, not of {name}")
        if key not in known:
            raise TypeError(f"{op}: {name} has {key!r}, but its arguments are {', '.join(known)}")
    for key in required:
        if key not in given:
            raise TypeError(f"{op}: {name} must have {', '.join(key for key in required if key not in given)}")


def check_cross(op: str, arguments: Mapping[str, Any], parallel: bool) -> None:
    check_arguments(op, "cross_attention_arguments", arguments, *ATTENTION_ARGUMENTS)
    if arguments.get("key_value") is None:
        raise TypeError(f"{op}: cross_attention_arguments must have key_value")
    if parallel:
        raise ValueError(f"{op}: parallel halves take no cross_attention_arguments")


def check_parallel(op: str, attention_arguments: Mapping[str, Any], mlp_arguments: Mapping[str, Any]) -> None:
    for name, given in (("attention_arguments", attention_arguments), ("mlp_arguments", mlp_arguments)):
        if given.get("norm") is not None and given.get("norm_first", True) is False:
            raise ValueError(f"{op}: parallel halves have no norm after the residual, but {name} has norm_first=False")
    if mlp_arguments.get("residual", True) is not True:
        raise ValueError(f"{op}: the MLP of parallel halves is added, but mlp_arguments has residual=False")


def _by_halves(
    x: Tensor, attentions: Sequence[Mapping[str, Any]], mlp_arguments: Mapping[str, Any], recompute: tuple[str, str],
    parallel: bool, *, training: bool, workspace: int | str | None,
) -> Tensor:  # fmt: skip
    """Each half as a segment of its own."""
    mid = x
    for arguments in attentions:
        mid = attention_block(mid, training=training, recompute=recompute[0], **{"residual": True} | dict(arguments))
    given = dict(training=training, recompute=recompute[1], workspace=workspace, **mlp_arguments)
    return mid + mlp_block(x, **given) if parallel else mlp_block(mid, **given)


def transformer_layer(
    x: Tensor,
    attention_arguments: Mapping[str, Any],
    mlp_arguments: Mapping[str, Any],
    *,
    cross_attention_arguments: Mapping[str, Any] | None = None,
    parallel: bool = False,
    training: bool = True,
    recompute: str | tuple[str, str] = "selective",
    workspace: int | str | None = None,
) -> Tensor:
    """mlp_block(attention_block(x)) as one segment, or with parallel attention_block(x) + mlp_block(x, residual=False).

    With cross_attention_arguments, which have a key_value, a decoder layer: attention_block, attention_block, mlp_block.

    x [B, S, d] (or [S, d], or [tokens, d] with cu_seqlens) -> y of the same shape. attention_arguments,
    cross_attention_arguments and mlp_arguments: the arguments of attention_block and mlp_block by name, without x, training,
    recompute, workspace; `residual` is true in all unless given. parallel: both halves read x and are added (GPT-NeoX, GPT-J,
    Phi, Cohere, Falcon); one norm is shared by giving both its tensors.
    recompute: what is kept for backward besides parameters:

        "none"       what the two blocks keep at "none", and what passes between them, if it does
        "selective"  x, o, lse: the MLP's input, if it is not x, is rebuilt by one product from o
        "full"       x

    and key_value itself. "none" and "selective" keep these of both attentions. A pair of levels, of the attentions and of the
    MLP, makes each half a segment of its own, which keeps its input: ("selective", "full") is "selective" with what passes
    between the halves kept, ("full", "none") recomputes attention alone.
    workspace: bytes of transient memory of the MLP's backward. Raises as the two blocks do.
    """
    op = "transformer_layer"
    check_arguments(op, "attention_arguments", attention_arguments, *ATTENTION_ARGUMENTS)
    check_arguments(op, "mlp_arguments", mlp_arguments, *MLP_ARGUMENTS)
    if cross_attention_arguments is not None:
        check_cross(op, cross_attention_arguments, parallel)
    levels = levels_of_halves(op, recompute)
    check_flags(op, parallel=parallel)
    if parallel:
        check_parallel(op, attention_arguments, mlp_arguments)
        mlp_arguments = dict(mlp_arguments) | {"residual": False}
    given = [one for one in (attention_arguments, cross_attention_arguments) if one is not None]
    if not isinstance(recompute, str):
        return _by_halves(x, given, mlp_arguments, levels, parallel, training=training, workspace=workspace)
    if ACTIVE.shard is not None:
        return ACTIVE.shard.transformer_layer(x, given, mlp_arguments, parallel, training, recompute, workspace)
    halves = [
        gather_attention(op, x, training=training, recompute=recompute, **{"residual": True} | dict(arguments))
        for arguments in given
    ]
    for t, _ in halves:
        if t.wo.shape[0] != x.shape[-1]:
            raise ShapeError(
                f"{op}: out_weight must have {x.shape[-1]} rows, one for each feature of the input, but it has {t.wo.shape[0]}"
            )
    oa = halves[0][1]
    oa = oa._replace(lora_dtype=functools.reduce(torch.promote_types, (o.lora_dtype for _, o in halves)))
    inner = "none" if oa.recompute == "none" else "full"
    tm, om = gather_mlp(op, x, training=training, recompute=inner, workspace=workspace, **dict(mlp_arguments))
    if parallel and tm.down_weight.shape[0] != x.shape[-1]:
        raise ShapeError(
            f"{op}: parallel halves are added, so down_weight must have {x.shape[-1]} rows, but it has "
            f"{tm.down_weight.shape[0]}"
        )
    attention = [tensor for t, o in halves for tensor in drawn(t, o, x, training)]
    lists = _as_lists(halves[1][1] if len(halves) == 2 else None)
    return _apply((*oa, *om, *lists, parallel), x, *attention, *drawn(tm, om, x, training))
