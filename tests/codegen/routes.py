"""Which kernels a layer's training step runs on a GPU: ours by name, torch's core of attention, and matmuls of libraries.

    python -m tests.codegen.routes > benchmarks/results/routes.csv
    python -m tests.codegen.routes --launches                          of a Llama-1B step, at seven shapes

Traced on meta tensors that pass for tensors of the GPU (`trace`), with torch's own answers of what its kernels
accept taken as yes; nothing is compiled. `benchmarks/results/routes.csv` holds the table, and a test holds that.
"""

from __future__ import annotations

import argparse
import collections
import csv
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ckptkern

from . import trace
from .compiling import specialize

PATH = Path(__file__).parents[2] / "benchmarks/results/routes.csv"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ARCHITECTURES = (80, 90, 100, 120)  # of the last nothing was measured or read
TOKENS = 4096
CORES = ("cudnn", "flash", "efficient")  # torch's of attention
MATMULS = {"mm", "bmm", "addmm", "baddbmm", "addmm_activation"}

Layer = Callable[[Callable[..., Tensor], Tensor], Any]  # parameter(*shape), x -> the result


def _norms(parameter: Callable[..., Tensor], d: int, norm: str, **options: Any) -> dict[str, Any]:
    return {
        "norm": norm,
        "norm_weight": parameter(d),
        "norm_bias": parameter(d) if norm == "layer" else None,
        **options,
    }


def _projections(parameter: Callable[..., Tensor], d: int, kv: int, bias: bool) -> dict[str, Any]:
    widths = (d, kv, kv)
    return {
        "qkv_weight": tuple(parameter(n, d) for n in widths),
        "out_weight": parameter(d, d),
        "qkv_bias": tuple(parameter(n) for n in widths) if bias else None,
        "out_bias": parameter(d) if bias else None,
    }


def llama(parameter: Callable[..., Tensor], x: Tensor, heads: int, kv_heads: int, hidden: int) -> Tensor:
    (S, d), D = x.shape[1:], x.shape[2] // heads
    tables = tuple(torch.empty(S, D, dtype=x.dtype, device=x.device) for _ in "cs")
    attention = dict(
        _projections(parameter, d, kv_heads * D, False),
        num_heads=heads,
        num_kv_heads=kv_heads,
        rotary=tables,
        is_causal=True,
        residual=True,
        **_norms(parameter, d, "rms"),
    )
    mlp = dict(
        gate_weight=parameter(hidden, d),
        up_weight=parameter(hidden, d),
        up_bias=None,
        down_weight=parameter(d, hidden),
        down_bias=None,
        activation="silu",
        **_norms(parameter, d, "rms"),
    )
    return ckptkern.transformer_layer(x, attention, mlp)


def encoder(
    parameter: Callable[..., Tensor], x: Tensor, heads: int, dropout_p: float, norm_first: bool, padded: bool
) -> Tensor:
    """BERT's and ViT's: all projections have biases."""
    (B, S, d) = x.shape
    mask = torch.empty((B, S), dtype=torch.bool, device=x.device) if padded else None
    attention = dict(
        _projections(parameter, d, d, True),
        num_heads=heads,
        key_padding_mask=mask,
        dropout_p=dropout_p,
        residual=True,
        **_norms(parameter, d, "layer", norm_first=norm_first),
    )
    mlp = dict(
        up_weight=parameter(4 * d, d),
        up_bias=parameter(4 * d),
        down_weight=parameter(d, 4 * d),
        down_bias=parameter(d),
        **_norms(parameter, d, "layer", norm_first=norm_first),
    )
    return ckptkern.transformer_layer(x, attention, mlp)


def qwen3_moe(parameter: Callable[..., Tensor], x: Tensor, experts: int = 128, hidden: int = 768) -> Tensor:
    (S, d), D = x.shape[1:], 128
    tables = tuple(torch.empty(S, D, dtype=x.dtype, device=x.device) for _ in "cs")
    q, kv = 32 * D, 4 * D
    attention = dict(
        qkv_weight=(parameter(q, d), parameter(kv, d), parameter(kv, d)),
        qkv_bias=None,
        out_weight=parameter(d, q),
        out_bias=None,
        num_heads=32,
        num_kv_heads=4,
        rotary=tables,
        is_causal=True,
        residual=True,
        qk_norm=(parameter(D), parameter(D)),
        qk_norm_kind="rms",
        **_norms(parameter, d, "rms"),
    )
    moe = dict(
        router_weight=parameter(experts, d),
        gate_up_weight=parameter(experts, 2 * hidden, d),
        down_weight=parameter(experts, d, hidden),
        top_k=8,
        **_norms(parameter, d, "rms"),
    )
    return ckptkern.transformer_layer(x, attention, moe)[0]


