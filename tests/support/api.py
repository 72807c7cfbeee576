"""The public API as a typed user calls it: `make lint` has mypy check this file, which nothing runs.

A `type: ignore` marks a call that has to be an error; one that is none any more is an error itself.
"""

from typing import assert_type

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

import ckptkern
from ckptkern.memory import peak_memory, saved_tensors
from ckptkern.parallel import TensorParallel
from ckptkern.storage import Store, compress, offload

x, weight, bias = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)
heads = torch.randn(1, 2, 4, 8)


def functions() -> None:
    assert_type(ckptkern.linear_act(x, weight, bias, "relu", recompute="selective"), Tensor)
    assert_type(ckptkern.linear_stack(x, [weight, weight], [bias, bias], workspace="64MiB"), Tensor)
    assert_type(ckptkern.mlp(x, weight, bias, weight, None, "gelu", 0.1, training=False), Tensor)
    assert_type(ckptkern.gated_mlp(x, weight, weight, weight, workspace=2**20), Tensor)
    assert_type(ckptkern.moe_mlp(x, x, x, weight, weight, "gelu", down_bias=bias, recompute="selective"), Tensor)
    assert_type(ckptkern.grouped_gated_mlp(x, x, weight, weight, row_weights=x), Tensor)
    assert_type(ckptkern.mlp_block(x, weight, None, weight, None, norm="rms", norm_weight=bias), Tensor)
    assert_type(ckptkern.dropout(x, 0.5), Tensor)
    assert_type(ckptkern.selected_log_probs(x, weight, torch.arange(4), bias=bias, temperature=0.7), Tensor)
    assert_type(ckptkern.selected_log_probs(x, weight, torch.arange(4), return_entropy=True).entropy, Tensor)
    assert_type(ckptkern.linear_distillation(x, weight, x, weight, beta=0.5, mask=x[:, 0] > 0), Tensor)
    assert_type(ckptkern.linear_topk_distillation(x, weight, x, torch.ones(4, 8, dtype=torch.int64)), Tensor)
    assert_type(ckptkern.scaled_dot_product_attention(heads, heads, heads, is_causal=True), Tensor)
    assert_type(ckptkern.attention_block(x, [weight] * 3, [bias, None, bias], weight, None, 2, rotary=1e4), Tensor)
    assert_type(ckptkern.latent_attention_block(x, weight, weight, weight, weight, 2, rotary=(x, x)), Tensor)
    layer = ckptkern.transformer_layer(x, {"num_heads": 2}, {"up_weight": weight})
    assert_type(layer, Tensor | tuple[Tensor, Tensor])
    assert_type(ckptkern.moe_block(x, weight, weight, weight, top_k=2, score_bias=bias), tuple[Tensor, Tensor])
    assert_type(ckptkern.ACTIVATIONS, tuple[str, ...])
    ckptkern.linear_act(x, weight, bias, torch.relu)  # type: ignore[arg-type]
    ckptkern.mlp(x, weight, bias, weight)  # type: ignore[call-arg]
    ckptkern.mlp(x, weight, bias, weight, None, recompute=True)  # type: ignore[arg-type]
    ckptkern.dropout(x, "half")  # type: ignore[arg-type]


def conversion(model: nn.Module) -> None:
    assert_type(ckptkern.convert(model, x, recompute="full", include=["*.mlp", nn.Linear]), ckptkern.Conversion)
    assert_type([row.replaced_by for row in ckptkern.convert(model)], list[str | None])
    assert_type(ckptkern.revert(model), nn.Module)
    ckptkern.convert(model, exclude=3)  # type: ignore[arg-type]


def segments() -> None:
    layer, layers = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    ckptkern.checkpoint(layer, x, use_reentrant=False, determinism_check="values")
    ckptkern.checkpoint(layer, x, context_fn=ckptkern.saved_decisions)
    ckptkern.checkpoint_sequential(layers, "sqrt", x)
    ckptkern.checkpoint_sequential([layer, torch.relu], 2, x)
    assert_type(ckptkern.tiled(layer, x, chunks=4, dim=0, check=True), Tensor)
    ckptkern.tiled(torch.relu, x, workspace="64MiB", preserve_rng_state=False)
    ckptkern.tiled(layer, x, chunks="4")  # type: ignore[arg-type]
    with ckptkern.patch_torch():
        pass
    ckptkern.checkpoint(3, x)  # type: ignore[arg-type]


@ckptkern.checkpointed
def decorated(x: Tensor) -> Tensor:
    return x.sin()


def modules() -> None:
    mlp = ckptkern.nn.MLP(8, 32, activation="silu", dropout=0.1, recompute="full", dtype=torch.bfloat16)
    assert_type(mlp.fc1, nn.Linear)
    encoder: nn.TransformerEncoderLayer = ckptkern.nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)
    attention: nn.MultiheadAttention = ckptkern.nn.MultiheadAttention(8, 2)
    nn.Sequential(mlp, encoder, attention, ckptkern.nn.Linear(8, 8, activation="relu"), ckptkern.nn.Dropout(0.1))
    ckptkern.nn.GatedMLP(8)  # type: ignore[call-arg]


def parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    assert_type(parallelize_module(model, mesh, {"layers.*": TensorParallel(sequence_parallel=True)}), nn.Module)
    TensorParallel(True)  # type: ignore[call-arg]


def memory() -> None:
    keep: Store = compress("int8", then=offload())
    with saved_tensors() as saved, keep, peak_memory("cpu") as peak:
        decorated(x)
    assert_type(saved.bytes, int)
    assert_type(peak.bytes, int)
    offload(min_bytes="1MiB")  # type: ignore[arg-type]


def planning(model: nn.Module) -> None:
    plan = ckptkern.plan(model, x, budget="1GiB", stores=[offload()], adapt=True)
    assert_type(plan, ckptkern.Plan)
    assert_type(plan.saved, int)
    assert_type(plan.peak, int | None)
    plan.replan(2**20)
    ckptkern.plan(model, x, saved="1GiB")
    frontier = ckptkern.frontier(model, torch.randn, "1GiB", multiple=128, limit=4096)
    assert_type((frontier.size, frontier.plan, frontier.peak), tuple[int, ckptkern.Plan, int])
    report = ckptkern.report(model, x)
    assert_type(report.totals, dict[str, int])
    report.figure("report.png")
    ckptkern.plan(model, x, budget=0.5)  # type: ignore[arg-type]
    ckptkern.frontier(model, x, "1GiB")  # type: ignore[arg-type]


def warming_up(model: nn.Module) -> None:
    warm = ckptkern.warm_up(model, x, scale=2.0)
    assert_type(warm, ckptkern.WarmUp)
    assert_type((warm.names, warm.count, warm.seconds), tuple[list[str], int, float])
    ckptkern.warm_up(torch.relu, x)  # type: ignore[arg-type]
