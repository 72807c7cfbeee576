"""Measures peak memory and time of a training step over the sequence length: `make bench-frontier`.

Models of transformers run in float32 on one thread, with gradients allocated before the step and variants interleaved. Peak
bytes are exact; of times, only the ratio to gradient checkpointing within one run means anything. Writes a CSV and prints the
tables.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.benchmarks import measure
from ckptkern.benchmarks.baselines import SDPA_FORWARDS, checkpointed, chunked_loss, whole_loss
from ckptkern.conversion.report import write_rows
from ckptkern.extras import missing
from ckptkern.memory import format_size, peak_memory

MIB = 2**20
CHECKPOINTING, PLANNED = "gradient checkpointing", "ckptkern.plan"
TIMED = 2048  # tokens of the sequence whose steps are timed, and of the models that are no Llama
BUDGET = 2**30  # of the longest sequence
PLANNED_FOR = 96 * MIB  # of the planned Llama's step at each length
LLAMA = "Llama, 8 layers of 256, 32,000 classes"
SIZES = dict(vocab_size=32000, hidden_size=256, num_attention_heads=4, max_position_embeddings=2**13, use_cache=False)
MODELS: dict[str, dict[str, Any]] = {
    LLAMA: dict(model_type="llama", num_hidden_layers=8, intermediate_size=704),
    "GPT-2, 4 layers of 256": dict(
        model_type="gpt2", num_hidden_layers=4, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "Qwen3-MoE, 4 layers of 256": dict(
        model_type="qwen3_moe", num_hidden_layers=4, intermediate_size=768, moe_intermediate_size=256, num_key_value_heads=2,
        head_dim=64, num_experts=8, num_experts_per_tok=2,
    ),
}  # fmt: skip
Row = dict[str, Any]


def with_gradients(model: nn.Module) -> nn.Module:
    """Returns the model with gradients of zeros for all trained parameters, as a trainer that zeroes them leaves them."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return model


def build(name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return with_gradients(AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES | MODELS[name])).train())


def torchs_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Returns torch's own chunked loss."""
    hidden = model.base_model(input_ids=ids).last_hidden_state[0, :-1]
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, model.lm_head.weight, ids[0, 1:], options=options)


def converted(model: nn.Module, ids: Tensor, stack_of: int = 1, **options: Any) -> nn.Module:
    """Converts a copy. stack_of: saves the input of every k-th layer only. transformers then loops over a list of one
    member, the stack."""
    ckptkern.convert(model, input_ids=ids[:, :8], labels=ids[:, :8], **options)
    if stack_of > 1:
        model.model.layers = nn.ModuleList([ckptkern.nn.LayerStack(model.model.layers, every=stack_of)])
    return model


def tiled(model: nn.Module) -> nn.Module:
    """Runs MLPs by Liger's TiledMLP, with the shards that it chooses. Its kernels need a GPU, but this function calls none."""
    from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

    def forward(mlp: nn.Module, x: Tensor) -> Tensor:
        return apply_tiled_mlp(type(mlp).forward, mlp, x)

    for layer in model.model.layers:
        layer.mlp.forward = functools.partial(forward, layer.mlp)
    return model


