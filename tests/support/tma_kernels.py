"""Kernels that move tiles by TMA, compiled for sm_90: tma_kernels.py FILE writes them there as JSON, for test_tma.py.

It runs in a process of its own, without TRITON_INTERPRET, because a kernel decorated under that cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.codegen.compiling import compile_launch

# Triton 3.9 has other names for both, and the old ones raise when a kernel is compiled.
async_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
async_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
M, N, K, HEADS = 200, 72, 152, 2
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@triton.jit
def matmul(
    a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPECIALIZE: tl.constexpr
):
    """c = a b^T by descriptors of tiles; a program takes every num_programs-th tile."""
    columns = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), warp_specialize=SPECIALIZE):
        row, column = tile // columns * BLOCK_M, tile % columns * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            total = tl.dot(a.load([row, k]), b.load([column, k]).T, total)
        c.store([row, column], total.to(c.dtype))


@triton.jit
def described(a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of c = a b^T, by descriptors that the kernel makes."""
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    a = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    c = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        total = tl.dot(a.load([row, k]), b.load([column, k]).T, total)
    c.store([row, column], total.to(c.dtype))


@triton.jit
def attention(q, k, v, o, T, scale, BLOCK: tl.constexpr, WIDTH: tl.constexpr, SPECIALIZE: tl.constexpr):
    """A tile of softmax(scale q k^T) v of one head, with 2 as the base, by descriptors of [heads, rows, WIDTH]."""
    row, head = tl.program_id(0) * BLOCK, tl.program_id(1)
    queries = q.load([head, row, 0]).reshape(BLOCK, WIDTH)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK, WIDTH), tl.float32)
    for start in tl.range(0, T, BLOCK, warp_specialize=SPECIALIZE):
        scores = tl.dot(queries, k.load([head, start, 0]).reshape(BLOCK, WIDTH).T) * scale
        scores = tl.where((start + tl.arange(0, BLOCK) < T)[None, :], scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        p, shrink = tl.exp2(scores - new[:, None]), tl.exp2(best - new)
        weight = weight * shrink + tl.sum(p, 1)
        values = v.load([head, start, 0]).reshape(BLOCK, WIDTH)
        total = tl.dot(p.to(v.dtype), values, total * shrink[:, None])
        best = new
    o.store([head, row, 0], (total / weight[:, None]).to(o.dtype).reshape(1, BLOCK, WIDTH))


@gluon.jit
def produce(a, b, a_tiles, b_tiles, ready, empty, M, N, K):
    """Loads the tiles of a and b, in the order in which `consume` takes them, as far ahead as there is room."""
    STAGES: gl.constexpr = b_tiles.type.shape[0]
    GROUPS: gl.constexpr = a_tiles.type.shape[0] // STAGES
    BLOCK_M: gl.constexpr = a.block_type.shape[0]
    columns = gl.cdiv(N, b.block_type.shape[0])
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, GROUPS * BLOCK_M) * columns, gl.num_programs(0)):
        row, column = tile // columns * GROUPS * BLOCK_M, tile % columns * b.block_type.shape[0]
        for k in range(0, K, a.block_type.shape[1]):
            stage, phase = step % STAGES, step // STAGES & 1
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(ready.index(stage), GROUPS * a.block_type.nbytes + b.block_type.nbytes)
            for group in gl.static_range(GROUPS):
                place = a_tiles.index(stage * GROUPS + group)
                async_load(a, [row + group * BLOCK_M, k], ready.index(stage), place)
            async_load(b, [column, k], ready.index(stage), b_tiles.index(stage))
            step += 1


