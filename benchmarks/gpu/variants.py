"""Defines whole models of transformers with random weights, and the variants of a training step.

All variants of a model share its parameters, gradients and buffers. A step is forward and backward, without an optimizer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import ckptkern
from ckptkern import Frozen
from ckptkern.benchmarks.baselines import checkpointed, chunked_loss, keep_largest_tiles, whole_loss
from ckptkern.benchmarks.cases import COMPILED, EAGER, Figure
from ckptkern.benchmarks.measure import OUT_OF_MEMORY
from ckptkern.benchmarks.own import shared
from ckptkern.conversion import Conversion
from ckptkern.extras import missing
from ckptkern.memory import format_size

from ..dev.frontier import with_gradients

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
WORKSPACE = {"cuda": 256 * 2**20, "cpu": 256 * 2**10}  # the small one, in bytes
CHUNK = 1024  # tokens of which the chunked loss has logits at a time
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # of LoRA
MXFP4_SCALE = 120  # 2 ** (120 - 127): random codes of MXFP4 are then weights of a standard deviation of 0.02
MXFP4 = "MXFP4 in place of NF4, because bitsandbytes is not installed"


class Model(NamedTuple):
    """A model and a step. shape: of a configuration of transformers. adapters: LoRA of `rank` on all linear layers of the
    layers, whose weights are frozen, and with `quantised` in 4 bits. limit: of the longest sequence that is tried, 0 if none
    is. only: the measured variants; empty: all. figures: published by others."""

    title: str
    kind: str
    shape: dict[str, Any]
    batch: int
    length: int
    rank: int | None = None
    quantised: bool = False
    limit: int = 0
    only: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()

    @property
    def name(self) -> str:
        return f"model/{self.title}/{self.batch}x{self.length}"

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def ids(self, device: torch.device, batch: int | None = None, length: int | None = None) -> Tensor:
        """Returns token ids [batch, length]."""
        generator = torch.Generator().manual_seed(1)
        size = (batch or self.batch, length or self.length)
        return torch.randint(self.shape["vocab_size"], size, generator=generator).to(device)


def build(model: Model, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Builds the model on the device, in training mode, with gradients. Raises ImportError if a package is missing."""
    needed = ["transformers"] + ["peft"] * (model.rank is not None)
    if hint := missing(*needed):
        raise ImportError(hint)
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model.kind](**model.shape, use_cache=False, max_position_embeddings=2**20)
    torch.manual_seed(0)
    with torch.device(device):
        whole = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
        if model.quantised:
            whole = quantised(whole)
        if model.rank is not None:
            whole = with_lora(whole, model.rank, dtype)
    return with_gradients(whole)


