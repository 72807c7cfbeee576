"""Times a step: its kernels on a GPU, without their launches; by the clock on other devices; and by an estimate for a GPU on
the meta device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..memory import are_placeholders
from ..ops.registration.library import FLOPS

Step = Callable[[], Any]
SLEEP, LONGEST_SLEEP = 2**21, 2**26  # cycles: about 1 and 34 ms at 2 GHz


class Clock:
    """Times steps: clock(prepare) returns the seconds that the step returned by prepare() takes on the device.

    The GPU sleeps before the first event until the host has launched the whole step, so that no kernel waits for its launch. If
    the host needs longer, a step is prepared and run again, behind a longer sleep. The seconds of a step that itself waits for
    the GPU include host time.
    """

    def __init__(self, device: torch.device):
        self.device, self.cycles = device, SLEEP

    def __call__(self, prepare: Callable[[], Step]) -> float:
        if self.device.type != "cuda":
            step = prepare()
            start = time.perf_counter()
            step()
            return time.perf_counter() - start
        while True:
            step = prepare()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.device(self.device):
                torch.cuda._sleep(self.cycles)
                begin.record()
                step()
                end.record()
                is_late = begin.query()  # the sleep ended before the host had launched the whole step
            end.synchronize()
            if not is_late or self.cycles >= LONGEST_SLEEP:
                return begin.elapsed_time(end) / 1e3
            self.cycles *= 2


class Rates(NamedTuple):
    """Rates that a GPU reaches: FLOP/s of 16-bit and of float32 matmuls, bytes/s of its memory and of copies to and from the
    host; and its bytes of memory."""

    matmuls: float
    float32: float
    bandwidth: float
    host: float
    memory: int


# Data sheets (SXM) times assumed efficiencies: dense 16-bit 989 and 312 TFLOP/s, 0.7-0.87;
# float32 67 and 19.5, 0.8; memory 4.8, 3.35 and 2.04 TB/s, 0.86-0.9; PCIe 5 and 4 x16, 64 and 32 GB/s, 0.8.
RATES = {
    "h200": Rates(750e12, 54e12, 4.3e12, 51e9, 140 * 2**30),
    "h100": Rates(700e12, 54e12, 3.0e12, 51e9, 79 * 2**30),
    "a100": Rates(270e12, 16e12, 1.75e12, 25e9, 79 * 2**30),
}


class Roofline(TorchDispatchMode):
    """Sums the matmul flops of the ops inside, and estimates their seconds: each op takes as long as its matmuls or its
    reads and writes, whichever is longer; 0 without rates. An op of ckptkern counts as one op, because its kernels keep
    intermediates on chip."""

    def __init__(self, rates: Rates | None):
        super().__init__()
        self.rates, self.flops, self.seconds = rates, 0, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        read, written = ([t for t in tree_leaves(of) if isinstance(t, Tensor)] for of in ((args, kwargs), result))
        if func.is_view or not written or "empty" in func.name() or are_placeholders():
            return result
        formula = FLOPS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
        flops = formula(*args, **(kwargs or {}), out_val=result) if formula else 0
        self.flops += flops
        if self.rates is not None:
            # all, because the first input of ckptkern's ops may be a loss's gradient in float32
            is_wide = all(t.dtype == torch.float32 for t in read if t.is_floating_point())
            nbytes = sum(t.nbytes for t in (*read, *written))
            rate = self.rates.float32 if is_wide else self.rates.matmuls
            self.seconds += max(flops / rate, nbytes / self.rates.bandwidth)
        return result
