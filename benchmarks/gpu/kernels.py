"""Launches each kernel once on a GPU, and lists where its results differ from the emulator's of the same PTX.

    python -m benchmarks.gpu.kernels [--only REGEX] [--seconds S]      GPU, emulator and eager side by side
    python -m benchmarks.gpu.kernels --launch-only                     the launches alone, for a tool that watches them
    python -m benchmarks.gpu.kernels --sanitize                        the launches under compute-sanitizer

The cases are those of the code-generation check, in bfloat16, on aligned and unaligned sizes. Equal bits are not expected: a
tensor core rounds sums otherwise than the emulator, and so does an `approx` function. With --device cpu the emulator is
compared with eager, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

sys.path.append(str(Path(__file__).parents[2] / "tests"))  # not installed: the emulator and the tests' inputs

from emulator.emulated import emulated
from support.kernel_cases import LAUNCHERS, Small, check_results, named

from benchmarks.codegen.cases import PADDED_DIMS, PRODUCT_OPS, AttentionCase, Case, sample_cases
from ckptkern import eager, triton_kernels
from ckptkern.tools.compiling import instead_of_launches
from ckptkern.triton_kernels import experts_tiles
from ckptkern.triton_kernels.tile import SMS, arch_of, family_of

from . import sanitizer

TINY = 2.0**-23  # of the largest result: what float32 sums round to
REPEATS = 5  # further launches, whose bits must be those of the first
SPAWN = multiprocessing.get_context("spawn")


def cases_of(family: int) -> list[Case | AttentionCase]:
    """Returns the cases for tiles of sm_80 or sm_90: matmuls and attention first, aligned before unaligned sizes."""
    chosen = [dataclasses.replace(case, arch=family) for case in sample_cases()]
    attention = [case for case in chosen if isinstance(case, AttentionCase)]
    others = [
        dataclasses.replace(case, activation=case.activation.replace("gelu", "silu"))
        for case in chosen
        if isinstance(case, Case)
    ]
    found = [dataclasses.replace(case, head_dim=128) for case in attention]
    found += [case for case in others if case.op in PRODUCT_OPS]
    found += [case for case in others if case.op not in PRODUCT_OPS]
    found += [dataclasses.replace(case, head_dim=PADDED_DIMS[0]) for case in attention if case.dropout]
    return [*dict.fromkeys([*found, *(dataclasses.replace(case, unaligned=True) for case in others)])]


class Inputs(Small):
    """Small tensors with data. The first launch draws them on the CPU; `again` hands out the same ones."""

    def statistics(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, core) -> tuple[Tensor, Tensor]:
        if self.rest is None or self.backend is eager:
            return super().statistics(q, k, v, do, core)
        return self.remember(q), self.remember(q)  # lse and delta of the first launch


@contextlib.contextmanager
def settings(family: int) -> Iterator[None]:
    """A GPU with one SM is never idle: tiles of large launches. What a kernel does not write is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    with mock.patch.dict(SMS, {family: 1}), mock.patch.object(experts_tiles, "FEW_ROWS", 0):
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def on_gpu(started: Callable[[str], None] = lambda kernel: None) -> Iterator[list[tuple[str, str]]]:
    """Launches end before the next one begins; `started(kernel)` before each. Yields the list of (kernel, PTX)."""
    run, launches = JITFunction.run, []

    def launch(self, *args, **kwargs):
        started(self.fn.__name__)
        compiled = run(self, *args, **kwargs)
        torch.cuda.synchronize()
        launches.append((self.fn.__name__, compiled.asm["ptx"]))
        return compiled

    with mock.patch.object(JITFunction, "run", launch):
        yield launches


@contextlib.contextmanager
def on_emulator(family: int, started: Callable[[str], None] = lambda kernel: None) -> Iterator[list[tuple[str, str]]]:
    """As `on_gpu`, on the emulator; `started` is called behind each launch."""
    launches, texts = [], []
    with emulated(family, change=lambda ptx: texts.append(ptx) or ptx) as ran:
        yield launches
    launches += zip((one.kernel for one in ran), texts, strict=True)
    for kernel, _ in launches:
        started(kernel)


def drawn(case: Case | AttentionCase) -> Inputs:
    """The inputs of a case, on the CPU; nothing is launched."""
    first = Inputs("cpu")
    with instead_of_launches(lambda *launch: None, case.arch):
        case.launch(first)
    return first


def on_kernels(case: Case | AttentionCase, first: Inputs, device: str) -> dict[str, Tensor]:
    """The results of the kernels, on the CPU, by name."""
    results = named(case.launch(first.again(triton_kernels, change=lambda t: t.to(device, copy=True))))
    return {name: result.cpu() for name, result in results.items()}


