"""Catches and compiles a case's launches, and reads their SASS."""

from __future__ import annotations

import ast
import concurrent.futures
import dataclasses
import inspect
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from importlib.metadata import version
from pathlib import Path

from .cases import AttentionCase, Case
from .compiling import Compiled, catch_launches, compile_launch
from .spills import ALLOWED_HMMA, ALLOWED_TWICE, allowed_stack

# Multiplications by one of Philox's two constants, as the assembler writes them.
PHILOX_MULTIPLY = re.compile(
    r"(?:IMAD\.HI\.U32|IMAD\.WIDE\.U32)[^\n]*(?:-0x2daee0ad|-0x326172a9|0xd2511f53|0xcd9e8d57)"
)
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", re.MULTILINE)  # of nvdisasm
TILE_KEYS = (
    "BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_D", "BLOCK_S", "BLOCK_HALF", "BLOCK_REST", "WIDTH", "num_warps",
    "num_stages", "SUB",
)  # fmt: skip
ATTENTION = ("_attn_fwd_kernel", "_attn_dkdv_kernel", "_attn_dq_kernel", "_attn_dmask_kernel")
# kernel -> matmuls of a tile (M x N x K, or M x N x head dim) in one pass of a loop
MATMULS = {
    "_linear_fwd_kernel": 1, "_linear_bwd_kernel": 1, "_act_grad_kernel": 1, "_mlp_bwd_kernel": 2, "_gated_fwd_kernel": 2,
    "_gated_bwd_kernel": 3, "_gated_act_grad_kernel": 1, "_attn_fwd_kernel": 2, "_attn_dkdv_kernel": 4, "_attn_dq_kernel": 3,
    "_attn_dmask_kernel": 2,
    "_cross_entropy_fwd_kernel": 1, "_cross_entropy_bwd_kernel": 1,
    "_experts_fwd_kernel": 2, "_experts_bwd_kernel": 3, "_experts_act_grad_kernel": 1, "_experts_gemm_kernel": 1,
    "_experts_dw_kernel": 1,
}  # fmt: skip


