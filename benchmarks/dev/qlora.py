"""Saved and peak bytes and CPU time of a QLoRA step: plain, gradient checkpointing, converted.

    python -m benchmarks.dev.qlora --out benchmarks/results/cpu/qlora.csv      # needs transformers, peft, bitsandbytes

A Llama and a Mixtral of transformers with random weights, their layers' linear layers in bitsandbytes' NF4 with double
quantisation (Mixtral's experts stay dense, as bitsandbytes leaves them), peft's LoRA of rank 8 on all of these, float32, one
thread. Variants run interleaved; only ratios of times mean anything. And the saved bytes of one layer of an 8B Llama at 32,768
tokens, counted on meta tensors, times its 32 layers.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import ckptkern
from ckptkern import Frozen, LoRA
from ckptkern.memory import peak_memory, saved_tensors

MIB = 2**20
PLAIN = "plain"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
D, HIDDEN, KV, HEADS, LAYERS, TOKENS, RANK = 4096, 14336, 1024, 32, 32, 32768, 8  # of an 8B Llama 3
Rows = list[dict[str, Any]]


def base(name: str, layers: int, width: int) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    shape = dict(
        vocab_size=4096, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers, use_cache=False,
        num_attention_heads=width // 64, num_key_value_heads=width // 128,
    )  # fmt: skip
    experts = dict(num_local_experts=4, num_experts_per_tok=2) if name == "Mixtral" else {}
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**shape, **experts))


def to_nf4(model: nn.Module) -> nn.Module:
    """Quantises the linear layers of the model's layers in place, and returns the model."""
    import bitsandbytes

    for path, linear in list(model.model.layers.named_modules()):
        if isinstance(linear, nn.Linear) and path.endswith("proj"):
            weight = linear.weight.data
            with torch.device("meta"):
                made = bitsandbytes.nn.Linear4bit(
                    linear.in_features, linear.out_features, False, compute_dtype=weight.dtype, quant_type="nf4"
                )
            made.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4").to(weight.device)
            model.model.layers.set_submodule(path, made)
    model.is_loaded_in_4bit = True
    return model


def qlora(name: str, layers: int, width: int) -> nn.Module:
    import peft

    model = to_nf4(base(name, layers, width))
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=16, target_modules=TARGETS)).train()


