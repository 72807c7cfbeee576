"""The models whose memory over a step docs/how-to/plan.md shows. They need transformers:

python -m ckptkern report benchmarks/dev/reports.py:llama --figure docs/how-to/report-llama.png
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TOKENS = 256


def llama() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip
    ids = torch.randint(0, 512, (2, TOKENS))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids, "use_cache": False}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = torch.randint(0, 512, (2, TOKENS))
    config = GPT2Config(vocab_size=512, n_positions=TOKENS, n_embd=256, n_layer=8, n_head=8, attn_pdrop=0.0)
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids, "use_cache": False}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=1024,
        image_size=224,
        patch_size=16,
    )
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 224, 224),
        "labels": torch.zeros(4).long(),
    }
