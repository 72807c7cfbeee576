"""Cost model: seconds of a launch, of what they consist, and what bounds them.

A matmul of ours is a tile after another on each SM. Where one program fits there, its main loop, its prologue and
its epilogue follow one another; where two do, one's epilogue runs beside the other's matmuls, and the larger of both counts.
A core of attention of ours alternates matmuls and softmax, since no matmul is in flight while a warp computes its softmax.
Everything else moves its bytes, or takes the rate of the library that replaces it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .rates import GPU, STREAMS, Scales
from .sass import Code
from .trace import Caught, Launch

PROLOGUE = 800  # cycles until the first tile of a main loop is there: two waits for memory of some 400
ISSUE_ALONE, ISSUE_SHARED = 0.80, 0.85  # part of the issue slots that one program's warps use, or two programs'
# Of tensor cores: a tile 64 wide waits for shared memory; on sm_90 one 128 wide reads 160 bytes a cycle where there are 128.
NARROW, MIDDLE = 1.25, 1.13
EDGE = 0.15  # of prologue and epilogue, where two programs take turns: what is left to see of them
TOGETHER = {"_experts_fwd_kernel": 2}  # matmuls in one loop
CORE_EFFICIENCY = 0.85  # of matmuls and softmax in turns; gives Triton's published 320-390 TFLOP/s forward on H100

Codes = Callable[[Caught], Code]


class Estimate(NamedTuple):
    """Seconds by what they scale with, a word for what bounds the launch, and the part of it that is exposed epilogue."""

    parts: dict[str, float]  # names of Scales
    bound: str
    epilogue: float = 0.0
    note: str = ""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def _matmuls(launch: Launch, code: Code, gpu: GPU) -> tuple[float, str, float, str]:
    """(seconds, bound, exposed part, note) of a kernel with the tile loop of tile.gemm_tile."""
    given = launch.caught.named
    M, N, inner = launch.shape
    block_m, block_n = given["BLOCK_M"], given["BLOCK_N"]
    tiles = math.ceil(M / block_m) * math.ceil(N / block_n)
    per_tile = 2 * math.prod(launch.shape) / tiles
    tensor = per_tile / gpu.tensor_core / gpu.main_loop
    tensor *= NARROW if block_n <= 64 else MIDDLE if block_n <= 128 and gpu.arch >= 90 else 1.0
    steps = inner / given["BLOCK_K"] / TOGETHER.get(launch.caught.name, 1)
    loop = sum(code.loops) / len(code.loops) * steps * code.warps / 4
    epilogue = code.outside * code.warps / 4
    prologue = PROLOGUE * len(code.loops)
    programs = min(code.programs(gpu.shared), math.ceil(tiles / gpu.sms))  # few tiles leave some alone
    if programs == 1:
        exposed = epilogue / ISSUE_ALONE
        cycles = tensor + prologue + exposed
    else:
        issue = (epilogue + loop) / ISSUE_SHARED
        cycles = max(tensor * 1.04, issue) + (prologue + epilogue / ISSUE_ALONE) * EDGE
        exposed = cycles - tensor
    turns = math.ceil(tiles / (gpu.sms * programs)) * programs
    bound = "tensor cores" if tensor >= cycles / 2 else "epilogue" if exposed > prologue else "prologue"
    idle = 1 - tiles / gpu.sms / turns
    note = f"{block_m}x{block_n}x{given['BLOCK_K']}, {code.registers} registers, {programs} an SM"
    note += f", {100 * idle:.0f} % idle in the last turn" if idle > 0.1 else ""
    return turns * cycles / gpu.clock, bound, exposed / cycles, note


def visible_tiles(Sq: int, Sk: int, rows: int, columns: int, causal: bool) -> float:
    """Tiles of the scores that a head's programs visit; a causal one ends at its last row."""
    if not causal:
        return math.ceil(Sq / rows) * math.ceil(Sk / columns)
    return sum(math.ceil(min(Sk, (i + 1) * rows) / columns) for i in range(math.ceil(Sq / rows)))


