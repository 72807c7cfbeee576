"""Small random models of transformers' classes, and inputs for them."""

from __future__ import annotations

import copy
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Scale(NamedTuple):
    """Of a model and its inputs. dropout: of everything that is dropped, 0 in most passes."""

    width: int = 32
    hidden: int = 48
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    experts: int = 4
    batch: int = 2
    tokens: int = 10
    dropout: float = 0.0


OTHER = Scale(48, 72, 3, 6, 3, 16, 5, 3, 23)


def sizes(scale: Scale) -> dict[str, Any]:
    """Attributes of configurations, under all the names that models give them. Those that a configuration has are set."""
    return {
        **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "model_dim", "hidden_dim_model"), scale.width),
        **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "projection_dim", "decoder_hidden_size"), scale.width),
        **dict.fromkeys(
            (
                "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "hidden_dim",
                "decoder_intermediate_size", "feed_forward_size", "moe_intermediate_size", "shared_expert_intermediate_size",
            ), scale.hidden,
        ),
        **dict.fromkeys(
            (
                "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
                "num_decoder_layers", "num_encoder_layers", "depth", "decoder_num_hidden_layers",
            ), scale.layers,
        ),
        **dict.fromkeys(
            (
                "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
                "decoder_num_attention_heads",
            ), scale.heads,
        ),
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), scale.kv_heads),
        **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim"), scale.head_dim),
        **dict.fromkeys(("rotary_dim",), 4),
        **dict.fromkeys(
            (
                "max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "n_ctx",
                "max_seq_len",
            ), 64,
        ),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), scale.experts),
        **dict.fromkeys(("num_experts_per_tok",), 2),
        "vocab_size": 96, "image_size": 32, "patch_size": 8, "num_mel_bins": 8, "type_vocab_size": 2, "num_channels": 3,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "num_frames": 4,
    }  # fmt: skip


RANDOM = ("drop", "mask_time_prob", "mask_feature_prob")  # in names of what is random in training


def overrides(config: Any, scale: Scale) -> dict[str, Any]:
    known = set(inspect.signature(type(config)).parameters) | set(vars(config))
    changes = {}
    for name, value in sizes(scale).items():
        if name in known and isinstance(getattr(config, name, None), (int, type(None))):
            changes[name] = value
    for name, value in vars(config).items():
        if isinstance(value, float) and any(part in name for part in RANDOM):
            is_dropout = "drop" in name and "layer" not in name  # whole layers are dropped in no pass
            changes[name] = scale.dropout if is_dropout else 0.0
        if name.endswith("_config") and hasattr(value, "to_dict") and not name.startswith("_"):
            changes[name] = overrides(value, scale)
    return changes


class TooLarge(Exception):
    """More parameters than a small model has."""


def build(config_class: type, model_class: type, scale: Scale, most: float = 2e7) -> nn.Module:
    config = config_class(**overrides(config_class(), scale))
    with torch.device("meta"):  # where nothing is initialised
        count = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if count > most:
        raise TooLarge(f"{count:.0f} parameters")
    torch.manual_seed(0)
    model = model_class(config).train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = scale.dropout
    for p in model.parameters():
        if p.dim() <= 1 and p.is_floating_point():  # norms of ones and biases of zeros hide what is done with them
            p.data += 0.1 * torch.randn_like(p)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(1))


def inputs(model: nn.Module, scale: Scale) -> list[dict[str, Any]]:
    """Calls that may fit, the likeliest first."""
    B, S = scale.batch, scale.tokens
    names = set(inspect.signature(model.forward).parameters)
    config = getattr(model, "config", None)
    given: dict[str, Any] = {}
    if "input_ids" in names:
        given["input_ids"] = tokens(B, S)
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = tokens(B, S - 2)
    if "bbox" in names:
        given["bbox"] = torch.sort(torch.randint(0, 60, (B, S, 4)), -1)[0]
    if "pixel_values" in names:
        size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 32)
        size = size if isinstance(size, int) else 32
        given["pixel_values"] = torch.randn(B, 3, size, size)
    if "input_features" in names:
        given["input_features"] = torch.randn(B, 8, 128)
    if "input_values" in names:
        given["input_values"] = torch.randn(B, 4000)
    if "use_cache" in names:
        given["use_cache"] = False
    calls = [given]
    if {"pixel_values", "input_ids"} <= given.keys():
        calls.append({name: value for name, value in given.items() if name != "pixel_values"})
        calls.append({name: value for name, value in given.items() if name != "input_ids"})
    if "hidden_states" in names:
        calls.append({"hidden_states": torch.randn(B, S, scale.width)})
    return calls
