"""Runs convert on small random models of other libraries: `make convert-families`.

For each family it shows what replaces its layers; loss and gradients against the original in float32, and both against float64
under bfloat16 autocast (the converted model's error may be twice the original's); the losses of 20 steps; and the bytes that
one call saves in eager mode, with torch.utils.checkpoint around each layer, and converted.
"""

from __future__ import annotations

import argparse
import collections
import copy
import csv
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptkern.conversion import revert

from . import measure
from .small import BATCH, TOKENS, Build, hub

STEPS = 20
WRONG = 1e-5  # of a gradient's norm in float32


def causal(name: str, settings: dict[str, Any] | None = None, **inputs: Any) -> Build:
    return hub(f"{name}ForCausalLM", settings, **inputs)


def padded(padding: slice, of: int) -> dict[str, Any]:
    """Returns a mask of tokens that hides some of a sequence."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[of, padding] = 0
    return {"attention_mask": mask}


def encoder(name: str, settings: dict[str, Any] | None = None) -> Build:
    return hub(f"{name}Model", settings, **padded(slice(8, None), 0))


def timm_vit(**settings: Any) -> Build:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        import timm

        model = timm.models.vision_transformer.VisionTransformer(
            img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4, mlp_ratio=2, num_classes=10, **settings
        )
        return model.eval(), {"x": torch.randn(2, 3, 32, 32)}

    return build


def torch_transformer() -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Transformer(64, 4, 2, 2, 96, 0.0, batch_first=True)
    return model, {"src": torch.randn(2, 12, 64), "tgt": torch.randn(2, 10, 64)}


def diffusion(name: str, settings: dict[str, Any], **inputs: Any) -> Build:
    """Returns a transformer of diffusers over 2 noisy images of 8 x 8 with 4 channels."""
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    sizes = dict(num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, patch_size=2)

    def build() -> tuple[nn.Module, dict[str, Any]]:
        import diffusers

        model = getattr(diffusers, name)(**sizes | settings)
        return model.eval(), dict(hidden_states=noise, timestep=torch.tensor([3, 70]), return_dict=False) | inputs

    return build


ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ALL_HEADS = {"num_key_value_heads": 4}
WINDOWED = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
LATENT = ALL_HEADS | dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
GROUPS = dict(n_group=2, topk_group=1)
DENSE_FIRST = GROUPS | {"first_k_dense_replace": 1}
SWIN = dict(patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
CONTEXT = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
FAMILIES: dict[str, Build] = {
    "Llama": causal("Llama"),
    "Llama, llama3 rotary": causal("Llama", {"rope_parameters": LLAMA3}),
    "Llama, yarn rotary": causal("Llama", {"rope_parameters": ROPE | {"rope_type": "yarn"}}),
    "Llama, padded": causal("Llama", **padded(slice(4), 1)),
    "Mistral": causal("Mistral"),
    "Qwen 2": causal("Qwen2"),
    "Qwen 3": causal("Qwen3"),
    "Gemma": causal("Gemma"),
    "Gemma 2": causal("Gemma2"),
    "Gemma 3": causal("Gemma3"),
    "Phi-2": causal("Phi", ALL_HEADS),
    "Phi-3": causal("Phi3"),
    "GPT-2": hub("GPT2LMHeadModel"),
    "GPT-J": causal("GPTJ"),
    "GPT-NeoX": causal("GPTNeoX"),
    "Falcon": causal("Falcon"),
    "Cohere": causal("Cohere"),
    "OLMo 2": causal("Olmo2"),
    "GLM 4": causal("Glm4"),
    "OPT": causal("OPT"),
    "BERT": encoder("Bert"),
    "RoBERTa": encoder("Roberta"),
    "ModernBERT": encoder("ModernBert", dict(cls_token_id=1, sep_token_id=2)),
    "T5": hub("T5ForConditionalGeneration", {"decoder_start_token_id": 0}),
    "BART": hub("BartForConditionalGeneration"),
    "Whisper": hub("WhisperForConditionalGeneration"),
    "ViT": hub("ViTModel"),
    "DINOv2": hub("Dinov2Model"),
    "SigLIP": hub("SiglipVisionModel"),
    "CLIP": hub("CLIPVisionModel"),
    "Swin": hub("SwinModel", SWIN),
    "ConvNeXt": hub("ConvNextModel", dict(hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 1, 1], patch_size=4)),
    "timm ViT": timm_vit(),
    "timm ViT, layer scale, drop path": timm_vit(init_values=0.1, drop_path_rate=0.1),
    "nn.Transformer": torch_transformer,
    "Granite": causal("Granite", {"logits_scaling": 4.0}),
    "Mixtral": causal("Mixtral"),
    "Qwen 2 MoE": causal("Qwen2Moe"),
    "Qwen 3 MoE": causal("Qwen3Moe"),
    "DeepSeek V2": causal("DeepseekV2", LATENT | GROUPS | {"topk_method": "group_limited_greedy"}),
    "DeepSeek V3": causal("DeepseekV3", LATENT | DENSE_FIRST | {"head_dim": 8}),
    "GLM 4 MoE": causal("Glm4Moe", DENSE_FIRST),
    "GLM 4 MoE Lite": causal("Glm4MoeLite", LATENT | DENSE_FIRST),
    "MiniCPM 3": causal("MiniCPM3", LATENT),
    "Kimi Linear": causal(
        "KimiLinear",
        LATENT | GROUPS | dict(layer_types=["full_attention"] * 2, mlp_layer_types=["dense", "sparse"]),
    ),
    "GPT-OSS": causal("GptOss", WINDOWED),
    "Qwen 3 Next": causal(
        "Qwen3Next",
        dict(
            linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        ),
    ),
    "Qwen 3.5": causal("Qwen3_5", {"layer_types": ["full_attention"] * 2}),
    "AFMoE": causal("Afmoe", WINDOWED | {"num_dense_layers": 1}),
    "Swin v2": hub("Swinv2Model", SWIN),
    "DiT": diffusion(
        "DiTTransformer2DModel", dict(out_channels=8, num_embeds_ada_norm=10), class_labels=torch.tensor([1, 7])
    ),
    "SD 3": diffusion(
        "SD3Transformer2DModel",
        dict(
            joint_attention_dim=32, caption_projection_dim=64, pooled_projection_dim=32, out_channels=4, pos_embed_max_size=8
        ),
        encoder_hidden_states=CONTEXT, pooled_projections=CONTEXT[:, 0],
    ),
}  # fmt: skip


def disturbed(model: nn.Module) -> nn.Module:
    """Randomizes norms of ones and biases of zeros, which hide what is done with them."""
    for p in model.parameters():
        if p.dim() <= 1 and p.is_floating_point():
            p.data += 0.1 * torch.randn_like(p)
    return model


def compare(name: str) -> measure.Result:
    """Returns how a family and its conversion differ."""
    result = measure.Result(name)
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    disturbed(model)
    original, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    result.saved_checkpoint = measure.saved(measure.checkpointed(model), inputs)
    measure.convert_and_compare(result, model, inputs)
    try:
        exact = measure.step(wide, measure.wide(inputs))
    except RuntimeError:  # torch's grouped matmul of experts takes no float64
        exact = measure.step(original, inputs)
    result.bf16_error = measure.error(measure.step(model, inputs, torch.bfloat16), exact)
    result.bf16_eager_error = measure.error(measure.step(original, inputs, torch.bfloat16), exact)
    ours, theirs = (measure.curve(trained, inputs, STEPS) for trained in (model, copy.deepcopy(original)))
    result.curve_error = max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(ours, theirs, strict=True))
    if any("forward" in vars(m) for m in revert(model).modules()):
        raise RuntimeError("revert left a forward behind")
    sound = result.gradient_error < WRONG and result.bf16_error < 2 * result.bf16_eager_error + 2**-9
    if not sound or not result.curve_error < 1e-3:
        result.verdict = "WRONG"
    return result


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Plots the bytes that each family saves: eager, with torch.utils.checkpoint around each layer, converted."""
    from matplotlib.figure import Figure

    variants = (
        ("saved_eager", "eager", "#c8c8c8"),
        ("saved_checkpoint", "torch.utils.checkpoint", "#e08214"),
        ("saved_converted", 'converted, "selective"', "#2166ac"),
    )
    figure = Figure(figsize=(7.5, 0.32 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    for i, (key, label, colour) in enumerate(variants):
        shares = [100 * int(row[key]) / int(row["saved_eager"]) for row in rows]
        places = [k + 0.27 * (i - 1) for k in range(len(rows))]
        axes.barh(places, shares, 0.25, label=label, color=colour)
    names = [row["name"] + ("" if row["verdict"] == "whole" else f" ({row['verdict']})") for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("bytes saved for backward, % of the unmodified model's")
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversion.families", description=__doc__)
    parser.add_argument("--out", type=Path, help="write a row for each family to this file")
    parser.add_argument("--only", default="", help="families whose names have this in them")
    parser.add_argument("--figure", type=Path, help="draw what --out holds, from an earlier run, to this file")
    args = parser.parse_args()
    if args.figure:
        if args.out is None:
            parser.error("--figure needs --out, the file of an earlier run")
        with args.out.open(newline="") as file:
            return draw(list(csv.DictReader(file)), args.figure)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    names = [name for name in FAMILIES if args.only.lower() in name.lower()]
    results = []
    for name in names:
        try:
            result = compare(name)
        except ModuleNotFoundError as error:
            print(f"{name}: left out: {error}", flush=True)
            continue
        except Exception as error:  # is printed and counted as CRASHED, and the other families still run
            traceback.print_exc()
            result = measure.Result(name, "CRASHED", reasons=[f"{type(error).__name__}: {error}"])
        results.append(result)
        sizes = "  ".join(
            f"{n / 1024:6.0f}" for n in (result.saved_eager, result.saved_checkpoint, result.saved_converted)
        )
        print(
            f"{result.name:34} {result.verdict:8} {sizes} KiB  gradients {result.gradient_error:.0e}, bfloat16 "
            f"{result.bf16_error:.0e} ({result.bf16_eager_error:.0e}), curve {result.curve_error:.0e}, "
            f"{result.seconds:.2f} s  {result.row()['replaced']}",
            flush=True,
        )
        for reason in result.reasons:
            print("     left:", reason[:160])
        if args.out:
            with args.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(result.row()), lineterminator="\n")
                writer.writeheader()
                writer.writerows(row.row() for row in results)
    verdicts = collections.Counter(result.verdict for result in results)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    if verdicts["WRONG"] or verdicts["CRASHED"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
