"""Reads an MoE block, a router with its experts and shared experts, as `ckptkern.moe_block`.

A router cannot be traced backwards, because its choice depends on values. The block is recognised by its parts. How it scores
and chooses is inferred from what it passes to its experts, on many random rows; the numerical check then verifies the whole.

Experts alone become `ckptkern.moe_mlp`: by a module's layout, or by transformers' interface, which selects them by name.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..eager import ACTIVATIONS
from ..extras import missing
from ..nn.activations import activation_of
from ..ops.dispatch.choices import Bytes, check_mode, parse_bytes
from ..ops.experts import LAYERS
from ..ops.moe import GROUP_SCORES, SCORINGS, SHARED, chosen, scores_of, weights_of
from ..segments.recorded import class_forward, drawn_elsewhere
from ..segments.tiled import random_state
from .check import in_dtype, replacing
from .grammar import read
from .layouts import Parts, base_of, experts_layout, parts_of
from .quantized import frozen_of, read_packed
from .reading import Argument, Choices, Reading, Scale, Update, Weight, prefixed, same
from .trace import Call, Unreadable, is_floating, leaves_of, mapped, plain_attributes, tensors_in, trace

ROWS = 1024  # number of random inputs, on which wrong readings of a choice differ
FEW = 0.002  # share of rows whose choice may differ, because two scores are equal after rounding
BIAS_SIZES = (0.0, 0.02, 0.2)  # sizes of random biases of the choice: a large one hides how groups are ranked
SAME = 1e-4  # relative difference of weights, and of their factor


class _Seen(Exception):
    """Ends a block's forward at its experts."""


def experts_call(flat: list) -> tuple[int, int, int]:
    """Returns the places of x [..., d], indices [..., k] and weights [..., k] in a call of experts. Raises Unreadable."""
    floating = [i for i, value in enumerate(flat) if is_floating(value)]
    others = [i for i, value in enumerate(flat) if isinstance(value, Tensor) and i not in floating]
    if len(floating) != 2 or len(others) != 1 or flat[others[0]].dtype == torch.bool:
        raise Unreadable("experts must be called with a tensor, indices and weights")
    (index,) = others
    x, weights = floating if flat[floating[1]].shape == flat[index].shape else floating[::-1]
    return x, index, weights


def arguments_of_experts(module: nn.Module) -> dict:
    """Returns moe_mlp's parameters among the module's own and, as `lora`, the low-rank updates that wrappers of experts
    (`base_of`) add to their weights in a call. Raises Unreadable for updates that moe_mlp does not support."""
    (_, base), layout, updates = base_of(module), experts_layout(module), {}
    layers = {layout[f"{layer}_weight"].removesuffix(".original").rpartition(".")[2]: layer for layer in LAYERS}
    path, wrapper = "", module
    while wrapper is not base:
        adapters = [adapter for adapter in wrapper.active_adapters if adapter in wrapper.lora_A]
        if adapters and not (wrapper.disable_adapters or wrapper.merged):
            layer = layers.get(wrapper.parameter_name)
            if layer is None or layer in updates or len(adapters) > 1:
                raise Unreadable("a weight of its experts has several adapters, or a bias has one")
            a, b = (
                Weight(f"{path}lora_{letter}.{adapters[0]}.weight", letter.lower(), count=wrapper.num_experts)
                for letter in "AB"
            )
            updates[layer] = Update(a, b, Scale(path.rstrip("."), adapters[0]), 0.0)
        path, wrapper = f"{path}base_layer.", wrapper.base_layer
    return {name: Weight(own) for name, own in layout.items()} | ({"lora": updates} if updates else {})


