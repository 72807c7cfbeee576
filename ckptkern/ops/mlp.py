"""mlp: y = dropout(act(x w1^T + b1)) w2^T + b2 as one segment that keeps its input and rebuilds the rest in backward."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import eager
from ._checks import check_input, check_statics, check_weight
from ._choices import cast_input, choose_level, choose_route, choose_workspace, matmul_precision, primitives
from ._gradients import BiasGrad, WeightGrad, row_bytes, token_chunks
from ._needs import flags, needed
from ._op import Op, build
from ._rows import cast_parameter, row_count, rows_2d, unflattened
from ._shard import ACTIVE
from .dropout import draw_state, dropout_arguments, dropped

X, W1, B1, W2, B2 = range(5)


def hidden_activation_kept(activation: str, recompute: str) -> tuple[bool, bool]:
    """(keep z, keep h) of an MLP's hidden layer. For relu, h gives both dW2 and the mask."""
    if recompute == "full":
        return False, False
    if activation == "relu":
        return False, True
    return True, recompute == "none"


class MLP(Op):
    name = "mlp"
    inputs = "Tensor x, Tensor fc1_weight, Tensor? fc1_bias, Tensor fc2_weight, Tensor? fc2_bias, Tensor? rng"
    kept = "Tensor? z, Tensor? h"
    statics = (
        "str activation, float dropout_p, str recompute, str backend, str precision, int workspace, int first_column"
    )
    results = "(Tensor y, Tensor z, Tensor h)"
    grads = "(Tensor dx, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2, Tensor none)"

    @staticmethod
    def forward(
        x, w1, b1, w2, b2, rng, activation, dropout_p, recompute, backend, precision, workspace, first_column,
        cast=cast_parameter,
    ):  # fmt: skip
        p, dtype, rows = primitives(backend), x.dtype, rows_2d(x)
        keep_z, keep_h = hidden_activation_kept(activation, recompute)
        w1, b1, w2, b2 = cast(w1, dtype), cast(b1, dtype), cast(w2, dtype), cast(b2, dtype)
        dropout = dropout_arguments(rng, dropout_p, first_column)
        h, z, _ = p.linear_fwd(rows, w1, b1, activation, precision, dropout=dropout, keep_z=keep_z)
        y = unflattened(p.product(h, w2, b2), x.shape[:-1])
        if activation == "identity" and keep_z and keep_h and rng is None:
            h = h.clone()  # results of an op may not share memory
        return y, z if keep_z else None, h if keep_h else None

    @staticmethod
    def forward_fake(
        x, w1, b1, w2, b2, rng, activation, dropout_p, recompute, backend, precision, workspace, first_column,
    ):  # fmt: skip
        keep_z, keep_h = hidden_activation_kept(activation, recompute)
        hidden = (row_count(x), w1.shape[0])
        return (
            x.new_empty((*x.shape[:-1], w2.shape[0])),
            x.new_empty(hidden if keep_z else 0),
            x.new_empty(hidden if keep_h else 0),
        )

    @staticmethod
    def saved(tensors, outputs, statics, needs):
        keep_z, keep_h = hidden_activation_kept(statics[0], statics[2])
        x, *others = tensors
        keeps_x = statics[2] == "full" or needed(needs, W1)
        return [x if keeps_x else None, *others, outputs[1] if keep_z else None, outputs[2] if keep_h else None]

    @staticmethod
    def backward(
        dy, x, w1, b1, w2, b2, rng, z, h, activation, dropout_p, recompute, backend, precision, workspace, first_column,
        needs, cast=cast_parameter,
    ):  # fmt: skip
        p, dtype, lead = primitives(backend), dy.dtype, dy.shape[:-1]
        need_dx, need_dw1, need_db1, need_dw2, need_db2 = flags(needs, 5)
        need_dz = need_dx or need_dw1 or need_db1
        dy, x = rows_2d(dy), None if x is None else rows_2d(x)
        rebuilds = z is None and h is None
        w1_ = cast(w1, dtype) if rebuilds or need_dx else None
        b1_ = cast(b1, dtype) if rebuilds else None
        w2_ = cast(w2, dtype) if need_dz else None
        dropout = dropout_arguments(rng, dropout_p, first_column)
        # z and dh, with dz over dh and h over z, or beside them on routes that write each result anew; in the eager backend
        # some activations hold more, dropout two more and a mask
        (hidden, features), rows, eagerly = w1.shape, dy.shape[0], backend in ("eager", "wide")
        held = 2 + eagerly * max(2 * (rng is not None), eager.ACTIVATIONS[activation].temporaries)
        held += 2 * (backend in ("library", "wide"))
        masks, summed = hidden * (eagerly and rng is not None), hidden + max(features, dy.shape[1])
        bytes_per_row = row_bytes(dy, held * hidden, masks, summed, 2 * hidden)
        chunks = token_chunks(rows, bytes_per_row, workspace)
        count, wide = len(chunks), backend == "wide"
        dw1, dw2 = WeightGrad(w1, count, wide=wide), WeightGrad(w2, count, wide=wide)
        db1 = BiasGrad(b1.dtype, count) if need_db1 else None
        dx = dy.new_empty((rows, features)) if need_dx and count > 1 else None

        def add(start: int, stop: int) -> None:
            nonlocal dx
            x_rows, dy_rows, z_rows, h_rows = x, dy, z, h
            if count > 1:
                x_rows, dy_rows, z_rows, h_rows = (t if t is None else t[start:stop] for t in (x, dy, z, h))
            keep_h = h is None and need_dw2
            if not need_dz:
                if rebuilds:
                    h_rows = p.linear_fwd(x_rows, w1_, b1_, activation, precision, dropout=dropout, row_base=start)[0]
                elif h is None:
                    h_rows = dropped(p, p.act_fwd(z_rows, None, activation), dropout, start)
            else:
                if not rebuilds:
                    dz, made, db = p.act_grad(
                        dy_rows, w2_, h_rows if z is None else z_rows, activation, precision, dropout=dropout,
                        row_base=start, keep_h=keep_h, db=need_db1 and db1.part,
                    )  # fmt: skip
                else:
                    dz, made, db = p.mlp_bwd(
                        x_rows, w1_, b1_, dy_rows, w2_, activation, precision, dropout=dropout, row_base=start,
                        keep_h=keep_h, db=need_db1 and db1.part,
                    )  # fmt: skip
                h_rows = made if keep_h else h_rows
            if need_dw2:
                dw2.add(dy_rows, h_rows)
                made = z_rows = h_rows = None  # frees the largest tensor before dw1 and dx are made
            if need_dz:
                if need_db1:
                    db1.add(db)
                if need_dw1:
                    dw1.add(dz, x_rows)
                if need_dx and dx is None:
                    dx = p.mm(dz, w1_)
                elif need_dx:
                    p.mm(dz, w1_, out=dx[start:stop])

        for start, stop in chunks if need_dz or need_dw2 else ():
            add(start, stop)
        return (
            unflattened(dx, lead) if need_dx else None,
            dw1.result() if need_dw1 else None,
            db1.result() if need_db1 else None,
            dw2.result() if need_dw2 else None,
            eager.column_sum(dy, b2.dtype) if need_db2 else None,
            None,
        )

    @staticmethod
    def backward_fake(dy, x, w1, b1, w2, b2, rng, z, h, *statics_and_needs):
        needs = statics_and_needs[-1]
        dx = dy.new_empty((*dy.shape[:-1], w1.shape[1]) if needed(needs, X) else 0)
        return dx, *(
            t.new_empty(t.shape) if needed(needs, i) else dy.new_empty(0)
            for i, t in ((W1, w1), (B1, b1), (W2, w2), (B2, b2), (5, rng))
        )

    @staticmethod
    def composite(
        x, w1, b1, w2, b2, rng, activation, dropout_p, recompute, backend, precision, workspace, first_column,
    ):  # fmt: skip
        w1, b1, w2, b2 = (cast_parameter(t, x.dtype) for t in (w1, b1, w2, b2))
        h = eager.act(torch.nn.functional.linear(x, w1, b1), activation)
        h = eager.composite_dropout(h, dropout_arguments(rng, dropout_p, first_column))
        return torch.nn.functional.linear(h, w2, b2)

    @staticmethod
    def forward_flops(x, w1, b1, w2, *args, out_val=None):
        return 2 * row_count(x) * (w1.numel() + w2.numel())

    @staticmethod
    def backward_flops(dy, x, w1, b1, w2, b2, rng, z, h, *statics_and_needs, out_val=None):
        needs = statics_and_needs[-1]
        need_dz = needs & 0b111 != 0
        rebuild = z is None and h is None and needs & 0b1111 != 0
        products_1 = rebuild + needed(needs, X) + needed(needs, W1)
        products_2 = need_dz + needed(needs, W2)
        return 2 * row_count(dy) * (products_1 * w1.numel() + products_2 * w2.numel())


