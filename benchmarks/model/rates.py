"""What a GPU can do: the one table that estimates are made of. Nothing in it was measured by this project; sources are
beside it.

FLOP/s of attention count what is visible: half of the scores under a causal mask.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

TERA, GIB = 1e12, 2**30


class Scales(NamedTuple):
    """Factors on the time of what an estimate consists of: 1 is the table's rate, 2 is half as fast."""

    matmuls: float = 1.0  # cuBLAS
    kernels: float = 1.0  # our kernels with matmuls on tensor cores
    bandwidth: float = 1.0  # what moves bytes
    attention: float = 1.0  # torch's core of attention
    launch: float = 1.0  # the gap between two launches


TABLE = Scales()


@dataclasses.dataclass(frozen=True)
class GPU:
    """Rates in FLOP/s, bytes/s and seconds."""

    name: str
    arch: int
    sms: int
    clock: float  # Hz, under a load of matmuls
    tensor_core: int  # bf16 FLOP per cycle and SM
    bandwidth: float  # of the memory, as a large copy reaches it
    memory: int  # bytes, as torch reports them: the default workspace is a part of it
    block_shared: int  # bytes of shared memory that a block may have
    shared: int  # bytes of shared memory of an SM
    matmuls: float  # cuBLAS, bf16, 8192 x 8192, large K
    main_loop: float  # part of the peak at `clock` that the main loop of a Triton matmul reaches
    core: str  # torch's default kernel for core attention
    core_forward: dict[int, float]  # sequence length -> FLOP/s, heads of 128, causal
    core_backward: dict[int, float]
    launch: float = 1.5e-6  # between two small kernels of a queue that is full; 1-2 us are usual
    scales: Scales = TABLE

    @property
    def capability(self) -> tuple[int, int]:
        return divmod(self.arch, 10)

    def cublas(self, K: int) -> float:
        """FLOP/s of a plain matmul over K."""
        place = bisect.bisect_left(list(CUBLAS_SHAPE), K)
        return self.matmuls * list(CUBLAS_SHAPE.values())[min(place, len(CUBLAS_SHAPE) - 1)]

    def core_rate(self, length: int, backward: bool) -> float:
        """FLOP/s of torch's core at the nearest length of the table, in powers of two."""
        table = self.core_backward if backward else self.core_forward
        return table[min(table, key=lambda known: abs(known.bit_length() - length.bit_length()))]


# K -> rate / rate at large K of cuBLAS, M = N = 8192, fp16, on Hopper: Triton's python/tutorials/gluon/07-persistence.py has
# 588, 588, 616, 646, 661, 665 TFLOP/s for 512 ... 16384. 256 is extrapolated.
CUBLAS_SHAPE = {256: 0.80, 512: 0.885, 1024: 0.885, 2048: 0.926, 4096: 0.971, 8192: 0.994, 16384: 1.0}

# Parts of `bandwidth` that a kernel reaches: elementwise in one pass; a norm's row, read and held; columns summed over rows
# into a few results. Assumed.
STREAMS = {"elementwise": 0.85, "norm": 0.75, "reduction": 0.60}

# SMs, tensor cores, shared memory, registers: NVIDIA's whitepapers of A100 and H100 (SXM), and the table of compute
# capabilities in the CUDA programming guide.
# clock     H100 and H200 leave their 1.98 GHz under matmuls, at 700 W; at 1.55 GHz, assumed, 132 x 4096 FLOP are 838 TFLOP/s,
#           of which the 665 of Triton's tutorial are 0.79 and the 750 below 0.89. A100: 1.41 GHz, of its 312 TFLOP/s.
# bandwidth data sheets: 4.8, 3.35 and 2.04 TB/s (A100 80 GB); a large copy reaches 0.86-0.90 of it, assumed.
# matmuls  assumed: 750 on an H200 and 700 on an H100 with today's cuBLAS, 270 on an A100. A run's ceilings say more.
# main_loop assumed, and optimistic: triton#5726 has 0.76 of cuBLAS for the tutorial's pointers, at 8192 x 8192 x 512.
# core      causal, heads of 128, by length: cuDNN 9 on H100 after the figures of arXiv 2407.08608, flash attention 2 on A100
#           after those of arXiv 2307.08691. An H200's has the same SMs.
_HOPPER = dict(
    arch=90, sms=132, clock=1.55e9, tensor_core=4096, block_shared=232448, shared=233472, main_loop=0.86,
    core="cudnn", core_forward={2048: 484 * TERA, 8192: 529 * TERA},
    core_backward={2048: 316 * TERA, 8192: 480 * TERA},
)  # fmt: skip
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("h200", bandwidth=4.3 * TERA, memory=140 * GIB, matmuls=750 * TERA, **_HOPPER),
        GPU("h100", bandwidth=3.0 * TERA, memory=79 * GIB, matmuls=700 * TERA, **_HOPPER),
        GPU(
            "a100", arch=80, sms=108, clock=1.41e9, tensor_core=2048, bandwidth=1.75 * TERA, memory=79 * GIB,
            block_shared=166912, shared=167936, matmuls=270 * TERA, main_loop=0.84, core="flash",
            core_forward={2048: 175 * TERA, 8192: 190 * TERA}, core_backward={2048: 140 * TERA, 8192: 165 * TERA},
        ),
    )
}  # fmt: skip


def of_device(device: str) -> GPU:
    """Returns the GPU of a device's name such as "nvidia-h100-80gb-hbm3". Raises ValueError if the table has none of it."""
    found = [gpu for name, gpu in GPUS.items() if name in device.split("-")]
    if not found:
        raise ValueError(f"the cost model has no rates of {device or 'an unknown device'}, only of {', '.join(GPUS)}")
    return found[0]


def write(gpu: GPU, path: Path, note: str) -> None:
    """The factors of a calibrated GPU, for `read`."""
    found = {"source": "cost model", "gpu": gpu.name, "time factors": gpu.scales._asdict(), "note": note}
    path.write_text(json.dumps(found, indent=2) + "\n")


def read(gpu: GPU, path: Path) -> GPU:
    """The GPU with the factors of a file of `write`. Raises ValueError for another GPU's file, or another kind of file."""
    try:
        found = json.loads(path.read_text())
        name, scales = found["gpu"], Scales(**found["time factors"])
        right = all(isinstance(scale, (int, float)) and scale > 0 for scale in scales)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file of --calibrate: {type(error).__name__}: {error}") from None
    if not right:
        raise ValueError(f"{path}: time factors must be positive numbers, not {found['time factors']}")
    if name != gpu.name:
        raise ValueError(f"{path} has the rates of {name}, not of {gpu.name}")
    return dataclasses.replace(gpu, scales=scales)
