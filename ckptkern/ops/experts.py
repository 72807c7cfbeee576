"""moe_mlp and grouped_gated_mlp: the experts of an MoE layer as one region, which saves its input and who goes where."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import eager
from ..errors import DtypeError, ShapeError
from .dispatch.checks import check_input, check_options, check_tensor
from .dispatch.choices import cast_input, choose_backend, choose_mode, matmul_precision, primitives
from .registration.functions import build
from .registration.gradients import main_grad_of
from .registration.needs import flags, needed
from .registration.op import Op
from .registration.rows import cast_parameter, rows_2d, unflattened

X, INDEX, S, W, B, WD, BD = range(7)


def _weight_grad(p, weight: Tensor, a: Tensor, b: Tensor, groups: eager.Groups, precision: str, gathered: str):
    """a^T b over each expert's rows: in the weight's dtype, or added to its main_grad, and None."""
    main = main_grad_of(weight)
    if main is None:
        out = weight.new_empty(weight.shape)
        p.experts_dw(a, b, groups, precision, out, gathered=gathered)
        return out
    out = main if main.stride(-1) == 1 else main.contiguous()
    p.experts_dw(a, b, groups, precision, out, gathered=gathered, add=True)
    if out is not main:
        main.copy_(out)
    weight.grad_added_to_main_grad = True
    return None


def _bias_share(dy: Tensor, index: Tensor, bias: Tensor) -> Tensor:
    """<dy[t], bias[e]> for every token-expert pair: the part of its weight's gradient that no hidden layer shows."""
    wide, dropped = eager.wide_of(dy.dtype), (index < 0) | (index >= len(bias))
    dy, bias, index = dy.to(wide), bias.to(wide), index.masked_fill(dropped, 0).long()
    shares = [(dy * bias[experts]).sum(1) for experts in index.unbind(1)] if len(bias) else [dy.new_zeros(dy.shape[0])]
    return torch.stack(shares, 1).masked_fill(dropped, 0)


class ExpertsOptions(NamedTuple):
    activation: str
    recompute: str
    backend: str
    precision: str


class Experts(Op):
    name = "moe_mlp"
    Options = ExpertsOptions
    constants = frozenset({INDEX})

    @staticmethod
    def saves(o):
        return ("order", "inv", "offs") if o.recompute == "full" else ("order", "inv", "offs", "gu")

    @staticmethod
    def reads_x(o, needs):
        return o.recompute == "full" or needed(needs, W)

    @staticmethod
    def forward(tensors, o):
        x, index, s, w, b, wd, bd = tensors
        p, index, s = primitives(o.backend), rows_2d(index), rows_2d(s)
        w, b, wd, bd = (cast_parameter(t, x.dtype) for t in (w, b, wd, bd))
        groups = eager.route(index, len(w))
        save_gu = o.recompute != "full"
        h, gu = p.experts_fwd(rows_2d(x), w, b, groups, o.activation, o.precision, save_gu=save_gu)
        y = p.experts_combine(p.experts_gemm(h, wd, bd, groups, o.precision, transposed=True), s, groups)
        return unflattened(y, x.shape[:-1]), groups._asdict() | {"gu": gu}

    @staticmethod
    def backward(dy, tensors, saved, o, needs):
        x, index, s, w, b, wd, bd = tensors
        p, dtype, lead = primitives(o.backend), dy.dtype, dy.shape[:-1]
        need_x, _, need_s, need_w, need_b, need_wd, need_bd = flags(needs, 7)
        dy, x, weights = rows_2d(dy), None if x is None else rows_2d(x), rows_2d(s)
        order, gu = saved["order"], saved.get("gu")
        groups = eager.Groups(order, saved["inv"], saved["offs"], weights.shape[1])
        w_, b_, wd_ = (cast_parameter(t, dtype) for t in (w, b, wd))
        grads = dict.fromkeys(range(7))
        wanted = dict(hs=need_wd, dgu=need_x or need_w or need_b, ds=need_s)
        if need_wd and not (wanted["dgu"] or need_s):  # forward's h, without the matmul that gives its gradient
            gu = p.experts_fwd(x, w_, b_, groups, o.activation, o.precision, save_gu=True)[1] if gu is None else gu
            h, wide = p.act_fwd(*gu.chunk(2, 1), o.activation), eager.wide_of(dtype)
            hs = (h.to(wide) * weights.reshape(-1)[order].to(wide)[:, None]).to(dtype)
        elif any(wanted.values()):
            if gu is None:
                hs, dgu, ds = p.experts_bwd(x, w_, b_, dy, wd_, weights, groups, o.activation, o.precision, **wanted)
            else:
                hs, dgu, ds = p.experts_act_grad(gu, dy, wd_, weights, groups, o.activation, o.precision, **wanted)
        if need_s:
            ds = ds if bd is None else ds + _bias_share(dy, rows_2d(index), bd)
            grads[S] = cast_parameter(ds, s.dtype).view(s.shape)
        if need_wd:
            grads[WD] = _weight_grad(p, wd, dy, hs, groups, o.precision, "a")
        hs = None  # gone before the other gradients are made
        if need_w:
            grads[W] = _weight_grad(p, w, dgu, x, groups, o.precision, "b")
        if need_b:
            grads[B] = cast_parameter(p.experts_sums(dgu, None, groups, gathered=False), b.dtype)
        if need_bd:
            grads[BD] = cast_parameter(p.experts_sums(dy, weights, groups, gathered=True), bd.dtype)
        if need_x:
            rows = p.experts_gemm(dgu, w_, None, groups, o.precision, transposed=False)
            dgu = None
            grads[X] = unflattened(p.experts_combine(rows, None, groups), lead)
        return tuple(grads.values())

    @staticmethod
    def reference(tensors, o):
        """Every expert on every token, zeros for those that are not its own: no shape depends on values."""
        x, index, s, w, b, wd, bd = tensors
        w, b, wd, bd = (cast_parameter(t, x.dtype) for t in (w, b, wd, bd))
        wide = eager.wide_of(x.dtype)
        total = 0
        for e in range(w.shape[0]):
            chosen = index == e
            own = torch.where(chosen.any(-1, keepdim=True), x, 0)
            g, u = F.linear(own, w[e], None if b is None else b[e]).chunk(2, -1)
            y = F.linear(eager.act(g, o.activation) * u, wd[e], None if bd is None else bd[e])
            total = total + y.to(wide) * torch.where(chosen, s.to(wide), 0).sum(-1, keepdim=True)
        return (total if w.shape[0] else torch.zeros_like(x, dtype=wide)).to(x.dtype)


