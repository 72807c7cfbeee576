"""Tensor subclasses as other libraries have them."""

import torch
from torch import Tensor
from torch.nn import functional as F


class Int8Weight(Tensor):
    """A weight [n, k] of int8 with a scale for each row. Like torchao's, it supports F.linear only."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor):
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data: Tensor, scale: Tensor):
        self.int_data, self.scale = data, scale

    @classmethod
    def of(cls, weight: Tensor):
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self):
        return ["int_data", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["int_data"], parts["scale"])

    def dense(self) -> Tensor:
        return self.int_data.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            x, weight, *rest = args
            return F.linear(x, weight.dense(), *rest, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.detach.default:
            return cls(args[0].int_data, args[0].scale)
        raise NotImplementedError(f"Int8Weight knows no {op}")


class Named(Tensor):
    """A subclass that changes nothing."""


class Logged(Tensor):
    """A subclass with a __torch_function__ only, as torchvision's: results are plain tensors."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            y = function(*args, **(kwargs or {}))
        return y.as_subclass(Tensor) if isinstance(y, Tensor) else y
