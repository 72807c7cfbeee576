"""Peak memory and time of a training step over the length of the sequence: `make bench-frontier`.

A Llama of transformers, float32, one thread, gradients allocated before the step. Variants run interleaved. Peak bytes are
exact; of times only the ratio to gradient checkpointing means anything, and only within one run. Writes a CSV and prints the
table.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ckptkern
from ckptkern.extras import missing
from ckptkern.memory import format_size, parse_size, peak_memory

from . import counted

MIB = 2**20
CHECKPOINTING = "gradient checkpointing"
PLANNED = "ckptkern.plan"
Step = Callable[[Tensor], Tensor]  # input ids -> loss


def llama(vocabulary: int, layers: int, width: int, heads: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, use_cache=False, max_position_embeddings=2**20,
        attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def gpt2(vocabulary: int, layers: int, width: int, heads: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads, n_positions=2**13, use_cache=False,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def qwen3_moe(vocabulary: int, layers: int, width: int, heads: int) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, moe_intermediate_size=width,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=width // heads,
        num_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).train()


OTHERS = {"GPT-2": gpt2, "Qwen3-MoE": qwen3_moe}


def whole_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def chunked_loss(model: nn.Module, ids: Tensor, chunks: int = 16) -> Tensor:
    """The loss in checkpointed chunks of tokens, as users of torch before 2.15 write it."""
    hidden = model.base_model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    target = ids[:, 1:].flatten()

    def part(hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, model.lm_head.weight).float(), target, reduction="sum")

    parts = zip(hidden.chunk(chunks), target.chunk(chunks), strict=True)
    return sum(checkpoint(part, *one, use_reentrant=False) for one in parts) / len(target)


def torchs_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """torch 2.15's own chunked loss."""
    hidden = model.base_model(input_ids=ids).last_hidden_state[0, :-1]
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, model.lm_head.weight, ids[0, 1:], options=options)


def checkpointed(model: nn.Module, saves: tuple = ()) -> nn.Module:
    """saves: aten ops whose results are saved (selective checkpointing)."""
    given = {"use_reentrant": False}
    if saves:
        given["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(saves))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given)
    return model


def converted(model: nn.Module, ids: Tensor, **options) -> nn.Module:
    ckptkern.convert(model, input_ids=ids[:, :8], labels=ids[:, :8], **options)
    return model


def stacked(model: nn.Module, every: int) -> nn.Module:
    """Saves the input of every k-th layer alone. transformers walks through a list of one member, it."""
    model.model.layers = nn.ModuleList([ckptkern.nn.LayerStack(model.model.layers, every=every)])
    return model


def tiled(model: nn.Module) -> nn.Module:
    """MLPs by Liger's TiledMLP, with the shards that it chooses. Its kernels need a GPU; this function calls none."""
    from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

    def forward(mlp: nn.Module, x: Tensor) -> Tensor:
        return apply_tiled_mlp(type(mlp).forward, mlp, x)

    for layer in model.model.layers:
        layer.mlp.forward = functools.partial(forward, layer.mlp)
    return model


def planned(model: nn.Module, ids: Tensor, budget: int) -> nn.Module:
    """The quickest choice of modes and workspace whose step stays within the budget."""
    ckptkern.plan(model, input_ids=ids, labels=ids, budget=budget)
    return model


def variants(
    make: Callable[[], nn.Module], ids: Tensor, stacks: bool = True, planned_for: int | None = None
) -> dict[str, Step]:
    sdpa = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,)
    found = {
        "eager": (make(), whole_loss),
        CHECKPOINTING: (checkpointed(make()), whole_loss),
        "checkpointing that saves SDPA, loss in chunks": (checkpointed(make(), sdpa), chunked_loss),
        "checkpointing, loss in chunks": (checkpointed(make()), chunked_loss),
        "ckptkern.convert, defaults": (converted(make(), ids), whole_loss),
        'ckptkern.convert, "full"': (converted(make(), ids, recompute="full"), whole_loss),
        'ckptkern.convert, "full", 4 MiB': (converted(make(), ids, recompute="full", workspace="4MiB"), whole_loss),
    }
    for every in (2, 3) if stacks else ():
        model = stacked(converted(make(), ids, recompute="full", workspace="4MiB"), every)
        found[f'ckptkern.convert, "full", 4 MiB, LayerStack of {every}'] = (model, whole_loss)
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        found["checkpointing, torch's chunked loss"] = (checkpointed(make()), torchs_loss)
    if stacks:
        found["checkpointing, Liger's TiledMLP, loss in chunks"] = (checkpointed(tiled(make())), chunked_loss)
    for model, _ in found.values():
        with_gradients(model)
    if planned_for is not None:
        name = f"{PLANNED}, {format_size(planned_for)}"
        found[name] = (planned(with_gradients(make()), ids, planned_for), whole_loss)
    return {name: functools.partial(loss, model) for name, (model, loss) in found.items()}


