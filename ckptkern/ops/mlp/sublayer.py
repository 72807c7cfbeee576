"""The MLP sublayer of a layer: MLP or gated MLP and what is around it (`residual`). `mlp_block` and `transformer_layer` are
made of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..registration.needs import needed_names
from ..sublayer.lora import names_of
from ..sublayer.residual import Sublayer, reads_branch, reference_inputs, reference_output
from .branch import LAYERS, MLPBranch, reference

OF_BRANCH = frozenset(
    name for layer in LAYERS for name in (f"{layer}_weight", f"{layer}_bias", *names_of(layer))
)  # MLPTensors' fields


class MLPTensors(NamedTuple):
    """The tensors of an MLP sublayer. gate_weight None: a plain MLP, whose fc1 is `up` and fc2 `down`. LAYER_lora_a,
    LAYER_lora_b: low-rank updates (`low_rank`)."""

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    post_norm_weight: Tensor | None
    post_norm_bias: Tensor | None
    layer_scale: Tensor | None
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
    """The sublayer's other arguments. gated: is there a gate_weight? norm, post_norm "" is none; first_column: of the hidden
    layer, where it is a shard; lora: scale and dropout_p of the low-rank update of each of gate, up and down."""

    gated: bool
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


class MLPSublayer(Sublayer):
    """What an MLP sublayer computes, for one input."""

    def branch(self, *, last: bool = True) -> MLPBranch:
        return MLPBranch(self.t, self.o, self.x.shape[0], self.o.dtype, self.casting(last=last))

    def recomputed(self, h: Tensor, saved: dict[str, Tensor]) -> Tensor:
        """The branch's result, which no mode saves: by one matmul from the hidden layer if that was saved, or all of it."""
        branch = self.branch(last=False)
        if branch.updates or not saved:
            return self.drop(branch.forward(h)[0])
        hidden = saved["h"] if "h" in saved else branch.activated(list(saved.values()), 0)
        return self.drop(branch.linear("down", hidden, 0))


def mlp_sublayer(x: Tensor, t: MLPTensors, o: MLPOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """(y [tokens, e], what the branch saves)."""
    sublayer = MLPSublayer(x, t, o)
    f, saved = sublayer.branch().forward(sublayer.inputs())
    return sublayer.output(sublayer.drop(f)), saved


def mlp_sublayer_backward(
    dy: Tensor, x: Tensor, t: MLPTensors, o: MLPOptions, saved: dict[str, Tensor], needs: int
) -> dict:
    """Gradients by name ("x" and MLPTensors' fields) from dy [tokens, e]."""
    sublayer, need = MLPSublayer(x, t, o, shares=True), needed_names(MLPTensors, needs)
    h = sublayer.inputs()
    f = sublayer.recomputed(h, saved) if reads_branch(o, need) else None
    dy, df, grads = sublayer.branch_gradients(dy, f, need)
    f = None
    inner = need.intersection(OF_BRANCH) | ({"x"} if sublayer.needs_dh(need) else set())
    grads |= sublayer.branch().backward(df, h, saved, inner)
    if sublayer.needs_dh(need):
        grads |= sublayer.input_gradients(grads.pop("x"), dy, need)
    return sublayer.finished(grads, need)


def mlp_reference(x: Tensor, t: MLPTensors, o: MLPOptions) -> Tensor:
    """The sublayer in differentiable PyTorch ops."""
    return reference_output(x, reference(reference_inputs(x, t, o), t, o), t, o)