@dataclasses.dataclass
class Output:
    """A result of a case. Differences are the largest of an element, against float64 those `*_error`; gpu_error and
    gpu_emulator are None where no GPU ran. `differ` counts elements, GPU against emulator or emulator against eager."""

    case: str
    name: str
    elements: int
    differ: int
    gpu_emulator: float | None
    gpu_error: float | None
    emulator_error: float
    eager_error: float
    largest: float

    @property
    def wrong(self) -> bool:
        """Returns whether there is any error at all."""
        return bool(self.emulator_error if self.gpu_error is None else self.gpu_error)

    @property
    def suspicion(self) -> float:
        """The largest difference as a multiple of what is allowed: twice eager's largest error."""
        worst = max(self.emulator_error if one is None else one for one in (self.gpu_emulator, self.gpu_error))
        allowed = 2 * self.eager_error + TINY * self.largest
        return worst / allowed if allowed else float("inf") if worst else 0.0


@dataclasses.dataclass
class Examined:
    """What is known of a case. fault: what an exception or the tolerance says; other_ptx: kernels that the GPU ran from another
    PTX than the emulator."""

    case: str
    kernels: list[str] = dataclasses.field(default_factory=list)
    other_ptx: list[str] = dataclasses.field(default_factory=list)
    outputs: list[Output] = dataclasses.field(default_factory=list)
    fault: str = ""

    @property
    def suspicion(self) -> tuple[bool, float]:
        """Orders cases: first those with a fault, of these first what gave no results."""
        return bool(self.fault), max((one.suspicion for one in self.outputs), default=float("inf"))


def differences(ours: Tensor, others: Tensor) -> Tensor:
    """|ours - others| in float64; 0 for two NaN, infinity for one."""
    ours, others = ours.double(), others.double()
    same = (ours == others) | (ours.isnan() & others.isnan())
    return (ours - others).abs().masked_fill(same, 0).nan_to_num(nan=float("inf"), posinf=float("inf"))


def largest(values: Tensor) -> float:
    return values.max().item() if values.numel() else 0.0


def outputs_of(case: Case | AttentionCase, gpu: dict | None, emulator: dict, eagers: dict, exact: dict) -> list[Output]:
    """Compares results by name; gpu is None where there is none."""
    names = LAUNCHERS[case.op].outputs if case.op in LAUNCHERS else ()
    found = []
    for name, values in emulator.items():
        place = int(name.split()[0])
        errors = [largest(differences(one[name], exact[name])) for one in (gpu or emulator, emulator, eagers)]
        between = differences(gpu[name], values) if gpu else differences(values, eagers[name])
        found.append(Output(
            case.name, name.replace(str(place), names[place], 1) if names else name, values.numel(),
            int(between.count_nonzero()), largest(between) if gpu else None, errors[0] if gpu else None, *errors[1:],
            largest(exact[name].double().abs().nan_to_num(posinf=0)),
        ))  # fmt: skip
    return found


def examine(case: Case | AttentionCase, device: str) -> Examined:
    """Launches a case on the GPU, on the emulator and in eager PyTorch, once and the same, and compares."""
    found, stage = Examined(case.name), "inputs"

    def of_all() -> tuple[dict, dict, dict]:
        """(ours, eagers, exact) as in tests/triton_kernels, of new inputs."""
        first = drawn(case)
        with on_gpu() if device != "cpu" else on_emulator(case.arch):
            ours = on_kernels(case, first, device)
        return ours, *in_eager(first)

    def in_eager(first: Inputs) -> tuple[dict, dict]:
        return named(case.launch(first.again(eager))), named(case.launch(first.again(eager, exact=True)))

    try:
        torch.manual_seed(0)
        first, gpu, unstable = drawn(case), None, set()
        if device != "cpu":
            stage = "GPU"
            with on_gpu() as launches:
                gpu = on_kernels(case, first, device)
                for again in (on_kernels(case, first, device) for _ in range(REPEATS)):
                    unstable |= {name for name, value in gpu.items() if largest(differences(again[name], value))}
        stage = "emulator"
        with on_emulator(case.arch) as on_emulation:
            emulator = on_kernels(case, first, "cpu")
        found.kernels = [kernel for kernel, _ in on_emulation]
        found.other_ptx = [kernel for kernel, ptx in on_emulation if gpu and (kernel, ptx) not in launches]
        stage = "eager"
        eagers, exact = in_eager(first)
        found.outputs = outputs_of(case, gpu, emulator, eagers, exact)
        stage, known = "tolerance", iter([(gpu or emulator, eagers, exact)])
        hidden = [one.name for one in found.outputs if one.name.endswith("nothing") and one.wrong]
        assert not hidden, f"other rows than eager's: {hidden}"
        assert not unstable, f"a launch that is repeated gives other bits: {sorted(unstable)}"
        check_results(lambda: next(known, None) or of_all())
    except Exception as error:  # a finding, and other cases still want their turn
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:300]
        at = f" [{Path(where.filename).name}:{where.lineno}]"
        found.fault = f"{stage}: {text}" if stage == "tolerance" else f"{stage}: {type(error).__name__}: {text}{at}"
    return found