_apply = build(Experts)


def check_experts(op: str, x: Tensor, w: Tensor, b: Tensor | None, wd: Tensor, bd: Tensor | None) -> None:
    """The parameters are those of one set of experts, for inputs like x."""
    d = x.shape[-1]
    for name, tensor, layout, dims in (
        ("gate_up_weight", w, "[experts, 2 hidden, features]", 3), ("gate_up_bias", b, "[experts, 2 hidden]", 2),
        ("down_weight", wd, "[experts, features, hidden]", 3), ("down_bias", bd, "[experts, features]", 2),
    ):  # fmt: skip
        if tensor is None and "bias" in name:
            continue
        check_tensor(op, name, tensor, x)
        if tensor.dim() != dims:
            raise ShapeError(f"{op}: {name} must be {layout}, but has shape {tuple(tensor.shape)}")
    if w.shape[2] != d or w.shape[1] % 2:
        raise ShapeError(
            f"{op}: gate_up_weight must be [experts, 2 hidden, {d}] for an input with {d} features, but has shape "
            f"{tuple(w.shape)}"
            + (f"; pass gate_up_weight.transpose(1, 2) for [experts, {d}, 2 hidden]" if w.shape[1] == d else "")
        )
    hidden = w.shape[1] // 2
    for name, tensor, wanted in (
        ("gate_up_bias", b, (len(w), 2 * hidden)), ("down_weight", wd, (len(w), d, hidden)), ("down_bias", bd, (len(w), d)),
    ):  # fmt: skip
        if tensor is not None and tuple(tensor.shape) != wanted:
            raise ShapeError(
                f"{op}: {name} must have shape {wanted} beside gate_up_weight {tuple(w.shape)}, but has {tuple(tensor.shape)}"
            )


def _check_integers(op: str, name: str, tensor: Tensor, x: Tensor) -> None:
    check_tensor(op, name, tensor, x, floating=False)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise DtypeError(f"{op}: {name} must hold integers, not {tensor.dtype}")


def _call(op, x, index, s, w, b, wd, bd, activation, recompute):
    x = cast_input(op, x, w, b, wd, bd)
    options = ExpertsOptions(activation, choose_mode(recompute), choose_backend(op, x), matmul_precision(x))
    return _apply(options, x, index, s, w, b, wd, bd)


