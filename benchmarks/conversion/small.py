"""Builds small random models of transformers' classes, and inputs for them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]  # a model, and the arguments of a call
Sizes = list[tuple[int, str]]
BATCH, TOKENS = 2, 12


def sizes(
    width: int = 64, hidden: int = 96, layers: int = 2, classes: int = 96, image: int = 32, positions: int = 64
) -> Sizes:
    """Returns sizes, and the names that configurations have for them. A configuration's own names are set."""
    return [
        (width, "hidden_size d_model n_embd dim embed_dim model_dim hidden_dim_model"),
        (width, "embedding_size word_embed_proj_dim projection_dim decoder_hidden_size shape_embed_dim"),
        (width, "pronunciation_embed_dim output_embedding_size input_embedding_size"),
        (
            hidden,
            "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner hidden_dim decoder_intermediate_size",
        ),
        (hidden, "feed_forward_size"),
        (classes, "vocab_size shape_vocab_size pronunciation_vocab_size vocab_size_per_layer_input"),
        (width // 8, "hidden_size_per_layer_input"),
        (width // 2, "moe_intermediate_size shared_expert_intermediate_size"),
        (image, "image_size"),
        (layers, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"),
        (layers, "num_encoder_layers depth decoder_num_hidden_layers"),
        (2, "num_key_value_heads num_kv_heads num_experts_per_tok moe_k moe_topk"),
        (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
        (4, "decoder_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts num_frames"),
        (width // 4, "head_dim d_kv attention_head_dim"),
        (positions, "max_position_embeddings n_positions max_source_positions max_target_positions n_ctx max_seq_len"),
        (8, "rotary_dim patch_size num_mel_bins"),
        (32, "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_d_state ssm_state_size"),
        (2, "linear_num_key_heads n_groups mamba_n_groups"),
        (4, "linear_num_value_heads"),
        (8, "mamba_n_heads mamba_num_heads"),
        (32, "q_lora_rank kv_lora_rank v_head_dim qk_nope_head_dim"),
        (16, "qk_rope_head_dim"),
        (3, "num_channels"),
        (2, "type_vocab_size eos_token_id"),
        (1, "bos_token_id decoder_start_token_id"),
        (0, "pad_token_id"),
    ]


SIZES = sizes()
RANDOM = ("drop", "mask_time_prob", "mask_feature_prob")  # in names of what is random in training
MOST = 3e7  # parameters of a small model


def overrides(config: Any, sizes: Sizes = SIZES) -> dict[str, Any]:
    """Returns the sizes for a configuration and those inside it, with randomness off."""
    config.allow_global_per_layer_attribute_access = True  # a size that may vary across layers
    known = set(inspect.signature(type(config)).parameters) | set(vars(config))
    named = {name: size for size, names in sizes for name in names.split()}
    changes = {
        name: size
        for name, size in named.items()
        if name in known and isinstance(getattr(config, name, None), (int, type(None)))
    }
    if "kv_lora_rank" in changes:  # latent attention: each head has keys of its own, rotated in one part
        latent = {"num_key_value_heads": named["num_attention_heads"], "head_dim": named["qk_rope_head_dim"]}
        changes |= {name: size for name, size in latent.items() if name in changes}
    if (getattr(config, "n_group", None) or 0) > 2:  # of experts, more than these
        changes |= {"n_group": 2, "topk_group": 1}
    for name, value in vars(config).items():
        if isinstance(value, float) and any(part in name for part in RANDOM):
            changes[name] = 0.0
        if name.endswith("_config") and hasattr(value, "to_dict") and not name.startswith("_"):
            changes[name] = overrides(value, sizes)
    return changes


def built(model_class: type, settings: dict[str, Any], sizes: Sizes = SIZES) -> nn.Module:
    """Returns a model in training without dropout. settings: of the configuration, and dicts for
    those inside it, over the sizes."""
    config_class = model_class.config_class
    changes = overrides(config_class(), sizes)
    inside = {name: changes[name] | value for name, value in settings.items() if isinstance(changes.get(name), dict)}
    config = config_class(**changes | settings | inside)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    with torch.device("meta"):  # where nothing is initialised
        count = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if count > MOST:
        raise ValueError(f"{model_class.__name__} has {count:,} parameters at the small sizes, more than {MOST:,.0f}")
    torch.manual_seed(0)
    model = model_class(config).train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(1))


def calls(model: nn.Module, batch: int = BATCH, length: int = TOKENS, samples: int = 4000) -> list[dict[str, Any]]:
    """Returns the arguments of calls that may fit, the likeliest first. batch: sequences. length: tokens. samples: of a
    waveform."""
    names = set(inspect.signature(model.forward).parameters)
    config = model.config
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 32)
    size = size if isinstance(size, int) else 32
    ids = tokens(batch, length)
    candidates = {
        "input_ids": ids,
        "decoder_input_ids": tokens(batch, length - 2),
        "labels": ids,
        "bbox": torch.sort(torch.randint(0, 60, (batch, length, 4)), -1)[0],
        "pixel_values": torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)),
        "input_features": torch.randn(batch, 8, 2 * getattr(config, "max_source_positions", length)),
        "input_values": torch.randn(batch, samples),
        "use_cache": False,
    }
    arguments = {name: value for name, value in candidates.items() if name in names}
    if "labels" in arguments:  # from which the decoder takes its tokens
        arguments.pop("decoder_input_ids", None)
    calls = [arguments]
    if {"pixel_values", "input_ids"} <= arguments.keys():
        for left_out in ("pixel_values", "input_ids"):
            calls.append({name: value for name, value in arguments.items() if name != left_out})
    if codebooks := getattr(config, "num_codebooks", 0):
        labels = tokens(batch, length, codebooks)
        calls.append(arguments | {"input_ids": tokens(batch * codebooks, length), "labels": labels})
    calls.append({name: value for name, value in arguments.items() if name in ("input_ids", "labels", "use_cache")})
    if "hidden_states" in names:
        calls.append({"hidden_states": torch.randn(batch, length, config.hidden_size)})
    return calls


def hub(name: str, settings: dict[str, Any] | None = None, **inputs: Any) -> Build:
    """Returns a builder of a class of transformers. settings: of its configuration. inputs: besides those that its forward
    takes."""

    def build() -> tuple[nn.Module, dict[str, Any]]:
        import transformers

        model = built(getattr(transformers, name), settings or {})
        return model, calls(model)[0] | inputs

    return build
