"""What callers get wrong: one function for each kind of argument, whose message says what was wanted and what came."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ... import eager
from ...errors import DeviceError, DtypeError, LayoutError, ShapeError
from ...state import layer_fits

ACTIVATIONS = tuple(eager.ACTIVATIONS)  # every name that an `activation` may be
MODES = ("none", "selective", "full")


def check_choice(op: str, what: str, value, choices) -> None:
    if value not in choices:
        raise ValueError(f"{op}: {what} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def check_mode(op: str, recompute: str) -> None:
    check_choice(op, "recompute", recompute, MODES)


def modes_of_sublayers(op: str, recompute: str | tuple[str, str]) -> tuple[str, str]:
    """Returns the modes of a layer's attentions and of its MLP, from one for both ("selective" recomputes all of the MLP) or a
    pair."""
    if isinstance(recompute, (tuple, list)) and len(recompute) == 2:
        attention, mlp = recompute
    else:
        attention, mlp = recompute, "full" if recompute == "selective" else recompute
    for mode in (attention, mlp):
        check_mode(op, mode)
    return attention, mlp


def check_options(op: str, activation: str, recompute: str, dropout_p: float = 0.0) -> None:
    if activation not in ACTIVATIONS or recompute not in MODES:
        check_choice(op, "activation", activation, ACTIVATIONS)
        check_mode(op, recompute)
    if type(dropout_p) is not float or not 0.0 <= dropout_p <= 1.0:
        check_probability(op, dropout_p)


def check_probability(op: str, p: float) -> None:
    if (type(p) is not float and (isinstance(p, Tensor) or not is_number(p))) or not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: dropout probability has to be a number between 0 and 1, but got {p!r}")


def is_number(value) -> bool:
    """Says whether it is one value: a number, a tensor or an array of no dimensions, or a symbolic number of torch.compile."""
    if isinstance(value, Tensor):
        return value.dim() == 0
    # isinstance first: to torch.compile a symbolic number is a float, and has no attribute
    return isinstance(value, (int, float)) or (hasattr(value, "__float__") and not getattr(value, "shape", ()))


def check_number(op: str, name: str, value) -> None:
    """Checks for a number without float(), which would turn a symbolic number of torch.compile into a constant."""
    if type(value) is float:
        return
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: no gradient is formed for {name}")
    if not is_number(value) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a number, not {value!r}")


def check_positive(op: str, name: str, value) -> None:
    check_number(op, name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{op}: {name} must be above 0 and finite, not {value!r}")


def check_softcap(op: str, softcap: float | None, name: str = "softcap") -> float:
    """Returns softcap, 0 for none."""
    if softcap is None:
        return 0.0
    check_positive(op, name, softcap)
    return float(softcap)


def check_count(op: str, name: str, value, least: int = 1) -> None:
    if type(value) is int and value >= least:
        return
    if (
        isinstance(value, (bool, Tensor))
        or not (isinstance(value, int) or hasattr(value, "__index__"))
        or value < least
    ):
        raise ValueError(f"{op}: {name} must be an integer of at least {least}, not {value!r}")


def check_flags(op: str, **flags: bool) -> None:
    """Catches an argument in the wrong place, which would go unnoticed because most objects are true."""
    for name, value in flags.items():
        if type(value) is not bool:
            raise TypeError(f"{op}: {name} must be a bool, not {value!r}")


def check_input(op: str, x: Tensor, name: str = "input", *, jagged: bool = False) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, not {type(x).__name__}")
    if not x.is_floating_point():
        raise DtypeError(f"{op}: {name} must be floating point, not {x.dtype}")
    if x.dim() == 0:
        raise ShapeError(f"{op}: {name} must have at least one dimension, (..., in_features), but is a scalar")
    layout = x.layout
    if (layout is not torch.strided or x.is_nested) and not (jagged and layout is torch.jagged):
        raise LayoutError(f"{op}: {name} must be a dense tensor, not {'nested' if x.is_nested else x.layout}")


def check_weight(
    op: str, name: str, weight: Tensor, bias: Tensor | None, x: Tensor, in_features: int, source: str
) -> None:
    """Checks that `weight` [N, in_features] and `bias` [N] fit an input with `in_features` features, of `source`."""
    if not torch.compiler.is_compiling() and layer_fits(x, weight, bias, in_features):
        return
    check_tensor(op, name, weight, x)
    shape = weight.shape
    if len(shape) != 2:
        raise ShapeError(f"{op}: {name} must be [out_features, in_features], but has shape {tuple(shape)}")
    if shape[1] != in_features:
        hint = f"; {name} must be [out_features, in_features], as in nn.Linear, but is {tuple(shape)}: pass {name}.t()"
        raise ShapeError(
            f"{op}: {source} has {in_features} features but {name} has in_features={shape[1]}"
            + (hint if shape[0] == in_features else "")
        )
    if bias is None:
        return
    check_tensor(op, f"the bias of {name}", bias, x)
    if bias.dim() != 1 or bias.shape[0] != shape[0]:
        raise ShapeError(
            f"{op}: the bias of {name} must have shape ({shape[0]},), one value for each of its out_features, but has "
            f"shape {tuple(bias.shape)}"
        )


def check_tensor(op: str, name: str, tensor: Tensor, x: Tensor, *, floating: bool = True) -> None:
    """Checks that `tensor` is a dense Tensor on the device of the input x, and floating point if `floating`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, not {type(tensor).__name__}")
    if tensor.device != x.device:
        raise DeviceError(f"{op}: input is on {x.device} but {name} is on {tensor.device}")
    if tensor.layout is not torch.strided:
        raise LayoutError(f"{op}: {name} must be a dense tensor, not {tensor.layout}")
    if floating and tensor.dtype != x.dtype and not tensor.is_floating_point():
        raise DtypeError(f"{op}: {name} must be floating point, not {tensor.dtype}")
