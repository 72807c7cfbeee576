"""Measures peak memory of a training step by family of language models: `python -m benchmarks.conversion.peaks`.

Small random models of transformers' classes run in float32 on one thread, with gradients allocated before the step. The peak of
forward and backward is measured in eager mode; with gradient checkpointing, also with the loss in checkpointed chunks of
tokens; and converted by `convert(model, recompute="full", workspace="4MiB")`, whose loss and gradients are compared with
eager's.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import re
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ckptkern
from ckptkern.benchmarks.baselines import checkpointed, chunked_loss, whole_loss
from ckptkern.conversion.report import write_rows
from ckptkern.extras import missing
from ckptkern.memory import peak_memory

from . import measure
from .families import WRONG, disturbed
from .small import built

MIB = 2**20
WORKSPACE = "4MiB"
WIDTH, LAYERS, CLASSES, HEADS = 128, 4, 512, 4
SCANNED = 256  # most tokens of a family that torch scans token by token on a CPU
LONGEST = 2**16  # positions of a model's tables
# A size, and the names that configurations have for it, as in small.py.
SIZES = [
    (WIDTH, "hidden_size"),
    (LAYERS, "num_hidden_layers"),
    (CLASSES, "vocab_size vocab_size_per_layer_input"),
    (HEADS, "num_attention_heads num_experts num_local_experts n_routed_experts"),
    (2, "num_key_value_heads num_experts_per_tok num_experts_per_token"),
    (32, "head_dim"),
    (352, "intermediate_size"),
    (96, "moe_intermediate_size moe_shared_expert_intermediate_size shared_expert_intermediate_size"),
    (96, "shared_intermediate_size"),
    (16, "hidden_size_per_layer_input"),
    (LONGEST, "max_position_embeddings"),
    (2, "eos_token_id"),
    (1, "bos_token_id"),
    (0, "pad_token_id"),
]
OF_WIDTH = re.compile("size|dim|rank|width|d_head|d_state|d_ssm")  # in names of sizes that grow with the width
NOT_OF_WIDTH = re.compile("vocab|window|sparsity")
MAMBA_2 = dict(mamba_n_heads=8, mamba_d_head=32, mamba_d_state=32)  # 8 heads of 32, which is twice the width
DELTA = dict(linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=HEADS)
# head_dim: what the rotary embedding takes it from
LATENT = dict(
    num_key_value_heads=HEADS, kv_lora_rank=32, head_dim=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32
)
DENSE_FIRST = dict(n_group=2, topk_group=1, first_k_dense_replace=1)
EXPERTS = dict(intermediate_size=96)  # where this is an expert's
WINDOWED = dict(sliding_window=128, layer_types=["sliding_attention"] * 3 + ["full_attention"])
SHARED = dict(sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2)
# transformers' name of the class, and settings of its configuration over the sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Qwen3Moe": {},
    "Gemma3": WINDOWED,
    "Gemma3n": SHARED | dict(intermediate_size=[352] * 4, activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0], laurel_rank=8),
    "Gemma4": SHARED | dict(head_dim=32, global_head_dim=64),
    "Qwen3_5": DELTA,
    "Qwen3Next": DELTA,
    "KimiLinear": LATENT | dict(
        linear_head_dim=32, linear_num_heads=HEADS, layer_types=["linear_attention"] * 3 + ["full_attention"]
    ),
    "OlmoHybrid": {},
    "GraniteMoeHybrid": EXPERTS | MAMBA_2 | dict(layer_types=["linear_attention"] * 3 + ["full_attention"]),
    "Mamba": dict(state_size=8, intermediate_size=2 * WIDTH),
    "Mamba2": dict(state_size=32, num_heads=8, head_dim=32, n_groups=1),
    "FalconH1": MAMBA_2 | dict(mamba_d_ssm=256),
    "Bamba": MAMBA_2 | dict(attn_layer_indices=[3]),
    "Zamba2": dict(
        layers_block_type=["linear_attention", "hybrid"] * 2, num_key_value_heads=HEADS, mamba_d_state=32, adapter_rank=16
    ),
    "NemotronH": dict(mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=32, n_groups=2),
    "Jamba": dict(attn_layer_period=4, attn_layer_offset=3, mamba_d_state=8, use_mamba_kernels=False),
    "RecurrentGemma": dict(lru_width=WIDTH, attention_window_size=128),
    "Lfm2": dict(layer_types=["conv", "conv", "full_attention", "conv"]),
    "Rwkv": dict(attention_hidden_size=WIDTH, context_length=LONGEST),
    "GptOss": EXPERTS | dict(sliding_window=128),
    "MiniMax": EXPERTS,
    "DeepseekV3": LATENT | DENSE_FIRST | dict(q_lora_rank=32),
    "Glm4Moe": DENSE_FIRST,
    "FalconMamba": dict(state_size=8, intermediate_size=2 * WIDTH),
}  # fmt: skip
SEQUENTIAL = {"Mamba", "FalconMamba", "Jamba", "Rwkv"}  # whose scan is a loop over tokens

Loss = Callable[[nn.Module], Tensor]  # of a training call of a model


@dataclass
class Result:
    """A family's figures. layers: those that gradient checkpointing recomputes, of which `whole` are one fused op each and
    `checkpointed` activation checkpoints, whose parts may be fused; of the others only parts are replaced. Peaks in bytes.
    ratio: the converted model's peak to the lower of both with checkpointing. seconds: of convert."""

    name: str
    tokens: int
    layers: int = 0
    whole: int = 0
    checkpointed: int = 0
    eager: int = 0
    checkpointing: int = 0
    chunked: int = 0
    converted: int = 0
    ratio: float = math.nan
    loss_error: float = math.nan
    gradient_error: float = math.nan
    wrong: bool = False
    seconds: float = math.nan
    reasons: list[str] = field(default_factory=list)

    def compare(self, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
        """Sets the errors of a converted model's loss and gradients."""
        self.loss_error = abs(float(ours[""]) - float(theirs[""])) / max(abs(float(theirs[""])), 1e-30)
        self.gradient_error = measure.error(ours, theirs)
        self.wrong = not max(self.loss_error, self.gradient_error) < WRONG

    def row(self) -> dict[str, Any]:
        numbers = {name: f"{value:.3g}" for name, value in asdict(self).items() if isinstance(value, float)}
        return asdict(self) | numbers | {"reasons": " | ".join(self.reasons)}


def wider(settings: dict[str, Any], times: int) -> dict[str, Any]:
    """Returns the settings of a model that is so many times as wide, with as many layers, heads, experts and classes."""

    def scaled(name: str, value: Any) -> Any:
        if not OF_WIDTH.search(name) or NOT_OF_WIDTH.search(name):
            return value
        return [times * size for size in value] if isinstance(value, list) else times * value

    return {name: scaled(name, value) for name, value in settings.items()}


def build(name: str, width: int = WIDTH) -> nn.Module:
    """Returns a family's model with gradients of zeros, the same for each call."""
    import transformers

    settings = {"use_cache": False} | wider(FAMILIES[name], width // WIDTH)
    # A size that a family sets is not set on its configuration too: Gemma 4's head_dim is not the whole model's.
    own = {name: size for size, names in SIZES for name in names.split() if name not in settings}
    sizes = [(size, name) for name, size in wider(own, width // WIDTH).items()]
    model = disturbed(built(getattr(transformers, f"{name}ForCausalLM"), settings, sizes))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model


def layers_of(model: nn.Module) -> list[str]:
    """Returns the names of the layers that gradient checkpointing recomputes, without layers inside layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    names: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not any(name.startswith(f"{other}.") for other in names):
            names.append(name)
    return names


def peak(model: nn.Module, loss: Loss) -> tuple[int, dict[str, Tensor]]:
    """Returns the peak of a step after a first one, and its loss (named "") and all gradients."""
    loss(model).backward()
    model.zero_grad(set_to_none=False)
    gc.collect()
    with peak_memory("cpu") as used:
        value = loss(model)
        value.backward()
    return used.bytes, {"": value.detach()} | {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def compare_peaks(
    result: Result,
    build: Callable[[], nn.Module],
    example: dict[str, Any],
    loss: Loss,
    chunked: Loss | None = None,
    checkpointed: Callable[[nn.Module], nn.Module] = checkpointed,
    workspace: str = WORKSPACE,
) -> None:
    """Measures a model's peaks, and how the converted model differs from eager. build: returns the same model in each call,
    with gradients. example: convert's call. checkpointed: makes activation checkpoints of a model's layers."""
    result.eager, theirs = peak(build(), loss)
    result.checkpointing, _ = peak(checkpointed(build()), loss)
    result.chunked = peak(checkpointed(build()), chunked)[0] if chunked else result.checkpointing
    model = build()
    layers = layers_of(model) or measure.blocks(model)
    start = time.perf_counter()
    conversion = ckptkern.convert(model, **example, recompute="full", workspace=workspace)
    result.seconds = time.perf_counter() - start
    replaced = {row.name: row.replaced_by for row in conversion}
    result.layers = len(layers)
    result.checkpointed = sum(replaced.get(layer) == "checkpoint" for layer in layers)
    result.whole = sum(replaced.get(layer) is not None for layer in layers) - result.checkpointed
    result.reasons = list(dict.fromkeys(f"{row.kind}: {row.reason}" for row in conversion if row.reason))
    result.converted, ours = peak(model, loss)
    result.ratio = result.converted / min(result.checkpointing, result.chunked)
    result.compare(ours, theirs)
    if result.wrong:  # rounding may put a value on the other side of ReLU's zero: float64 decides
        model = build().double()
        ckptkern.convert(model, **measure.wide(example), recompute="full", workspace=workspace)
        result.compare(*(peak(m, loss)[1] for m in (model, build().double())))


def compare(name: str, tokens: int, width: int = WIDTH) -> Result:
    """Returns a family's peaks, and how the converted model differs from eager."""
    result = Result(name, min(tokens, SCANNED) if name in SEQUENTIAL else tokens)
    ids = torch.randint(3, CLASSES, (1, result.tokens), generator=torch.Generator().manual_seed(1))
    example = ids[:, : result.tokens // 4]
    losses = (functools.partial(loss, ids=ids) for loss in (whole_loss, chunked_loss))
    compare_peaks(result, functools.partial(build, name, width), dict(input_ids=example, labels=example), *losses)
    return result


HEADING = (
    f"{'MiB':26} {'tokens':>6} {'eager':>8} {'ckpt':>8} {'chunked':>8} {'ours':>8} {'ratio':>6}  "
    "layers whole ckpt  wrong (loss, gradients)  convert"
)


def line(result: Result) -> str:
    peaks = (result.eager, result.checkpointing, result.chunked, result.converted)
    cells = " ".join(f"{size / MIB:8.1f}" for size in peaks)
    return (
        f"{result.name:26} {result.tokens:6} {cells} {result.ratio:6.2f}  {result.layers:6} {result.whole:5} "
        f"{result.checkpointed:4}  {'WRONG' if result.wrong else 'no':5} ({result.loss_error:.0e}, {result.gradient_error:.0e})"
        f"    {result.seconds:6.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversion.peaks", description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", metavar="family", help=f"of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--tokens", type=int, default=2048, help="of the sequence (default: 2048)")
    parser.add_argument(
        "--width", type=int, default=WIDTH, help=f"hidden size, a multiple of {WIDTH} (default: {WIDTH})"
    )
    parser.add_argument("--out", type=Path, help="write a row for each family to this file")
    parser.add_argument("--reasons", action="store_true", help="print why layers are left or checkpoints")
    args = parser.parse_args()
    if hint := missing("transformers"):
        parser.error(hint)
    if unknown := set(args.families) - set(FAMILIES):
        parser.error(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    if args.width < WIDTH or args.width % WIDTH:
        parser.error(f"--width must be a multiple of {WIDTH}, not {args.width}")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    results, failed = [], []
    print(HEADING)
    for name in args.families or FAMILIES:
        try:
            results.append(compare(name, args.tokens, args.width))
        except Exception:  # is printed and counted, and the other families still run
            traceback.print_exc()
            print(f"{name:17} FAILED", flush=True)
            failed.append(name)
            continue
        print(line(results[-1]), flush=True)
        if args.reasons:
            for reason in results[-1].reasons:
                print("     ", reason[:160])
        if args.out:
            write_rows(args.out, [result.row() for result in results])
    wrong = [result.name for result in results if result.wrong]
    print(f"{len(results)} measured, wrong: {', '.join(wrong) or 'none'}, failed: {', '.join(failed) or 'none'}")
    if wrong or failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
