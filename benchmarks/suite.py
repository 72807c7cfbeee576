"""Lists the built-in cases: ops at the measured sizes. To add a case, append to ROWS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import micro, published, table
from .baselines import liger_layer
from .cases import BY_SUBLAYER, HEADLINE, MODES, Case
from .models import LlamaLayer

CPU_ROWS, ROWS_ON_GPU = table.TOKENS["cpu"], table.TOKENS["cuda"]


class Row(NamedTuple):
    """An op at several sizes. sizes: by device type, the most important first: features, tokens, and tokens of a sequence if
    it has sequences. priority: of the first size; each other size adds one. options: of the op, or a function of features.
    entry: of the op's table, if not the op's own."""

    title: str
    op: str
    priority: int
    sizes: dict[str, Sequence[tuple[int, ...]]]
    options: dict[str, Any] | Callable[[int], dict[str, Any]] | None = None
    modes: Sequence[str] | None = None
    entry: table.Op | None = None

    def at(self, kind: str, size: tuple[int, ...], priority: int = 0) -> Case:
        """Returns the case of one size."""
        options = self.options(size[0]) if callable(self.options) else self.options or {}
        sizes = dict(zip(("features", "tokens", "length"), size, strict=False))
        return micro.case(
            self.op, kind, self.modes, entry=self.entry, title=self.title, priority=priority, **sizes, **options
        )


def _sizes(cuda: Sequence[int], cpu: Sequence[int], rows: int = ROWS_ON_GPU) -> dict[str, list[tuple[int, ...]]]:
    return {"cuda": [(d, rows) for d in cuda], "cpu": [(d, CPU_ROWS) for d in cpu]}


_MLP = _sizes((1024, 4096, 2048, 512, 256), (128, 256))
# The first two sizes span the range: launches and glue weigh most in the first, matmuls and the core in the second.
_SEQUENCES = {
    "cuda": [
        (d, ROWS_ON_GPU, length)
        for d, length in ((1024, 2048), (4096, 8192), (2048, 2048), (1024, 8192), (4096, 2048), (2048, 8192))
    ],
    "cpu": [(64, CPU_ROWS, 128), (128, CPU_ROWS, 256)],
}
_EXPERTS = {  # Mixtral-8x7B's, Qwen3-30B-A3B's, and smaller ones
    4096: dict(hidden=14336, experts=8, top_k=2), 2048: dict(hidden=768, experts=128, top_k=8),
    1024: dict(hidden=384, experts=32, top_k=4), 64: dict(hidden=24, experts=8, top_k=2),
}  # fmt: skip
_CLASSES = {64: 1000, 1024: 50257}
_DROPOUT = {"dropout": 0.125}  # k/65536 exactly, so that torch's scale is ours


def _experts(width: int) -> dict[str, Any]:
    return _EXPERTS.get(width, _EXPERTS[64])


def _shared_heads(width: int) -> dict[str, Any]:
    return {"kv_heads": max(1, micro.heads_of(width) // 4)}


LLAMA = table.Op(  # its rotary embeddings, and weights of their own for q, k and v, are no option of the op
    {"features": 0, "tokens": 0, "length": 0},
    lambda v: LlamaLayer(v.features),
    lambda v: {"liger-kernel layer": liger_layer, **table.attention_baselines(v)},
)
# Without Liger's experts, which take half a minute to compile: too long for the first figures.
EXPERTS = table.OPS["moe_mlp"]._replace(baselines=lambda v: table.INTERLEAVED)
ROWS = [
    Row("gpt_layer", "transformer_layer", 0, _SEQUENCES, modes=MODES + BY_SUBLAYER),
    Row("llama_layer", "transformer_layer", 0, _SEQUENCES, modes=MODES + BY_SUBLAYER, entry=LLAMA),
    Row("mlp-gelu", "mlp", 0, _MLP),
    Row("mlp-relu", "mlp", 3, _MLP, {"activation": "relu"}),
    Row("mlp-gelu_tanh-nobias", "mlp", 3, _sizes((1024, 4096), (128,)), {"activation": "gelu_tanh", "bias": False}),
    Row("gated_mlp-silu", "gated_mlp", 0, _sizes((1024, 4096, 2048), (128, 256))),
    Row("moe_mlp-silu", "moe_mlp", 0, _sizes((1024, 4096, 2048), (64,), 8192), _experts, entry=EXPERTS),
    Row("linear_stack-relu", "linear_stack", 1, {
        "cuda": [(64, 2**18), (1024, ROWS_ON_GPU), (128, 2**18), (256, 2**16), (32, 2**18)],
        "cpu": [(64, 2048), (128, CPU_ROWS)],
    }),
    Row("attention", "attention_block", 1, _SEQUENCES),
    Row("attention-dropout", "attention_block", 3, _SEQUENCES, _DROPOUT),
    Row("attention-gqa", "attention_block", 4, _SEQUENCES, _shared_heads),
    Row("attention-gqa-dropout", "attention_block", 5, _SEQUENCES, lambda width: _shared_heads(width) | _DROPOUT),
    Row(
        "linear_cross_entropy", "linear_cross_entropy", 0,
        {"cuda": [(1024, ROWS_ON_GPU), (4096, 8192), (2048, 8192)], "cpu": [(64, CPU_ROWS)]},
        lambda width: {"classes": _CLASSES.get(width, 128256)},
    ),
    Row("linear_act-relu", "linear_act", 1, {
        "cuda": [(1024, ROWS_ON_GPU), (4096, ROWS_ON_GPU), (4096, 128)], "cpu": [(256, CPU_ROWS)],
    }),
    Row("dropout", "dropout", 1, _sizes((4096,), (256,))),
]  # fmt: skip


def cases_of(kind: str, headline: bool = False, published_sizes: bool = False) -> list[Case]:
    """Returns the cases of a device type, or a part of them, the most important first. A CPU, which has four minutes for
    all, runs ops that are in no row only for the first figures."""
    if published_sizes:
        return published.cases_of(kind)
    cases = [row.at(kind, size, row.priority + place) for row in ROWS for place, size in enumerate(row.sizes[kind])]
    if headline or kind == "cuda":  # the mean loss, as training has it, of Llama-1B's width; and each other op
        width = {"cuda": 2048, "cpu": table.FEATURES["cpu"]}[kind]
        cases.append(micro.case("linear_cross_entropy", kind, priority=0, reduction="mean", features=width))
        cases += [
            micro.case(op, kind, **({"reduction": "mean"} if op == "linear_distillation" else {}))
            for op in table.OPS
            if op not in {row.op for row in ROWS}
        ]
    if kind == "cuda":
        cases += published.cases_of(kind)
    return sorted((case for case in cases if case.priority <= HEADLINE or not headline), key=lambda case: case.priority)
