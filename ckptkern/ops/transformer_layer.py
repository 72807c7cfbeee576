"""Defines transformer_layer: attention_block [+ cross-attention] + mlp_block or moe_block as ONE region, which recomputes
the tensors between them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ShapeError
from .attention.arguments import gather as gather_attention
from .attention.block import AttentionBlock, attention_block
from .attention.core_sublayer import CoreOp
from .attention.core_sublayer import saves as core_saves
from .attention.latent import LatentAttentionBlock, gather_latent, latent_attention_block
from .attention.latent_sublayer import LatentOptions, LatentTensors
from .attention.tensors import AttentionOptions, AttentionTensors
from .dispatch.choices import Bytes, check_flags, modes_of_sublayers
from .dispatch.shard import ACTIVE, NotSharded
from .mlp.branch import saves as mlp_saves
from .mlp.mlp import MLPBlock, mlp_block
from .mlp.mlp import gather as gather_mlp
from .moe import MoEBlock, moe_block
from .moe import gather as gather_moe
from .moe import saves as moe_saves
from .registration.functions import build
from .registration.op import Names, OpTensors, SublayerOp, in_order, rows_2d, unflattened
from .sublayer.residual import drawn

AnyOptions = AttentionOptions | LatentOptions
AnyTensors = AttentionTensors | LatentTensors


def of_sublayers(layer: type) -> type:
    """Completes the op of a layer, of up to `attentions` attention sublayers and a last one, from the ops of these.

    Its options are attention: of each attention sublayer, a second one being cross-attention; mlp: of the last sublayer;
    parallel: whether all sublayers read x.
    """
    attention, last, count = layer.attention, layer.last, layer.attentions
    A = len(attention.Tensors._fields)
    of_attentions = {n * A + i for n in range(count) for i in attention.constants}
    layer.Options = NamedTuple(
        "LayerOptions", [("attention", tuple[attention.Options, ...]), ("mlp", last.Options), ("parallel", bool)]
    )
    layer.constants = frozenset(of_attentions | {count * A + i for i in last.constants})
    layer.more_results, layer.decisions = last.more_results, last.decisions
    return layer


def saved_of(attention: AnyOptions, o: Any) -> Names:
    """Returns the names of what an attention sublayer saves: its core's results; at "none", if not parallel, its output."""
    names = core_saves(attention)
    return (*names, "mid") if attention.recompute == "none" and not o.parallel else names


@of_sublayers
class TransformerLayer(SublayerOp):
    """The op of a layer. Tensors: x, each attention sublayer's, the last sublayer's. attention, last: the ops of these
    sublayers."""

    name = "transformer_layer"
    attention: type[CoreOp] = AttentionBlock
    last: type[SublayerOp] = MLPBlock
    attentions = 2
    # so that the indices of a cross-attention's constants are not indices of the MLP's tensors in a call without it
    assert min(AttentionBlock.constants) > len(MLPBlock.Tensors._fields)

    @staticmethod
    def saves(o):  # not by the ops in the class's attributes, which Dynamo of torch 2.11 cannot trace
        names = [f"{name}{i}" for i, options in enumerate(o.attention) for name in saved_of(options, o)]
        return (*names, *(moe_saves if isinstance(o.mlp, MoEBlock.Options) else mlp_saves)(o.mlp))

    @classmethod
    def sublayers(cls, tensors: OpTensors, o: Any) -> tuple[Tensor, list[tuple[AnyTensors, AnyOptions]], Any]:
        """Returns (x, each attention sublayer's tensors and options, the last sublayer's tensors)."""
        (x, *others), A = tensors, len(cls.attention.Tensors._fields)
        attentions = [
            (cls.attention.Tensors(*others[i * A : (i + 1) * A]), options) for i, options in enumerate(o.attention)
        ]
        return x, attentions, cls.last.Tensors(*others[len(attentions) * A :])

    @classmethod
    def forward(cls, tensors, o):
        (x, attentions, t_last), saved = cls.sublayers(tensors, o), {}
        mid = x
        for i, (t, options) in enumerate(attentions):
            mid, results = cls.attention.compute(mid, t, options)
            mid = results["mid"] = unflattened(mid, x)
            saved |= {f"{name}{i}": results[name] for name in saved_of(options, o)}
            results = None
        y, results = cls.last.compute(x if o.parallel else mid, t_last, o.mlp)
        y = rows_2d(mid) + y if o.parallel else y
        return unflattened(y, x), saved | results

    @classmethod
    def backward(cls, dy, tensors, saved, o, needs):
        kind, last = cls.attention.Tensors, cls.last
        x, attentions, t_last = cls.sublayers(tensors, o)
        A, before, mid, cores = len(kind._fields), needs & 1, x, []
        for i, (t, options) in enumerate(attentions):
            # the needs_input_grad mask of this sublayer; an input other than x needs a gradient if anything before it does
            own = needs >> 1 + i * A & (1 << A) - 1
            formed = own << 1 | before
            before |= own != 0
            sublayer = cls.attention.Sublayer(mid, t, options, shares=True)
            core = {name: saved.pop(f"{name}{i}") for name in saved_of(options, o)}
            mid = core.pop("mid", None)
            if o.parallel:
                mid = x
            elif mid is None:  # the next sublayer's input, from core attention, which is recomputed if it was not saved
                fits = sublayer.division.groups == 1  # groups of heads compute all of it again
                attended = core or sublayer.attend(save_raw=fits)  # with raw projections, as backward reads them
                core = attended if fits else core
                mid = unflattened(sublayer.output(sublayer.branch(attended)), x)
                attended = None
            sublayer.held.clear()  # frees dequantised weights: the next sublayer has a workspace of its own
            cores.append((sublayer, core, formed))
        sublayer = core = None
        of_last = needs >> 1 + len(attentions) * A << 1 | (needs & 1 if o.parallel else before)
        grads = last.gradients(rows_2d(dy), mid, t_last, o.mlp, saved, of_last) if of_last else {}
        mid = None
        results = in_order(grads, last.Tensors, of_last)[1:]
        d = grads.pop("x", None)
        d, dx_last = (dy, d) if o.parallel else (d, None)
        while cores:
            sublayer, core, formed = cores.pop()
            if formed:
                core["dy"], d = rows_2d(d), None  # which ends where it has been read
            grads = sublayer.backward(core, formed) if formed else {}
            results = in_order(grads, kind, formed)[1:] + results
            d = grads.pop("x", None)
        if o.parallel and needs & 1:
            d = d + dx_last
        return [d if needs & 1 else None, *results]

    @classmethod
    def reference(cls, tensors, o, **decided):
        x, attentions, t_last = cls.sublayers(tensors, o)
        mid = x
        for t, options in attentions:
            mid = cls.attention.in_torch_ops(mid, t, options)
        y = cls.last.in_torch_ops(x if o.parallel else mid, t_last, o.mlp, **decided)
        if not o.parallel:
            return y
        return mid + y if isinstance(y, Tensor) else (mid + y[0], *y[1:])


