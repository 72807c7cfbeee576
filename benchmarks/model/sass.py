"""What the SASS of a kernel with matmuls says of its time: programs per SM, and what is issued where."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks.codegen.compiling import compile_launch, specialize
from benchmarks.codegen.sass import INSTRUCTION, inspect_cubin, resources

from .trace import Caught

LABEL = re.compile(r"^\s*(\.L_x_\d+):")
TARGET = re.compile(r"\bBRA\b.*?(\.L_x_\d+)")
TENSOR_CORE = re.compile(r"[HIQ]G?MMA|UTC\w*MMA")
INTEGER = {
    "IABS", "IADD3", "IMNMX", "ISETP", "LEA", "LOP", "LOP3", "P2R", "PRMT", "R2P", "SEL", "SHF", "VIADD", "VIMNMX"
}  # fmt: skip
REGISTERS, THREADS, RESERVED = (
    65536,
    2048,
    1024,
)  # of an SM; bytes of shared memory per block besides its own


def issue_cycles(mnemonics: Iterable[str]) -> int:
    """Cycles in which a scheduler issues these for a warp: one each, but special functions, integers and conversions to 16 bit
    have a quarter, a sublayer and a half of the lanes (the CUDA programming guide's table of arithmetic throughput)."""
    count = Counter(mnemonic.split(".")[0] for mnemonic in mnemonics)
    special, narrowing = count["MUFU"], count["F2FP"] + count["F2F"]
    return max(sum(count.values()), 8 * special, 2 * sum(count[name] for name in INTEGER), 2 * narrowing)


@dataclasses.dataclass(frozen=True)
class Code:
    """A kernel as compiled. Cycles are a scheduler's, for one warp.

    loops     of each innermost loop with tensor-core instructions, one pass
    outside   of all other instructions: prologue and epilogue
    """

    registers: int
    stack: int
    shared: int
    warps: int
    loops: tuple[int, ...]
    outside: int

    def programs(self, shared: int) -> int:
        """Programs on an SM with that much shared memory."""
        allocated = -(-self.registers // 8) * 8 * 32 * self.warps
        return max(1, min(REGISTERS // allocated, shared // (self.shared + RESERVED), THREADS // (32 * self.warps)))


def innermost_loops(sass: str) -> tuple[list[list[str]], list[str]]:
    """(mnemonics of each innermost loop with tensor-core instructions, all other mnemonics) of nvdisasm's text."""
    mnemonics, labels, jumps = [], {}, []
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(mnemonics)
        elif found := INSTRUCTION.match(line):
            if (target := TARGET.search(line)) and target[1] in labels:
                jumps.append((labels[target[1]], len(mnemonics) + 1))
            mnemonics.append(found[1])
    spans = [span for span in jumps if any(map(TENSOR_CORE.match, mnemonics[slice(*span)]))]
    # a jump back into a loop from behind it is the end of a wait's own loop, which the assembler moves out of line
    spans = [span for span in spans if not any(start < span[0] < end < span[1] for start, end in spans)]
    inner = sorted({a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)})
    inside = {place for span in inner for place in range(*span)}
    return [mnemonics[slice(*span)] for span in inner], [m for i, m in enumerate(mnemonics) if i not in inside]


def read(kernel, args: tuple, kwargs: dict, arch: int) -> Code:
    """Compiles a launch, or takes what an earlier run wrote into Triton's cache for the same PTX."""
    import triton

    compiled = compile_launch(kernel, args, kwargs, arch)
    text = f"{arch} {triton.__version__} {kwargs.get('maxnreg')} {compiled.ptx}"
    path = Path(triton.knobs.cache.dir) / "sass" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    if not path.exists():
        cubin = compiled.assemble()
        loops, outside = innermost_loops(inspect_cubin(cubin, "nvdisasm", "-c"))
        code = Code(
            **resources(cubin), shared=compiled.shared, warps=kwargs["num_warps"], loops=tuple(map(issue_cycles, loops)),
            outside=issue_cycles(outside),
        )  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(dataclasses.asdict(code)))
        whole.replace(path)
    found = json.loads(path.read_text())
    return Code(**found | {"loops": tuple(found["loops"])})


def key(caught: Caught, arch: int) -> str:
    """Equal for launches with the same SASS."""
    return specialize(caught.kernel, caught.args, caught.kwargs, arch).key


def _read_by_name(module: str, name: str, args: tuple, kwargs: dict, arch: int) -> Code:
    return read(getattr(importlib.import_module(module), name), args, kwargs, arch)


def read_all(launches: dict[str, Caught], arch: int, workers: int = 2) -> dict[str, Code]:
    """The code of every launch by its key. Workers are spawned, as the code-generation check's are, and report progress
    on stderr.

    Raises RuntimeError where Triton interprets: a kernel that was decorated so cannot be compiled.
    """
    if not launches:
        return {}
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("the model compiles kernels: run it in a process without TRITON_INTERPRET=1")
    found: dict[str, Code] = {}
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        jobs = {
            pool.submit(_read_by_name, one.kernel.fn.__module__, one.name, one.args, one.kwargs, arch): name
            for name, one in launches.items()
        }
        for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            found[jobs[job]] = job.result()
            if done % 10 == 0 or done == len(jobs):
                print(f"{done}/{len(jobs)} kernels read", file=sys.stderr, flush=True)
    return found
