"""The benchmark cases, declared once: a model in PyTorch, ours on the same parameters, and the rivals.

A way is a name and a maker `(model, x) -> function`, whose function takes x to y with the model's own parameters. So
all ways are checked against one float64 copy of the model and share its weights. To add a case, append to CASES.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import ops

Function = Callable[[Tensor], Tensor]
Maker = Callable[[nn.Module, Tensor], Function]

LEVELS = ("none", "selective", "full")
TOKENS = {"cuda": 16384, "cpu": 1024}
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
DROPOUT_P = 0.125  # k/65536 exactly, so that torch's scale is ours


class Size(NamedTuple):
    """Rows of the input and its width; the model's other widths follow from it."""

    width: int
    rows: int

    def __str__(self) -> str:
        return f"d{self.width}x{self.rows}"


@dataclass(frozen=True)
class Case:
    """What is measured.

    model    width -> the reference module, eager PyTorch
    ours     (model, level) -> the same function by ckptkern, on the model's parameters
    sizes    device type -> sizes, the most important first
    priority lower runs first; a case's second size counts one more, and so on
    rivals   further ways; a maker that raises ImportError is reported as missing
    exact    (float64 model, float64 x, a way's y) -> float64 y; where None, the model itself
    host     time the host alone: tiny tensors, one thread, no device synchronisation between steps
    """

    name: str
    model: Callable[[int], nn.Module]
    ours: Callable[[nn.Module, str], Function]
    sizes: dict[str, Sequence[Size]]
    priority: int
    levels: Sequence[str] = LEVELS
    rivals: dict[str, Maker] = field(default_factory=dict)
    exact: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None
    host: bool = False


class Item(NamedTuple):
    """A case at one size."""

    case: Case
    size: Size
    priority: int

    @property
    def name(self) -> str:
        return f"{self.case.name}/{self.size}"


# -- ways that every case has -----------------------------------------------------------------------------------------


def _eager(model: nn.Module, x: Tensor) -> Function:
    return model


def _checkpoint(use_reentrant: bool, model: nn.Module, x: Tensor) -> Function:
    return functools.partial(checkpoint, model, use_reentrant=use_reentrant)


def _compiled(budget: float | None, checkpointed: bool, model: nn.Module, x: Tensor) -> Function:
    """torch.compile. budget: of the partitioner, which reads it when it traces, so here and not at every call."""
    import torch._functorch.config as config

    inner = _checkpoint(False, model, x) if checkpointed else model

    def call(x: Tensor) -> Tensor:
        return inner(x)

    # dynamo keeps what it compiled by code object: without one of its own, this budget would get another's graph
    call = types.FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
    function = torch.compile(call, dynamic=False)
    with config.patch(activation_memory_budget=1.0 if budget is None else budget):
        function(x)
    return function


EAGER, CHECKPOINT = "eager", "torch checkpoint"
CHECKPOINTS = (CHECKPOINT, f"{CHECKPOINT}, reentrant")
COMPILED: dict[str, Maker] = {
    "compile": functools.partial(_compiled, None, False),
    "compile + checkpoint": functools.partial(_compiled, None, True),
    "compile, budget 0.5": functools.partial(_compiled, 0.5, False),
    "compile, budget 0": functools.partial(_compiled, 0.0, False),
}


def ways(case: Case, compile: bool) -> dict[str, Maker]:
    """All ways of a case by name, eager first."""
    found: dict[str, Maker] = {
        EAGER: _eager,
        **{name: functools.partial(_checkpoint, name != CHECKPOINT) for name in CHECKPOINTS},
    }
    for level in case.levels:
        found[f"ckptkern {level}".strip()] = lambda model, x, level=level: case.ours(model, level)
    return {**found, **(COMPILED if compile and not case.host else {}), **case.rivals}


# -- models, ours, and the rivals that have the same thing -----------------------------------------------------------


