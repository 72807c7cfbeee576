"""Small random models of transformers' classes, and inputs for them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]  # a model, and the arguments of a call
Sizes = list[tuple[int, str]]
BATCH, TOKENS, WIDTH = 2, 12, 64
# A size, and the names that configurations have for it. Those that a configuration has are set.
SIZES: Sizes = [
    (WIDTH, "hidden_size d_model n_embd dim embed_dim model_dim hidden_dim_model"),
    (WIDTH, "embedding_size word_embed_proj_dim projection_dim decoder_hidden_size"),
    (96, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner hidden_dim decoder_intermediate_size"),
    (96, "feed_forward_size vocab_size"),
    (32, "moe_intermediate_size shared_expert_intermediate_size image_size"),
    (2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"),
    (2, "num_encoder_layers depth decoder_num_hidden_layers num_key_value_heads num_kv_heads num_experts_per_tok"),
    (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (4, "decoder_num_attention_heads num_experts num_local_experts n_routed_experts num_frames"),
    (16, "head_dim d_kv attention_head_dim"),
    (64, "max_position_embeddings n_positions max_source_positions max_target_positions n_ctx max_seq_len"),
    (8, "rotary_dim patch_size num_mel_bins"),
    (3, "num_channels"),
    (2, "type_vocab_size eos_token_id"),
    (1, "bos_token_id decoder_start_token_id"),
    (0, "pad_token_id"),
]
RANDOM = ("drop", "mask_time_prob", "mask_feature_prob")  # in names of what is random in training
MOST = 2e7  # parameters of a small model


def overrides(config: Any, sizes: Sizes = SIZES) -> dict[str, Any]:
    """Returns the sizes for a configuration, and for those inside it, without what is random."""
    known = set(inspect.signature(type(config)).parameters) | set(vars(config))
    named = {name: size for size, names in sizes for name in names.split()}
    changes = {
        name: size
        for name, size in named.items()
        if name in known and isinstance(getattr(config, name, None), (int, type(None)))
    }
    for name, value in vars(config).items():
        if isinstance(value, float) and any(part in name for part in RANDOM):
            changes[name] = 0.0
        if name.endswith("_config") and hasattr(value, "to_dict") and not name.startswith("_"):
            changes[name] = overrides(value, sizes)
    return changes


def built(model_class: type, settings: dict[str, Any], sizes: Sizes = SIZES) -> nn.Module:
    """Returns a model in training without dropout. settings: of the configuration, over the sizes."""
    config_class = model_class.config_class
    config = config_class(**overrides(config_class(), sizes) | settings)
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


def calls(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the arguments of calls that may fit, the likeliest first."""
    names = set(inspect.signature(model.forward).parameters)
    config = model.config
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 32)
    size = size if isinstance(size, int) else 32
    ids = tokens(BATCH, TOKENS)
    candidates = {
        "input_ids": ids,
        "decoder_input_ids": tokens(BATCH, TOKENS - 2),
        "labels": ids,
        "bbox": torch.sort(torch.randint(0, 60, (BATCH, TOKENS, 4)), -1)[0],
        "pixel_values": torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(0)),
        "input_features": torch.randn(BATCH, 8, 128),
        "input_values": torch.randn(BATCH, 4000),
        "use_cache": False,
    }
    arguments = {name: value for name, value in candidates.items() if name in names}
    if "labels" in arguments:  # from which the decoder takes its tokens
        arguments.pop("decoder_input_ids", None)
    found = [arguments]
    if {"pixel_values", "input_ids"} <= arguments.keys():
        for left_out in ("pixel_values", "input_ids"):
            found.append({name: value for name, value in arguments.items() if name != left_out})
    if "hidden_states" in names:
        found.append({"hidden_states": torch.randn(BATCH, TOKENS, WIDTH)})
    return found


def hub(name: str, settings: dict[str, Any] | None = None, **inputs: Any) -> Build:
    """A class of transformers. settings: of its configuration; inputs: beside those that its forward takes."""

    def build() -> tuple[nn.Module, dict[str, Any]]:
        import transformers

        model = built(getattr(transformers, name), settings or {})
        return model, calls(model)[0] | inputs

    return build
