"""gated_mlp: y = dropout(act(x wg^T) * (x wu^T)) wd^T (SwiGLU, GEGLU, ...) as one region."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...errors import ShapeError
from ..dispatch.checks import check_input, check_options, check_weight
from ..dispatch.choices import cast_input, choose_impl, choose_mode, choose_workspace, matmul_precision
from ..dispatch.shard import ACTIVE
from ..registration.functions import build
from ..registration.needs import mask
from ..sublayer.dropout import draw_state
from .branch import BranchOptions
from .mlp import MLP


class GatedMLPTensors(NamedTuple):
    gate_weight: Tensor
    gate_bias: Tensor | None
    up_weight: Tensor
    up_bias: Tensor | None
    down_weight: Tensor
    down_bias: Tensor | None
    rng: Tensor | None


class GatedMLP(MLP):
    name = "gated_mlp"
    Tensors = GatedMLPTensors
    gated = True
    first_weights = mask(GatedMLPTensors, "gate_weight", "up_weight")


_apply = build(GatedMLP)


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    activation: str = "silu",
    dropout_p: float = 0.0,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    training: bool = True,
    recompute: str = "full",
    workspace: int | str | None = None,
) -> Tensor:
    """y = dropout(act(g) * u) down_weight^T + down_bias, g = x gate_weight^T + gate_bias, u = x up_weight^T + up_bias.

    x [..., d], gate_weight and up_weight [h, d], down_weight [e, h], biases [h], [h], [e] or None -> y [..., e] in x's
    dtype (autocast's inside torch.autocast). float16, bfloat16, float32; float64 in PyTorch ops. SwiGLU is
    activation="silu", GEGLU "gelu" (Shazeer 2020, arXiv 2002.05202).

    dropout_p, training: dropout of the hidden layer, replayed in backward from 16 bytes; p is rounded to k/65536.
    recompute: what is saved for backward besides parameters, and the matmuls run, forward + backward:

        "none"       x, g, u, h    9
        "selective"  x, g, u       9
        "full"       x            11

    workspace: bytes of transient memory in backward, an int or "64MiB"; tokens are taken in equal chunks that fit, of 128 at
    least. Default: 1/32 of the GPU's memory but at least 256 MiB; 1 GiB elsewhere. The float32 sums of the weights' gradients,
    which more than one chunk needs, are not counted.
    Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (activation, mode,
    probability, workspace), RuntimeError (backend).
    """
    op = "gated_mlp"
    if ACTIVE.shard is not None:
        arguments = dict(
            gate_weight=gate_weight, gate_bias=gate_bias, up_weight=up_weight, up_bias=up_bias, down_weight=down_weight,
            down_bias=down_bias, activation=activation, dropout_p=dropout_p, residual=False, recompute=recompute,
            workspace=workspace,
        )  # fmt: skip
        return ACTIVE.shard.mlp_block(x, training, arguments)
    check_options(op, activation, recompute, dropout_p)
    check_input(op, x, jagged=True)
    check_weight(op, "gate_weight", gate_weight, gate_bias, x, x.shape[-1], "input")
    check_weight(op, "up_weight", up_weight, up_bias, x, x.shape[-1], "input")
    if up_weight.shape != gate_weight.shape:
        raise ShapeError(
            f"{op}: gate_weight and up_weight must have one shape, but have {tuple(gate_weight.shape)} and "
            f"{tuple(up_weight.shape)}"
        )
    check_weight(op, "down_weight", down_weight, down_bias, x, gate_weight.shape[0], "the hidden layer")
    x = cast_input(op, x, gate_weight, up_weight, down_weight)
    options = BranchOptions(
        activation, float(dropout_p), choose_mode(recompute),
        choose_impl(op, x, x.shape[-1], up_weight.shape[0], down_weight.shape[0]), matmul_precision(x),
        choose_workspace(op, workspace, x), 0,
    )  # fmt: skip
    rng = draw_state(x, dropout_p, training)
    return _apply(options, x, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias, rng)
