"""Defines moe_block: [norm ->] router, the chosen experts and shared experts, and what is around them (`residual`), as one
region; and the sublayer, which `transformer_layer` runs too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import eager
from ..errors import ShapeError
from .dispatch.choices import (
    Bytes,
    check_choice,
    check_count,
    check_flags,
    check_input,
    check_number,
    check_options,
    check_tensor,
    check_weight,
    choose_impl,
    compute_dtype,
)
from .dispatch.shard import ACTIVE, NotSharded
from .experts import LAYERS as EXPERT_LAYERS
from .experts import PARAMETERS, Experts, ExpertsBranch, check_experts
from .mlp.branch import LAYERS as MLP_LAYERS
from .mlp.branch import MLPBranch, Sums, check_branch
from .mlp.branch import reference as mlp_reference
from .mlp.branch import saves as mlp_saves
from .mlp.mlp import MLPTensors, bytes_around
from .registration.functions import build
from .registration.gradients import BiasGrad, WeightGrad
from .registration.op import Grads, Named, Names, cast_parameter, with_fields
from .sublayer.lora import NO_UPDATES, LoRA, gather_lora, updates_of
from .sublayer.residual import (
    AroundTensors,
    RandomStates,
    RowsOp,
    Sublayer,
    SublayerOptions,
    around,
    called,
    reference_inputs,
    reference_output,
)

LOGITS = "router_logits"
SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("top2", "max")
SMALLEST_SUM = 1e-20  # added to a sum of sigmoids, which may all be 0 in float32 (DeepSeek-V3)
ROUTER_ROWS = 8  # rows of E values that are alive at once: logits, scores, their gradients and steps between


@with_fields(
    AroundTensors, ..., updates_of((*EXPERT_LAYERS, *(f"shared_{layer}" for layer in MLP_LAYERS))), RandomStates
)
class MoETensors(NamedTuple):
    """Holds the tensors of an MoE sublayer. shared_gate_weight None: the shared expert is a plain MLP; shared_up_weight
    None: there is no shared expert. One tensor holds the low-rank updates of all experts; lora_rng is the random state
    of the shared expert's updates."""

    router_weight: Tensor
    router_bias: Tensor | None
    score_bias: Tensor | None
    gate_up_weight: Tensor
    gate_up_bias: Tensor | None
    down_weight: Tensor
    down_bias: Tensor | None
    shared_gate_weight: Tensor | None
    shared_gate_bias: Tensor | None
    shared_up_weight: Tensor | None
    shared_up_bias: Tensor | None
    shared_down_weight: Tensor | None
    shared_down_bias: Tensor | None
    shared_expert_gate: Tensor | None


SHARED = tuple(name for name in MLPTensors._fields if f"shared_{name}" in MoETensors._fields)


class RouterOptions(NamedTuple):
    """Holds the options of the choice of experts. num_groups 1: all experts may be chosen."""

    top_k: int
    scoring: str
    normalize: bool
    num_groups: int
    top_groups: int
    group_score: str
    routed_scaling_factor: float


@with_fields(RouterOptions, ..., SublayerOptions)
class MoEOptions(NamedTuple):
    """Holds the sublayer's other options. shared: "" without a shared expert, "plain" or "gated"; lora: of each layer of
    the shared expert; experts_lora: as in ExpertsOptions."""

    router_dtype: torch.dtype
    shared: str
    activation: str
    backend: str
    experts_lora: tuple[float, ...]

    # read by the shared expert's MLPBranch
    dropout_p, first_column = 0.0, 0

    @property
    def gated(self) -> bool:
        return self.shared == "gated"


# -- the router: scores of logits, the choice of experts, and their weights
#
# s = softmax(logits) or sigmoid(logits)                    [..., E]
# index = top_k of s + score_bias, in the best groups       [..., k], a decision: saved, never recomputed
# w = s[index] [/ sum of these] * routed_scaling_factor     [..., k]