def moe_mlp(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    activation: str = "silu",
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    recompute: str = "full",
) -> Tensor:
    """y[t] = sum_j top_k_weights[t, j] mlp_e(x[t]), e = top_k_index[t, j]; mlp_e is the gated MLP of expert e.

    mlp_e(x) = (act(g) * u) down_weight[e]^T + down_bias[e], [g | u] = x gate_up_weight[e]^T + gate_up_bias[e].

    x [..., d], top_k_index [..., k] of integers, top_k_weights [..., k], gate_up_weight [E, 2 h, d], down_weight [E, d, h],
    biases [E, 2 h] and [E, d] or None -> y [..., d] in x's dtype (autocast's inside torch.autocast): the layout of transformers
    5. float16, bfloat16, float32; float64 in PyTorch ops. top_k_weights may have another dtype, and is not rounded to x's.

    An index outside of 0..E - 1, such as -1, drops its token-expert pair: it adds nothing, and its weight's gradient is
    zero. An expert may
    come twice in a row, or for no token: then its gradients are exact zeros. Sums over j ascend in float32, without atomics, so
    that results repeat bit for bit. Nothing waits for the host, and a call can be captured in a CUDA graph.

    recompute: what is saved for backward besides parameters, and the matmuls run, forward + backward, of T k rows:

        "none", "selective"  x, g, u, routing    9
        "full"               x, routing         11

    Routing is top_k_index, top_k_weights, 8 bytes a token-expert pair and 4 an expert. h is saved in no mode: the pass
    that reads g and u writes it, times its weight, as the gradient of down_weight wants it.
    Gradients of one expert are summed in float32 and rounded once, or added to a weight's `main_grad`.
    Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (activation, mode),
    RuntimeError (backend).
    """
    op = "moe_mlp"
    check_options(op, activation, recompute)
    check_input(op, x)
    _check_integers(op, "top_k_index", top_k_index, x)
    check_tensor(op, "top_k_weights", top_k_weights, x)
    if top_k_index.shape[:-1] != x.shape[:-1] or top_k_index.dim() != x.dim() or not top_k_index.shape[-1]:
        raise ShapeError(
            f"{op}: top_k_index must be {(*x.shape[:-1], 'k')} for an input of shape {tuple(x.shape)}, with k of at least 1, "
            f"but has shape {tuple(top_k_index.shape)}"
        )
    if top_k_weights.shape != top_k_index.shape:
        raise ShapeError(
            f"{op}: top_k_index and top_k_weights must have one shape, but have {tuple(top_k_index.shape)} and "
            f"{tuple(top_k_weights.shape)}"
        )
    check_experts(op, x, gate_up_weight, gate_up_bias, down_weight, down_bias)
    return _call(
        op, x, top_k_index, top_k_weights, gate_up_weight, gate_up_bias, down_weight, down_bias, activation, recompute
    )


def grouped_gated_mlp(
    x: Tensor,
    offs: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    activation: str = "silu",
    *,
    row_weights: Tensor | None = None,
    recompute: str = "full",
) -> Tensor:
    """`moe_mlp` of rows that already lie in the experts' order, as an all-to-all leaves them.

    x [R, d], offs [E] of integers: expert e has rows offs[e - 1] (0 for the first) to offs[e], as in
    torch.nn.functional.grouped_mm -> y [R, d]. Rows from offs[-1] on give zeros, and get zeros as their gradient.

    row_weights: [R], what y's rows are multiplied by, or None. Weights that are applied outside of the op need its output
    saved; here they need none. Dispatch and combine stay outside: "full" saves these rows, and recompute never communicates.
    Dtypes, modes and errors: see moe_mlp, which runs.
    """
    op = "grouped_gated_mlp"
    check_options(op, activation, recompute)
    check_input(op, x)
    _check_integers(op, "offs", offs, x)
    if x.dim() != 2:
        raise ShapeError(f"{op}: input must be [rows, features], but has shape {tuple(x.shape)}")
    check_experts(op, x, gate_up_weight, None, down_weight, None)
    if tuple(offs.shape) != (len(gate_up_weight),):
        raise ShapeError(
            f"{op}: offs must have shape ({len(gate_up_weight)},), the end of each expert's rows, but has {tuple(offs.shape)}"
        )
    if row_weights is None:
        row_weights = x.new_ones(x.shape[0], dtype=eager.wide_of(x.dtype))
    check_tensor(op, "row_weights", row_weights, x)
    if tuple(row_weights.shape) != tuple(x.shape[:1]):
        raise ShapeError(
            f"{op}: row_weights must have shape ({x.shape[0]},), one value for each row, but has {tuple(row_weights.shape)}"
        )
    rows = torch.arange(x.shape[0], device=x.device)
    index = torch.searchsorted(offs.to(rows.dtype), rows, right=True)  # the number of experts for rows beyond the last
    return _call(
        op, x, index[:, None], row_weights[:, None], gate_up_weight, None, down_weight, None, activation, recompute
    )