def work(connection, device: str) -> None:
    """A worker: examines the cases that it receives, until one has a fault, after which a GPU's context may be lost."""
    torch.set_num_threads(1)
    found = None
    while not (found and found.fault):
        case = connection.recv()
        with settings(case.arch):
            found = examine(case, device)
        connection.send(found)


def examine_all(
    cases: list[Case | AttentionCase], device: str, workers: int, seconds: float
) -> tuple[list[Examined], list[str]]:
    """Returns what is known of the cases after `seconds`, and the names of those that were not reached."""
    end, todo, found = time.monotonic() + seconds, deque(cases), []
    idle, busy = [], {}  # (connection, process); connection -> (process, case)
    with contextlib.suppress(KeyboardInterrupt):  # what is known is of use then too
        while (todo or busy) and time.monotonic() < end:
            while todo and len(busy) < workers:
                connection, process = idle.pop() if idle else started(device)
                connection.send(todo[0])
                busy[connection] = process, todo.popleft()
            for connection in wait(list(busy), max(0.0, end - time.monotonic())):
                process, case = busy.pop(connection)
                try:
                    found.append(connection.recv())
                except EOFError:
                    process.join()
                    found.append(Examined(case.name, fault=f"its process ended with status {process.exitcode}"))
                if not found[-1].fault:
                    idle.append((connection, process))
    found += [
        Examined(case.name, fault=f"had not ended when the {seconds:.0f} s were over") for _, case in busy.values()
    ]
    for process in [*(process for process, _ in busy.values()), *(process for _, process in idle)]:
        process.kill()
    return found, [case.name for case in todo]


def started(device: str):
    """Returns (connection, process) of a new worker."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=work, args=(theirs, device), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def report(found: list[Examined], missing: list[str]) -> list[str]:
    """The lines of the table, the most suspicious case first."""
    lines = [
        f"{'/allowed':>9} {'differ':>14} {'GPU-emulator':>12} {'GPU':>9} {'emulator':>9} {'eager':>9}  case, output"
    ]
    for one in sorted(found, key=lambda one: one.suspicion, reverse=True):
        lines += [f"{'FAULT':>9} {one.case}: {one.fault}"] if one.fault else []
        lines += [f"{'':9} {one.case}: the GPU ran another PTX of {', '.join(one.other_ptx)}"] if one.other_ptx else []
        for output in sorted(one.outputs, key=lambda output: -output.suspicion):
            if output.differ or one.fault:
                numbers = output.gpu_emulator, output.gpu_error, output.emulator_error, output.eager_error
                columns = " ".join(
                    f"{'-' if number is None else format(number, '.2g'):>{width}}"
                    for number, width in zip(numbers, (12, 9, 9, 9), strict=True)
                )
                count = f"{output.differ}/{output.elements}"
                lines.append(f"{output.suspicion:9.3g} {count:>14} {columns}  {one.case} {output.name}")
    equal = sum(not output.differ for one in found for output in one.outputs)
    lines.append(
        f"{len(found)} cases of {len({kernel for one in found for kernel in one.kernels})} kernels; {equal} outputs without a "
        f"difference; {sum(bool(one.fault) for one in found)} faults. GPU, emulator, eager: largest error against float64"
    )
    return lines + [f"not run: {name}" for name in missing]


def launch_only(cases: list[Case | AttentionCase], device: str) -> None:
    """Launches every case and says so before and after, in the form that `sanitizer.attributed` reads."""

    def announce(kernel: str) -> None:
        print(f"{sanitizer.LAUNCH}{kernel}", flush=True)

    for case in cases:
        print(f"{sanitizer.CASE}{case.name}", flush=True)
        with settings(case.arch):
            first = drawn(case)
            with on_gpu(announce) if device != "cpu" else on_emulator(case.arch, announce):
                on_kernels(case, first, device)
    print(sanitizer.END, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the emulator alone (default: cuda)"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="of case names, such as 'attn|norm'")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--launch-only", action="store_true", help="launch, and compare nothing")
    kind.add_argument("--sanitize", action="store_true", help="launch under compute-sanitizer's memcheck and racecheck")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: a core each)"
    )
    parser.add_argument("--seconds", type=float, default=300, help="end after these, with what is known (default: 300)")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 compiles no kernel: unset it")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU: --device cpu compares the emulator with eager")
    family = 90 if args.device == "cpu" else family_of(arch_of(torch.empty(0, device=args.device)))
    cases = [case for case in cases_of(family) if re.search(args.only, case.name)]
    if not cases:
        parser.error(f"--only {args.only!r} matches no case")
    if args.launch_only:
        launch_only(cases, args.device)
        return 0
    if args.sanitize:
        return sanitizer.main([case.name for case in cases], args.device, args.seconds)
    found, missing = examine_all(cases, args.device, args.workers, args.seconds)
    print("\n".join(report(found, missing)))
    return int(any(one.fault for one in found))


if __name__ == "__main__":
    sys.exit(main())
