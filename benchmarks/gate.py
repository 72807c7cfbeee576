"""The compile gate: every kernel compiled to a cubin for sm_80 and sm_90 without a GPU, and its machine code read.

    python -m ckptkern.benchmarks.gate            the shipped tiles (what `make test` runs)
    python -m ckptkern.benchmarks.gate --all      every activation and flag too (`make gate`)

Launchers are called on meta tensors and their launches caught, so a kernel is compiled with exactly the types,
divisibility and constants of a real launch. What is asserted is in `Report.faults`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import csv
import dataclasses
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

ARCHS = (80, 90)
DTYPES = ("float16", "bfloat16")
SHARED_LIMIT = {80: 166912, 90: 232448}  # bytes a block may use; A100 and H100/H200
TILE_KEYS = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "WIDTH", "num_warps", "num_stages", "SUB")
ALLOWED_SPILLS: dict[str, int] = {}  # case name -> bytes of stack, each with its reason. Empty is the aim.


@dataclasses.dataclass(frozen=True)
class Case:
    """One compile: a launcher on meta tensors with one set of flags."""

    op: str
    arch: int
    dtype: str
    ragged: bool
    activation: str
    dropout: bool
    extras: bool  # the optional outputs: z, h, masks, bias gradients

    @property
    def name(self) -> str:
        flags = [self.activation, "ragged" if self.ragged else "aligned"]
        flags += ["dropout"] * self.dropout + ["extras"] * self.extras
        return f"{self.op}/sm_{self.arch}/{self.dtype}/{'+'.join(flags)}"


@dataclasses.dataclass
class Report:
    """What the machine code of one case says."""

    case: str
    kernel: str
    tile: str
    registers: int
    stack: int
    local: int  # STL + LDL instructions
    shared: int
    tensor_core: int  # HGMMA on sm_90, HMMA on sm_80
    wrong_tensor_core: int  # HMMA where HGMMA was meant
    async_copies: int  # LDGSTS (cp.async) or UTMALDG (TMA)
    narrow_loads: int  # 2-byte global loads
    instructions: int
    philox: int  # integer multiplies by the Philox constants; 0 without dropout

    def faults(self, case: Case, product: bool, min_shared: int) -> list[str]:
        found = []
        if self.stack > ALLOWED_SPILLS.get(self.case, 0) or (self.local and self.case not in ALLOWED_SPILLS):
            found.append(f"spills: {self.stack} B of stack, {self.local} local loads and stores")
        if self.shared > SHARED_LIMIT[case.arch]:
            found.append(f"{self.shared} B of shared memory, the card has {SHARED_LIMIT[case.arch]}")
        if product and not self.tensor_core:
            found.append("no tensor-core instruction")
        if product and self.wrong_tensor_core:
            found.append(f"{self.wrong_tensor_core} HMMA instructions where HGMMA was meant")
        if product and not case.ragged:
            if not self.async_copies:
                found.append("no asynchronous copy in the main loop")
            if self.shared < min_shared:
                found.append(f"{self.shared} B of shared memory: less than stages x tile = {min_shared}, not pipelined")
        if not case.ragged and self.narrow_loads:
            found.append(f"{self.narrow_loads} two-byte global loads on the aligned path")
        return found


def shipped_cases() -> list[Case]:
    """Every kernel x tile row x architecture x dtype, aligned and ragged, with the heaviest flags, and once plain."""
    cases = []
    for op, arch, dtype in itertools.product(OPS, ARCHS, DTYPES):
        heavy = "relu" if op == "stack_bwd" else "gelu"
        cases.append(Case(op, arch, dtype, False, heavy, op in DROPOUT_OPS, True))
        cases.append(Case(op, arch, dtype, True, heavy, op in DROPOUT_OPS, True))
        if dtype == "bfloat16":
            cases.append(Case(op, arch, dtype, False, "relu", False, False))
    return cases


def all_cases() -> list[Case]:
    from ..triton_kernels.elementwise import ACTIVATIONS

    return [
        Case(op, arch, dtype, ragged, activation, full and op in DROPOUT_OPS, full)
        for op, arch, dtype, ragged, activation, full in itertools.product(
            OPS, ARCHS, (*DTYPES, "float32"), (False, True), ACTIVATIONS, (False, True)
        )
    ]


def _tensors(case: Case):
    import torch

    dtype = getattr(torch, case.dtype)
    M, K, N, D = (1001, 515, 1037, 517) if case.ragged else (4096, 1024, 4096, 1024)

    def meta(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    dropout = (meta(2, dtype=torch.int64), 6554, 1.1111) if case.dropout else (None, 0, 1.0)
    return meta, M, K, N, D, dropout, dtype


def _precision(case: Case) -> str:
    return "tf32" if case.dtype == "float32" else "ieee"


def _launch_linear_fwd(case):
    from ..triton_kernels import linear

    meta, M, K, N, _, dropout, _ = _tensors(case)
    linear.linear_fwd(
        meta(M, K), meta(N, K), meta(N), case.activation, _precision(case), dropout=dropout, keep_z=case.extras,
        keep_bits=case.extras and case.activation == "relu",
    )  # fmt: skip


def _launch_linear_bwd(case):
    from ..triton_kernels import linear

    meta, M, K, N, _, _, _ = _tensors(case)
    linear.linear_bwd(
        meta(M, K), meta(N, K), meta(N), meta(M, N), case.activation, _precision(case), db=case.extras
    )  # fmt: skip


def _launch_act_grad(case):
    from ..triton_kernels import linear

    meta, M, K, N, _, dropout, _ = _tensors(case)
    linear.act_grad(
        meta(M, K), meta(K, N), meta(M, N), case.activation, _precision(case), dropout=dropout, keep_h=case.extras,
        db=case.extras,
    )  # fmt: skip


def _launch_mlp_bwd(case):
    from ..triton_kernels import mlp

    meta, M, K, N, D, dropout, _ = _tensors(case)
    mlp.mlp_bwd(
        meta(M, K), meta(N, K), meta(N), meta(M, D), meta(D, N), case.activation, _precision(case), dropout=dropout,
        keep_h=case.extras, db=case.extras,
    )  # fmt: skip


def _launch_gated_fwd(case):
    from ..triton_kernels import mlp

    meta, M, K, N, _, dropout, _ = _tensors(case)
    mlp.gated_fwd(
        meta(M, K), meta(N, K), meta(N), meta(N, K), meta(N), case.activation, _precision(case), dropout=dropout,
        keep_gu=case.extras,
    )  # fmt: skip


def _launch_gated_bwd(case):
    from ..triton_kernels import mlp

    meta, M, K, N, D, dropout, _ = _tensors(case)
    mlp.gated_bwd(
        meta(M, K), meta(N, K), meta(N), meta(N, K), meta(N), meta(M, D), meta(D, N), case.activation, _precision(case),
        dropout=dropout, keep_h=case.extras, dbg=case.extras, dbu=case.extras,
    )  # fmt: skip


def _launch_gated_act_grad(case):
    from ..triton_kernels import mlp

    meta, M, K, N, _, dropout, _ = _tensors(case)
    mlp.gated_act_grad(
        meta(M, K), meta(K, N), meta(M, N), meta(M, N), case.activation, _precision(case), dropout=dropout,
        keep_h=case.extras, dbg=case.extras, dbu=case.extras,
    )  # fmt: skip


def _launch_act_fwd(case):
    from ..triton_kernels import elementwise

    meta, M, _, N, _, _, _ = _tensors(case)
    elementwise.act_fwd(meta(M, N), meta(M, N) if case.extras else None, case.activation)


def _launch_act_bwd(case):
    import torch

    from ..triton_kernels import elementwise

    meta, M, _, N, _, _, _ = _tensors(case)
    if case.activation == "relu":
        elementwise.act_bwd(meta(M, N), meta(M, -(-N // 8), dtype=torch.uint8), "relu", bits=True, db=case.extras)
    else:
        elementwise.act_bwd(meta(M, N), meta(M, N), case.activation, db=case.extras)


def _launch_dropout(case):
    import torch

    from ..triton_kernels import elementwise

    meta, M, _, N, _, _, _ = _tensors(case)
    elementwise.dropout(meta(M, N), meta(2, dtype=torch.int64), 6554, 1.1111)


def _narrow(case):
    import torch

    meta, M, *_ = _tensors(case)
    width, L = 64, 8
    K, N = (61, 53) if case.ragged else (64, 64)
    bits = meta(M, -(-N // 8), dtype=torch.uint8) if case.activation == "relu" else None
    return meta(M, K), meta(L, width, width), meta(L, width) if case.extras else None, meta(M, N), bits


def _launch_stack_fwd(case):
    from ..triton_kernels import stack

    x, w, b, dy, bits = _narrow(case)
    stack.stack_fwd(x, w, b, dy.shape[1], case.activation, _precision(case), keep_bits=bits is not None)


def _launch_stack_bwd(case):
    from ..triton_kernels import stack

    x, w, b, dy, bits = _narrow(case)
    stack.stack_bwd(x, w, b, dy, bits, case.activation, _precision(case))


OPS = {
    "stack_fwd": _launch_stack_fwd,
    "stack_bwd": _launch_stack_bwd,
    "linear_fwd": _launch_linear_fwd,
    "linear_bwd": _launch_linear_bwd,
    "act_grad": _launch_act_grad,
    "mlp_bwd": _launch_mlp_bwd,
    "gated_fwd": _launch_gated_fwd,
    "gated_bwd": _launch_gated_bwd,
    "gated_act_grad": _launch_gated_act_grad,
    "act_fwd": _launch_act_fwd,
    "act_bwd": _launch_act_bwd,
    "dropout": _launch_dropout,
}
DROPOUT_OPS = {"linear_fwd", "act_grad", "mlp_bwd", "gated_fwd", "gated_bwd", "gated_act_grad"}


def catch_launches(call, arch: int) -> list[tuple]:
    """Every (kernel, args, kwargs) that `call()` would have launched on compute capability `arch`."""
    from triton.runtime.jit import JITFunction

    from ..triton_kernels import elementwise, linear, mlp, stack

    caught = []

    def run(self, *args, grid, warmup, **kwargs):
        caught.append((self, args, kwargs))

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", run))
        for module in (elementwise, linear, mlp, stack):
            patches.enter_context(mock.patch.object(module, "arch_of", lambda x: arch))
        call()
    return caught


def compile_launch(kernel, args, kwargs, arch: int):
    """The compiled kernel of a caught launch, for compute capability `arch`; no driver is needed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    kwargs = dict(kwargs, debug=False)
    bound, specialization, options = binder(*args, **kwargs)
    options, signature, constexprs, attrs = kernel._pack_args(backend, kwargs, bound, specialization, options)
    return triton.compile(ASTSource(kernel, signature, constexprs, attrs), target=target, options=options.__dict__)


