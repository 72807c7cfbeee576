"""convert on known families of models, small and random: `make convert-families`.

For each: what replaces its layers; loss and gradients against the original in float32, and of both against float64 under
bfloat16 autocast (the converted model's error may be twice the original's); the losses of 20 steps; and what one call saves
eager, with torch.utils.checkpoint round each layer, and converted.
"""

from __future__ import annotations

import argparse
import copy
import csv
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptkern.conversion import revert

from . import measure
from .small import tokens

STEPS = 20
Build = Callable[[], tuple[nn.Module, dict[str, Any]]]

DECODER = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
GROUPED = DECODER | dict(num_key_value_heads=2, pad_token_id=0)
ENCODER = DECODER | dict(max_position_embeddings=64)
VISION = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
)  # fmt: skip
SEQUENCES = dict(
    vocab_size=96, d_model=64, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=96, decoder_ffn_dim=96,
    encoder_attention_heads=4, decoder_attention_heads=4,
)  # fmt: skip
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def hub(model: str, config: str, settings: dict[str, Any], **inputs: Any) -> Build:
    """A class of transformers with a small configuration."""

    def build() -> tuple[nn.Module, dict[str, Any]]:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings)), inputs

    return build


def causal(name: str, settings: dict[str, Any] = GROUPED, config: str = "", **inputs: Any) -> Build:
    given = {"input_ids": tokens(2, 12), "labels": tokens(2, 12), "use_cache": False} | inputs
    return hub(f"{name}ForCausalLM", config or f"{name}Config", settings, **given)


def encoder(name: str, settings: dict[str, Any] = ENCODER) -> Build:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:] = 0
    return hub(f"{name}Model", f"{name}Config", settings, input_ids=tokens(2, 12), attention_mask=mask)


def vision(name: str, settings: dict[str, Any] = VISION, kind: str = "") -> Build:
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return hub(f"{name}{kind}Model", f"{name}{kind}Config", settings, pixel_values=pixels)


def timm_vit(**settings: Any) -> Build:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        import timm

        model = timm.models.vision_transformer.VisionTransformer(
            img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4, mlp_ratio=2, num_classes=10, **settings
        )
        return model, {"x": torch.randn(2, 3, 32, 32)}

    return build


def torch_transformer() -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Transformer(64, 4, 2, 2, 96, 0.0, batch_first=True)
    return model, {"src": torch.randn(2, 12, 64), "tgt": torch.randn(2, 10, 64)}


def padded() -> dict[str, Any]:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    return {"attention_mask": mask}


def diffusion(name: str, settings: dict[str, Any], **inputs: Any) -> Build:
    """A class of diffusers."""

    def build() -> tuple[nn.Module, dict[str, Any]]:
        import diffusers

        return getattr(diffusers, name)(**settings), inputs

    return build


MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
HEADS_OF_16 = GROUPED | {"head_dim": 16}
WINDOWED = HEADS_OF_16 | dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
LATENT = DECODER | dict(
    num_key_value_heads=4, pad_token_id=0, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=16,
)  # fmt: skip
GROUPS = MOE | dict(n_routed_experts=4, n_group=2, topk_group=1)
NOISE, STEPS_OF_NOISE = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 70])
CONTEXT = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
TRANSFORMER_2D = dict(
    num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, patch_size=2
)
FAMILIES: dict[str, Build] = {
    "Llama": causal("Llama"),
    "Llama, llama3 rotary": causal("Llama", GROUPED | {"rope_parameters": LLAMA3}),
    "Llama, yarn rotary": causal("Llama", GROUPED | {"rope_parameters": ROPE | {"rope_type": "yarn"}}),
    "Llama, padded": causal("Llama", **padded()),
    "Mistral": causal("Mistral"),
    "Qwen 2": causal("Qwen2"),
    "Qwen 3": causal("Qwen3", HEADS_OF_16),
    "Gemma": causal("Gemma", HEADS_OF_16),
    "Gemma 2": causal("Gemma2", HEADS_OF_16),
    "Gemma 3": causal("Gemma3", HEADS_OF_16, "Gemma3TextConfig"),
    "Phi-2": causal("Phi", DECODER),
    "Phi-3": causal("Phi3"),
    "GPT-2": hub(
        "GPT2LMHeadModel", "GPT2Config",
        dict(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0),
        input_ids=tokens(2, 12), labels=tokens(2, 12), use_cache=False,
    ),
    "GPT-J": causal(
        "GPTJ",
        dict(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=32, rotary_dim=8, bos_token_id=0, eos_token_id=0),
    ),
    "GPT-NeoX": causal("GPTNeoX", DECODER),
    "Falcon": causal("Falcon", dict(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)),
    "Cohere": causal("Cohere"),
    "OLMo 2": causal("Olmo2"),
    "GLM 4": causal("Glm4", HEADS_OF_16),
    "OPT": causal(
        "OPT", DECODER | dict(ffn_dim=96, max_position_embeddings=32, word_embed_proj_dim=64)
    ),
    "BERT": encoder("Bert"),
    "RoBERTa": encoder("Roberta"),
    "ModernBERT": encoder(
        "ModernBert", ENCODER | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    ),
    "T5": hub(
        "T5ForConditionalGeneration", "T5Config",
        dict(vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0),
        input_ids=tokens(2, 12), labels=tokens(2, 10), use_cache=False,
    ),
    "BART": hub(
        "BartForConditionalGeneration", "BartConfig", SEQUENCES | dict(max_position_embeddings=64),
        input_ids=tokens(2, 12), labels=tokens(2, 10), use_cache=False,
    ),
    "Whisper": hub(
        "WhisperForConditionalGeneration", "WhisperConfig",
        SEQUENCES | dict(
            num_mel_bins=8, max_source_positions=16, max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1,
        ),
        input_features=torch.randn(2, 8, 32), labels=tokens(2, 10), use_cache=False,
    ),
    "ViT": vision("ViT"),
    "DINOv2": vision("Dinov2"),
    "SigLIP": vision("Siglip", kind="Vision"),
    "CLIP": vision("CLIP", kind="Vision"),
    "Swin": vision("Swin", dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)),
    "ConvNeXt": vision("ConvNext", dict(hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 1, 1], image_size=32)),
    "timm ViT": timm_vit(),
    "timm ViT, layer scale, drop path": timm_vit(init_values=0.1, drop_path_rate=0.1),
    "nn.Transformer": torch_transformer,
    "Granite": causal("Granite", GROUPED | {"logits_scaling": 4.0}),
    "Mixtral": causal("Mixtral", GROUPED | {"num_local_experts": 4}),
    "Qwen 2 MoE": causal("Qwen2Moe", GROUPED | MOE | {"num_experts": 4, "shared_expert_intermediate_size": 32}),
    "Qwen 3 MoE": causal("Qwen3Moe", HEADS_OF_16 | MOE | {"num_experts": 4}),
    "DeepSeek V2": causal("DeepseekV2", LATENT | GROUPS | {"topk_method": "group_limited_greedy"}),
    "DeepSeek V3": causal("DeepseekV3", LATENT | GROUPS | {"first_k_dense_replace": 1}),
    "GLM 4 MoE": causal("Glm4Moe", HEADS_OF_16 | GROUPS | {"first_k_dense_replace": 1}),
    "GLM 4 MoE Lite": causal("Glm4MoeLite", LATENT | GROUPS | {"first_k_dense_replace": 1}),
    "MiniCPM 3": causal("MiniCPM3", LATENT),
    "Kimi Linear": causal(
        "KimiLinear",
        LATENT | MOE | dict(
            num_local_experts=4, layer_types=["full_attention"] * 2, mlp_layer_types=["dense", "sparse"], n_group=2,
            topk_group=1,
        ),
    ),
    "GPT-OSS": causal("GptOss", WINDOWED | dict(num_local_experts=4, num_experts_per_tok=2)),
    "Qwen 3 Next": causal(
        "Qwen3Next",
        HEADS_OF_16 | MOE | dict(
            num_experts=4, shared_expert_intermediate_size=32, linear_num_value_heads=4, linear_num_key_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
        ),
    ),
    "Qwen 3.5": causal("Qwen3_5", HEADS_OF_16 | {"layer_types": ["full_attention"] * 2}, "Qwen3_5TextConfig"),
    "AFMoE": causal("Afmoe", WINDOWED | MOE | dict(num_experts=4, num_dense_layers=1)),
    "Swin v2": vision(
        "Swinv2", dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
    ),
    "DiT": diffusion(
        "DiTTransformer2DModel", TRANSFORMER_2D | dict(out_channels=8, num_embeds_ada_norm=10),
        hidden_states=NOISE, timestep=STEPS_OF_NOISE, class_labels=torch.tensor([1, 7]), return_dict=False,
    ),
    "SD 3": diffusion(
        "SD3Transformer2DModel",
        TRANSFORMER_2D | dict(
            joint_attention_dim=32, caption_projection_dim=64, pooled_projection_dim=32, out_channels=4, pos_embed_max_size=8,
        ),
        hidden_states=NOISE, encoder_hidden_states=CONTEXT, pooled_projections=CONTEXT[:, 0], timestep=STEPS_OF_NOISE,
        return_dict=False,
    ),
}  # fmt: skip


