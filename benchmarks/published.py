"""Figures that others published, each at its size and on its GPU: ``bench --published`` measures the same sizes and shows these
figures beside its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..segments.tiled import tiled
from . import baselines, micro
from .cases import CHECKPOINT, HEADLINE, Case, Function, Item, Maker, lm_head_loss
from .measure import Row

GIB = 1024  # MiB


class Figure(NamedTuple):
    """What was published of one variant. tflops: of the FLOPs that a group counts, so that variants with more matmuls compare.
    mib, saved_mib: peak, and bytes saved for backward."""

    source: str
    variant: str
    ms: float | None = None
    tflops: float | None = None
    mib: float | None = None
    note: str = ""
    saved_mib: float | None = None


class Group(NamedTuple):
    """What was published of one size on one GPU. gpu: None if the source does not name it. op, options: of micro.py."""

    gpu: str | None
    op: str
    options: dict[str, Any]
    figures: Sequence[Figure]
    layers: int = 1
    more: dict[str, Maker] | None = None  # further variants

    def item(self, kind: str = "cuda") -> Item:
        """The case; on a CPU, which can only show that it runs, at the op's default sizes."""
        options = {name: one for name, one in self.options.items() if kind == "cuda" or isinstance(one, bool | str)}
        item = micro.item(self.op, kind, **options)
        case = dataclasses.replace(item.case, baselines={**item.case.baselines, **(self.more or {})})
        return item._replace(case=stacked(case, self.layers) if self.layers > 1 else case, priority=HEADLINE + 1)

    @property
    def flops(self) -> int:
        """FLOPs of the matmuls of forward and backward, three of each weight that a row meets."""
        item = self.item()
        with torch.device("meta"):
            model = item.case.model(item.size.width)
        weights = sum(p.numel() for name, p in model.named_parameters() if "router" not in name)
        met = weights // getattr(model, "experts", 1) * getattr(model, "top_k", 1)
        return 6 * item.size.rows * met

    def ms(self, figure: Figure) -> float | None:
        """The figure's time, from its TFLOP/s where it has no other."""
        return figure.ms if figure.tflops is None else 1e3 * self.flops / (1e12 * figure.tflops)


def stacked(case: Case, layers: int) -> Case:
    """A case of so many layers, one after another, each with weights of its own."""

    def chain(functions: Sequence[Function]) -> Function:
        return lambda x: functools.reduce(lambda y, function: function(y), functions, x)

    def each(make: Maker) -> Maker:
        return lambda model, x: chain([make(layer, x) for layer in model])

    return dataclasses.replace(
        case, name=f"{case.name}-L{layers}", model=lambda width: nn.Sequential(*(case.model(width) for _ in range(layers))),
        ours=lambda model, mode: chain([case.ours(layer, mode) for layer in model]),
        baselines={name: each(make) for name, make in case.baselines.items()},
    )  # fmt: skip


def _by_source(source: str, note: str = "") -> Callable[..., Figure]:
    return functools.partial(Figure, source, note=note)


CCE = _by_source("arXiv 2411.09009, table 1")
TRL_LOSS = _by_source("huggingface/trl#7244")
TRL = _by_source("huggingface/trl#6858")
LIGER_DATA = _by_source("linkedin/Liger-Kernel, benchmark/data", "peak with weights and their gradients")
LIGER_EXPERTS = _by_source("linkedin/Liger-Kernel#1294", "the highest of several sizes")
QUACK = _by_source("Dao-AILab/quack, MLP with activation checkpointing", "peak with weights")
SWIFT = _by_source("modelscope/ms-swift#7090")
MB = 1e6 / 2**20  # MiB

EXPERTS = dict(features=2048, tokens=32768, hidden=768, experts=128, top_k=8)  # of Qwen3-30B-A3B
WORKSPACE: dict[str, Maker] = {  # of backward; otherwise a 32nd of the GPU's memory
    "ckptkern full, 256 MiB": lambda model, x: lm_head_loss(model, "full", "256MiB")
}


