"""Defines ckptkern.warm_up, which runs one training step to compile its kernels and restores all other state."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..conversion.protection import no_trace
from ..conversion.quantized import setting
from ..conversion.recorder import as_input, check_tensors, differentiated
from ..conversion.sharding import check_not_fsdp1
from ..conversion.trace import mapped
from ..extras import progress


class Kernel(NamedTuple):
    """A kernel that was compiled, or read if it is `cached` (Triton's cache on disk had it), and the seconds that it took."""

    name: str
    seconds: float
    cached: bool


@dataclass
class WarmUp:
    """Lists what ``ckptkern.warm_up`` compiled: a (name, seconds, cached) per kernel, in the order of the step.

    seconds: of the whole step, compilation included. launches: of compiled kernels. c_modules: seconds of each C module that
    Triton built in order to launch kernels: one for a process, and until Triton 3.7 one for each signature of a kernel, at its
    first launch. They need gcc or clang and Python.h. ``print(warm_up)`` shows a summary.
    """

    kernels: list[Kernel] = field(default_factory=list)
    launches: int = 0
    seconds: float = 0.0
    c_modules: list[float] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Of the kernels, each once; a kernel is compiled again for another dtype, option or divisibility of a size."""
        return list(dict.fromkeys(kernel.name for kernel in self.kernels))

    @property
    def count(self) -> int:
        """Of the kernels that were compiled or read from Triton's cache."""
        return len(self.kernels)

    def __str__(self) -> str:
        step = f"the step took {self.seconds:.1f} s"
        if not self.kernels:
            why = f"this process had all that the {self.launches} launches need"
            return f"no kernel to compile: {why if self.launches else 'the model ran in PyTorch ops'}; {step}"
        cached = sum(kernel.cached for kernel in self.kernels)
        spent = sum(kernel.seconds for kernel in self.kernels)
        lines = [f"{self.count} kernels in {spent:.1f} s, {cached} of them from Triton's cache on disk; {step}"]
        for name in self.names:
            times = [kernel.seconds for kernel in self.kernels if kernel.name == name]
            lines.append(f"{sum(times):8.2f} s  {name}" + (f" x{len(times)}" if len(times) > 1 else ""))
        if self.c_modules:
            lines.append(f"{sum(self.c_modules):8.2f} s  the C compiler, for launches x{len(self.c_modules)}")
        return "\n".join(lines)


@contextlib.contextmanager
def compilations(shown: Callable[[str, int], None]) -> Iterator[WarmUp]:
    """Every kernel that Triton compiles or reads from its cache inside the block, in any thread of this process, and what it
    builds in C for their launches."""
    compiled = WarmUp()
    try:
        from triton import knobs
        from triton.runtime import build
    except ImportError:  # then there is none
        yield compiled
        return
    before, builder, seen = knobs.compilation.listener, build._build, set()

    def listener(**event: Any) -> None:
        if before is not None:
            before(**event)
        if event["metadata"]["hash"] not in seen:  # another device of the same kind asks for it again
            seen.add(event["metadata"]["hash"])
            name = event["src"].name
            compiled.kernels.append(Kernel(name, event["times"].total / 1e6, event["cache_hit"]))
            shown(name, len(compiled.kernels))

    def launched(metadata: Any) -> None:
        compiled.launches += 1

    def built(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        library = builder(*args, **kwargs)
        compiled.c_modules.append(time.perf_counter() - started)
        return library

    knobs.compilation.listener, build._build = listener, built
    knobs.runtime.launch_enter_hook.add(launched)
    try:
        yield compiled
    finally:
        knobs.compilation.listener, build._build = before, builder
        knobs.runtime.launch_enter_hook.remove(launched)


# -- the step


def as_leaf(tensor: Tensor) -> Tensor:
    """The input at its own address, on whose alignment kernels depend, but without its graph and gradient."""
    leaf = as_input(tensor)
    return leaf if tensor.is_leaf else leaf.clone()  # a module may write into what is no leaf


def step(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward in training mode, and backward outside of autocast, as training calls it."""
    if not model.training:  # a model in training may hold frozen parts, which stay so
        model.train()
    results = differentiated(model(*args, **kwargs))
    if not any(tensor.requires_grad for tensor in results):
        raise ValueError("warm_up: wanted an output with a gradient, but no tensor that the model returned has one")
    with contextlib.ExitStack() as stack:
        for kind in {tensor.device.type for tensor in results}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        torch.autograd.backward(results, [torch.ones_like(tensor) for tensor in results])


def warm_up(model: nn.Module, *example_inputs: Any, **example_kwargs: Any) -> WarmUp:
    """Runs one training step, forward and backward, to compile every kernel that it launches.

        with torch.autocast("cuda", torch.bfloat16):
            print(ckptkern.warm_up(model, x))        # 9 kernels in 6.1 s, 0 of them from Triton's cache on disk; ...

    Call it before a CUDA graph capture, which cannot compile, and before timing. Use the autocast, `requires_grad` and
    shapes of training, because kernels are compiled for dtypes and for sizes that are multiples of 16. It does not
    replace the warm-up steps on a side stream that torch needs before a capture.

    The step differentiates the output's `loss` if there is one, or its scalars, or else its tensors, with ones. A model in
    evaluation runs in training mode. On a CPU the step runs in PyTorch ops and compiles no kernel.

    It restores all state bit for bit, even if the step raises an error: buffers (BatchNorm's statistics), `.grad` and
    `main_grad`, training flags, attributes of modules with their lists, dicts and generators, the inputs, and the
    random states of Python, NumPy and torch. It does not write parameters, and does not run hooks on accumulated
    gradients. It cannot restore state of other objects, such as a counter in a forward hook. It needs the memory of a
    training step, and of a second set of gradients if gradients exist. All ranks that share the model must call it.

    example_inputs, example_kwargs: a call of the model. Returns a WarmUp.
    Raises TypeError if model is not an nn.Module; ValueError for missing inputs, parameters of lazy modules, an output
    without a gradient and FullyShardedDataParallel (fully_shard works); RuntimeError in inference mode, while a CUDA graph is
    captured, or if forward itself changed a parameter in place; what the model raises.
    """
    call = example_inputs, example_kwargs
    check_tensors("warm_up", model, call)
    if not any(call):
        raise ValueError("warm_up: wanted the inputs of a training step after the model, but there are none")
    check_not_fsdp1(model, "warm_up")
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("warm_up: a CUDA graph is being captured; warm up before the capture")
    # DistributedDataParallel's own attributes go with its reducer, which counts the step
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    versions = [(name, p, p._version) for name, p in model.named_parameters() if not p.is_inference()]
    started = time.perf_counter()
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            no_trace(inner, call),
            # Megatron-LM's sums of gradients, to which backward would add
            setting([p for p in model.parameters() if hasattr(p, "main_grad")], "main_grad", None),
            progress("warm_up") as shown,
            compilations(shown) as compiled,
        ):
            step(model, *mapped(as_leaf, call))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    finally:
        torch.clear_autocast_cache()  # of casts whose graph the step's backward freed
    for name, parameter, version in versions:  # a copy of all would take their memory once more
        if parameter._version != version:
            raise RuntimeError(
                f"warm_up: the step changed the parameter {name} in place, which warm_up cannot undo. "
                "Warm up a copy.deepcopy of the model, or keep what forward changes in a buffer"
            )
    compiled.seconds = time.perf_counter() - started
    return compiled
