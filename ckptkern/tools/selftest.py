"""Checks the results of this installation: ``python -m ckptkern selftest``. Paste its output into a bug report.

Masks are compared with Philox's known answer and with each other, outputs and gradients of every op with float64 PyTorch (error
at most twice eager PyTorch's in that dtype), and saved bytes with the op's declaration.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops, state
from ..extras import from_checkout, missing
from ..memory import saved_tensors
from ..ops.dispatch import choices as _choices
from . import env

Tensors = dict[str, Tensor]
Result = tuple[str, str | None]  # the check, and its fault or None

TOKENS, FEATURES, HIDDEN, OUT = 72, 48, 80, 56
P = 0.25  # k/65536 exactly, so that torch's scale is ours
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


SIZES = {"features": FEATURES, "hidden": HIDDEN, "out": OUT}
LAYERS: dict[str, dict[str, tuple[str, str]]] = {  # op -> name -> sizes of outputs and inputs
    "linear_act": {"": ("out", "features")},
    "linear_stack": {"0.": ("hidden", "features"), "1.": ("hidden", "hidden"), "2.": ("out", "hidden")},
    "mlp": {"fc1_": ("hidden", "features"), "fc2_": ("out", "hidden")},
    "gated_mlp": {"gate_": ("hidden", "features"), "up_": ("hidden", "features"), "down_": ("out", "hidden")},
}


def random_inputs(
    op: str, tokens: int, sizes: dict[str, int], dtype: torch.dtype, device: torch.device | str
) -> Tensors:
    """Returns x and the weights and biases of the op's layers by name, scaled so that activations keep their size."""
    shapes = {"x": (tokens, sizes["features"])}
    for name, (rows, columns) in LAYERS[op].items():
        shapes |= {f"{name}weight": (sizes[rows], sizes[columns]), f"{name}bias": (sizes[rows],)}
    options = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    wide, tensors = torch.promote_types(dtype, torch.float32), {}
    for name, shape in shapes.items():
        value = torch.randn(shape, dtype=wide, **options) * (shape[1] ** -0.5 if name.endswith("weight") else 1.0)
        tensors[name] = value.to(dtype).requires_grad_()
    return tensors


def call(op: str, t: Tensors, **options: str) -> Tensor:
    if op == "linear_stack":
        return ops.linear_stack(
            t["x"], *([t[f"{i}.{part}"] for i in range(3)] for part in ("weight", "bias")), **options
        )
    return getattr(ops, op)(**t, **options)


def saved_bytes(op: str, t: Tensors, **options: str) -> int:
    """Returns the bytes that a call saves besides parameters; on meta tensors, the bytes that the op declares."""
    with saved_tensors(exclude=[leaf for name, leaf in t.items() if name != "x"]) as saved:
        call(op, t, **options)
    return saved.bytes


def _linear(t: Tensors, name: str, x: Tensor) -> Tensor:
    return F.linear(x, t[f"{name}weight"], t[f"{name}bias"])


def _stack(act: Callable, t: Tensors) -> Tensor:
    x = t["x"]
    for name in LAYERS["linear_stack"]:
        x = act(_linear(t, name, x))
    return x


# The ops in PyTorch's own functions, from inputs by name.
PLAIN: dict[str, Callable[[Callable, Tensors], Tensor]] = {
    "linear_act": lambda act, t: act(_linear(t, "", t["x"])),
    "linear_stack": _stack,
    "mlp": lambda act, t: _linear(t, "fc2_", act(_linear(t, "fc1_", t["x"]))),
    "gated_mlp": lambda act, t: _linear(t, "down_", act(_linear(t, "gate_", t["x"])) * _linear(t, "up_", t["x"])),
}
CASES = [(name, act) for name in PLAIN for act in ("silu" if name == "gated_mlp" else "relu", "gelu")]


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
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        yield device, "eager"
        try:
            with ops.backend("triton"):
                _choices.choose_backend("selftest", torch.empty(0, device=device))
        except RuntimeError:
            continue
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
    unfused = functools.partial(PLAIN[name], ACTIVATIONS[activation])
    leaves = random_inputs(name, TOKENS, SIZES, dtype, device)
    on_meta = {key: torch.empty_like(leaf, device="meta").requires_grad_() for key, leaf in leaves.items()}
    dy = torch.randn(TOKENS, OUT, generator=torch.Generator().manual_seed(1)).to(device=device, dtype=dtype)
    doubles = {key: leaf.detach().double().requires_grad_() for key, leaf in leaves.items()}
    exact = gradients(lambda: unfused(doubles), doubles, dy.double())
    eager = relative_errors(gradients(lambda: unfused(leaves), leaves, dy), exact)
    for mode in _choices.MODES:
        options = {"activation": activation, "recompute": mode}
        run = functools.partial(call, name, leaves, **options)
        with ops.backend("eager"):
            wanted = saved_bytes(name, on_meta, **options)
        with ops.backend(backend):
            saved, results = saved_bytes(name, leaves, **options), gradients(run, leaves, dy)
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
    by_default = [("cuda", "auto")] if ("cuda", "triton") in backends else []
    for device, backend in (*backends, *by_default):
        dtypes = [torch.float32, torch.bfloat16] + [torch.float16] * (device == "cuda")
        for (name, activation), dtype in itertools.product(CASES, dtypes):
            yield check_op(name, activation, dtype, device, backend)


def emulated_checks() -> Iterator[Iterator[Result]]:
    """Yields checks of kernels as Triton compiles them here for A100, H100 and H200, run by the emulator on any machine."""
    if hint := missing("numpy", "triton"):
        raise RuntimeError(hint)
    emulated = from_checkout("emulator.emulated", "selftest --emulated").emulated

    def check(arch: int, results: Iterator[Result]) -> Iterator[Result]:
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
