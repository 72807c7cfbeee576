"""What a case needs, in bytes and in seconds, before any of it is run: its eager model is counted on meta tensors."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from .. import memory
from .cases import DTYPES, Item
from .measure import CPU_BATCH, ENOUGH

MATMUL = {"cpu": 512, "cuda": 4096}  # size of the matmul whose rate stands for the device's
CHECKS = 5  # steps of a variant before it is timed: its check, its bytes, its warm-up
COMPILE_SECONDS = {"cpu": 10.0, "cuda": 15.0}  # of torch.compile, forward and backward, of a layer


class Forecast(NamedTuple):
    """bytes: of the model and its float64 reference, at least. step_seconds: of eager. seconds: of all variants, checked and
    timed. reference_bytes, reference_seconds: of these, the float64 reference's."""

    bytes: int
    step_seconds: float
    seconds: float
    reference_bytes: int = 0
    reference_seconds: float = 0.0


class Rates:
    """FLOP/s of a matmul on the device in each dtype, measured when it is first asked for: an upper bound for a model's."""

    def __init__(self, device: torch.device):
        self.device, self.known = device, {}

    def __call__(self, dtype: torch.dtype) -> float:
        if dtype not in self.known:
            n = MATMUL[self.device.type]
            a = torch.randn(n, n, device=self.device, dtype=dtype)
            seconds = []
            for _ in range(4):
                begin = time.perf_counter()
                torch.mm(a, a)
                if a.is_cuda:
                    torch.cuda.synchronize(self.device)
                seconds.append(time.perf_counter() - begin)
            self.known[dtype] = 2 * n**3 / min(seconds)
        return self.known[dtype]


def counted(item: Item, dtype: torch.dtype) -> tuple[int, int, int]:
    """(bytes, those of the reference alone, FLOPs of eager's forward and backward): weights and gradients in dtype and float64,
    what the reference saves, and its input and output with their gradients. Raises what the model raises on meta tensors."""
    if item.case.given is None:
        rows = item.size.length or 1
        times = item.size.rows // rows
        with torch.device("meta"):
            model = item.case.model(item.size.width).double().eval()
            x = torch.empty(item.size._replace(rows=rows).shape, dtype=torch.float64, requires_grad=True)
    else:
        model, x = item.case.given(torch.device("meta"), torch.float64)
        model, times = model.eval(), 1
    with FlopCounterMode(display=False) as flops, memory.saved_tensors(model) as saved:
        y = model(x)
    weights = sum(p.numel() for p in model.parameters())
    with_gradients = 2 * (weights + times * (x.numel() + y.numel()))
    reference = 8 * with_gradients + times * saved.bytes
    return reference + dtype.itemsize * with_gradients, reference, 3 * times * flops.get_total_flops()


def forecast(item: Item, rates: Rates, variants: int, rounds: int, limit: float, compiled: int = 0) -> Forecast:
    """What this many variants of a case need, so many of them compiled; limit: seconds in which their rounds end, if they are
    ENOUGH.

    Of time only matmuls count, at the rate of a large one, and causal attention as if all tokens saw each other. Raises
    ValueError for sizes beyond what torch can count, and what a user's model raises on meta tensors.
    """
    kind = rates.device.type
    dtype = item.case.dtype or DTYPES[kind]
    try:
        held, reference, flops = counted(item, dtype)
    except RuntimeError as error:
        if item.case.given is not None:
            raise
        raise ValueError(f"{item.name}: cannot allocate these tensors: {str(error).splitlines()[0]}") from error
    step = flops / rates(dtype)
    a_round = variants * step * (CPU_BATCH if kind == "cpu" else 1)
    timing = max(min(rounds, ENOUGH) * a_round, min(rounds * a_round, limit))
    exact = flops / rates(torch.float64)
    seconds = exact + variants * CHECKS * step + timing + compiled * COMPILE_SECONDS[kind]
    return Forecast(held, step, seconds, reference, exact)


def without_reference(item: Item, needed: Forecast, device: torch.device, seconds: float) -> str | None:
    """Why the case is to be checked against eager and not against float64; None if float64 fits memory and time."""
    free = memory.free_memory(device)
    if item.case.exact is not None:
        return None
    if needed.bytes > free:
        return f"float64 needs {memory.format_size(needed.reference_bytes)} of {memory.format_size(free)} free"
    return f"float64 takes about {duration(needed.reference_seconds)}" if needed.seconds > seconds else None


def refusal(item: Item, needed: Forecast, device: torch.device, seconds: float) -> str | None:
    """Why the case cannot be measured here within this time; None if it may, with a float64 reference or without."""
    free = memory.free_memory(device)
    if without_reference(item, needed, device, seconds):
        needed = needed._replace(
            bytes=needed.bytes - needed.reference_bytes, seconds=needed.seconds - needed.reference_seconds
        )
    if needed.bytes > free:
        return (
            f"{item.name} needs at least {memory.format_size(needed.bytes)}, but "
            f"{memory.format_size(free)} are free on {device}: take fewer --tokens, or smaller sizes"
        )
    if needed.seconds > seconds:
        return (
            f"{item.name} needs about {duration(needed.seconds)} here, {duration(needed.step_seconds)} for a step of eager, "
            f"and {duration(max(seconds, 0.0))} of the budget are left: raise --budget-minutes, or take smaller sizes"
        )
    return None


def duration(seconds: float) -> str:
    """A time in words: "0.2 s", "12 s", "3 minutes"."""
    if seconds < 9.5:
        return f"{seconds:.1g} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
