"""The benchmark cases, declared once: a model in PyTorch, ours on the same parameters, and the baselines.

A variant is a name and a maker `(model, x) -> function`, whose function takes x to y with the model's own parameters. So
all variants are checked against one float64 copy of the model and share its weights. To add a case, append to CASES.

Attention and layers with dropout are checked without it and timed with it, because every variant samples its own masks. tests/
checks that masks are replayed and follow their definition.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import ops
from ..conversion.protection import seeded, unmoved
from ..memory import format_size, parse_size
from ..segments.checkpoint import checkpoint as ckptkern_checkpoint
from .baselines import (
    Function,
    Maker,
    SelectiveCheckpoint,
    cut_cross_entropy,
    experts_by_turns,
    flash_attn_mlp,
    in_chunks,
    liger_layer,
    liger_loss,
    liger_swiglu,
    own_core,
    quack_mlp,
    sdpa_flash,
    torch_chunks,
)
from .models import MLP, Attention, Distillation, GatedMLP, Layer, LlamaLayer, LMHeadLoss, MoE, gpt_layer

MODES = ("none", "selective", "full")
BY_SUBLAYER = ("none/selective", "selective/selective", "selective/full")  # what a layer has between these
TOKENS = {"cuda": 16384, "cpu": 1024}
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
HEADLINE = 1  # the last priority of the first figures: each op, and the most important at d = 1024 and 4096
DROPOUT_P = 0.125  # k/65536 exactly, so that torch's scale is ours


class Size(NamedTuple):
    """Rows of the input and its width; the model's other widths follow from it. length: rows per sequence, if any."""

    width: int
    rows: int
    length: int | None = None

    def __str__(self) -> str:
        return f"d{self.width}x{self.rows}" + (f"-s{self.length}" if self.length else "")

    @property
    def shape(self) -> tuple[int, ...]:
        if self.length is None:
            return self.rows, self.width
        return self.rows // self.length, self.length, self.width


@dataclass(frozen=True)
class Case:
    """What is measured.

    model    width -> the reference module, eager PyTorch
    ours     (model, mode) -> the same function by ckptkern, on the model's parameters
    sizes    device type -> sizes, the most important first
    priority lower runs first, up to HEADLINE apart from the others; a case's second size counts one more, and so on
    baselines   further variants; a maker that raises ImportError is reported as missing
    drops    has dropout: checked with the model in evaluation, timed in training
    exact    (float64 model, float64 x, a variant's y) -> float64 y; None: the model itself
    host     time the host alone: tiny tensors, one thread, no device synchronisation between steps
    dtype    None: the device's own, of DTYPES
    given    (device, dtype or None) -> (model, x): what is measured in place of a model of the size and random numbers
    workspace   bytes, in which variants of ckptkern run that have none of their own; their names then say it
    """

    name: str
    model: Callable[[int], nn.Module]
    ours: Callable[[nn.Module, str], Function]
    sizes: dict[str, Sequence[Size]]
    priority: int
    modes: Sequence[str] = MODES
    baselines: dict[str, Maker] = field(default_factory=dict)
    drops: bool = False
    exact: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None
    host: bool = False
    dtype: torch.dtype | None = None
    given: Callable[[torch.device, torch.dtype | None], tuple[nn.Module, Tensor]] | None = None
    workspace: int | None = None


class Item(NamedTuple):
    """A case at one size."""

    case: Case
    size: Size
    priority: int

    @property
    def name(self) -> str:
        return f"{self.case.name}/{self.size}"


# -- variants that every case has --------------------------------------------------------------------------------------


def eager(model: nn.Module, x: Tensor) -> Function:
    return model


def _checkpoint(use_reentrant: bool, model: nn.Module, x: Tensor) -> Function:
    return functools.partial(checkpoint, model, use_reentrant=use_reentrant)


def _compiled(budget: float | None, checkpointed: bool, model: nn.Module, x: Tensor) -> Function:
    """torch.compile. budget: the partitioner's, which reads it when it traces: here, not at every call."""
    import torch._functorch.config as config

    inner = _checkpoint(False, model, x) if checkpointed else model

    def call(x: Tensor) -> Tensor:
        return inner(x)

    # Dynamo caches compiled graphs by code object: without one of its own, this budget would get another's graph
    call = types.FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
    function = torch.compile(call, dynamic=False)
    checked = model.training
    with config.patch(activation_memory_budget=1.0 if budget is None else budget):
        for training in sorted({checked, True}):  # a model with dropout is checked in one and timed in the other
            model.train(training)
            function(x)
    model.train(checked)
    return function


