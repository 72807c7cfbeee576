"""Prints what each launch of a Triton kernel in a step of each op passes, as JSON: launches.py

It runs in a process of its own, without TRITON_INTERPRET, because an interpreted kernel has no parameters to count.
"""

from __future__ import annotations

import json

import torch
from codegen import trace
from torch.utils._pytree import tree_leaves

from ckptkern.benchmarks import cases, suite

STEPS = (
    "mlp-gelu", "gated_mlp-silu", "linear_act-relu", "linear_stack-relu", "attention-dropout", "gpt_layer", "llama_layer",
)  # fmt: skip


def counts(caught: trace.Launch) -> tuple[int, int]:
    """Returns (what Triton's binder looks at one by one, members of tuples too, and what becomes a parameter of the kernel or a
    None; constexprs and options)."""
    parameters = {p.name: p for p in caught.kernel.params}
    values = {name: caught.named.get(name) for name, p in parameters.items() if not p.is_constexpr}
    passed = sum(len(tree_leaves((value,), is_leaf=lambda leaf: leaf is None)) for value in values.values())
    return passed, len(parameters.keys() | caught.kwargs.keys()) - len(values)


def caught_launches(case: str) -> list[trace.Launch]:
    """Triton's launches of a step of ours at "full" on an H200, of a case's first size."""
    benchmark = next(row for row in suite.cases_of("cuda") if row.name.startswith(f"{case}/"))
    model, x = benchmark.make(torch.device("meta"), cases.DTYPES["cuda"])
    with trace.as_on(90) as log:
        y = cases.variants(benchmark)["ckptkern full"](model, x)(x)
        y.backward(torch.empty_like(y))
    return [launch for launch in log if launch.kernel is not None]


if __name__ == "__main__":
    print(json.dumps([(launch.name, *counts(launch)) for case in STEPS for launch in caught_launches(case)]))
