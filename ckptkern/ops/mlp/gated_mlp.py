"""gated_mlp: y = dropout(act(x wg^T) * (x wu^T)) wd^T (SwiGLU, GEGLU, ...) as one region."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..dispatch.checks import check_input, check_options
from ..dispatch.shard import ACTIVE
from ..registration.functions import build
from ..registration.needs import mask
from .block import mlp_block
from .branch import check_branch
from .mlp import MLP, run


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

    workspace: bytes of transient memory in each pass, an int or "64MiB"; tokens are taken in equal chunks that fit, of 128 at
    least. Default: ckptkern.workspace. The float32 sums of the weights' gradients, which more than one chunk needs, are not
    counted.
    Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (activation, mode,
    probability, workspace), RuntimeError (backend).
    """
    op = "gated_mlp"
    if ACTIVE.shard is not None:
        return mlp_block(
            x,
            up_weight,
            up_bias,
            down_weight,
            down_bias,
            activation,
            dropout_p,
            gate_weight=gate_weight,
            gate_bias=gate_bias,
            residual=False,
            training=training,
            recompute=recompute,
            workspace=workspace,
        )
    check_options(op, activation, recompute, dropout_p)
    check_input(op, x, jagged=True)
    t = GatedMLPTensors(gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias, None)
    check_branch(op, x, t._asdict(), needs_gate=True)
    return run(_apply, op, x, t, activation, dropout_p, training, recompute, workspace)