EAGER, CHECKPOINT = "eager", "torch checkpoint"
REENTRANT = f"{CHECKPOINT}, reentrant"
CHECKPOINTS = (CHECKPOINT, REENTRANT)
COMPILED: dict[str, Maker] = {
    "compile": functools.partial(_compiled, None, False),
    "compile + checkpoint": functools.partial(_compiled, None, True),
    "compile, budget 0.5": functools.partial(_compiled, 0.5, False),
    "compile, budget 0": functools.partial(_compiled, 0.0, False),
}
FIRST_COMPILED = ("compile", "compile, budget 0")  # of the first figures: a compilation takes 10 to 20 s


def variants(case: Case) -> dict[str, Maker]:
    """All variants of a case by name, eager first, except those of torch.compile."""
    found: dict[str, Maker] = {EAGER: eager, CHECKPOINT: functools.partial(_checkpoint, False)}
    for mode in case.modes:
        found[f"ckptkern {mode}".strip()] = lambda model, x, mode=mode: case.ours(model, mode)
    found |= case.baselines
    if case.workspace:
        found = dict(_within(case.workspace, name, make) for name, make in found.items())
    return {**found, REENTRANT: functools.partial(_checkpoint, True)}  # last, because a run may end within a case


class Within(NamedTuple):
    """A maker of a variant whose forward and backward run within a workspace, in bytes."""

    workspace: int
    make: Maker

    def __call__(self, model: nn.Module, x: Tensor) -> Function:
        return self.make(model, x)


def _within(size: int, name: str, make: Maker) -> tuple[str, Maker]:
    """Returns the name with the size and the maker within it; as they are if not ckptkern's, or with a size of its own."""
    if not name.startswith("ckptkern") or ", " in name:
        return name, make
    text = format_size(size)
    return f"{name}, {text if parse_size(text) == size else f'{size} bytes'}", Within(size, make)


def compiled_variants(case: Case, names: Collection[str]) -> dict[str, Maker]:
    """Returns these variants of torch.compile; none for host cases."""
    return {name: make for name, make in COMPILED.items() if name in names and not case.host}


# -- ours --------------------------------------------------------------------------------------------------------------


def _mlp(activation: str, model: MLP, mode: str) -> Function:
    return lambda x: ops.mlp(
        x, model.fc1.weight, model.fc1.bias, model.fc2.weight, model.fc2.bias, activation, recompute=mode
    )


def _gated_mlp(model: GatedMLP, mode: str) -> Function:
    return lambda x: ops.gated_mlp(x, model.gate.weight, model.up.weight, model.down.weight, recompute=mode)


def _stack(width: int, depth: int = 10) -> nn.Module:
    layers = [nn.Linear(width, width) for _ in range(depth)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight)  # keeps the size of activations over the depth
    return nn.Sequential(*itertools.chain.from_iterable((layer, nn.ReLU()) for layer in layers))


def _linear_stack(model: nn.Sequential, mode: str) -> Function:
    layers = model[::2]
    return lambda x: ops.linear_stack(
        x, [layer.weight for layer in layers], [layer.bias for layer in layers], "relu", recompute=mode
    )


def _attention(model: Attention, mode: str) -> Function:
    return lambda x: ops.attention_block(x, **model.arguments(x), training=model.training, recompute=mode)


def _layer(model: Layer | LlamaLayer, mode: str) -> Function:
    """mode: one for both sublayers, or "attention's/MLP's"."""
    recompute = tuple(mode.split("/")) if "/" in mode else mode
    return lambda x: ops.transformer_layer(x, *model.arguments(x), training=model.training, recompute=recompute)


def _linear_act(model: nn.Sequential, mode: str) -> Function:
    return lambda x: ops.linear_act(x, model[0].weight, model[0].bias, "relu", recompute=mode)


def lm_head_loss(model: LMHeadLoss, mode: str, workspace: int | str | None = None) -> Function:
    head = model.linear
    return lambda x: ops.linear_cross_entropy(
        x,
        head.weight,
        model.targets(x),
        linear_bias=head.bias,
        softcap=model.softcap,
        reduction=model.reduction,
        recompute=mode,
        workspace=workspace,
    )