@gluon.jit
def consume(c, a_tiles, b_tiles, c_tile, ready, empty, group, M, N, K):
    """Multiplies what `produce` loads; a tile of c is stored while the next one is computed."""
    STAGES: gl.constexpr = b_tiles.type.shape[0]
    GROUPS: gl.constexpr = a_tiles.type.shape[0] // STAGES
    BLOCK_M: gl.constexpr = c.block_type.shape[0]
    BLOCK_N: gl.constexpr = c.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    columns = gl.cdiv(N, BLOCK_N)
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, GROUPS * BLOCK_M) * columns, gl.num_programs(0)):
        total = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        for _ in range(0, K, a_tiles.type.shape[2]):
            stage, phase = step % STAGES, step // STAGES & 1
            mbarrier.wait(ready.index(stage), phase)
            a_tile = a_tiles.index(stage * GROUPS + group)
            total = hopper.warpgroup_mma(a_tile, b_tiles.index(stage).permute((1, 0)), total)
            mbarrier.arrive(empty.index(stage))
            step += 1
        tma.store_wait(0)
        gl.barrier()
        c_tile.index(group).store(total.to(c.dtype))
        hopper.fence_async_shared()
        gl.barrier()
        row = (tile // columns * GROUPS + group) * BLOCK_M
        async_store(c, [row, tile % columns * BLOCK_N], c_tile.index(group))
    tma.store_wait(0)


@gluon.jit
def specialized(a, b, c, M, N, K, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """matmul by one warp that loads and one or two warp groups that multiply, which get most of the registers."""
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES * GROUPS] + a.block_type.shape, a.layout)  # noqa: RUF005
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)  # noqa: RUF005
    c_tile = gl.allocate_shared_memory(c.dtype, [GROUPS] + c.block_type.shape, c.layout)  # noqa: RUF005
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    first = (c, a_tiles, b_tiles, c_tile, ready, empty, 0, M, N, K)
    second = (c, a_tiles, b_tiles, c_tile, ready, empty, 1, M, N, K)
    producer = (a, b, a_tiles, b_tiles, ready, empty, M, N, K)
    if GROUPS == 1:
        gl.warp_specialize([(consume, first), (produce, producer)], [1], [24])
    else:
        gl.warp_specialize([(consume, first), (consume, second), (produce, producer)], [4, 1], [216, 24])


def compiled(kernel, *args, **options) -> dict:
    """What emulator.run needs of a kernel, compiled for these arguments."""
    result = compile_launch(kernel, args, options, 90)
    return {"ptx": result.ptx, "shared": result.shared, "scratch": result.scratch, "maps": result.maps}


def descriptors(dtype: torch.dtype, *boxes: list[int], gluon: bool = False) -> list:
    """Those of a, b and c, of boxes that Gluon wants the layouts of."""
    found = []
    for shape, box in zip(((M, K), (N, K), (M, N)), boxes, strict=True):
        tensor = torch.zeros(shape, dtype=dtype)
        layout = [gl.NVMMASharedLayout.get_default_for(box, getattr(gl, str(dtype)[6:]))] if gluon else []
        found.append((GluonDescriptor if gluon else TensorDescriptor).from_tensor(tensor, box, *layout))
    return found


def kernels() -> dict[str, dict]:
    """`alike`: warp_specialize, by which Triton 3.7.1 has two warp groups compute and store the same tile."""
    found = {}
    for name, dtype in DTYPES.items():
        unfused = descriptors(dtype, [64, 32], [64, 32], [64, 64])
        layouts = descriptors(dtype, [64, 32], [64, 32], [64, 64], gluon=True)
        wide = descriptors(dtype, [64, 64], [64, 64], [64, 64], gluon=True)
        found[f"matmul {name}"] = compiled(matmul, *unfused, M, N, K, 64, 64, 32, False, num_warps=4, num_stages=3)
        found[f"specialized {name}"] = compiled(specialized, *layouts, M, N, K, 3, 1, num_warps=4)
        found[f"two groups {name}"] = compiled(specialized, *wide, M, N, K, 2, 2, num_warps=4)
        tensors = (descriptor.base for descriptor in unfused)
        found[f"described {name}"] = compiled(described, *tensors, M, N, K, 64, 64, 32, num_warps=4, num_stages=3)
        heads = [TensorDescriptor.from_tensor(torch.zeros(HEADS, M, 64, dtype=dtype), [1, 64, 64])] * 4
        found[f"attention {name}"] = compiled(attention, *heads, M, 0.1, 64, 64, False, num_warps=4, num_stages=2)
    found["matmul alike"] = compiled(matmul, *unfused, M, N, K, 64, 64, 32, True, num_warps=4, num_stages=3)
    found["attention alike"] = compiled(attention, *heads, M, 0.1, 64, 64, True, num_warps=4, num_stages=2)
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(kernels()))
