"""transformer_layer: attention_block + mlp_block as ONE segment; what passes between them is rebuilt, not kept."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError
from ._checks import check_flags, check_level
from ._half import drawn, reads_branch
from ._needs import fake_gradients, in_order, needed_names
from ._op import Op, build, schema_of
from ._rows import rows_2d, unflattened
from .attention_arguments import gather as gather_attention
from .attention_block import attention_block
from .attention_half import (
    CONSTANTS,
    AttentionHalf,
    AttentionOptions,
    AttentionTensors,
    attention_composite,
    attention_half,
    attention_half_backward,
    attention_half_backward_flops,
    attention_half_fake,
    attention_half_flops,
)
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


def _options(statics: tuple) -> tuple[AttentionOptions, MLPOptions]:
    count = len(AttentionOptions._fields)
    return AttentionOptions(*statics[:count]), MLPOptions(*statics[count : count + len(MLPOptions._fields)])


def _needs_of_halves(needs: int, parallel: bool) -> tuple[int, int]:
    """(needs of the attention half, of the MLP half); for the first, the second must return its input's gradient, unless both
    read x."""
    attention_needs = needs & (1 << 1 + A) - 1
    return attention_needs, needs >> 1 + A << 1 | (needs & 1 if parallel else int(attention_needs != 0))


def keeps_middle(o: AttentionOptions, parallel: bool) -> bool:
    """Is what passes between the halves kept?"""
    return o.recompute == "none" and not parallel


class TransformerLayer(Op):
    name = "transformer_layer"
    inputs = "Tensor x, Tensor?[] attention, Tensor?[] mlp"  # a schema has at most 64 arguments
    kept = "Tensor? out, Tensor? lse, Tensor? qkv, Tensor? mid, Tensor?[] hidden"
    statics = f"{schema_of(AttentionOptions)}, {schema_of(MLPOptions, 'mlp_')}, bool parallel"
    results = "(Tensor y, Tensor out, Tensor lse, Tensor qkv, Tensor mid, Tensor[] hidden)"
    grads = "Tensor[]"
    constants = CONSTANTS

    @classmethod
    def arguments(cls, tensors):
        return tensors[0], list(tensors[1 : 1 + A]), list(tensors[1 + A : 1 + A + M])

    @classmethod
    def tensors(cls, inputs):
        x, attention, mlp = inputs
        return x, *attention, *mlp

    @classmethod
    def backward_arguments(cls, saved, statics):
        count = 1 + A + M
        return *cls.arguments(saved), *saved[count : count + 4], list(saved[count + 4 :])

    @classmethod
    def input_count(cls, saved, statics):
        return 1 + A + M

    @classmethod
    def flat(cls, results):
        return (*results[:-1], *results[-1]) if isinstance(results, tuple) else tuple(results)

    @staticmethod
    def forward(x, ta, tm, *statics):
        ta, tm = AttentionTensors(*ta), MLPTensors(*tm)
        oa, om = _options(statics)
        mid, out, lse, qkv = attention_half(x, ta, oa)
        mid, parallel = unflattened(mid, x.shape[:-1]), statics[-1]
        y, hidden = mlp_half(x if parallel else mid, tm, om)
        y = rows_2d(mid) + y if parallel else y
        keeps_core, keeps_all = oa.recompute != "full", oa.recompute == "none"
        return (
            unflattened(y, x.shape[:-1]),
            out if keeps_core else None,
            lse if keeps_core else None,
            qkv if keeps_all else None,
            mid if keeps_middle(oa, parallel) else None,
            hidden,
        )

    @staticmethod
    def forward_fake(x, ta, tm, *statics):
        ta, tm = AttentionTensors(*ta), MLPTensors(*tm)
        oa, om = _options(statics)
        mid, out, lse, qkv = attention_half_fake(x, ta, oa)
        parallel = statics[-1]
        y, hidden = mlp_half_fake(x if parallel else mid, tm, om)
        y = y.to(torch.promote_types(mid.dtype, y.dtype)) if parallel else y
        return y, out, lse, qkv, mid if keeps_middle(oa, parallel) else x.new_empty(0), hidden

    @staticmethod
    def saved(tensors, outputs, statics, needs):
        oa, om = _options(statics)
        _, out, lse, qkv, mid, *hidden = outputs
        kept = [None if oa.recompute == "full" else k for k in (out, lse)]
        kept += [qkv if oa.recompute == "none" else None, mid if keeps_middle(oa, statics[-1]) else None]
        return [*tensors, *kept, *present(hidden, om)]

    @staticmethod
    def backward(dy, x, ta, tm, out, lse, qkv, mid, hidden, *statics_and_needs):
        ta, tm, needs = AttentionTensors(*ta), MLPTensors(*tm), statics_and_needs[-1]
        oa, om = _options(statics_and_needs)
        parallel = statics_and_needs[-2]
        attention_needs, mlp_needs = _needs_of_halves(needs, parallel)
        f = None
        if parallel:
            mid = x
        elif mid is None:
            half = AttentionHalf(x, ta, oa)
            if out is None:
                out, lse, qkv = half.attend(keep_raw=True)  # as the attention half's backward reads them
            f = half.branch(out)
            mid = unflattened(half.output(f), x.shape[:-1])
            f = f if reads_branch(oa, needed_names(AttentionTensors, attention_needs)) else None
        mlp_grads = mlp_half_backward(rows_2d(dy), mid, tm, om, hidden, mlp_needs) if mlp_needs else {}
        grads = in_order(mlp_grads, MLPTensors, mlp_needs)[1:]
        made = {}
        if attention_needs:
            dmid = rows_2d(dy if parallel else mlp_grads["x"])
            made = attention_half_backward(dmid, x, ta, oa, out, lse, qkv, attention_needs, f)
            if parallel and needs & 1:
                made["x"] = made["x"] + mlp_grads["x"]
        return in_order(made, AttentionTensors, attention_needs) + grads

    @staticmethod
    def backward_fake(dy, x, ta, tm, *others):
        return fake_gradients(dy, (x, *ta, *tm), others[-1])

    @staticmethod
    def composite(x, ta, tm, *statics):
        oa, om = _options(statics)
        ta, tm = AttentionTensors(*ta), MLPTensors(*tm)
        mid = attention_composite(x, ta, oa)
        return mid + mlp_composite(x, tm, om) if statics[-1] else mlp_composite(mid, tm, om)

    @staticmethod
    def forward_flops(x, ta, tm, *statics, out_val=None):
        oa, _ = _options(statics)
        return attention_half_flops(x, AttentionTensors(*ta), oa) + mlp_half_flops(x, MLPTensors(*tm))

    @staticmethod
    def backward_flops(dy, x, ta, tm, out, lse, qkv, mid, hidden, *statics_and_needs, out_val=None):
        ta, tm, needs = AttentionTensors(*ta), MLPTensors(*tm), statics_and_needs[-1]
        oa, om = _options(statics_and_needs)
        parallel = statics_and_needs[-2]
        attention_needs, mlp_needs = _needs_of_halves(needs, parallel)
        flops = mlp_half_backward_flops(dy, x, tm, om, hidden, mlp_needs) if mlp_needs else 0
        mid = x if parallel else mid
        f = None if mid is not None else x
        if mid is None and out is None:
            flops += attention_half_flops(x, ta, oa)
            out = qkv = x
        elif mid is None:
            flops += 2 * rows_2d(x).shape[0] * ta.wo.numel()
        if attention_needs:
            flops += attention_half_backward_flops(x, ta, oa, out, qkv, attention_needs, f)
        return flops


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


def check_parallel(op: str, attention_arguments: Mapping[str, Any], mlp_arguments: Mapping[str, Any]) -> None:
    for name, given in (("attention_arguments", attention_arguments), ("mlp_arguments", mlp_arguments)):
        if given.get("norm") is not None and given.get("norm_first", True) is False:
            raise ValueError(f"{op}: parallel halves have no norm after the residual, but {name} has norm_first=False")
    if mlp_arguments.get("residual", True) is not True:
        raise ValueError(f"{op}: the MLP of parallel halves is added, but mlp_arguments has residual=False")


def transformer_layer(
    x: Tensor,
    attention_arguments: Mapping[str, Any],
    mlp_arguments: Mapping[str, Any],
    *,
    parallel: bool = False,
    training: bool = True,
    recompute: str = "selective",
    workspace: int | str | None = None,
) -> Tensor:
    """mlp_block(attention_block(x)) as one segment, or with parallel attention_block(x) + mlp_block(x, residual=False).

    x [B, S, d] (or [S, d], or [tokens, d] with cu_seqlens) -> y of the same shape. attention_arguments and
    mlp_arguments: the arguments of attention_block and mlp_block by name, without x, training, recompute, workspace;
    `residual` is true in both unless given. parallel: both halves read x and are added (GPT-NeoX, GPT-J, Phi, Cohere,
    Falcon); one norm is shared by giving both its tensors.
    recompute: what is kept for backward besides parameters:

        "none"       what the two blocks keep at "none", and what passes between them, if it does
        "selective"  x, o, lse: the MLP's input, if it is not x, is rebuilt by one product from o
        "full"       x

    workspace: bytes of transient memory of the MLP's backward. Raises as the two blocks do.
    """
    op = "transformer_layer"
    check_arguments(op, "attention_arguments", attention_arguments, *ATTENTION_ARGUMENTS)
    check_arguments(op, "mlp_arguments", mlp_arguments, *MLP_ARGUMENTS)
    check_level(op, recompute)
    check_flags(op, parallel=parallel)
    if parallel:
        check_parallel(op, attention_arguments, mlp_arguments)
        mlp_arguments = dict(mlp_arguments) | {"residual": False}
    ta, oa = gather_attention(
        op, x, training=training, recompute=recompute, **{"residual": True} | dict(attention_arguments)
    )
    if ta.wo.shape[0] != x.shape[-1]:
        raise ShapeError(
            f"{op}: out_weight must have {x.shape[-1]} rows, one for each feature of the input, but it has {ta.wo.shape[0]}"
        )
    inner = "none" if oa.recompute == "none" else "full"
    tm, om = gather_mlp(op, x, training=training, recompute=inner, workspace=workspace, **dict(mlp_arguments))
    if parallel and tm.down_weight.shape[0] != x.shape[-1]:
        raise ShapeError(
            f"{op}: parallel halves are added, so down_weight must have {x.shape[-1]} rows, but it has "
            f"{tm.down_weight.shape[0]}"
        )
    ta, tm = drawn(ta, oa, x, training), drawn(tm, om, x, training)
    return _apply((*oa, *om, parallel), x, *ta, *tm)
