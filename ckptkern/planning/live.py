"""What is allocated during a step: every tensor with the op that made it and the region in which it was made.

A dispatch mode sees each tensor that an op returns, ours as their bodies call torch's, and a weak reference tells when its
storage is gone. So the figure needs no allocator and is there on the meta device too. What a kernel of a library takes for
itself while it runs is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import memory
from ..conversion.protection import seeded, unmoved
from ..conversion.trace import leaves_of
from ..ops.registration.functions import bodies_seen
from ..ops.registration.library import FLOPS

Loss = Callable[[Any], Tensor]  # of what a model returns, to the number that a step differentiates
SELDOM = 16  # ops, after which it is looked for what is gone


class Alive(NamedTuple):
    """A tensor that stands at the peak. place: the region in whose forward or backward it was made, "" outside of all."""

    bytes: int
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: str

    @property
    def what(self) -> str:
        return f"{self.op} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Live(TorchDispatchMode):
    """Bytes that are allocated beyond `known`, as ops run: `bytes` now, `peak`, and what stood at the peak; and the matmuls'
    flops."""

    def __init__(self, known: Iterable[Tensor] = ()):
        super().__init__()
        parts = [part for tensor in known for part in memory.dense_parts(tensor)]
        self.known = {part.untyped_storage()._cdata for part in parts}
        self.alive: dict[int, tuple[StorageWeakRef, Alive]] = {}
        self.bytes = self.peak = 0
        self._at_peak: list[tuple[StorageWeakRef, Alive]] = []
        self.place = ""
        self.highest = 0  # since the last `restart`
        self.over_time: list[int] = []  # after ops that may have reached a new height, and every SELDOM-th
        self.flops = self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if memory.are_placeholders():
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.note(tensor, func)
        if formula := FLOPS.get(func._overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        self.ops += 1
        if self.bytes > self.highest or self.ops % SELDOM == 0:  # with what is gone by now: it may be no new height
            self.forget()
            self.over_time.append(self.bytes)
            self.highest = max(self.highest, self.bytes)
            if self.bytes > self.peak:
                self.peak, self._at_peak = self.bytes, list(self.alive.values())
        return result

    @property
    def at_peak(self) -> list[Alive]:
        return [alive for _, alive in self._at_peak]

    def note(self, tensor: Tensor, func: Any) -> None:
        for part in memory.dense_parts(tensor):
            storage = part.untyped_storage()
            key = storage._cdata
            if key not in self.known and key not in self.alive:
                alive = Alive(
                    storage.nbytes(), func.name().partition("::")[2], tuple(part.shape), part.dtype, self.place
                )
                self.alive[key] = StorageWeakRef(storage), alive
                self.bytes += alive.bytes

    def forget(self) -> None:
        expired = torch.UntypedStorage._expired
        for key in [key for key in self.alive if expired(key)]:
            self.bytes -= self.alive.pop(key)[1].bytes

    def now(self) -> int:
        self.forget()
        return self.bytes

    def restart(self) -> int:
        """The highest since the last call of this."""
        highest, self.highest = self.highest, self.now()
        return highest


class Stretch(NamedTuple):
    """A part of the step: in the forward or backward of a region, or outside of all.

    segment: its place, None outside. done: how many segments have run forward and not yet ended their backward, this one left
    out. start, highest: bytes.
    """

    segment: int | None
    backward: bool
    done: frozenset[int]
    start: int
    highest: int


class Step:
    """One training step, recorded: its stretches, what stood at its peak, and memory over time as the allocator has it; on the
    meta device, where there is none, as tensors came and went."""

    def __init__(self, live: Live):
        self.live = live
        self.timeline = memory.Timeline()
        self.stretches: list[Stretch] = []
        self.segment: int | None = None
        self.backward = False
        self.done: set[int] = set()
        self.start = self.ops_of_forward = 0
        self.has_timeline = False

    def cut(self, segment: int | None, name: str = "") -> None:
        """A stretch ends here, and another begins."""
        self.mark()
        highest = self.live.restart()
        done = frozenset(self.done - {self.segment})
        self.stretches.append(Stretch(self.segment, self.backward, done, self.start, highest))
        self.segment, self.start, self.live.place = segment, self.live.bytes, name

    @property
    def peak(self) -> int:
        return max(self.live.peak, self.timeline.peak)

    def mark(self) -> None:
        """The place in the timeline at which a stretch ends."""
        if self.has_timeline:
            self.timeline.mark(f"stretch {len(self.stretches)}")

    def see_allocator(self) -> None:
        """What kernels of libraries take for themselves is in the timeline alone: every stretch is as high as it is there."""
        for i, stretch in enumerate(self.stretches if self.has_timeline else ()):
            heights = self.timeline.between(f"stretch {i - 1}", f"stretch {i}") if i else [0]
            self.stretches[i] = stretch._replace(highest=max(stretch.highest, *heights))

    def mark_backward(self) -> None:
        """Backward begins."""
        self.ops_of_forward = len(self.live.over_time)

    def over_time(self) -> memory.Timeline:
        """The allocator's timeline, or one by the count of ops."""
        if self.timeline.bytes:
            return self.timeline
        heights = self.live.over_time
        marks = {"backward": float(self.ops_of_forward)}
        return memory.Timeline([float(i) for i in range(len(heights))], list(heights), marks)

    def standing(self) -> list[Alive]:
        """What stood at the peak, the largest first; tensors that differ in nothing but their number of bytes are added up."""
        found: dict[Alive, int] = {}
        for alive in self.live.at_peak:
            key = alive._replace(bytes=0)
            found[key] = found.get(key, 0) + alive.bytes
        return sorted((key._replace(bytes=n) for key, n in found.items()), key=lambda alive: -alive.bytes)