def quantised(model: nn.Module) -> nn.Module:
    """Replaces the layers' linear weights by 4-bit ones: NF4 or, without bitsandbytes, random codes of MXFP4, which `Frozen`
    dequantises."""
    has_nf4 = not missing("bitsandbytes")
    for path, linear in list(model.model.layers.named_modules()):
        if not (isinstance(linear, nn.Linear) and path.endswith("proj")):
            continue
        n, k = linear.weight.shape
        if has_nf4:
            bits = importlib.import_module("bitsandbytes").nn
            with torch.device("meta"):
                layer = bits.Linear4bit(k, n, False, compute_dtype=linear.weight.dtype, quant_type="nf4")
            weight = bits.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
            layer.weight = weight.to(linear.weight.device)
            model.model.layers.set_submodule(path, layer)
        else:
            codes = torch.randint(256, (n, k // 32, 16), dtype=torch.uint8)
            scales = torch.full((n, k // 32), MXFP4_SCALE, dtype=torch.uint8)
            weight = Frozen(codes, scales, kind="mxfp4", dtype=linear.weight.dtype)
            linear.weight = nn.Parameter(weight, requires_grad=False)
    model.is_loaded_in_4bit = has_nf4
    return model


def with_lora(model: nn.Module, rank: int, dtype: torch.dtype) -> nn.Module:
    """Puts peft's LoRA on the layers' linear layers and freezes everything else. B is random, so that A has a gradient too."""
    import peft

    model = peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS), model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
    return model


# -- variants


class Runner(NamedTuple):
    """A variant that runs. loss: token ids [batch, length] -> the mean loss. around: context of a step, its backward too.
    conversion: of ckptkern's variants."""

    loss: Callable[[Tensor], Tensor]
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    conversion: Conversion | None = None

    def step(self, ids: Tensor) -> Tensor:
        """Adds to the gradients, and returns the loss."""
        with self.around():
            loss = self.loss(ids)
            loss.backward()
        return loss.detach()

    def check_fused(self) -> str:
        """Returns the names of ckptkern's ops, "" for baselines. Raises RuntimeError if a call of them did not run fused."""
        if self.conversion is None:
            return ""
        if others := {kind: n for kind, n in self.conversion.calls.items() if n and kind != "fused"}:
            raise RuntimeError(f"calls of converted modules did not run fused: {others}")
        ops = Counter(row.replaced_by for row in self.conversion.converted)
        return ", ".join(f"{n} {name}" for name, n in ops.items())


Maker = Callable[[nn.Module, Tensor], Runner]


def _eager(model: nn.Module, ids: Tensor) -> Runner:
    return Runner(functools.partial(whole_loss, model))


def _checkpointed(model: nn.Module, ids: Tensor) -> Runner:
    return Runner(functools.partial(whole_loss, checkpointed(shared(model))))


def _chunked(model: nn.Module, ids: Tensor) -> Runner:
    replica = checkpointed(shared(model))
    return Runner(lambda ids: chunked_loss(replica, ids, -(-ids.numel() // CHUNK)))


def _liger(checkpoints: bool, model: nn.Module, ids: Tensor) -> Runner:
    """Runs Liger's kernels and fused loss. Its changes to transformers' module exist only during a step of this variant."""
    if not ids.is_cuda:
        raise ImportError("Liger's kernels need a GPU")
    patching = importlib.import_module("liger_kernel.transformers.monkey_patch")
    keep_largest_tiles()
    replica = checkpointed(shared(model)) if checkpoints else shared(model)
    apply = patching.MODEL_TYPE_TO_APPLY_LIGER_FN[replica.config.model_type]
    around = patched(importlib.import_module(type(replica).__module__), apply, replica)
    return Runner(functools.partial(whole_loss, replica), around)


def patched(
    module: Any, apply: Callable[..., None], model: nn.Module
) -> Callable[[], contextlib.AbstractContextManager]:
    """Calls apply(model=model), undoes its changes to the module, and returns a context that makes them again."""
    before = dict(vars(module))
    apply(model=model)
    changed = {name: value for name, value in vars(module).items() if before.get(name) is not value}
    for name in changed:
        setattr(module, name, before[name])
    return functools.partial(mock.patch.multiple, module, **changed) if changed else contextlib.nullcontext


class _WithLoss(nn.Module):
    """The model and its loss as one function of the ids, for torch.compile."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return whole_loss(self.model, ids)


def _compiled(name: str, model: nn.Module, ids: Tensor) -> Runner:
    """Compiles a copy. During the trace transformers would give SDPA a mask, which flash attention does not take."""
    with mock.patch.object(importlib.import_module(type(model).__module__), "create_causal_mask", _no_mask):
        return Runner(COMPILED[name](_WithLoss(shared(model)), ids))


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Returns the mask of whole causal sequences that transformers has outside of a trace."""


def _ours(model: nn.Module, ids: Tensor, **options: Any) -> Runner:
    """Converts a copy. Raises RuntimeError if a layer, or the head with the loss, is not one op: the figure would be
    eager's."""
    replica, few = shared(model), ids[:, :8]
    conversion = ckptkern.convert(replica, input_ids=few, labels=few, **options)
    ops = Counter(row.replaced_by for row in conversion)
    layers = replica.config.num_hidden_layers
    if ops["transformer_layer"] != layers or not ops["linear_cross_entropy"]:
        reasons = next((f": {row.name}: {row.reason}" for row in conversion if row.reason), "")
        raise RuntimeError(f"convert fused {dict(ops)} of {layers} layers and the head{reasons}")
    return Runner(functools.partial(whole_loss, replica), conversion=conversion)


CHECKPOINTING = "gradient checkpointing"
CHUNKED, LIGER = f"{CHECKPOINTING}, chunked loss", f"{CHECKPOINTING}, Liger"
COMPILE = "compile, budget 0.5"
DEFAULT, FULL = "ckptkern selective", "ckptkern full"


def bounded(kind: str) -> str:
    """Returns the name of ckptkern's variant with a device's small workspace."""
    return f"{FULL}, {format_size(WORKSPACE[kind])}"


def variants(kind: str) -> dict[str, Maker]:
    """Returns all variants by name, eager first, torch.compile last."""
    return {
        EAGER: _eager,
        CHECKPOINTING: _checkpointed,
        CHUNKED: _chunked,
        "Liger": functools.partial(_liger, False),
        LIGER: functools.partial(_liger, True),
        DEFAULT: _ours,
        FULL: functools.partial(_ours, recompute="full"),
        bounded(kind): functools.partial(_ours, recompute="full", workspace=WORKSPACE[kind]),
        COMPILE: functools.partial(_compiled, COMPILE),
    }


# -- models

A100 = (
    "LLaMA-Factory wiki, Performance comparison: A100 40 GB, 4 bits, LoRA of rank 8 on all modules, batch 1, 4 accumulations; "
    "the time has an optimizer's step in it, the GB are the GPU's, with weights"
)
AXOLOTL = (
    "axolotl#3776: Qwen3-8B, one sequence; GPU, adapters and optimizer are not stated; the GB are above those at the beginning "
    "and probably include gradients (16.4 of all parameters), which ours leave out"
)


def _figure(variant: str, source: str, tokens: int, per_second: float, gigabytes: float) -> Figure:
    return Figure(f"published: {variant}", source, 1e3 * tokens / per_second, 1e9 * gigabytes)


def _qlora(length: int, unsloth: tuple[float, float], *figures: Figure, only: tuple[str, ...]) -> Model:
    """Returns a QLoRA model. unsloth: tokens a second and GB; figures: with FlashAttention-2, whose memory ends at 32,768
    tokens."""
    no_memory = Figure("published: FlashAttention-2, A100 40 GB", A100, note=OUT_OF_MEMORY)
    others = *(figures or [no_memory]), _figure("Unsloth, A100 40 GB", A100, length, *unsloth)
    return Model("llama-2-7b-qlora", "llama", LLAMA_2_7B, 1, length, 8, True, only=only, figures=others)


LLAMA_8B = dict(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
LLAMA_2_7B = dict(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
)
QWEN3_8B = dict(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
QWEN3_30B_LAYERS = dict(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
)
LLAMA_1B = dict(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)

FIGURES = (CHUNKED, LIGER, bounded("cuda"))  # of steps that take 6 to 45 s
ON_GPU = (
    Model("llama-1b", "llama", LLAMA_1B, 4, 2048, limit=131072),
    Model("llama-8b", "llama", LLAMA_8B, 1, 4096, limit=65536),
    Model(
        "qwen3-8b",
        "qwen3",
        QWEN3_8B,
        1,
        8192,
        figures=(
            _figure("gradient checkpointing", AXOLOTL, 8192, 3059.4, 17.16),
            _figure("offloaded checkpoints", AXOLOTL, 8192, 3072.9, 17.09),
            _figure("ALST", AXOLOTL, 8192, 2887.6, 17.22),
        ),
    ),
    Model("qwen3-30b-a3b-2-layers", "qwen3_moe", QWEN3_30B_LAYERS, 1, 8192),
    Model("llama-8b-lora", "llama", LLAMA_8B, 1, 8192, 16),
    _qlora(
        32768,
        (2456, 16),
        _figure("FlashAttention-2, A100 40 GB", A100, 32768, 2216, 32),
        only=(CHECKPOINTING, DEFAULT, *FIGURES),
    ),
    _qlora(65536, (1820, 25), only=FIGURES),
    _qlora(100000, (1202, 37), only=FIGURES),
)


def small(model: Model) -> Model:
    """Returns the model with two narrow layers and short sequences, for a CPU."""
    shape = model.shape | dict(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    if "head_dim" in shape:
        shape["head_dim"] = 16
    if "num_experts" in shape:
        shape |= dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    length = 256 // model.batch
    title, limit = f"{model.title}-small", min(model.limit, 1024)
    return model._replace(title=title, shape=shape, length=length, limit=limit, only=(), figures=())


def models(kind: str) -> tuple[Model, ...]:
    """Returns the models of a kind of device, the most valuable first; on a CPU the first of each kind of adapters."""
    if kind == "cuda":
        return ON_GPU
    first = {(model.kind, model.rank, model.quantised): small(model) for model in reversed(ON_GPU)}
    return tuple(reversed(first.values()))