class MLP(nn.Module):
    """fc2(act(fc1(x))), hidden width 4 d."""

    def __init__(self, width: int, act: nn.Module, bias: bool = True):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width, bias), act, nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), hidden width 8/3 d up to a multiple of 256 (of 8 below 256), no biases: Llama's."""

    def __init__(self, width: int):
        super().__init__()
        step = 256 if width >= 256 else 8
        hidden = -(-8 * width // 3 // step) * step
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def _mlp(activation: str, model: MLP, level: str) -> Function:
    return lambda x: ops.mlp(
        x, model.fc1.weight, model.fc1.bias, model.fc2.weight, model.fc2.bias, activation, recompute=level
    )


def _gated_mlp(model: GatedMLP, level: str) -> Function:
    return lambda x: ops.gated_mlp(x, model.gate.weight, model.up.weight, model.down.weight, recompute=level)


def _stack(width: int, depth: int = 10) -> nn.Module:
    layers = [nn.Linear(width, width) for _ in range(depth)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight)  # keeps the size of activations over the depth
    return nn.Sequential(*itertools.chain.from_iterable((layer, nn.ReLU()) for layer in layers))


def _linear_stack(model: nn.Sequential, level: str) -> Function:
    layers = model[::2]
    return lambda x: ops.linear_stack(
        x, [layer.weight for layer in layers], [layer.bias for layer in layers], "relu", recompute=level
    )


def _linear_act(model: nn.Sequential, level: str) -> Function:
    return lambda x: ops.linear_act(x, model[0].weight, model[0].bias, "relu", recompute=level)


def _dropout_exact(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Dropout by the mask that y shows: every way draws its own. Raises where the rate of kept elements is off."""
    kept = y != 0
    rate, sigma = kept.double().mean().item(), (DROPOUT_P * (1 - DROPOUT_P) / y.numel()) ** 0.5
    if abs(rate - (1 - DROPOUT_P)) > 6 * sigma:
        raise ValueError(f"keeps {rate:.4f} of the elements, not {1 - DROPOUT_P}")
    return torch.where(kept, x / (1 - DROPOUT_P), 0)


def _flash_attn_mlp(activation: str, model: MLP, x: Tensor) -> Function:
    """FusedMLP at its checkpoint level 2, which keeps x only. No erf GELU."""
    fused_mlp_func = importlib.import_module("flash_attn.ops.fused_dense").fused_mlp_func
    # -1: its authors found the unfused GEMM quicker on H100 for GELU; ReLU's bit mask needs the fused one
    options = dict(activation=activation, checkpoint_lvl=2, heuristic=0 if activation == "relu" else -1)
    return lambda x: fused_mlp_func(x, model.fc1.weight, model.fc2.weight, model.fc1.bias, model.fc2.bias, **options)


def _quack_mlp(activation: str, model: MLP, x: Tensor) -> Function:
    """QuACK's recomputing MLP: no biases, no erf GELU."""
    mlp_func = importlib.import_module("quack.mlp").mlp_func
    return lambda x: mlp_func(x, model.fc1.weight, model.fc2.weight, activation, recompute=True)


def _liger_swiglu(model: GatedMLP, x: Tensor) -> Function:
    """Liger's SwiGLU: torch's products around one kernel that rebuilds silu(g) in backward."""
    function = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction
    return lambda x: model.down(function.apply(model.gate(x), model.up(x)))


def _sizes(cuda: Sequence[int], cpu: Sequence[int], cuda_rows: int = TOKENS["cuda"]) -> dict[str, list[Size]]:
    return {"cuda": [Size(d, cuda_rows) for d in cuda], "cpu": [Size(d, TOKENS["cpu"]) for d in cpu]}


_MLP_SIZES = _sizes(cuda=(1024, 4096, 2048, 512, 256), cpu=(128, 256))
_STACK_SIZES = {
    "cuda": [Size(64, 2**18), Size(1024, TOKENS["cuda"]), Size(128, 2**18), Size(256, 2**16), Size(32, 2**18)],
    "cpu": [Size(64, 2048), Size(128, TOKENS["cpu"])],
}

CASES = [
    Case("mlp-gelu", lambda d: MLP(d, nn.GELU()), functools.partial(_mlp, "gelu"), _MLP_SIZES, priority=1),
    Case(
        "mlp-relu", lambda d: MLP(d, nn.ReLU()), functools.partial(_mlp, "relu"), _MLP_SIZES, priority=2,
        rivals={"flash-attn FusedMLP": functools.partial(_flash_attn_mlp, "relu")},
    ),
    Case(
        "mlp-gelu_tanh-nobias", lambda d: MLP(d, nn.GELU("tanh"), bias=False), functools.partial(_mlp, "gelu_tanh"),
        _sizes(cuda=(1024, 4096), cpu=(128,)), priority=2,
        rivals={
            "QuACK mlp_func": functools.partial(_quack_mlp, "gelu_tanh_approx"),
            "flash-attn FusedMLP": functools.partial(_flash_attn_mlp, "gelu_approx"),
        },
    ),
    Case(
        "gated_mlp-silu", GatedMLP, _gated_mlp, _sizes(cuda=(1024, 4096, 2048), cpu=(128, 256)), priority=1,
        rivals={"liger-kernel SwiGLU": _liger_swiglu},
    ),
    Case("linear_stack-relu", _stack, _linear_stack, _STACK_SIZES, priority=1),
    Case(
        "linear_act-relu", lambda d: nn.Sequential(nn.Linear(d, d), nn.ReLU()), _linear_act,
        _sizes(cuda=(1024, 4096), cpu=(256,)), priority=3,
    ),
    Case(
        "dropout", lambda d: nn.Dropout(DROPOUT_P), lambda model, level: lambda x: ops.dropout(x, DROPOUT_P),
        _sizes(cuda=(4096,), cpu=(256,)), priority=3, levels=("",), exact=_dropout_exact,
    ),
    Case(
        "host", lambda d: MLP(d, nn.GELU()), functools.partial(_mlp, "gelu"),
        {"cuda": [Size(64, 64)], "cpu": [Size(8, 4)]}, priority=0, levels=("full",), host=True,
    ),
]  # fmt: skip


def items(device: str) -> list[Item]:
    """All cases at all sizes for a device type, the most important first."""
    found = [Item(case, size, case.priority + place) for case in CASES for place, size in enumerate(case.sizes[device])]
    return sorted(found, key=lambda item: item.priority)


def build(item: Item, device: torch.device, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """(model, x, dy) of an item, random, in the device's dtype; x needs a gradient. y has x's shape in every case."""
    torch.manual_seed(seed)
    dtype = DTYPES[device.type]
    model = item.case.model(item.size.width).to(device, dtype)
    x, dy = (torch.randn(item.size.rows, item.size.width, device=device, dtype=dtype) for _ in range(2))
    return model, x.requires_grad_(), dy