@contextmanager
def gradients_as_there(
    model: nn.Module, inputs: Iterable[Tensor] = (), all_there: bool = False
) -> Iterator[list[Tensor]]:
    """Gradients and Megatron's sums that exist are others of their size for a while, which it yields; backward makes the rest.

    inputs: tensors besides the model's parameters. all_there: zeros in place of the rest too, so that what backward adds to
    them is not seen as activations.
    """
    leaves = [one for one in (*model.parameters(), *inputs) if one.requires_grad and one.is_leaf]
    before = [(p, p.grad, getattr(p, "main_grad", None)) for p in leaves]
    added = [(p, p.__dict__.get("grad_added_to_main_grad")) for p in leaves]
    made: list[Tensor] = []
    try:
        for p, grad, main in before:
            p.grad = torch.zeros_like(p) if grad is not None or all_there else None
            if main is not None:
                p.main_grad = torch.zeros_like(main)
                made.append(p.main_grad)
            if p.grad is not None:
                made.append(p.grad)
        yield made
    finally:
        for p, grad, main in before:
            p.grad = grad
            if main is not None:
                p.main_grad = main
        for p, flag in added:
            if flag is not None:
                p.grad_added_to_main_grad = flag
            elif hasattr(p, "grad_added_to_main_grad"):
                del p.grad_added_to_main_grad


def step_of(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    modules: Sequence[tuple[str, nn.Module]],
    device: torch.device,
    all_there: bool = False,
    loss: Loss | None = None,
) -> Step:
    """Runs one training step of the model, forward and backward, and records it. Nothing of it is left.

    modules: the regions' names and modules. all_there: leaves the gradients of parameters out (`gradients_as_there`). loss: as
    in `loss_of`.
    """
    with ExitStack() as stack:
        stack.enter_context(seeded())
        stack.enter_context(unmoved(model))
        stack.enter_context(torch.enable_grad())
        given = [one for one in leaves_of((args, kwargs)) if isinstance(one, Tensor)]
        there = stack.enter_context(gradients_as_there(model, given, all_there))
        step = Step(Live([*model.parameters(), *model.buffers(), *there, *given]))
        for i, (name, module) in enumerate(modules):
            for handle in watched(step, i, name, module):
                stack.callback(handle.remove)
        model.train()
        if device.type != "meta":
            step.timeline, step.has_timeline = stack.enter_context(memory.memory_timeline(device)), True
        stack.enter_context(bodies_seen())
        stack.enter_context(step.live)
        output = model(*args, **kwargs)  # a training loop holds it while backward runs
        value = loss_of(output, loss)
        step.cut(None)
        step.backward = True
        step.mark_backward()
        if device.type != "meta":
            step.timeline.mark("backward")
        value.backward()
        del value, output
        step.cut(None)
    step.see_allocator()
    return step


def by_place(standing: Sequence[Alive]) -> dict[str, int]:
    """Bytes of each region, in the order of the first of each."""
    found: dict[str, int] = {}
    for alive in standing:
        found[alive.place] = found.get(alive.place, 0) + alive.bytes
    return found


def differentiated(output: Any) -> list[Tensor]:
    """Returns what a step differentiates of what a model returned: its `loss`, or its scalars, or else all its tensors; those
    that have a gradient, if any has one."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return [loss]
    leaves = leaves_of(list(output.values()) if isinstance(output, dict) else output)
    tensors = [one for one in leaves if isinstance(one, Tensor) and one.is_floating_point()]
    tensors = [one for one in tensors if one.requires_grad] or tensors
    return [one for one in tensors if one.dim() == 0] or tensors


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([one.float().sum() for one in tensors]).sum()


def loss_of(
    output: Any, loss: Loss | None, summed: Callable[[Sequence[Tensor]], Tensor] = sum_of, op: str = "loss"
) -> Tensor:
    """Returns the scalar that a step differentiates: loss(output), or else the output's `loss`, its one scalar, or `summed` of
    its tensors. Raises ValueError for several scalars, and for what has no gradient; TypeError for a loss that is no scalar."""
    found = differentiated(output) if loss is None else [loss(output)]
    if len(found) > 1 and found[0].dim() == 0:
        raise ValueError(
            f"{op}: the model returns {len(found)} scalars, and a training step differentiates one. Pass loss=, a function of "
            "what the model returns, such as loss=lambda output: output[0]"
        )
    value = summed(found) if loss is None and found and found[0].dim() else next(iter(found), None)
    if loss is not None and (not isinstance(value, Tensor) or value.dim()):
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{op}: loss must return a scalar tensor, not {kind}")
    if value is None or not value.requires_grad:
        raise ValueError(f"{op}: wanted an output with a gradient, but no tensor that the model returned has one")
    return value


def watched(step: Step, place: int, name: str, module: nn.Module) -> list:
    """Hooks that cut the step where the region's forward and backward begin and end."""

    def begin_backward(grad: Tensor) -> None:
        step.cut(place, name)
        step.done.discard(place)

    def end_backward(grad: Tensor) -> None:
        if step.segment == place:
            step.cut(None)

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if step.backward or step.segment is not None:
            return
        for tensor in leaves_of((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(end_backward)
        step.cut(place, name)

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        if step.backward or step.segment != place:
            return
        step.cut(None)
        step.done.add(place)
        for tensor in leaves_of(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(begin_backward)
                break

    return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
