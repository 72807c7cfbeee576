"""Compiles a model's kernels by one training step, and restores all other state (`ckptkern.warm_up`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..conversion.protection import no_trace
from ..conversion.recorder import as_input, check_tensors, differentiated
from ..conversion.sharding import check_not_fsdp1
from ..conversion.trace import mapped
from ..extras import progress
from ..ops.dispatch.choices import autocast_off, setting


class Kernel(NamedTuple):
    """A kernel that was compiled, or read from Triton's cache on disk if `cached`, and the seconds that it took."""

    name: str
    seconds: float
    cached: bool


@dataclass
class WarmUp:
    """Kernels that ``ckptkern.warm_up`` compiled, in the order of the step.

    seconds: of the whole step. launches: of compiled kernels. c_modules: seconds of each C module that Triton built for
    launches.
    """

    kernels: list[Kernel] = field(default_factory=list)
    launches: int = 0
    seconds: float = 0.0
    c_modules: list[float] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Returns the names of the kernels, each once."""
        return list(dict.fromkeys(kernel.name for kernel in self.kernels))

    @property
    def count(self) -> int:
        """Returns the number of kernels."""
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
    """Records every kernel that Triton compiles or reads from its cache inside the block, in any thread, and the C modules
    built to launch them."""
    compiled = WarmUp()
    try:
        from triton import knobs
        from triton.runtime import build
    except ImportError:  # without Triton there are no kernels
        yield compiled
        return
    before, builder, seen = knobs.compilation.listener, build._build, set()

    def listener(**event):
        if before is not None:
            before(**event)
        if event["metadata"]["hash"] not in seen:  # another device of the same kind asks for it again
            seen.add(event["metadata"]["hash"])
            name = event["src"].name
            compiled.kernels.append(Kernel(name, event["times"].total / 1e6, event["cache_hit"]))
            shown(name, len(compiled.kernels))

    def launched(metadata):
        compiled.launches += 1

    def built(*args, **kwargs):
        started = time.perf_counter()
        library = builder(*args, **kwargs)
        compiled.c_modules.append(time.perf_counter() - started)
        return library

    knobs.runtime.launch_enter_hook.add(launched)
    try:
        with setting("listener", listener, knobs.compilation), setting("_build", built, build):
            yield compiled
    finally:
        knobs.runtime.launch_enter_hook.remove(launched)


def warm_up(model: nn.Module, *example_inputs: Any, **example_kwargs: Any) -> WarmUp:
    """Runs one training step, forward and backward, to compile every kernel that it launches.

        with torch.autocast("cuda", torch.bfloat16):
            print(ckptkern.warm_up(model, x))

    Call it before timing and before a CUDA graph capture, with the autocast, `requires_grad` and shapes of training, on all
    ranks. The step runs in training mode and differentiates the output's `loss`, its scalars or its tensors. Buffers,
    gradients, modules' attributes, inputs and random states are restored; the state of other objects is not.

    example_inputs, example_kwargs: a call of the model.

    Raises TypeError if model is not an nn.Module; ValueError for missing inputs, lazy parameters, an output without a gradient
    and FullyShardedDataParallel; RuntimeError in inference mode, during a capture, or if forward changes a parameter in place.
    """
    call = example_inputs, example_kwargs
    check_tensors("warm_up", model, call)
    if not any(call):
        raise ValueError("warm_up: example inputs are missing. Pass the inputs of a training step after the model")
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
            setting("main_grad", None, *model.parameters()),
            progress("warm_up") as shown,
            compilations(shown) as compiled,
        ):
            if not model.training:  # only then: a model in training may have parts in evaluation
                model.train()
            # inputs at their own addresses, on whose alignment kernels depend; but a module may write into what is no leaf
            args, kwargs = mapped(lambda t: as_input(t) if t.is_leaf else as_input(t).clone(), call)
            results = differentiated(model(*args, **kwargs))
            if not any(tensor.requires_grad for tensor in results):
                raise ValueError(
                    "warm_up: wanted an output with a gradient, but no tensor that the model returned has one"
                )
            with autocast_off(results[0]):  # backward runs outside of autocast, as in training
                torch.autograd.backward(results, [torch.ones_like(tensor) for tensor in results])
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    finally:
        torch.clear_autocast_cache()  # the cached casts belong to a graph that backward freed
    for name, parameter, version in versions:  # versions, because copies would take the parameters' memory again
        if parameter._version != version:
            raise RuntimeError(
                f"warm_up: the step changed the parameter {name} in place, which warm_up cannot undo. "
                "Warm up a copy.deepcopy of the model, or keep what forward changes in a buffer"
            )
    compiled.seconds = time.perf_counter() - started
    return compiled