def checkpointing(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model


def converted(model: nn.Module, ids: Tensor, **options: Any) -> nn.Module:
    ckptkern.convert(model, input_ids=ids[:, :16], labels=ids[:, :16], **options)
    return model


def variants(make: Callable[[], nn.Module], ids: Tensor) -> dict[str, nn.Module]:
    return {
        PLAIN: make(),
        "gradient_checkpointing_enable()": checkpointing(make()),
        "converted, defaults": converted(make(), ids),
        'converted, "full"': converted(make(), ids, recompute="full"),
        'converted, "full", 16 MiB': converted(make(), ids, recompute="full", workspace="16MiB"),
    }


def step(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def measured(name: str, models: dict[str, nn.Module], ids: Tensor, rounds: int) -> Rows:
    rows, seconds = [], {variant: [] for variant in models}
    for variant, model in models.items():
        step(model, ids).backward()  # gradients exist
        with saved_tensors(model) as saved:
            step(model, ids)
        with peak_memory("cpu") as peak:
            step(model, ids).backward()
        rows.append(
            dict(model=name, variant=variant, tokens=ids.numel(), saved_bytes=saved.bytes, peak_bytes=peak.bytes)
        )
    for _ in range(rounds):
        for variant, model in models.items():
            gc.collect()
            start = time.thread_time()
            step(model, ids).backward()
            seconds[variant].append(time.thread_time() - start)
    plain = statistics.median(seconds[PLAIN])
    return [row | {"time": round(statistics.median(seconds[row["variant"]]) / plain, 2)} for row in rows]


# -- an 8B on meta tensors ---------------------------------------------------------------------------------------------


def frozen(n: int, k: int) -> Frozen:
    """NF4 is half a byte a value; on the meta device any kind will do, because an op saves what there is."""
    data, scales = torch.empty(n, k // 32, 16, dtype=torch.uint8), torch.empty(n, k // 32, dtype=torch.uint8)
    return Frozen(data.to("meta"), scales.to("meta"), kind="mxfp4")


def lora(n: int, k: int) -> LoRA:
    a, b = (
        torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in ((RANK, k), (n, RANK))
    )
    return LoRA(a, b)


def norm() -> dict[str, Any]:
    return dict(norm="rms", norm_weight=torch.empty(D, device="meta", dtype=torch.bfloat16))


def fused_layer(x: Tensor, recompute: str) -> int:
    """What a call of our layer saves, besides its weights."""
    shapes = {"q": (D, D), "k": (KV, D), "v": (KV, D), "out": (D, D)}
    own = {name: frozen(*shape) for name, shape in shapes.items()}
    attention = dict(
        qkv_weight=(own["q"], own["k"], own["v"]), qkv_bias=None, out_weight=own["out"], out_bias=None, num_heads=HEADS,
        num_kv_heads=8, is_causal=True, rotary=500000.0, lora={name: lora(*shape) for name, shape in shapes.items()}, **norm(),
    )  # fmt: skip
    shapes = {"gate": (HIDDEN, D), "up": (HIDDEN, D), "down": (D, HIDDEN)}
    weights = {f"{name}_weight": frozen(*shape) for name, shape in shapes.items()}
    mlp = weights | dict(
        up_bias=None,
        down_bias=None,
        activation="silu",
        lora={name: lora(*shape) for name, shape in shapes.items()},
        **norm(),
    )
    given = [*_tensors(attention), *_tensors(mlp)]
    with saved_tensors(given) as saved:
        ckptkern.transformer_layer(x, attention, mlp, recompute=recompute)
    return saved.bytes


def _tensors(values: Any) -> Iterable[Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(values) if isinstance(one, Tensor)]


def plain_layer() -> nn.Module:
    """transformers' layer with peft's LoRA: dense frozen weights, of which autograd saves nothing besides the parameter."""
    import peft
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=D, intermediate_size=HIDDEN, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=8, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = peft.get_peft_model(
            transformers.LlamaForCausalLM(config), peft.LoraConfig(r=RANK, target_modules=TARGETS)
        )
    layer = model.base_model.model.model.layers[0].train()
    for module in layer.modules():  # fake tensors of a CPU: on the meta device torch's attention holds all scores
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=torch.bfloat16), p.requires_grad)
    return layer


def counted() -> Rows:
    x = torch.empty(1, TOKENS, D, device="meta", dtype=torch.bfloat16, requires_grad=True)
    found = {f'converted, "{mode}"': fused_layer(x, mode) for mode in ("none", "selective", "full")}
    with FakeTensorMode():
        x = torch.empty(1, TOKENS, D, dtype=torch.bfloat16, requires_grad=True)
        layer = plain_layer()
        angles = tuple(torch.empty(1, TOKENS, D // HEADS, dtype=torch.bfloat16) for _ in range(2))
        run = functools.partial(layer, position_embeddings=angles)
        run_again = functools.partial(checkpoint, run, use_reentrant=False)
        for variant, call in ((PLAIN, run), ("gradient_checkpointing_enable()", run_again)):
            with saved_tensors([*layer.parameters(), *angles]) as saved:
                call(x)
            found[variant] = saved.bytes
    return [
        dict(model="8B Llama, 32 layers, counted", variant=variant, tokens=TOKENS, saved_bytes=LAYERS * saved)
        for variant, saved in found.items()
    ]


def table(rows: Rows) -> str:
    lines = ["| | | tokens | saved, MiB | peak, MiB | time |", "|---|---|---:|---:|---:|---:|"]
    for row in rows:
        cells = [f"{row[name] / MIB:,.1f}" if name in row else "" for name in ("saved_bytes", "peak_bytes")]
        time_ = f"{row['time']:.2f}" if "time" in row else ""
        lines.append(f"| {row['model']} | {row['variant']} | {row['tokens']:,} | {' | '.join(cells)} | {time_} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a CSV")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.randint(4096, (1, options.tokens))
    rows: Rows = counted()
    for name in ("Llama", "Mixtral"):
        make = functools.partial(qlora, name, options.layers, options.width)
        rows += measured(name, variants(make, ids), ids, options.rounds)
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["model", "variant", "tokens", "saved_bytes", "peak_bytes", "time"])
            writer.writeheader()
            writer.writerows(rows)
    print(table(rows))


if __name__ == "__main__":
    main()