def _attention(launch: Launch, code: Code, gpu: GPU) -> tuple[float, str, float, str]:
    """The same of core attention. Its loop has several copies: inside, and at the edge of what is visible."""
    given = launch.caught.named
    B, H, Sq, Sk, _ = launch.shape
    rows, columns = given["BLOCK_M"], given["BLOCK_N"]
    tiles = visible_tiles(Sq, Sk, rows, columns, launch.causal)
    edges = min(tiles, math.ceil(Sq / rows) * max(1, rows // columns)) if launch.causal else 0
    flops = launch.flops / (B * H * Sq * Sk) * rows * columns
    tensor = flops / gpu.tensor_core
    inside, edge = min(code.loops), max(code.loops)
    issue = (inside * (tiles - edges) + edge * edges) / tiles * code.warps / 4
    programs = code.programs(gpu.shared)
    cycles = (tensor + issue if programs == 1 else max(tensor * 1.04, issue)) / CORE_EFFICIENCY
    count = math.prod(launch.caught.grid)
    around = count * (PROLOGUE + code.outside * code.warps / 4 / ISSUE_ALONE) / programs
    total = (B * H * tiles * cycles + around) / gpu.sms
    note = f"{rows}x{columns}, {code.registers} registers, {programs} an SM"
    return total / gpu.clock, "tensor cores" if tensor >= issue else "issue", issue / (tensor + issue), note


def _narrow_chain(launch: Launch, code: Code, gpu: GPU) -> tuple[float, str, float, str]:
    """The same of a chain of layers that a program takes a tile of rows through: loops over layers, one after another."""
    given = launch.caught.named
    M, width, _ = launch.shape
    rows, layers = given["BLOCK_M"], given["L"]
    tiles = math.ceil(M / rows)
    tensor = launch.flops / tiles / gpu.tensor_core * NARROW
    issue = (sum(code.loops) * layers + code.outside) * code.warps / 4
    resident = min(code.programs(gpu.shared), math.ceil(math.prod(launch.caught.grid) / gpu.sms))
    cycles = tensor + issue / ISSUE_ALONE if resident == 1 else max(tensor * 1.04, issue / ISSUE_SHARED)
    turns = math.ceil(tiles / gpu.sms)
    note = f"{rows} rows of {width}, {code.registers} registers, {resident} an SM"
    return turns * cycles / gpu.clock, "tensor cores" if tensor >= issue else "issue", issue / (tensor + issue), note


def _of_ours(launch: Launch, code: Code, gpu: GPU) -> tuple[float, str, float, str]:
    given = launch.caught.named
    model = _attention if "HEAD_D" in given else _narrow_chain if "WIDTH" in given else _matmuls
    return model(launch, code, gpu)


def estimate(launch: Launch, gpu: GPU, codes: Codes) -> Estimate:
    """What a launch costs. codes: the SASS of a launch of ours."""
    moving = launch.bytes / (gpu.bandwidth * STREAMS.get(launch.kind, STREAMS["elementwise"])) * gpu.scales.bandwidth
    gap = {"launch": gpu.launch * gpu.scales.launch}
    family, working, bound, epilogue, note = "bandwidth", 0.0, "bytes", 0.0, ""
    if launch.kind == "matmul":
        family, working, bound = "matmuls", 2 * math.prod(launch.shape) / gpu.cublas(launch.shape[2]), "tensor cores"
    elif launch.kind == "core":
        rate = gpu.core_rate(launch.shape[3], "backward" in launch.name)
        family, working, bound = "attention", launch.flops * (0.5 if launch.causal else 1.0) / rate, "torch's core"
    elif launch.kind == "kernel":
        family, (working, bound, epilogue, note) = "kernels", _of_ours(launch, codes(launch.caught), gpu)
    working *= getattr(gpu.scales, family)
    if moving >= working:
        family, working, bound, epilogue = "bandwidth", moving, "bytes", 0.0
    if working < gap["launch"]:
        bound = "launch"
    return Estimate({family: working, **gap}, bound, epilogue, note)


@dataclasses.dataclass(frozen=True)
class Sum:
    """Seconds of several launches, by what they scale with."""

    parts: Scales

    @property
    def seconds(self) -> float:
        return sum(self.parts)


def total(launches: Iterable[Launch], gpu: GPU, codes: Codes) -> Sum:
    parts = dict.fromkeys(Scales._fields, 0.0)
    for launch in launches:
        for family, seconds in estimate(launch, gpu, codes).parts.items():
            parts[family] += seconds
    return Sum(Scales(**parts))
