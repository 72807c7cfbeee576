"""Records a training step: every tensor with the op that returned it, what forward saves for backward, and in which region.
Refuses models and calls that can run no training step, and names the remedy.

A dispatch mode sees each tensor that an op returns, also inside ckptkern's ops, and a weak reference tells when its storage is
freed. So the figures need no allocator, and exist on the meta device, too. What a library's kernel allocates while it runs is
in the allocator's timeline alone, which is recorded, too, where there is one.

The peak of a step is counted above what is allocated when it begins: parameters, buffers, inputs, and present gradients.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import memory
from ..frozen import Frozen
from ..ops.dispatch.choices import in_region
from ..ops.registration.functions import bodies_seen
from ..ops.registration.library import FLOPS
from .calls import keywords_of, parameters_of
from .protection import gradients_unmoved, seeded, unmoved
from .quantized import packed_in
from .sharding import check_not_fsdp1, holds_sharded, is_sharded
from .trace import Call, is_floating, leaves_of, mapped, tensors_in

Loss = Callable[[Any], Tensor]  # from a model's outputs to the scalar that a step differentiates
Saved = memory.Storages
Names = dict[StorageWeakRef, "tuple | None"]  # of storages; None: of a parameter or buffer
Place = tuple[str, int, int]  # "in" or "out", the tensor among the leaves, and the storage among its parts
SELDOM = 16  # ops between searches for freed storages, and more with many tensors: a search takes time for each
MANY = 4096  # tensors, of a loop over tokens, with which a peak is known to 1/512


class Alive(NamedTuple):
    """Describes a tensor that is allocated at the peak. place: the region in whose forward or backward it was allocated, ""
    outside of all."""

    bytes: int
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: str

    @property
    def what(self) -> str:
        return f"{self.op} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Stretch(NamedTuple):
    """Describes a part of the step: in the forward or backward of a region, or outside of all.

    region: its place, None outside. done: the other regions that have run forward and not yet ended their backward. start,
    highest: bytes.
    """

    region: int | None
    backward: bool
    done: frozenset[int]
    start: int
    highest: int


class Called(NamedTuple):
    """Describes a call of a region. call: its arguments, if only a forward runs. names: of the storages of its inputs and
    outputs, by place: their name in the model, None for a parameter's, and their bytes. hidden: it is inside a checkpoint of
    the model's own, so that nothing of it is saved. saved: the storages that it saves."""

    call: Call | None
    names: dict[Place, tuple[tuple | None, int]]
    hidden: bool
    saved: Saved


