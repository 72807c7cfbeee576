"""mlp: y = dropout(act(x w1^T + b1)) w2^T + b2 as one region that saves its input and recomputes the rest in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..dispatch.checks import check_input, check_options, check_weight
from ..dispatch.choices import cast_input, choose_impl, choose_mode, choose_workspace, matmul_precision
from ..dispatch.shard import ACTIVE
from ..registration.functions import build
from ..registration.needs import in_order, mask, needed_names
from ..registration.rows import rows_2d, unflattened
from ..sublayer.dropout import draw_state
from ..sublayer.op import SublayerOp
from . import branch as mlp_branch
from .block import mlp_block
from .branch import BranchOptions, MLPBranch


class MLPTensors(NamedTuple):
    """The names of `branch`: fc1 is `up`, fc2 `down`."""

    up_weight: Tensor
    up_bias: Tensor | None
    down_weight: Tensor
    down_bias: Tensor | None
    rng: Tensor | None

    gate_weight = None


class MLP(SublayerOp):
    name = "mlp"
    Tensors, Options = MLPTensors, BranchOptions
    in_torch_ops = staticmethod(mlp_branch.reference)
    gated = False
    first_weights = mask(MLPTensors, "up_weight")

    @classmethod
    def saves(cls, o):
        return mlp_branch.saves(cls.gated, o)

    @classmethod
    def reads_x(cls, o, needs):
        return o.recompute == "full" or bool(needs & cls.first_weights)

    @classmethod
    def compute(cls, x, t, o):
        rows = rows_2d(x)
        return MLPBranch(t, o, rows.shape[0], rows.dtype).forward(rows)

    @classmethod
    def backward(cls, dy, tensors, saved, o, needs):
        (x, t), rows = cls.split(tensors), rows_2d(dy)
        branch, x = MLPBranch(t, o, rows.shape[0], rows.dtype), None if x is None else rows_2d(x)
        grads = branch.backward(rows, x, saved, needed_names(cls.Tensors, needs))
        if "x" in grads:
            grads["x"] = unflattened(grads["x"], dy)
        return in_order(grads, cls.Tensors, needs)


_apply = build(MLP)


def run(
    apply: Callable[..., Tensor],
    op: str,
    x: Tensor,
    t: Any,
    activation: str,
    dropout_p: float,
    training: bool,
    recompute: str,
    workspace: int | str | None,
) -> Tensor:
    """Applies `mlp` or `gated_mlp` to arguments that were checked; t: its tensors, without a random state."""
    x = cast_input(op, x, t.gate_weight, t.up_weight, t.down_weight)
    impl = choose_impl(op, x, x.shape[-1], t.up_weight.shape[0], t.down_weight.shape[0])
    bytes_ = choose_workspace(op, workspace, x, t.up_weight.numel())
    options = BranchOptions(
        activation, float(dropout_p), choose_mode(recompute), impl, matmul_precision(x), bytes_, first_column=0
    )
    return apply(options, x, *t._replace(rng=draw_state(x, dropout_p, training)))


def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    *,
    training: bool = True,
    recompute: str = "full",
    workspace: int | str | None = None,
) -> Tensor:
    """y = dropout(act(x fc1_weight^T + fc1_bias)) fc2_weight^T + fc2_bias.

    x [..., d], fc1_weight [h, d], fc1_bias [h] or None, fc2_weight [e, h], fc2_bias [e] or None -> y [..., e] in x's
    dtype (autocast's inside torch.autocast). float16, bfloat16, float32; float64 in PyTorch ops.

    activation: a name in ckptkern.ACTIVATIONS, such as relu, gelu (erf), gelu_tanh or silu.
    dropout_p, training: dropout after the activation, replayed in backward from 16 bytes; p is rounded to k/65536.
    recompute: what is saved for backward besides parameters, and the matmuls run, forward + backward:

        "none"       x, h (relu); x, z, h (others)     6
        "selective"  x, h (relu); x, z (others)        6
        "full"       x                                 7

    workspace: bytes of transient memory in each pass, an int or "64MiB"; tokens are taken in equal chunks that fit, of 128 at
    least. Default: ckptkern.workspace. The float32 sums of the weights' gradients, which more than one chunk needs, are not
    counted.

    Inside torch.utils.checkpoint the mode is "none": the checkpoint already recomputes the region.
    Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (activation, mode,
    probability, workspace), RuntimeError (backend).
    """
    if ACTIVE.shard is not None:
        return mlp_block(
            x,
            fc1_weight,
            fc1_bias,
            fc2_weight,
            fc2_bias,
            activation,
            dropout_p,
            residual=False,
            training=training,
            recompute=recompute,
            workspace=workspace,
        )
    check_options("mlp", activation, recompute, dropout_p)
    check_input("mlp", x, jagged=True)
    check_weight("mlp", "fc1_weight", fc1_weight, fc1_bias, x, x.shape[-1], "input")
    check_weight("mlp", "fc2_weight", fc2_weight, fc2_bias, x, fc1_weight.shape[0], "the hidden layer")
    t = MLPTensors(fc1_weight, fc1_bias, fc2_weight, fc2_bias, None)
    return run(_apply, "mlp", x, t, activation, dropout_p, training, recompute, workspace)
