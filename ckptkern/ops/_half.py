"""What the two halves of a transformer layer share: [norm ->] branch [-> dropout] [-> + x] [-> norm]."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ShapeError
from ._checks import check_choice, check_tensor
from ._choices import primitives
from ._rows import cast_parameter, rows_2d
from .dropout import draw_state, dropout_arguments

NORMS = ("layer", "rms")


def drawn(t, o, x: Tensor, training: bool):
    """t with its random states filled in. They are drawn last, so that an error leaves the generator alone."""
    if not training or o.dropout_p == o.resid_p == 0.0:
        return t
    return t._replace(rng=draw_state(x, o.dropout_p, training), resid_rng=draw_state(x, o.resid_p, training))


class Half:
    """What a half computes around its branch, for one input x [..., d]. t: its tensors, o: its options."""

    def __init__(self, x: Tensor, t: Any, o: Any):
        self.p, self.x, self.t, self.o = primitives(o.backend), rows_2d(x), t, o
        self.leading = bool(o.norm) and o.norm_first
        self.trailing = bool(o.norm) and not o.norm_first

    def cast(self, parameter: Tensor | None) -> Tensor | None:
        return cast_parameter(parameter, self.o.dtype)

    def norm(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.p.norm_fwd(x, self.t.norm_weight, self.t.norm_bias, self.o.norm_eps, self.o.norm, dtype)

    def inputs(self) -> Tensor:
        """What the branch reads: norm(x), or x."""
        return self.norm(self.x, self.o.dtype) if self.leading else self.x.to(self.o.dtype)

    def drop(self, f: Tensor) -> Tensor:
        """Residual dropout, forward and backward."""
        if self.t.resid_rng is None:
            return f
        return self.p.dropout(f, *dropout_arguments(self.t.resid_rng, self.o.resid_p))

    def total(self, f: Tensor) -> Tensor:
        """The half's output before a trailing norm."""
        return self.x + f if self.o.residual else f

    def normed(self, y: Tensor) -> Tensor:
        """The half's output from what is before a trailing norm."""
        return self.norm(y, y.dtype) if self.trailing else y

    def norm_gradients(self, dy: Tensor, read: Tensor, need: Collection[str], residual: Tensor | None = None):
        """Gradients of `read`, the norm's input, of norm_weight and of norm_bias."""
        return self.p.norm_bwd(
            dy, read, self.t.norm_weight, self.o.norm_eps, self.o.norm, residual=residual,
            need_dweight="norm_weight" in need, need_dbias="norm_bias" in need,
        )  # fmt: skip

    def needs_dh(self, need: Collection[str]) -> bool:
        """Does anything need the gradient of what the branch reads?"""
        return "x" in need or (not self.trailing and ("norm_weight" in need or "norm_bias" in need))

    def input_gradients(self, dh: Tensor, dy: Tensor, need: Collection[str]) -> dict[str, Tensor | None]:
        """Of x [tokens, d], and of a leading norm's parameters, from the gradient dh of what the branch reads."""
        residual = dy if self.o.residual else None
        if self.leading:
            return dict(
                zip(("x", "norm_weight", "norm_bias"), self.norm_gradients(dh, self.x, need, residual), strict=True)
            )
        return {"x": dh if residual is None else dh + residual}

    def finished(self, grads: dict[str, Tensor | None], x: Tensor, need: Collection[str]) -> dict[str, Tensor | None]:
        """The gradients in the dtypes of their parameters, that of x in x's shape."""
        for name, grad in grads.items():
            if grad is not None and name != "x":
                grads[name] = grad.to(getattr(self.t, name).dtype)
        if "x" in need:
            grads["x"] = grads["x"].to(x.dtype).view(x.shape)
        return grads


def output_dtype(x: Tensor, o: Any) -> torch.dtype:
    return torch.promote_types(x.dtype, o.dtype) if o.residual else o.dtype


def composite_norm(x: Tensor, t: Any, o: Any) -> Tensor:
    """The half's norm in differentiable PyTorch ops."""
    if o.norm == "layer":
        # the bias is added apart: without a weight, torch's second derivative of layer_norm with a bias is None
        y = F.layer_norm(x, x.shape[-1:], cast_parameter(t.norm_weight, x.dtype), None, o.norm_eps)
    else:
        y = F.rms_norm(x, x.shape[-1:], cast_parameter(t.norm_weight, x.dtype), o.norm_eps)
    return y if t.norm_bias is None else y + cast_parameter(t.norm_bias, x.dtype)


def check_norm(op: str, x: Tensor, norm: str | None, weight, bias, features: int) -> None:
    if norm is None:
        if weight is not None or bias is not None:
            raise ValueError(f"{op}: norm_weight and norm_bias need norm='layer' or 'rms'")
        return
    check_choice(op, "norm", norm, (*NORMS, None))
    for name, parameter in (("norm_weight", weight), ("norm_bias", bias)):
        if parameter is None:
            continue
        check_tensor(op, name, parameter, x)
        if parameter.shape != (features,):
            raise ShapeError(f"{op}: {name} must have shape ({features},), but has {tuple(parameter.shape)}")