class Step(TorchDispatchMode):
    """Records what runs inside as one training step: allocated bytes (`bytes` now, `peak`), the tensors at the peak, flops
    of matmuls, and the stretches and calls of the regions of `step_of`. backs: a backward follows. holds: what a forward
    alone saves stays allocated, as if it were differentiated inside; without it, a model that does not fit may be measured."""

    bytes = peak = highest = start = 0  # highest: of the stretch
    flops = ops = next = ops_of_forward = gradients = 0
    seconds, loss = 0.0, None
    backward = False
    region: int | None = None
    place = ""
    count = 0  # calls

    def __init__(self, backs: bool = True, holds: bool = False):
        super().__init__()
        self.backs, self.holds = backs, backs or holds
        self.alive: dict[int, tuple[StorageWeakRef, Alive]] = {}
        self.at_peak: list[Alive] = []
        self.heights: list[int] = []  # after ops that may have reached a new one, and every SELDOM-th
        self.timeline = memory.Timeline()
        self.done: set[int] = set()
        self.stretches: list[Stretch] = []
        self.calls: dict[int, list[Called]] = {}
        self.names: Names = {}
        self.outside: Saved = {}

    # -- tensors

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if memory.are_placeholders():
            return result
        self.note(result, (args, kwargs), func.name().partition("::")[2])
        if formula := FLOPS.get(func._overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        self.ops += 1
        slack = (self.highest >> 9) * (len(self.alive) > MANY)
        if self.bytes > self.highest + slack or self.ops >= self.next:  # freed storages may have lowered it
            self.heights.append(self.now())
            self.next = self.ops + max(SELDOM, len(self.alive) // SELDOM)
            self.highest = max(self.highest, self.bytes)
            if self.bytes > self.peak:
                self.peak, self.at_peak = self.bytes, [alive for _, alive in self.alive.values()]
        return result

    def note(self, result, arguments, op: str) -> None:
        """Adds the storages of an op's result. Unknown storages of its arguments were there before."""
        new = {key: part for part in parts_of(result) if (key := part.untyped_storage()._cdata) not in self.alive}
        for part in parts_of(arguments) if new else ():
            new.pop(part.untyped_storage()._cdata, None)
        for key, part in new.items():
            storage = part.untyped_storage()
            alive = Alive(storage.nbytes(), op, tuple(part.shape), part.dtype, self.place)
            self.alive[key] = StorageWeakRef(storage), alive
            self.bytes += alive.bytes

    def now(self) -> int:
        """Returns the bytes that are still allocated."""
        for key in [key for key in self.alive if torch.UntypedStorage._expired(key)]:
            self.bytes -= self.alive.pop(key)[1].bytes
        return self.bytes

    # -- regions

    def watch(self, i: int, name: str, module: nn.Module) -> list:
        """Registers the hooks that cut the step where the region's forward and backward begin and end."""

        def begin_backward(grad):
            self.cut(i, name)
            self.done.discard(i)

        def end_backward(grad):
            if self.region == i:
                self.cut()

        def before(module, args, kwargs):
            if self.backward or self.region is not None:
                return
            hidden = not torch.is_grad_enabled() or in_region()
            call = None if self.backs else mapped(as_input, (args, kwargs))  # a stored call would live until backward
            self.calls.setdefault(i, []).append(Called(call, {}, hidden, {}))
            self.count += 1
            self.name(i, "in", (args, kwargs))
            for tensor in tensors_in((args, kwargs)):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(end_backward)
            self.cut(i, name)

        def after(module, args, output):
            if self.backward or self.region != i:
                return
            self.name(i, "out", output)
            self.cut()
            self.done.add(i)
            for tensor in [t for t in tensors_in(output) if t.requires_grad][:1]:
                tensor.register_hook(begin_backward)

        return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]

    def name(self, i: int, role: str, values) -> None:
        """Gives a name to the storages of a region's inputs or outputs that have none yet."""
        tensors = [(j, value) for j, value in enumerate(leaves_of(values)) if isinstance(value, Tensor)]
        for place, part in [((role, j, k), part) for j, t in tensors for k, part in enumerate(memory.dense_parts(t))]:
            storage = part.untyped_storage()
            name = self.names.setdefault(StorageWeakRef(storage), (self.count, *place))
            self.calls[i][-1].names[place] = name, storage.nbytes()

    def save(self, tensor: Tensor) -> None:
        """Notes a tensor that forward saves for backward."""
        saved = self.outside if self.region is None else self.calls[self.region][-1].saved
        saved.update(memory.storages_of([tensor]))

    def cut(self, region: int | None = None, name: str = "") -> None:
        """Begins a stretch, after recording the one that ends."""
        self.timeline.mark(f"stretch {len(self.stretches)}")
        highest, self.highest = self.highest, self.now()
        done = frozenset(self.done - {self.region})
        self.stretches.append(Stretch(self.region, self.backward, done, self.start, highest))
        self.region, self.place, self.start = region, name, self.bytes

    # -- results

    @property
    def saved(self) -> int:
        """Returns the bytes that forward saved for backward, besides parameters and buffers."""
        saved = dict(self.outside)
        for called in [call for calls in self.calls.values() for call in calls]:
            saved |= called.saved
        return sum(nbytes for key, nbytes in saved.items() if self.names.get(key, key) is not None)

    def over_time(self) -> memory.Timeline:
        """Returns the allocator's timeline, or one by the count of ops."""
        if self.timeline.bytes:
            return self.timeline
        marks = {"backward": float(self.ops_of_forward)}
        return memory.Timeline([float(i) for i in range(len(self.heights))], list(self.heights), marks)

    def standing(self) -> list[Alive]:
        """Returns the tensors at the peak, the largest first. Tensors that differ only in their bytes are added up."""
        added: dict[Alive, int] = {}
        for alive in self.at_peak:
            key = alive._replace(bytes=0)
            added[key] = added.get(key, 0) + alive.bytes
        return sorted((key._replace(bytes=n) for key, n in added.items()), key=lambda alive: -alive.bytes)


def parts_of(values) -> list[Tensor]:
    """Returns the tensors with a storage of their own, of all tensors inside."""
    return [part for leaf in tree_leaves(values) if isinstance(leaf, Tensor) for part in memory.dense_parts(leaf)]


def owned_by(model: nn.Module) -> Names:
    """Returns the storages of parameters and buffers."""
    return dict.fromkeys(memory.storages_of(owned_tensors(model)))


def owned_tensors(model: nn.Module) -> list[Tensor]:
    """Returns the model's parameters and buffers, and the scales of those that bitsandbytes has parametrized."""
    return [*model.parameters(), *model.buffers(), *map(Frozen, packed_in(model))]


def as_input(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def device_of(model: nn.Module, call: Call) -> torch.device:
    tensors = [*model.parameters(), *tensors_in(call)]
    return tensors[0].device if tensors else torch.device("cpu")


def step_of(
    model: nn.Module,
    call: Call,
    regions: Sequence[tuple[str, nn.Module]] = (),
    *,
    loss: Loss | None = None,
    there: Iterable[Tensor] | None = None,
    trains: bool = True,
    step: Step | None = None,
    ended: Callable[[], None] | None = None,
    profiles: bool = True,
) -> Step:
    """Runs one training step of the model, forward and backward, and records it. The model is left as it was.

    regions: their names and modules. loss: a function from the output to the scalar that is differentiated; None: `loss_of`, or
    no loss for a forward alone. there: parameters and inputs that have gradients when the step begins; None: those that have
    one now. trains: in training mode. step: the recorder; Step(backs=False) runs a forward alone, and holds nothing that it
    saves. ended: called before gradients are restored. profiles: adds what kernels allocate themselves, by torch.profiler.
    """
    step, (args, kwargs) = step or Step(), call
    leaves = [leaf for leaf in (*model.parameters(), *tensors_in(call)) if leaf.requires_grad and leaf.is_leaf]
    before = {id(leaf) for leaf in (there if there is not None else [leaf for leaf in leaves if leaf.grad is not None])}
    step.names |= owned_by(model)
    with seeded(), unmoved(model), torch.enable_grad(), gradients_unmoved(leaves), contextlib.ExitStack() as stack:
        set_gradients(leaves, before)
        for i, (name, module) in enumerate(regions):
            for handle in step.watch(i, name, module):
                stack.callback(handle.remove)
        model.train(trains)
        device = device_of(model, call)
        # a profiler of the user's would end with ours
        if profiles and step.backs and device.type in ("cpu", "cuda") and not torch.autograd._profiler_enabled():
            step.timeline = stack.enter_context(memory.memory_timeline(device))
        stack.enter_context(bodies_seen())
        stack.enter_context(step)
        begin = time.perf_counter()
        with memory.counting(step.save, hold=step.holds):
            output = model(*args, **kwargs)  # a training loop holds it while backward runs
            value = (loss or loss_of)(output) if step.backs or loss else None
        step.cut()
        step.backward, step.ops_of_forward = True, len(step.heights)
        step.timeline.mark("backward")
        if step.backs:
            step.loss = value.detach()
            value.backward()
            del output
            step.seconds = time.perf_counter() - begin
            step.cut()
            if ended is not None:
                ended()
        step.gradients = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None and id(leaf) not in before)
    # the timeline includes what kernels of libraries allocate, so stretches and the peak may be higher there
    timeline, step.peak = step.timeline, max(step.peak, step.timeline.peak)
    for i, stretch in enumerate(step.stretches if timeline.bytes else ()):
        heights = timeline.between(f"stretch {i - 1}", f"stretch {i}") if i else [0]
        start, highest = max(stretch.start, heights[0]), max(stretch.highest, *heights)
        step.stretches[i] = stretch._replace(start=start, highest=highest)
    return step


def set_gradients(leaves: Iterable[Tensor], there: Collection[int] = ()) -> None:
    """Sets gradients of zeros for the leaves with these ids, None for others, and other memory for Megatron-LM's sums of
    gradients, until `gradients_unmoved` and `unmoved` end."""
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf) if id(leaf) in there else None
        if isinstance(getattr(leaf, "main_grad", None), Tensor):  # not `accumulate_in_place`'s, which stands for .grad
            leaf.main_grad = torch.zeros_like(leaf.main_grad)


