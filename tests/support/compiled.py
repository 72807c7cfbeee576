"""What tests/triton_kernels/test_codegen.py learns from compiled kernels, as JSON: compiled.py NAME

It runs in a process of its own, without TRITON_INTERPRET, because a kernel decorated under that cannot be compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable

import torch
import triton
import triton.language as tl
from codegen import cases, sass, trace
from codegen.compiling import catch_launches, compile_launch
from support import catalog
from support.catalog import ACROSS_RANKS
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from ckptkern import triton_kernels
from ckptkern.benchmarks.compiling import instead_of_launches
from ckptkern.eager import AttentionCore
from ckptkern.ops import backend
from ckptkern.triton_kernels.attention import AttentionTile
from ckptkern.triton_kernels.tile import Tile


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def act_grad(M: int = 4096, K: int = 1024, N: int = 4096, dtype: torch.dtype = torch.bfloat16, **options) -> None:
    """One launch of act_grad with dropout, h and db."""
    dropout = (meta(2, dtype=torch.int64), 6554, 1.1111, 0)
    tensors = meta(M, K, dtype=dtype), meta(K, N, dtype=dtype), meta(M, N, dtype=dtype)
    triton_kernels.act_grad(*tensors, "gelu", "ieee", dropout=dropout, save_h=True, db=True, **options)


def attention(tile: AttentionTile) -> None:
    """One launch of attention's forward."""
    q = meta(2, 4, 1024, 128)
    triton_kernels.attn_fwd(q, q, q, AttentionCore(0.125, "ieee"), tile=tile)


@triton.jit
def _early_kernel(x_ptr, results, N: tl.constexpr):
    if tl.program_id(0) > 1:
        return
    tl.store(results[0][0] + tl.arange(0, N), tl.load(x_ptr + tl.arange(0, N)))


def early_return() -> None:
    """One launch with a tuple in a tuple, of a kernel that may return early."""
    x = meta(64)
    triton_kernels.tile.launch(_early_kernel, (1,), x, ((x, 1), None), N=64, num_warps=4)


# Launches that the code-generation check must find fault with, each for one reason. A larger tile compiles for longer.
INJECTED = {
    "spill": (90, "bfloat16", lambda: act_grad(tile=Tile(64, 256, 64, 4, 3, 1))),
    "unaligned": (90, "bfloat16", lambda: act_grad(1001, 515, 1037, tile=Tile(64, 64, 64, 8, 2))),
    "unaligned on sm_80": (80, "bfloat16", lambda: act_grad(1001, 515, 1037, tile=Tile(64, 64, 32, 8, 2))),
    "shared memory": (90, "bfloat16", lambda: act_grad(tile=Tile(64, 128, 64, 8, 10, 4))),
    "not pipelined": (90, "bfloat16", lambda: act_grad(tile=Tile(64, 128, 64, 8, 1, 2))),
    "no tensor core": (90, "float32", lambda: act_grad(dtype=torch.float32, tile=Tile(64, 64, 32, 8, 3))),
    "HMMA on sm_90": (90, "bfloat16", lambda: act_grad(tile=Tile(32, 64, 64, 4, 3))),
    "narrow HGMMA": (90, "bfloat16", lambda: attention(AttentionTile(128, 32, 8, 3))),
    "nested tuple": (90, "bfloat16", early_return),
    "computed twice": (80, "bfloat16", lambda: attention(AttentionTile(64, 32, 8, 3))),
}


def injected(names: Iterable[str] = INJECTED) -> dict[str, list[str]]:
    """The faults of each injected launch, checked as aligned, and of a launch with the default tile."""
    faults, launches = {}, {name: INJECTED[name] for name in names}
    for name, (arch, dtype, launch) in {**launches, "none": (90, "bfloat16", act_grad)}.items():
        cases.OPS[name] = lambda case, inputs, launch=launch: launch()
        case = cases.Case(name, arch, dtype, unaligned=False, activation="gelu", dropout=True, extras=True)
        faults[name] = [fault for _, report_faults in sass.check(case) for fault in report_faults]
    unknown = cases.Case("act_grad", 90, "bfloat16", unaligned=False, activation="tanh", dropout=False, extras=False)
    faults["does not compile"] = sass.run([unknown], workers=1, progress=False)[1]
    return faults


def some_injected() -> dict[str, list[str]]:
    """Those that compile for less than two seconds."""
    return injected(("unaligned on sm_80", "not pipelined", "nested tuple"))


def specializations(call, arch: int) -> set[str]:
    """What Triton's launch cache would tell apart in the launches of `call`."""
    backend = make_backend(GPUTarget("cuda", arch, 32))
    keys = set()
    for kernel, args, kwargs in catch_launches(call, arch):
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = binder(*args, **kwargs, debug=False)
        keys.add(f"{kernel.fn.__name__} {specialization} {options}")
    return keys


