"""A training step of a model before and after convert, and what is compared of the two."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ckptkern
from ckptkern.memory import saved_tensors

TRAINED = ("memory", "condition")  # keyword arguments that get a gradient, as the first argument does


def output_of(result: Any) -> Tensor:
    """Returns the loss that a model computed, or the first tensor that it returned."""
    loss = getattr(result, "loss", None)
    return loss if loss is not None else result if isinstance(result, Tensor) else result[0]


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def step(
    model: nn.Module,
    *args: Any,
    of: Callable[[Any], Tensor] = output_of,
    autocast: torch.dtype | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Returns the output and the gradients of inputs and parameters, zeros without one, for one random state."""
    x, *others = args or (None,)
    inputs = {name: value for name, value in kwargs.items() if name in TRAINED} | ({"x": x} if is_floating(x) else {})
    inputs = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
    arguments = (inputs.get("x", x), *others) if args else ()
    torch.manual_seed(seed)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        y = of(model(*arguments, **kwargs | {name: value for name, value in inputs.items() if name != "x"}))
    parameters = {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters() if p.requires_grad}
    wanted = inputs | parameters
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype) if y.dim() else None
    grads = torch.autograd.grad(y, list(wanted.values()), dy, allow_unused=True)
    return {"output": y.detach()} | {
        name: torch.zeros_like(wanted[name]) if g is None else g for name, g in zip(wanted, grads, strict=True)
    }


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    """Each by its norm. A gradient of rounding alone, such as a key bias's, is compared with the largest."""
    assert ours.keys() == theirs.keys(), f"only one of the two has {ours.keys() ^ theirs.keys()}"
    floor = 1e-2 * max(float(tensor.norm()) for name, tensor in theirs.items() if name != "output")
    for name, want in theirs.items():
        error = float((ours[name] - want).norm()) / (float(want.norm()) + (name != "output") * floor + 1e-30)
        assert error <= tolerance, (
            f"{name} differs from the original's by {error:.1e} of its norm, allowed {tolerance:.1e}"
        )


def assert_same_steps(ours: nn.Module, theirs: nn.Module, *args: Any, tolerance: float = 2e-5, **kwargs: Any) -> None:
    assert_same(*(step(model, *args, **kwargs) for model in (ours, theirs)), tolerance)


def compiled(model: nn.Module) -> nn.Module:
    """Returns the model as one graph."""
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def pair(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[nn.Module, nn.Module, ckptkern.Conversion]:
    """Returns (a converted copy, the model, the conversion)."""
    ours = copy.deepcopy(model)
    return ours, model, ckptkern.convert(ours, *args, **kwargs)


def saved(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Returns the bytes that a call saves besides parameters."""
    with saved_tensors(model) as saved:
        model(*args, **kwargs)
    return saved.bytes


def calls_of(model: nn.Module) -> dict[str, int]:
    """Returns how many calls with gradients ran fused, as an activation checkpoint and as the original."""
    forwards = [m.forward for m in model.modules() if hasattr(m.__dict__.get("forward"), "calls")]
    return {how: sum(forward.calls[how] for forward in forwards) for how in ("fused", "checkpointed", "original")}


def variant(base: type, **attributes: Any) -> type:
    """Returns the class with other attributes and methods."""
    return type(base.__name__, (base,), attributes)


def by_deepcopy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def by_pickle(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