def floating_in(output) -> list[Tensor]:
    """Returns the floating-point tensors among a model's outputs."""
    return [
        leaf
        for leaf in tree_leaves(list(output.values()) if isinstance(output, Mapping) else output)
        if is_floating(leaf)
    ]


def differentiated(output) -> list[Tensor]:
    """Returns the outputs that a step differentiates: the `loss`, or the scalars, or else all tensors; those that have a
    gradient, if any has one."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return [loss]
    tensors = floating_in(output)
    tensors = [tensor for tensor in tensors if tensor.requires_grad] or tensors
    return [tensor for tensor in tensors if tensor.dim() == 0] or tensors


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


def loss_of(
    output,
    loss: Loss | None = None,
    summed: Callable[[Sequence[Tensor]], Tensor] = sum_of,
    op: str = "loss",
) -> Tensor:
    """Returns the scalar that a step differentiates: loss(output), or else the output's `loss`, its one scalar, or `summed`
    of its tensors. Raises ValueError for several scalars, and for a scalar without a gradient; TypeError if `loss` does not
    return a scalar tensor."""
    results = differentiated(output) if loss is None else [loss(output)]
    if len(results) > 1 and results[0].dim() == 0:
        raise ValueError(
            f"{op}: the model returns {len(results)} scalars, and a training step differentiates one. Pass loss=, a function "
            "of what the model returns, such as loss=lambda output: output[0]"
        )
    value = summed(results) if loss is None and results and results[0].dim() else next(iter(results), None)
    if loss is not None and (not isinstance(value, Tensor) or value.dim()):
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{op}: loss must return a scalar tensor, not {kind}")
    if value is None or not value.requires_grad:
        raise ValueError(f"{op}: wanted an output with a gradient, but no tensor that the model returned has one")
    return value


# -- what can run, and what it saves


def check_step(op: str, model: nn.Module, call: Call) -> None:
    """Raises TypeError if model is not a module, and for a batch as one positional dict; ValueError for a model that is
    compiled, lazy or wrapped by DataParallel, FullyShardedDataParallel or, before its first step, by DistributedDataParallel
    with a static graph; RuntimeError in inference mode, and for tensors that were created in it."""
    check_tensors(op, model, call)
    if hasattr(model, "_orig_mod"):
        raise ValueError(f"{op}: the model is compiled: {op} first, then compile")
    if isinstance(model, nn.DataParallel):
        raise ValueError(
            f"{op}: the model is wrapped by nn.DataParallel, whose replicas would run the parameters of the first GPU. Pass "
            "model.module, and train with torch.nn.parallel.DistributedDataParallel"
        )
    check_not_fsdp1(model)
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    if is_ddp and any(call) and model.static_graph and not model._static_graph_delay_allreduce_enqueued:
        raise ValueError(
            f"{op}: DistributedDataParallel(static_graph=True) takes the first backward pass for training's. {op} before it "
            "wraps the model, or after the first step, as ckptkern.integrations.convert_later does"
        )
    args, kwargs = call
    batch = args[0] if len(args) == 1 and not kwargs else None
    if isinstance(batch, Mapping) and batch and keywords_of(parameters_of(model)).issuperset(batch):
        raise TypeError(
            f"{op}: the one argument is a dict of the forward's arguments: {', '.join(batch)}. Pass them by keyword, "
            f"{op}(model, **batch)"
        )


def check_tensors(op: str, model: nn.Module, call: Call) -> None:
    """Raises TypeError if model is not a module; RuntimeError in inference mode, and for tensors that were created in it;
    ValueError for lazy modules."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module, not {type(model).__name__}")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{op}: torch.inference_mode() is on, in which no step can be differentiated. Call {op} outside of it; "
            "torch.no_grad() is allowed"
        )
    tensors = [*model.parameters(), *tensors_in(call)]
    if any(map(is_lazy, tensors)):
        raise ValueError(f"{op}: a lazy module has no parameters yet. Call the model once first")
    if any(map(Tensor.is_inference, tensors)):
        raise RuntimeError(
            f"{op}: a parameter or input was made in torch.inference_mode(), so that no gradient flows through it. Make it "
            "outside, or pass its clone()"
        )