def scores_of(logits: Tensor, o) -> Tensor:
    """Returns s, at least in float32."""
    logits = logits.to(eager.wide_of(logits.dtype))
    return torch.softmax(logits, -1) if o.scoring == "softmax" else torch.sigmoid(logits)


def chosen(scores: Tensor, score_bias: Tensor | None, o) -> Tensor:
    """Returns index, int64. Groups of E / num_groups experts are ranked by the sum of their two best scores ("top2":
    DeepSeek-V3, arXiv 2412.19437) or by their best ("max": DeepSeek-V2, arXiv 2405.04434), with the bias."""
    with torch.no_grad():
        ranked = scores.detach() if score_bias is None else scores.detach() + score_bias.to(scores.dtype)
        if o.num_groups > 1:
            grouped = ranked.unflatten(-1, (o.num_groups, -1))
            best = grouped.topk(1 if o.group_score == "max" else min(2, grouped.shape[-1]), -1).values.sum(-1)
            groups = best.topk(o.top_groups, -1).indices
            hidden = torch.ones_like(best, dtype=torch.bool).scatter(-1, groups, False)
            ranked = grouped.masked_fill(hidden[..., None], -torch.inf).flatten(-2)
        return ranked.topk(o.top_k, -1).indices


def weights_of(scores: Tensor, index: Tensor, o) -> Tensor:
    """Returns w in the scores' dtype."""
    w = scores.gather(-1, index)
    w = w / (w.sum(-1, keepdim=True) + SMALLEST_SUM) if o.normalize else w
    return w if o.routed_scaling_factor == 1.0 else w * o.routed_scaling_factor


def logits_gradient(dw: Tensor, scores: Tensor, index: Tensor, o) -> Tensor:
    """Returns the gradient of the logits [T, E] from that of w [T, k], in the scores' dtype."""
    s, ds = scores.gather(-1, index), dw.to(scores.dtype) * o.routed_scaling_factor
    if o.normalize:
        total = s.sum(-1, keepdim=True) + SMALLEST_SUM
        ds = (ds - (ds * s).sum(-1, keepdim=True) / total) / total
    if o.scoring == "sigmoid":
        return torch.zeros_like(scores).scatter_(-1, index, ds * s * (1 - s))
    inner = (ds * s).sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter_(-1, index, ds).sub_(inner).mul_(scores)


# -- the sublayer


def saves(o: MoEOptions) -> Names:
    """Returns the names of what forward saves besides its tensors: the choice of experts, and what moe_mlp and an MLP save."""
    if o.recompute == "full":
        return ("index",)
    shared = mlp_saves(o) if o.shared else ()
    return ("index", "gu", *(f"shared_{name}" for name in shared))


def shared_of(t: MoETensors) -> MLPTensors | None:
    """Returns the shared expert's tensors, as MLPBranch reads them."""
    if t.shared_up_weight is None:
        return None
    own = {name: getattr(t, f"shared_{name}", None) for name in MLPTensors._fields}
    return MLPTensors(**own | {"lora_rng": t.lora_rng})


class Gradients:
    """Collects the sublayer's gradients that are sums over chunks, of the names in `need`. inner: names needed of the
    experts' inputs and parameters."""

    def __init__(self, sublayer: MoESublayer, need: Collection[str], chunks: int):
        t, self.need_dh = sublayer.t, sublayer.needs_dh(need)
        self.routes = self.need_dh or not need.isdisjoint(("router_weight", "router_bias"))
        self.gates = t.shared_expert_gate is not None and (self.need_dh or "shared_expert_gate" in need)
        of_h = {"x"} if self.need_dh else set()
        self.inner = of_h | need & set(PARAMETERS) | ({"s"} if self.routes else set())
        of_shared = of_h | {name for name in SHARED if f"shared_{name}" in need}
        self.shared = Sums(sublayer.shared, of_shared, chunks) if sublayer.shared and of_shared else None
        self.totals = sublayer.experts.sums(need, chunks) | {
            name: (BiasGrad if name == "router_bias" else WeightGrad)(getattr(t, name), chunks)
            for name in ("router_weight", "router_bias", "shared_expert_gate")
            if name in need
        }

    def results(self) -> Grads:
        of_shared = {} if self.shared is None else self.shared.results()
        own = {name: total.result() for name, total in self.totals.items()}
        return own | {f"shared_{name}": grad for name, grad in of_shared.items()}


