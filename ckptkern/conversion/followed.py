"""What in a trace follows the input's sizes and dtype, so that no example's value is taken for a constant."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from .arguments import named
from .calls import Form
from .check import in_float64
from .computed import Followed, following
from .reading import Reading
from .trace import Trace, leaves_of, trace


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def followed(form: Form, reading: Reading, traced: Trace, args: tuple, kwargs: dict[str, Any]) -> Followed | None:
    """What in a trace follows the input: in float64, and with twice as many samples if the module takes them, it is another.
    None if no such trace is alike."""
    flat = [value.double() if is_floating(value) else value for value in leaves_of(form.counting(args, kwargs))]
    x = flat[reading.x]
    inputs = {reading.x, *(one.index for one in named(reading.arguments, "key_value"))}
    for more in [*(samples(flat, x, inputs) if x.dim() > 2 else ()), set()]:
        given = [torch.cat((value, value)) if i in more else value for i, value in enumerate(flat)]
        with (
            contextlib.suppress(Exception),
            in_float64(form.module),
        ):  # sizes, or a dtype, that the module does not take
            calls = trace(form.module, *form.call_of(given, args, kwargs), given).calls
            found = following(traced.calls, calls, len(x) if more else 1, 2 if more else 1)
            if found is not None:
                return found
    return None


def samples(flat: list[Any], x: Tensor, inputs: set[int]) -> list[set[int]]:
    """Which arguments may have a sample's rows, beside the inputs: none, or all of the batch's size."""
    found = {i for i, value in enumerate(flat) if isinstance(value, Tensor) and value.dim() and len(value) == len(x)}
    return [inputs, found] if found - inputs else [inputs]