class Sized(cases.Inputs):
    """Of any sizes; `view` makes matrices."""

    TOP_K = 1

    def __init__(self, M=4096, K=1024, N=4096, D=1024, *, view=meta, threshold=6554, first_row=0):
        self.letters, self.LENGTH = dict(M=M, K=K, N=N, D=D), M
        self.view, self.threshold, self.first_row = view, threshold, first_row

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> torch.Tensor:
        plain = len(shape) != 2 or dtype != torch.bfloat16
        return meta(*shape, dtype=dtype) if plain else self.view(*shape)

    def sizes(self, case: cases.Case) -> dict[str, int]:
        return self.letters

    def dropout(self, wanted: bool) -> tuple:
        first_col = self.first_row // 32 * 32
        return meta(2, dtype=torch.int64), self.threshold, 65536 / (65537 - self.threshold), first_col

    def dmask(self) -> torch.Tensor:
        """Its case's mask has strides that are lengths, which enter addresses."""
        q, lse = meta(2, self.LENGTH, 4, 64).transpose(1, 2), meta(2, 4, self.LENGTH, dtype=torch.float32)
        planes = {"plane_base": self.first_row, "planes": self.first_row}
        core = AttentionCore(0.125, "ieee", (None, 0), dropout=self.dropout(True), **planes)
        return triton_kernels.attn_dmask(q, q, q, q, lse, lse, core, (1, 4, 1, 1))


def launches(*sizes: int, **options) -> dict[str, Callable[[], object]]:
    """Every launcher with everything it can give: the heaviest cases of the code-generation check, as `Sized` says."""
    heaviest = {op: cases.heaviest(op, 90, "bfloat16") for op in cases.OPS}
    with_bits = [op for op in cases.OPS if op not in cases.VARIANTS]
    heaviest |= {f"{op}, relu": dataclasses.replace(heaviest[op], activation="relu") for op in with_bits}
    heaviest |= {op: cases.AttentionCase(op, 90, "bfloat16", 64, True, True) for op in cases.ATTENTION_OPS}
    sized = Sized(*sizes, **options)
    return {name: functools.partial(case.launch, sized) for name, case in heaviest.items()} | {
        "attn_dmask": sized.dmask
    }


def compilations(*settings: dict) -> dict[str, list[str]]:
    """Those of each launcher in all of these settings."""
    keys: dict[str, set[str]] = {}
    for setting in settings:
        for name, call in launches(**setting).items():
            keys.setdefault(name, set()).update(specializations(call, 90))
    return {name: sorted(values) for name, values in keys.items()}


def specialized() -> list[dict[str, list[str]]]:
    """The compilations over every pair of lengths, dropout probabilities and first rows, and those for a few and for many
    rows."""
    rows, thresholds = (1, 2, 16, 17, 1024, 2**18 + 1), (1, 16, 17, 6554, 32768, 65536)
    first_rows = (0, 16, 128, 2**20, 2**30 + 128)
    settings = [
        dict(M=M, threshold=threshold, first_row=first_rows[(i + j) % len(first_rows)])
        for (i, M), (j, threshold) in itertools.product(enumerate(rows), enumerate(thresholds))
    ]
    return [compilations(*settings), compilations(dict(M=16), dict(M=2**18))]


def widths() -> list[dict[str, list[str]]]:
    """The compilations over sizes that are multiples of 8 and not of 16, and those for the first of these."""
    settings = [dict(K=K, N=N, D=D) for K, N, D in ((1032, 4104, 1032), (1048, 5000, 776), (1800, 4120, 2072))]
    return [compilations(*settings), compilations(settings[0])]


# Launches that look aligned in all respects but one.
UNEVEN = {
    "offset of one element": {"view": lambda m, n: meta(m, n + 16)[:, 1:-15]},
    "rows 4 elements further apart": {"view": lambda m, n: meta(m, n + 4)[:, :-4]},
    "odd number of outputs": {"N": 4095},
    "odd number of inputs": {"K": 1023, "D": 1023},
}


def forms(caught: Iterable[tuple]) -> set[tuple[str, str, object]]:
    """(kernel, argument, what it is) of launches: a constant's value, or whether a pointer is there."""
    seen = set()

    def look_at(kernel: str, name: str, value: object) -> None:
        if isinstance(value, tuple):
            for i, item in enumerate(value):
                look_at(kernel, f"{name}[{i}]", item)
        elif isinstance(value, (bool, str)) and name not in sass.TILE_KEYS:
            seen.add((kernel, name, value))
        elif value is None or not isinstance(value, (bool, int, float, str)):
            seen.add((kernel, name, value is None))

    for kernel, args, kwargs in caught:
        for name, value in (dict(zip(kernel.arg_names, args, strict=False)) | kwargs).items():
            look_at(kernel.fn.__name__, name, value)
    return seen