# name -> (features, sequence length, the layer)
LAYERS: dict[str, tuple[int, int, Layer]] = {
    "Llama-1B": (2048, 2048, functools.partial(llama, heads=32, kv_heads=8, hidden=8192)),
    "Llama-8B": (4096, 2048, functools.partial(llama, heads=32, kv_heads=8, hidden=14336)),
    "BERT": (768, 512, functools.partial(encoder, heads=12, dropout_p=0.0, norm_first=False, padded=False)),
    "BERT, padded": (768, 512, functools.partial(encoder, heads=12, dropout_p=0.0, norm_first=False, padded=True)),
    "BERT, dropout": (768, 512, functools.partial(encoder, heads=12, dropout_p=0.1, norm_first=False, padded=True)),
    "ViT-L/384": (1024, 577, functools.partial(encoder, heads=16, dropout_p=0.0, norm_first=True, padded=False)),
    "Qwen3-MoE": (2048, 2048, qwen3_moe),
}  # fmt: skip


def step(layer: Layer, shape: tuple[int, int, int], dtype: torch.dtype, arch: int) -> list[trace.Launch]:
    """The launches of a step, forward and backward, of a layer of x of this shape, at the ops' default modes."""
    x = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    def parameter(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    with trace.as_on(arch) as log:
        y = layer(parameter, x)
        y.backward(torch.empty_like(y))
        return list(log)


# Of a Llama-1B step: batch and length, as batches of texts have them.
SHAPES = ((4, 2048), (2, 4096), (8, 1024), (1, 8192), (4, 1000), (3, 777), (1, 333))
DEPTH, VOCABULARY = 16, 128256


def head(parameter: Callable[..., Tensor], x: Tensor) -> Tensor:
    targets = torch.empty(x.shape[:2], dtype=torch.int64, device=x.device)
    return ckptkern.linear_cross_entropy(x, parameter(VOCABULARY, x.shape[2]), targets)


def launches(arch: int = 90) -> Iterator[dict[str, int]]:
    """For each of SHAPES: the launches of a Llama-1B step, those of our kernels, and those of these that Triton compiles there
    and had not for a shape before."""
    width, _, layer = LAYERS["Llama-1B"]
    known: set[str] = set()
    for batch, length in SHAPES:
        of_layer, of_head = (step(module, (batch, length, width), torch.bfloat16, arch) for module in (layer, head))
        caught = [launch for launch in (*of_layer, *of_head) if launch.kernel is not None]
        keys = {specialize(launch.kernel, launch.args, launch.kwargs, arch).key for launch in caught}
        ours = [sum(launch.kernel is not None for launch in part) for part in (of_layer, of_head)]
        yield {
            "batch": batch,
            "length": length,
            "launches": DEPTH * len(of_layer) + len(of_head),
            "ours": DEPTH * ours[0] + ours[1],
            "compiled": len(keys - known),
        }
        known |= keys


def row_of(name: str, dtype: str, arch: int) -> dict[str, Any]:
    """A row of the table: how many matmuls libraries run, which cores are torch's, which of our kernels run and how often."""
    matmuls, torchs, ours = 0, collections.Counter(), collections.Counter()
    width, length, layer = LAYERS[name]
    for launch in step(layer, (TOKENS // length, length, width), DTYPES[dtype], arch):
        kernel = launch.name
        if launch.kernel is not None:
            ours[kernel.strip("_").removesuffix("_kernel")] += 1
        elif core := next((core_name for core_name in CORES if f"_{core_name}_attention" in kernel), None):
            torchs[core + ("_backward" if "backward" in kernel else "_forward")] += 1
        elif kernel == "_grouped_mm":
            torchs["grouped_mm"] += 1
        else:
            matmuls += kernel.strip("_") in MATMULS

    def text(counts: collections.Counter) -> str:
        return " ".join(f"{key}:{count}" for key, count in sorted(counts.items()))

    return {
        "layer": name,
        "dtype": dtype,
        "gpu": f"sm_{arch}",
        "matmuls": matmuls,
        "torch": text(torchs),
        "ours": text(ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.codegen.routes", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--launches", action="store_true", help="print the launches and compilations of a Llama-1B step instead"
    )
    if parser.parse_args().launches:
        rows = list(launches())
    else:
        rows = [row_of(name, dtype, arch) for name in LAYERS for dtype in DTYPES for arch in ARCHITECTURES]
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


if __name__ == "__main__":
    main()
