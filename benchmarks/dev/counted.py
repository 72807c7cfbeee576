"""Peaks of a training step of Llama 8B and 70B, counted on meta tensors: no memory, no GPU, no computation.

Tensors are counted as the ops that make them run (`ckptkern.conversion.recorder`), in bfloat16, one sequence, without
parameters and their gradients, which are there. What a kernel takes for itself while it runs is not seen. Attention is flash
attention's op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ckptkern
from ckptkern.conversion.recorder import step_of

CLASSES = 128256
WORKSPACE = "2GiB"
BUDGET = 40 * 2**30  # beside parameters and optimizer, of which several GPUs have a part each
CHUNK = 2048  # tokens of the loss in chunks by hand


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int


SHAPES = {"Llama 8B": Shape(32, 4096, 32, 8, 14336), "Llama 70B": Shape(80, 8192, 64, 8, 28672)}


class Decoder(nn.Module):
    """From embedded tokens to the loss, with transformers' norm before the head."""

    def __init__(self, of: Shape, layers: nn.ModuleList, loss: Callable[..., Tensor], tiles: bool):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        self.layers, self.loss, self.norm = layers, loss, LlamaRMSNorm(of.width)
        self.run_norm = functools.partial(ckptkern.tiled, self.norm, workspace=WORKSPACE) if tiles else self.norm
        self.head = nn.Linear(of.width, CLASSES, False)

    def forward(self, x: Tensor, target: Tensor, run: Callable[..., Tensor], *args: Tensor) -> Tensor:
        return self.loss(self.run_norm(run(self.layers, x, *args)), self.head.weight, target)


def loss_in_chunks(h: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    def part(h: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, weight).float(), target, reduction="sum")

    parts = zip(h[0].split(CHUNK), target.split(CHUNK), strict=True)
    return sum(checkpoint(part, *one, use_reentrant=False) for one in parts)


def flash(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """transformers' attention of fused causal attention, whose op has no implementation to choose on the meta device."""
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scaling)[0]
    return out.transpose(1, 2), None


def checkpointed_decoder(of: Shape) -> Decoder:
    """transformers' layers and norm, each layer a checkpoint, and the loss in chunks."""
    from transformers import AttentionInterface, LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    AttentionInterface.register("counted", flash)
    config = LlamaConfig(
        hidden_size=of.width, intermediate_size=of.hidden, num_attention_heads=of.heads, num_key_value_heads=of.kv_heads,
        attn_implementation="counted",
    )  # fmt: skip
    with torch.device("meta"):
        layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(of.layers))
        return Decoder(of, layers, loss_in_chunks, False).to(torch.bfloat16)


def our_decoder(of: Shape, mode: str, every: int = 1) -> Decoder:
    to = dict(device="meta", dtype=torch.bfloat16, recompute=mode, workspace=WORKSPACE)
    layers = [
        ckptkern.nn.LlamaDecoderLayer(of.width, of.heads, of.kv_heads, intermediate_size=of.hidden, **to)
        for _ in range(of.layers)
    ]
    loss = functools.partial(ckptkern.linear_cross_entropy, workspace=WORKSPACE)
    stack = ckptkern.nn.LayerStack(layers, every=every) if every > 1 else nn.ModuleList(layers)
    with torch.device("meta"):
        return Decoder(of, stack, loss, True).to(torch.bfloat16)


def each_checkpointed(layers: Iterable[nn.Module], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    for layer in layers:
        x = checkpoint(lambda x, layer=layer: layer(x, position_embeddings=(cos, sin)), x, use_reentrant=False)
    return x


def each(layers: nn.ModuleList, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if isinstance(layers, ckptkern.nn.LayerStack):
        return layers(x, (cos[0], sin[0]))
    for layer in layers:
        x = layer(x, (cos[0], sin[0]))
    return x


VARIANTS: dict[str, tuple[Callable[[Shape], Decoder], Callable]] = {
    "checkpointing, loss in chunks": (checkpointed_decoder, each_checkpointed),
    "ckptkern, defaults": (functools.partial(our_decoder, mode="selective"), each),
    'ckptkern, "full"': (functools.partial(our_decoder, mode="full"), each),
    'ckptkern, "full", LayerStack of 4': (functools.partial(our_decoder, mode="full", every=4), each),
}


def counted(lengths: Iterable[int] = (16384, 32768)) -> Iterator[dict[str, object]]:
    """Rows of the peaks. Layers are alike, so a step of few is counted twice, and the others rise as between the two."""
    for model, of in SHAPES.items():
        for variant, (make, run) in VARIANTS.items():
            few, more = (8, 12) if "LayerStack" in variant else (2, 3)
            for tokens in lengths:
                less, peak = (step_peak(make(of._replace(layers=n)), of, tokens, run) for n in (few, more))
                peak += (of.layers - more) * (peak - less) // (more - few)
                yield {"model": model, "variant": variant, "tokens": tokens, "peak_bytes": peak}


def step_peak(decoder: Decoder, of: Shape, tokens: int, run: Callable[..., Tensor]) -> int:
    to = dict(device="meta", dtype=torch.bfloat16)
    x = torch.empty(1, tokens, of.width, requires_grad=True, **to)
    target = torch.empty(
        (1, tokens) if decoder.run_norm is not decoder.norm else tokens, dtype=torch.int64, device="meta"
    )
    tables = [torch.empty(1, tokens, of.width // of.heads, **to) for _ in range(2)]
    step = step_of(decoder, (x, target, run, *tables), {}, there=decoder.parameters())
    return step.peak + x.nbytes  # it is there when the step begins, and saved by it
