"""linear_act: y = act(x w^T + b) as one region."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import eager
from ..dispatch.choices import (
    cast_input,
    check_input,
    check_options,
    check_weight,
    choose_impl,
    choose_mode,
    compose,
    matmul_precision,
    primitives,
)
from ..registration.functions import build
from ..registration.gradients import WeightGrad
from ..registration.op import Op, cast_parameter, needed, rows_2d, unflattened

X, W, B = range(3)


class LinearActOptions(NamedTuple):
    activation: str
    recompute: str
    backend: str
    precision: str


class LinearAct(Op):
    name = "linear_act"
    Options = LinearActOptions

    @staticmethod
    def saves(o):
        """Names, of relu at "none", its own output, which the next layer saves anyway."""
        if o.activation == "identity" or o.recompute == "full":
            return ()
        if o.activation == "relu":
            return ("bits",) if o.recompute == "selective" else ("y",)
        return ("z",)

    @staticmethod
    def reads_x(o, needs):
        return needed(needs, W) or (o.recompute == "full" and o.activation != "identity")

    @staticmethod
    def forward(tensors, o):
        x, w, b = tensors
        p, rows, saves = primitives(o.backend), rows_2d(x), LinearAct.saves(o)
        w, b = cast_parameter(w, x.dtype), cast_parameter(b, x.dtype)
        if o.activation == "identity":  # without an epilogue our kernel has nothing to gain
            y, z, bits = p.linear(rows, w, b), None, None
        else:
            keep = dict(save_z="z" in saves, save_bits="bits" in saves)
            y, z, bits = p.linear_fwd(rows, w, b, o.activation, o.precision, **keep)
        return unflattened(y, x), {"z": z, "bits": bits}

    @staticmethod
    def backward(dy, tensors, saved, o, needs):
        (x, w, b), p, whole = tensors, primitives(o.backend), dy
        dy, x = rows_2d(dy), None if x is None else rows_2d(x)
        recomputes = o.activation != "identity" and not saved
        w_ = cast_parameter(w, dy.dtype) if recomputes or needed(needs, X) else None
        db_dtype = needed(needs, B) and b.dtype
        if o.activation == "identity":
            dz, db = dy, eager.column_sum(dy, db_dtype) if db_dtype else None
        elif recomputes:
            dz, db = p.linear_bwd(x, w_, cast_parameter(b, dy.dtype), dy, o.activation, o.precision, db=db_dtype)
        else:
            ((name, read),) = saved.items()
            dz, db = p.act_bwd(dy, rows_2d(read), o.activation, bits=name == "bits", db=db_dtype)
        dw = WeightGrad(w, 1)
        if needed(needs, W):
            dw.add(dz, x)
        return (
            unflattened(p.mm(dz, w_), whole) if needed(needs, X) else None,
            dw.result() if needed(needs, W) else None,
            db,
        )

    @staticmethod
    def reference(tensors, o):
        x, w, b = tensors
        z = torch.nn.functional.linear(x, cast_parameter(w, x.dtype), cast_parameter(b, x.dtype))
        return eager.act(z, o.activation)

    @classmethod
    def missing_input(cls, dy, tensors, o):
        if o.activation == "identity":  # linear: the gradient of x does not depend on x
            return dy.new_zeros((*dy.shape[:-1], tensors[W].shape[1]))
        return super().missing_input(dy, tensors, o)


_apply = build(LinearAct)


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "relu", *, recompute: str = "selective"
) -> Tensor:
    """y = act(x weight^T + bias).

    x [..., k], weight [n, k], bias [n] or None -> y [..., n] in x's dtype (autocast's inside torch.autocast).
    float16, bfloat16, float32; float64 in PyTorch ops.

    activation: a name in ckptkern.ACTIVATIONS, such as relu, gelu (erf), gelu_tanh or silu.
    recompute: what is saved for backward besides parameters, and the matmuls run, forward + backward (identity saves x
    in every mode):

                     relu                                     others    matmuls
        "none"       x, y (no memory of its own in a chain)   x, z      3
        "selective"  x, 1 bit per element                     x, z      3
        "full"       x                                        x         4

    A sparse weight (COO, CSR, CSC), or any that is not strided, goes to torch's own ops, with their errors and gradients.
    torch then chooses what is saved.
    Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (activation, mode),
    RuntimeError (backend).
    """
    check_options("linear_act", activation, recompute)
    check_input("linear_act", x, jagged=True)
    if isinstance(weight, Tensor) and weight.layout is not torch.strided:
        compose("linear_act", f"the kernels cover dense weights, not {weight.layout}")
        return eager.act(torch.nn.functional.linear(x, weight, bias), activation)
    check_weight("linear_act", "weight", weight, bias, x, x.shape[-1], "input")
    x = cast_input("linear_act", x, weight)
    impl = choose_impl("linear_act", x, weight.shape[1], 0, weight.shape[0])
    options = LinearActOptions(
        activation=activation, recompute=choose_mode(recompute), backend=impl, precision=matmul_precision(x)
    )
    return _apply(options, x, weight, bias)
