"""The layers that `layers` counts: published configurations, one layer of each, with fewer experts.

The number of experts changes neither the rows that experts get, tokens times top_k, nor any shape but that of the router and of
the weights, as if a GPU held no more of them; a token goes to most of those that are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Layer(NamedTuple):
    """few: a call of the model, which is on the CPU, for convert. many: one of all tokens; only what is before the layer runs.
    name: the layer's."""

    model: nn.Module
    name: str
    few: dict[str, Any]
    many: dict[str, Any]


Build = Callable[[int], Layer]  # from the number of tokens of the second call


def ids(rows: int, columns: int) -> Tensor:
    return torch.randint(3, 90, (rows, columns))


def text(
    kind: str, name: str = "layers.0", length: int = 0, attention: str = "sdpa", few: tuple[int, int] = (1, 12), **settings: Any
) -> Build:  # fmt: skip
    """length: of a sequence, 0 for all tokens in one."""

    def build(tokens: int) -> Layer:
        import transformers

        columns = min(length or tokens, tokens)
        given = (
            {"vocab_size": 96, "pad_token_id": 0}
            | ({} if "num_layers" in settings else {"num_hidden_layers": 1})
            | settings
        )
        config = getattr(transformers, f"{kind}Config")(**given)
        config._attn_implementation = attention
        if kind == "T5":
            model = transformers.T5EncoderModel._from_config(config, dtype=torch.bfloat16)
        else:
            model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16)
        cache = {"use_cache": False} if hasattr(config, "use_cache") and kind != "Bert" and kind != "T5" else {}
        many = {"input_ids": ids(tokens // columns, columns)} | cache
        return Layer(model, name, {"input_ids": ids(*few)} | cache, many)

    return build


def vision(kind: str, name: str, length: int, image_size: int, **settings: Any) -> Build:
    """length: tokens of an image in the layer; there are as many images as give the tokens."""

    def build(tokens: int) -> Layer:
        import transformers

        config = getattr(transformers, f"{kind}Config")(image_size=image_size, **settings)
        config._attn_implementation = "sdpa"
        model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16)

        def images(count: int) -> dict[str, Any]:
            return {"pixel_values": torch.randn(count, 3, image_size, image_size, dtype=torch.bfloat16)}

        return Layer(model, name, images(1), images(-(-tokens // length)))

    return build


def dit(tokens: int) -> Layer:
    """DiT-XL/2 at 256 x 256: 16 heads of 72, latents of 32 x 32 in patches of 2."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=16, attention_head_dim=72, in_channels=4, out_channels=8, num_layers=1, sample_size=32,
        patch_size=2, num_embeds_ada_norm=1000, norm_type="ada_norm_zero",
    ).bfloat16()  # fmt: skip

    def inputs(count: int) -> dict[str, Any]:
        latents = torch.randn(count, 4, 32, 32, dtype=torch.bfloat16)
        timestep = torch.randint(0, 1000, (count,))
        return {"hidden_states": latents, "timestep": timestep, "class_labels": timestep.clone()}

    return Layer(model, "transformer_blocks.0", inputs(2), inputs(-(-tokens // 256)))


LONG = {"max_position_embeddings": 2**17}
GEMMA = dict(
    hidden_size=3840, intermediate_size=15360, num_attention_heads=16, num_key_value_heads=8, head_dim=256,
    query_pre_attn_scalar=256, sliding_window=1024, **LONG,
)  # fmt: skip
NEXT = dict(
    hidden_size=2048, num_attention_heads=16, num_key_value_heads=2, head_dim=256, moe_intermediate_size=512,
    shared_expert_intermediate_size=512, num_experts_per_tok=10, num_experts=12, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, **LONG,
)  # fmt: skip
DEEPSEEK = dict(
    hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_attention_heads=128, num_key_value_heads=128,
    n_shared_experts=1, n_routed_experts=8, n_group=4, topk_group=4, num_experts_per_tok=8, q_lora_rank=1536, kv_lora_rank=512,
    qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, **LONG,
)  # fmt: skip
FAMILIES: dict[str, Build] = {
    "Llama 3.1 8B": text(
        "Llama", hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, **LONG
    ),
    "Qwen3 8B": text(
        "Qwen3", hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128, **LONG
    ),
    "Gemma 3 12B, window": text("Gemma3Text", layer_types=["sliding_attention"], **GEMMA),
    "Gemma 3 12B, global": text("Gemma3Text", layer_types=["full_attention"], **GEMMA),
    "Mixtral 8x7B": text(
        "Mixtral", hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        num_local_experts=3, num_experts_per_tok=2, **LONG,
    ),
    "Qwen3-30B-A3B": text(
        "Qwen3Moe", hidden_size=2048, moe_intermediate_size=768, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=12, num_experts_per_tok=8, **LONG,
    ),
    "GPT-OSS 20B": text(
        "GptOss", attention="eager", hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8,
        head_dim=64, num_local_experts=6, num_experts_per_tok=4, layer_types=["full_attention"], **LONG,
    ),
    "Qwen3-Next 80B-A3B, linear attention": text("Qwen3Next", layer_types=["linear_attention"], **NEXT),
    "Qwen3-Next 80B-A3B, attention": text("Qwen3Next", layer_types=["full_attention"], **NEXT),
    "DeepSeek-V3, dense": text("DeepseekV3", first_k_dense_replace=1, **DEEPSEEK),
    "DeepSeek-V3, MoE": text("DeepseekV3", first_k_dense_replace=0, **DEEPSEEK),
    "DeepSeek-V2-Lite": text(
        "DeepseekV2", hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_attention_heads=16,
        num_key_value_heads=16, n_shared_experts=2, n_routed_experts=8, num_experts_per_tok=6, q_lora_rank=None,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=0, **LONG,
    ),
    "GLM-4.5-Air": text(
        "Glm4Moe", hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, num_attention_heads=96,
        num_key_value_heads=8, head_dim=128, attention_bias=True, n_routed_experts=12, num_experts_per_tok=8,
        first_k_dense_replace=0, **LONG,
    ),
    "BERT large": text(
        "Bert", "encoder.layer.0", 512, hidden_size=1024, intermediate_size=4096, num_attention_heads=16,
        num_hidden_layers=2,  # an encoder of one layer is replaced as a whole
    ),
    "ViT-L/16": vision(
        "ViT", "layers.0", 197, 224, patch_size=16, hidden_size=1024, intermediate_size=4096, num_attention_heads=16,
        num_hidden_layers=1,
    ),
    "T5 v1.1 XL": text(  # the second block of the encoder: the first makes the bias that all share
        "T5", "encoder.block.1", 512, num_layers=2, d_model=2048, d_kv=64, d_ff=5120, num_heads=32,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    ),
    "Swin-B, stage 3": vision(  # 14 x 14 tokens, as of an image of 224 in the third stage; windows of 7, shifted
        "Swin", "encoder.layers.0.blocks.1", 196, 56, patch_size=4, embed_dim=512, depths=[2], num_heads=[16], window_size=7,
        drop_path_rate=0.0,
    ),
    "DiT-XL/2": dit,
}  # fmt: skip
