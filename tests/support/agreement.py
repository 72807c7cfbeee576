"""Compiled kernels on the emulator against Triton's interpreter, output by output: agreement.py OUT.csv [REGEX of cases]

Equal bits, or how many elements differ, by how much of the largest, and why. A difference that its reason does not explain is
an error. benchmarks/results/compile/interpreter.csv has all cases.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS)]
sys.path.append(str(TESTS.parent))  # for the tools that are not installed; last, as in conftest.py
HEADER = (
    "kernel",
    "architecture",
    "case",
    "output",
    "elements",
    "that differ",
    "largest difference / largest value",
    "reason",
)
# reason -> the difference that it explains, as a part of the largest value
TF32 = "operands of matmuls rounded to TF32, which the interpreter does not know", 2.0**-6
CHAIN = "sums of matmuls in another order, rounded to 16 bits", 2.0**-7
ATTENTION = "the running maximum moves elsewhere in a tile of another width; 16 bits", 2.0**-7
WIDE = "float32 sums in another order; ex2, rcp, rsqrt and log to two units", 2.0**-18
NO_PRODUCT = re.compile("(act|norm|heads)_(fwd|bwd)|(gated_)?hidden_grad|dropout")


def explained(op: str, case: str) -> tuple[str, float]:
    if "bfloat16" in case or "float16" in case:
        return ATTENTION if op.startswith("attn") else CHAIN
    return WIDE if "ieee" in case or NO_PRODUCT.fullmatch(op) else TF32


def default_tiles():
    """tests/triton_kernels/test_default_tiles.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("default_tiles", TESTS / "triton_kernels" / "test_default_tiles.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(chosen: str, arch: int) -> dict[str, dict[str, torch.Tensor]]:
    """Of every case; by the interpreter where it is on, or as compiled for `arch`."""
    import contextlib
    import dataclasses

    import triton
    from emulator.emulated import emulated
    from support.kernel_cases import Small, named

    from ckptkern.triton_kernels.tile import SMS

    tiles, found = default_tiles(), {}
    for case in tiles.CASES:
        if not re.search(chosen, case.name) or ("narrow" in case.kind and arch != 80):
            continue
        torch.manual_seed(0)
        with contextlib.nullcontext() if triton.knobs.runtime.interpret else emulated(arch):
            before = SMS[arch]
            SMS[arch] = before if case.kind == "few" else 1
            found[case.name] = named(dataclasses.replace(case, arch=arch).launch(Small("cpu")))
            SMS[arch] = before
        print(f"{len(found)} {case.name}", file=sys.stderr, flush=True)
    return found


def rows(ours: dict, interpreted: dict, arch: int):
    for name, outputs in ours.items():
        op, _, *rest = name.split("/")
        for output, value in outputs.items():
            if output.endswith("nothing"):
                continue
            other = interpreted[name][output]
            one, two = value.double(), other.double()
            differ = (one != two) & ~(one.isnan() & two.isnan())
            largest = two.abs().max().item() if two.numel() else 0.0
            size = (one - two).abs()[differ].max().item() / (largest or 1.0) if differ.any() else 0.0
            why, most = explained(op, "/".join(rest)) if differ.any() else ("", 0.0)
            if not size <= most:
                raise SystemExit(
                    f"{name}, output {output}: off by {size:.1e} of the largest, more than {most:.1e}: {why}"
                )
            yield op, f"sm_{arch}", "/".join(rest), output, value.numel(), int(differ.sum()), f"{size:.1e}", why


def main(path: str, chosen: str = "") -> None:
    with tempfile.TemporaryDirectory() as folder, open(path, "w", newline="") as file:
        saved = f"{folder}/interpreted.pt"
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        subprocess.run([sys.executable, __file__, saved, chosen], env=environment, check=True)
        interpreted = torch.load(saved)
        writer = csv.writer(file)
        writer.writerow(HEADER)
        for arch in (80, 90):
            writer.writerows(rows(results(chosen, arch), interpreted, arch))


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    if os.environ.get("TRITON_INTERPRET") == "1":
        torch.save(results((*sys.argv, "")[2], 80), sys.argv[1])
    else:
        main(*sys.argv[1:])