def inspect_cubin(cubin: bytes, tool: str, option: str) -> str:
    """What one of the tools that Triton ships (cuobjdump, nvdisasm) says of SASS."""
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run([path, option, file.name], capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


def resources(cubin: bytes) -> dict[str, int]:
    """Registers per thread, and bytes of stack."""
    usage = inspect_cubin(cubin, "cuobjdump", "-res-usage")
    return {
        name: int(re.search(rf"{word}:(\d+)", usage)[1]) for name, word in (("registers", "REG"), ("stack", "STACK"))
    }


@dataclasses.dataclass
class Report:
    """What the SASS of one case says."""

    case: str
    kernel: str
    tile: str
    registers: int
    stack: int
    local: int  # STL + LDL instructions
    shared: int
    tensor_core: int  # instructions of the kind that the architecture has
    wrong_tensor_core: int  # and of others
    multiplies: int  # in one warp's tensor-core instructions
    async_copies: int  # LDGSTS (cp.async)
    narrow_loads: int  # 2-byte global loads
    instructions: int
    philox: int  # integer multiplies by the Philox constants; 0 without dropout
    loops: int  # copies of the loop over matmuls
    triton: str  # the compiler's version

    @property
    def elements(self) -> float:
        """Of a tile, those of a thread."""
        size = dict(re.findall(r"(M|N|num_warps)(\d+)", self.tile))
        return int(size["M"]) * int(size["N"]) / (32 * int(size["num_warps"]))

    def faults(self, case: Case | AttentionCase, matmul: bool, min_shared: int, multiplies: float) -> list[str]:
        """matmul: tensor cores are expected. min_shared, multiplies: what the tile needs."""
        faults = []
        launch = f"{self.case} {self.kernel}"
        allowed = allowed_stack(launch, self.triton)
        if allowed is not None and (self.stack > allowed or (self.local and not allowed)):
            faults.append(f"spills: {self.stack} B of stack, {self.local} local loads and stores")
        if self.shared > case.shared:
            faults.append(f"{self.shared} B of shared memory, the GPU has {case.shared}")
        other = self.wrong_tensor_core and ALLOWED_HMMA.match(launch)
        if matmul and not self.tensor_core and not other:
            faults.append("no tensor-core instruction")
        if matmul and self.wrong_tensor_core and not other:
            faults.append(f"{self.wrong_tensor_core} other instructions where {tensor_core_of(case.arch)} was meant")
        if matmul and self.multiplies > multiplies and not ALLOWED_TWICE.match(launch):
            faults.append(f"{self.multiplies} multiplies of the tensor cores a warp where {multiplies:.0f} would do")
        narrow = [side for side in re.findall(r"\b[MN]\d+", self.tile) if int(side[1:]) < 64]
        if case.arch == 90 and self.tensor_core and narrow:  # triton#11366
            faults.append(f"HGMMA in a tile of {narrow[0]}: matmuls narrower than 64 have failed")
        if matmul and not case.unaligned and (min_shared or " K" in self.tile):
            if not self.async_copies:
                faults.append("no asynchronous copy in the main loop")
            if self.shared < min_shared:
                faults.append(
                    f"{self.shared} B of shared memory: less than stages x tile = {min_shared}, not pipelined"
                )
        samplings = (
            self.philox / 20 / (self.elements / 8) if " K" in self.tile else 0
        )  # 20 multiplies a call, for 8 elements
        if samplings > 1.5:
            faults.append(f"the mask is drawn {samplings:.1f} times")
        if self.narrow_loads and not case.unaligned and case.kind != "keys":  # a row of int8, two columns per thread
            faults.append(f"{self.narrow_loads} two-byte global loads on the aligned path")
        return faults


TENSOR_CORES = {"HMMA": r"[HI]MMA", "HGMMA": r"[HQ]GMMA", "UTCHMMA": r"UTC\w*MMA"}  # instructions of one kind


def tensor_core_of(arch: int) -> str:
    """The kind that an architecture's matmuls should take: sm_120 has neither sm_90's nor sm_100's."""
    return {9: "HGMMA", 10: "UTCHMMA"}.get(arch // 10, "HMMA")


def read_cubin(compiled: Compiled) -> dict:
    """Registers, stack, shared memory and instruction counts, from the SASS."""
    cubin = compiled.assemble()
    sass = inspect_cubin(cubin, "nvdisasm", "-c")
    mnemonics = INSTRUCTION.findall(sass)

    # four warps share an HGMMA, one warp makes an HMMA, whose 16816 is 16 x 8 x 16; a UTCHMMA does not name its shape
    shapes = [(4, *shape) for shape in re.findall(r"HGMMA\.(\d+)x(\d+)x(\d+)", sass)]
    shapes += [(1, 16, 8, k) for k in re.findall(r"HMMA\.168(\d+)", sass)]

    def count(pattern):
        return sum(bool(re.match(pattern, m)) for m in mnemonics)

    return dict(
        **resources(cubin),
        local=count(r"(STL|LDL)\b"),
        shared=compiled.shared,
        tensor_cores={kind: count(pattern) for kind, pattern in TENSOR_CORES.items()},
        multiplies=sum(int(m) * int(n) * int(k) // warps for warps, m, n, k in shapes),
        async_copies=count("LDGSTS"),
        narrow_loads=count(r"LDG\S*\.[US]16"),
        instructions=len(mnemonics),
        philox=len(PHILOX_MULTIPLY.findall(sass)),
    )


def staged_bytes(kernel: str, options: dict, itemsize: int) -> int:
    """Least shared memory of a pipelined main loop; 0 if the kernel has no such loop.

    The last stage may still be in registers, so shared memory holds at least stages - 1 tiles.
    """
    stages = options.get("num_stages", 1)
    if kernel in ATTENTION:  # two operands of one shape stream by: k and v, or q and do
        rows = options["BLOCK_M" if kernel == "_attn_dkdv_kernel" else "BLOCK_N"]
        rows += options["BLOCK_M"] if kernel == "_attn_dmask_kernel" else 0  # q and do, too
        return 2 * rows * options["HEAD_D"] * itemsize * (stages - 1)
    if kernel == "_experts_dw_kernel":  # whose loads, of indices and of the rows that these name, share the stages
        stages /= 2
    if "BLOCK_K" in options:
        return int((options["BLOCK_M"] + options["BLOCK_N"]) * options["BLOCK_K"] * itemsize * (stages - 1))
    return 0


def loops_of(kernel: str, options: dict) -> int:
    """Copies of the loop over matmuls in a kernel's SASS: in attention one with an edge mask and one without."""
    if kernel == "_attn_fwd_kernel":  # a window has a second edge; at 256 dims one loop does all
        return 2 if not options["LEFT"] else 3 if options["HEAD_D"] <= 128 else 1
    if kernel == "_attn_dq_kernel":
        return 1 + options["PHASED"]
    return 1 + (kernel == "_attn_dkdv_kernel" and options["PHASED"] and options["RIGHT"])  # columns need no mask there


def needed_multiplies(kernel: str, options: dict) -> float:
    """Multiplies per warp in the SASS of a tile's matmuls, if each matmul is computed once."""
    count = loops_of(kernel, options) * MATMULS.get(kernel, 0)
    length = options.get("HEAD_D") or options.get("BLOCK_K", 0)
    return count * options.get("BLOCK_M", 0) * options.get("BLOCK_N", 0) * length / options["num_warps"]


def loses_constants(kernel, args: tuple) -> bool:
    """Has the kernel a `return` under an `if`, and a tuple in a tuple among its arguments?

    Triton 3.6 then forgets which members of the inner tuple are constants, and a stride of 1 becomes None.
    """
    nested = any(isinstance(member, tuple) for arg in args if isinstance(arg, tuple) for member in arg)
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    branches = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    return nested and any(isinstance(node, ast.Return) for branch in branches for node in ast.walk(branch))


def check(case: Case | AttentionCase) -> list[tuple[Report, list[str]]]:
    """Compile one case; a report and its faults for every kernel that it launches."""
    results = []
    caught = catch_launches(case.launch, case.arch)
    if not caught:
        raise RuntimeError(f"{case.name}: nothing was launched")
    for kernel, args, kwargs in caught:
        read = read_cubin(compile_launch(kernel, args, kwargs, case.arch))
        tensor_cores = read.pop("tensor_cores")
        report = Report(
            case=case.name,
            kernel=kernel.fn.__name__,
            tile=" ".join(f"{key.removeprefix('BLOCK_')}{kwargs[key]}" for key in TILE_KEYS if key in kwargs),
            tensor_core=tensor_cores.pop(tensor_core_of(case.arch)),
            wrong_tensor_core=sum(tensor_cores.values()),
            loops=loops_of(kernel.fn.__name__, kwargs),
            triton=version("triton"),
            **read,
        )
        itemsize = 4 if case.dtype == "float32" else 2
        matmul = "BLOCK_K" in kwargs or report.kernel in ATTENTION
        matmul = matmul and "ieee" not in case.kind  # no tensor core computes these
        takes = staged_bytes(report.kernel, kwargs, itemsize), needed_multiplies(report.kernel, kwargs)
        faults = report.faults(case, matmul, *takes)
        if loses_constants(kernel, args):
            faults.append("an early return beside a nested tuple: Triton 3.6 loses the constants in that")
        results.append((report, faults))
    return results


def _check_or_error(case: Case | AttentionCase):
    try:
        return case, check(case), None
    except Exception as error:  # a kernel that does not compile is a finding, and the others still want their turn
        return case, [], f"{type(error).__name__}: {error}"


def run(cases: list[Case | AttentionCase], workers: int = 2, progress: bool = True) -> tuple[list[Report], list[str]]:
    """All reports, and one line for every fault. Workers are spawned: a forked child would inherit the interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("the code-generation check compiles kernels: run it in a process without TRITON_INTERPRET=1")
    reports, faults = [], []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done, (case, results, error) in enumerate(pool.map(_check_or_error, cases, chunksize=4), 1):
            new = [f"{case.name}: {error}"] if error else []
            for report, report_faults in results:
                reports.append(report)
                new += [f"{report.case} ({report.kernel}): {fault}" for fault in report_faults]
            faults += new
            if progress and (new or done % 20 == 0 or done == len(cases)):
                lines = [*new, f"{done}/{len(cases)} compiled, {len(faults)} faults"]
                print("\n".join(lines), file=sys.stderr, flush=True)
    return reports, faults