def saved_bytes(module: nn.Module, run: Callable, call: Call, x: Tensor | None = None) -> int:
    """Returns the bytes that one training call of `run`, a forward of `module`, saves, besides parameters and the arguments
    other than x. x: by default the first floating-point argument."""
    x = next(filter(is_floating, leaves_of(call)), None) if x is None else x
    wanted, shared = (
        None if x is None else x.detach().requires_grad_(),
        [tensor for tensor in tensors_in(call) if tensor is not x],
    )
    args, kwargs = mapped(lambda tensor: wanted if tensor is x else tensor, call)
    with unmoved(module), torch.enable_grad():
        module.train()
        with memory.saved_tensors([*owned_tensors(module), *shared]) as saved:
            run(*args, **kwargs)
    return saved.bytes


def saved_by(module: nn.Module, run: Callable, call: Call | None, x: Tensor | None = None) -> int | None:
    """Returns `saved_bytes`; None without a call that can be measured."""
    if call is None or holds_sharded(module):  # a forward without a backward would leave fully_shard's state open
        return None
    with contextlib.suppress(Exception):  # convert's checks do not depend on this measurement
        return saved_bytes(module, run, call, x)
    return None


def step_of_all(model: nn.Module, call: Call, there: list[Tensor]) -> tuple[int | None, int | None]:
    """Returns (the bytes that a training step of the model saves for backward, besides parameters; its peak); None for what
    cannot be measured. there: as in `step_of`."""
    if not any(call) or is_sharded(model) or holds_sharded(model):
        return None, None  # a forward without a backward would leave fully_shard's state open
    # the reducer of DistributedDataParallel would wait for ranks that do not convert
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    forward, peak = Step(backs=False), None  # holds nothing: the model may not fit before it is converted
    # a forward may raise anything in training
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step_of(model, call, there=there, step=forward)
        peak = step_of(model, call, there=there, profiles=False).peak
    return (forward.saved if forward.backward else None), peak
