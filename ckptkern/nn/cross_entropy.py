"""The LM head and its loss: the last linear layer and the cross-entropy of its logits, which are never stored."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _WeightedLoss
from torch.types import Device

from .. import eager, ops
from ..errors import ShapeError
from ..ops.cross_entropy.loss import REDUCTIONS, CrossEntropyOutput, check_scalars, check_top_k, reduced
from ..ops.cross_entropy.statistics import results_of_logits, scaled_and_capped
from ..ops.dispatch.choices import Bytes, check_choice, check_flags
from .layer import Layer
from .unmodified import composed, unmodified

NAME = "LinearCrossEntropyLoss"
TORCH_CLASS = getattr(torch.nn, NAME, None)  # torch has one from 2.13 on
RETURNED = ("lse", "log_probs", "entropy", "accuracy")  # with return_
OWN = {
    "logit_scale": 1.0,
    "softcap": None,
    "z_loss": 0.0,
    **{f"return_{name}": False for name in RETURNED},
    "top_k": None,
}
TORCHS = ("reduction", "ignore_index", "label_smoothing")


class LinearCrossEntropyLoss(Layer, TORCH_CLASS or _WeightedLoss):
    """Replaces torch.nn.LinearCrossEntropyLoss: the cross-entropy of logits = linear(input), without logits in memory.

    input [..., in_features]; target int64 [...] of classes, or floating-point probabilities [..., num_classes];
    the loss is float32.
    Parameters: linear.weight [num_classes, in_features], linear.bias [num_classes].

    out_features: as in torch; logits are then computed whole. options: must be None; `workspace` replaces torch's chunking.
    linear_weight: a Parameter that becomes linear.weight, such as a tied embedding.

    See ckptkern.linear_cross_entropy for the other options. With return_lse ... top_k, forward returns a NamedTuple.
    """

    torch_class = TORCH_CLASS
    shown = ("num_classes", "out_features", *TORCHS, *OWN, "recompute", "workspace")

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: None = None,
        linear_weight: nn.Parameter | None = None,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        return_lse: bool = False,
        return_log_probs: bool = False,
        return_entropy: bool = False,
        return_accuracy: bool = False,
        top_k: int | None = None,
        recompute: str = "full",
        workspace: Bytes = None,
    ):
        _WeightedLoss.__init__(self, weight, None, None, reduction)
        if options is not None:
            raise ValueError(
                f"{NAME}: options configure torch's chunking; pass workspace instead, or use torch's module"
            )
        if weight is not None and tuple(weight.shape) != (num_classes,):
            raise ShapeError(f"{NAME}: weight must have shape ({num_classes},), but has {tuple(weight.shape)}")
        check_choice(NAME, "reduction", reduction, REDUCTIONS)
        rows = math.prod(out_features, start=num_classes)
        self.num_classes, self.out_features = num_classes, tuple(out_features)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        if linear_weight is None:
            self.linear = nn.Linear(in_features, rows, bias, device, dtype)
        else:  # another module's weight, so that none is allocated
            shape = rows, in_features
            if not isinstance(linear_weight, nn.Parameter) or tuple(linear_weight.shape) != shape:
                came = tuple(linear_weight.shape) if isinstance(linear_weight, Tensor) else type(linear_weight).__name__
                raise ShapeError(f"{NAME}: linear_weight must be a Parameter of shape {shape}, not {came}")
            self.linear = nn.Linear(in_features, rows, bias=False, device="meta")
            self.linear.weight = linear_weight
            if bias:
                bound = in_features**-0.5 if in_features else 0.0
                values = linear_weight.new_empty(rows).uniform_(-bound, bound)
                self.linear.bias = nn.Parameter(values)
        self.set_options(
            recompute,
            workspace,
            logit_scale=logit_scale,
            softcap=softcap,
            z_loss=z_loss,
            return_lse=return_lse,
            return_log_probs=return_log_probs,
            return_entropy=return_entropy,
            return_accuracy=return_accuracy,
            top_k=top_k,
        )

    def set_options(self, recompute: str = "full", workspace: Bytes = None, **own: Any) -> None:
        if unknown := own.keys() - OWN:
            raise TypeError(f"{NAME}: unknown options: {', '.join(sorted(unknown))}")
        own = OWN | own
        check_scalars(self.label_smoothing, own["logit_scale"], own["softcap"], own["z_loss"])
        check_flags(NAME, **{name: own[name] for name in OWN if name.startswith("return_")})
        if own["top_k"] is not None:
            check_top_k(own["top_k"], self.num_classes)
        super().set_options(recompute, workspace, **own, options=None)

    def forward(self, input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        if self.out_features or not unmodified(nn.Linear, self.linear):
            return composed(self._composed, input, target)
        options = {name: getattr(self, name) for name in (*TORCHS, *OWN)}
        weight, bias = self.linear.weight, self.linear.bias
        return ops.linear_cross_entropy(
            input, weight, target, linear_bias=bias, weight=self.weight, **options, **self.modes
        )

    def _composed(self, input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        z = self.linear(input)
        if self.out_features:
            z = z.view(-1, self.num_classes, *self.out_features).movedim(1, -1)
            target = target.movedim(1, -1) if target.is_floating_point() else target
        z = scaled_and_capped(z.to(eager.wide_of(z.dtype)), self.logit_scale, self.softcap or 0.0)
        ignored = -100 if self.ignore_index is None else self.ignore_index
        returned = [name for name in RETURNED if getattr(self, f"return_{name}")]
        beside = {"lse_squared": True, "arg_max": self.return_accuracy, "top_k": self.top_k}
        names = ("loss", *returned, *(name for name, wanted in beside.items() if wanted))
        results = results_of_logits(z, target, self.weight, ignored, self.label_smoothing, names, self.top_k or 0)
        is_alone = not (returned or self.top_k)
        return reduced(results, target, self.weight, self.reduction, ignored, self.z_loss, is_alone)