def variants(name: str, ids: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Returns the functions that compute the loss, by the names of the page's rows."""
    make = functools.partial(build, name)
    bounded = dict(recompute="full", workspace="4MiB")
    models = {
        "eager": (make(), whole_loss),
        CHECKPOINTING: (checkpointed(make()), whole_loss),
        "checkpointing that saves SDPA, loss in chunks": (checkpointed(make(), *SDPA_FORWARDS), chunked_loss),
        "checkpointing, loss in chunks": (checkpointed(make()), chunked_loss),
        "checkpointing, torch's chunked loss": (checkpointed(make()), torchs_loss),
        "ckptkern.convert, defaults": (converted(make(), ids), whole_loss),
        'ckptkern.convert, "full"': (converted(make(), ids, recompute="full"), whole_loss),
        'ckptkern.convert, "full", 4 MiB': (converted(make(), ids, **bounded), whole_loss),
    }
    if name == LLAMA:
        models["checkpointing, Liger's TiledMLP, loss in chunks"] = checkpointed(tiled(make())), chunked_loss
        for every in (2, 3):
            stack = converted(make(), ids, every, **bounded)
            models[f'ckptkern.convert, "full", 4 MiB, LayerStack of {every}'] = stack, whole_loss
        planned = make()
        ckptkern.plan(planned, input_ids=ids, labels=ids, budget=PLANNED_FOR)
        models[f"{PLANNED}, {format_size(PLANNED_FOR)}"] = planned, whole_loss
    return {variant: functools.partial(loss, model, ids) for variant, (model, loss) in models.items()}


def measured(steps: dict[str, Callable[[], Tensor]], rounds: int, base: str) -> list[Row]:
    """Returns rows of the peaks of forward and backward and, if there are rounds, of CPU seconds and their ratio to base's."""
    rows: list[Row] = []
    for name, loss in steps.items():
        with peak_memory("cpu") as peak:
            loss().backward()
        rows.append({"variant": name, "peak_bytes": peak.bytes})
    if rounds:

        def clock(step: measure.Step, index: int) -> Callable[[], float]:
            gc.collect()
            return measure.cpu_clock(step, index)

        timed = {name: lambda _, loss=loss: loss().backward() for name, loss in steps.items()}
        times, errors = measure.interleaved(timed, clock, rounds)
        if errors:
            raise RuntimeError(f"a step fails when it is timed: {errors}")
        seconds = {name: statistics.median(ms) / 1e3 for name, ms in times.items()}
        for row in rows:
            own = seconds[row["variant"]]
            row |= {"seconds": round(own, 3), "ratio": round(own / seconds[base], 3)}
    return rows


def grouped(rows: list[Row]) -> dict[str, dict[str, list[Row]]]:
    """Returns the rows by model and variant."""
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault(row["model"], {}).setdefault(row["variant"], []).append(row)
    return groups


def extrapolated(of: list[Row]) -> tuple[str, str]:
    """Returns KiB per token between the last two lengths, and the tokens at which the line through them meets the budget.
    They are computed, not run, and so at most four times the last length, beyond which another part of the step may decide."""
    before, last = of[-2:]
    growth = (last["peak_bytes"] - before["peak_bytes"]) / (last["tokens"] - before["tokens"])
    longest, most = int(last["tokens"] + (BUDGET - last["peak_bytes"]) / growth), 4 * last["tokens"]
    return f"{growth / 1024:,.1f}", f"{longest:,}" if longest <= most else f"> {most:,}"


def table(rows: list[Row]) -> str:
    lines = []
    for model, of_model in grouped(rows).items():
        lengths = [row["tokens"] for row in of_model["eager"]]
        heading = [model, *(f"{n:,} tokens, MiB" for n in lengths)]
        if len(lengths) > 1:
            heading += ["KiB a token", f"longest in {format_size(BUDGET)}", "time"]
        lines += ["", f"| {' | '.join(heading)} |", "|---" + "|---:" * (len(heading) - 1) + "|"]
        for variant, of in of_model.items():
            cells = [variant, *(f"{row['peak_bytes'] / MIB:,.0f}" for row in of)]
            if len(lengths) > 1:  # a plan's peak is its budget at every length
                cells += ("", "") if variant.startswith(PLANNED) else extrapolated(of)
                cells.append(next((f"{row['ratio']:.2f}" for row in of if "ratio" in row), ""))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).strip()


def picture(rows: list[Row], path: Path) -> None:
    """Plots the peak of each variant of the Llama over the sequence length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for variant, of in grouped(rows)[LLAMA].items():
        style = "-" if variant.startswith("ckptkern") else "--"
        peaks = [row["peak_bytes"] / MIB for row in of]
        axes.plot([row["tokens"] for row in of], peaks, style, marker="o", ms=3, label=variant)
    axes.set(xlabel="tokens", ylabel="peak of a step, MiB", yscale="log", title=LLAMA)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.frontier", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 2048, 4096], help="lengths (default: 1024 2048 4096)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="of timed steps, of which the median counts (default: 2)")
    parser.add_argument("--out", type=Path, help="the CSV to write")
    parser.add_argument("--picture", type=Path, help="the picture of the Llama's peaks to write")
    args = parser.parse_args()
    if hint := missing("transformers", "scipy", "liger_kernel"):
        parser.error(hint)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, tokens in [*((LLAMA, n) for n in args.tokens), *((name, TIMED) for name in MODELS if name != LLAMA)]:
        ids = torch.randint(0, SIZES["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(1))
        rounds = args.rounds if (name, tokens) == (LLAMA, TIMED) else 0
        rows += [
            {"model": name, "tokens": tokens} | row for row in measured(variants(name, ids), rounds, CHECKPOINTING)
        ]
        print(f"{name}, {tokens} tokens: done", file=sys.stderr)
    if args.out:
        fields = "model", "variant", "tokens", "peak_bytes", "seconds", "ratio"
        write_rows(args.out, ({name: row.get(name) for name in fields} for row in rows))
    if args.picture:
        picture(rows, args.picture)
    print(f"torch {torch.__version__}, float32\n{table(rows)}")


if __name__ == "__main__":
    main()