class MoESublayer(Sublayer):
    """Computes an MoE sublayer for one input, in chunks of tokens."""

    def __init__(self, x: Tensor, t: MoETensors, o: MoEOptions):
        super().__init__(x, t, o)
        self.experts = ExpertsBranch([getattr(t, name) for name in PARAMETERS], self.o, o.dtype, self.holds)
        own = shared_of(t)
        self.shared = None if own is None else MLPBranch(own, self.o, self.x.shape[0], o.dtype, self.holds)

    def row_bytes(self) -> int:
        d, o, t = self.x.shape[1], self.o, self.t
        wide = max(self.x.itemsize, o.dtype.itemsize, 4)
        branch = self.experts.row_bytes(o.top_k)
        if self.shared is not None:
            branch = max(branch, self.shared.row_bytes() + wide * d)
        router = wide * (ROUTER_ROWS * t.router_weight.shape[0] + 2 * d * (o.router_dtype != o.dtype))
        return bytes_around(self, branch + router, d)

    def sums(self, need: Collection[str], chunks: int) -> Gradients:
        return Gradients(self, need, chunks)

    # -- the router

    def logits(self, h: Tensor) -> Tensor:
        dtype = self.o.router_dtype
        w, b = self.cast(self.t.router_weight, dtype), self.cast(self.t.router_bias, dtype)
        return eager.linear(h.to(dtype), w, b)

    # -- the branch

    def shared_gate(self, h: Tensor) -> Tensor | None:
        """Returns sigmoid(h g^T) [rows, 1], or None."""
        gate = self.cast(self.t.shared_expert_gate)
        return None if gate is None else torch.sigmoid(eager.linear(h, gate, None))

    def of_shared(self, saved: Named) -> Named:
        return {name.removeprefix("shared_"): tensor for name, tensor in saved.items() if name.startswith("shared_")}

    def branch(self, h: Tensor, s: Tensor, groups: eager.Groups, saved: Named | None = None) -> tuple[Tensor, Named]:
        """Returns (the branch's result, what it saves). saved: what forward saved, in backward, which reads only the
        result."""
        results = self.experts.forward(h, s, groups, (saved or {}).get("gu"))
        f = results.pop("y")
        if self.shared is None:
            return f, results
        if saved is None:
            y, own = self.shared.forward_rows(h, self.first_row)
        else:
            y, own = self.shared.result_of(h, self.of_shared(saved), self.first_row), {}
        gate = self.shared_gate(h)
        f = f.add_(y) if gate is None else f.addcmul_(y, gate)
        return f, results | {f"shared_{name}": tensor for name, tensor in own.items()}

    def forward(self) -> Named:
        """Returns by name the output "y", the logits, the choice "index", and what the branch saves."""
        h = self.inputs()
        logits = self.logits(h)
        scores = scores_of(logits, self.o)
        index = chosen(scores, self.t.score_bias, self.o)
        s, scores, groups = weights_of(scores, index, self.o), None, eager.route(index, self.t.router_weight.shape[0])
        f, saved = self.branch(h, s, groups)
        h, index = None, index.to(torch.int16 if logits.shape[1] < 2**15 else torch.int32)
        return saved | {"y": self.output(self.drop(f)), LOGITS: logits, "index": index}

    def backward(self, dy: Tensor, saved: Named, need: Collection[str], sums: Gradients) -> Grads:
        """Returns the gradients that are not in `sums`."""
        index, dlogits, h = saved["index"].long(), saved[f"d{LOGITS}"], self.inputs()
        groups = eager.route(index, self.t.router_weight.shape[0])
        scores = scores_of(self.logits(h), self.o)
        s = weights_of(scores, index, self.o)
        f = self.drop(self.branch(h, s, groups, saved)[0]) if self.reads_branch(need) else None
        dy, df, grads = self.branch_gradients(dy, f, need)
        f = None
        results = self.experts.backward(df, h, index, s, saved.get("gu"), groups, sums.inner, sums.totals)
        dh, ds = results.get("dx"), results.pop("ds", None)
        results = None
        if sums.routes:
            dz = logits_gradient(ds, scores, index, self.o).add_(dlogits).to(self.o.router_dtype)
            self.add_linear_gradients("router_weight", dz, h, dh, sums)
            dz = ds = scores = None
        if self.shared is not None:
            own, gate, dx = self.of_shared(saved), self.shared_gate(h), None
            if sums.gates:  # whose gradient reads the shared expert's result: one more matmul
                if not own:
                    hidden, before = self.shared.hidden(h, self.first_row, save=True)
                    own = dict(zip(("g", "u") if self.shared.gated else ("z",), before, strict=True)) | {"h": hidden}
                    hidden = before = None
                y, wide = self.shared.result_of(h, own, self.first_row), eager.wide_of(df.dtype)
                dgate = (df.to(wide) * y.to(wide)).sum(1, keepdim=True) * gate * (1 - gate)
                y = None
                self.add_linear_gradients("shared_expert_gate", dgate.to(df.dtype), h, dh, sums)
            if sums.shared is not None:
                df = df if gate is None else df * gate
                dx = self.shared.backward_rows(df, h, own, self.first_row, sums.shared)
                if sums.need_dh:
                    dh += dx
            own = gate = dx = None
        h = df = None
        return grads | self.input_gradients(dh, dy, need) if sums.need_dh else grads

    def add_linear_gradients(self, name: str, dz: Tensor, h: Tensor, dh: Tensor | None, sums: Gradients) -> None:
        """Adds the gradients of z = h w^T: w's to the sums, and h's to dh."""
        if name in sums.totals:
            sums.totals[name].add(dz, h if h.dtype == dz.dtype else h.to(dz.dtype))
        if name == "router_weight" and "router_bias" in sums.totals:
            bias = sums.totals["router_bias"]
            bias.add(eager.column_sum(dz, bias.part))
        if sums.need_dh:
            dh += eager.mm(dz, self.cast(getattr(self.t, name), dz.dtype))