_apply = build(MLP)


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
    recompute: what is kept for backward besides parameters, and the products run, forward + backward:

        "none"       x, h (relu); x, z, h (others)     6
        "selective"  x, h (relu); x, z (others)        6
        "full"       x                                 7

    workspace: bytes of transient memory in backward, an int or "64MiB"; tokens are taken in equal chunks that fit, of 128 at
    least. Default: 1/32 of the GPU's memory but at least 256 MiB; 1 GiB elsewhere. The float32 sums of the weights' gradients,
    which more than one chunk needs, are not counted.

    Inside torch.utils.checkpoint the level is "none": the checkpoint already rebuilds the segment.
    Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (activation, level,
    probability, workspace), RuntimeError (backend).
    """
    if ACTIVE.shard is not None:
        arguments = dict(
            up_weight=fc1_weight, up_bias=fc1_bias, down_weight=fc2_weight, down_bias=fc2_bias, activation=activation,
            dropout_p=dropout_p, residual=False, recompute=recompute, workspace=workspace,
        )  # fmt: skip
        return ACTIVE.shard.mlp_block(x, training, arguments)
    check_statics("mlp", activation, recompute, dropout_p)
    check_input("mlp", x, jagged=True)
    check_weight("mlp", "fc1_weight", fc1_weight, fc1_bias, x, x.shape[-1], "input")
    check_weight("mlp", "fc2_weight", fc2_weight, fc2_bias, x, fc1_weight.shape[0], "the hidden layer")
    x = cast_input("mlp", x, fc1_weight, fc2_weight)
    route = choose_route("mlp", x, x.shape[-1], fc1_weight.shape[0], fc2_weight.shape[0])
    statics = (
        activation, float(dropout_p), choose_level(recompute), route, matmul_precision(x),
        choose_workspace("mlp", workspace, x), 0,
    )  # fmt: skip
    return _apply(statics, x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, draw_state(x, dropout_p, training))