def observed(module: nn.Module, parts: Parts, call: Call, x: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Returns (index, weights, the router's result) for x, in the present mode. The first two, [rows, k], are what the block
    passes to its experts, which do not run. Raises Unreadable."""
    seen, returned = [], [None]

    def stop(_, inner, named):
        seen.extend(leaves_of((inner, named)))
        raise _Seen

    copy, drawn, state = x.clone(), drawn_elsewhere(), random_state(x)  # some forwards change it in place
    hooks = [
        module.get_submodule(parts.experts).register_forward_pre_hook(stop, with_kwargs=True),
        module.get_submodule(parts.router).register_forward_hook(lambda _, inner, result: returned.append(result)),
    ]
    try:
        with torch.no_grad(), contextlib.suppress(_Seen):
            class_forward(module, *mapped(lambda _: copy, call))
    finally:
        for hook in hooks:
            hook.remove()
    if drawn != drawn_elsewhere() or not torch.equal(state, random_state(x)):
        raise Unreadable("its router samples random numbers")
    _, index, weights = (seen[i] for i in experts_call(seen))
    return index.flatten(0, -2).long(), weights.flatten(0, -2), returned[-1]


def vary_choices(module: nn.Module, size: float = BIAS_SIZES[-1]) -> None:
    """Puts random values in the score biases of MoE blocks inside, which are zeros before training; `random_parameters`
    restores them."""
    for m in module.modules():
        parts = parts_of(m)
        if parts is not None and parts.score_bias is not None:
            owner, _, name = parts.score_bias.rpartition(".")
            buffers = m.get_submodule(owner)._buffers
            buffers[name] = size * torch.randn_like(buffers[name])


def routings(
    logits: Tensor, score_bias: Tensor | None, index: Tensor, weights: Tensor, numbers: list[int | float]
) -> Iterator[dict]:
    """Yields every way to score and choose that gives these indices and weights, as arguments of moe_block; their score_bias
    says whether it is used. numbers: candidates for the counts of groups and the factor."""
    order, k, E = index.sort(-1), index.shape[-1], logits.shape[-1]
    integers = {n for n in numbers if type(n) is int}
    groups = [
        (count, best, score)
        for count, best, score in itertools.product(integers, integers, GROUP_SCORES)
        if 1 <= best < count < E and E % count == 0
    ]
    weights = weights.gather(-1, order.indices).to(torch.float32)
    biases = (None,) if score_bias is None else (None, score_bias)
    for scoring, bias, (num_groups, top_groups, group_score) in itertools.product(
        SCORINGS, biases, [(1, 1, "top2"), *groups]
    ):
        if k > top_groups * (E // num_groups):
            continue
        how = dict(scoring=scoring, num_groups=num_groups, top_groups=top_groups, group_score=group_score)
        o = SimpleNamespace(top_k=k, routed_scaling_factor=1.0, **how)
        scores = scores_of(logits, o)
        alike = (chosen(scores, bias, o).sort(-1).values == order.values).all(-1)
        if alike.float().mean() < 1 - FEW:
            continue
        for normalize in (True, False):
            o.normalize = normalize
            mine = weights_of(scores, order.values, o).to(torch.float32)
            ratio = float((weights[alike] / mine[alike]).median())  # 1, or a number of the block
            factor = next((float(n) for n in (1.0, *numbers) if n and abs(ratio / n - 1) < SAME), None)
            if factor is not None and torch.allclose(weights[alike], factor * mine[alike], rtol=1e-3, atol=1e-6):
                yield how | dict(normalize=normalize, routed_scaling_factor=factor, score_bias=bias is not None)


def router_dtype(
    module: nn.Module, parts: Parts, call: Call, x: Tensor, o: SimpleNamespace, w: Tensor, b: Tensor | None
) -> torch.dtype | None:
    """Returns float32 if the router of a 16-bit block upcasts before its matmul, so that its weights are nearer to those of
    float32 logits; None otherwise."""
    x = x.to(torch.bfloat16)
    try:
        with replacing(module, functools.partial(in_dtype, dtype=torch.bfloat16)):
            index, weights, _ = observed(module, parts, call, x)
    except Exception:  # a forward that refuses 16 bits may raise anything
        return None
    rows, errors = x.flatten(0, -2), {}
    for dtype in (torch.bfloat16, torch.float32):
        operands = [None if tensor is None else tensor.to(torch.bfloat16).to(dtype) for tensor in (rows, w, b)]
        mine = weights_of(scores_of(F.linear(*operands), o), index, o)
        errors[dtype] = float((mine.to(weights.dtype) - weights).abs().mean())
    return torch.float32 if errors[torch.float32] < errors[torch.bfloat16] else None


def shared_arguments(path: str, module: nn.Module, x: Tensor) -> tuple[dict, Choices]:
    """Returns (moe_block's arguments of a shared expert, including its part of `lora`; its choices). The numerical check
    finds out whether the expert does more. Raises Unreadable."""
    traced = trace(module, ((x,), {}))
    if not isinstance(traced.result, Tensor):
        raise Unreadable("forward returns more than a tensor")
    reading = read(module, traced.node(traced.result))
    if reading.op != "mlp_block":
        raise Unreadable(f"a shared expert is {reading.op}, not an MLP alone")

    def shared(arguments):
        return {f"shared_{name}": value for name, value in prefixed(arguments, path).items()}

    lora = reading.arguments.pop("lora", {})
    own = {name: value for name, value in reading.arguments.items() if name in SHARED and value is not None}
    choices = [
        [{"activation": reading.arguments["activation"]}],
        *([*map(shared, choice)] for choice in reading.choices),
    ]
    return shared(own) | {"lora": shared(lora)}, choices


def read_block(module: nn.Module, call: Call, flat: list) -> Reading:
    """Reads a call with one tensor x [..., d]. Raises Unreadable."""
    parts = parts_of(module)
    tensors = tensors_in(flat)
    if len(tensors) != 1 or not is_floating(tensors[0]) or tensors[0].dim() < 2:
        raise Unreadable("an MoE block must be called with one tensor [..., tokens, features]")
    (x,) = tensors
    many = x.new_empty((*x.shape[:-2], ROWS, x.shape[-1])).normal_()
    parameters = dict(module.named_parameters())
    w, b = (None if path is None else parameters[path].detach() for path in (parts.router_weight, parts.router_bias))
    logits = F.linear(many.flatten(0, -2), w, b)
    readings = []
    # the plain numbers among the attributes of the block and its router
    owners = module, module.get_submodule(parts.router)
    numbers = [n for owner in owners for n in plain_attributes(owner).values() if type(n) in (int, float)]
    for size in BIAS_SIZES if parts.score_bias else BIAS_SIZES[-1:]:
        vary_choices(module, size)
        bias = dict(module.named_buffers()).get(parts.score_bias)
        index, weights, returned = observed(module, parts, call, many)
        readings.append(list(routings(logits, bias, index, weights, numbers)))
    matches = [routing for routing in readings[0] if all(routing in others for others in readings)]
    if not matches:
        raise Unreadable("its router scores or chooses in another way than moe_block")
    arguments = prefixed(arguments_of_experts(module.get_submodule(parts.experts)), parts.experts)
    own = ("router_weight", "router_bias", "shared_expert_gate")
    arguments |= {name: Weight(path) for name in own if (path := getattr(parts, name)) is not None}
    arguments |= {"top_k": index.shape[-1], "residual": False}
    o = SimpleNamespace(**matches[0], top_k=index.shape[-1])
    arguments["router_dtype"] = router_dtype(module, parts, call, many, o, w, b)
    choices = [[{"activation": name} for name in ACTIVATIONS]]
    if parts.shared is not None:
        shared, choices = shared_arguments(parts.shared, module.get_submodule(parts.shared), x)
        lora = arguments.pop("lora", {}) | shared.pop("lora")
        arguments |= shared | ({"lora": lora} if lora else {})
    for routing in matches:
        routing["score_bias"] = Weight(parts.score_bias) if routing["score_bias"] else None
    first = returned[0] if isinstance(returned, tuple) else None
    is_logits = isinstance(first, Tensor) and same(first, logits)
    place = next(i for i, value in enumerate(flat) if value is x)
    return Reading(arguments, place, [matches, *choices], parts.router if is_logits else "", "moe_block")


@contextlib.contextmanager
def scaled(parameter: Tensor, factor: float) -> Iterator[None]:
    before = parameter.detach().clone()
    try:
        with torch.no_grad():
            parameter.mul_(factor)
        yield
    finally:
        with torch.no_grad():
            parameter.copy_(before)


def read_experts(module: nn.Module, flat: list) -> Reading:
    """Reads a call with x [..., d], indices [..., k] and weights [..., k] as moe_mlp. The numerical check decides on the
    activation.

    Experts cannot be traced, because the rows that each of them reads depend on values. Raises Unreadable.
    """
    x, index, weights = experts_call(flat)
    arguments = {"top_k_index": Argument(index), "top_k_weights": Argument(weights)} | arguments_of_experts(module)
    return Reading(arguments, x, [[{"activation": name} for name in ACTIVATIONS]], op="moe_mlp")


def routed(segment, flat: list, rows: int = 512) -> Iterator[tuple[str, list]]:
    """Yields calls of experts, or of an MoE block, that show what the example may not: a clamp in the experts or of the
    logits, and a limit on the rows of an expert. segment: the region in its place; flat: the example's values."""
    x, is_block, arguments = flat[segment.x], segment.op == "moe_block", segment.op_arguments(flat)

    def call(x):
        return [x if i == segment.x else value for i, value in enumerate(flat)]

    for scale in (30, 1000):  # with logits of the same size: sigmoids that are all 1 have no maximum
        with scaled(arguments["router_weight"], 1 / scale) if is_block else contextlib.nullcontext():
            yield f"with inputs {scale} times as large", call(scale * x)
    lead = (*x.shape[:-2], rows)
    many = x.new_empty((*lead, x.shape[-1])).normal_()
    if not is_block:
        index, weights = (segment.template[name].index for name in ("top_k_index", "top_k_weights"))
        top_k = flat[index].shape[-1]
        pairs = (*(lead if flat[index].dim() == x.dim() else (math.prod(lead),)), top_k)
        values = call(many)
        values[index] = torch.arange(top_k, device=x.device).to(flat[index].dtype).expand(pairs)
        values[weights] = flat[weights].new_empty(pairs).uniform_()
        yield f"with {rows} rows at one expert", values
        return
    scale = 30 if arguments["scoring"] == "softmax" else 4
    with scaled(arguments["router_weight"], scale):
        yield f"with logits {scale} times as large", call(x)
    yield f"with {rows} rows", call(many)
    if arguments.get("score_bias") is not None:
        with scaled(arguments["score_bias"], 0.1):
            yield f"with {rows} rows and a small bias of the choice", call(many)
    yield f"with {rows} rows for the same experts", call(many[..., :1, :] + 1e-3 * many)


# The parameters of transformers' experts; the attributes by which other kinds of experts differ, with the supported values.
PARAMETERS = {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}
KIND = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_post_expert_norm": False}


def _activation(module: nn.Module) -> str:
    """Returns the name of the module's activation. The module is inspected once, and again after its activation was
    replaced. Raises TypeError for experts of another kind."""
    seen, name = module.__dict__.get("_ckptkern_activation", (None, ""))
    if seen is None or seen is not module.act_fn:
        kind = type(module)
        for attribute, value in KIND.items():
            if getattr(module, attribute, value) != value:
                raise TypeError(f"register_experts: {kind.__name__} has {attribute}={not value}")
        gate = getattr(kind, "_apply_gate", None)
        if gate is not None and gate.__name__ != "_default_apply_gate":
            raise TypeError(f"register_experts: {kind.__name__} has another gate than act(g) * u")
        if more := {name for name, p in module._parameters.items() if p is not None} - PARAMETERS:
            raise TypeError(f"register_experts: {kind.__name__} has a {min(more)}, which moe_mlp does not support")
        name = activation_of("register_experts", module.act_fn)
        module.__dict__["_ckptkern_activation"] = module.act_fn, name
    return name


def register_experts(name: str = "ckptkern", recompute: str = "full", workspace: Bytes = None) -> None:
    """Registers `ckptkern.moe_mlp` with transformers 5 as an implementation of experts.

    Select it by `from_pretrained(..., experts_implementation=name)`.

    recompute, workspace: see ckptkern.moe_mlp.

    Raises ImportError without transformers 5. A call raises TypeError for experts with their own gate, or with interleaved or
    transposed weights.
    """
    check_mode("register_experts", recompute)
    parse_bytes("register_experts", workspace)
    if hint := missing("transformers"):
        raise ImportError(hint)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, functools.partial(experts_forward, recompute=recompute, workspace=workspace))


def experts_forward(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    recompute: str = "full",
    workspace: Bytes = None,
) -> Tensor:
    """Computes transformers' experts by moe_mlp. Arguments as of a forward of experts; raises as `register_experts` says."""
    with read_packed(module):
        weights = map(frozen_of, (module.gate_up_proj, module.down_proj))
    return ops.moe_mlp(
        hidden_states,
        top_k_index,
        top_k_weights,
        *weights,
        _activation(module),
        gate_up_bias=getattr(module, "gate_up_proj_bias", None),
        down_bias=getattr(module, "down_proj_bias", None),
        recompute=recompute,
        workspace=workspace,
    )