def selected_log_probs(model: LMHeadLoss, mode: str) -> Function:
    head = model.linear
    return lambda x: ops.selected_log_probs(x, head.weight, model.targets(x), bias=head.bias, recompute=mode)


def distillation(model: Distillation, mode: str) -> Function:
    head, teacher = model.linear, model.teacher
    return lambda x: ops.linear_distillation(
        x, head.weight, x, teacher.weight, student_bias=head.bias, teacher_bias=teacher.bias,
        reduction=model.reduction,
    )  # fmt: skip


def topk_distillation(model: Distillation, mode: str) -> Function:
    head = model.linear
    return lambda x: ops.linear_topk_distillation(
        x, head.weight, *model.likeliest(x), student_bias=head.bias, reduction=model.reduction
    )


def dropout_exact(p: float, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Dropout by the mask that y shows, since every variant samples its own. Raises if the rate of saved elements is off."""
    saved = y != 0
    rate, sigma = saved.double().mean().item(), (p * (1 - p) / y.numel()) ** 0.5
    if abs(rate - (1 - p)) > 6 * sigma:
        raise ValueError(f"keeps {rate:.4f} of the elements, not {1 - p}")
    return torch.where(saved, x / (1 - p), 0)


def _moe(model: MoE, mode: str) -> Function:
    return lambda x: ops.moe_mlp(x, *model.routing(x), model.gate_up, model.down, recompute=mode)


ATTENTION_BASELINES: dict[str, Maker] = {
    f"{CHECKPOINT}, SDPA saved": SelectiveCheckpoint,
    "SDPA flash": sdpa_flash,
}


def with_own_core(ours: Callable[[nn.Module, str], Function]) -> dict[str, Maker]:
    return ATTENTION_BASELINES | {"own core, selective": functools.partial(own_core, ours)}


CHUNK_ROWS = 1024  # of a hand-written loop over chunks of rows
CHUNKS = f"{CHECKPOINT}, {CHUNK_ROWS} rows at a time"
HEAD_BASELINES: dict[str, Maker] = {
    "liger-kernel loss": liger_loss,
    "cut-cross-entropy, no filter": cut_cross_entropy,
    CHUNKS: in_chunks(CHUNK_ROWS),
    "torch chunks": torch_chunks,
}


def _sizes(cuda: Sequence[int], cpu: Sequence[int], cuda_rows: int = TOKENS["cuda"]) -> dict[str, list[Size]]:
    return {"cuda": [Size(d, cuda_rows) for d in cuda], "cpu": [Size(d, TOKENS["cpu"]) for d in cpu]}


_MLP_SIZES = _sizes(cuda=(1024, 4096, 2048, 512, 256), cpu=(128, 256))
_STACK_SIZES = {
    "cuda": [Size(64, 2**18), Size(1024, TOKENS["cuda"]), Size(128, 2**18), Size(256, 2**16), Size(32, 2**18)],
    "cpu": [Size(64, 2048), Size(128, TOKENS["cpu"])],
}

# The first two sizes span the range: launches and glue weigh most in the first, matmuls and the core in the second.
_SEQUENCE_SIZES = {
    "cuda": [
        Size(d, TOKENS["cuda"], S)
        for d, S in ((1024, 2048), (4096, 8192), (2048, 2048), (1024, 8192), (4096, 2048), (2048, 8192))
    ],
    "cpu": [Size(64, TOKENS["cpu"], 128), Size(128, TOKENS["cpu"], 256)],
}


def _attention_case(name: str, priority: int, **options) -> Case:
    return Case(
        name, lambda d: Attention(d, **options), _attention, _SEQUENCE_SIZES, priority, drops="dropout_p" in options,
        baselines=ATTENTION_BASELINES if "dropout_p" in options else with_own_core(_attention),
    )  # fmt: skip


CASES = [
    Case("gpt_layer", gpt_layer, _layer, _SEQUENCE_SIZES, 0, MODES + BY_SUBLAYER, with_own_core(_layer)),
    Case(
        "llama_layer", LlamaLayer, _layer, _SEQUENCE_SIZES, 0, MODES + BY_SUBLAYER,
        {"liger-kernel layer": liger_layer, **with_own_core(_layer)},
    ),
    Case("mlp-gelu", lambda d: MLP(d, nn.GELU()), functools.partial(_mlp, "gelu"), _MLP_SIZES, priority=0),
    Case(
        "mlp-relu", lambda d: MLP(d, nn.ReLU()), functools.partial(_mlp, "relu"), _MLP_SIZES, priority=3,
        baselines={"flash-attn FusedMLP": functools.partial(flash_attn_mlp, "relu")},
    ),
    Case(
        "mlp-gelu_tanh-nobias", lambda d: MLP(d, nn.GELU("tanh"), bias=False), functools.partial(_mlp, "gelu_tanh"),
        _sizes(cuda=(1024, 4096), cpu=(128,)), priority=3,
        baselines={
            "QuACK mlp_func": functools.partial(quack_mlp, "gelu_tanh_approx"),
            "flash-attn FusedMLP": functools.partial(flash_attn_mlp, "gelu_approx"),
        },
    ),
    Case(
        "gated_mlp-silu", GatedMLP, _gated_mlp, _sizes(cuda=(1024, 4096, 2048), cpu=(128, 256)), priority=0,
        baselines={"liger-kernel SwiGLU": liger_swiglu},
    ),
    Case(
        "moe_mlp-silu", MoE, _moe, _sizes(cuda=(1024, 4096, 2048), cpu=(64,), cuda_rows=8192), priority=0,
        baselines={"torch, experts interleaved": experts_by_turns},
    ),
    Case("linear_stack-relu", _stack, _linear_stack, _STACK_SIZES, priority=1),
    _attention_case("attention", 1),
    _attention_case("attention-dropout", 3, dropout_p=DROPOUT_P),
    _attention_case("attention-gqa", 4, share=4),
    _attention_case("attention-gqa-dropout", 5, share=4, dropout_p=DROPOUT_P),
    Case(
        "linear_cross_entropy", lambda d: LMHeadLoss(d, {64: 1000, 1024: 50257}.get(d, 128256)), lm_head_loss,
        {"cuda": [Size(1024, TOKENS["cuda"]), Size(4096, 8192), Size(2048, 8192)], "cpu": [Size(64, TOKENS["cpu"])]},
        priority=0, modes=("none", "full"),
        baselines=HEAD_BASELINES,
    ),
    Case(
        "linear_act-relu", lambda d: nn.Sequential(nn.Linear(d, d), nn.ReLU()), _linear_act,
        {"cuda": [Size(1024, TOKENS["cuda"]), Size(4096, TOKENS["cuda"]), Size(4096, 128)], "cpu": [Size(256, TOKENS["cpu"])]},
        priority=1,
    ),
    Case(
        "dropout", lambda d: nn.Dropout(DROPOUT_P), lambda model, mode: lambda x: ops.dropout(x, DROPOUT_P),
        _sizes(cuda=(4096,), cpu=(256,)), priority=1, modes=("",), exact=functools.partial(dropout_exact, DROPOUT_P),
    ),
    Case(
        "host", lambda d: MLP(d, nn.GELU()), functools.partial(_mlp, "gelu"),
        {"cuda": [Size(64, 64)], "cpu": [Size(8, 4)]}, priority=2, modes=("full",), host=True,
    ),
    Case(
        "host-general", lambda d: nn.Sequential(nn.Linear(d, d), nn.ReLU()),
        lambda model, mode: functools.partial(ckptkern_checkpoint, model),
        {"cuda": [Size(64, 64)], "cpu": [Size(8, 4)]}, priority=2, modes=("",), host=True,
    ),
]  # fmt: skip


def items(device: str) -> list[Item]:
    """All cases at all sizes for a device type, the most important first."""
    found = [Item(case, size, case.priority + place) for case in CASES for place, size in enumerate(case.sizes[device])]
    return sorted(found, key=lambda item: item.priority)


def build(item: Item, device: torch.device, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """(model, x, dy) of an item, random, in its case's dtype; a floating x that is made here needs a gradient.

    The model is as variants are checked: in evaluation if it has dropout.
    """
    torch.manual_seed(seed)
    if item.case.given is not None:
        model, x = item.case.given(device, item.case.dtype)
        model.train(not item.case.drops)
    else:
        dtype = item.case.dtype or DTYPES[device.type]
        with device:  # where billions of random numbers take no time
            model = item.case.model(item.size.width).to(device, dtype).train(not item.case.drops)
        x = torch.randn(item.size.shape, device=device, dtype=dtype).requires_grad_()
    with seeded(), unmoved(model):
        y = model(x).detach()
    return model, x, torch.randn_like(y) if y.dim() else torch.ones_like(y)  # a scalar is a loss
