"""What tests/triton_kernels/test_gate.py learns from compiled kernels, as JSON: compiled.py NAME

A process of its own, without TRITON_INTERPRET: a kernel decorated under it cannot be compiled.
"""

from __future__ import annotations

import itertools
import json
import re
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from ckptkern import triton_kernels
from ckptkern.benchmarks import gate
from ckptkern.triton_kernels.tile import Tile


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def act_grad(M: int = 4096, K: int = 1024, N: int = 4096, dtype: torch.dtype = torch.bfloat16, **options) -> None:
    """One launch of act_grad with dropout, h and db."""
    dropout = (meta(2, dtype=torch.int64), 6554, 1.1111)
    tensors = meta(M, K, dtype=dtype), meta(K, N, dtype=dtype), meta(M, N, dtype=dtype)
    triton_kernels.act_grad(*tensors, "gelu", "ieee", dropout=dropout, keep_h=True, db=True, **options)


# Launches that the gate must find fault with, each for one reason.
PLANTED = {
    "spill": (90, "bfloat16", lambda: act_grad(tile=Tile(128, 256, 64, 4, 3, 1))),
    "ragged": (90, "bfloat16", lambda: act_grad(1001, 515, 1037, tile=Tile(64, 64, 64, 8, 2))),
    "ragged on sm_80": (80, "bfloat16", lambda: act_grad(1001, 515, 1037, tile=Tile(64, 64, 32, 8, 2))),
    "shared memory": (90, "bfloat16", lambda: act_grad(tile=Tile(128, 256, 64, 8, 6, 4))),
    "not pipelined": (90, "bfloat16", lambda: act_grad(tile=Tile(128, 128, 64, 8, 1, 4))),
    "no tensor core": (90, "float32", lambda: act_grad(dtype=torch.float32, tile=Tile(64, 64, 32, 8, 3))),
    "HMMA on sm_90": (90, "bfloat16", lambda: act_grad(tile=Tile(32, 64, 64, 4, 3))),
}


def planted() -> dict[str, list[str]]:
    """The faults of each planted launch, taken as aligned, and of a launch as shipped."""
    faults = {}
    for name, (arch, dtype, launch) in {**PLANTED, "none": (90, "bfloat16", act_grad)}.items():
        gate.OPS[name] = lambda case, launch=launch: launch()
        case = gate.Case(name, arch, dtype, ragged=False, activation="gelu", dropout=True, extras=True)
        faults[name] = [fault for _, found in gate.gate(case) for fault in found]
    unknown = gate.Case("act_grad", 90, "bfloat16", ragged=False, activation="tanh", dropout=False, extras=False)
    faults["does not compile"] = gate.run([unknown], workers=1, progress=False)[1]
    return faults


def specializations(call, arch: int) -> set[str]:
    """What Triton's launch cache would tell apart in the launches of `call`."""
    backend = make_backend(GPUTarget("cuda", arch, 32))
    keys = set()
    for kernel, args, kwargs in gate.catch_launches(call, arch):
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = binder(*args, **kwargs, debug=False)
        keys.add(f"{kernel.fn.__name__} {specialization} {options}")
    return keys


ROWS = (1, 2, 16, 17, 1024, 2**20 + 1)
THRESHOLDS = (1, 16, 17, 6554, 32768, 65536)
FIRST_ROWS = (0, 16, 128, 2**20, 2**30 + 128)


def launches(M: int, threshold: int, first_row: int):
    """Every launcher on M rows of features that are multiples of 16."""
    K, N, D, L = 64, 128, 32, 3
    dropped = {"dropout": (meta(2, dtype=torch.int64), threshold, 65536 / (65537 - threshold)), "row_base": first_row}
    x, dy, dh, b = meta(M, K), meta(M, D), meta(M, N), meta(N)
    w, v = meta(N, K), meta(D, N)
    bits = meta(M, N // 8, dtype=torch.uint8)
    narrow = meta(L, 64, 64), meta(L, 64)
    plain = ("relu", "ieee")
    return {
        "linear_fwd": lambda t: t.linear_fwd(x, w, b, *plain, keep_z=True, keep_bits=True, **dropped),
        "linear_bwd": lambda t: t.linear_bwd(x, w, b, dh, *plain, db=True),
        "act_grad": lambda t: t.act_grad(dy, v, dh, *plain, keep_h=True, db=True, **dropped),
        "mlp_bwd": lambda t: t.mlp_bwd(x, w, b, dy, v, *plain, db=True, **dropped),
        "gated_fwd": lambda t: t.gated_fwd(x, w, b, w, b, *plain, keep_gu=True, **dropped),
        "gated_bwd": lambda t: t.gated_bwd(x, w, b, w, b, dy, v, *plain, dbg=True, dbu=True, **dropped),
        "gated_act_grad": lambda t: t.gated_act_grad(dy, v, dh, dh, *plain, dbg=True, dbu=True, **dropped),
        "act_fwd": lambda t: t.act_fwd(dh, dh, "gelu"),
        "act_bwd": lambda t: t.act_bwd(dh, dh, "gelu", db=True),
        "act_bwd of bits": lambda t: t.act_bwd(dh, bits, "relu", bits=True, db=True),
        "dropout": lambda t: t.dropout(dh, dropped["dropout"][0], *dropped["dropout"][1:], row_base=first_row),
        "stack_fwd": lambda t: t.stack_fwd(x, *narrow, 64, *plain, keep_bits=True),
        "stack_bwd": lambda t: t.stack_bwd(x, *narrow, x, bits[:, :8], *plain),
    }


def specialized() -> dict[str, list[str]]:
    """The compilations of each launcher over lengths, dropout probabilities and first rows."""
    keys: dict[str, set[str]] = {}
    for M, threshold, first_row in itertools.product(ROWS, THRESHOLDS, FIRST_ROWS):
        for name, call in launches(M, threshold, first_row).items():
            keys.setdefault(name, set()).update(specializations(lambda call=call: call(triton_kernels), 90))
    return {name: sorted(found) for name, found in keys.items()}


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
        (launch,) = gate.catch_launches(call, 90)
        kinds[name] = sorted(set(re.findall(r"\bmax\S*", gate.compile_launch(*launch, 90).asm["ptx"])))
    return kinds


if __name__ == "__main__":
    answers = {"planted": planted, "specialized": specialized, "maxima": maxima}
    json.dump(answers[sys.argv[1]](), sys.stdout)
