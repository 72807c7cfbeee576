"""Finds the norms whose results LM heads read, and makes them save their input alone.

A norm written in PyTorch ops, such as transformers' RMSNorm, saves its input, in float32, and what it is divided to, all
tokens of each. In a model whose layers save their inputs these are the largest tensors beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.unmodified import dense, hooked, untouched
from ..segments.tiled import check_token_wise, run_in_chunks
from ..subclasses import PLAIN
from .autocast import upcast
from .binding import Forward, requires_grad
from .report import AGAIN, Row
from .saved import saved_bytes

OP = "tiled"


def may_be_norm(module: nn.Module) -> bool:
    """Has it vectors for parameters, and nothing else?"""
    parameters = list(module.parameters())
    return (
        bool(parameters)
        and not any(True for _ in module.children())
        and not any(True for _ in module.buffers())
        and all(p.dim() == 1 for p in parameters)
        and untouched(module)
        and dense(module)
    )


class Results:
    """The inputs and results of a model's norms in a call."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def note(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], y: Any) -> None:
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor and type(y) is Tensor and args[0].dim() > 1:
            self.calls.append((module, upcast(module)(args[0]), y.detach()))

    def behind(self, inputs: Iterable[Tensor]) -> dict[nn.Module, Tensor]:
        """The norms whose results, or views of them, these are, with their own inputs."""
        read = {one.untyped_storage()._cdata for one in inputs}
        return {module: x for module, x, y in self.calls if y.untyped_storage()._cdata in read}


@contextmanager
def watching(model: nn.Module) -> Iterator[Results]:
    """Notes what the model's norms read and return inside."""
    results = Results()
    handles = [m.register_forward_hook(results.note, with_kwargs=True) for m in list(model.modules()) if may_be_norm(m)]
    try:
        yield results
    finally:
        for handle in handles:
            handle.remove()


class Norm(Forward):
    """The class's forward in chunks of tokens that fit the workspace, which saves its input and recomputes each chunk in
    backward; as it is at recompute="none", without gradients, under torch.compile, which recomputes of itself what is
    elementwise, and in torch.func's transforms."""

    def run(self, *args, **kwargs):
        if (
            self.recompute == "none"
            or not torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
            or torch.jit.is_tracing()
            or not any(map(requires_grad, (*args, *self.module.parameters(recurse=False))))
        ):
            return self.original(*args, **kwargs)
        why = self.why_not(args, kwargs)
        if why:
            return self.unfused(lambda: f"{why}. {AGAIN}", args, kwargs)
        self.count("fused")
        return run_in_chunks(self.module, self.original, args[0], self.workspace)

    def why_not(self, args: tuple, kwargs: dict[str, Any]) -> str:
        """Why it cannot run in chunks; "" if it can."""
        if len(args) != 1 or kwargs:
            return "it is called with more than its input"
        others = [
            type(one).__name__ for one in (*args, *self.module.parameters(recurse=False)) if type(one) not in PLAIN
        ]
        if others:
            return f"its input or weight is a {others[0]}"
        if args[0].dim() < 2:
            return "its input has no dimension of tokens"
        return "it has a hook" if hooked(self.module) else ""


def replaced(name: str, module: nn.Module, x: Tensor, recompute: str) -> tuple[Row, Forward] | None:
    """The norm's row in the table and its new forward; None if it is not token-wise, or saves hardly more than its input."""
    forward = Norm(module, recompute)
    row = Row(name, type(module).__name__, OP)
    try:
        check_token_wise(module, forward.original, x)
        row.saved_before, row.saved_after = (_saved(module, run, x) for run in (module.forward, forward))
    except Exception:  # what convert need not replace stays as it is
        return None
    return (row, forward) if row.saved_before - row.saved_after >= x.numel() * x.element_size() else None


def _saved(module: nn.Module, run: Callable, x: Tensor) -> int:
    return saved_bytes(module, run, (x,), {}, x)