def read_cubin(compiled) -> dict[str, int]:
    """Registers, stack, shared memory and instruction counts, read with the disassembler that Triton ships."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
        sass = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    usage = usage.stdout + usage.stderr
    mnemonics = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", sass, re.MULTILINE)

    def count(pattern):
        return sum(bool(re.match(pattern, m)) for m in mnemonics)

    return dict(
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack=int(re.search(r"STACK:(\d+)", usage)[1]),
        local=count(r"(STL|LDL)\b"),
        shared=compiled.metadata.shared,
        hgmma=count(r"[HQ]GMMA"),
        hmma=count(r"[HI]MMA"),
        async_copies=count(r"LDGSTS|UTMALDG|UBLKCP"),
        narrow_loads=count(r"LDG\S*\.[US]16"),
        instructions=len(mnemonics),
        philox=len(re.findall(r"(?:IMAD\.HI\.U32|IMAD\.WIDE\.U32)[^\n]*(?:-0x2daee0ad|-0x326172a9|0xd2511f53|0xcd9e8d57)", sass)),
    )  # fmt: skip


def gate(case: Case) -> list[tuple[Report, list[str]]]:
    """Compile one case; a report and its faults for every kernel that it launches."""
    results = []
    caught = catch_launches(lambda: OPS[case.op](case), case.arch)
    if not caught:
        raise RuntimeError(f"{case.name}: nothing was launched")
    for kernel, args, kwargs in caught:
        read = read_cubin(compile_launch(kernel, args, kwargs, case.arch))
        hgmma, hmma = read.pop("hgmma"), read.pop("hmma")
        block_k, stages = kwargs.get("BLOCK_K"), kwargs.get("num_stages", 1)
        sm90 = case.arch == 90
        report = Report(
            case=case.name,
            kernel=kernel.fn.__name__,
            tile=" ".join(f"{key.removeprefix('BLOCK_')}{kwargs[key]}" for key in TILE_KEYS if key in kwargs),
            tensor_core=hgmma if sm90 else hmma,
            wrong_tensor_core=hmma if sm90 else 0,
            **read,
        )
        itemsize = 4 if case.dtype == "float32" else 2
        # the last stage may live in registers on its way in, so stages - 1 tiles are the least a pipelined loop holds
        staged = (kwargs["BLOCK_M"] + kwargs["BLOCK_N"]) * block_k * itemsize * (stages - 1) if block_k else 0
        results.append((report, report.faults(case, block_k is not None, staged)))
    return results


def _gate_or_error(case: Case):
    try:
        return case, gate(case), None
    except Exception as error:  # a kernel that does not compile is a finding, and the others still want their turn
        return case, [], f"{type(error).__name__}: {error}"


def run(cases: list[Case], workers: int = 2, progress: bool = True) -> tuple[list[Report], list[str]]:
    """All reports, and one line for every fault. Workers are spawned: a forked child would inherit the interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("the gate compiles kernels: run it in a process without TRITON_INTERPRET=1")
    reports, faults = [], []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done, (case, results, error) in enumerate(pool.map(_gate_or_error, cases, chunksize=4), 1):
            if error:
                faults.append(f"{case.name}: {error}")
            for report, found in results:
                reports.append(report)
                faults += [f"{report.case} ({report.kernel}): {fault}" for fault in found]
            if progress and (done % 20 == 0 or done == len(cases)):
                print(f"{done}/{len(cases)} compiled, {len(faults)} faults", file=sys.stderr, flush=True)
    return reports, faults


def write_csv(reports: list[Report], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in dataclasses.fields(Report))
        writer.writerows(dataclasses.astuple(report) for report in reports)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ckptkern.benchmarks.gate", description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every activation and flag, not only the shipped tiles")
    parser.add_argument("--only", default="", help="regular expression on case names, e.g. 'mlp_bwd/sm_90'")
    parser.add_argument("--workers", type=int, default=2, help="compiling processes (default: 2)")
    parser.add_argument("--csv", type=Path, help="write the table here")
    args = parser.parse_args()
    cases = [case for case in (all_cases() if args.all else shipped_cases()) if re.search(args.only, case.name)]
    if not cases:
        parser.error(f"--only {args.only!r} matches no case")
    reports, faults = run(cases, args.workers)
    if args.csv:
        write_csv(reports, args.csv)
    for report in reports:
        print(f"{report.case:64} {report.tile:24} reg {report.registers:3} stack {report.stack:4} smem {report.shared:6}")
    print("\n".join(faults) or f"compile gate: {len(reports)} kernels, no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
