"""What a launch of a kernel costs the host, without a GPU: the second half of `make bench-host`.

The launches of a step are caught on meta tensors (`trace`) and launched again, by Triton's own `JITFunction.run` with its
own binder, its specialisation of every argument, its cache key, its hooks and its launch metadata, on a GPU that is not
there: the driver's launcher does nothing. So a figure leaves out what the launcher does with each argument in C++, and
cuLaunchKernel; the Python before `tile.launch`, such as the choice of a tile; and that a step's code leaves the processor's
caches, while a loop's does not.

Times are ratios to torch.add of two tensors of four elements in the same round: the quickest of many short batches of each.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from ckptkern.benchmarks import cases, suite

from . import trace

# A step of each op, and what is to be within MOST torch.adds a launch, on average over its launches.
STEPS = {
    "mlp-gelu": "full", "gated_mlp-silu": "full", "linear_act-relu": "full", "linear_stack-relu": "full",
    "attention-dropout": "full", "gpt_layer": "full", "llama_layer": "full",
}  # fmt: skip
MOST = 12.5
NOWHERE = -1  # the GPU's index: no key of Triton's caches of real ones


@contextlib.contextmanager
def no_gpu(arch: int = 90) -> Iterator[None]:
    """Inside, Triton launches on a GPU of this architecture that does nothing; nothing is compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel

    def nothing(*args) -> None:
        pass

    class Nothing(CompiledKernel):
        def __init__(self, src, target, options):
            self.src, self.name, self.metadata, self.packed_metadata = src, src.name, SimpleNamespace(), ()
            self.module, self.function, self._run = True, 0, nothing

    class Driver:
        def get_current_device(self) -> int:
            return NOWHERE

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

    active = mock.patch.object(type(triton.runtime.driver), "active", Driver())
    ours = mock.patch.object(triton, "compile", Nothing)  # which `fences` calls
    with active, ours, mock.patch.object(triton.compiler, "compile", Nothing):
        yield


class Cost(NamedTuple):
    """Of one launch. passed: what Triton's binder looks at one by one, members of tuples too, and what becomes a parameter of
    the kernel or a None. constants: constexprs and options. adds: its time in torch.adds."""

    name: str
    passed: int
    constants: int
    adds: float


def counts(caught: trace.Launch) -> tuple[int, int]:
    """(passed, constants)."""
    parameters = {p.name: p for p in caught.kernel.params}
    values = {name: caught.named.get(name) for name, p in parameters.items() if not p.is_constexpr}
    passed = sum(len(tree_leaves((value,), is_leaf=lambda leaf: leaf is None)) for value in values.values())
    return passed, len(parameters.keys() | caught.kwargs.keys()) - len(values)


def _quickest(calls: list[Callable[[], object]], rounds: int, batch: int = 20) -> list[float]:
    """Seconds of a call: the quickest batch of each, in interleaved rounds."""
    least = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(batch):
                call()
            least[i] = min(least[i], (time.perf_counter() - start) / batch)
    return least


def caught_launches(case: str, mode: str) -> list[trace.Launch]:
    """Triton's launches of a step of ours on an H200, of a case's first size."""
    found = next(one for one in suite.cases_of("cuda") if one.name.startswith(f"{case}/"))
    model, x = found.given(torch.device("meta"), cases.DTYPES["cuda"])
    with trace.as_on(90) as log:
        y = cases.variants(found)[f"ckptkern {mode}"](model, x)(x)
        y.backward(torch.empty_like(y))
    return [launch for launch in log if launch.kernel is not None]


def costs(launches: list[trace.Launch], rounds: int = 300) -> list[Cost]:
    """Of every launch. Raises RuntimeError under TRITON_INTERPRET=1, where kernels have no binder."""
    if any(not hasattr(one.kernel, "device_caches") for one in launches):
        raise RuntimeError("kernels are interpreted (TRITON_INTERPRET=1), so nothing is launched")
    from ckptkern.triton_kernels import tile

    a = torch.zeros(4)
    made = []
    with no_gpu():
        for one in launches:
            kernel, compiler = one.kernel, vars(one.kernel).get("compile")

            def launch(kernel=kernel, one=one) -> None:
                tile.launch(kernel, one.grid, *one.args, **one.kwargs)

            try:
                launch()  # the binder is made, and the key is
                add, ours = _quickest([lambda: torch.add(a, a), launch], rounds)
            finally:
                kernel.device_caches.pop(NOWHERE, None)
                if compiler is not None:
                    kernel.compile = compiler
            made.append(Cost(one.name, *counts(one), ours / add))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.launches", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=300, help="batches of each launch (default: 300)")
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error(f"--rounds must be at least 1, not {rounds}")
    print("host time of a launch / torch.add, without what the driver's launcher does; arguments passed + constants")
    for case, mode in STEPS.items():
        made = costs(caught_launches(case, mode), rounds)
        mean = sum(one.adds for one in made) / len(made)
        verdict = "within" if mean <= MOST else "ABOVE"
        print(f"{case} {mode}: {len(made)} launches, {verdict} {MOST:.1f}: {mean:.2f}", flush=True)
        for one in dict.fromkeys(one.name for one in made):
            of_name = [cost for cost in made if cost.name == one]
            least = min(of_name, key=lambda cost: cost.adds)
            print(f"    {least.adds:5.1f}  {least.passed:2} + {least.constants:2}  {len(of_name)} x {one}")


if __name__ == "__main__":
    main()