@of_sublayers
class TransformerMoELayer(TransformerLayer):
    name, last, attentions = "transformer_moe_layer", MoEBlock, 1


@of_sublayers
class LatentTransformerLayer(TransformerLayer):
    name, attention, attentions = "latent_transformer_layer", LatentAttentionBlock, 1


@of_sublayers
class LatentTransformerMoELayer(LatentTransformerLayer):
    name, last = "latent_transformer_moe_layer", MoEBlock


LAYER_OPS = TransformerLayer, TransformerMoELayer, LatentTransformerLayer, LatentTransformerMoELayer
# (latent, routes) -> (the type of the options, the function that applies the op)
LAYERS = {
    (layer.attention is LatentAttentionBlock, layer.last is MoEBlock): (layer.Options, build(layer))
    for layer in LAYER_OPS
}

OWN_ARGUMENTS = ("x", "training", "recompute", "workspace")


class Arguments(NamedTuple):
    """The arguments of a block that the layer passes on: names of required arguments, and defaults of the others."""

    required: Names
    defaults: dict[str, Any]

    @classmethod
    def of(cls, block: Callable[..., Any]) -> Arguments:
        handed = [p for p in inspect.signature(block).parameters.values() if p.name not in OWN_ARGUMENTS]
        defaults = {p.name: p.default for p in handed if p.default is not p.empty}
        return cls(tuple(p.name for p in handed if p.name not in defaults), defaults | {"residual": True})

    def checked(self, op: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `arguments` completed by the defaults."""
        if not isinstance(arguments, Mapping):
            raise TypeError(f"{op}: {name} must be a dict of arguments by name, not {type(arguments).__name__}")
        for key in arguments:
            if key in OWN_ARGUMENTS:
                raise ValueError(f"{op}: {key} is an argument of {op}, not of {name}")
            if key not in self.defaults and key not in self.required:
                known = ", ".join((*self.required, *self.defaults))
                raise TypeError(f"{op}: {name} has {key!r}, but its arguments are {known}")
        if missing := [key for key in self.required if key not in arguments]:
            raise TypeError(f"{op}: {name} must have {', '.join(missing)}")
        return self.defaults | dict(arguments)


ATTENTION_ARGUMENTS, MLP_ARGUMENTS = Arguments.of(attention_block), Arguments.of(mlp_block)
LATENT_ARGUMENTS, MOE_ARGUMENTS = Arguments.of(latent_attention_block), Arguments.of(moe_block)


def transformer_layer(
    x: Tensor,
    attention_arguments: Mapping[str, Any],
    mlp_arguments: Mapping[str, Any],
    *,
    cross_attention_arguments: Mapping[str, Any] | None = None,
    parallel: bool = False,
    training: bool = True,
    recompute: str | tuple[str, str] = "selective",
    workspace: Bytes = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes a transformer layer as one region, which also recomputes the tensors between its sublayers.

        y = mlp_block(attention_block(x))       parallel: y = attention_block(x) + mlp_block(x, residual=False)

    x as in attention_block -> y of the same shape.
    attention_arguments, mlp_arguments: the two functions' arguments by name, without x, training, recompute and workspace;
    `residual` is True by default. With kv_a_weight, latent_attention_block runs; with router_weight, moe_block, and the
    layer returns (y, router_logits).
    cross_attention_arguments: those of a second attention_block, with key_value (a decoder layer); not with parallel,
    latent attention or experts.
    parallel: both sublayers read x (GPT-NeoX, GPT-J). To share a norm, pass its tensors to both.
    recompute: what is saved besides x, key_value, masks, tables and the choice of experts:

        "none"       what the sublayers save at "none", and the tensors between them
        "selective"  o, lse: one matmul recomputes the MLP's input from o
        "full"       nothing

    A pair, such as ("full", "none"), has the modes of attention and MLP, each then a region that saves its input.
    Raises: see Conventions.
    """
    op = "transformer_layer"
    latent = isinstance(attention_arguments, Mapping) and "kv_a_weight" in attention_arguments
    routes = isinstance(mlp_arguments, Mapping) and "router_weight" in mlp_arguments
    of_attention, of_mlp = (
        LATENT_ARGUMENTS if latent else ATTENTION_ARGUMENTS,
        MOE_ARGUMENTS if routes else MLP_ARGUMENTS,
    )
    attentions = [of_attention.checked(op, "attention_arguments", attention_arguments)]
    mlp_arguments = of_mlp.checked(op, "mlp_arguments", mlp_arguments)
    if cross_attention_arguments is not None:
        attentions.append(ATTENTION_ARGUMENTS.checked(op, "cross_attention_arguments", cross_attention_arguments))
        if attentions[1]["key_value"] is None:
            raise TypeError(f"{op}: cross_attention_arguments must have key_value")
        if parallel:
            raise ValueError(f"{op}: parallel sublayers take no cross_attention_arguments")
        if latent:
            raise ValueError(f"{op}: attention_arguments with a kv_a_weight go without cross_attention_arguments")
        if routes:
            raise ValueError(f"{op}: a layer with a router_weight takes no cross_attention_arguments")
    modes = modes_of_sublayers(op, recompute)
    check_flags(op, parallel=parallel)
    if parallel:
        for name, arguments in (("attention_arguments", attentions[0]), ("mlp_arguments", mlp_arguments)):
            if arguments["norm"] is not None and arguments["norm_first"] is False:
                raise ValueError(
                    f"{op}: parallel sublayers must have their norm before the branch, but {name} has norm_first=False"
                )
        if mlp_arguments["residual"] is not True:
            raise ValueError(
                f"{op}: parallel adds the MLP's result, but mlp_arguments has residual=False; leave it out"
            )
        mlp_arguments |= {"residual": False}
    if routes and ACTIVE.shard is not None:
        raise NotSharded("a layer with a router cannot be sharded")
    common = dict(training=training, workspace=workspace)
    # each sublayer is a region: a shard saves the tensors between them, whose recompute would take another collective
    if ACTIVE.shard is not None or not isinstance(recompute, str):
        mid, block = x, latent_attention_block if latent else attention_block
        if ACTIVE.shard is not None and not latent:
            block = functools.partial(ACTIVE.shard.attention_block, alone=not parallel)
        for arguments in attentions:
            mid = block(mid, recompute=modes[0], **common, **arguments)
        last = moe_block if routes else mlp_block
        y = last(x if parallel else mid, recompute=modes[1], **common, **mlp_arguments)
        if not parallel:
            return y
        return (mid + y[0], y[1]) if routes else mid + y
    gather = gather_latent if latent else gather_attention
    sublayers = [gather(op, x, recompute=recompute, **common, **arguments) for arguments in attentions]
    for t, _ in sublayers:
        if t.wo.shape[0] != x.shape[-1]:
            raise ShapeError(
                f"{op}: out_weight must have {x.shape[-1]} rows, one for each feature of the input, but it has {t.wo.shape[0]}"
            )
    inner = "none" if sublayers[0][1].recompute == "none" else "full"
    tm, om = (gather_moe if routes else gather_mlp)(op, x, recompute=inner, **common, **mlp_arguments)
    if parallel and tm.down_weight.shape[-2] != x.shape[-1]:
        raise ShapeError(
            f"{op}: parallel sublayers are added, so down_weight must have {x.shape[-1]} rows, but it has "
            f"{tm.down_weight.shape[-2]}"
        )
    tensors = [tensor for t, o in sublayers for tensor in drawn(t, o, x, training)]
    of_attention = tuple(o for _, o in sublayers)
    lora_dtype = functools.reduce(torch.promote_types, (o.lora_dtype for o in of_attention))
    of_attention = tuple(o._replace(lora_dtype=lora_dtype) for o in of_attention)
    Options, apply = LAYERS[latent, routes]
    options = Options(attention=of_attention, mlp=om, parallel=parallel)
    return apply(options, x, *tensors, *drawn(tm, om, x, training))
