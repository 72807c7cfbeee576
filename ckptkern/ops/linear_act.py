"""linear_act: y = act(x w^T + b) as one segment."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import eager
from ._checks import check_input, check_statics, check_weight
from ._choices import cast_input, choose_level, choose_route, compose, matmul_precision, primitives
from ._gradients import WeightGrad
from ._needs import needed
from ._op import Op, build
from ._rows import cast_parameter, row_count, rows_2d, unflattened

X, W, B = range(3)


def preactivation_kept(activation: str, recompute: str) -> tuple[bool, bool]:
    """(keep z, keep relu's 1-bit mask). At "none" relu keeps its own output, which the next layer keeps anyway."""
    if activation == "identity" or recompute == "full":
        return False, False
    if activation == "relu":
        return False, recompute == "selective"
    return True, False


class LinearAct(Op):
    name = "linear_act"
    inputs = "Tensor x, Tensor weight, Tensor? bias"
    kept = "Tensor? z, Tensor? bits"
    statics = "str activation, str recompute, str backend, str precision"
    results = "(Tensor y, Tensor z, Tensor bits)"
    grads = "(Tensor dx, Tensor dw, Tensor db)"

    @staticmethod
    def forward(x, w, b, activation, recompute, backend, precision):
        keep_z, keep_bits = preactivation_kept(activation, recompute)
        w, b = cast_parameter(w, x.dtype), cast_parameter(b, x.dtype)
        if activation == "identity":  # without an epilogue our kernel has nothing to gain
            y, z, bits = primitives(backend).product(rows_2d(x), w, b), None, None
        else:
            y, z, bits = primitives(backend).linear_fwd(
                rows_2d(x), w, b, activation, precision, keep_z=keep_z, keep_bits=keep_bits
            )
        return (
            unflattened(y, x.shape[:-1]),
            z if keep_z else None,
            bits if keep_bits else None,
        )

    @staticmethod
    def forward_fake(x, w, b, activation, recompute, backend, precision):
        keep_z, keep_bits = preactivation_kept(activation, recompute)
        M, N = row_count(x), w.shape[0]
        return (
            x.new_empty((*x.shape[:-1], N)),
            x.new_empty((M, N) if keep_z else 0),
            x.new_empty((M, (N + 7) // 8), dtype=torch.uint8) if keep_bits else x.new_empty(0),
        )

    @staticmethod
    def saved(tensors, outputs, statics, needs):
        activation, recompute = statics[:2]
        keep_z, keep_bits = preactivation_kept(activation, recompute)
        x, w, b = tensors
        rebuild = recompute == "full" and activation != "identity"
        keeps_y = activation == "relu" and recompute == "none"
        return [
            x if rebuild or needed(needs, W) else None,
            w,
            b,
            outputs[0] if keeps_y else outputs[1] if keep_z else None,
            outputs[2] if keep_bits else None,
        ]

    @staticmethod
    def backward(dy, x, w, b, z, bits, activation, recompute, backend, precision, needs):
        p, lead = primitives(backend), dy.shape[:-1]
        dy, x = rows_2d(dy), None if x is None else rows_2d(x)
        rebuilds = activation != "identity" and z is None and bits is None
        w_ = cast_parameter(w, dy.dtype) if rebuilds or needed(needs, X) else None
        db_dtype = needed(needs, B) and b.dtype
        if activation == "identity":
            dz, db = dy, eager.column_sum(dy, db_dtype) if db_dtype else None
        elif bits is not None:
            dz, db = p.act_bwd(dy, bits, activation, bits=True, db=db_dtype)
        elif z is not None:
            dz, db = p.act_bwd(dy, rows_2d(z), activation, db=db_dtype)
        else:
            dz, db = p.linear_bwd(x, w_, cast_parameter(b, dy.dtype), dy, activation, precision, db=db_dtype)
        dw = WeightGrad(w, 1, wide=backend == "wide")
        if needed(needs, W):
            dw.add(dz, x)
        return (
            unflattened(p.mm(dz, w_), lead) if needed(needs, X) else None,
            dw.result() if needed(needs, W) else None,
            db,
        )

    @staticmethod
    def backward_fake(dy, x, w, b, z, bits, *statics_and_needs):
        needs = statics_and_needs[-1]
        dx = dy.new_empty((*dy.shape[:-1], w.shape[1]) if needed(needs, X) else 0)
        return dx, *(t.new_empty(t.shape) if needed(needs, i) else dy.new_empty(0) for i, t in ((W, w), (B, b)))

    @staticmethod
    def composite(x, w, b, activation, recompute, backend, precision):
        return eager.act(
            torch.nn.functional.linear(x, cast_parameter(w, x.dtype), cast_parameter(b, x.dtype)), activation
        )

    @classmethod
    def missing_input(cls, dy, saved, statics):
        if statics[0] == "identity":  # linear: the gradient of x does not depend on x
            return dy.new_zeros((*dy.shape[:-1], saved[W].shape[1]))
        return super().missing_input(dy, saved, statics)

    @staticmethod
    def forward_flops(x, w, *args, out_val=None):
        return 2 * row_count(x) * w.numel()

    @staticmethod
    def backward_flops(dy, x, w, b, z, bits, activation, *statics_and_needs, out_val=None):
        needs = statics_and_needs[-1]
        rebuild = activation != "identity" and z is None and bits is None
        return 2 * row_count(dy) * w.numel() * (rebuild + needed(needs, X) + needed(needs, W))


_apply = build(LinearAct)


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "relu", *, recompute: str = "selective"
) -> Tensor:
    """y = act(x weight^T + bias).

    x [..., k], weight [n, k], bias [n] or None -> y [..., n] in x's dtype (autocast's inside torch.autocast).
    float16, bfloat16, float32; float64 in PyTorch ops.

    activation: a name in ckptkern.ACTIVATIONS, such as relu, gelu (erf), gelu_tanh or silu.
    recompute: what is kept for backward besides parameters, and the products run, forward + backward (identity keeps x
    at every level):

                     relu                                     others    products
        "none"       x, y (no memory of its own in a chain)   x, z      3
        "selective"  x, 1 bit per element                     x, z      3
        "full"       x                                        x         4

    A sparse weight (COO, CSR, CSC), or any that is not strided, goes to torch's own ops, with their errors and gradients.
    torch then chooses what is kept.
    Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (activation, level),
    RuntimeError (backend).
    """
    check_statics("linear_act", activation, recompute)
    check_input("linear_act", x, jagged=True)
    if isinstance(weight, Tensor) and weight.layout is not torch.strided:
        compose("linear_act", f"the kernels cover dense weights, not {weight.layout}")
        return eager.act(torch.nn.functional.linear(x, weight, bias), activation)
    check_weight("linear_act", "weight", weight, bias, x, x.shape[-1], "input")
    x = cast_input("linear_act", x, weight)
    route = choose_route("linear_act", x, weight.shape[1], 0, weight.shape[0])
    statics = (activation, choose_level(recompute), route, matmul_precision(x))
    return _apply(statics, x, weight, bias)
