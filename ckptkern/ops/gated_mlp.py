"""gated_mlp: y = dropout(act(x wg^T) * (x wu^T)) wd^T (SwiGLU, GEGLU, ...) as one segment."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import eager
from ..errors import ShapeError
from ._checks import check_input, check_statics, check_weight
from ._choices import cast_input, choose_level, choose_route, choose_workspace, matmul_precision, primitives
from ._gradients import BiasGrad, WeightGrad, row_bytes, token_chunks
from ._needs import needed
from ._op import Op, build
from ._rows import cast_parameter, row_count, rows_2d, unflattened
from ._shard import ACTIVE
from .dropout import draw_state, dropout_arguments, dropped

X, WG, BG, WU, BU, WD, BD = range(7)


class GatedMLP(Op):
    name = "gated_mlp"
    inputs = (
        "Tensor x, Tensor gate_weight, Tensor? gate_bias, Tensor up_weight, Tensor? up_bias, Tensor down_weight, "
        "Tensor? down_bias, Tensor? rng"
    )
    kept = "Tensor? g, Tensor? u, Tensor? h"
    statics = (
        "str activation, float dropout_p, str recompute, str backend, str precision, int workspace, int first_column"
    )
    results = "(Tensor y, Tensor g, Tensor u, Tensor h)"
    grads = "(Tensor dx, Tensor dwg, Tensor dbg, Tensor dwu, Tensor dbu, Tensor dwd, Tensor dbd, Tensor none)"

    @staticmethod
    def forward(
        x, wg, bg, wu, bu, wd, bd, rng, activation, dropout_p, recompute, backend, precision, workspace, first_column,
        cast=cast_parameter,
    ):  # fmt: skip
        wg, bg, wu, bu, wd, bd = (cast(t, x.dtype) for t in (wg, bg, wu, bu, wd, bd))
        keep_gu, keep_h = recompute != "full", recompute == "none"
        p = primitives(backend)
        h, g, u = p.gated_fwd(
            rows_2d(x), wg, bg, wu, bu, activation, precision, dropout=dropout_arguments(rng, dropout_p, first_column),
            keep_gu=keep_gu,
        )  # fmt: skip
        y = unflattened(p.product(h, wd, bd), x.shape[:-1])
        return y, g if keep_gu else None, u if keep_gu else None, h if keep_h else None

    @staticmethod
    def forward_fake(x, wg, bg, wu, bu, wd, bd, rng, activation, dropout_p, recompute, *statics):
        hidden = (row_count(x), wg.shape[0])
        keep_gu, keep_h = recompute != "full", recompute == "none"
        return (
            x.new_empty((*x.shape[:-1], wd.shape[0])),
            x.new_empty(hidden if keep_gu else 0),
            x.new_empty(hidden if keep_gu else 0),
            x.new_empty(hidden if keep_h else 0),
        )

    @staticmethod
    def saved(tensors, outputs, statics, needs):
        recompute = statics[2]
        x, *others = tensors
        keeps_x = recompute == "full" or needed(needs, WG) or needed(needs, WU)
        g_u = outputs[1:3] if recompute != "full" else (None, None)
        return [x if keeps_x else None, *others, *g_u, outputs[3] if recompute == "none" else None]

    @staticmethod
    def backward(
        dy, x, wg, bg, wu, bu, wd, bd, rng, g, u, h, activation, dropout_p, recompute, backend, precision, workspace,
        first_column, needs, cast=cast_parameter,
    ):  # fmt: skip
        p, lead, dtype = primitives(backend), dy.shape[:-1], dy.dtype
        dy, x = rows_2d(dy), None if x is None else rows_2d(x)
        M, hidden, features = dy.shape[0], wg.shape[0], wg.shape[1]
        dropout = dropout_arguments(rng, dropout_p, first_column)
        need_gate = needed(needs, X) or any(needed(needs, i) for i in (WG, BG, WU, BU))
        rebuilds = g is None and (h is None or need_gate)
        wg_, wu_ = (cast(w, dtype) if rebuilds or needed(needs, X) else None for w in (wg, wu))
        bg_, bu_ = (cast(b, dtype) if rebuilds else None for b in (bg, bu))
        wd_ = cast(wd, dtype) if need_gate else None
        # g, u, dg, du, h. The eager backend writes dg and du over dh and act(g), but some activations hold more tensors, and
        # dropout holds two more and a mask.
        eagerly, e = backend in ("eager", "wide"), wd.shape[0]
        held = 5 + eagerly * max(2 * (rng is not None), eager.ACTIVATIONS[activation].temporaries)
        held += backend in ("library", "wide")  # dh beside dg
        masks, summed = hidden * (eagerly and rng is not None), hidden + max(features, e)
        chunks = token_chunks(M, row_bytes(dy, held * hidden, masks, summed, 3 * hidden), workspace)
        weight_grads = {
            i: WeightGrad(w, len(chunks), wide=backend == "wide")
            for i, w in ((WG, wg), (WU, wu), (WD, wd))
            if needed(needs, i)
        }
        bias_grads = {i: BiasGrad(b.dtype, len(chunks)) for i, b in ((BG, bg), (BU, bu)) if needed(needs, i)}
        dx = None

        def add(start: int, stop: int) -> None:
            nonlocal dx
            rows = slice(start, stop)
            x_rows, dy_rows = None if x is None else x[rows], dy[rows]
            options = dict(dropout=dropout, row_base=start)
            h_rows = None if h is None else h[rows]
            keep_h = h is None and needed(needs, WD)
            if not need_gate:
                if h is None and g is None:
                    h_rows = p.gated_fwd(x_rows, wg_, bg_, wu_, bu_, activation, precision, **options)[0]
                elif h is None:
                    h_rows = dropped(p, p.act_fwd(g[rows], u[rows], activation), **options)
            else:
                dbg, dbu = (i in bias_grads and bias_grads[i].part for i in (BG, BU))
                wanted = dict(keep_h=keep_h, dbg=dbg, dbu=dbu)
                if g is None:
                    dg, du, made, dbg, dbu = p.gated_bwd(
                        x_rows, wg_, bg_, wu_, bu_, dy_rows, wd_, activation, precision, **wanted, **options
                    )
                else:
                    dg, du, made, dbg, dbu = p.gated_act_grad(
                        dy_rows, wd_, g[rows], u[rows], activation, precision, **wanted, **options
                    )
                h_rows = made if keep_h else h_rows
                made = None
            if WD in weight_grads:
                weight_grads[WD].add(dy_rows, h_rows)
                h_rows = None  # gone before the other gradients are made
            if need_gate:
                for i, part in ((BG, dbg), (BU, dbu)):
                    if i in bias_grads:
                        bias_grads[i].add(part)
                if WG in weight_grads:
                    weight_grads[WG].add(dg, x_rows)
                if needed(needs, X):
                    dx = dy.new_empty((M, features)) if dx is None else dx
                    p.mm(dg, wg_, out=dx[rows])
                dg = None
                if WU in weight_grads:
                    weight_grads[WU].add(du, x_rows)
                if needed(needs, X):
                    p.mm(du, wu_, out=dx[rows], add=True)

        for start, stop in chunks if need_gate or needed(needs, WD) else ():
            add(start, stop)
        grads = {i: grad.result() for i, grad in (weight_grads | bias_grads).items()}
        if needed(needs, X):
            grads[X] = unflattened(dx, lead)
        if needed(needs, BD):
            grads[BD] = eager.column_sum(dy, bd.dtype)
        return tuple(grads.get(i) for i in range(8))

    @staticmethod
    def backward_fake(dy, x, wg, bg, wu, bu, wd, bd, rng, g, u, h, *statics_and_needs):
        needs = statics_and_needs[-1]
        dx = dy.new_empty((*dy.shape[:-1], wg.shape[1]) if needed(needs, X) else 0)
        return dx, *(
            t.new_empty(t.shape) if needed(needs, i) else dy.new_empty(0)
            for i, t in enumerate((wg, bg, wu, bu, wd, bd, rng), 1)
        )

    @staticmethod
    def composite(x, wg, bg, wu, bu, wd, bd, rng, activation, dropout_p, *statics):
        wg, bg, wu, bu, wd, bd = (cast_parameter(t, x.dtype) for t in (wg, bg, wu, bu, wd, bd))
        linear = torch.nn.functional.linear
        h = eager.act(linear(x, wg, bg), activation) * linear(x, wu, bu)
        return linear(eager.composite_dropout(h, dropout_arguments(rng, dropout_p, statics[-1])), wd, bd)

    @staticmethod
    def forward_flops(x, wg, bg, wu, bu, wd, *args, out_val=None):
        return 2 * row_count(x) * (2 * wg.numel() + wd.numel())

    @staticmethod
    def backward_flops(dy, x, wg, bg, wu, bu, wd, bd, rng, g, u, h, *statics_and_needs, out_val=None):
        needs = statics_and_needs[-1]
        need_gate = any(needed(needs, i) for i in (X, WG, BG, WU, BU))
        rebuild = 2 * (g is None and (need_gate or needed(needs, WD)))
        inner = rebuild + 2 * needed(needs, X) + needed(needs, WG) + needed(needs, WU)
        return 2 * row_count(dy) * (inner * wg.numel() + (need_gate + needed(needs, WD)) * wd.numel())


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
    recompute: what is kept for backward besides parameters, and the products run, forward + backward:

        "none"       x, g, u, h    9
        "selective"  x, g, u       9
        "full"       x            11

    workspace: bytes of transient memory in backward, an int or "64MiB"; tokens are taken in equal chunks that fit, of 128 at
    least. Default: 1/32 of the GPU's memory but at least 256 MiB; 1 GiB elsewhere. The float32 sums of the weights' gradients,
    which more than one chunk needs, are not counted.
    Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (activation, level,
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
    check_statics(op, activation, recompute, dropout_p)
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
    statics = (
        activation, float(dropout_p), choose_level(recompute),
        choose_route(op, x, x.shape[-1], up_weight.shape[0], down_weight.shape[0]), matmul_precision(x),
        choose_workspace(op, workspace, x), 0,
    )  # fmt: skip
    rng = draw_state(x, dropout_p, training)
    return _apply(statics, x, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias, rng)
