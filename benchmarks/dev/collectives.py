"""The collectives of tensor parallelism and what they run under, by the order of events; no time is measured.

    PYTHONPATH=tests python -m benchmarks.dev.collectives [--steps] [MODE]

Backward of two Llama layers (width 32, 8 heads, 3 x 128 tokens) on 2 and 4 gloo processes, with and without sequence
parallelism, at a recompute mode ("full" by default): each collective with what lies between its start and its wait, or with
--steps everything in order.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from support.timeline import Timeline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import ckptkern
from ckptkern.ops.registration.functions import bodies_seen
from ckptkern.parallel import TensorParallel


def run(rank: int, ranks: int, store: str, mode: str, steps: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for sequence in (False, True):
        model = nn.Sequential(*(ckptkern.nn.LlamaDecoderLayer(32, 8, 4, 96, recompute=mode) for _ in range(2)))
        parallelize_module(model, mesh, {"*": TensorParallel(sequence_parallel=sequence)})
        x = torch.randn(3, 128 // ranks if sequence else 128, 32, requires_grad=True)
        y = model(x)
        with bodies_seen(), Timeline() as timeline:
            y.sum().backward()
        if rank == 0:
            print(f"\n{ranks} ranks, sequence_parallel={sequence}, recompute={mode!r}")
            print(timeline if steps else "\n".join(map(str, timeline.collectives)))
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    modes = [one for one in arguments if one != "--steps"]
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            given = ranks, f"{folder}/store", *(modes or ["full"]), "--steps" in arguments
            torch.multiprocessing.spawn(run, given, ranks)


if __name__ == "__main__":
    main(sys.argv[1:])