def moe_reference(x: Tensor, t: MoETensors, o: MoEOptions, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns (y, logits), computed in differentiable PyTorch ops. index [tokens, k]: forward's choice, None to choose
    again."""
    h = reference_inputs(x, t, o)
    w, b = (cast_parameter(tensor, o.router_dtype) for tensor in (t.router_weight, t.router_bias))
    logits = F.linear(h.to(o.router_dtype), w, b)
    scores = scores_of(logits, o)
    index = chosen(scores, t.score_bias, o) if index is None else index.long().view(*h.shape[:-1], o.top_k)
    f = Experts.reference((h, index, weights_of(scores, index, o), *(getattr(t, name) for name in PARAMETERS)), o)
    if (own := shared_of(t)) is not None:
        y, gate = mlp_reference(h, own, o), cast_parameter(t.shared_expert_gate, h.dtype)
        f = f + (y if gate is None else y * torch.sigmoid(F.linear(h, gate)))
    return reference_output(x, f, t, o), logits.reshape(-1, logits.shape[-1])


# -- the op


class MoEBlock(RowsOp):
    name = "moe_block"
    Tensors, Options, Sublayer = MoETensors, MoEOptions, MoESublayer
    constants = frozenset({1 + MoETensors._fields.index("score_bias")})
    decisions, more_results = ("index",), (LOGITS,)
    saves = staticmethod(saves)
    in_torch_ops = staticmethod(moe_reference)


_apply = build(MoEBlock)


def check_router(
    op: str, x: Tensor, experts: int, router_weight: Tensor, router_bias, score_bias, routing: RouterOptions
) -> RouterOptions:
    """Checks the arguments of the choice; returns its options."""
    top_k, scoring, normalize, num_groups, top_groups, group_score, factor = routing
    check_weight(op, "router_weight", router_weight, router_bias, x, x.shape[-1], "input")
    if router_weight.shape[0] != experts:
        raise ShapeError(
            f"{op}: router_weight must have {experts} rows, one for each expert of gate_up_weight, but it has "
            f"{router_weight.shape[0]}"
        )
    if score_bias is not None:
        check_tensor(op, "score_bias", score_bias, x, (experts,))
        if score_bias.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: score_bias gets no gradient; detach it")
    check_choice(op, "scoring", scoring, SCORINGS)
    check_choice(op, "group_score", group_score, GROUP_SCORES)
    check_flags(op, normalize=normalize)
    check_number(op, "routed_scaling_factor", factor)
    check_count(op, "top_k", top_k)
    check_count(op, "num_groups", num_groups)
    if num_groups > 1 and top_groups is None:
        raise ValueError(f"{op}: num_groups={num_groups} needs top_groups, how many of them a token may choose from")
    top_groups = num_groups if top_groups is None else top_groups
    check_count(op, "top_groups", top_groups)
    if experts % num_groups or top_groups > num_groups:
        raise ValueError(
            f"{op}: num_groups must divide the {experts} experts, and top_groups be at most num_groups, but they are "
            f"{num_groups} and {top_groups}"
        )
    if top_k > top_groups * (experts // num_groups):
        raise ValueError(
            f"{op}: top_k={top_k} is more than the {top_groups * (experts // num_groups)} experts that a token may choose from"
        )
    return routing._replace(top_groups=top_groups, routed_scaling_factor=float(factor))


def check_shared(op: str, x: Tensor, t: dict[str, Tensor | None], gate: Tensor | None) -> str:
    """Checks the shared expert's tensors; returns "", "plain" or "gated"."""
    features = x.shape[-1]
    if t["up_weight"] is None:
        extra = next((name for name, tensor in (*t.items(), ("expert_gate", gate)) if tensor is not None), None)
        if extra is not None:
            raise ValueError(f"{op}: shared_{extra} needs shared_up_weight")
        return ""
    if t["down_weight"] is None:
        raise ValueError(f"{op}: shared_up_weight needs shared_down_weight")
    check_branch(op, x, t, "shared_", "the shared hidden layer")
    if t["down_weight"].shape[0] != features:
        raise ShapeError(
            f"{op}: shared_down_weight must have {features} rows, as many as the input has features, but it has "
            f"{t['down_weight'].shape[0]}"
        )
    if gate is not None:
        check_weight(op, "shared_expert_gate", gate, None, x, features, "input")
        if gate.shape[0] != 1:
            raise ShapeError(f"{op}: shared_expert_gate must have one row, but has {gate.shape[0]}")
    return "plain" if t["gate_weight"] is None else "gated"


def gather(op, x, *, activation, router_dtype, lora, **others) -> tuple[MoETensors, MoEOptions]:
    """Checks all arguments of moe_block; returns the sublayer's tensors, without random states, and its options."""
    if ACTIVE.shard is not None:
        raise NotSharded("moe_block cannot be sharded")
    check_options(op, activation, others["recompute"])
    check_input(op, x)
    t, features = {name: others.pop(name) for name in MoETensors.own}, x.shape[-1]
    shared, w, wd = {name: t[f"shared_{name}"] for name in MLPTensors.own}, t["gate_up_weight"], t["down_weight"]
    check_experts(op, x, w, t["gate_up_bias"], wd, t["down_bias"])
    routing = RouterOptions(**{name: others.pop(name) for name in RouterOptions._fields})
    routing = check_router(op, x, len(w), t["router_weight"], t["router_bias"], t["score_bias"], routing)
    if router_dtype not in (None, torch.float32):
        raise ValueError(
            f"{op}: router_dtype must be torch.float32, or None for the compute dtype, not {router_dtype!r}"
        )
    kind = check_shared(op, x, shared, t["shared_expert_gate"])
    weights = {"gate_up": w, "down": wd} | {f"shared_{layer}": shared[f"{layer}_weight"] for layer in MLP_LAYERS}
    updates, numbers = NO_UPDATES if lora is None else gather_lora(op, x, lora, weights)
    of_shared = {name: tensor for name, tensor in updates.items() if name.startswith("shared_")}
    router = t["router_weight"] if router_dtype is None else None
    probe = x.new_empty(0, dtype=compute_dtype(op, x, router, *weights.values()))
    own = of_shared, numbers[2 * len(EXPERT_LAYERS) :] if of_shared else ()
    tensors, options = around(op, x, probe, "down_weight", features, own, w.numel(), **others)
    o = MoEOptions(
        **routing._asdict(),
        activation=activation,
        shared=kind,
        router_dtype=torch.promote_types(probe.dtype, router_dtype or probe.dtype),
        # chosen for the experts, which run most matmuls; the shared expert uses the same
        backend=choose_impl(op, probe, features, wd.shape[2], features, name="moe_mlp"),
        experts_lora=numbers[: 2 * len(EXPERT_LAYERS) : 2],
        **options,
    )
    return MoETensors(**t, **updates | tensors), o


@called(gather, _apply)
def moe_block(
    x: Tensor,
    router_weight: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    activation: str = "silu",
    *,
    top_k: int,
    scoring: str = "softmax",
    normalize: bool = True,
    score_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int | None = None,
    group_score: str = "top2",
    routed_scaling_factor: float = 1.0,
    router_bias: Tensor | None = None,
    router_dtype: torch.dtype | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    shared_gate_weight: Tensor | None = None,
    shared_gate_bias: Tensor | None = None,
    shared_up_weight: Tensor | None = None,
    shared_up_bias: Tensor | None = None,
    shared_down_weight: Tensor | None = None,
    shared_down_bias: Tensor | None = None,
    shared_expert_gate: Tensor | None = None,
    lora: Mapping[str, LoRA] | None = None,
    norm: str | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm_scale: Tensor | None = None,
    norm_shift: Tensor | None = None,
    norm_eps: float = 1e-5,
    norm_first: bool = True,
    post_norm: str | None = None,
    post_norm_weight: Tensor | None = None,
    post_norm_bias: Tensor | None = None,
    post_norm_eps: float = 1e-5,
    layer_scale: Tensor | float | None = None,
    resid_dropout_p: float = 0.0,
    drop_path_p: float = 0.0,
    residual: bool = True,
    training: bool = True,
    recompute: str = "full",
    workspace: Bytes = None,
) -> tuple[Tensor, Tensor]:
    """Computes an MoE sublayer with its router as one region; returns (y, router_logits).

        logits = h router_weight^T + router_bias;  s = scoring(logits);  index = top_k of s + score_bias
        w = s[index] [/ sum of these] * routed_scaling_factor
        f = moe_mlp(h, index, w, ...) + sigmoid(h shared_expert_gate^T) * shared(h);  h and y as in mlp_block

    x [..., d], router_weight [E, d] -> y [..., d], router_logits [tokens, E], both differentiable. Experts: see moe_mlp.
    scoring: "softmax" over all experts, or "sigmoid" of each, in float32.
    normalize: divides the k weights by their sum (Mixtral, arXiv 2401.04088).
    score_bias: [E], for the choice alone, without a gradient (DeepSeek-V3, arXiv 2412.19437).
    num_groups, top_groups: a token chooses within the top_groups best of num_groups equal groups.
    group_score: the sum of a group's two best scores ("top2"), or its best ("max", DeepSeek-V2).
    router_dtype: of logits; torch.float32 upcasts h and router_weight.
    shared_expert_gate: [1, d] (Qwen2-MoE). Without shared_gate_weight the shared expert is a plain MLP.
    lora: "gate_up", "down" as in moe_mlp; "shared_gate", "shared_up", "shared_down" as in mlp_block.

    Norms, layer_scale, residual and dropouts: see mlp_block.

    recompute: what is saved besides x and the choice of experts, which rounding could change in recompute:

        "none"       g and u of the chosen experts; g, u and h of the shared expert
        "selective"  the same without h
        "full"       nothing

    Raises: see Conventions.
    """
