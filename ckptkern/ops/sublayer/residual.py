"""What the two sublayers of a transformer layer share: what is around the branch f, in forward and backward.

z = drop_path(layer_scale * post_norm(dropout(f(norm(x)))));  y = [x +] z, or norm([x +] z) for f(x)
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import eager
from ...errors import ShapeError
from ..dispatch.checks import check_choice, check_flags, check_number, check_probability, check_tensor
from ..dispatch.choices import primitives
from ..registration.gradients import token_chunks
from ..registration.rows import cast_parameter, rows_2d
from .dropout import draw_state, dropout_arguments
from .lora import drops

NORMS = ("layer", "rms")
AFTER_BRANCH = frozenset(("post_norm_weight", "post_norm_bias", "layer_scale"))
NORM_TENSORS = 6  # like its input, in float32, that a norm's backward in PyTorch ops holds
LAST = frozenset(("norm_weight", "norm_bias"))  # of a trailing norm


def drawn(t, o, x: Tensor, training: bool):
    """t with its random states filled in. They are drawn last, so that an error leaves the generator alone."""
    drops_of = {"lora_rng": drops(o), "rng": o.dropout_p, "resid_rng": o.resid_p, "path_rng": o.path_p}
    if not training or not any(drops_of.values()):
        return t
    drawn_by = {name: draw_state(x, p, training) for name, p in drops_of.items() if name in t._fields}
    return t._replace(**drawn_by)


def sample_shape(x: Tensor) -> tuple[int, ...]:
    """[B, 1, ...]: one value for each sample of x [B, ..., d]. Without a batch dimension x is one sample."""
    return (x.shape[0] if x.dim() > 2 else 1, *(1,) * (x.dim() - 1))


class Sublayer:
    """What a sublayer computes around its branch, for one input x [..., d]. t: its tensors, o: its options.

    shares: caches each parameter's copy in the compute dtype until its `last` use, as a backward asks for. first_row,
    is_part: of a chunk of x's rows, whose gradients of parameters are added to those of others.
    """

    first_row, is_part = 0, False

    def __init__(self, x: Tensor, t: Any, o: Any, *, shares: bool = False):
        self.shares, self.copies = shares, {}
        self.p, self.x, self.t, self.o = primitives(o.backend), rows_2d(x), t, o
        self.lead, self.samples = x.shape[:-1], sample_shape(x)
        self.leading = bool(o.norm) and o.norm_first
        self.trailing = bool(o.norm) and not o.norm_first

    def rows(self, start: int, stop: int):
        """What it computes for some rows of x."""
        if (start, stop) == (0, self.x.shape[0]):
            return self
        part = copy.copy(self)
        part.x, part.first_row, part.is_part = self.x[start:stop], start, True
        return part

    def cast(self, parameter: Tensor | None, dtype: torch.dtype | None = None, *, last: bool = True) -> Tensor | None:
        """The parameter in a dtype, by default the compute dtype. last: no matmul after this one reads it."""
        key = id(parameter), dtype or self.o.dtype
        _, copy = self.copies.pop(key, (None, None))
        copy = cast_parameter(parameter, key[1]) if copy is None else copy
        if self.shares and not last and copy is not parameter:
            self.copies[key] = parameter, copy  # held too: another tensor may get the id of one that is gone
        return copy

    def casting(self, *, last: bool) -> Callable[[Tensor | None, torch.dtype], Tensor | None]:
        """`cast` in place of `cast_parameter`, for the op of a branch."""
        return functools.partial(self.cast, last=last)

    def dtype_of(self, name: str, need: Collection[str]) -> torch.dtype | bool:
        """Of a gradient: its parameter's; True for a part, which is not rounded; False where it is not needed."""
        return name in need and (self.is_part or getattr(self.t, name).dtype)

    def norm_chunks(self, x: Tensor) -> list[tuple[int, int]]:
        """[start, stop) of the rows that a norm takes at once: kernels have nothing transient, PyTorch ops have.

        Most of the workspace is for what is alive beside them.
        """
        if self.o.backend != "eager" or self.o.workspace is None:
            return [(0, x.shape[0])]
        return token_chunks(x.shape[0], NORM_TENSORS * x.shape[1] * max(x.element_size(), 4), self.o.workspace // 4)

    def norm_fwd(self, x: Tensor, weight, bias, eps: float, kind: str, dtype: torch.dtype) -> Tensor:
        chunks = self.norm_chunks(x)
        if len(chunks) == 1:
            return self.p.norm_fwd(x, weight, bias, eps, kind, dtype)
        y = x.new_empty(x.shape, dtype=dtype)
        for start, stop in chunks:
            y[start:stop] = self.p.norm_fwd(x[start:stop], weight, bias, eps, kind, dtype)
        return y

    def norm_bwd(
        self, dy: Tensor, x: Tensor, weight, eps: float, kind: str, *, residual: Tensor | None = None, overwrites: bool = False,
        **needs: bool | torch.dtype,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """overwrites: may dx be written over dy?"""
        chunks = self.norm_chunks(x)
        if len(chunks) == 1:
            return self.p.norm_bwd(dy, x, weight, eps, kind, residual=residual, **needs)
        dx = dy if overwrites and dy.dtype == x.dtype else x.new_empty(x.shape)
        sums: list[Tensor | None] = [None, None]
        needs = {which: bool(dtype) for which, dtype in needs.items()}  # rounded once, in `finished`
        for start, stop in chunks:
            rows = slice(start, stop)
            before = None if residual is None else residual[rows]
            dx[rows], *made = self.p.norm_bwd(dy[rows], x[rows], weight, eps, kind, residual=before, **needs)
            sums = [one if total is None else total.add_(one) for total, one in zip(sums, made, strict=True)]
        return dx, *sums

    def norm(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.norm_fwd(x, self.t.norm_weight, self.t.norm_bias, self.o.norm_eps, self.o.norm, dtype)

    def inputs(self) -> Tensor:
        """What the branch reads: norm(x), or x."""
        return self.input_rows(self.x)

    def input_rows(self, x: Tensor) -> Tensor:
        """What the branch reads for some rows of x."""
        return self.norm(x, self.o.dtype) if self.leading else x.to(self.o.dtype)

    def drop(self, f: Tensor) -> Tensor:
        """Residual dropout, forward and backward."""
        if self.t.resid_rng is None:
            return f
        return self.p.dropout(f, *dropout_arguments(self.t.resid_rng, self.o.resid_p), row_base=self.first_row)

    def post_normed(self, f: Tensor) -> Tensor:
        """What the branch's result f, dropout done, becomes before it is added to x."""
        t, o = self.t, self.o
        if not o.post_norm:
            return f
        dtype = output_dtype(self.x, o)
        return self.norm_fwd(f, t.post_norm_weight, t.post_norm_bias, o.post_norm_eps, o.post_norm, dtype)

    def scaled(self, z: Tensor) -> Tensor:
        """layer_scale * z."""
        z = z.to(output_dtype(self.x, self.o))
        z = z if self.o.branch_factor == 1.0 else z * self.o.branch_factor
        return z if self.t.layer_scale is None else z * cast_parameter(self.t.layer_scale, z.dtype)

    def drop_path(self, z: Tensor) -> Tensor:
        """Whole samples of z [tokens, e] dropped, forward and backward: dropout of one value for each sample."""
        if self.t.path_rng is None:
            return z
        state, threshold, scale, _ = dropout_arguments(self.t.path_rng, self.o.path_p)
        saved = self.p.dropout(z.new_ones((self.samples[0], 1)), state, threshold, 1.0).view(self.samples) != 0
        if self.is_part:
            rows = torch.arange(self.first_row, self.first_row + z.shape[0], device=z.device)
            return torch.where(saved.view(-1)[rows // (math.prod(self.lead) // self.samples[0])][:, None], z * scale, 0)
        return torch.where(saved, z.reshape(*self.lead, z.shape[-1]) * scale, 0).view(z.shape)

    def total(self, f: Tensor) -> Tensor:
        """The sublayer's output before a trailing norm, from the branch's result f."""
        z = self.drop_path(self.scaled(self.post_normed(f)))
        return self.x + z if self.o.residual else z

    def output(self, f: Tensor) -> Tensor:
        """The sublayer's output from the branch's result f."""
        y = self.total(f)
        return self.norm(y, y.dtype) if self.trailing else y

    def norm_gradients(
        self, dy: Tensor, read: Tensor, need: Collection[str], residual: Tensor | None = None, overwrites: bool = False
    ):
        """Gradients of `read`, the norm's input, of norm_weight and of norm_bias."""
        return self.norm_bwd(
            dy, read, self.t.norm_weight, self.o.norm_eps, self.o.norm, residual=residual, overwrites=overwrites,
            need_dweight=self.dtype_of("norm_weight", need), need_dbias=self.dtype_of("norm_bias", need),
        )  # fmt: skip

    def branch_gradients(self, dy: Tensor, f: Tensor | None, need: Collection[str]) -> tuple[Tensor, Tensor, dict]:
        """(gradient of x + z, that of the branch's last matmul in its dtype, those of the parameters between) from dy.

        f: the branch's result, where `reads_branch` asks for it.
        """
        o, grads = self.o, {}
        if self.trailing:
            dy, grads["norm_weight"], grads["norm_bias"] = self.norm_gradients(dy, self.total(f), need)
        df = self.drop_path(dy)
        if "layer_scale" in need:
            grads["layer_scale"] = eager.column_sum(df * self.post_normed(f), self.dtype_of("layer_scale", need))
        df = self.scaled(df)
        if o.post_norm:
            df, grads["post_norm_weight"], grads["post_norm_bias"] = self.norm_bwd(
                df, f, self.t.post_norm_weight, o.post_norm_eps, o.post_norm,
                need_dweight=self.dtype_of("post_norm_weight", need), need_dbias=self.dtype_of("post_norm_bias", need),
            )  # fmt: skip
        return dy, self.drop(df.to(o.dtype)), grads

    def needs_dh(self, need: Collection[str]) -> bool:
        """Does anything need the gradient of what the branch reads?"""
        return "x" in need or (not self.trailing and ("norm_weight" in need or "norm_bias" in need))

    def input_gradients(self, dh: Tensor, dy: Tensor, need: Collection[str]) -> dict[str, Tensor | None]:
        """Of x [tokens, d], and of a leading norm's parameters, from the gradient dh of what the branch reads, which may be
        overwritten."""
        residual = dy if self.o.residual else None
        if self.leading:
            made = self.norm_gradients(dh, self.x, need, residual, overwrites=True)
            return dict(zip(("x", "norm_weight", "norm_bias"), made, strict=True))
        return {"x": dh if residual is None else dh + residual}

    def finished(self, grads: dict[str, Tensor | None], need: Collection[str]) -> dict[str, Tensor | None]:
        """The gradients in the dtypes of their parameters, that of x in x's shape."""
        for name, grad in grads.items():
            if grad is not None and name != "x":
                grads[name] = grad.to(getattr(self.t, name).dtype)
        if "x" in need:
            grads["x"] = grads["x"].to(self.x.dtype).view(*self.lead, self.x.shape[1])
        return grads


def output_dtype(x: Tensor, o: Any) -> torch.dtype:
    return torch.promote_types(x.dtype, o.dtype) if o.residual else o.dtype


def has_trailing_norm(o: Any) -> bool:
    return bool(o.norm) and not o.norm_first


def after_branch(o: Any) -> frozenset[str]:
    """The sublayer's parameters that lie after its branch's last matmul."""
    return AFTER_BRANCH | LAST if has_trailing_norm(o) else AFTER_BRANCH


def reads_branch(o: Any, need: Collection[str]) -> bool:
    """Does backward read the branch's result, which no mode saves?"""
    return has_trailing_norm(o) or bool(o.post_norm) or "layer_scale" in need


def reference_norm(x: Tensor, kind: str, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """A norm in differentiable PyTorch ops."""
    weight = cast_parameter(weight, x.dtype)
    if kind == "layer":
        # the bias is added apart: without a weight, torch's second derivative of layer_norm with a bias is None
        y = F.layer_norm(x, x.shape[-1:], weight, None, eps)
    else:
        y = F.rms_norm(x, x.shape[-1:], weight, eps)
    return y if bias is None else y + cast_parameter(bias, x.dtype)


def reference_inputs(x: Tensor, t: Any, o: Any) -> Tensor:
    """What the branch reads, in differentiable PyTorch ops."""
    leading = o.norm and o.norm_first
    return (reference_norm(x, o.norm, t.norm_weight, t.norm_bias, o.norm_eps) if leading else x).to(o.dtype)


def reference_output(x: Tensor, f: Tensor, t: Any, o: Any) -> Tensor:
    """The sublayer's output from its branch's last matmul f, in differentiable PyTorch ops."""
    z = eager.reference_dropout(f, dropout_arguments(t.resid_rng, o.resid_p)).to(output_dtype(x, o))
    if o.post_norm:
        z = reference_norm(z, o.post_norm, t.post_norm_weight, t.post_norm_bias, o.post_norm_eps)
    z = z if o.branch_factor == 1.0 else z * o.branch_factor
    z = z if t.layer_scale is None else z * cast_parameter(t.layer_scale, z.dtype)
    if t.path_rng is not None:
        samples = sample_shape(x)
        ones = eager.reference_dropout(z.new_ones((samples[0], 1)), dropout_arguments(t.path_rng, o.path_p))
        z = z * ones.view(samples)
    y = x + z if o.residual else z
    return reference_norm(y, o.norm, t.norm_weight, t.norm_bias, o.norm_eps) if has_trailing_norm(o) else y


def check_norm(op: str, x: Tensor, name: str, kind: str | None, weight, bias, features: int) -> None:
    """`kind`, `weight` and `bias` are those of the norm that the arguments call `name`."""
    if kind is None:
        if weight is not None or bias is not None:
            raise ValueError(f"{op}: {name}_weight and {name}_bias need {name}='layer' or 'rms'")
        return
    check_choice(op, name, kind, (*NORMS, None))
    for parameter_name, parameter in ((f"{name}_weight", weight), (f"{name}_bias", bias)):
        if parameter is None:
            continue
        check_tensor(op, parameter_name, parameter, x)
        if parameter.shape != (features,):
            raise ShapeError(f"{op}: {parameter_name} must have shape ({features},), but has {tuple(parameter.shape)}")


def check_layer_scale(op: str, x: Tensor, layer_scale, features: int) -> tuple[float, Tensor | None]:
    """(the number, the vector) that the branch is multiplied by."""
    if layer_scale is None:
        return 1.0, None
    if not isinstance(layer_scale, Tensor):
        check_number(op, "layer_scale", layer_scale)
        return float(layer_scale), None
    check_tensor(op, "layer_scale", layer_scale, x)
    if layer_scale.shape != (features,):
        raise ShapeError(
            f"{op}: layer_scale must be a number or have shape ({features},), but has {tuple(layer_scale.shape)}"
        )
    return 1.0, layer_scale


def around(
    op, x, features, *, residual, norm=None, norm_weight=None, norm_bias=None, norm_eps=1e-5, norm_first=True,
    post_norm=None, post_norm_weight=None, post_norm_bias=None, post_norm_eps=1e-5, resid_dropout_p=0.0, layer_scale=None,
    drop_path_p=0.0,
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Checks a sublayer's arguments around its branch, whose result has `features`; returns them as tensors and options."""
    check_probability(op, resid_dropout_p)
    check_probability(op, drop_path_p)
    check_flags(op, norm_first=norm_first, residual=residual)
    check_norm(op, x, "norm", norm, norm_weight, norm_bias, x.shape[-1] if norm_first else features)
    check_norm(op, x, "post_norm", post_norm, post_norm_weight, post_norm_bias, features)
    check_number(op, "norm_eps", norm_eps)
    check_number(op, "post_norm_eps", post_norm_eps)
    branch_factor, layer_scale = check_layer_scale(op, x, layer_scale, features)
    tensors = dict(
        norm_weight=norm_weight, norm_bias=norm_bias, post_norm_weight=post_norm_weight, post_norm_bias=post_norm_bias,
        layer_scale=layer_scale,
    )  # fmt: skip
    options = dict(
        norm=norm or "", norm_eps=float(norm_eps), norm_first=norm_first, post_norm=post_norm or "",
        post_norm_eps=float(post_norm_eps), branch_factor=branch_factor, resid_p=float(resid_dropout_p),
        path_p=float(drop_path_p), residual=residual,
    )  # fmt: skip
    return tensors, options