def with_gradients(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return model


def measured(model: str, steps: dict[str, Step], ids: Tensor, rounds: int) -> list[dict[str, object]]:
    """Rows of the peaks, and of the times if there are rounds."""
    peaks, seconds = {}, {name: [] for name in steps}
    for name, step in steps.items():
        with peak_memory("cpu") as peak:
            step(ids).backward()
        peaks[name] = peak.bytes
    for _ in range(rounds):
        for name, step in steps.items():
            gc.collect()
            start = time.thread_time()
            step(ids).backward()
            seconds[name].append(time.thread_time() - start)
    rows = [{"model": model, "variant": name, "tokens": ids.shape[1], "peak_bytes": peaks[name]} for name in steps]
    if rounds:
        medians = {name: statistics.median(one) for name, one in seconds.items()}
        for row in rows:
            seconds = medians[row["variant"]]
            row |= {"seconds": round(seconds, 3), "ratio": round(seconds / medians[CHECKPOINTING], 3)}
    return rows


def growth(of: list[dict[str, object]]) -> float:
    """Bytes of a token, between the last two lengths."""
    before, last = of[-2:]
    return (last["peak_bytes"] - before["peak_bytes"]) / (last["tokens"] - before["tokens"])


def longest(of: list[dict[str, object]], budget: int) -> str:
    """The tokens at which the line through the last two lengths meets the budget: computed, not run, so not further than four
    times the last length, from which on another part of the step may decide."""
    last = of[-1]["tokens"]
    found = int(last + (budget - of[-1]["peak_bytes"]) / growth(of))
    return f"{found:,}" if found <= 4 * last else f"> {4 * last:,}"


def grouped(rows: list[dict[str, object]]) -> dict[tuple[str, str], list[dict[str, object]]]:
    found: dict[tuple[str, str], list[dict[str, object]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["variant"]), []).append(row)
    return found


def table(rows: list[dict[str, object]], budget: int) -> str:
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = {variant: of for (one, variant), of in grouped(rows).items() if one == model}
        lengths = [row["tokens"] for row in next(iter(of_model.values()))]
        limit = budget if model not in counted.SHAPES else counted.BUDGET
        heads = [f"{n:,} tokens, MiB" for n in lengths]
        if len(lengths) > 1:
            heads += ["KiB a token", f"longest in {format_size(limit)}"]
        timed = any(row.get("ratio") for of in of_model.values() for row in of)
        heads += ["time"] * timed
        lines += ["", f"| {model} | " + " | ".join(heads) + " |", "|---" + "|---:" * len(heads) + "|"]
        for variant, of in of_model.items():
            cells = [f"{row['peak_bytes'] / MIB:,.0f}" for row in of]
            if len(lengths) > 1:  # a plan's peak is its budget at every length
                cells += ["", ""] if variant.startswith(PLANNED) else [f"{growth(of) / 1024:,.1f}", longest(of, limit)]
            if timed:
                cells.append(next((f"{row['ratio']:.2f}" for row in of if row.get("ratio")), ""))
            lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines).strip()


def picture(rows: list[dict[str, object]], model: str, path: Path) -> None:
    """The peak of each variant over the length of the sequence."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for (one, variant), of in grouped(rows).items():
        if one == model:
            style = "-" if variant.startswith("ckptkern") else "--"
            axes.plot(
                [row["tokens"] for row in of],
                [row["peak_bytes"] / MIB for row in of],
                style,
                marker="o",
                ms=3,
                label=variant,
            )
    axes.set(xlabel="tokens", ylabel="peak of a step, MiB", yscale="log", title=model)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dev.frontier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 2048, 4096], help="lengths (default: 1024 2048 4096)"
    )
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="timed steps of each variant, of which the median counts")
    parser.add_argument("--timed", type=int, default=2048, help="the length whose steps are timed (default: 2048)")
    parser.add_argument("--budget", default="1GiB", help="of the longest sequence (default: 1GiB)")
    parser.add_argument(
        "--planned", default="96MiB", help="of the planned Llama's step at each length (default: 96MiB)"
    )
    parser.add_argument("--only-llama", action="store_true", help="leave out the other models and what is counted")
    parser.add_argument("--out", type=Path, help="the CSV to write")
    parser.add_argument("--picture", type=Path, help="the picture of the Llama's peaks to write")
    given = parser.parse_args()
    budget = parse_size(given.budget)
    planned_for = parse_size(given.planned)
    for option, found in (("budget", budget), ("planned", planned_for)):
        if found is None:
            parser.error(f"--{option}: wanted a size such as 1GiB, not {getattr(given, option)}")
    for needed in ("transformers", "scipy", "liger_kernel"):
        if hint := missing(needed):
            parser.error(hint)
    torch.set_num_threads(1)
    name = f"Llama, {given.layers} layers of {given.width}, {given.vocabulary:,} classes"
    sizes = given.vocabulary, given.layers, given.width, given.heads
    rows = []
    for tokens in given.tokens:
        make = functools.partial(llama, *sizes)
        ids = random_ids(given.vocabulary, tokens)
        rows += measured(
            name, variants(make, ids, planned_for=planned_for), ids, given.rounds if tokens == given.timed else 0
        )
        written(rows, given.out, f"{tokens} tokens")
    for other, build in {} if given.only_llama else OTHERS.items():
        ids = random_ids(given.vocabulary, given.timed)
        steps = variants(functools.partial(build, given.vocabulary, 4, *sizes[2:]), ids, stacks=False)
        rows += measured(f"{other}, 4 layers of {given.width}", steps, ids, 0)
        written(rows, given.out, other)
    if not given.only_llama:
        rows += counted.counted()
        written(rows, given.out, "counted")
    if given.picture:
        picture(rows, name, given.picture)
    print(f"torch {torch.__version__}, float32; counted: bfloat16")
    print(table(rows, budget))


def random_ids(classes: int, tokens: int) -> Tensor:
    return torch.randint(0, classes, (1, tokens), generator=torch.Generator().manual_seed(1))


def written(rows: list[dict[str, object]], out: Path | None, done: str) -> None:
    """The rows so far, in the CSV."""
    print(f"{done}: done", file=sys.stderr, flush=True)
    if out:
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(
                file, ["model", "variant", "tokens", "peak_bytes", "seconds", "ratio"], lineterminator="\n"
            )
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
