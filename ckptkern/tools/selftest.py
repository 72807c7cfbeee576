"""Checks the results of this installation: ``python -m ckptkern selftest``. Paste its output into a bug report.

Masks are compared with Philox's known answer and with each other, outputs and gradients of every op with float64 PyTorch (error
at most twice eager PyTorch's in that dtype), and saved bytes with the op's declaration.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .. import nn, ops, state
from ..extras import from_checkout, missing
from ..memory import saved_tensors
from ..nn.layer import Layer
from ..ops.dispatch import choices as _choices
from . import env

Tensors = dict[str, Tensor]
Result = tuple[str, str | None]  # the check, and its fault or None

TOKENS, FEATURES, HIDDEN, OUT = 72, 48, 80, 56
P = 0.25  # k/65536 exactly, so that torch's scale is ours
OPS = ("linear_act", "linear_stack", "mlp", "gated_mlp")
CASES = [(op, activation) for op in OPS for activation in ("silu" if op == "gated_mlp" else "relu", "gelu")]


def module_of(op: str, activation: str, features: int, hidden: int, out: int, **options) -> Layer:
    """Returns the module that calls the op, with biases."""
    if op == "linear_act":
        return nn.Linear(features, out, activation=activation, **options)
    if op == "linear_stack":
        return nn.LinearStack([features, hidden, hidden, out], activation, **options)
    kind = nn.GatedMLP if op == "gated_mlp" else nn.MLP
    return kind(features, hidden, out, activation, bias=True, **options)


def saved_bytes(module: Layer, x: Tensor) -> int:
    """Returns the bytes that a call saves besides parameters; on the meta device, the bytes that the op declares."""
    with saved_tensors(module) as saved:
        module(x)
    return saved.bytes


# -- the rule by which results are checked, also in the benchmarks -----------------------------------------------------


def gradients(function: Callable[[], Tensor], leaves: Tensors, dy: Tensor) -> Tensors:
    """Returns {"y": y, name: gradient of <dy, y>} for y = function() and every leaf. The leaves' .grad is None afterwards."""
    for leaf in leaves.values():
        leaf.grad = None
    y = function()
    y.backward(dy)
    results = {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}
    for leaf in leaves.values():
        leaf.grad = None
    return results


def relative_errors(tensors: Tensors, exact: Tensors) -> dict[str, float]:
    """Returns ||tensor - exact|| / ||exact|| for every tensor; infinity if a tensor is missing or not finite."""
    errors = {}
    for name, reference in exact.items():
        value = tensors.get(name)
        if value is None or value.shape != reference.shape or not bool(torch.isfinite(value).all()):
            errors[name] = float("inf")
            continue
        difference = torch.linalg.vector_norm(value.to(reference.dtype) - reference)
        errors[name] = (difference / torch.linalg.vector_norm(reference).clamp_min(1e-300)).item()
    return errors


def error_ratio(ours: dict[str, float], eager: dict[str, float], dtype: torch.dtype) -> tuple[float, str]:
    """Returns the largest ratio of our error to eager's, at most 2 for a right result, and the name of its tensor.

    A quarter ulp is added to eager's error: rounding a result once costs up to half an ulp, also where eager was exact.
    """
    quarter_ulp = torch.finfo(dtype).eps / 4
    return max((ours[name] / (eager[name] + quarter_ulp), name) for name in eager)


# -- the checks -------------------------------------------------------------------------------------------------------


def available_backends() -> Iterator[tuple[str, str]]:
    """Yields the (device, backend) pairs that can run here; kernels on the CPU only under TRITON_INTERPRET=1."""
    for device in env.device_types():
        yield device, "eager"
        if _choices._device_reason(device, None) is None:
            yield device, "triton"


def check_environment() -> Iterator[Result]:
    """Checks that CKPTKERN_BACKEND names a backend. The other checks choose their own."""
    with contextlib.suppress(RuntimeError):
        _choices.choose_backend("selftest", torch.empty(0))
    yield "the environment variable CKPTKERN_BACKEND", None


def keep_mask(state: Tensor, threshold: int, rows: int, cols: int, row_base: int = 0) -> Tensor:
    """Returns the mask [rows, cols] of a tensor of one plane, bool, True = keep."""
    return torch.ops.ckptkern.keep_mask(state, threshold, 1, rows, cols, 0, row_base, 0, row_base + rows)[0]


def check_philox() -> Iterator[Result]:
    """Checks Philox4x32-10's known answer (Salmon et al. 2011, Random123's kat_vectors): a mask keeps an element at its
    value of 16 bits, and drops it above."""
    wrong, zeros = [], torch.zeros(2, dtype=torch.int64)
    for place, word in enumerate((0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)):
        for half, value in enumerate((word & 0xFFFF, word >> 16)):
            is_there = [bool(keep_mask(zeros, value + i, 9, 25)[8 * half, 8 * place]) for i in (0, 1)]
            wrong += [] if is_there == [True, False] else [f"{value:#x}"]
    yield "Philox4x32-10, known answer", f"other values than {', '.join(wrong)}" if wrong else None


def check_masks(backends: list[tuple[str, str]]) -> Iterator[Result]:
    """Checks that the extension's masks equal, bit for bit, those of torch ops on every device and those of the kernels."""
    key = torch.tensor([0x0123456789ABCDEF, -0x123456789ABCDEF])
    # threshold, planes, rows, cols, plane_base, row_base, col_base, total_rows
    placed = (16384, 2, 70, 130, 1, 35, 17, 200)
    mask = torch.ops.ckptkern.keep_mask(key, *placed)
    for device in sorted({device for device, _ in backends}):
        same = torch.equal(mask, state._keep_mask_torch(key.to(device), *placed).cpu())
        yield f"mask of the extension = torch ops on {device}", None if same else "other bits"
    threshold, scale = state.threshold_scale(P)
    for device, backend in backends:
        dropped = _choices.primitives(backend).dropout(
            torch.ones(70, 130, device=device), key.to(device), threshold, scale, row_base=32
        )
        same = torch.equal(dropped.cpu() != 0, keep_mask(key, threshold, 70, 130, 32))
        yield f"mask of dropout = extension, {device} {backend}", None if same else "other bits"


