"""Records the order of collectives and computation: what each collective runs under, whatever the clock says.

with bodies_seen(), Timeline() as timeline:
    loss.backward()
print(timeline)                          # every step, in order
timeline.collectives                     # each with the steps between its start and its wait
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ckptkern.ops.registration.gradients import VIEWS, Late, arrived

MATMULS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "matmul", "linear")
SILENT = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "_local_scalar_dense")


@dataclass
class Step:
    """kind: "start" or "wait" of a collective, "matmul", "attention", "elementwise" (all else that computes), or an "op" of a
    library, such as c10d, whose collectives have no wait that a mode could see. shapes: of a matmul's operands."""

    kind: str
    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    number: int = 0  # of the collective

    def __str__(self) -> str:
        if self.kind in ("start", "wait"):
            return f"{self.kind} {self.name} {self.number}"
        if self.kind == "matmul":
            return "matmul " + " @ ".join(str(list(shape)) for shape in self.shapes)
        return self.name if self.kind == "op" else self.kind


@dataclass
class Collective:
    """A collective, the steps between its start and its wait; `waited` is False if nothing has waited for it."""

    name: str
    number: int
    size: int  # elements that it gives
    under: list[Step] = field(default_factory=list)
    waited: bool = False

    def count(self, kind: str) -> int:
        return sum(step.kind == kind for step in self.under)

    def matmuls(self) -> list[tuple[tuple[int, ...], ...]]:
        return [step.shapes for step in self.under if step.kind == "matmul"]

    def __str__(self) -> str:
        counts = Counter(step.kind for step in self.under)
        parts = [f"{counts[kind]} {kind}" for kind in ("matmul", "attention", "elementwise") if counts[kind]]
        return f"{self.name} {self.number} of {self.size} elements: {', '.join(parts) or 'nothing'}"


class Timeline(TorchDispatchMode):
    """The steps of what runs inside, in the order in which the host issues them; autograd's threads inherit the mode."""

    def __init__(self):
        super().__init__()
        self.steps: list[Step] = []
        self.collectives: list[Collective] = []
        self.results: dict[int, tuple[Tensor, Collective]] = {}  # holds tensors, so that none gets another's storage

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in VIEWS:  # what an operation on a late tensor does first
            with self:
                args, kwargs = tree_map_only(Late, arrived, (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        namespace, name = func.namespace, func._schema.name.partition("::")[2]
        if namespace == "_c10d_functional":
            if name == "wait_tensor":
                self.wait(args[0])
            else:
                self.start(name, out)
        elif namespace not in ("aten", "profiler"):
            self.add(Step("op", f"{namespace}::{name}"))
        elif namespace == "aten":
            self.compute(func, name, args)
        return out

    def start(self, name: str, out: Tensor) -> None:
        collective = Collective(name, len(self.collectives), out.numel())
        self.collectives.append(collective)
        self.results[out.untyped_storage()._cdata] = out, collective
        self.add(Step("start", name, number=collective.number))

    def wait(self, tensor: Tensor) -> None:
        _, collective = self.results[tensor.untyped_storage()._cdata]
        if not collective.waited:
            collective.waited = True
            self.add(Step("wait", collective.name, number=collective.number))

    def compute(self, func: Any, name: str, args: tuple) -> None:
        if func.is_view or name in SILENT or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(args)):
            return
        if name in MATMULS:
            tensors = [arg for arg in args if isinstance(arg, Tensor)][-2:]
            self.add(Step("matmul", name, tuple(tuple(tensor.shape) for tensor in tensors)))
        else:
            self.add(Step("attention" if "attention" in name else "elementwise", name))

    def add(self, step: Step) -> None:
        self.steps.append(step)
        if step.kind not in ("start", "wait"):
            for collective in self.collectives:
                if not collective.waited:
                    collective.under.append(step)

    def __str__(self) -> str:
        """A line for each step, or for equal steps that follow each other."""
        groups = ((text, len(list(group))) for text, group in itertools.groupby(map(str, self.steps)))
        return "\n".join(text if count == 1 else f"{count} x {text}" for text, count in groups)
