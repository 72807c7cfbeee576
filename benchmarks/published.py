"""Lists figures that others published, each with its size and GPU: ``bench --published`` measures the same sizes and shows
the published figures beside them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..segments.tiled import tiled
from . import baselines, micro
from .cases import CHECKPOINT, HEADLINE, Case, Figure, Function, Maker, Within

MB, MIB, GIB = 1e6, 2**20, 2**30  # bytes


class Group(NamedTuple):
    """Published figures of a step of one size on one GPU. options: of the op. more: further variants."""

    gpu: str
    op: str
    options: dict[str, Any]
    figures: Sequence[Figure]
    layers: int = 1
    more: dict[str, Maker] | None = None

    def case(self, kind: str, **changes: Any) -> Case:
        """Returns the case; on a CPU, which can only show that it runs, at the op's default sizes. changes: of options."""
        options = {
            name: value for name, value in self.options.items() if kind == "cuda" or isinstance(value, bool | str)
        }
        case = micro.case(self.op, kind, priority=HEADLINE + 1, **options | changes)
        figures = [figure._replace(variant=f"published: {figure.variant}, {self.gpu}") for figure in self.figures]
        case = dataclasses.replace(
            case, baselines={**case.baselines, **(self.more or {})}, figures=figures if kind == "cuda" else ()
        )
        return stacked(case, self.layers) if self.layers > 1 else case


def stacked(case: Case, layers: int) -> Case:
    """Returns a case of several layers, one after another, each with its own weights."""

    def make(*where) -> tuple[nn.Module, Tensor]:
        models, inputs = zip(*(case.make(*where) for _ in range(layers)), strict=True)
        return nn.Sequential(*models), inputs[0]

    def chain(functions: Sequence[Function]) -> Function:
        return lambda x: functools.reduce(lambda y, function: function(y), functions, x)

    def each(make: Maker) -> Maker:
        return lambda model, x: chain([make(layer, x) for layer in model])

    title, _, size = case.name.partition("/")
    return dataclasses.replace(
        case,
        name=f"{title}-L{layers}/{size}",
        make=make,
        ours=lambda model, mode: chain([case.ours(layer, mode) for layer in model]),
        baselines={name: each(make) for name, make in case.baselines.items()},
    )


def _by(source: str, note: str = "") -> Callable[..., Figure]:
    """Returns a constructor of a source's figures: variant, ms, peak, saved."""
    source = "; ".join(filter(None, (source, "forward + backward", note)))
    return lambda variant, *figures: Figure(variant, source, *figures)


CCE = "arXiv 2411.09009, table 1"
CCE_ALL, CCE_FEW = _by(CCE), _by(CCE, "skips small gradients")
TRL_LOSS = _by("huggingface/trl#7244")
TRL, TRL_FEW = _by("huggingface/trl#6858"), _by("huggingface/trl#6858", "skips small gradients")
LIGER_DATA = _by("linkedin/Liger-Kernel, benchmark/data", "peak with weights and their gradients")
LIGER_EXPERTS = _by("linkedin/Liger-Kernel#1294", "413 TFLOP/s, the highest of several sizes")
QUACK = _by("Dao-AILab/quack, MLP with activation checkpointing", "peak with weights")
SWIFT = _by("modelscope/ms-swift#7090")


def _tiled(model: nn.Module, x: Tensor) -> Function:
    return lambda x: tiled(model, x)


def _head(gpu: str, rows: int, width: int, classes: int, figures: Sequence[Figure], **more: Maker) -> Group:
    """Returns the step of a head and its mean loss, also with a smaller workspace than the default 1/32 of the GPU's memory."""
    options = dict(features=width, tokens=rows, classes=classes, reduction="mean")
    bounded = Within(256 * MIB, lambda model, x: lambda x: model.ours(x, "full"))
    return Group(gpu, "linear_cross_entropy", options, figures, more={"ckptkern full, 256 MiB": bounded, **more})


GROUPS = (
    _head("H100", 8192, 4096, 151936, [
        TRL_LOSS("eager", 59, 19.9 * GIB), TRL_LOSS("256 rows at a time", 167, 13.1 * GIB),
        TRL_LOSS("Liger", 192, 6.1 * GIB), TRL_LOSS("matmuls alone", 42),
    ], **{f"{CHECKPOINT}, 256 rows at a time": baselines.in_chunks(256)}),
    _head("A100", 8192, 2304, 256000, [
        CCE_ALL("eager", 207, 28000 * MIB), CCE_ALL("torch.compile", 143, 16000 * MIB), CCE_ALL("8 chunks", 170, 9631 * MIB),
        CCE_ALL("Liger", 303, 1474 * MIB), CCE_ALL("CCE without filter", 362), CCE_FEW("CCE", 135, 1164 * MIB),
    ]),
    Group("H100", "moe_mlp", dict(features=2048, tokens=32768, hidden=768, experts=128, top_k=8), [  # Qwen3-30B-A3B's
        LIGER_DATA("Liger, Triton", 28.2, 8262 * MIB), LIGER_DATA("Hugging Face", 287.9, 10712 * MIB),
        LIGER_EXPERTS("Liger, Triton, #1294", 17.97),
    ]),
    Group("H100", "mlp", dict(features=4096, tokens=8192, hidden=16384, activation="gelu_tanh", bias=False), [
        QUACK("quack", None, 3221 * MB, 1342 * MB), QUACK("quack, recompute", None, 3020 * MB, 268 * MB),
    ], layers=4),
    Group("GPU not named", "gated_mlp", dict(features=4096, tokens=8192, hidden=12288), [
        SWIFT("eager", 33.1, 2080 * MIB), SWIFT("tiled", 46.0, 1840 * MIB),
    ], more={"ckptkern tiled": _tiled, "liger-kernel tiled": baselines.liger_tiled}),
    _head("H100", 16384, 2048, 248320, [
        TRL("eager, 16-bit logits", 137.00, 47.55 * GIB), TRL("chunks of tokens", 224.39, 19.67 * GIB),
        TRL("Liger", 321.16, 6.05 * GIB), TRL_FEW("CCE", 92.55, 3.09 * GIB),
    ]),
)  # fmt: skip


def cases_of(kind: str) -> list[Case]:
    """Returns the cases of whole steps, the most important first, each once."""
    return [*{case.name: case for case in (group.case(kind) for group in reversed(GROUPS))}.values()][::-1]