def check_dropout(device: str, backend: str) -> Iterator[Result]:
    """Checks that backward replays forward's mask from 16 bytes."""
    x = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
    with ops.backend(backend), saved_tensors() as saved:
        y = ops.dropout(x, P)
    y.backward(torch.ones_like(y))
    scale = state.threshold_scale(P)[1]
    replayed = torch.equal(x.grad, torch.where(y != 0, scale, 0.0)) and torch.equal(y, x * x.grad)
    fault = None if replayed else "backward's mask is not forward's"
    yield f"dropout, {device} {backend}", fault or (None if saved.bytes == 16 else f"saves {saved.bytes} B, not 16")


def check_op(name: str, activation: str, dtype: torch.dtype, device: str, backend: str) -> Iterator[Result]:
    """Checks outputs, gradients and saved bytes in the three recompute modes."""
    module = module_of(name, activation, FEATURES, HIDDEN, OUT, device=device, dtype=dtype)
    wide, on_meta = copy.deepcopy(module).double(), copy.deepcopy(module).to("meta")
    x, dy = (torch.randn(TOKENS, columns, device=device).to(dtype) for columns in (FEATURES, OUT))
    x.requires_grad_()

    def step(of, forward, like=x):
        leaf = x.detach().to(like).requires_grad_()
        return gradients(lambda: forward(leaf), {"x": leaf, **dict(of.named_parameters())}, dy.to(like))

    exact = step(wide, wide._composed, x.double())
    eager = relative_errors(step(module, module._composed), exact)
    for mode in _choices.MODES:
        module.recompute = on_meta.recompute = mode
        with ops.backend("eager"):
            wanted = saved_bytes(on_meta, x.to("meta"))
        with ops.backend(backend):
            saved, results = saved_bytes(module, x), step(module, module)
        ratio, worst = error_ratio(relative_errors(results, exact), eager, dtype)
        faults = [] if ratio <= 2 else [f"error of {worst} is {ratio:.2f} times eager's"]
        faults += [] if saved == wanted else [f"saves {saved} B, declared are {wanted}"]
        title = f"{name} {activation} {mode}, {str(dtype).removeprefix('torch.')}, {device} {backend}"
        yield f"{title}: error {ratio:.2f} of eager's, {saved / TOKENS:g} B/token", "; ".join(faults) or None


def checks() -> Iterator[Iterator[Result]]:
    """Yields every check in order; each runs as its results are read."""
    backends = list(available_backends())
    yield check_environment()
    yield check_philox()
    yield check_masks(backends)
    for device, backend in backends:
        yield check_dropout(device, backend)
    # on a GPU also the default backend, where libraries run most matmuls
    by_default = [("cuda", "auto")] * (("cuda", "triton") in backends)
    for device, backend in (*backends, *by_default):
        dtypes = [torch.float32, torch.bfloat16] + [torch.float16] * (device == "cuda")
        for (name, activation), dtype in itertools.product(CASES, dtypes):
            yield check_op(name, activation, dtype, device, backend)


def emulated_checks() -> Iterator[Iterator[Result]]:
    """Yields checks of kernels as Triton compiles them here for A100, H100 and H200, run by the emulator on any machine."""
    if hint := missing("numpy", "triton"):
        raise RuntimeError(hint)
    emulated = from_checkout("emulator.emulated", "selftest --emulated").emulated

    def check(arch, results):
        with emulated(arch) as launches:
            for name, fault in results:
                yield f"sm_{arch}, emulated: {name}", fault
        yield f"sm_{arch}, emulated: {len(launches)} launches without a fault", None if launches else "nothing ran"

    for arch in (80, 90):
        yield check(arch, check_dropout("cpu", "triton"))
        yield check(arch, check_op("linear_act", "relu", torch.bfloat16, "cpu", "triton"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m ckptkern selftest``."""
    parser.description = (
        "Check this installation: results against float64, dropout masks against each other, saved bytes against "
        "the ops' declarations. Paste the output into a bug report."
    )
    parser.add_argument("--quiet", action="store_true", help="print only failures and the last line")
    parser.add_argument(
        "--emulated",
        action="store_true",
        help="instead, compile kernels for A100 and H100 and check their code in an emulator on the CPU; needs a checkout",
    )


def main(args: argparse.Namespace) -> int:
    """Prints one line per check. Returns 1 if a check failed, else 0."""
    begin = time.perf_counter()
    if not args.quiet:
        data = env.collect()
        print("\n".join(env.lines({key: data[key] for key in ("versions", "devices", "backends")})))
    done = failed = 0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for check in emulated_checks() if args.emulated else checks():
            try:
                results = list(check)
            except Exception as error:  # a kernel that does not compile is a finding, and the other checks still run
                results = [(f"check {done + 1}", f"{type(error).__name__}: {error}")]
            for title, fault in results:
                done, failed = done + 1, failed + bool(fault)
                if fault or not args.quiet:
                    print(f"FAIL {title}: {fault}" if fault else f"ok   {title}", flush=True)
    seconds = time.perf_counter() - begin
    print(f"{failed} of {done} checks FAILED" if failed else f"all {done} checks passed in {seconds:.0f} s")
    return 1 if failed else 0
