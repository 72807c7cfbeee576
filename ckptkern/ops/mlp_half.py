"""The MLP half of a layer: MLP or gated MLP and what is around it (`_half`). `mlp_block` and `transformer_layer` are made of
it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from ._half import Half, after_branch, composite_inputs, composite_output, output_dtype, reads_branch
from ._needs import needed, needed_names
from ._rows import rows_2d
from .dropout import dropout_arguments, dropped
from .gated_mlp import GatedMLP
from .low_rank_mlp import GATED, UPDATES, LowRankMLP
from .mlp import MLP


class MLPTensors(NamedTuple):
    """The tensors of an MLP half. gate_weight None: a plain MLP, whose fc1 is `up` and fc2 `down`. LAYER_lora_a, LAYER_lora_b:
    low-rank updates (`low_rank`)."""

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    post_norm_weight: Tensor | None
    post_norm_bias: Tensor | None
    branch_scale: Tensor | None
    gate_weight: Tensor | None
    gate_bias: Tensor | None
    up_weight: Tensor
    up_bias: Tensor | None
    down_weight: Tensor
    down_bias: Tensor | None
    gate_lora_a: Tensor | None
    gate_lora_b: Tensor | None
    up_lora_a: Tensor | None
    up_lora_b: Tensor | None
    down_lora_a: Tensor | None
    down_lora_b: Tensor | None
    rng: Tensor | None = None
    resid_rng: Tensor | None = None
    path_rng: Tensor | None = None
    lora_rng: Tensor | None = None


class MLPOptions(NamedTuple):
    """The half's other arguments. norm, post_norm "" is none; first_column: of the hidden layer, where it is a shard; lora:
    scale and dropout_p of the low-rank update of each of gate, up and down."""

    norm: str
    norm_eps: float
    norm_first: bool
    post_norm: str
    post_norm_eps: float
    branch_factor: float
    activation: str
    dropout_p: float
    first_column: int
    resid_p: float
    path_p: float
    residual: bool
    recompute: str
    backend: str
    precision: str
    workspace: int
    lora: tuple[float, ...]
    lora_dtype: torch.dtype
    dtype: torch.dtype


PLAIN = GATED[2:]  # the MLP ops' inputs after x, by MLPTensors' names


class Branch(NamedTuple):
    """The MLP op of a half: its description, the names of its weights and biases, its arguments after x, and its statics."""

    op: type[MLP] | type[GatedMLP] | type[LowRankMLP]
    names: tuple[str, ...]
    arguments: tuple[Tensor | None, ...]
    statics: tuple

    def needs(self, need: Collection[str], needs_dh: bool) -> int:
        """The op's own `needs`."""
        return int(needs_dh) | sum(1 << i for i, name in enumerate(self.names, 1) if name in need)


def branch_of(t: MLPTensors, o: MLPOptions) -> Branch:
    op, names = (MLP, PLAIN) if t.gate_weight is None else (GatedMLP, GATED)
    statics: tuple = (o.activation, o.dropout_p, o.recompute, o.backend, o.precision, o.workspace, o.first_column)
    if o.lora:
        op, names, statics = LowRankMLP, (*GATED, *UPDATES, "lora_rng"), (*statics, o.lora, o.lora_dtype)
    return Branch(op, names, (*(getattr(t, name) for name in names), t.rng), statics)


class MLPHalf(Half):
    """What an MLP half computes, for one input."""

    def __init__(self, x: Tensor, t: MLPTensors, o: MLPOptions, *, shares: bool = False):
        super().__init__(x, t, o, shares=shares)
        self.branch = branch_of(t, o)

    def rebuilt(self, h: Tensor, kept) -> Tensor:
        """The branch's result, which no level keeps: by one product from the hidden layer if that was kept, or all of it."""
        op, _, arguments, statics = self.branch
        t, o, (*before, hidden) = self.t, self.o, kept
        if hidden is None and before[0] is not None and op is not LowRankMLP:
            made = self.p.act_fwd(before[0], before[1] if op is GatedMLP else None, o.activation)
            hidden = dropped(self.p, made, dropout_arguments(t.rng, o.dropout_p, o.first_column), 0)
        if hidden is None or op is LowRankMLP:
            full = *statics[:2], "full", *statics[3:]
            return self.drop(op.forward(h, *arguments, *full, cast=self.casting(last=False))[0])
        return self.drop(self.p.product(hidden, self.cast(t.down_weight, last=False), self.cast(t.down_bias)))


