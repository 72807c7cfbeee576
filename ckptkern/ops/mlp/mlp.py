"""mlp: y = dropout(act(x w1^T + b1)) w2^T + b2, and gated_mlp: y = dropout(act(x wg^T) * (x wu^T)) wd^T (SwiGLU, GEGLU, ...).
Each is one region that saves its input and recomputes the rest in backward."""

from __future__ import annotations

from collections import namedtuple

from torch import Tensor

from ..dispatch.choices import (
    check_input,
    check_options,
    check_weight,
    choose_impl,
    choose_mode,
    choose_workspace,
    compute_dtype,
    matmul_precision,
)
from ..dispatch.shard import ACTIVE
from ..registration.functions import build
from ..registration.op import Op, by_chunks, in_order, mask, needed_names, rows_2d, token_chunks, unflattened
from ..sublayer.dropout import draw_state
from .block import MLPTensors as BlockTensors
from .block import mlp_block
from .branch import BranchOptions, MLPBranch, Sums, check_branch, reference, saves

# the names of `branch`: of mlp fc1 is `up`, fc2 `down`, and there is no gate
MLPTensors = namedtuple("MLPTensors", (*BlockTensors.own, "rng"))


class MLP(Op):
    name = "mlp"
    Options = BranchOptions
    saves = staticmethod(saves)
    first_weights = mask(MLPTensors, "gate_weight", "up_weight")

    @classmethod
    def reads_x(cls, o, needs):
        return o.recompute == "full" or bool(needs & cls.first_weights)

    @staticmethod
    def forward(tensors, o):
        x, *t = tensors
        rows = rows_2d(x)
        branch = MLPBranch(MLPTensors(*t), o, rows.shape[0], rows.dtype)
        chunks = token_chunks(rows.shape[0], branch.row_bytes, branch.o.workspace)
        if len(chunks) == 1:
            y, saved = branch.forward_rows(rows, 0)
        else:
            y = rows.new_empty((rows.shape[0], branch.t.down_weight.shape[0]))
            saved = by_chunks(
                chunks, lambda start, stop: branch.forward_rows(rows[start:stop], start, y[start:stop])[1]
            )
        return unflattened(y, x), saved

    @staticmethod
    def backward(dy, tensors, saved, o, needs):
        (x, *t), rows = tensors, rows_2d(dy)
        branch, x = MLPBranch(MLPTensors(*t), o, rows.shape[0], rows.dtype), None if x is None else rows_2d(x)
        chunks = token_chunks(rows.shape[0], branch.row_bytes, branch.o.workspace)
        sums = Sums(branch, needed_names(MLPTensors, needs), len(chunks))
        if len(chunks) == 1:
            dx = branch.backward_rows(rows, x, saved, 0, sums)
        else:
            dx = rows.new_empty((rows.shape[0], branch.t.up_weight.shape[1])) if sums.need_dx else None
            for start, stop in chunks:
                x_rows, dx_rows = (one if one is None else one[start:stop] for one in (x, dx))
                of_rows = {name: one[start:stop] for name, one in saved.items()}
                branch.backward_rows(rows[start:stop], x_rows, of_rows, start, sums, dx_rows)
        grads = sums.results()
        if sums.need_dx:
            grads["x"] = unflattened(dx, dy)
        return in_order(grads, MLPTensors, needs)

    @staticmethod
    def reference(tensors, o):
        x, *t = tensors
        return reference(x, MLPTensors(*t), o)


class GatedMLP(MLP):
    name = "gated_mlp"


_apply, _apply_gated = build(MLP), build(GatedMLP)


def run(apply, op, x, t, activation, dropout_p, training, recompute, workspace) -> Tensor:
    """Checks the arguments of `mlp` or `gated_mlp` and applies it. t: its tensors, without a random state."""
    if ACTIVE.shard is not None:
        others = dict(dropout_p=dropout_p, training=training, recompute=recompute, workspace=workspace, residual=False)
        layers = {name: one for name, one in t._asdict().items() if name != "rng"}
        return mlp_block(x, **layers, activation=activation, **others)
    check_options(op, activation, recompute, dropout_p)
    check_input(op, x, jagged=True)
    if op == "mlp":
        check_weight(op, "fc1_weight", t.up_weight, t.up_bias, x, x.shape[-1], "input")
        check_weight(op, "fc2_weight", t.down_weight, t.down_bias, x, t.up_weight.shape[0], "the hidden layer")
    else:
        check_branch(op, x, t._asdict(), needs_gate=True)
    dtype = compute_dtype(op, x, t.gate_weight, t.up_weight, t.down_weight)
    x = x if x.dtype is dtype else x.to(dtype)
    options = BranchOptions(
        gated=t.gate_weight is not None,
        activation=activation,
        dropout_p=float(dropout_p),
        recompute=choose_mode(recompute),
        backend=choose_impl(op, x, x.shape[-1], t.up_weight.shape[0], t.down_weight.shape[0]),
        precision=matmul_precision(x),
        workspace=choose_workspace(op, workspace, x, t.up_weight.numel()),
        first_column=0,
    )
    return apply(options, x, *(t._replace(rng=draw_state(x, dropout_p, training)) if dropout_p else t))


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
    t = MLPTensors(None, None, fc1_weight, fc1_bias, fc2_weight, fc2_bias, None)
    return run(_apply, "mlp", x, t, activation, dropout_p, training, recompute, workspace)


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
    t = MLPTensors(gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias, None)
    return run(_apply_gated, "gated_mlp", x, t, activation, dropout_p, training, recompute, workspace)
