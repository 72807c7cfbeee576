"""Measures a model before and after convert: loss, gradients, saved bytes, and what replaces it."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ckptkern.conversion import convert
from ckptkern.memory import saved_tensors


@dataclass
class Result:
    """A model's figures. saved_*: bytes of one training call, besides parameters. loss_error: the converted model's,
    relative to the original's. *_error: the largest relative error of all gradients, of the converted model against the
    original's, and in bfloat16 of both against float64. seconds: of convert."""

    name: str
    verdict: str = ""
    replaced: dict[str, int] = field(default_factory=dict)
    whole: int = 0
    layers: int = 0
    saved_eager: int = 0
    saved_checkpoint: int = 0
    saved_converted: int = 0
    loss_error: float = math.nan
    gradient_error: float = math.nan
    bf16_error: float = math.nan
    bf16_eager_error: float = math.nan
    curve_error: float = math.nan
    seconds: float = math.nan
    reasons: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        replaced = " ".join(f"{op}:{count}" for op, count in sorted(self.replaced.items()))
        numbers = {name: f"{value:.2e}" for name, value in asdict(self).items() if isinstance(value, float)}
        return asdict(self) | numbers | {"replaced": replaced, "reasons": " | ".join(self.reasons)}


def loss_of(output: Any) -> Tensor:
    """Returns the output's own loss, or the mean square of its floating-point tensors."""
    loss = output.get("loss") if isinstance(output, dict) else None
    if isinstance(loss, Tensor):
        return loss.float() if loss.dtype.itemsize < 4 else loss
    leaves = tree_leaves(list(output.values()) if isinstance(output, dict) else output)
    wanted = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    if not wanted:
        raise RuntimeError("no output has a gradient")
    wide = ((t.double() if t.dtype == torch.float64 else t.float()).flatten() for t in wanted)
    # takes one tensor, in backward, where t.square().mean() takes four; with half its gradient
    return sum(t @ t.detach() / len(t) for t in wide)


def step(
    model: nn.Module, inputs: dict[str, Any], autocast: torch.dtype | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Returns {"loss": ..., parameter: gradient}."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        loss = loss_of(model(**inputs))
    loss.backward()
    return {"": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def saved(model: nn.Module, inputs: dict[str, Any]) -> int:
    torch.manual_seed(0)
    with saved_tensors(model) as saved:
        model(**inputs)
    return saved.bytes


def error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Returns the largest relative error of all gradients; a gradient counts as at least a hundredth of the largest one."""
    norms = {name: float(torch.linalg.vector_norm(g.double())) for name, g in theirs.items() if name}
    if ours.keys() != theirs.keys():
        return math.inf
    floor = 1e-2 * max(norms.values(), default=0.0)
    worst = 0.0
    for name, norm in norms.items():
        difference = float(torch.linalg.vector_norm(ours[name].double() - theirs[name].double()))
        if math.isnan(difference) and math.isnan(norm):
            continue
        worst = max(worst, difference / (norm + floor + 1e-30)) if not math.isnan(difference) else math.inf
    return worst


def wide(inputs: Any) -> Any:
    return {name: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in inputs.items()}


def called(model: nn.Module, inputs: dict[str, Any]) -> set[nn.Module]:
    """Returns the modules that a call of the model calls."""
    seen: set[nn.Module] = set()
    hooks = [m.register_forward_pre_hook(lambda m, _: seen.add(m)) for m in model.modules()]
    try:
        saved(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def blocks(model: nn.Module) -> list[str]:
    """Returns the names of the model's layers: members of lists of modules of one class that contain linear layers."""
    names = []
    for name, parent in model.named_modules():
        children = list(parent.named_children())
        if isinstance(parent, (nn.ModuleList, nn.Sequential)) and len({type(m) for _, m in children}) == 1:
            linear = [any(p.dim() == 2 for p in child.parameters()) for _, child in children]
            if children[0][1]._modules and all(linear):
                names += [f"{name}.{child}" for child, _ in children]
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names if other != name)]


def checkpointed(model: nn.Module) -> nn.Module:
    """Returns a copy whose layers run in torch.utils.checkpoint."""
    model = copy.deepcopy(model)
    for name in blocks(model):
        layer = model.get_submodule(name)
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def curve(model: nn.Module, inputs: dict[str, Any], steps: int) -> list[float]:
    """Returns the losses of training steps on the same inputs."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    losses = []
    for _ in range(steps):
        losses.append(float(step(model, inputs)[""]))
        optimizer.step()
    return losses


def convert_and_compare(result: Result, model: nn.Module, inputs: dict[str, Any]) -> None:
    """Converts the model in place, and compares it with the original."""
    theirs, result.saved_eager = step(model, inputs), saved(model, inputs)
    start = time.perf_counter()
    conversion = convert(model, **inputs)
    result.seconds = time.perf_counter() - start
    result.replaced = dict(Counter(row.replaced_by for row in conversion.converted))
    result.reasons = list(dict.fromkeys(f"{row.kind}: {row.reason}" for row in conversion.left))
    ran, whole = called(model, inputs), {row.name for row in conversion.converted}
    layers = [name for name in blocks(model) if model.get_submodule(name) in ran]
    result.layers, result.whole = len(layers), sum(layer in whole for layer in layers)
    before = conversion.calls["original"]
    ours = step(model, inputs)
    not_run = conversion.calls["original"] > before
    result.saved_converted = saved(model, inputs)
    result.loss_error = abs(float(ours[""]) - float(theirs[""])) / max(abs(float(theirs[""])), 1e-30)
    result.gradient_error = error(ours, theirs)
    result.verdict = "nothing" if not conversion.converted else "whole" if result.whole == len(layers) > 0 else "part"
    if not_run:
        result.verdict = "did not run"