def _tiled(model: nn.Module, x: Tensor) -> Function:
    return lambda x: tiled(model, x)


def _head(
    gpu: str, sizes: tuple[int, int, int], figures: Sequence[Figure], more: dict[str, Maker] | None = None
) -> Group:
    """The step of a head and its mean loss; sizes: rows, width, classes."""
    rows, width, classes = sizes
    options = dict(features=width, tokens=rows, classes=classes, reduction="mean")
    return Group(gpu, "linear_cross_entropy", options, figures, more={**WORKSPACE, **(more or {})})


GROUPS = (
    _head("h100", (8192, 4096, 151936), [
        TRL_LOSS("eager", 59, mib=19.9 * GIB), TRL_LOSS("256 rows at a time", 167, mib=13.1 * GIB),
        TRL_LOSS("Liger", 192, mib=6.1 * GIB), TRL_LOSS("matmuls alone", 42),
    ], {f"{CHECKPOINT}, 256 rows at a time": baselines.in_chunks(256), "matmuls alone": baselines.HeadMatmuls}),
    _head("a100", (8192, 2304, 256000), [
        CCE("eager", 207, mib=28000), CCE("torch.compile", 143, mib=16000), CCE("8 chunks", 170, mib=9631),
        CCE("Liger", 303, mib=1474), CCE("CCE without filter", 362),
        CCE("CCE", 135, mib=1164, note="skips small gradients"),
    ]),
    Group("h100", "moe_mlp", EXPERTS, [
        LIGER_DATA("Liger, Triton", 28.2, mib=8262), LIGER_DATA("Hugging Face", 287.9, mib=10712),
        LIGER_EXPERTS("Liger, Triton, #1294", tflops=413),
    ]),
    Group("h100", "mlp", dict(features=4096, tokens=8192, hidden=16384, activation="gelu_tanh", bias=False), [
        QUACK("quack", mib=3221 * MB, saved_mib=1342 * MB), QUACK("quack, recompute", mib=3020 * MB, saved_mib=268 * MB),
    ], layers=4),
    Group(None, "gated_mlp", dict(features=4096, tokens=8192, hidden=12288), [
        SWIFT("eager", 33.1, mib=2080), SWIFT("tiled", 46.0, mib=1840),
    ], more={"ckptkern tiled": _tiled, "liger-kernel tiled": baselines.liger_tiled}),
    _head("h100", (16384, 2048, 248320), [
        TRL("eager, 16-bit logits", 137.00, mib=47.55 * GIB), TRL("chunks of tokens", 224.39, mib=19.67 * GIB),
        TRL("Liger", 321.16, mib=6.05 * GIB), TRL("CCE", 92.55, mib=3.09 * GIB, note="skips small gradients"),
    ]),
)  # fmt: skip


def items(kind: str) -> list[Item]:
    """The cases of whole steps, the most important first, each once."""
    found = [group.item(kind) for group in GROUPS]
    return [*{item.name: item for item in reversed(found)}.values()][::-1]


def rows(item: Item, kind: str) -> list[Row]:
    """The published figures of this very case, as rows of results.csv."""
    found = []
    for group in GROUPS:
        if kind != "cuda" or group.item().name != item.name:
            continue
        gpu = group.gpu.upper() if group.gpu else "GPU not named"
        for one in group.figures:
            peak, saved = (None if mib is None else round(2**20 * mib) for mib in (one.mib, one.saved_mib))
            found.append(
                Row(
                    item.name,
                    f"published: {one.variant}, {gpu}",
                    kind,
                    "bfloat16",
                    "published",
                    group.ms(one),
                    peak_bytes=peak,
                    saved_bytes=saved,
                    source="; ".join(filter(None, (one.source, "forward + backward", one.note))),
                )
            )
    return found