def mlp_half(x: Tensor, t: MLPTensors, o: MLPOptions):
    """(y [tokens, e], kept): what the MLP op keeps at this level, None where it keeps nothing."""
    half = MLPHalf(x, t, o)
    op, _, arguments, statics = half.branch
    f, *kept = op.forward(half.inputs(), *arguments, *statics)
    return half.output(half.drop(f)), kept


def mlp_half_backward(dy: Tensor, x: Tensor, t: MLPTensors, o: MLPOptions, kept, needs: int) -> dict:
    """Gradients by name ("x" and MLPTensors' fields) from dy [tokens, e]; kept as the MLP op's backward takes it."""
    half, need = MLPHalf(x, t, o, shares=True), needed_names(MLPTensors, needs)
    op, names, arguments, statics = half.branch
    h = half.inputs()
    f = half.rebuilt(h, kept) if reads_branch(o, need) else None
    dy, df, grads = half.branch_gradients(dy, f, need)
    f = None
    inner = half.branch.needs(need, half.needs_dh(need))
    dh, *made = op.backward(df, h, *arguments, *kept, *statics, inner, cast=half.casting(last=True))
    made = made[: len(names)]
    grads |= {name: grad for i, (name, grad) in enumerate(zip(names, made, strict=True), 1) if needed(inner, i)}
    if half.needs_dh(need):
        grads |= half.input_gradients(dh, dy, need)
    return half.finished(grads, need)


def mlp_composite(x: Tensor, t: MLPTensors, o: MLPOptions) -> Tensor:
    """The half in differentiable PyTorch ops."""
    op, _, arguments, statics = branch_of(t, o)
    return composite_output(x, op.composite(composite_inputs(x, t, o), *arguments, *statics), t, o)


def present(kept, o: MLPOptions) -> list[Tensor | None]:
    """kept with None for the tensors that the MLP op does not keep at this level."""
    if o.recompute == "full":
        return [None] * len(kept)
    if len(kept) == 2 and o.activation == "relu":  # plain: (z, h)
        return [None, kept[1]]
    return [*kept[:-1], kept[-1] if o.recompute == "none" else None]


def mlp_half_fake(x: Tensor, t: MLPTensors, o: MLPOptions):
    """(y, kept), empty."""
    op, _, arguments, statics = branch_of(t, o)
    _, *kept = op.forward_fake(rows_2d(x).to(o.dtype), *arguments, *statics)
    kept = [x.new_empty(0) if k is None else k for k in present(kept, o)]
    return x.new_empty((*x.shape[:-1], t.down_weight.shape[0]), dtype=output_dtype(x, o)), kept


def mlp_half_flops(x: Tensor, t: MLPTensors) -> int:
    names = ("gate_weight", "up_weight", "down_weight", *UPDATES)
    weights = sum(getattr(t, name).numel() for name in names if getattr(t, name) is not None)
    return 2 * rows_2d(x).shape[0] * weights


def mlp_half_backward_flops(dy, x, t: MLPTensors, o: MLPOptions, kept, needs: int) -> int:
    need, branch = needed_names(MLPTensors, needs), branch_of(t, o)
    inner = branch.needs(need, bool(need & {"x", "norm_weight", "norm_bias"} - after_branch(o)))
    flops = branch.op.backward_flops(rows_2d(dy), rows_2d(x), *branch.arguments, *kept, *branch.statics, inner)
    if not reads_branch(o, need):
        return flops
    hidden_kept = any(k is not None for k in kept) and branch.op is not LowRankMLP
    return flops + (2 * rows_2d(x).shape[0] * t.down_weight.numel() if hidden_kept else mlp_half_flops(x, t))