def built(build: Build) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = build()
    for p in model.parameters():
        if p.dim() <= 1:  # norms of ones and biases of zeros hide what is done with them
            p.data += 0.1 * torch.randn_like(p)
    return model.eval(), inputs


def compare(name: str) -> measure.Result:
    result = measure.Result(name)
    model, inputs = built(FAMILIES[name])
    original, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    result.saved_checkpoint = measure.saved(measure.checkpointed(model), inputs)
    measure.convert_and_compare(result, model, inputs)
    try:
        exact = measure.step(wide, measure.wide(inputs))
    except RuntimeError:  # torch's grouped matmul of experts takes no float64
        exact = measure.step(original, inputs)
    result.bf16_error = measure.error(measure.step(model, inputs, torch.bfloat16), exact)
    result.bf16_eager_error = measure.error(measure.step(original, inputs, torch.bfloat16), exact)
    ours, theirs = (measure.curve(one, inputs, STEPS) for one in (model, copy.deepcopy(original)))
    result.curve_error = max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(ours, theirs, strict=True))
    if any("forward" in vars(m) for m in revert(model).modules()):
        raise RuntimeError("revert left a forward behind")
    sound = result.gradient_error < 1e-5 and result.bf16_error < 2 * result.bf16_eager_error + 2**-9
    if not sound or not result.curve_error < 1e-3:
        result.verdict = "WRONG"
    return result


def rows(names: list[str]) -> Iterator[measure.Result]:
    for name in names:
        try:
            yield compare(name)
        except ModuleNotFoundError as error:
            print(f"{name}: left out: {error}", flush=True)
        except Exception as error:  # is printed and counted as CRASHED, and the other families still run
            traceback.print_exc()
            yield measure.Result(name, "CRASHED", reasons=[f"{type(error).__name__}: {error}"])


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Bars of what each family saves: eager, with torch.utils.checkpoint round each layer, converted."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    variants = (("saved_eager", "eager", "#c8c8c8"), ("saved_checkpoint", "torch.utils.checkpoint", "#e08214"),
            ("saved_converted", "converted, \"selective\"", "#2166ac"))  # fmt: skip
    figure, axes = pyplot.subplots(figsize=(7.5, 0.32 * len(rows) + 1))
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
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


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
    results = []
    for result in rows([name for name in FAMILIES if args.only.lower() in name.lower()]):
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
                writer = csv.DictWriter(file, list(result.row()))
                writer.writeheader()
                writer.writerows(one.row() for one in results)
    whole = sum(result.verdict == "whole" for result in results)
    print(f"{whole} of {len(results)} families have all their layers fused whole")
    if any(result.verdict in ("WRONG", "CRASHED") for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