def options() -> list[str]:
    """What ops launch with each option of the catalogue, and no case of the code-generation check does."""
    gated, missing = set(), {}
    for case in cases.all_cases():
        if (case.arch, case.dtype) == (90, "bfloat16"):
            gated |= forms(catch_launches(case.launch, 90))
    for entry in (candidate for candidate in catalog.OPS.values() if candidate.op.kernels):
        sizes = catalog.Sizes((2, 64), 64, 128, 64)
        chosen = {"": {}} | {
            name: value for name, value in entry.every_option(sizes).items() if ACROSS_RANKS not in value.values()
        }
        for (option, more), mode in itertools.product(chosen.items(), entry.modes or ("",)):
            arguments = entry.inputs(sizes) | ({"recompute": mode} if mode else {}) | more
            shapes, caught = catalog.input_shapes(arguments), []
            leaves = {name: meta(*shape).requires_grad_() for name, shape in shapes.items()}
            with (
                trace.as_on(90),
                backend("triton"),
                instead_of_launches(
                    lambda kernel, grid, args, kwargs, caught=caught: caught.append((kernel, args, kwargs)), 90
                ),
            ):
                outputs = catalog.call(entry, arguments, leaves)
                y = outputs[0] if isinstance(outputs, tuple) else outputs
                y.backward(torch.empty_like(y))
            missing |= {str(form): f"{entry.name} {option} {mode}" for form in forms(caught) - gated}
    return [f"{form} of {where}" for form, where in missing.items()]


def uneven() -> dict[str, list[str]]:
    """The launches of each of these that get another tile than one that is unaligned in all respects."""
    matmuls = ("linear_fwd", "linear_bwd", "act_grad", "mlp_bwd", "gated_fwd")

    def tiles(**options) -> dict[str, dict]:
        keys = {}
        for name, arch in itertools.product(matmuls, cases.ARCHS):
            (_, _, arguments), *_ = catch_launches(launches(**options)[name], arch)
            keys[f"{name} on sm_{arch}"] = {key: arguments.get(key) for key in sass.TILE_KEYS}
        return keys

    unaligned, aligned = tiles(N=4095, K=1023, D=1023), tiles()
    assert not any(aligned[launch] == unaligned[launch] for launch in unaligned)
    return {
        kind: [launch for launch, tile in tiles(**options).items() if tile != unaligned[launch]]
        for kind, options in UNEVEN.items()
    }


def maxima() -> dict[str, list[str]]:
    """The kinds of float32 maximum in the PTX of relu's and relu2's forward and backward."""
    M, N = 4096, 1024
    calls = {
        "relu": lambda: triton_kernels.act_fwd(meta(M, N), None, "relu"),
        "relu2": lambda: triton_kernels.act_fwd(meta(M, N), None, "relu2"),
        "relu2 backward": lambda: triton_kernels.act_bwd(meta(M, N), meta(M, N), "relu2"),
    }
    kinds = {}
    for name, call in calls.items():
        (launch,) = catch_launches(call, 90)
        kinds[name] = sorted(set(re.findall(r"\bmax\S*", compile_launch(*launch, 90).ptx)))
    return kinds


class Hopper:
    """What a launch asks of the driver before it looks for compiled code."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


def launched() -> dict[str, list]:
    """fences, wgmmas, bytes: in a launch's PTX, and of its cubin, after the emulator asked for the PTX alone."""
    triton.runtime.driver.set_active(Hopper())
    matmuls = [caught for caught in catch_launches(act_grad, 90) if "BLOCK_K" in caught[2]]
    for kernel, args, kwargs in matmuls:
        compile_launch(kernel, args, kwargs, 90)
    compiled = [kernel.run(*args, grid=(1,), warmup=True, **kwargs) for kernel, args, kwargs in matmuls]
    texts = [kernel.asm["ptx"] for kernel in compiled]
    return {
        "fences": [text.count("fence.proxy.async") for text in texts],
        "wgmmas": [text.count("wgmma.mma_async") for text in texts],
        "bytes": [len(kernel.asm["cubin"]) for kernel in compiled],
    }


def at_once() -> dict[str, object]:
    """The answers that take little longer than the process starts."""
    return {answer.__name__: answer() for answer in (specialized, widths, options, uneven, maxima)}


if __name__ == "__main__":
    answers = {answer.__name__: answer for answer in (injected, some_injected, at_once, launched)}
    json.dump(answers[sys.argv[1]](), sys.stdout)
