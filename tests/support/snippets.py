"""Kernels of a few lines of PTX, for tests."""

from __future__ import annotations

import emulator
import numpy as np

BASE = 1 << 40

TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
{parameters}
)
.reqntid {threads}
{{
	.reg .pred 	%p<20>;
	.reg .b16 	%rs<40>;
	.reg .b32 	%r<80>;
	.reg .b64 	%rd<40>;
	.loc	1 7 0
{body}
	ret;
}}
	.file	1 "kernel.py"
"""


def ptx_of(body: str, parameters: int = 1, threads: int = 64) -> str:
    """A kernel of these statements, with pointers kernel_param_0, ... in %rd1, ..., and the thread in %r1."""
    pointers = [f"\t.param .u64 .ptr .global .align 1 kernel_param_{n}" for n in range(parameters)]
    declared = ",\n".join(pointers)
    head = [f"ld.param.b64 %rd{n + 1}, [kernel_param_{n}];" for n in range(parameters)] + ["mov.u32 %r1, %tid.x;"]
    lines = [line.strip() for line in (*head, *body.strip().splitlines())]
    return TEXT.format(parameters=declared, threads=threads, body="\n".join(f"\t{line}" for line in lines))


def run(
    body: str,
    *arrays: np.ndarray,
    threads: int = 64,
    grid: tuple = (1,),
    shared: int = 4096,
    allowed=None,
    programs=None,
):
    """Runs them on arrays, which keep what is written to them."""
    tensors, addresses = [], []
    for n, array in enumerate(arrays):
        addresses.append(np.uint64(BASE * (n + 1)))
        tensors.append(emulator.Tensor(f"tensor {n}", BASE * (n + 1), array.reshape(-1).view(np.uint8), allowed))
    return emulator.run(ptx_of(body, len(arrays), threads), grid, shared, addresses, tensors, programs)
